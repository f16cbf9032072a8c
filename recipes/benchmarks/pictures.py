"""Pictures: panels of curves under one legend, drawn without a display."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

FAINT = "#8a8a8a"
# Okabe and Ito's, told apart by colour-blind readers too.
BLACK, ORANGE, BLUE, GREEN, PINK = "#222222", "#D55E00", "#0072B2", "#009E73", "#CC79A7"

Curve = Mapping[int, float] | Mapping[float, float]
"""y by x."""


@dataclass(frozen=True, slots=True)
class Panel:
    """Curves by name on one pair of axes; ``settings`` are matplotlib's, of the axes."""

    title: str
    curves: Mapping[str, Curve]
    settings: Mapping[str, Any] = field(default_factory=dict)


def draw(
    path: Path, rows: Sequence[Sequence[Panel]], styles: Mapping[str, Mapping[str, Any]], size: tuple[float, float]
) -> str:
    """Draw rows of panels into a PNG of a size in inches, by matplotlib's styles of curves; gives it in Markdown."""
    figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1))
    grid = figure.add_gridspec(len(rows), max(map(len, rows)))
    entries: dict[str, Any] = {}
    for place, row in enumerate(rows):
        for column, panel in enumerate(row):
            axes = figure.add_subplot(grid[place, column])
            for name, curve in panel.curves.items():
                style: dict[str, Any] = {"marker": "o", "ms": 5, "lw": 1.6, **styles[name]}
                (entries[name],) = axes.plot(list(curve), list(curve.values()), **style)
            _tidy(axes, panel)
    named = [name for name in styles if name in entries]
    figure.legend([entries[name] for name in named], named, loc="outside lower center", ncols=6, frameon=False)
    figure.savefig(path, dpi=110)
    return f"![{path.stem.replace('_', ' ')}]({path.name})"


def _tidy(axes: Axes, panel: Panel) -> None:
    axes.set(**panel.settings)
    axes.set_title(panel.title, fontsize=11, loc="left", pad=10)
    places = sorted({x for curve in panel.curves.values() for x in curve})
    if axes.get_xscale() == "log":
        axes.set_xticks(places, [f"{x}" for x in places])
        axes.xaxis.set_minor_locator(NullLocator())
    if axes.get_yscale() == "log":
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e6e6e6", lw=0.8)
    axes.set_axisbelow(True)
