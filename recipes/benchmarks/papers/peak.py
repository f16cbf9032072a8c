"""WallFacer's equations 6 and 7: what is held before the last layer's attention, in units of A."""

from fractions import Fraction

from recipes.benchmarks.memory.tables import Table
from recipes.benchmarks.papers.equations import EXAMPLE_TOKENS, executed
from recipes.benchmarks.papers.models import EXAMPLE, GIB, Call, call_of
from recipes.benchmarks.papers.run import held

RANKS = 64
WAYS = ((1, "2d"), (2, "published"), (4, "published"), (8, "published"), (2, "2d"), (4, "2d"), (8, "2d"))
"""C and schedule."""


def activations(layers: int, team: int) -> int:
    """Equations 6 (C = 1) and 7: A's held beside the model's states, Y + 1 checkpoints and the team's q, k and v."""
    return layers + 1 + 3 * team


def ours_before(call: Call) -> int:
    """What the package's call holds when its first block is computed, in A.

    That is its own q, k and v; the others' queries of the team, alone (published), or, where that makes no copy or
    they have not arrived yet, everyone's; k and v that are computed with, where they are not its own; and those that
    arrive. What is sent is a copy at first.
    """
    team, blocks = call.team, call.ring // call.team
    if call.schedule == "2d" or team == 1:
        return 3 + (4 if call.ring > 1 else 0) + (team if team > 1 else 0)
    return 3 + max(2, team - 1) + 2 * team * (2 if blocks > 1 else 1)


def table() -> Table:
    """The equations, and what is measured."""
    rows = []
    for team, schedule in WAYS:
        call = call_of(EXAMPLE, EXAMPLE_TOKENS, RANKS, team, schedule)
        size = float(2 * call.activation)
        seen = held(call)
        paper, total = 3 * team, activations(EXAMPLE.layers, team)
        ours = [f"{n / size:.2f}" for n in (seen.before, seen.peak, seen.kept, seen.step_peak)]
        all_in = EXAMPLE.layers + 1 + seen.before / size
        label = "Ring Attention, C = 1" if team == 1 else f"{schedule}, C = {team}"
        equation = "-" if schedule == "2d" and team > 1 else f"{total}"
        cells = ["-" if equation == "-" else str(paper), ours[0], equation, f"{all_in:.2f}", *ours[1:]]
        rows.append([label, *cells, executed(call)])
    head = [
        "A = 13 MiB", "q, k, v before attention, paper", "ours, before the first block", "with Y + 1 kept, paper",
        "ours", "ours, peak of forward", "ours, after forward", "ours, with backward", "how ours was got",
    ]  # fmt: skip
    return Table("WallFacer, equations 6 and 7: peak memory of the llama 30B example", head, rows, _note())


def _note() -> str:
    ring, wall = (activations(EXAMPLE.layers, team) for team in (1, 4))
    weights = 2 * EXAMPLE.parameters / GIB
    before = {
        w: held(call_of(EXAMPLE, EXAMPLE_TOKENS, RANKS, *w)).before for w in ((1, "2d"), (4, "published"), (4, "2d"))
    }
    size = 2 * call_of(EXAMPLE, EXAMPLE_TOKENS, RANKS).activation
    base = EXAMPLE.layers + 1 + Fraction(before[1, "2d"]) / size
    mine = [float((Fraction(before[way]) - before[1, "2d"]) / size / base) for way in ((4, "published"), (4, "2d"))]
    return (
        f"Y = {EXAMPLE.layers}, P = {RANKS}, bfloat16. The counts {ring} A and {wall} A come out; {wall - ring} / "
        f"{ring} is {(wall - ring) / ring:.2%}, which is less than the printed 13.2% only with the model's states "
        f"counted in: the weights alone, which ZeRO-2 does not shard, are {weights:.1f} GiB, beside which the extra "
        f"{(wall - ring) * float(size) / GIB:.2f} GiB is {(wall - ring) * float(size) / GIB / weights:.2%}. Counted as "
        f"the paper does, without states, ours is {mine[0]:.1%} (published) and {mine[1]:.1%} (2d) more than our ring. "
        "Ours holds more because the equations count q, k and v alone: keys and values are also on their way to a "
        "rank while others are computed with (2C A published, 2 A in a ring and in 2d), one's own shards stay for the "
        "backward, and what a ring or 2d sends first is a copy (2 A). At the peak of the forward the output, which is "
        "merged into in float32 (2 A each, own and others'), and a block's come on top; in the backward the "
        "gradients, in float32 too. After the forward every way holds q, k, v, the output and lse: 4 A."
    )
