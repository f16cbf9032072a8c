"""The schedule of two rings: see ``schedule``.

Note [One transfer at a time]
A link that carries two things at once brings the one that is needed first later. So rows and blocks come one after the
other: first the rows of one member, then a block, then the other members' rows, then the other blocks; what
comes is attended with what is there. After two transfers that is four tiles, so only the first is waited for. A
member's partial result leaves as soon as its rows have met all blocks. Own rows come last in a block; where nothing is
computed for blocks, those of the last two wait until all partial results have left, which hide behind them. A block
that is the only one comes last: partial results that leave sooner would delay the rows that still come.
"""

from collections.abc import Iterator
from itertools import product, zip_longest

from wallfacer_dt.algorithms.holdings import Holdings
from wallfacer_dt.algorithms.rotation import Rotation
from wallfacer_dt.algorithms.steps import Attend, Hop, Start, Step, Wait
from wallfacer_dt.mesh import TEAM_AXIS


def rings(held: Holdings) -> Iterator[Step]:
    """Every rank's rows of the resident side go round its team, and its block of the other side round its ring."""
    ring, team, me = Rotation(held), held.place.team, held.place.team_rank
    side, returns = held.resident, held.is_given(held.resident)
    passes = [Hop(side, n - 1, n, TEAM_AXIS, (me + 1) % team, (me - 1) % team) for n in range(1, team)]
    back = [Hop(side, n, 0, TEAM_AXIS, (me - n) % team, (me + n) % team, partial=True) for n in range(1, team)]
    moves = [ring.move(block) for block in range(1, ring.blocks)]
    early = 1 if len(moves) > 1 else 0
    coming = [*passes[:early], *moves[:early], *passes[early:], *moves[early:]]
    last, now, later = len(moves), *ring.own(returns=returns)
    waiting = [block for block in (last - 1, last) if block > 0 and not ring.carries]

    def own(block: int) -> Attend:
        return held.attend(0, block, ring.owner(block))

    yield Start(coming[0])
    yield now
    distances, blocks = [], [0]
    for transfer, following in zip_longest(coming, coming[1:]):
        yield Wait(transfer)
        if following:
            yield Start(following)
        if transfer.side == side:
            distances.append(transfer.into)
            meeting = product([transfer.into], blocks)
        else:
            blocks.append(transfer.into)
            meeting = product(distances, [transfer.into])
        for distance, block in meeting:
            yield held.attend(distance, block, ring.owner(block))
            if block == last and returns:
                yield Start(back[distance - 1])
            if block > 0 and distance == team - 1:
                if block not in waiting:
                    yield own(block)
                yield from ring.goes_on(block)
    yield from map(own, waiting)
    if later:
        yield later
    if returns:
        yield from map(Wait, back)
    yield from ring.coming_home()
