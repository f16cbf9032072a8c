"""WallFacer's equations 2 to 5: what one rank receives in the forward of one attention layer.

In elements, for batch B = 1; BNH is P times the activation A of one rank (equation 5). The paper has seconds, with
bandwidth W and latency L: here are the numbers that stand before 1/W and before L.
"""

from fractions import Fraction

from recipes.benchmarks.memory.tables import Table
from recipes.benchmarks.papers.models import DIT_1B, EXAMPLE, GIB, GPT_7B, MIB, Call, K, Model, call_of
from recipes.benchmarks.papers.run import received

EXAMPLE_TOKENS = 64 * K
MESHES = ((16, 2), (16, 4), (64, 2), (64, 4), (64, 8), (256, 4), (256, 16), (1024, 4), (1024, 8), (1024, 32))
"""P and C for the paper's example model."""
OTHERS: tuple[tuple[Model, int, int, int], ...] = (
    (GPT_7B, 128 * K, 64, 2), (GPT_7B, 128 * K, 64, 4), (DIT_1B, 512 * K, 32, 2), (DIT_1B, 512 * K, 32, 4),
)  # fmt: skip
"""Model, N, P and C of the paper's experiments."""


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


def calls() -> list[tuple[Model, Call]]:
    """The published calls of the table, with their models."""
    given = [(EXAMPLE, EXAMPLE_TOKENS, ranks, team) for ranks, team in MESHES] + list(OTHERS)
    return [(model, call_of(model, tokens, ranks, team, "published")) for model, tokens, ranks, team in given]


def ring_table() -> Table:
    """Equation 2, and rings that ran."""
    rows, seen = [], set()
    for model, call in calls():
        ring = call.on(call.ranks, 1)
        if ring in seen:
            continue
        seen.add(ring)
        ours = received(ring)
        paper = 2 * ring_p2p(ring)
        numbers = (gib(paper), gib(ours.point_to_point), f"{float(ours.point_to_point / paper):.4f}", str(ring.ranks))
        rows.append([name(model, ring), *numbers, str(ours.hops), executed(ring)])
    head = ["", "equation 2, GiB", "ours, GiB", "ours / paper", "hops, equation 2", "ours", "how ours was got"]
    note = (
        "What a rank receives point to point in the forward of one layer, in bfloat16. Ours is (P - 1) / P of the "
        "paper's: the equation counts P hops, the last of which would bring a rank its own keys back."
    )
    return Table("WallFacer, equation 2: Ring Attention", head, rows, note)


def team_table() -> Table:
    """Equations 3 and 4, the published schedule and the 2D schedule."""
    rows = []
    for model, call in calls():
        ours, flat = received(call), received(call.on(call.ranks, call.team))
        paper = (2 * team_p2p(call), 2 * team_collective(call))
        cells = [gib(paper[0]), gib(ours.point_to_point), gib(paper[1]), gib(ours.collective)]
        cells += [str(team_hops(call)), str(ours.hops), gib(flat.point_to_point), gib(flat.collective), str(flat.hops)]
        cells += [f"{float(flat.payload / sum(paper)):.3f}", f"{ours.statistics / MIB:.2f}", executed(call)]
        rows.append([f"{name(model, call)}, C = {call.team}", *cells])
    head = [
        "", "equation 4, GiB", "published, GiB", "equation 3, GiB", "published, GiB", "hops, equation 4", "published",
        "2d point to point, GiB", "2d collective, GiB", "2d hops", "2d / equations 3 + 4",
        "lse that travels too, MiB", "how ours was got",
    ]  # fmt: skip
    note = (
        '`schedule="published"` receives what equations 3 and 4 say to the byte, and as many hops; its first hop is '
        "the placement of Algorithm 2. Beside it travels one lse a query and head with every partial output, which "
        "the equations leave out. The 2D schedule never gathers or places keys and values: 2(C - 1) A in the team "
        "instead of 4(C - 1) A, and 2(P / C - 1) A from hop to hop instead of 2(P / C) A, in P / C - 1 hops instead "
        "of P / C^2."
    )
    return Table("WallFacer, equations 3 and 4: the published schedule and 2d", head, rows, note)


def example_table() -> Table:
    """Section 3.2.2's numbers, recomputed."""
    ring, wall = call_of(EXAMPLE, EXAMPLE_TOKENS, 64), call_of(EXAMPLE, EXAMPLE_TOKENS, 64, 4, "published")
    flat = received(wall.on(64, 4))
    got = [received(call) for call in (ring, wall)]
    a = ring.activation
    paper = (ring_p2p(ring), team_collective(wall), team_p2p(wall), team_collective(wall) + team_p2p(wall), a)
    ours = (got[0].point_to_point, got[1].collective, got[1].point_to_point, got[1].payload, a * 2)
    two_d = (None, flat.collective, flat.point_to_point, flat.payload, None)
    printed = ("1.625", "0.152", "0.406", "0.558", "-")
    names = (
        "Ring Attention, equation 2", "WallFacer collective, equation 3", "WallFacer point to point, equation 4",
        "WallFacer, sum", "A, equation 5",
    )  # fmt: skip
    rows = []
    for what, said, elements, mine, less in zip(names, printed, paper, ours, two_d, strict=True):
        units = [f"{2 * float(elements) / GIB:.4f}", f"{2 * float(elements) / 1e9:.4f}"]
        how = "formula" if what.startswith("A,") else "executed, 64 fake ranks"
        rows.append([what, said, *units, gib(mine), "-" if less is None else gib(less), how])
    head = [
        "", "printed, GB", "equation in GiB", "in 10^9 bytes", "ours, published, GiB", "ours, 2d, GiB",
        "how ours was got",
    ]  # fmt: skip
    note = (
        "N = 65,536, H = 6,656, P = 64, C = 4. The printed numbers come out as GiB of two-byte elements, received by "
        "one rank in the forward of one of the 64 layers; in 10^9 bytes they do not. The printed sum is that of the "
        "two rounded numbers. Our ring makes 63 hops, not 64."
    )
    return Table("WallFacer, section 3.2.2: the llama 30B example", head, rows, note)


def gib(number: float | Fraction) -> str:
    """Bytes as GiB."""
    return f"{float(number) / GIB:.4f}"


def name(model: Model, call: Call) -> str:
    """What a row is of."""
    return f"{model.name}, N = {call.tokens:,}, P = {call.ranks}"


def executed(call: Call) -> str:
    """How a number was got."""
    return f"executed, {call.ranks} fake ranks"
