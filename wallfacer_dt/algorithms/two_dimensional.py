"""The 2D schedule: see ``schedule``.

Note [What hides behind what]
A transfer is started before the work it hides behind and waited for after it. Own rows of the resident side are
computed while the others' arrive, and the others' partial results of the last block leave before one's own rows of
that block are computed. Where nothing would be left to hide the last transfer behind (the carry that brings a rotating
block's gradient home, or the exchange of a team without ring), part of own rows x own block is kept for the end.
"""

from collections.abc import Iterator

from wallfacer_dt.algorithms.holdings import Holdings, index_of
from wallfacer_dt.algorithms.routes import Route
from wallfacer_dt.algorithms.segments import ByRow, split_work
from wallfacer_dt.algorithms.steps import Attend, Carry, Exchange, Gather, Move, Start, Step, Wait
from wallfacer_dt.mesh import RING_AXIS


def two_dimensional(held: Holdings) -> Iterator[Step]:
    """Every rank's own block moves round its ring; see ``schedule``.

    Args:
        held: what ranks hold.

    Yields:
        The steps.
    """
    ring, me, has_team = held.place.ring, held.place.ring_rank, held.place.team > 1
    exchanges, carries = has_team and held.is_given(held.resident), held.is_given(held.rotating)
    gather, exchange = Gather(held.resident), Exchange(held.resident) if exchanges else None
    route = Route.of(ring, held.offsets)
    blocks = route.blocks

    def hop(shift: int) -> tuple[int, int]:
        """To whom and from whom a block goes that gets ``shift`` further round the ring."""
        return (me + shift) % ring, (me - shift) % ring

    def move(block: int) -> Move:
        return Move(held.rotating, route.held_before(block), block, RING_AXIS, *hop(route.move(block)))

    def carry(block: int) -> Carry:
        return Carry(held.rotating, block, route.into(block), RING_AXIS, *hop(route.carry(block)), held.result)

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
