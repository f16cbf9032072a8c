"""Schedules: what one rank of a ring and a team sends, computes and waits for, as data made on the host.

Attention pairs queries with keys. One side is *resident*: gathered in the team, it stays, and what is computed for
it on each rank is a partial result that goes back to its owner in one exchange. The other side *moves* round the ring
in blocks; what is computed for a rotating block is carried along behind it. Either side may stay. A forward computes
something for queries only: where keys stay nothing is exchanged, and where they move nothing is carried. So a team
without ring whose keys stay is an all-gather of keys and values.

``2d``: every rank's own block moves round its ring ``{(., m)}``; the R blocks of a ring are seen after R - 1 hops,
and a team together has seen every key. Where a mask hides blocks at some distance from all ranks alike, these hops
are left out: what remains is visited outwards from oneself, first one way round the ring and then the other, so that a
window sends no further than it reaches (a halo). ``published``: WallFacer's Algorithms 1 to 3. Both sides are gathered
in the team, the rotating side's copies are placed (Algorithm 2) so that a ring needs only P / C^2 ranks, and hop there
(Algorithm 3). ``rings``: as 2d, with as many bytes, but the resident side goes round the team in a ring of its own, one
member's rows at a time, and what is computed for them goes straight back: for teams whose links are slow, where a rank
would wait for a gather, and for the exchange at the end.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Literal, TypeGuard

from wallfacer_dt.agreement.meeting import kept
from wallfacer_dt.algorithms.blocks import Answers
from wallfacer_dt.algorithms.holdings import Holdings, Ranks
from wallfacer_dt.algorithms.published import published
from wallfacer_dt.algorithms.rings import rings
from wallfacer_dt.algorithms.segments import Sees, Work
from wallfacer_dt.algorithms.sequences import Sequences, hops
from wallfacer_dt.algorithms.steps import SIDES, Attend, Exchange, Gather, Hop, Parts, Schedule, Side, Start, Step, Wait
from wallfacer_dt.algorithms.two_dimensional import two_dimensional
from wallfacer_dt.mesh import Coordinate

ScheduleName = Literal["2d", "rings", "published"]
SCHEDULES: dict[str, Callable[[Holdings], Iterator[Step]]] = {
    "2d": two_dimensional, "rings": rings, "published": published,
}  # fmt: skip


def check_schedule(schedule: str, ring: int, team: int) -> None:
    """Refuse (ValueError) a schedule that does not exist, or does not fit the mesh."""
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule must be one of {tuple(SCHEDULES)}, got {schedule!r}")
    if schedule == "published" and ring % team:
        raise ValueError(
            f"schedule='published' needs team * team to divide the ranks, got team {team} on {ring * team} ranks; "
            "choose another team size, or schedule='2d'"
        )


# How many are kept; under masks that are asked, with each one's answers. A schedule of many documents is megabytes, and
# every packing is a schedule of its own.
_KEPT = 64


@lru_cache(_KEPT)
def make_schedule(
    place: Coordinate, sequences: Sequences, *, schedule: str, resident: Side, backward: bool
) -> Schedule:
    """The schedule of one rank, for one group of heads; equal arguments give the same object."""
    offsets, works = hops(place.axes, sequences, resident), _works(place, sequences, resident)
    return _made(place, sequences, schedule, resident, backward, offsets, works=works)


@lru_cache(_KEPT)
def _works(place: Coordinate, sequences: Sequences, resident: Side) -> dict[tuple[Ranks, Ranks], Work]:
    """What has been planned to be computed: of thousands of documents it is what takes time, and both ways alike."""
    del place, sequences, resident
    return {}


def make_asked_schedule(
    place: Coordinate,
    sequences: Sequences,
    answers: Answers,
    offsets: tuple[int, ...],
    *,
    schedule: str,
    resident: Side,
    backward: bool,
) -> Schedule:
    """:func:`make_schedule` under a mask that is asked; kept with its answers, which are about what the rank computes.

    ``offsets`` are the distances round the ring, other than 0, at which some rank needs a rotating block, ascending.
    """
    key = (place, sequences, schedule, resident, backward, offsets)
    return kept(answers.kept, key, _KEPT, lambda: _made(*key, answers.sees))


def outline(
    place: Coordinate, sequences: Sequences, schedule: str, resident: Side, backward: bool, offsets: tuple[int, ...]
) -> Schedule:
    """A schedule's transfers, without what is computed between them, which takes time to plan.

    All ranks have the same transfers but for whom they send to and receive from. So ``place`` may be many ranks at
    once, with arrays in place of numbers, as ``to`` and ``source`` of its transfers then are.
    """
    return _made(place, sequences, schedule, resident, backward, offsets, is_planned=False)


def needed_offsets(schedule: Schedule) -> tuple[int, ...]:
    """Of a schedule that visits every block, at which distances other than 0 there is something to compute."""
    return tuple(sorted({step.block for step in schedule.steps if isinstance(step, Attend) and step.work} - {0}))


def _made(
    place: Coordinate,
    sequences: Sequences,
    schedule: str,
    resident: Side,
    backward: bool,
    offsets: tuple[int, ...],
    sees: Sees | None = None,
    *,
    works: dict[tuple[Ranks, Ranks], Work] | None = None,
    is_planned: bool = True,
) -> Schedule:
    held = {side: sequences.inner(side, place.axes) if is_planned else () for side in SIDES}
    sizes = {side: sequences.inner_sizes(side, place.axes) for side in SIDES}
    holdings = Holdings(place, resident, backward, offsets, sequences.mask, held, sees, {} if works is None else works)
    # Without a team there is nothing to gather and nothing to place: every schedule is a ring.
    steps = [*SCHEDULES["2d" if place.team == 1 else schedule](holdings)]
    rotating, is_gathered = holdings.rotating, Start(Gather(holdings.rotating)) in steps
    if not holdings.is_given(rotating):
        # A block for which something is computed is let go when that is sent on; one's own is never.
        last = {step.block: (at, step) for at, step in enumerate(steps) if isinstance(step, Attend)}
        for block, (at, step) in last.items():
            if block > 0 or is_gathered:
                steps[at] = replace(step, frees=True)
    for side in SIDES:
        given = {at: step for at, step in enumerate(steps) if _gives_to_own(step, side, resident, is_gathered)}
        for at, step in [*given.items()][-1:]:
            steps[at] = replace(step, completes=(*step.completes, side))
    teams = [sum(sizes[rotating][first : first + place.team]) for first in range(0, len(sizes[rotating]), place.team)]
    return Schedule(
        Parts.of(steps),
        resident,
        {resident: holdings.put_together(resident, exclude=place.team_rank), rotating: holdings.put_together(rotating)},
        (max(sizes["q"]), max(sizes["kv"])),
        max(teams) if is_gathered else None,
    )


def _gives_to_own(step: Step, side: Side, resident: Side, is_gathered: bool) -> TypeGuard[Attend | Wait]:
    """Whether something is combined with what was computed for one's own shard of a side."""
    match step:
        case Attend():
            return bool(step.work) and not (step.rows if side == resident else step.block or is_gathered)
        case Wait(Exchange() | Hop(partial=True, into=0)):
            return step.transfer.side == side
    return False
