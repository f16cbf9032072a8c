"""Tables and pictures of a record; what they show is said by people, above them."""

import statistics
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from recipes.benchmarks import report
from recipes.benchmarks.cluster import report_papers
from recipes.benchmarks.cluster.cases import HYBRID, PUBLISHED, RING, ULYSSES, USP, Case
from recipes.benchmarks.cluster.record import Measured, Result
from recipes.benchmarks.cluster.run import PREDICTED, PROFILED
from recipes.benchmarks.pictures import BLACK, BLUE, FAINT, GREEN, ORANGE, PINK
from recipes.benchmarks.report import Table

_COLOURS = {
    RING: FAINT, "2d": BLUE, PUBLISHED: "#E69F00", USP: PINK, HYBRID: BLACK, ULYSSES: GREEN,
    PREDICTED: "#56B4E9", PROFILED: ORANGE,
}  # fmt: skip


def write(results: Mapping[Case, Result], page: Path) -> None:
    """Write the tables under a page's text, which stays as it is, and pictures beside it."""
    report.write(page, "recipes.benchmarks.cluster", _parts(results, page))


def _parts(results: Mapping[Case, Result], page: Path) -> Iterator[Table | str]:
    every = {case: one for case, one in results.items() if PROFILED in one.ways}
    if every:
        picture = page.with_suffix(".png")
        draw(picture, every)
        yield f"![Times of every case, and predictions]({picture.name})"
        yield from _tables(every)
    if papers := list(report_papers.tables(results)):
        yield report_papers.picture(page.with_name(f"{page.stem}_papers.png"), results)
        yield from papers


def regret(result: Result, name: str) -> float:
    """How much slower a choice is than the fastest other way, as a part of that; not below 0."""
    chosen = result.ways[name]
    others = [one.seconds for one in result.ways.values() if one.way != chosen.way]
    return max(0.0, chosen.seconds / min(others) - 1)


def over(result: Result, name: str) -> float | None:
    """How many times as long as what is profiled it takes, of the published ones the fastest; None: there is none."""
    some = [one.seconds for known, one in result.ways.items() if _family(known) == name]
    return min(some) / result.ways[PROFILED].seconds if some else None


def _tables(results: Mapping[Case, Result]) -> Iterator[Table]:
    every = [one for result in results.values() for one in set(result.ways.values())]
    chosen = [result.ways[PROFILED] for case, result in results.items() if case.ratio < 1 and not case.figure]
    rows = [
        _summed("regret of what is profiled, %", [100 * regret(r, PROFILED) for r in results.values()], ".1f"),
        _summed("regret of what is predicted, %", [100 * regret(r, PREDICTED) for r in results.values()], ".1f"),
        _summed("predicted above measured, %", [100 * one.error for one in every], "+.1f"),
        _summed("the same, forward or backward alone", [100 * error for one in every for error in one.errors], "+.1f"),
        *(
            _summed(f"busy, {way}, ratio 0.5, %", [100 / one.over_busy[which] for one in chosen], ".1f")
            for which, way in enumerate(("forward", "backward"))
        ),
        _summed("kernels slept above their time, %", [100 * one.overslept for one in every], ".1f"),
        _summed("spread of the rounds, %", [100 * one.spread for one in every if len(one.rounds) > 1], ".1f"),
        *(
            _summed(f"{name} / profiled", [x for r in results.values() if (x := over(r, name)) is not None], ".2f")
            for name in (RING, ULYSSES, USP, PUBLISHED)
        ),
        _summed("profiled / bound", [r.ways[PROFILED].seconds / sum(r.bound) for r in results.values()], ".2f"),
        _summed("choosing, s", [r.choosing for r in results.values()], ".1f"),
    ]
    note = f"{len(results)} cases. Commits: {', '.join(sorted({r.commit for r in results.values()}))}. " + "; ".join(
        sorted({r.machine for r in results.values()})
    )
    yield Table("All cases", ["what", "cases", "least", "median", "most"], rows, note)
    head = [
        "case", "fastest", "s", "profiled", "s", "/ bound", "busy", "forward", "backward", "regret",
        "regret of predicted", "predicted, %", *(f"{name} /" for name in (RING, ULYSSES, USP, PUBLISHED)),
    ]  # fmt: skip
    yield Table("Case by case", head, [_row(result) for result in results.values()])


def _row(result: Result) -> list[str]:
    first, chosen = result.fastest(), result.ways[PROFILED]
    named = str(result.ways[first].way) if first in (PREDICTED, PROFILED) else first
    errors = [100 * one.error for one in result.ways.values()]
    others = [over(result, name) for name in (RING, ULYSSES, USP, PUBLISHED)]
    return [
        result.case.name, named, f"{result.ways[first].seconds:.2f}", str(chosen.way), f"{chosen.seconds:.2f}",
        f"{chosen.seconds / sum(result.bound):.2f}", f"{sum(chosen.busy) / chosen.seconds:.0%}",
        *(f"{1 / over_busy:.0%}" for over_busy in chosen.over_busy),
        f"{regret(result, PROFILED):.0%}", f"{regret(result, PREDICTED):.0%}",
        f"{min(errors):+.0f} to {max(errors):+.0f}",
        *("-" if x is None else f"{x:.2f}" for x in others),
    ]  # fmt: skip


def _family(name: str) -> str:
    """Of a way, by the beginning of its name."""
    return name if name in _COLOURS else next(known for known in _COLOURS if name.startswith(known))


def _summed(what: str, values: list[float], form: str) -> list[str]:
    some = [format(f(values), form) for f in (min, statistics.median, max)] if values else ["-"] * 3
    return [what, str(len(values)), *some]


def draw(path: Path, results: Mapping[Case, Result]) -> None:
    """Draw how long every way takes, in times of the ring's; and what was predicted against what was measured."""
    figure = Figure(figsize=(15, 0.24 * len(results) + 2.5), layout="constrained")
    times, errors = figure.subplots(1, 2, width_ratios=(3, 2))
    names = [result.case.name for result in results.values()]
    _scatter(times, results, lambda one, ring: one.seconds / ring.seconds)
    bounds = [sum(result.bound) / result.ways[RING].seconds for result in results.values()]
    times.plot(bounds, range(len(names)), "|", color=BLACK, ms=9, label="bound")
    times.set(xscale="log", xlabel="time / ring's", yticks=range(len(names)), ylim=(len(names) - 0.5, -0.5))
    times.set_yticklabels(names, fontsize=7)
    times.set_xticks(ticks := [0.25, 0.35, 0.5, 0.7, 1, 1.4, 2], [f"{ratio:g}" for ratio in ticks])
    times.xaxis.set_minor_locator(NullLocator())
    _scatter(errors, results, lambda one, _: 100 * one.error)
    errors.axvspan(-15, 15, color=FAINT, alpha=0.15, lw=0)
    errors.set(xlabel="predicted above measured, %", yticks=[], ylim=(len(names) - 0.5, -0.5))
    for axes in (times, errors):
        axes.grid(axis="x", color=FAINT, alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    found = dict(zip(*reversed(times.get_legend_handles_labels()), strict=True))
    figure.legend(found.values(), found, loc="outside upper center", ncols=5, frameon=False)
    figure.savefig(path, dpi=110)


def _scatter(axes: Axes, results: Mapping[Case, Result], value: Callable[[Measured, Measured], float]) -> None:
    for place, result in enumerate(results.values()):
        for name, one in result.ways.items():
            family = _family(name)
            is_chosen = name in (PREDICTED, PROFILED)
            axes.plot(
                value(one, result.ways[RING]), place, marker="d" if is_chosen else "o", ms=7 if is_chosen else 4, ls="",
                color=_COLOURS[family], mfc="none" if name == PREDICTED else _COLOURS[family], label=family,
            )  # fmt: skip
