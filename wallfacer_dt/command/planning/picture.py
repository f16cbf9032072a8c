"""A plan as a picture: how long the best plans take, and the timeline of the chosen one's attention."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from wallfacer_dt.command.explain.ink import FAINT, INK, check_file, save, tidy
from wallfacer_dt.command.options import OptionError
from wallfacer_dt.command.planning.lanes import COMPUTE, draw_kinds, draw_lanes
from wallfacer_dt.command.planning.text import asked_of
from wallfacer_dt.planning import Candidate, Plan, Ranked
from wallfacer_dt.planning.model import kinds_of_layers
from wallfacer_dt.planning.predict import attention_cost

_WAITING = "#E69F00"
_MOST = 20  # bars
_WIDTH, _BAR, _TIMELINE = 12.0, 0.32, 1.9  # inches


def check_picture(path: Path, top: int) -> None:
    """Refuse (OptionError) a picture that cannot be, before anything is planned.

    Args:
        path: of the file, whose ending says the format.
        top: how many plans to draw.
    """
    check_file(path)
    if top > _MOST:
        raise OptionError(f"--picture shows at most {_MOST} plans, got --top {top}")


def draw_plan(plan: Plan, top: int, path: Path) -> None:
    """Write the picture.

    Args:
        plan: the plan.
        top: how many plans to draw.
        path: of the file, see :func:`check_picture`.

    Raises:
        OptionError: a file that cannot be written.
    """
    best = plan.ranked[:top]
    heights = [_BAR * len(best) + 0.9, _TIMELINE, _TIMELINE]
    figure = Figure(figsize=(_WIDTH, sum(heights) + 0.6), layout="constrained")
    bars, *timelines = figure.subplots(3, 1, height_ratios=heights)
    _draw_times(bars, plan, best)
    (_, seen), *others = kinds_of_layers(plan.model, plan.sequence)
    cost = attention_cost(plan.chosen, plan.model, seen, plan.cluster)
    where = " without a window" if others else ""
    lines = {"forward": cost.forward, "backward": cost.backward}
    longest = max(line.seconds for line in lines.values())
    for axes, (phase, line) in zip(timelines, lines.items(), strict=True):
        draw_lanes(axes, line.bars, longest)
        tidy(
            axes,
            f"Attention of plan 1, one layer's {phase}{where}: {line.exposed / (line.seconds or 1):.0%} is waiting",
        )
        axes.tick_params(axis="y", length=0)
    draw_kinds(figure, [bar for line in lines.values() for bar in line.bars])
    save(figure, path)


def _draw_times(axes: Axes, plan: Plan, best: Sequence[Ranked]) -> None:
    rows = range(len(best))
    compute = [1e3 * one.prediction.compute for one in best]
    exposed = [1e3 * one.prediction.exposed for one in best]
    axes.barh(rows, compute, height=0.7, color=COMPUTE, label="computing, predicted")
    axes.barh(rows, exposed, left=compute, height=0.7, color=_WAITING, label="waiting and copying, predicted")
    measured = [(1e3 * one.measured, row) for row, one in zip(rows, best, strict=True) if one.measured is not None]
    if measured:
        axes.plot(*zip(*measured, strict=True), ls="", marker="D", mec=INK, mfc="white", label="measured")
    has_orders = len({one.candidate.order for one in best}) > 1
    names = [_name(one.candidate) + f", {one.candidate.order}" * has_orders for one in best]
    axes.set_yticks(rows, [f"{name}   {number}" for number, name in enumerate(names, 1)])
    axes.set_ylim(len(best) - 0.4, -0.6)
    axes.margins(x=0.02)
    axes.set_xlim(left=0)
    axes.set_xlabel("a step, ms")
    axes.grid(axis="x", color=FAINT, alpha=0.3, lw=0.6)
    axes.set_axisbelow(True)
    cluster = plan.cluster
    nodes = f"{cluster.nodes} node{'s' * (cluster.nodes > 1)}"
    title = f"The best {len(best)} of {plan.considered} plans{asked_of(plan)} on {cluster.ranks} ranks, {nodes}"
    tidy(axes, f"{title}: ulysses x ring x team")
    axes.tick_params(axis="y", length=0)
    # Below, where no bar is.
    axes.legend(loc="upper right", bbox_to_anchor=(1, -0.5 / (_BAR * len(best) + 0.2)), ncols=3, frameon=False,
                fontsize=8.5)  # fmt: skip


def _name(it: Candidate) -> str:
    _, *ways = str(replace(it, order="contiguous")).split(", ")
    return ", ".join([f"{it.ulysses} x {it.ring} x {it.team}", *ways])
