"""The 2D schedule: see ``schedule``.

Note [What hides behind what]
A transfer is started before the work it hides behind and waited for after it. Own rows of the resident side are
computed while the others' arrive, and the others' partial results of the last block leave before one's own rows of
that block are computed. Where nothing would be left to hide the last transfer behind (the carry that brings a rotating
block's gradient home, or the exchange of a team without ring), part of own rows x own block is kept for the end.
"""

from collections.abc import Iterator

from wallfacer_dt.algorithms.holdings import Holdings
from wallfacer_dt.algorithms.rotation import Rotation
from wallfacer_dt.algorithms.steps import TEAM, Exchange, Gather, Start, Step, Wait


def two_dimensional(held: Holdings) -> Iterator[Step]:
    """Every rank's own block moves round its ring."""
    ring, has_team = Rotation(held), held.place.team > 1
    gather = Gather(held.resident)
    exchange = Exchange(held.resident) if has_team and held.is_given(held.resident) else None
    now, later = ring.own(returns=exchange is not None)

    if has_team:
        yield Start(gather)
    if ring.blocks > 1:
        yield Start(ring.move(1))
    yield now
    if has_team:
        yield Wait(gather)
        yield held.attend(TEAM, 0, ring.owner(0))
        if ring.blocks == 1 and exchange:
            yield Start(exchange)
    for block in range(1, ring.blocks):
        yield Wait(ring.move(block))
        is_last = block == ring.blocks - 1
        if not is_last:
            yield Start(ring.move(block + 1))
        yield from held.attend_all(block, ring.owner(block), exchange if is_last else None)
        yield from ring.goes_on(block)
    if later:
        yield later
    if exchange:
        yield Wait(exchange)
    yield from ring.coming_home()
