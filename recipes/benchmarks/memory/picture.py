"""The pictures: peaks by the number of ranks, and the longest sequence under a budget."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

_LAYOUT = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1, wspace=0.02)
_INK = "#222222"
_FAINT = "#8a8a8a"
# Told apart by colour-blind readers too (Okabe and Ito).
_COLOURS = {"tp": "#D55E00", "fsdp": "#009E73", "metp": "#0072B2"}
NAMES = {"tp": "TP+SP", "rsa": "RSA", "fsdp": "FSDP+Ulysses", "metp": "METP"}

Curve = Mapping[int, float]
"""A number by the number of ranks."""


def draw_peaks(
    path: Path, panels: Sequence[tuple[str, Mapping[str, Curve], Mapping[str, Curve]]], exponents: Mapping[str, int]
) -> None:
    """Write peaks by ranks as a PNG, both axes logarithmic.

    Args:
        path: of the file.
        panels: of each the title, MiB measured and MiB by the formula, by method.
        exponents: lines of these slopes beside the first panel's, by method.
    """
    figure = Figure(figsize=(12, 4.8), layout=_LAYOUT)
    FigureCanvasAgg(figure)
    for place, (title, measured, formula) in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), place + 1)
        for method, curve in measured.items():
            colour = _COLOURS[method]
            axes.plot(*_points(curve), color=colour, marker="o", ms=6, lw=1.8, label=f"{NAMES[method]}, measured")
            dashes = {"color": colour, "lw": 1.2, "ls": (0, (4, 3))}
            axes.plot(*_points(formula[method]), label=f"{NAMES[method]}, the table's formula", **dashes)
        for method, exponent in exponents.items() if place == 0 else ():
            _draw_law(axes, measured[method], exponent)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        ranks = sorted(next(iter(measured.values())))
        axes.set_xticks(ranks, [str(p) for p in ranks])
        axes.minorticks_off()
        axes.set_xlabel("ranks p")
        axes.set_ylabel("peak of activations in the forward, MiB a rank")
        _tidy(axes, title)
        axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)


def draw_longest(path: Path, panels: Sequence[tuple[str, Mapping[str, Curve]]], budget: str) -> None:
    """Write the longest sequences by ranks as a PNG, a panel for each model.

    Args:
        path: of the file.
        panels: of each the model's name, and tokens by method.
        budget: what the memory is called.
    """
    figure = Figure(figsize=(13.5, 4.2), layout=_LAYOUT)
    FigureCanvasAgg(figure)
    for place, (name, curves) in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), place + 1)
        for method, curve in curves.items():
            # A model that does not fit has no longest sequence.
            ranks, tokens = _points({p: n / 1000 for p, n in curve.items() if n})
            axes.plot(ranks, tokens, color=_COLOURS[method], marker="o", ms=4, lw=1.8, label=NAMES[method])
        axes.set_xticks([1, 4, 8, 12, 16])
        axes.set_xlabel("ranks p")
        if 8 in curves["metp"]:
            _mark_gain(axes, curves, 8)
        if place == 0:
            axes.set_ylabel(f"longest sequence in {budget}, thousand tokens")
            axes.legend(frameon=False, loc="upper left")
        axes.set_ylim(bottom=0)
        _tidy(axes, name)
    figure.savefig(path, dpi=150)


def _mark_gain(axes: Axes, curves: Mapping[str, Curve], ranks: int) -> None:
    """How many times the next longest sequence METP's is."""
    ours, theirs = curves["metp"][ranks], max(curve[ranks] for method, curve in curves.items() if method != "metp")
    axes.plot([ranks, ranks], [theirs / 1000, ours / 1000], color=_FAINT, lw=1, ls=(0, (2, 2)), zorder=0)
    text = {"xytext": (4, 0), "textcoords": "offset points", "fontsize": 9, "color": _INK}
    axes.annotate(f"× {ours / theirs:.2f}", (ranks, (ours + theirs) / 2000), **text)


def _draw_law(axes: Axes, curve: Curve, exponent: int) -> None:
    """A line of this slope from a curve's first point."""
    ranks, values = _points(curve)
    law = [values[0] * (p / ranks[0]) ** exponent for p in ranks]
    axes.plot(ranks, law, color=_FAINT, lw=1, zorder=0)
    text = {"xytext": (-4, -12), "textcoords": "offset points", "ha": "right", "fontsize": 9, "color": _FAINT}
    axes.annotate(f"$p^{{{exponent}}}$", (ranks[-1], law[-1]), **text)


def _points(curve: Curve) -> tuple[list[int], list[float]]:
    ranks = sorted(curve)
    return ranks, [curve[p] for p in ranks]


def _tidy(axes: Axes, title: str) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_FAINT)
    axes.tick_params(colors=_INK, labelsize=9, color=_FAINT)
    axes.set_title(title, fontsize=11, color=_INK, loc="left", pad=10)
    axes.grid(axis="y", color="#e6e6e6", lw=0.8)
    axes.set_axisbelow(True)
