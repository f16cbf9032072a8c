"""WallFacer's equations 2 to 5 and figure 1, and Ring Attention's table 2: what one rank receives in a forward.

Equations are in elements, for batch B = 1; BNH is P times the activation A of one rank (equation 5). The paper has
seconds, with bandwidth W and latency L: here are the numbers that stand before 1/W and before L.
"""

from collections import Counter
from fractions import Fraction
from typing import NamedTuple

from recipes.benchmarks.papers.clusters import DIT_1B, GPT_7B
from recipes.benchmarks.report import GIB, MIB, K, Table
from tests.papers.executed import received
from tests.papers.models import EXAMPLE, Call
from wallfacer_dt.algorithms.masks import Mask
from wallfacer_dt.algorithms.schedule import make_schedule
from wallfacer_dt.algorithms.sequences import Sequences
from wallfacer_dt.algorithms.steps import Attend
from wallfacer_dt.mesh import Coordinate

EXAMPLE_TOKENS = 64 * K
MESHES = ((16, 2), (16, 4), (64, 2), (64, 4), (64, 8), (256, 4), (256, 16), (1024, 4), (1024, 8), (1024, 32))
"""P and C for the paper's example model; others are of its experiments."""
_OTHERS = [
    Call(model, n * K, p, c, "published") for model, n, p in ((GPT_7B, 128, 64), (DIT_1B, 512, 32)) for c in (2, 4)
]


def ring_p2p(call: Call) -> Fraction:
    """Equation 2: P hops of k and v."""
    return 2 * call.activation * call.ranks


def team_collective(call: Call) -> Fraction:
    """Equation 3: q, k and v gathered in a team, and the output scattered."""
    return 4 * call.activation * (call.team - 1)


def team_p2p(call: Call) -> Fraction:
    """Equation 4: P / C^2 hops of a team's k and v."""
    return 2 * call.activation * call.ranks / call.team


def team_hops(call: Call) -> Fraction:
    """What stands before L in equation 4; with C = 1 that of equation 2."""
    return Fraction(call.ranks, call.team**2)


def saved(call: Call, field: str = "point_to_point") -> float:
    """Figure 1: the share of the ring's volume that a call does without, alone or with ``payload`` all that is sent."""
    return 1 - getattr(received(call), field) / getattr(received(call.on(call.ranks, 1)), field)


def calls() -> list[Call]:
    """The published calls of the tables."""
    return [Call(EXAMPLE, EXAMPLE_TOKENS, *mesh, "published") for mesh in MESHES] + _OTHERS


def ring_table() -> Table:
    """Equation 2, and rings that ran."""
    rows = []
    for ring in dict.fromkeys(call.on(call.ranks, 1) for call in calls()):
        ours, paper = received(ring), 2 * ring_p2p(ring)
        numbers = (_gib(paper), _gib(ours.point_to_point), f"{float(ours.point_to_point / paper):.4f}")
        rows.append([f"{ring}", *numbers, f"{ring.ranks}", f"{ours.hops}", executed(ring)])
    head = ["", "equation 2, GiB", "ours, GiB", "ours / paper", "hops, equation 2", "ours", "how ours was got"]
    return Table("WallFacer, equation 2: Ring Attention", head, rows)


def team_table() -> Table:
    """Equations 3 and 4 and what figure 1 shows, by the published schedule and the 2D schedule."""
    rows = []
    for call in calls():
        flat_call = call.on(call.ranks, call.team)
        ours, flat = received(call), received(flat_call)
        paper = (2 * team_p2p(call), 2 * team_collective(call))
        cells = [_gib(paper[0]), _gib(ours.point_to_point), _gib(paper[1]), _gib(ours.collective)]
        cells += [f"{team_hops(call)}", f"{ours.hops}", _gib(flat.point_to_point), _gib(flat.collective)]
        cells += [f"{flat.hops}", f"{float(flat.payload / sum(paper)):.3f}", f"{ours.statistics / MIB:.2f}"]
        cells += [f"{saved(one, what):.1%}" for what in ("point_to_point", "payload") for one in (call, flat_call)]
        rows.append([f"{call}, C = {call.team}", *cells, executed(call)])
    head = [
        "", "equation 4, GiB", "published, GiB", "equation 3, GiB", "published, GiB", "hops, equation 4", "published",
        "2d point to point, GiB", "2d collective, GiB", "2d hops", "2d / equations 3 + 4",
        "lse that travels too, MiB", "point to point saved against the ring, published", "2d",
        "with collectives, published", "2d", "how ours was got",
    ]  # fmt: skip
    return Table("WallFacer, equations 3 and 4 and figure 1: the published schedule and 2d", head, rows)


class Host(NamedTuple):
    """A row of Ring Attention's table 2: TFLOPS, GB/s between hosts, and as printed block and sequence, 10^3 tokens."""

    name: str
    tera: float
    giga: float
    block: float
    sequence: float


HOSTS = (
    Host("A100 NVLink", 312, 300, 1.0, 6.2), Host("A100 InfiniBand", 312, 12.5, 24.5, 149.5),
    Host("TPU v3", 123, 112, 1.1, 6.6), Host("TPU v4", 275, 268, 1.0, 6.2), Host("TPU v5e", 196, 186, 1.1, 6.3),
)  # fmt: skip


def intensity(call: Call) -> Fraction:
    """FLOPs over bytes of a hop, for each token of a rank's shard: 1 in the paper, where c tokens are c FLOPs a byte.

    Bytes are counted from the hops that ran; FLOPs, 4 d for every pair of a query and a key, from the tiles that the
    schedule computes behind one of them.
    """
    seen, way = received(call), call.way
    place, sequences = (
        Coordinate(way.ring, way.team, 0, min(1, way.team - 1)),
        Sequences(call.tokens, call.tokens, "contiguous", Mask()),
    )
    schedule = make_schedule(place, sequences, schedule=call.schedule, resident="q", backward=False)
    by_block: Counter[int] = Counter()
    for step in schedule.steps:
        if isinstance(step, Attend):
            by_block[step.block] += sum(tile.area for tile in step.work)
    flops = Fraction(4 * call.model.hidden * by_block[max(by_block)])
    return flops / Fraction(seen.point_to_point, seen.hops) / (call.tokens // call.ranks)


def smallest(host: Host, factor: Fraction | int = 1) -> float:
    """The shortest shard, in tokens: F / B over how much more a hop's FLOPs are than a ring's."""
    return 1000 * host.tera / host.giga / float(factor)


def hosts_table() -> Table:
    """Ring Attention's table 2, and the same for teams."""
    ring = Call(GPT_7B, 32 * K, 32)
    factors = [intensity(call) for call in (ring, ring.on(32, 4), ring.on(32, 4, "published"))]
    rows = []
    for host in HOSTS:
        shard, flat, published = (smallest(host, factor) / 1000 for factor in factors)
        cells = [f"{host.tera:g}", f"{host.giga:g}", f"{host.block}", f"{shard:.2f}", f"{host.sequence}"]
        rows.append([host.name, *cells, f"{6 * shard:.2f}", f"{flat:.2f}", f"{published:.2f}", executed(ring)])
    head = [
        "10^3 tokens", "TFLOPS", "GB/s", "c, paper", "c, ours", "6 c, paper", "6 c, ours", "shard, 2d C = 4",
        "shard, published C = 4", "how ours was got",
    ]  # fmt: skip
    return Table("Ring Attention, table 2: minimal sequence length", head, rows)


def executed(call: Call) -> str:
    """How a number was got."""
    return f"executed, {call.ranks} fake ranks"


def _gib(number: float | Fraction) -> str:
    return f"{float(number) / GIB:.4f}"
