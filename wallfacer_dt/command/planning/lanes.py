"""A timeline's bars: when a rank computes, and when its links are busy."""

from collections.abc import Iterator, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from wallfacer_dt.command.explain.ink import INK
from wallfacer_dt.planning.timeline import Bar

COMPUTE = "#4d4d4d"
_LANES = {"compute": "compute", "intra": "within a node", "inter": "between nodes"}
_KINDS = {
    "local": ("own rows", COMPUTE),
    "peer": ("the team's rows", "#b8b8b8"),
    "heads": ("tokens for heads, and back", "#D55E00"),
    "gather": ("all-gather in a team", "#009E73"),
    "hop": ("hop round a ring", "#0072B2"),
    "carry": ("results carried along", "#56B4E9"),
    "exchange": ("all-to-all in a team", "#CC79A7"),
    "projections": ("METP's projections", "#8c8c8c"),
    "weights": ("their weights and gradients", "#F0E442"),
}
_DARK = ("local", "heads", "gather", "hop")
_HEIGHT = 0.72  # of a row's bars
_INCHES, _LETTER = 8.0, 0.075  # of a panel, and of a letter of its labels


def draw_lanes(axes: Axes, bars: Sequence[Bar], longest: float) -> None:
    """Draw the bars of one call.

    Args:
        axes: where.
        bars: of a timeline.
        longest: seconds at which the axis ends.
    """
    rows = {lane: row for row, lane in enumerate(_LANES)}
    for bar, track, tracks in _beside(bars):
        kind = kind_of(bar)
        height = _HEIGHT / tracks
        row = rows[bar.lane] + height * track - (_HEIGHT - height) / 2
        width = bar.stop - bar.start
        share = width / (longest or 1)
        colour = _KINDS[kind][1]
        # A white edge would hide a bar that is thinner than two, and without any the thinnest are not seen.
        edge = "white" if share > 0.004 else colour
        axes.barh(row, 1e3 * width, left=1e3 * bar.start, height=height, color=colour, edgecolor=edge, linewidth=0.6)
        label = next((text for text in _labels(bar, kind) if len(text) + 1 <= share * _INCHES / _LETTER), "")
        if label:
            ink = "white" if kind in _DARK else INK
            middle = 1e3 * (bar.start + width / 2), row
            axes.annotate(label, middle, ha="center", va="center", fontsize=8, color=ink)
    axes.set_yticks(range(len(rows)), list(_LANES.values()))
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, 1e3 * (longest or 1) * 1.005)
    axes.set_xlabel("time, ms")


def _beside(bars: Sequence[Bar]) -> Iterator[tuple[Bar, int, int]]:
    """Every bar, its track, and how many its lane has: as few as keep those apart that share a link."""
    for lane in _LANES:
        ends: list[float] = []
        found = []
        for bar in sorted((bar for bar in bars if bar.lane == lane), key=lambda bar: bar.start):
            track = next((number for number, end in enumerate(ends) if end <= bar.start), len(ends))
            ends[track:] = [bar.stop, *ends[track + 1 :]]
            found.append((bar, track))
        yield from ((bar, track, len(ends)) for bar, track in found)


def draw_kinds(figure: Figure, bars: Sequence[Bar]) -> None:
    """Draw what colours mean, under all panels.

    Args:
        figure: where.
        bars: of all timelines.
    """
    found = {kind_of(bar) for bar in bars}
    handles = [Patch(color=colour, label=name) for kind, (name, colour) in _KINDS.items() if kind in found]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=8.5)


def kind_of(bar: Bar) -> str:
    """Which of the kinds a bar is, by how ``planning.attention`` and ``planning.projections`` call it."""
    first, *rest = bar.what.split()
    if bar.lane == "compute":
        return first
    if first == "permute":
        return "hop" if rest[2] == "to" else "carry"
    kinds = {"to_heads": "heads", "to_tokens": "heads", "all_gather": "gather", "all_to_all": "exchange"}
    return (kinds | {"projections'": "weights"})[first]


def _labels(bar: Bar, kind: str) -> Iterator[str]:
    """What a bar may be called, the longest first."""
    words = bar.what.split()
    if kind in ("projections", "weights"):
        yield bar.what
    elif bar.lane == "compute":
        yield from (f"{'own' if kind == 'local' else 'team'} x {words[-1]}", words[-1])
    elif kind == "heads":
        yield from (f"{words[0].replace('_', ' ')}, group {words[-1]}", words[0].replace("_", " "))
    else:
        yield words[3 if kind == "exchange" else 2]
