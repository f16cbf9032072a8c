"""Of a record, the papers' figures: what was measured beside what was predicted, and what the paper has."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from recipes.benchmarks.cluster.cases import METP, METP_ATTENTION, PLAIN, PUBLISHED, RING, Case
from recipes.benchmarks.cluster.papers import OVERLAP, STRONG
from recipes.benchmarks.cluster.record import Measured, Result
from recipes.benchmarks.cluster.run import PROFILED
from recipes.benchmarks.papers.clusters import PRINTED_DIT
from recipes.benchmarks.pictures import BLUE, FAINT, GREEN, ORANGE, PINK, Panel, draw
from recipes.benchmarks.report import Table

Results = Mapping[Case, Result]
WALL, OWN_RING, CHOICE = "published", "this package's ring", "the planner's choice"
_SHORTEST = 24.5  # thousands of tokens that hide a hop between A100s over InfiniBand, in Ring Attention's table 2
_LINES = {RING: FAINT, "2d, C = 2": "#56B4E9", "2d, C = 4": BLUE, f"{PUBLISHED}, C = 2": "#E69F00"}


def scaling(results: Results) -> Results:
    """Cases of WallFacer's figures."""
    others = "", OVERLAP, METP, METP_ATTENTION
    return {case: one for case, one in results.items() if case.figure not in others}


def hiding(results: Results, figure: str) -> Results:
    """Cases that show how long a block hides a hop, of attention or of METP, the longest hop first."""
    return {case: one for case, one in results.items() if case.figure == figure}


def tables(results: Results) -> Iterator[Table]:
    """The tables of what there is in a record."""
    if some := scaling(results):
        head = ["figure and cluster", "C", "published", "predicted", "the paper", "ring", "predicted", "choice",
                "predicted", "the choice"]  # fmt: skip
        yield Table("WallFacer's figures", head, [_row(one) for one in some.values()])
    if some := hiding(results, OVERLAP):
        head = ["hop / block", "tokens", "hide a hop", "A100s, K tokens",
                *(f"{name}, {way}" for name in _LINES for way in ("forward", "backward"))]  # fmt: skip
        rows = [_hiding(case, one) for case, one in some.items()]
        yield Table("Ring Attention, table 2: what hides a hop", head, rows)
    if some := hiding(results, METP):
        head = ["hop / block", "forward", "predicted", "one after the other", "backward", "predicted",
                "one after the other"]  # fmt: skip
        yield Table("METP, figure 7", head, [_metp(case, one) for case, one in some.items()])
    if some := hiding(results, METP_ATTENTION):
        head = ["hop / block", "forward", "predicted", "backward", "predicted"]
        rows = [[f"{case.ratio:g}", *_beside(one.ways[METP_ATTENTION])] for case, one in some.items()]
        yield Table(METP_ATTENTION, head, rows)


def gain(result: Result, name: str, *, predicted: bool = False) -> float:
    """How much more tokens per second than the papers' ring: 0.5 is half as much again."""
    ring, way = (result.ways[which] for which in (PLAIN, name))
    return sum(ring.predicted) / sum(way.predicted) - 1 if predicted else ring.seconds / way.seconds - 1


def _row(result: Result) -> list[str]:
    case, wall = result.case, result.fastest(PUBLISHED)
    both = (False, True)
    gains = [f"{100 * gain(result, name, predicted=it):+.0f}%" for name in (wall, RING, PROFILED) for it in both]
    is_printed = case.figure.startswith(f"{STRONG}, DiT") and case.machines.ranks == 32
    name = f"{case.figure}: {case.machines.nodes} x {case.machines.per_node}"
    paper = f"+{PRINTED_DIT}%, of one of two" if is_printed else "not in the text"
    return [name, wall[-1], *gains[:2], paper, *gains[2:], str(result.ways[PROFILED].way)]


def _hiding(case: Case, result: Result) -> list[str]:
    cells = (iter(_beside(result.ways[name])) for name in _LINES)
    return [
        f"{case.ratio:g}", str(case.tokens), f"{case.ratio * case.tokens:g}", f"{_SHORTEST / case.ratio:.1f}",
        *(f"{measured} / {told}" for some in cells for measured, told in zip(some, some, strict=True)),
    ]  # fmt: skip


def _metp(case: Case, result: Result) -> list[str]:
    forward, predicted_forward, *backward = _beside(result.ways[METP])
    # Hops of the forward bring weights; those of the backward weights, and sums of gradients in float32.
    hops = [(case.machines.ranks - 1) * case.ratio / case.machines.ranks * parts for parts in (1, 3 / 2.5)]
    alone = [f"{1 + hop:.2f}" for hop in hops]
    return [f"{case.ratio:g}", forward, predicted_forward, alone[0], *backward, alone[1]]


def _beside(one: Measured) -> list[str]:
    """Of forward and backward, the time over that in which the device computes, and as predicted."""
    predicted = (seconds / busy for seconds, busy in zip(one.predicted, one.busy, strict=True))
    return [f"{x:.2f}" for pair in zip(one.over_busy, predicted, strict=True) for x in pair]


def picture(path: Path, results: Results) -> str:
    """What is gained over the ring, and what hides behind a block; in Markdown."""
    gains: dict[str, dict[str, dict[int, float]]] = {}
    for case, one in scaling(results).items():
        model = case.figure.rpartition(", ")[0]
        panel = gains.setdefault(f"{model}, {case.machines.nodes} nodes" if "DiT" in model else model, {})
        for name, way in ((WALL, one.fastest(PUBLISHED)), (OWN_RING, RING), (CHOICE, PROFILED)):
            for told in (False, True):
                curve = panel.setdefault(name + ", predicted" * told, {})
                curve[case.machines.ranks] = 100 * gain(one, way, predicted=told)
    hides: dict[str, dict[float, float]] = {}
    for figure, names in ((OVERLAP, list(_LINES)), (METP, [METP]), (METP_ATTENTION, [METP_ATTENTION])):
        for case, one in hiding(results, figure).items():
            for name in names:
                hides.setdefault(name, {})[case.ratio] = one.ways[name].seconds / sum(one.ways[name].busy)
    words = {"xlabel": "ranks", "ylabel": "over the papers' ring, %", "xscale": "log"}
    # Of a figure that has one number of ranks here there is no curve.
    panels = [Panel(title, curves, words) for title, curves in gains.items() if len(curves[CHOICE]) > 1]
    hidden = Panel("What hides a hop, 8 ranks", hides, {"xlabel": "hop / block", "ylabel": "time / computing"})
    return draw(path, [panels[:3], [*panels[3:], hidden]], _STYLES, (15, 8))


_COLOURS = {**_LINES, METP: GREEN, METP_ATTENTION: PINK, WALL: "#E69F00", OWN_RING: FAINT, CHOICE: ORANGE}
_STYLES = {name: {"color": colour} for name, colour in _COLOURS.items()} | {
    f"{name}, predicted": {"color": _COLOURS[name], "ls": ":", "marker": "_"} for name in (WALL, OWN_RING, CHOICE)
}
