"""The picture: every contender's time beside the ring's, a panel for each rate."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from recipes.benchmarks.cluster.cases import Case, rate_name
from recipes.benchmarks.cluster.contenders import FLOOR, GATHER, PLANNED, PUBLISHED, RING, ULYSSES, USP
from recipes.benchmarks.cluster.record import Entry

_INK, _FAINT = "#222222", "#8a8a8a"
# By the beginning of a name: colour (Okabe and Ito's, told apart by colour-blind readers too) and markers.
_STYLES = (
    (PLANNED, "#D55E00", "o"),
    (FLOOR, _INK, "_"),
    ("ring, head-tail", _FAINT, "o"),
    (PUBLISHED, "#E69F00", "^v"),
    ("2d", "#0072B2", "sDph"),
    (f"{ULYSSES} across", "#009E73", "PX"),
    (ULYSSES, "#009E73", "o"),
    (USP, "#CC79A7", "*"),
    (GATHER, _INK, "d"),
)
_RATIOS = (0.125, 0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8)


def draw(path: Path, cases: Mapping[Case, Mapping[str, Entry]]) -> None:
    """Write the picture as a PNG.

    Args:
        path: of the file.
        cases: the contenders by case.
    """
    rates = list(dict.fromkeys(case.rate for case in sorted(cases, key=lambda case: -(case.rate or 10**9))))
    shapes = list(dict.fromkeys(_shape(case) for case in cases))
    names = sorted(dict.fromkeys(name for one in cases.values() for name in one if name != RING), key=_style_place)
    styles = dict(_styled(names))
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1, hspace=0.03)
    figure = Figure(figsize=(max(11, 1.5 * len(shapes) + 3), 3.0 * len(rates) + 1.6), layout=layout)
    FigureCanvasAgg(figure)
    panels = [figure.add_subplot(len(rates), 1, place + 1) for place in range(len(rates))]
    for rate, axes in zip(rates, panels, strict=True):
        for place, shape in enumerate(shapes):
            found = [one for case, one in cases.items() if (case.rate, _shape(case)) == (rate, shape)]
            for measured in found:
                _draw_case(axes, place, measured, names, styles)
        _tidy(axes, rate_name(rate), shapes)
    panels[-1].set_xlabel("query/key heads, mask, tokens of the sequence")
    handles = {name: handle for axes in panels for handle, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    shown = [name for name in names if name in handles]
    figure.legend(
        [handles[name] for name in shown], shown, loc="outside lower center", ncols=3, frameon=False, fontsize=9
    )
    figure.savefig(path, dpi=130)


def _draw_case(
    axes: Axes,
    place: int,
    measured: Mapping[str, Entry],
    names: list[str],
    styles: Mapping[str, tuple[str, str]],
) -> None:
    # Each contender has its own column within a case, so that equal ones do not hide each other.
    for column, name in enumerate(names):
        if name in measured:
            colour, marker = styles[name]
            x = place + 0.8 * ((column + 0.5) / len(names) - 0.5)
            ring = measured[RING].seconds
            low, high = (bound / ring for bound in (min(measured[name].sums), max(measured[name].sums)))
            axes.plot([x, x], [low, high], color=colour, lw=1, alpha=0.6)
            size = 8 if name in (PLANNED, FLOOR) else 6
            axes.plot(x, measured[name].seconds / ring, color=colour, marker=marker, ms=size, ls="", label=name)


def _styled(names: list[str]) -> Iterator[tuple[str, tuple[str, str]]]:
    for start, colour, markers in _STYLES:
        family = [name for name in names if _style(name) == start]
        for place, name in enumerate(family):
            yield name, (colour, markers[place % len(markers)])


def _style(name: str) -> str:
    return next((start for start, *_ in _STYLES if name.startswith(start)), PLANNED)


def _style_place(name: str) -> tuple[int, int, str]:
    # "team 2" before "team 16".
    return [start for start, *_ in _STYLES].index(_style(name)), len(name.split()[-1]), name.split()[-1]


def _shape(case: Case) -> str:
    return f"{case.heads}/{case.kv_heads}\n{case.mask}\nN = {case.length}"


def _tidy(axes: Axes, title: str, shapes: list[str]) -> None:
    axes.axhline(1, color=_INK, lw=1, zorder=0)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(FixedLocator(_RATIOS))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_ylabel("seconds / ring's seconds")
    axes.set_xlim(-0.5, len(shapes) - 0.5)
    axes.set_xticks(range(len(shapes)), shapes)
    for border in range(1, len(shapes)):
        axes.axvline(border - 0.5, color="#e6e6e6", lw=0.8, zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_FAINT)
    axes.tick_params(colors=_INK, labelsize=9, color=_FAINT)
    axes.set_title(f"{title}: medians, and from the fastest to the slowest round", fontsize=11, color=_INK, loc="left")
    axes.grid(axis="y", color="#e6e6e6", lw=0.8)
    axes.set_axisbelow(True)
