"""Pictures of WallFacer's figures 5 and 6."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Patch, Rectangle

from recipes.benchmarks.papers.mapping import TEAM, Holding
from recipes.benchmarks.papers.picture import FAINT, INK, figure_of, tidy

# By team whose keys they are; told apart by colour-blind readers too (Okabe and Ito, lightened).
_TEAMS = ("#9ecae9", "#fdc58a", "#9fd9b4", "#e6b3d4")
_WIDTH, _HEIGHT = 1.5, 1.1


def draw_figure_5(path: Path, held: Sequence[Holding]) -> None:
    """Write figure 5 as a PNG: keys and values where they are gathered, and where they are placed.

    Args:
        path: of the file.
        held: by rank.
    """
    figure = figure_of(13, 5)
    gathered, placed = figure.add_subplot(1, 2, 1), figure.add_subplot(1, 2, 2)
    kept = " and ".join(str(one.rank) for one in held if one.to == one.rank)
    title = f"Gathered in the team, and where k, v are sent (ranks {kept} keep theirs)"
    boxes = _boxes(gathered, title, [one.queries for one in held], held)
    for one in held:
        if one.to != one.rank:
            _arrow(gathered, boxes, one.rank, one.to, 0)
    boxes = _boxes(placed, "After initialisation: 4 sub-rings, hops as arrows", [one.keys for one in held], held)
    for one in held:
        _arrow(placed, boxes, one.rank, one.following, 0.25)
    figure.savefig(path, dpi=150)


def _at(rank: int) -> tuple[float, float]:
    """The middle of a rank's box: teams side by side, their members one above the other."""
    team, member = divmod(rank, TEAM)
    return 2.6 * team, -2.4 * member


def _boxes(axes: Axes, title: str, keys: Sequence[int], held: Sequence[Holding]) -> list[Patch]:
    boxes: list[Patch] = []
    for one, owner in zip(held, keys, strict=True):
        x, y = _at(one.rank)
        corner = (x - _WIDTH / 2, y - _HEIGHT / 2)
        box = {"boxstyle": "round,pad=0.05", "fc": _TEAMS[owner], "ec": FAINT, "lw": 1, "zorder": 2}
        boxes.append(axes.add_patch(FancyBboxPatch(corner, _WIDTH, _HEIGHT, **box)))
        text = f"rank {one.rank}\nq of T{one.queries}\nk, v of T{owner}"
        axes.text(x, y, text, ha="center", va="center", fontsize=9, color=INK, zorder=3)
    for team in range(len(held) // TEAM):
        axes.text(2.6 * team, 1.05, f"team T{team}", ha="center", fontsize=10, color=INK)
    axes.set_xlim(-1.2, 2.6 * (len(held) // TEAM - 1) + 1.2)
    axes.set_ylim(-3.6, 1.5)
    axes.set_title(title, fontsize=11, color=INK, loc="left")
    axes.axis("off")
    return boxes


def _arrow(axes: Axes, boxes: Sequence[Patch], start: int, end: int, bend: float) -> None:
    style = {"arrowstyle": "-|>", "mutation_scale": 13, "color": "#555555", "lw": 1.2, "shrinkA": 1, "shrinkB": 2}
    ends = {"patchA": boxes[start], "patchB": boxes[end], "connectionstyle": f"arc3,rad={bend}"}
    axes.add_patch(FancyArrowPatch(_at(start), _at(end), zorder=4, **ends, **style))


def draw_figure_6(path: Path, loaders: Sequence[tuple[str, Sequence[tuple[int, ...]], Sequence[float]]]) -> None:
    """Write figure 6 as a PNG: which chunks a rank holds, and what a causal mask makes of it.

    Args:
        path: of the file.
        loaders: of each its name, chunks by rank, and work by rank as multiples of the mean.
    """
    figure = figure_of(13, 5.2)
    grid = figure.add_gridspec(1, 4, width_ratios=(2, 1, 2, 1))
    for place, (name, held, work) in enumerate(loaders):
        axes, bars = figure.add_subplot(grid[2 * place]), figure.add_subplot(grid[2 * place + 1])
        for rank, chunks in enumerate(held):
            for chunk in chunks:
                axes.add_patch(Rectangle((chunk, rank - 0.4), 1, 0.8, fc=_TEAMS[rank // TEAM], ec="white"))
                axes.text(chunk + 0.5, rank, str(chunk), ha="center", va="center", fontsize=8, color=INK)
        axes.set_xlim(0, 2 * len(held))
        _ranks(axes, len(held))
        axes.set_xlabel("chunk of the sequence, N / 16 tokens each")
        axes.set_xticks(range(0, 2 * len(held) + 1, 4))
        tidy(axes, f"{name}: chunks held (colours: teams)")
        bars.barh(range(len(work)), work, height=0.6, color=[_TEAMS[rank // TEAM] for rank in range(len(work))])
        for rank, share in enumerate(work):
            bars.text(share + 0.05, rank, f"{share:.2f}", va="center", fontsize=8, color=INK)
        bars.axvline(1, color=FAINT, lw=1, ls=(0, (3, 3)), zorder=0)
        bars.set_xlim(0, 2.5)
        _ranks(bars, len(held))
        bars.set_xlabel("causal pairs / mean")
        tidy(bars, "work, published")
    figure.savefig(path, dpi=150)


def _ranks(axes: Axes, ranks: int) -> None:
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    axes.set_ylim(ranks - 0.4, -0.6)
