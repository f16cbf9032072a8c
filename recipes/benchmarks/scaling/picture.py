"""Pictures: time, exposed communication and bytes into a node by ranks."""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

from recipes.benchmarks.papers.picture import COLOURS, FAINT, INK, figure_of, tidy
from recipes.benchmarks.scaling.cases import BEST, HEADS, PUBLISHED, RING, ULYSSES, USP
from recipes.benchmarks.scaling.predictions import Point, predicted
from recipes.benchmarks.scaling.report import GB, LINKS, cases, node_bound

# Told apart by colour-blind readers too (Okabe and Ito).
_STYLES: dict[str, dict[str, Any]] = {
    RING: {"color": INK, "marker": "D"},
    PUBLISHED: {"color": COLOURS[2], "marker": "o"},
    ULYSSES: {"color": "#CC79A7", "marker": "^"},
    USP: {"color": "#E69F00", "marker": "v"},
    BEST: {"color": "#009E73", "marker": "s", "lw": 2.2},
}
_BOUND = {"color": FAINT, "ls": (0, (4, 2)), "lw": 1.6, "label": "lower bound"}


def draw(path: Path, *, weak: bool) -> None:
    """Write a PNG: a column for each number of heads and link, a row for each of time, waiting and bytes.

    Args:
        path: of the file.
        weak: the weak scaling.
    """
    columns = [(heads, link) for link in LINKS for heads in HEADS]
    figure = figure_of(21, 10.5)
    panels = figure.subplots(3, len(columns), squeeze=False)
    for column, (heads, link) in enumerate(columns):
        found = [predicted(case) for case in cases(heads, weak=weak)]
        time, share, node = panels[:, column]
        for name, style in _STYLES.items():
            _line(time, found, link, name, style, "seconds")
            _line(share, found, link, name, style, "share", 100)
            _line(node, [point for point in found if node_bound(point.case)], link, name, style, "node_bytes", 1 / GB)
        bounds = [(point.case.ranks, node_bound(point.case) / GB) for point in found]
        node.plot(*zip(*(point for point in bounds if point[1]), strict=True), **_BOUND)
        for axes in (time, share, node):
            _by_ranks(axes, [point.case.ranks for point in found])
        for axes in (time, node):
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
            axes.yaxis.set_minor_formatter(NullFormatter())
        share.set_ylim(-2, 102)
        tidy(time, f"{heads[0]}/{heads[1]} heads\n{link}")
        for axes in (share, node):
            tidy(axes, "")
        node.set_xlabel("ranks P, 8 on a node")
    for axes, label in zip(panels[:, 0], ("seconds", "exposed, % of the seconds", "into a node, GB"), strict=True):
        axes.set_ylabel(label)
    handles, labels = panels[2][0].get_legend_handles_labels()
    ulysses = panels[0][1].get_legend_handles_labels()
    entries = dict(zip(ulysses[1], ulysses[0], strict=True)) | dict(zip(labels, handles, strict=True))
    figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=6, frameon=False, fontsize=11)
    figure.savefig(path, dpi=110)


def _line(
    axes: Axes, found: list[Point], link: str, name: str, style: dict[str, Any], what: str, scale: float = 1
) -> None:
    here = [point for point in found if (link, name) in point.ways]
    if here:
        values = [scale * getattr(point.ways[link, name], what) for point in here]
        options: dict[str, Any] = {"lw": 1.4, "ms": 5, "label": name} | style
        axes.plot([point.case.ranks for point in here], values, **options)


def _by_ranks(axes: Axes, ranks: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(ranks, [str(n) for n in ranks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.tick_params(axis="x", labelrotation=60)
