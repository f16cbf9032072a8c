"""Schedules: what one rank of a ring and a team sends, computes and waits for, as data made on the host.

Attention pairs queries with keys. One side is *stationary*: gathered in the team, it stays, and what is computed for
it on each rank is a partial result that goes back to its owner in one exchange. The other side *moves* round the ring
in blocks; what is computed for a moving block is carried along behind it. Either side may stay. A forward computes
something for queries only: where keys stay nothing is exchanged, and where they move nothing is carried. So a team
without ring whose keys stay is an all-gather of keys and values.

``2d``: every rank's own block moves round its ring ``{(., m)}``; the R blocks of a ring are seen after R - 1 hops,
and a team together has seen every key. Where a mask hides blocks at some distance from all ranks alike, these hops
are left out: what remains is visited outwards from oneself, first one way round the ring and then the other, so that a
window sends no further than it reaches (a halo). ``published``: WallFacer's Algorithms 1 to 3. Both sides are gathered
in the team, the moving side's copies are placed (Algorithm 2) so that a ring needs only P / C^2 ranks, and hop there
(Algorithm 3).

Note [What hides behind what]
A transfer is started before the work it hides behind and waited for after it. Own rows of the stationary side are
computed while the others' arrive, and the others' partial results of the last block leave before one's own rows of
that block are computed. Where nothing would be left to hide the last transfer behind (the carry that brings a moving
block's gradient home, or the exchange of a team without ring), part of own rows x own block is kept for the end.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from wallfacer_dt.algorithms.blocks import Answers
from wallfacer_dt.algorithms.routes import PublishedRoute, Route
from wallfacer_dt.algorithms.segments import ByRow, Sees, Work, plan_work, split_work
from wallfacer_dt.algorithms.sequences import Sequences, hops
from wallfacer_dt.algorithms.steps import (
    CONTEXT,
    HOME,
    Attend,
    Carry,
    Exchange,
    Gather,
    Move,
    Part,
    Schedule,
    Side,
    Start,
    Step,
    Wait,
)
from wallfacer_dt.layout import Pieces, Shards, in_order, length_of
from wallfacer_dt.mesh import RING_AXIS, Coordinate
from wallfacer_dt.rows import Members


# A schedule of many documents is megabytes, and every packing is a schedule of its own.
@lru_cache(maxsize=64)
def make_schedule(
    place: Coordinate,
    sequences: Sequences,
    *,
    published: bool,
    stationary: Side,
    backward: bool,
) -> Schedule:
    """The schedule of one rank, for one group of heads.

    Args:
        place: the rank's coordinate.
        sequences: what is attended, by whom it is held.
        published: WallFacer's Algorithms 1 to 3 instead of the 2D schedule; team * team must divide ring * team.
        stationary: the side that stays.
        backward: something is computed for both sides, and not for queries only.

    Returns:
        The schedule; equal arguments give the same object.
    """
    offsets = hops(place.axes, sequences, stationary)
    return _make(place, sequences, offsets, None, published=published, stationary=stationary, backward=backward)


def make_asked_schedule(
    place: Coordinate,
    sequences: Sequences,
    answers: Answers,
    offsets: tuple[int, ...],
    *,
    published: bool,
    stationary: Side,
    backward: bool,
) -> Schedule:
    """:func:`make_schedule` under a mask that is asked; kept with its answers.

    Args:
        place: as there.
        sequences: as there.
        answers: about what this rank computes.
        offsets: the distances round the ring, other than 0, at which some rank needs a moving block, ascending.
        published: as there.
        stationary: as there.
        backward: as there.

    Returns:
        The schedule.
    """
    key = (place, sequences, offsets, published, stationary, backward)
    if key not in answers.kept:
        how = {"published": published, "stationary": stationary, "backward": backward}
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
    published: bool,
    stationary: Side,
    backward: bool,
) -> Schedule:
    # Without a team there is nothing to gather and nothing to place: the published schedule is a ring.
    published = published and place.team > 1
    moving: Side = "kv" if stationary == "q" else "q"
    held = {side: sequences.inner(side, place) for side in (stationary, moving)}
    maker = _Maker(place, sequences, held, stationary, backward, offsets, sees)
    steps = tuple(maker.published() if published else maker.two_dimensional())
    sizes = {side: list(map(length_of, held[side][0])) for side in (stationary, moving)}
    teams = [sum(sizes[moving][first : first + place.team]) for first in range(0, len(sizes[moving]), place.team)]
    return Schedule(
        steps,
        stationary,
        "exchange" if published else "block",
        maker.put_together(stationary, exclude=place.team_rank),
        maker.put_together(moving),
        (max(sizes["q"]), max(sizes["kv"])),
        max(teams),
    )


@dataclass(frozen=True, slots=True)
class _Maker:
    place: Coordinate
    sequences: Sequences
    held: dict[Side, Sequence[Shards]]
    stationary: Side
    backward: bool
    offsets: tuple[int, ...]
    sees: Sees | None

    @property
    def moving(self) -> Side:
        return "kv" if self.stationary == "q" else "q"

    def two_dimensional(self) -> Iterator[Step]:
        ring, me, has_team = self.place.ring, self.place.ring_rank, self.place.team > 1
        exchanges, carries = has_team and self._is_given(self.stationary), self._is_given(self.moving)
        gather, exchange = Gather(self.stationary), Exchange(self.stationary) if exchanges else None
        route = Route.of(ring, self.offsets)
        blocks = route.blocks

        def move(block: int) -> Move:
            return Move(self.moving, route.held_before(block), block, RING_AXIS, *self._hop(route.move(block)))

        def carry(block: int) -> Carry:
            hop = self._hop(route.carry(block))
            return Carry(self.moving, block, route.into(block), RING_AXIS, *hop, self._result)

        def held(block: int) -> ByRow:
            index = _index(self.place, (me - route.offsets[block]) % ring, self.place.team_rank)
            return self._shard(self.moving, index)

        now, later = self._own_work(held(0)), ()
        if (blocks > 1 and carries) or (blocks == 1 and exchange):
            now, later = split_work(now)

        if has_team:
            yield Start(gather)
        if blocks > 1:
            yield Start(move(1))
        yield Attend("own", self.stationary, 0, now)
        if has_team:
            yield Wait(gather)
            yield self._attend("others", 0, held(0))
            if blocks == 1 and exchange:
                yield Start(exchange)
        for block in range(1, blocks):
            yield Wait(move(block))
            last = block == blocks - 1
            if not last:
                yield Start(move(block + 1))
            yield from self._attend_all(block, held(block), exchange if last else None)
            if carries:
                if block > 1:
                    yield Wait(carry(block - 1))
                yield Start(carry(block))
        if later:
            yield Attend("own", self.stationary, 0, later)
        if exchange:
            yield Wait(exchange)
        if carries and blocks > 1:
            yield Wait(carry(blocks - 1))

    @property
    def _result(self) -> str:
        """What is computed for the moving side."""
        return f"d{self.moving}" if self.backward else "out"

    def _is_given(self, side: Side) -> bool:
        """Whether something is computed for a side."""
        return self.backward or side == "q"

    def _hop(self, shift: int) -> tuple[int, int]:
        """To whom and from whom a block goes that gets ``shift`` further round the ring."""
        ring, me = self.place.ring, self.place.ring_rank
        return (me + shift) % ring, (me - shift) % ring

    def published(self) -> Iterator[Step]:
        team = self.place.team
        me, member = self.place.ring_rank, self.place.team_rank
        ways = PublishedRoute(self.place)
        blocks = ways.blocks
        group, position = divmod(me, blocks)
        to, source = ways.next, ways.previous
        # Algorithm 2
        placed_at = _index(self.place, member * blocks + me // team, me % team)

        def move(block: int) -> Move:
            if block == 0:
                return Move(self.moving, 0, 0, CONTEXT, placed_at, ways.placed_from)
            return Move(self.moving, block - 1, block, RING_AXIS, to, source)

        def team_held(block: int) -> int:
            return (position - block) % blocks * team + member

        def carry(block: int) -> Carry:
            if block < blocks - 1:
                return Carry(self.moving, block, block + 1, RING_AXIS, to, source, self._result)
            # Home: to the member that sent the rows here in the first place, and likewise back from one's own target.
            home = _index(self.place, team_held(block), group)
            return Carry(self.moving, block, HOME, CONTEXT, home, ways.fetched_from, self._result)

        yield Start(Gather(self.moving))
        yield Start(Gather(self.stationary))
        yield Wait(Gather(self.moving))
        yield Start(move(0))
        yield Wait(Gather(self.stationary))
        yield Wait(move(0))
        exchange = Exchange(self.stationary)
        for block in range(blocks):
            last = block == blocks - 1
            if not last:
                yield Start(move(block + 1))
            yield from self._attend_all(block, self._team(self.moving, team_held(block)), exchange if last else None)
            if self.backward:
                if block > 0:
                    yield Wait(carry(block - 1))
                yield Start(carry(block))
            if not last:
                yield Wait(move(block + 1))
        yield Wait(exchange)
        if self.backward:
            yield Wait(carry(blocks - 1))
            yield Start(Exchange(self.moving))
            yield Wait(Exchange(self.moving))

    def _attend_all(self, block: int, moving: ByRow, exchange: Exchange | None) -> Iterator[Step]:
        parts: tuple[Part, ...] = ("others", "own") if self.place.team > 1 else ("own",)
        for part in parts:
            yield self._attend(part, block, moving)
            if part == "others" and exchange:
                yield Start(exchange)

    def _attend(self, part: Part, block: int, moving: ByRow) -> Attend:
        if part == "own":
            return Attend(part, self.stationary, block, self._own_work(moving))
        others = self._team(self.stationary, self.place.ring_rank, exclude=self.place.team_rank)
        return Attend(part, self.stationary, block, self._work(others, moving))

    def _own_work(self, moving: ByRow) -> Work:
        return self._work(self._shard(self.stationary, self.place.inner_index), moving)

    def _work(self, stationary: ByRow, moving: ByRow) -> Work:
        queries, keys = (stationary, moving) if self.stationary == "q" else (moving, stationary)
        return plan_work(queries, keys, self.sequences.mask, self.sees)

    def _shard(self, side: Side, index: int) -> ByRow:
        """By row of the batch, the positions that an inner index holds."""
        return [shards[index] for shards in self.held[side]]

    def _team(self, side: Side, ring_rank: int, exclude: int | None = None) -> ByRow:
        """The positions of a team."""
        return [pieces.span for pieces in self._pieces(side, ring_rank, exclude)]

    def _pieces(self, side: Side, ring_rank: int, exclude: int | None) -> list[Pieces]:
        """By row of the batch, whose the positions of a team are."""
        first = _index(self.place, ring_rank, 0)
        members = [member for member in range(self.place.team) if member != exclude]
        return [in_order((member, shards[first + member]) for member in members) for shards in self.held[side]]

    def put_together(self, side: Side, exclude: int | None = None) -> Members:
        """How the rows of one's own team are put together."""
        return Members.made(self._pieces(side, self.place.ring_rank, exclude), self.place.team)


def _index(place: Coordinate, ring_rank: int, team_rank: int) -> int:
    return ring_rank * place.team + team_rank
