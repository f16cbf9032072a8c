"""What a rank receives in the forward, in GB: the least of rings and teams, of all ways, and of any schedule."""

from math import sqrt

from recipes.benchmarks.report import GB, Table
from recipes.benchmarks.scaling.__main__ import cases, first
from recipes.benchmarks.scaling.bound import least_received
from recipes.benchmarks.scaling.cases import FAST, HEADS, predicted
from recipes.benchmarks.ways import RING
from wallfacer_dt import ModelShape, SequenceShape


def least_of_teams(model: ModelShape, sequence: SequenceShape, ranks: int) -> float:
    """The least that a rank receives in the forward from rings and teams of any size, heads not split, lse left out.

    That is 2(C - 1) U + 2g(P / C - 1) U at C = sqrt(g P), which need not be a whole number, within 1 and P.
    """
    g = model.keys / model.heads
    team = min(max(sqrt(g * ranks), 1.0), ranks)
    shard = sequence.batch * sequence.length * model.heads * model.dim / ranks
    return (2 * (team - 1) + 2 * g * (ranks / team - 1)) * shard * sequence.dtype.itemsize


def forward_table() -> Table:
    """What a rank receives in the forward, least against bounds."""
    rows = []
    for case in (case for heads in HEADS for case in cases(heads, weak=False)):
        ways = predicted(case, FAST)
        ring = first(ways, RING)
        assert ring is not None
        teams = min(way.rank_bytes[0] for way in ways if way.candidate.ulysses == 1)
        least = min(way.rank_bytes[0] for way in ways)
        of_teams = least_of_teams(case.model, case.sequence, case.ranks)
        bound = least_received(case.model, case.sequence, case.ranks, backward=False)
        numbers = (ring.rank_bytes[0], teams, of_teams, least, bound)
        rows.append(
            [f"{case.heads}/{case.kv_heads} heads, {case.ranks} ranks", *(f"{number / GB:.4g}" for number in numbers)]
        )
    head = [
        "strong scaling", "ring", "least of rings and teams", "4 sqrt(gP) U - (2 + 2g) U", "least of all",
        "bound of any schedule",
    ]  # fmt: skip
    return Table("Into a rank, forward", head, rows)
