"""Schedules: what one rank sends, computes and waits for, as data made on the host.

Attention pairs queries with keys. One side is *stationary*: gathered in the team, it stays, and what is computed for
it on each rank is a partial result that goes back to its owner in one exchange. The other side *moves* round the ring
in blocks; what is computed for a moving block (its gradient) is carried along behind it. The forward keeps queries
stationary; the backward may keep either.

``2d``: every rank's own block moves round its ring ``{(., m)}``; the R blocks of a ring are seen after R - 1 hops,
and a team together has seen every key. ``published``: WallFacer's Algorithms 1 to 3. Both sides are gathered in the
team, the moving side's copies are placed (Algorithm 2) so that a ring needs only P / C^2 ranks, and hop there
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
from typing import Literal, NamedTuple

from wallfacer_dt.algorithms.tiles import Tile, plan_tiles, split_tiles
from wallfacer_dt.layout import Span, chunks_per_rank, rank_spans
from wallfacer_dt.mesh import RING_AXIS, TEAM_AXIS, Coordinate

Side = Literal["q", "kv"]
Part = Literal["own", "others"]
CONTEXT = "cp"  # both axes together
HOME = -1  # the place of what a published schedule carries back to the rank that the rows belong to


class Slice(NamedTuple):
    """Rows of a team member's shard, a piece of a gathered tensor; and the positions they have."""

    member: int
    start: int
    span: Span


@dataclass(frozen=True, slots=True)
class Gather:
    """All-gather one side's data in the team."""

    side: Side

    def __str__(self) -> str:
        return f"all_gather {TEAM_AXIS} {self.side}"


@dataclass(frozen=True, slots=True)
class Move:
    """Pass a moving block's data on: the receiver knows it as block ``block``."""

    side: Side
    block: int
    axis: str
    to: int
    source: int

    def __str__(self) -> str:
        return f"permute {self.axis} {self.side}[{self.block}] to {self.to} from {self.source}"


@dataclass(frozen=True, slots=True)
class Carry:
    """Pass on what has been computed for moving block ``block``; it is added to the receiver's ``into``."""

    side: Side
    block: int
    into: int
    axis: str
    to: int
    source: int

    def __str__(self) -> str:
        into = "home" if self.into == HOME else f"into d{self.side}[{self.into}]"
        what = f"d{self.side}[{self.block}] {into}"
        return f"permute {self.axis} {what} to {self.to} from {self.source}"


@dataclass(frozen=True, slots=True)
class Exchange:
    """All-to-all of partial results in the team: everyone's go to their owner, who combines them."""

    side: Side

    def __str__(self) -> str:
        return f"all_to_all {TEAM_AXIS} partial {self.side}"


Transfer = Gather | Move | Carry | Exchange


@dataclass(frozen=True, slots=True)
class Start:
    """Start a transfer."""

    transfer: Transfer

    def __str__(self) -> str:
        return f"start {self.transfer}"


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait for a started transfer and take up what it brought."""

    transfer: Transfer

    def __str__(self) -> str:
        return f"wait  {self.transfer}"


@dataclass(frozen=True, slots=True)
class Attend:
    """Compute tiles of the stationary side's rows (own or the others') against a moving block."""

    part: Part
    stationary: Side
    block: int
    tiles: tuple[Tile, ...]

    def __str__(self) -> str:
        moving = "kv" if self.stationary == "q" else "q"
        tiles = ", ".join(
            f"{t.q[0]}:{t.q[1]} x {t.k[0]}:{t.k[1]}{' causal' if t.is_causal else ''}" for t in self.tiles
        )
        return f"      attend {self.part} {self.stationary} x {moving}[{self.block}]: {tiles or 'nothing visible'}"


Step = Start | Wait | Attend


@dataclass(frozen=True, slots=True)
class Schedule:
    """One rank's schedule of one attention call, forward or backward.

    Attributes:
        steps: in program order, the same kinds of transfers on every rank.
        stationary: the side that is gathered and stays.
        home: what is computed for the own shard of the moving side ends up in block 0 (``"block"``), or comes out of
            an exchange after all blocks (``"exchange"``).
        others: the team's rows without one's own, in the order in which they are stored.
        everyone: the whole team's rows, likewise; only for a moving side that is gathered.
    """

    steps: tuple[Step, ...]
    stationary: Side
    home: Literal["block", "exchange"]
    others: tuple[Slice, ...]
    everyone: tuple[Slice, ...]

    def __str__(self) -> str:
        return "\n".join(str(step) for step in self.steps)


@lru_cache(maxsize=512)
def make_schedule(
    place: Coordinate,
    shard_length: int,
    *,
    order: str,
    is_causal: bool,
    published: bool,
    stationary: Side,
    backward: bool,
) -> Schedule:
    """The schedule of one rank.

    Args:
        place: the rank's coordinate.
        shard_length: N / P tokens per rank.
        order: token order.
        is_causal: mask keys that come later than the query.
        published: WallFacer's Algorithms 1 to 3 instead of the 2D schedule; team * team must divide P.
        stationary: the side that stays; the forward's is ``"q"``.
        backward: what is computed for a moving block is carried along.

    Returns:
        The schedule; equal arguments give the same object.
    """
    maker = _Maker(place, shard_length, order, is_causal, stationary, backward)
    # Without a team there is nothing to gather and nothing to place: the published schedule is a ring.
    published = published and place.team > 1
    steps = maker.published() if published else maker.two_dimensional()
    return Schedule(
        tuple(steps),
        stationary,
        "exchange" if published else "block",
        maker.slices(exclude=place.team_rank),
        maker.slices(),
    )


@dataclass(frozen=True, slots=True)
class _Maker:
    place: Coordinate
    shard_length: int
    order: str
    is_causal: bool
    stationary: Side
    backward: bool

    @property
    def moving(self) -> Side:
        return "kv" if self.stationary == "q" else "q"

    def two_dimensional(self) -> Iterator[Step]:
        ring, me, has_team = self.place.ring, self.place.ring_rank, self.place.team > 1
        to, source = (me + 1) % ring, (me - 1) % ring
        gather, exchange = Gather(self.stationary), Exchange(self.stationary)

        def move(block: int) -> Move:
            return Move(self.moving, block, RING_AXIS, to, source)

        def carry(block: int) -> Carry:
            return Carry(self.moving, block, (block + 1) % ring, RING_AXIS, to, source)

        def held(block: int) -> tuple[Span, ...]:
            return self._shard_spans((me - block) % ring, self.place.team_rank)

        now, later = self._own_tiles(held(0)), ()
        if (ring > 1 and self.backward) or (ring == 1 and has_team):
            now, later = split_tiles(now)

        if has_team:
            yield Start(gather)
        if ring > 1:
            yield Start(move(1))
        yield Attend("own", self.stationary, 0, now)
        if has_team:
            yield Wait(gather)
            yield self._attend("others", 0, held(0))
            if ring == 1:
                yield Start(exchange)
        for block in range(1, ring):
            yield Wait(move(block))
            last = block == ring - 1
            if not last:
                yield Start(move(block + 1))
            yield from self._attend_all(block, held(block), exchange if last else None)
            if self.backward:
                if block > 1:
                    yield Wait(carry(block - 1))
                yield Start(carry(block))
        if later:
            yield Attend("own", self.stationary, 0, later)
        if has_team:
            yield Wait(exchange)
        if self.backward and ring > 1:
            yield Wait(carry(ring - 1))

    def published(self) -> Iterator[Step]:
        ring, team = self.place.ring, self.place.team
        me, member = self.place.ring_rank, self.place.team_rank
        blocks = ring // team  # "team group size" of Algorithms 2 and 3
        group, position = divmod(me, blocks)
        # Algorithm 3
        to = group * blocks + (me + 1) % blocks
        source = group * blocks + (me - 1) % blocks
        # Algorithm 2, and the same read backwards: whose team's rows are placed here
        placed_at = _index(self.place, member * blocks + me // team, me % team)
        placed_team = position * team + member
        placed_from = _index(self.place, placed_team, group)

        def move(block: int) -> Move:
            if block == 0:
                return Move(self.moving, 0, CONTEXT, placed_at, placed_from)
            return Move(self.moving, block, RING_AXIS, to, source)

        def team_held(block: int) -> int:
            return (position - block) % blocks * team + member

        def carry(block: int) -> Carry:
            if block < blocks - 1:
                return Carry(self.moving, block, block + 1, RING_AXIS, to, source)
            # Home: to the member that sent the rows here in the first place, and likewise back from one's own target.
            home = _index(self.place, team_held(block), group)
            holder = _holder_of_last(self.place, blocks)
            return Carry(self.moving, block, HOME, CONTEXT, home, holder)

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
            yield from self._attend_all(block, self._team_spans(team_held(block)), exchange if last else None)
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

    def slices(self, exclude: int | None = None) -> tuple[Slice, ...]:
        """The rows of this rank's team in ascending order of position."""
        return self._team_slices(self.place.ring_rank, exclude)

    def _attend_all(self, block: int, moving: Sequence[Span], exchange: Exchange | None) -> Iterator[Step]:
        parts: tuple[Part, ...] = ("others", "own") if self.place.team > 1 else ("own",)
        for part in parts:
            yield self._attend(part, block, moving)
            if part == "others" and exchange:
                yield Start(exchange)

    def _attend(self, part: Part, block: int, moving: Sequence[Span]) -> Attend:
        if part == "own":
            return Attend(part, self.stationary, block, self._own_tiles(moving))
        others = tuple(piece.span for piece in self.slices(exclude=self.place.team_rank))
        return Attend(part, self.stationary, block, self._tiles(others, moving))

    def _own_tiles(self, moving: Sequence[Span]) -> tuple[Tile, ...]:
        return self._tiles(self._shard_spans(self.place.ring_rank, self.place.team_rank), moving)

    def _tiles(self, stationary: Sequence[Span], moving: Sequence[Span]) -> tuple[Tile, ...]:
        queries, keys = (stationary, moving) if self.stationary == "q" else (moving, stationary)
        return plan_tiles(queries, keys, self.is_causal)

    def _shard_spans(self, ring_rank: int, team_rank: int) -> tuple[Span, ...]:
        index = _index(self.place, ring_rank, team_rank)
        return rank_spans(index, self.place.size, self.order, self.shard_length)

    def _team_spans(self, ring_rank: int) -> tuple[Span, ...]:
        return tuple(piece.span for piece in self._team_slices(ring_rank, None))

    def _team_slices(self, ring_rank: int, exclude: int | None) -> tuple[Slice, ...]:
        length = self.shard_length // chunks_per_rank(self.order)
        pieces = [
            Slice(member, position * length, span)
            for member in range(self.place.team)
            if member != exclude
            for position, span in enumerate(self._shard_spans(ring_rank, member))
        ]
        return tuple(sorted(pieces, key=lambda piece: piece.span))


def _index(place: Coordinate, ring_rank: int, team_rank: int) -> int:
    return ring_rank * place.team + team_rank


def _holder_of_last(place: Coordinate, blocks: int) -> int:
    """Sequence index of the rank where this rank's team's rows, as it placed them, are after the last hop."""
    group = place.team_rank
    first = place.ring_rank // place.team
    last = group * blocks + (first + blocks - 1) % blocks
    return _index(place, last, place.ring_rank % place.team)
