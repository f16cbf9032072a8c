"""`python -m recipes.benchmarks.scaling`: attention on 8 to 1024 ranks, predicted, beside a lower bound (minutes)."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from recipes.benchmarks.pictures import BLACK, FAINT, GREEN, ORANGE, PINK, Panel, draw
from recipes.benchmarks.report import GB, Table, run
from recipes.benchmarks.scaling.cases import FAST, HEADS, LINKS, PER_NODE, STRONG_RANKS, WEAK_RANKS, Case, predicted
from recipes.benchmarks.ways import BEST, NAMES, PUBLISHED, RING, ULYSSES, USP, Way, names_of
from wallfacer_dt.planning.candidates import attentions


def cases(heads: tuple[int, int], *, weak: bool) -> list[Case]:
    """The points of a curve."""
    return [Case(ranks, *heads, weak=weak) for ranks in (WEAK_RANKS if weak else STRONG_RANKS)]


def first(ways: Sequence[Way], name: str) -> Way | None:
    """The fastest of its kind."""
    return next((way for way in ways if name in names_of(way.candidate)), None)


def ways_table(heads: tuple[int, int], *, weak: bool) -> Table:
    """Every way by ranks and links, forward and backward of one layer's attention."""
    rows = []
    for case in cases(heads, weak=weak):
        every = sum(1 for _ in attentions(case.model, case.sequence, case.cluster(FAST)))
        least = min(way.node_bytes for link in LINKS for way in predicted(case, link))
        for link in LINKS:
            ways, bound = predicted(case, link), case.node_bound
            ratios = [f"{nbytes / bound:.2f}" if bound else "-" for nbytes in (ways[0].node_bytes, least)]
            against = [str(ways[0].candidate), f"{bound / GB:.3g}", *ratios, f"{len(ways)}, {every}"]
            cells = [_cell(first(ways, name)) for name in NAMES]
            rows.append([f"{case.ranks}, {link}", f"{case.sequence.length:,}", *cells, *against])
    head = [
        "ranks", "N", *NAMES, "the best plan", "lower bound into a node, GB", "best plan / bound",
        "least of all / bound", "ways considered, of",
    ]  # fmt: skip
    title = f"{'Weak' if weak else 'Strong'} scaling, {heads[0]}/{heads[1]} heads"
    return Table(title, head, rows, "Each cell: seconds / exposed seconds / share exposed / GB into a node.")


def _cell(way: Way | None) -> str:
    if way is None:
        return "-"
    return f"{way.seconds:.3g} / {way.exposed:.2g} / {way.exposed / way.seconds:.1%} / {way.node_bytes / GB:.3g}"


_STYLES = {
    RING: {"color": BLACK, "marker": "D"}, PUBLISHED: {"color": ORANGE}, ULYSSES: {"color": PINK, "marker": "^"},
    USP: {"color": "#E69F00", "marker": "v"}, BEST: {"color": GREEN, "marker": "s", "lw": 2.2},
    "lower bound": {"color": FAINT, "ls": "--", "marker": ""},
}  # fmt: skip


def picture(path: Path, *, weak: bool) -> str:
    """A column of panels for each number of heads and link, a row for each of time, waiting and bytes."""
    rows: list[list[Panel]] = [[], [], []]
    for link, heads in ((link, heads) for link in LINKS for heads in HEADS):
        points = [(case, predicted(case, link)) for case in cases(heads, weak=weak)]
        curves = {
            name: {case.ranks: way for case, ways in points if (way := first(ways, name)) is not None} for name in NAMES
        }
        time = {name: {p: way.seconds for p, way in curve.items()} for name, curve in curves.items()}
        share = {
            name: {p: 100 * way.exposed / way.seconds for p, way in curve.items()} for name, curve in curves.items()
        }
        node = {n: {p: way.node_bytes / GB for p, way in c.items() if p > PER_NODE} for n, c in curves.items()}
        node["lower bound"] = {case.ranks: case.node_bound / GB for case, _ in points if case.node_bound}
        by_ranks = {"xscale": "log", "xlabel": "ranks P, 8 on a node"}
        made = (
            (f"{heads[0]}/{heads[1]} heads\n{link}", time, {"yscale": "log", "ylabel": "seconds"}),
            ("", share, {"ylim": (-2, 102), "ylabel": "exposed, % of the seconds"}),
            ("", node, {"yscale": "log", "ylabel": "into a node, GB"}),
        )
        for row, (title, found, settings) in zip(rows, made, strict=True):
            row.append(Panel(title, found, by_ranks | settings))
    return draw(path, rows, _STYLES, (21, 12))


def _parts(folder: Path) -> Iterator[Table | str]:
    for weak, name in ((False, "strong"), (True, "weak")):
        yield picture(folder / f"scaling_{name}.png", weak=weak)
        yield from (ways_table(heads, weak=weak) for heads in HEADS)


if __name__ == "__main__":
    run("scaling", _parts)
