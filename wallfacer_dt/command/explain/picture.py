"""The facts as a picture: the mesh in its nodes, the token order, and the timeline of one rank."""

import math
from collections.abc import Mapping
from pathlib import Path

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch, Wedge

from wallfacer_dt.algorithms.steps import CONTEXT
from wallfacer_dt.command.explain.drawn_time import draw_timeline
from wallfacer_dt.command.explain.facts import Facts
from wallfacer_dt.command.explain.ink import BETWEEN, FAINT, INK, WITHIN, check_file, save, tidy
from wallfacer_dt.command.options import OptionError
from wallfacer_dt.mesh import TEAM_AXIS

_STYLES = {"hop": "-", "placed": (0, (7, 2, 1, 2)), "team": (0, (5, 3)), "ulysses": (0, (1, 1.5))}
_NAMES = {"hop": "hop", "placed": "placement, way home", "team": "in a team", "ulysses": "tokens for heads"}
_BENDS = {"hop": 0.18, "placed": 0.1, "team": 0.0, "ulysses": -0.12}
_LEVELS = {WITHIN: "within a node", BETWEEN: "between nodes"}
_MOST_RANKS = 32

Point = tuple[float, float]
Link = tuple[str, int, int]
"""Kind, and two ranks."""


def check_picture(path: Path, ranks: int) -> None:
    """Refuse (OptionError) a picture that cannot be, or has too many ranks to be told apart, before there are facts."""
    check_file(path)
    if ranks > _MOST_RANKS:
        raise OptionError(f"--picture shows at most {_MOST_RANKS} ranks, got {ranks}")


def draw_facts(facts: Facts, rank: int, path: Path) -> None:
    """Write the picture.

    Args:
        facts: of all ranks.
        rank: whose timeline is drawn.
        path: of the file, see :func:`check_picture`.

    Raises:
        OptionError: a file that cannot be written.
    """
    figure = Figure(figsize=(13, 10.5), layout="constrained")
    grid = figure.add_gridspec(2, 2, height_ratios=(1.5, 1), width_ratios=(1.1, 1))
    _draw_mesh(figure.add_subplot(grid[0, 0]), facts)
    _draw_order(figure.add_subplot(grid[0, 1]), facts, rank)
    draw_timeline(figure.add_subplot(grid[1, :]), facts, rank)
    save(figure, path)


def _draw_mesh(axes: Axes, facts: Facts) -> None:
    """Ranks on a circle, by node, so that no line crosses a rank."""
    angles = _angles(facts)
    points = {rank: (math.cos(angle), math.sin(angle)) for rank, angle in angles.items()}
    _draw_nodes(axes, facts, angles)
    links = _links(facts)
    for kind, one, other in links:
        is_within = facts.settings.node(one) == facts.settings.node(other)
        _draw_link(axes, points[one], points[other], kind, WITHIN if is_within else BETWEEN)
    size = 19 if len(points) <= 16 else 15
    for rank, point in points.items():
        axes.plot(*point, marker="o", ms=size, color="white", mec=INK, mew=1, zorder=4)
        axes.annotate(str(rank), point, ha="center", va="center", fontsize=size / 2, color=INK, zorder=5)
    axes.set_xlim(-1.6, 1.6)
    axes.set_ylim(-1.32, 1.32)
    axes.set_aspect("equal")
    axes.axis("off")
    _draw_legend(axes, facts, links)
    asked = facts.settings
    ulysses = f"ulysses {asked.ulysses} x " if asked.ulysses > 1 else ""
    axes.set_title(f"Mesh: {ulysses}ring {asked.ring} x team {asked.team}, ranks in their nodes", loc="left", color=INK)


def _angles(facts: Facts) -> dict[int, float]:
    """Of every rank, clockwise from the top, with a gap of a rank between nodes."""
    nodes = sorted({rank.node for rank in facts.ranks})
    gaps = len(nodes) if len(nodes) > 1 else 0
    step = 2 * math.pi / (len(facts.ranks) + gaps)
    # The first node's gap is halved to both of its ends.
    return {
        rank.rank: math.pi / 2 - step * (rank.rank + 0.5 + (rank.node + 0.5 if gaps else 0.0)) for rank in facts.ranks
    }


def _draw_nodes(axes: Axes, facts: Facts, angles: Mapping[int, float]) -> None:
    nodes: dict[int, list[float]] = {}
    for rank in facts.ranks:
        nodes.setdefault(rank.node, []).append(angles[rank.rank])
    step = 2 * math.pi / (len(facts.ranks) + (len(nodes) if len(nodes) > 1 else 0))
    margin = min(step / 2, 0.35) * 0.9
    for node, held in nodes.items():
        ends = (min(held) - margin, max(held) + margin) if len(nodes) > 1 else (0.0, 2 * math.pi)
        first, last = map(math.degrees, ends)
        axes.add_patch(Wedge((0, 0), 1.17, first, last, width=0.34, fc="#f1f1f1", ec=FAINT, lw=1, zorder=0))
        middle = (min(held) + max(held)) / 2
        x, y = math.cos(middle), math.sin(middle)
        side = "left" if x > 0.3 else "right" if x < -0.3 else "center"
        axes.annotate(f"node {node}", (1.22 * x, 1.26 * y), ha=side, va="center", fontsize=9, color=INK)


def _links(facts: Facts) -> list[Link]:
    """Who sends to whom, each pair once; of what goes both ways, a cycle through its members where they are many."""
    found: dict[Link, None] = {}
    for rank in facts.ranks:
        for transfer in rank.transfers:
            others = [message.rank for message in transfer.sends]
            if transfer.kind in ("move", "carry"):
                kind = "placed" if transfer.axis == CONTEXT else "hop"
                found |= dict.fromkeys((kind, rank.rank, other) for other in others)
                continue
            kind = "team" if transfer.axis == TEAM_AXIS else "ulysses"
            members = sorted({rank.rank, *others})
            for a, b in zip(members, members[1:] + members[:1], strict=True):
                if a != b:
                    found[kind, min(a, b), max(a, b)] = None
    return list(found)


def _draw_link(axes: Axes, start: Point, stop: Point, kind: str, colour: str) -> None:
    is_hop = kind in ("hop", "placed")
    arrow = FancyArrowPatch(
        start, stop, arrowstyle="-|>" if is_hop else "-", mutation_scale=11, shrinkA=10, shrinkB=10, color=colour,
        # Hops there and back are two lines, and a team's are beside them.
        connectionstyle=f"arc3,rad={_BENDS[kind]}",
        linestyle=_STYLES[kind], lw=1.3, zorder=3,
    )  # fmt: skip
    axes.add_patch(arrow)


def _draw_legend(axes: Axes, facts: Facts, links: list[Link]) -> None:
    node = facts.settings.node
    kinds = [kind for kind in _STYLES if any(link[0] == kind for link in links)]
    colours = {WITHIN if node(one) == node(other) else BETWEEN for _, one, other in links}
    handles = [Line2D([], [], color=INK, ls=_STYLES[kind], lw=1.3, label=_NAMES[kind]) for kind in kinds]
    handles += [Line2D([], [], color=c, lw=3, label=name) for c, name in _LEVELS.items() if c in colours]
    if handles:
        axes.legend(
            handles=handles, loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=5, frameon=False, fontsize=8.5
        )


def _draw_order(axes: Axes, facts: Facts, chosen: int) -> None:
    """A strip of the sequence for every rank."""
    colours = colormaps["viridis"]
    most = max(1, len(facts.ranks) - 1)
    for rank in facts.ranks:
        strips = [(start, stop - start) for start, stop in rank.positions]
        axes.broken_barh(strips, (rank.rank - 0.4, 0.8), color=colours(0.9 * rank.rank / most), lw=0)
    axes.set_yticks([rank.rank for rank in facts.ranks])
    for label, rank in zip(axes.get_yticklabels(), facts.ranks, strict=True):
        label.set_fontweight("bold" if rank.rank == chosen else "normal")
    axes.set_ylim(len(facts.ranks) - 0.5, -0.5)
    axes.set_xlim(0, facts.settings.length)
    axes.set_xlabel("position in the sequence, tokens")
    axes.set_ylabel("rank")
    tidy(axes, f"Token order: {facts.settings.order}")
