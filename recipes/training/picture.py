"""The picture `curves.png`: losses, how far apart they are, and the bytes that ranks received."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from recipes.training.compare import Comparison
from recipes.training.record import Run

# Inches round every panel, and the share of its width between two.
_LAYOUT: dict[str, Any] = {"w_pad": 0.12, "h_pad": 0.1, "wspace": 0.02}
_INK = "#222222"
_FAINT = "#8a8a8a"
_MANY = 100  # steps, of which each is drawn smaller
# Told apart by colour-blind readers too (Okabe and Ito), for the runs that share a sequence.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")

_WAYS = {2: "two", 3: "three", 4: "four", 5: "five"}

Style = dict[str, Any]


def draw(path: Path, runs: Sequence[Run], comparison: Comparison) -> None:
    """Write the picture of runs and their comparison as a PNG.

    Args:
        path: of the file; its folder is made.
        runs: of the same training, the first of one process being what the others are held against.
        comparison: theirs.
    """
    counted = [run for run in runs if run.forward and run.backward]
    figure = new_figure(13.5 if counted else 10, 4.4)
    panels = figure.subplots(1, 3 if counted else 2, width_ratios=(1.15, 1.15, 1) if counted else (1, 1))
    styles = _styles(runs)
    _draw_losses(panels[0], runs, styles)
    _draw_differences(panels[1], runs, styles, comparison.tolerance)
    if counted:
        _draw_bytes(panels[2], counted, styles)
    for axes in panels:
        _tidy(axes)
    save_figure(figure, path)


def draw_curve(path: Path, run: Run) -> None:
    """Write the losses of one run as a PNG."""
    figure = new_figure(6, 4.2)
    axes = figure.subplots()
    _draw_losses(axes, [run], {run.name: {"color": _COLOURS[0], "lw": 1.8}})
    _tidy(axes)
    save_figure(figure, path)


def new_figure(width: float, height: float) -> Figure:
    """A figure of that many inches, whose panels are laid out by themselves."""
    return Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(**_LAYOUT))


def save_figure(figure: Figure, path: Path) -> None:
    """Write it as a PNG; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _reference(runs: Sequence[Run]) -> Run:
    return next((run for run in runs if run.ranks == 1), runs[0])


def _styles(runs: Sequence[Run]) -> dict[str, Style]:
    """How to draw each run's curve, by name.

    Curves that agree lie on each other: a broad band below, then a line, then rings, then crosses,
    then strokes, so that each shows.
    """
    reference = _reference(runs)
    styles: dict[str, Style] = {reference.name: {"color": "#c9c9c9", "lw": 8, "solid_capstyle": "round", "zorder": 1}}
    shapes = (
        {"lw": 1.8},
        {"lw": 0, "marker": "o", "ms": 7, "mfc": "none", "mew": 1.4},
        {"lw": 0, "marker": "x", "ms": 5, "mew": 1.4},
        {"lw": 0, "marker": "|", "ms": 13, "mew": 1.4},
    )
    others = [run.name for run in runs if run is not reference]
    for place, name in enumerate(others):
        colour = _COLOURS[place % len(_COLOURS)]
        styles[name] = {"color": colour, "zorder": 2 + place, **shapes[place % len(shapes)]}
    return styles


def _draw_losses(axes: Axes, runs: Sequence[Run], styles: dict[str, Style]) -> None:
    for run in runs:
        _plot(axes, run, run.losses, styles[run.name])
    axes.set_title(f"The same training, {_WAYS[len(runs)]} ways" if len(runs) in _WAYS else "Training")
    axes.set_ylabel(f"loss, {runs[0].unit}")
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False, handlelength=2.6)


def _draw_differences(axes: Axes, runs: Sequence[Run], styles: dict[str, Style], tolerance: float) -> None:
    reference = _reference(runs)
    for run in runs:
        if run is reference:
            continue
        pairs = zip(run.losses, reference.losses, strict=True)
        apart = [abs(a - b) for a, b in pairs]  # no comparison: drawn, and where it is not finite a gap
        # A logarithmic axis has no zero; a gap says it.
        shown = [value or math.nan for value in apart]
        _plot(axes, run, shown, {**styles[run.name], "lw": 1.4, "marker": "o", "ms": 4})
    axes.axhline(tolerance, color=_INK, ls=(0, (4, 3)), lw=1)
    axes.annotate(
        f"limit {tolerance:g}",
        (0.02, tolerance),
        xycoords=("axes fraction", "data"),
        xytext=(0, 4),
        textcoords="offset points",
        color=_INK,
        fontsize=9,
    )
    axes.set_yscale("log")
    # Above the limit there is room for the legend.
    axes.set_ylim(top=max(axes.get_ylim()[1], 1e3 * tolerance))
    axes.set_title(f"Loss difference from {reference.name}")
    axes.set_ylabel(reference.unit)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False)


def _plot(axes: Axes, run: Run, values: Sequence[float], style: Style) -> None:
    (line,) = axes.plot(range(1, len(values) + 1), values, label=run.name)
    line.set(**style)
    if len(values) > _MANY:
        line.set(lw=line.get_linewidth() / 2, ms=line.get_markersize() / 2)


def _draw_bytes(axes: Axes, runs: Sequence[Run], styles: dict[str, Style]) -> None:
    width = 0.8 / max(1, len(runs))
    for place, run in enumerate(runs):
        assert run.forward is not None
        assert run.backward is not None
        x = [group + (place - (len(runs) - 1) / 2) * width for group in (0, 1)]
        counted = [max(run.forward.per_layer) / 1e6, max(run.backward.per_layer) / 1e6]
        formula = [max(run.forward.formula) / 1e6, max(run.backward.formula) / 1e6]
        colour = styles[run.name]["color"]
        bars = axes.bar(x, counted, 0.92 * width, color=colour, label=run.name)
        axes.bar_label(bars, fmt="%.2f", padding=4, fontsize=9, color=_INK)
        label = "by the formula" if place == len(runs) - 1 else ""
        axes.hlines(
            formula,
            [left - 0.46 * width for left in x],
            [left + 0.46 * width for left in x],
            color=_INK,
            lw=2,
            label=label,
        )
    axes.set_xticks([0, 1], ["forward", "backward"])
    axes.set_ylim(top=1.5 * axes.get_ylim()[1])
    axes.set_title("Received per rank and layer, as counted")
    axes.set_ylabel("MB")
    if runs:
        axes.legend(frameon=False, loc="upper left")


def _tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_FAINT)
    axes.tick_params(colors=_INK, labelsize=9, color=_FAINT)
    axes.set_title(axes.get_title(), fontsize=11, color=_INK, loc="left", pad=10)
    axes.set_title("", loc="center")
    axes.grid(axis="y", color="#e6e6e6", lw=0.8)
    axes.set_axisbelow(True)
