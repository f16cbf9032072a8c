"""The schedule that WallFacer published (Algorithms 1 to 3): see ``schedule``."""

from collections.abc import Iterator

from wallfacer_dt.algorithms.holdings import Holdings, Ranks, index_of
from wallfacer_dt.algorithms.steps import CONTEXT, TEAM, Exchange, Gather, Hop, Start, Step, Wait
from wallfacer_dt.mesh import RING_AXIS


def published(held: Holdings) -> Iterator[Step]:
    """Both sides are gathered in the team; the rotating side's copies are placed, and hop in smaller rings."""
    place, team = held.place, held.place.team
    me, member = place.ring_rank, place.team_rank
    blocks = place.ring // team  # P / C^2, "team group size" of the algorithms
    group, position = me // blocks, me % blocks
    # Algorithm 2, and read backwards.
    placed_at = index_of(place, member * blocks + me // team, me % team)
    placed_from = index_of(place, position * team + member, group)
    # Where one's team's rows, as one has placed them, are after the last hop.
    fetched_from = index_of(place, member * blocks + (me // team + blocks - 1) % blocks, me % team)
    # Algorithm 3
    to, source = (group * blocks + (position + step) % blocks for step in (1, -1))

    def move(block: int) -> Hop:
        if block == 0:
            return Hop(held.rotating, 0, 0, CONTEXT, placed_at, placed_from)
        return Hop(held.rotating, block - 1, block, RING_AXIS, to, source)

    def owners(block: int) -> Ranks:
        return tuple(index_of(place, (position - block) % blocks * team + member, mate) for mate in range(team))

    def carry(block: int) -> Hop:
        if block < blocks - 1:
            return Hop(held.rotating, block, block + 1, RING_AXIS, to, source, partial=True)
        # Home: to the member that sent the rows here in the first place, and likewise back from one's own target.
        home = owners(block)[0] + group
        return Hop(held.rotating, block, TEAM, CONTEXT, home, fetched_from, partial=True)

    yield Start(Gather(held.rotating))
    yield Start(Gather(held.resident))
    yield Wait(Gather(held.rotating))
    yield Start(move(0))
    yield Wait(Gather(held.resident))
    yield Wait(move(0))
    exchange = Exchange(held.resident)
    for block in range(blocks):
        last = block == blocks - 1
        if not last:
            yield Start(move(block + 1))
        yield from held.attend_all(block, owners(block), exchange if last else None)
        if held.backward:
            if block > 0:
                yield Wait(carry(block - 1))
            yield Start(carry(block))
        if not last:
            yield Wait(move(block + 1))
    yield Wait(exchange)
    if held.backward:
        yield Wait(carry(blocks - 1))
        yield Start(Exchange(held.rotating))
        yield Wait(Exchange(held.rotating))
