"""Ring Attention's table 2: the shortest block whose transfer hides behind its computation, and ours."""

from dataclasses import dataclass
from fractions import Fraction

from recipes.benchmarks.memory.tables import Table
from recipes.benchmarks.papers.equations import executed
from recipes.benchmarks.papers.models import Call
from recipes.benchmarks.papers.run import received
from wallfacer_dt.algorithms.masks import Mask
from wallfacer_dt.algorithms.schedule import make_schedule
from wallfacer_dt.algorithms.sequences import Sequences
from wallfacer_dt.algorithms.steps import Attend
from wallfacer_dt.mesh import Coordinate

SHARD, HEADS, HEAD_DIM, RANKS = 1024, 32, 128, 32


@dataclass(frozen=True, slots=True)
class Host:
    """A row of table 2.

    Attributes:
        name: of the host.
        tera: FLOPS, 10^12 a second.
        giga: bandwidth between hosts, 10^9 bytes a second.
        block: printed, 10^3 tokens.
        sequence: printed, 10^3 tokens.
    """

    name: str
    tera: float
    giga: float
    block: float
    sequence: float

    @property
    def ratio(self) -> float:
        """F / B: FLOPs while a byte arrives."""
        return 1000 * self.tera / self.giga


HOSTS = (
    Host("A100 NVLink", 312, 300, 1.0, 6.2),
    Host("A100 InfiniBand", 312, 12.5, 24.5, 149.5),
    Host("TPU v3", 123, 112, 1.1, 6.6),
    Host("TPU v4", 275, 268, 1.0, 6.2),
    Host("TPU v5e", 196, 186, 1.1, 6.3),
)


def intensity(call: Call) -> Fraction:
    """FLOPs over bytes of a hop, for each token of a rank's shard: 1 in the paper, where c tokens are c FLOPs a byte.

    Bytes are counted from the hops that ran; FLOPs, 4 d for every pair of a query and a key, from the tiles that the
    schedule computes behind one of them.

    Args:
        call: of one mesh and schedule.

    Returns:
        What c is multiplied by.
    """
    seen = received(call)
    place = Coordinate(call.ring, call.team, 0, min(1, call.team - 1))
    sequences = Sequences(call.tokens, call.tokens, "contiguous", Mask())
    schedule = make_schedule(place, sequences, schedule=call.schedule, resident="q", backward=False)
    by_block: dict[int, int] = {}
    for step in schedule.steps:
        if isinstance(step, Attend):
            by_block[step.block] = by_block.get(step.block, 0) + sum(call.area for call in step.work)
    flops = 4 * call.heads * call.head_dim * by_block[max(by_block)]
    return Fraction(flops, 1) / Fraction(seen.point_to_point, seen.hops) / (call.tokens // call.ranks)


def smallest(host: Host, factor: Fraction | int = 1) -> float:
    """The shortest shard, in tokens: F / B over how much more a hop's FLOPs are than a ring's."""
    return host.ratio / float(factor)


def table() -> Table:
    """Table 2, and the same for teams."""
    ring = Call(RANKS, 1, SHARD * RANKS, HEADS, HEAD_DIM)
    teams = [ring.on(RANKS, 4), ring.on(RANKS, 4, "published")]
    factors = [intensity(call) for call in (ring, *teams)]
    rows = []
    for host in HOSTS:
        shard, wall = (smallest(host, factor) / 1000 for factor in (factors[0], factors[1]))
        published = smallest(host, factors[2]) / 1000
        cells = [
            f"{host.tera:g}",
            f"{host.giga:g}",
            f"{host.block}",
            f"{shard:.2f}",
            f"{host.sequence}",
            f"{6 * shard:.2f}",
        ]
        rows.append([host.name, *cells, f"{wall:.2f}", f"{published:.2f}", executed(ring)])
    head = [
        "10^3 tokens", "TFLOPS", "GB/s", "c, paper", "c, ours", "6 c, paper", "6 c, ours", "shard, 2d C = 4",
        "shard, published C = 4", "how ours was got",
    ]  # fmt: skip
    note = (
        "c is FLOPS over bandwidth when a hop's 2 c d elements are two bytes each: 4 d c^2 FLOPs against 4 c d bytes, "
        "as counted from the hops that ran here. All rows come out but InfiniBand's, whose printed 24.5 and 149.5 are "
        "neither 312 / 12.5 = 24.96 nor six times each other (6 x 24.5 = 147). With teams a hop's bytes serve C times "
        "the queries, in 2d and as published, so a shard need only be c / C long."
    )
    return Table("Ring Attention, table 2: minimal sequence length", head, rows, note)
