"""The report's tables: predictions, bytes of the forward against bounds, and the check by simulation."""

from collections.abc import Sequence

from recipes.benchmarks.memory.tables import Table
from recipes.benchmarks.scaling import simulate
from recipes.benchmarks.scaling.bound import least_of_teams, least_received
from recipes.benchmarks.scaling.cases import BEST, FAST, HEADS, NAMES, PER_NODE, SLOW, STRONG_RANKS, WEAK_RANKS, Case
from recipes.benchmarks.scaling.predictions import Point, Way, predicted
from wallfacer_dt.planning import Candidate

GB = 1e9
LINKS = (FAST, SLOW)


def cases(heads: tuple[int, int], *, weak: bool) -> list[Case]:
    """The points of a curve."""
    return [Case(ranks, *heads, weak=weak) for ranks in (WEAK_RANKS if weak else STRONG_RANKS)]


def node_bound(case: Case) -> float:
    """The least bytes into a node, forward and backward; nothing for one node."""
    return least_received(case.model, case.sequence, case.ranks // PER_NODE) if case.ranks > PER_NODE else 0.0


def ways_table(heads: tuple[int, int], *, weak: bool) -> Table:
    """Every way by ranks and links, forward and backward of one layer's attention."""
    rows = []
    for case in cases(heads, weak=weak):
        point = predicted(case)
        for link in LINKS:
            cells = [_cell(point.ways.get((link, name))) for name in NAMES]
            rows.append([f"{case.ranks}, {link}", f"{case.tokens:,}", *cells, *_against_bound(point, link)])
    head = [
        "ranks", "N", *NAMES, "the best plan", "lower bound into a node, GB", "best plan / bound",
        "least of all / bound", "ways considered, of",
    ]  # fmt: skip
    title = f"{'Weak' if weak else 'Strong'} scaling, {heads[0]}/{heads[1]} heads"
    return Table(title, head, rows, "Each cell: seconds / exposed seconds / share exposed / GB into a node.")


def _cell(way: Way | None) -> str:
    if way is None:
        return "-"
    return f"{way.seconds:.3g} / {way.exposed:.2g} / {way.share:.1%} / {way.node_bytes / GB:.3g}"


def _against_bound(point: Point, link: str) -> list[str]:
    best, bound = point.ways[link, BEST], node_bound(point.case)
    ratios = [f"{nbytes / bound:.2f}" if bound else "-" for nbytes in (best.node_bytes, point.least_node)]
    return [str(best.candidate), f"{bound / GB:.3g}", *ratios, f"{point.considered}, {point.every}"]


def forward_table() -> Table:
    """What a rank receives in the forward, least against bounds."""
    rows = []
    for heads in HEADS:
        for case in cases(heads, weak=False):
            point = predicted(case)
            ring = point.ways[FAST, "ring"].cost.rank_bytes[0]
            teams = least_of_teams(case.model, case.sequence, case.ranks)
            bound = least_received(case.model, case.sequence, case.ranks, backward=False)
            numbers = (ring, point.least_team, teams, point.least, bound)
            rows.append([f"{case.name}, {case.ranks} ranks", *(f"{number / GB:.4g}" for number in numbers)])
    head = [
        "strong scaling", "ring", "least of rings and teams", "4 sqrt(gP) U - (2 + 2g) U", "least of all",
        "bound of any schedule",
    ]  # fmt: skip
    note = (
        "GB into the rank that receives most. The third column is the least that rings and teams of any size can do "
        "without splitting heads, lse left out, so what is predicted is a little more; where C = sqrt(gP) is no whole "
        "number, more so. The last is the bound of the head of this report, of ranks instead of nodes; it allows for a "
        "causal mask, which leaves half of the pairs, and for heads that are split."
    )
    return Table("Into a rank, forward", head, rows, note)


_ORDER = "head_tail"
CHECKS: Sequence[tuple[Case, Candidate, range, bool]] = (
    (Case(1024, 52, 52, False), Candidate(1024, order=_ORDER), range(1), False),
    (Case(1024, 52, 52, False), Candidate(32, 8, 4, "ulysses_in_node", "published", "q", order=_ORDER), range(1), True),
    (Case(1024, 52, 52, False), Candidate(16, 2, 32, "ring_in_node", "2d", "q", order=_ORDER), range(5, 6), True),
    (Case(1024, 64, 8, False), Candidate(4, 8, 32, order=_ORDER), range(8, 16), True),
    (Case(1024, 64, 8, True), Candidate(128, 1, 8, "ulysses_in_node", order=_ORDER), range(9, 10), True),
    (Case(1024, 8, 8, True), Candidate(32, 32, order=_ORDER), range(1023, 1024), True),
    (Case(64, 52, 52, False), Candidate(4, 4, 4, "ulysses_in_node", order=_ORDER), range(7, 8), True),
    (Case(64, 64, 8, False), Candidate(1, 1, 64, order=_ORDER), range(3, 4), True),
)
"""What is run: a case, how its ranks share it, ranks of one node, and whether the backward runs, too."""


def check_table(checks: Sequence[tuple[Case, Candidate, range, bool]] = CHECKS) -> Table:
    """Counted against predicted bytes."""
    rows = []
    for case, candidate, ranks, backward in checks:
        counted = simulate.counted(case, candidate, ranks, backward=backward)
        expected = simulate.predicted(case, candidate, ranks, backward=backward)
        who = f"{ranks.start}" if len(ranks) == 1 else f"{ranks.start} to {ranks.stop - 1} (a node)"
        ways = "forward and backward" if backward else "forward"
        name = f"{case.ranks} ranks, {case.name}, N = {case.tokens:,}: {candidate}"
        numbers = (counted.all, expected.all, counted.crossing, expected.crossing)
        equal = "yes" if counted == expected else "NO"
        rows.append([name, who, ways, *(f"{number:,}" for number in numbers), equal])
    head = [
        "run", "ranks", "of", "bytes counted", "predicted", "of these from other nodes, counted", "predicted", "equal",
    ]  # fmt: skip
    note = (
        "The package's own attention runs on these ranks of a fake process group of that many, on tensors without "
        "contents, and its collectives are counted."
    )
    return Table("Counted by simulation", head, rows, note)
