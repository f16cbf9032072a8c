"""Pictures: volume saved by sequence length, and the papers' longest sequences beside ours."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, NullLocator

from recipes.benchmarks.papers.figure1 import LENGTHS, RANKS, WAYS, Point, label, saved
from recipes.benchmarks.papers.models import GIB, K

INK = "#222222"
FAINT = "#8a8a8a"
# Told apart by colour-blind readers too (Okabe and Ito).
COLOURS = {1: "#222222", 2: "#D55E00", 4: "#0072B2"}
_DASHES = {"published": "solid", "2d": "dashed"}
_MARKS = {"published": "o", "2d": "s"}


def figure_of(width: float, height: float) -> Figure:
    """An empty figure that is drawn without a display.

    Args:
        width: in inches.
        height: in inches.

    Returns:
        The figure.
    """
    figure = Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1, wspace=0.03))
    FigureCanvasAgg(figure)
    return figure


def draw_figure_1(path: Path, found: Sequence[Point]) -> None:
    """Write figure 1 as a PNG: bytes by sequence length, and what is saved.

    Args:
        path: of the file.
        found: the volumes.
    """
    figure = figure_of(12.5, 4.8)
    volume, share = figure.add_subplot(1, 2, 1), figure.add_subplot(1, 2, 2)
    for team, schedule in WAYS:
        line = [p for p in found if (p.team, p.schedule) == (team, schedule)]
        style: dict[str, Any] = {"color": COLOURS[team], "ms": 5, "lw": 1.6, "label": label(team, schedule)}
        style |= {"marker": "D", "ls": "solid"} if team == 1 else {"marker": _MARKS[schedule], "ls": _DASHES[schedule]}
        volume.plot([p.tokens for p in line], [p.point_to_point / GIB for p in line], **style)
        if team > 1:
            share.plot([p.tokens for p in line], [100 * saved(list(found), p) for p in line], **style)
    for team in (2, 4):
        share.axhline(100 * (1 - 1 / team), color=FAINT, lw=1, zorder=0)
        where = {"xytext": (0, 22 if team == 2 else -26), "textcoords": "offset points", "fontsize": 9, "color": FAINT}
        share.annotate(f"paper, C = {team}: {100 * (1 - 1 / team):.0f}%", (LENGTHS[0], 100 * (1 - 1 / team)), **where)
    volume.set_yscale("log", base=2)
    volume.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    volume.set_ylabel("received point to point in one layer's forward, GiB a rank")
    share.set_ylabel("point-to-point volume saved against the ring, %")
    share.set_ylim(0, 100)
    for axes, title in ((volume, f"Counted on {RANKS} fake ranks, llama 30B's layer"), (share, "Saved")):
        _by_length(axes)
        tidy(axes, title)
    volume.legend(frameon=False, fontsize=9, handlelength=3.5)
    share.legend(frameon=False, fontsize=9, handlelength=3.5, loc="lower right")
    figure.savefig(path, dpi=150)


def _by_length(axes: Axes) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(LENGTHS, [f"{n // K}K" for n in LENGTHS])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("sequence length N, tokens")


def draw_lengths(path: Path, panels: Sequence[tuple[str, Sequence[tuple[str, float, float]]]]) -> None:
    """Write longest sequences as a PNG, the paper's and ours.

    Args:
        path: of the file.
        panels: of each a title, and by row a name, the paper's K tokens and ours.
    """
    figure = figure_of(13, 6.2)
    for place, (title, rows) in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), place + 1)
        for y, (_, paper, ours) in enumerate(rows):
            axes.plot([paper, ours], [y, y], color="#cccccc", lw=2, zorder=0)
        axes.plot([row[1] for row in rows], range(len(rows)), "o", color=COLOURS[2], ms=7, label="the paper")
        axes.plot([row[2] for row in rows], range(len(rows)), "D", color=COLOURS[4], ms=6, label="ours, by the model")
        axes.set_yticks(range(len(rows)), [row[0] for row in rows])
        axes.invert_yaxis()
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
        axes.set_xlabel("longest sequence, K tokens")
        axes.margins(x=0.1)
        tidy(axes, title)
        axes.grid(axis="x", color="#e6e6e6", lw=0.8)
        axes.legend(frameon=False, fontsize=9, loc="best")
    figure.savefig(path, dpi=150)


def tidy(axes: Axes, title: str) -> None:
    """Spines, ticks and the title as in all pictures.

    Args:
        axes: to change.
        title: of it.
    """
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(colors=INK, labelsize=9, color=FAINT)
    axes.set_title(title, fontsize=11, color=INK, loc="left", pad=10)
    axes.grid(axis="y", color="#e6e6e6", lw=0.8)
    axes.set_axisbelow(True)
