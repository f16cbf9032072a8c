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
(Algorithm 3).
"""

from collections.abc import Callable, Iterator
from functools import lru_cache

from wallfacer_dt.algorithms.blocks import Answers
from wallfacer_dt.algorithms.holdings import Holdings
from wallfacer_dt.algorithms.published import published
from wallfacer_dt.algorithms.segments import Sees
from wallfacer_dt.algorithms.sequences import Sequences, hops
from wallfacer_dt.algorithms.steps import Attend, Gather, Schedule, Side, Start, Step
from wallfacer_dt.algorithms.two_dimensional import two_dimensional
from wallfacer_dt.layout import length_of
from wallfacer_dt.mesh import Coordinate

_STEPS: dict[str, Callable[[Holdings], Iterator[Step]]] = {"2d": two_dimensional, "published": published}


# A schedule of many documents is megabytes, and every packing is a schedule of its own.
@lru_cache(maxsize=64)
def make_schedule(
    place: Coordinate,
    sequences: Sequences,
    *,
    schedule: str,
    resident: Side,
    backward: bool,
) -> Schedule:
    """The schedule of one rank, for one group of heads.

    Args:
        place: the rank's coordinate.
        sequences: what is attended, by whom it is held.
        schedule: its name; published, team * team must divide ring * team.
        resident: the side that stays.
        backward: something is computed for both sides, and not for queries only.

    Returns:
        The schedule; equal arguments give the same object.
    """
    offsets = hops(place.axes, sequences, resident)
    return _make(place, sequences, offsets, None, schedule=schedule, resident=resident, backward=backward)


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
    """:func:`make_schedule` under a mask that is asked; kept with its answers.

    Args:
        place: as there.
        sequences: as there.
        answers: about what this rank computes.
        offsets: the distances round the ring, other than 0, at which some rank needs a rotating block, ascending.
        schedule: as there.
        resident: as there.
        backward: as there.

    Returns:
        The schedule.
    """
    key = (place, sequences, offsets, schedule, resident, backward)
    if key not in answers.kept:
        how = {"schedule": schedule, "resident": resident, "backward": backward}
        answers.kept[key] = _make(place, sequences, offsets, answers.sees, **how)
    return answers.kept[key]


def needed_offsets(schedule: Schedule) -> tuple[int, ...]:
    """Of a schedule that visits every block, at which distances other than 0 there is something to compute."""
    return tuple(sorted({step.block for step in schedule.steps if isinstance(step, Attend) and step.work} - {0}))


def _make(
    place: Coordinate,
    sequences: Sequences,
    offsets: tuple[int, ...],
    sees: Sees | None,
    *,
    schedule: str,
    resident: Side,
    backward: bool,
) -> Schedule:
    rotating: Side = "kv" if resident == "q" else "q"
    held = {side: sequences.inner(side, place) for side in (resident, rotating)}
    holdings = Holdings(place, sequences, held, resident, backward, offsets, sees)
    # Without a team there is nothing to gather and nothing to place: the published schedule is a ring.
    steps = tuple(_STEPS["2d" if place.team == 1 else schedule](holdings))
    sizes = {side: list(map(length_of, held[side][0])) for side in (resident, rotating)}
    teams = [sum(sizes[rotating][first : first + place.team]) for first in range(0, len(sizes[rotating]), place.team)]
    return Schedule(
        steps,
        resident,
        "exchange" if Start(Gather(rotating)) in steps else "block",
        holdings.put_together(resident, exclude=place.team_rank),
        holdings.put_together(rotating),
        (max(sizes["q"]), max(sizes["kv"])),
        max(teams),
    )
