"""The 2D schedule: see ``schedule``.

Note [What hides behind what]
A transfer is started before the work it hides behind and waited for after it. Own rows of the resident side are
computed while the others' arrive, and the others' partial results of the last block leave before one's own rows of
that block are computed. Where nothing would be left to hide the last transfer behind (the carry that brings a rotating
block's gradient home, or the exchange of a team without ring), part of own rows x own block is kept for the end.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from wallfacer_dt.algorithms.holdings import Holdings, index_of
from wallfacer_dt.algorithms.segments import ByRow, split_work
from wallfacer_dt.algorithms.steps import Attend, Carry, Exchange, Gather, Move, Start, Step, Wait
from wallfacer_dt.mesh import RING_AXIS


@dataclass(frozen=True, slots=True)
class _Route:
    """How rotating blocks come round a ring, block 0 being one's own.

    Attributes:
        offsets: by block, how far it has come: first one way round, ascending, then what is nearer the other way.
        ahead: how many blocks come the first way.
    """

    offsets: tuple[int, ...]
    ahead: int

    @classmethod
    def of(cls, ring: int, distances: Sequence[int]) -> "_Route":
        """The route that visits blocks at these distances, from 1 to ring - 1, ascending."""
        if len(distances) == ring - 1:
            return cls((0, *distances), ring - 1)
        ahead = [distance for distance in distances if 2 * distance <= ring]
        back = [distance - ring for distance in reversed(distances) if 2 * distance > ring]
        return cls((0, *ahead, *back), len(ahead))

    def held_before(self, block: int) -> int:
        """The block that is passed on to become this one."""
        return 0 if block == 1 + self.ahead else block - 1

    def into(self, block: int) -> int:
        """The block to which the result of this one is added where it goes next."""
        return 0 if block in (self.ahead, len(self.offsets) - 1) else block + 1


def two_dimensional(held: Holdings) -> Iterator[Step]:
    """Every rank's own block moves round its ring."""
    ring, me, has_team = held.place.ring, held.place.ring_rank, held.place.team > 1
    exchanges, carries = has_team and held.is_given(held.resident), held.is_given(held.rotating)
    gather, exchange = Gather(held.resident), Exchange(held.resident) if exchanges else None
    route = _Route.of(ring, held.offsets)
    blocks = len(route.offsets)

    def hop(start: int, stop: int) -> tuple[int, int]:
        """To whom and from whom a block goes that becomes another."""
        shift = route.offsets[stop] - route.offsets[start]
        return (me + shift) % ring, (me - shift) % ring

    def move(block: int) -> Move:
        before = route.held_before(block)
        return Move(held.rotating, before, block, RING_AXIS, *hop(before, block))

    def carry(block: int) -> Carry:
        into = route.into(block)
        return Carry(held.rotating, block, into, RING_AXIS, *hop(block, into), held.result)

    def rows(block: int) -> ByRow:
        index = index_of(held.place, (me - route.offsets[block]) % ring, held.place.team_rank)
        return held.shard(held.rotating, index)

    now, later = held.local_work(rows(0)), ()
    if (blocks > 1 and carries) or (blocks == 1 and exchange):
        now, later = split_work(now)

    if has_team:
        yield Start(gather)
    if blocks > 1:
        yield Start(move(1))
    yield Attend("local", held.resident, 0, now)
    if has_team:
        yield Wait(gather)
        yield held.attend("peer", 0, rows(0))
        if blocks == 1 and exchange:
            yield Start(exchange)
    for block in range(1, blocks):
        yield Wait(move(block))
        last = block == blocks - 1
        if not last:
            yield Start(move(block + 1))
        yield from held.attend_all(block, rows(block), exchange if last else None)
        if carries:
            if block > 1:
                yield Wait(carry(block - 1))
            yield Start(carry(block))
    if later:
        yield Attend("local", held.resident, 0, later)
    if exchange:
        yield Wait(exchange)
    if carries and blocks > 1:
        yield Wait(carry(blocks - 1))
