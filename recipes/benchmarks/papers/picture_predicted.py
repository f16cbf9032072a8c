"""Pictures of figures 7, 9 and 10 as predicted, the paper's improvements as marks."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, NullLocator

from recipes.benchmarks.papers import figure7
from recipes.benchmarks.papers.clusters import Setting, predicted
from recipes.benchmarks.papers.models import K
from recipes.benchmarks.papers.picture import COLOURS, FAINT, INK, figure_of, tidy
from recipes.benchmarks.papers.scaling_figures import Curve

PLAN = "#009E73"
_NARROW = 0.27
_PANELS = 5  # the last group, GPT 3B, has the bars of 7B


def draw_figure_7(path: Path) -> None:
    """Write figure 7 as a PNG: improvements over the ring by length, and the paper's.

    Args:
        path: of the file.
    """
    figure = figure_of(15, 5.4)
    grid = figure.add_gridspec(1, _PANELS + 1, width_ratios=[3] * _PANELS + [1.1])
    everything = figure7.settings()
    for place, (name, model, _, _) in enumerate(figure7.GROUPS[:_PANELS]):
        axes = figure.add_subplot(grid[place])
        here = [s for s in everything if (s.name, s.model) == (name, model)]
        _bars(axes, here)
        tidy(axes, "\n".join([*name.split(", ", 1), model.name]))
    axes = figure.add_subplot(grid[_PANELS])
    for percent in figure7.PRINTED:
        axes.plot([0, 1], [percent, percent], color=COLOURS[1], lw=1.4)
    axes.set_xticks([])
    axes.set_ylim(0, 1.15 * max(figure7.PRINTED))
    tidy(axes, "the paper's\neight, bars\nnot named")
    first = figure.axes[0]
    first.set_ylabel("tokens per second, more than ring, %")
    _legend(figure, first)
    figure.savefig(path, dpi=150)


def _bars(axes: Axes, settings: Sequence[Setting]) -> None:
    for x, setting in enumerate(settings):
        ways = predicted(setting)
        for place, (way, colour, label) in enumerate(
            [(ways.walls[2], COLOURS[2], "Wall-2"), (ways.walls[4], COLOURS[4], "Wall-4"), (ways.best, PLAN, "plan")]
        ):
            assert way is not None
            at, gain = x + (place - 1) * _NARROW, 100 * way.gain(ways.ring)
            axes.bar(at, gain, _NARROW, color=colour, label=label if not x else None)
            where = {"xytext": (0, 2 if gain >= 0 else -2), "textcoords": "offset points", "rotation": 90}
            va = "bottom" if gain >= 0 else "top"
            axes.annotate(f"{gain:+.0f}", (at, gain), ha="center", va=va, fontsize=8, color=INK, **where)
        if not setting.is_causal and not x:
            label = "paper, on one of the two A100 clusters"
            span = [x - 1.5 * _NARROW, x + 0.5 * _NARROW]
            axes.plot(span, [figure7.PRINTED_DIT] * 2, color=COLOURS[1], lw=2, label=label)
    axes.axhline(0, color=FAINT, lw=1)
    axes.margins(y=0.16)
    axes.set_xticks(range(len(settings)), [f"{s.tokens // K}K" for s in settings])
    axes.set_xlabel("sequence length N, tokens")


def _legend(figure: Figure, axes: Axes) -> None:
    """Below all panels, as it would cover something in any of them."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9)


def draw_scaling(path: Path, figures: Sequence[tuple[str, Sequence[Curve]]]) -> None:
    """Write figures 9 and 10 as a PNG: throughput by GPUs.

    Args:
        path: of the file.
        figures: of each its name and its curves; a row of panels for each.
    """
    figure = figure_of(17, 8)
    for row, (name, curves) in enumerate(figures):
        for column, curve in enumerate(curves):
            axes = figure.add_subplot(len(figures), len(curves), row * len(curves) + column + 1)
            _lines(axes, curve)
            tidy(axes, f"{name}\n{curve.name}")
            if not column:
                axes.set_ylabel("K tokens per second")
            if row == len(figures) - 1:
                axes.set_xlabel("GPUs")
    _legend(figure, figure.axes[0])
    figure.savefig(path, dpi=150)


def _lines(axes: Axes, curve: Curve) -> None:
    gpus = [setting.cluster.ranks for setting in curve.settings]
    found = [predicted(setting) for setting in curve.settings]
    for label, colour, mark, ways in (
        ("ring", COLOURS[1], "D", [w.ring for w in found]),
        ("published, better C", COLOURS[2], "o", [w.best_wall for w in found]),
        ("plan", PLAN, "s", [w.best for w in found]),
    ):
        axes.plot(gpus, [way.throughput / 1e3 for way in ways], marker=mark, color=colour, lw=1.6, ms=5, label=label)
    if curve.printed:
        there = found[-1].ring.throughput / 1e3 * (1 + curve.printed / 100)
        label = "our ring with the paper's improvement"
        axes.plot(gpus[-1], there, "*", color=COLOURS[4], ms=14, label=label, zorder=4)
    axes.set_xscale("log", base=2)
    axes.set_xticks(gpus, [str(n) for n in gpus])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_ylim(bottom=0)
    axes.margins(y=0.2)
