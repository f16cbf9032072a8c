"""The 2D schedule: see ``schedule``.

Note [What hides behind what]
A transfer is started before the work it hides behind and waited for after it. Own rows of the resident side are
computed while the others' arrive, and the others' partial results of the last block leave before one's own rows of
that block are computed. Where nothing would be left to hide the last transfer behind (the carry that brings a rotating
block's gradient home, or the exchange of a team without ring), part of own rows x own block is kept for the end.
"""

from collections.abc import Iterator, Sequence

from wallfacer_dt.algorithms.holdings import Holdings, index_of
from wallfacer_dt.algorithms.segments import ByRow, split_work
from wallfacer_dt.algorithms.steps import Attend, Carry, Exchange, Gather, Move, Start, Step, Wait
from wallfacer_dt.mesh import RING_AXIS


def two_dimensional(held: Holdings) -> Iterator[Step]:
    """Every rank's own block moves round its ring."""
    ring, me, has_team = held.place.ring, held.place.ring_rank, held.place.team > 1
    exchanges, carries = has_team and held.is_given(held.resident), held.is_given(held.rotating)
    gather, exchange = Gather(held.resident), Exchange(held.resident) if exchanges else None
    come, ahead = _route(ring, held.offsets)
    blocks = len(come)

    def hop(start: int, stop: int) -> tuple[int, int]:
        """To whom and from whom a block goes that becomes another."""
        shift = come[stop] - come[start]
        return (me + shift) % ring, (me - shift) % ring

    def move(block: int) -> Move:
        before = 0 if block == 1 + ahead else block - 1
        return Move(held.rotating, before, block, RING_AXIS, *hop(before, block))

    def carry(block: int) -> Carry:
        into = 0 if block in (ahead, blocks - 1) else block + 1
        return Carry(held.rotating, block, into, RING_AXIS, *hop(block, into), held.result)

    def rows(block: int) -> ByRow:
        index = index_of(held.place, (me - come[block]) % ring, held.place.team_rank)
        return held.shard(held.rotating, index)

    now, later = held.attend("local", 0, rows(0)).work, ()
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


def _route(ring: int, distances: Sequence[int]) -> tuple[Sequence[int], int]:
    """By block how far it has come, and how many come the first way round.

    Block 0 is one's own. The distances, ascending, are visited outwards from it; what is nearer the other way comes
    that way, unless all are visited.
    """
    if len(distances) == ring - 1:
        return (0, *distances), ring - 1
    ahead = [distance for distance in distances if 2 * distance <= ring]
    back = [distance - ring for distance in reversed(distances) if 2 * distance > ring]
    return (0, *ahead, *back), len(ahead)
