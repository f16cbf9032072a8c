"""WallFacer's figures 5 and 6: who holds what on 8 ranks with C = 2, from this package's schedules.

Algorithms 2 and 3 are written out here once more, as printed, and compared with what the schedules say.
"""

from dataclasses import dataclass

import numpy as np

from recipes.benchmarks.report import Table
from wallfacer_dt import TokenOrder, context_mesh, sequence_positions
from wallfacer_dt.algorithms.masks import Mask
from wallfacer_dt.algorithms.schedule import make_schedule
from wallfacer_dt.algorithms.sequences import Sequences
from wallfacer_dt.algorithms.steps import Attend, Hop, Schedule
from wallfacer_dt.mesh import RING_AXIS, Coordinate
from wallfacer_dt.testing.fake import fake_world

RANKS, TEAM = 8, 2
CHUNK = 128


@dataclass(frozen=True, slots=True)
class Holding:
    """One rank of figure 5.

    Attributes:
        rank: global, which is r_t * C + r_a.
        queries: the team whose queries it holds.
        keys: the team whose keys and values it holds once these are placed.
        to: the rank that its team's keys go to; Algorithm 2 on the schedule.
        following: the next rank of its sub-ring; Algorithm 3.
        printed: the same two by the algorithms as printed.
    """

    rank: int
    queries: int
    keys: int
    to: int
    following: int
    printed: tuple[int, int]


def init_send(r_t: int, r_a: int, d_t: int, d_a: int) -> int:
    """Algorithm 2: the rank that keys and values are sent to first.

    Args:
        r_t: inter-team rank.
        r_a: intra-team rank.
        d_t: inter-team dimension.
        d_a: intra-team dimension.

    Returns:
        Global rank.
    """
    group_size = d_t // d_a
    target_team = r_a * group_size + r_t // d_a
    return target_team * d_a + r_t % d_a


def ring_next(r_t: int, r_a: int, d_t: int, d_a: int) -> int:
    """Algorithm 3: the next rank of a sub-ring; the arguments are those of :func:`init_send`."""
    group_size = d_t // d_a
    group = r_t // group_size
    return r_a + ((r_t + 1) % group_size + group_size * group) * d_a


def holdings(ranks: int = RANKS, team: int = TEAM) -> list[Holding]:
    """Figure 5 from the schedules of all ranks.

    Args:
        ranks: P.
        team: C.

    Returns:
        By rank.
    """
    places = [Coordinate(ranks // team, team, *divmod(rank, team)) for rank in range(ranks)]
    moves = [_moves(_schedule(place, "contiguous", Mask(), "published")) for place in places]
    made = []
    for place, (placed, hop) in zip(places, moves, strict=True):
        me = place.ring_rank, place.team_rank, place.ring, team
        following = place.index if hop is None else hop.to * team + place.team_rank
        printed = init_send(*me), ring_next(*me)
        made.append(Holding(place.index, place.ring_rank, placed.source // team, placed.to, following, printed))
    return made


def _moves(schedule: Schedule) -> tuple[Hop, Hop | None]:
    """The placement, and the first hop on a sub-ring."""
    moves = [transfer for transfer in schedule.transfers if isinstance(transfer, Hop) and not transfer.partial]
    assert moves[0].axis != RING_AXIS
    return moves[0], moves[1] if len(moves) > 1 else None


def sub_rings(held: list[Holding]) -> list[tuple[int, ...]]:
    """Ranks by sub-ring, in the order in which keys and values go round."""
    rings, left = [], {one.rank for one in held}
    while left:
        ring = [min(left)]
        while (following := held[ring[-1]].following) != ring[0]:
            ring.append(following)
        rings.append(tuple(ring))
        left -= set(ring)
    return rings


def chunks(order: str, ranks: int = RANKS, team: int = TEAM) -> list[tuple[int, ...]]:
    """Of 2P chunks of the sequence, those that each rank holds, from ``sequence_positions`` on fake ranks.

    Args:
        order: token order.
        ranks: P.
        team: C.

    Returns:
        By rank.
    """
    length = 2 * ranks * CHUNK
    made = []
    for rank in range(ranks):
        with fake_world(ranks, rank):
            mesh = context_mesh("cpu", ranks // team, team)
            positions = sequence_positions(length, TokenOrder(order, mesh)).numpy()
        made.append(tuple(int(n) for n in np.unique(positions // CHUNK)))
        assert len(positions) == CHUNK * len(made[-1])
    return made


def causal_work(order: str, ranks: int = RANKS, team: int = TEAM, *, schedule: str = "published") -> list[float]:
    """What each rank computes under a causal mask, from the tiles of its schedule.

    Args:
        order: token order.
        ranks: P.
        team: C.
        schedule: its name.

    Returns:
        By rank, pairs of a query and a key as multiples of the mean.
    """
    pairs = []
    for rank in range(ranks):
        place = Coordinate(ranks // team, team, *divmod(rank, team))
        steps = _schedule(place, order, Mask(right=0), schedule).steps
        pairs.append(sum(call.area for step in steps if isinstance(step, Attend) for call in step.work))
    return [n * ranks / sum(pairs) for n in pairs]


def _schedule(place: Coordinate, order: str, mask: Mask, schedule: str) -> Schedule:
    length = 2 * CHUNK * place.size
    sequences = Sequences(length, length, order, mask)
    return make_schedule(place, sequences, schedule=schedule, resident="q", backward=False)


def figure_5() -> Table:
    """The mapping, as text."""
    held = holdings()
    rings = {rank: ring for ring in sub_rings(held) for rank in ring}
    rows = []
    for one in held:
        team, member = divmod(one.rank, TEAM)
        ring = " > ".join(str(rank) for rank in rings[one.rank])
        cells = [f"T{team}, member {member}", f"T{one.queries}", f"T{team}", f"T{one.keys}"]
        cells += [f"{one.to}", f"{one.printed[0]}", f"{one.following}", f"{one.printed[1]}", ring]
        rows.append([f"rank {one.rank}", *cells, "schedule of this rank"])
    head = [
        "", "who", "q of", "k, v gathered", "k, v placed", "sends k, v to, ours", "Algorithm 2", "next, ours",
        "Algorithm 3", "sub-ring", "how ours was got",
    ]  # fmt: skip
    return Table("WallFacer, figure 5: initialisation of 8 ranks and 4 sub-rings", head, rows)


def facts(held: list[Holding], ranks: int = RANKS, team: int = TEAM) -> dict[str, bool]:
    """What section 3.3 says of the figure, and whether it is so."""
    rings = sub_rings(held)
    groups = {frozenset(rank // team for rank in ring) for ring in rings}
    members = [[one.keys for one in held if one.rank // team == t] for t in range(ranks // team)]
    return {
        "there are 4 sub-rings": len(rings) == 4,
        "a sub-ring has P / C^2 ranks": all(len(ring) * team**2 == ranks for ring in rings),
        "teams 0 and 1 form a group, and teams 2 and 3": groups == {frozenset({0, 1}), frozenset({2, 3})},
        "members of a team hold different keys": all(len(set(keys)) == team for keys in members),
        "ranks of a sub-ring hold different keys": all(
            len({held[rank].keys for rank in ring}) == len(ring) for ring in rings
        ),
        "a rank sends where Algorithms 2 and 3 say": all((o.to, o.following) == o.printed for o in held),
    }


def figure_6() -> Table:
    """The loaders, and how the causal mask's work falls to the ranks."""
    naive, zigzag = chunks("contiguous"), chunks("head_tail")
    loads = [
        causal_work(order, schedule=schedule)
        for order in ("contiguous", "head_tail")
        for schedule in ("published", "2d")
    ]
    rows = []
    for rank in range(RANKS):
        held = [" ".join(map(str, row[rank])) for row in (naive, zigzag)]
        rows.append(
            [f"rank {rank}", *held, *(f"{load[rank]:.3f}" for load in loads), "executed, 8 fake ranks; schedules"]
        )
    head = [
        "", "naive, of 16 chunks", "zigzag, of 16 chunks", "naive, published", "naive, 2d", "zigzag, published",
        "zigzag, 2d", "how ours was got",
    ]  # fmt: skip
    return Table("WallFacer, figure 6: naive and zigzag loader, 8 ranks, C = 2", head, rows)


def figure_6_by_ranks() -> Table:
    """Whether balancing is worth more on more ranks, as the caption says."""
    rows = []
    for ranks in (8, 16, 32, 64, 128):
        loads = [max(causal_work(order, ranks)) for order in ("contiguous", "head_tail")]
        ring = max(causal_work("contiguous", ranks, 1))
        rows.append([f"P = {ranks}", *(f"{n:.3f}" for n in (*loads, ring)), f"schedules of {ranks} ranks"])
    head = [
        "busiest rank / mean",
        "naive, C = 2 published",
        "zigzag, C = 2 published",
        "naive, ring",
        "how ours was got",
    ]
    return Table("WallFacer, figure 6: by ranks", head, rows)
