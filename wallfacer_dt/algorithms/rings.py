"""The schedule of two rings: see ``schedule``.

Note [One transfer at a time]
A link that carries two things at once brings the one that is needed first later. So the first hop round the ring starts
when the last of the team's rows have come, which a rank attends one member after the other as they come. In the last
block a member's partial result leaves as soon as it is there, and one's own rows come last, as in the 2D schedule.
"""

from collections.abc import Iterator

from wallfacer_dt.algorithms.holdings import Holdings
from wallfacer_dt.algorithms.rotation import Rotation
from wallfacer_dt.algorithms.steps import Attend, Pass, Return, Start, Step, Wait


def rings(held: Holdings) -> Iterator[Step]:
    """Every rank's rows of the resident side go round its team, and its block of the other side round its ring."""
    ring, team, me = Rotation(held), held.place.team, held.place.team_rank
    side, returns = held.resident, held.is_given(held.resident)
    passes = [Pass(side, distance, (me + 1) % team, (me - 1) % team) for distance in range(1, team)]
    back = [Return(side, it.distance, (me - it.distance) % team, (me + it.distance) % team) for it in passes]
    now, later = ring.own_work(returns=returns)

    def attend_all(block: int, is_last: bool) -> Iterator[Step]:
        for one in back:
            yield held.attend("peer", block, ring.rows(block), one.distance)
            if is_last and returns:
                yield Start(one)
        yield held.attend("local", block, ring.rows(block))

    yield Start(passes[0])
    yield Attend("local", side, 0, now)
    for number, one in enumerate(passes):
        yield Wait(one)
        if one is not passes[-1]:
            yield Start(passes[number + 1])
        elif ring.blocks > 1:
            yield Start(ring.move(1))
        yield held.attend("peer", 0, ring.rows(0), one.distance)
        if ring.blocks == 1 and returns:
            yield Start(back[number])
    yield from ring.later_blocks(attend_all)
    if later:
        yield Attend("local", side, 0, later)
    if returns:
        yield from map(Wait, back)
    yield from ring.coming_home()
