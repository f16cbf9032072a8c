"""The panel of the picture that shows when a rank computes and what is under way meanwhile."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from wallfacer_dt.command.explain.facts import Facts, Kind
from wallfacer_dt.command.explain.ink import BETWEEN, INK, WITHIN, tidy
from wallfacer_dt.command.explain.timeline import EXPOSED, Bar, lanes, timeline

_KINDS: dict[Kind, str] = {
    "heads": "tokens for heads",
    "gather": "all-gather",
    "move": "hops",
    "carry": "carried results",
    "exchange": "all-to-all",
    "tokens": "heads for tokens",
}
_OWN, _OTHERS = "#4d4d4d", "#b8b8b8"
_WIDTH, _LETTER = 11.0, 0.075  # inches: of the panel, and of a letter of its labels


def draw_timeline(axes: Axes, facts: Facts, rank: int) -> None:
    """Draw one rank's bars.

    Args:
        axes: where.
        facts: of all ranks.
        rank: whose.
    """
    bars = tuple(timeline(facts.ranks[rank]))
    end = max((bar.stop for bar in bars), default=0.0) or 1.0
    for bar in bars:
        if bar.work:
            _draw_bar(axes, bar, 0, _OWN if bar.work.part == "local" else _OTHERS, end)
    rows = ["compute"]
    for kind, name in _KINDS.items():
        for lane in lanes(bars, kind):
            for bar in lane:
                _draw_bar(axes, bar, len(rows), _level(facts, rank, bar), end)
            rows.append(name if name not in rows else "")
    axes.set_yticks(range(len(rows)), rows)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, end * 1.005)
    axes.set_xlabel(
        "time, in units of all pairs of own rows and one block; a transfer lasts from its start to its wait"
    )
    tidy(axes, f"Steps of rank {rank}: in bars of work whose {_rotating(facts)} it works on")
    axes.tick_params(axis="y", length=0)
    _draw_legend(axes, bars)


def _rotating(facts: Facts) -> str:
    return "queries" if facts.moves == "q" else "keys"


def _draw_bar(axes: Axes, bar: Bar, row: int, colour: str, end: float) -> None:
    width = bar.stop - bar.start
    hatch = "////" if bar.is_exposed else None
    face = "white" if bar.is_exposed else colour
    axes.barh(row, width, left=bar.start, height=0.72, color=face, edgecolor=colour if hatch else "white", hatch=hatch)
    room = width / end * _WIDTH / _LETTER
    label = next((text for text in _labels(bar) if len(text) + 1 <= room), "")
    dark = colour in (_OWN, WITHIN, BETWEEN) and not bar.is_exposed
    text = {"ha": "center", "va": "center", "fontsize": 8.5, "color": "white" if dark else INK}
    if label:
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1.0} if bar.is_exposed else None
        axes.annotate(label, (bar.start + width / 2, row), bbox=box, **text)


def _labels(bar: Bar) -> Sequence[str]:
    """What a bar may be called, the longest first."""
    if bar.work:
        of = ",".join(map(str, bar.work.moves))
        return f"{bar.work.part}, of {of}", f"of {of}", of
    assert bar.transfer is not None, "a bar is one or the other"
    others = ",".join(str(message.rank) for message in bar.transfer.receives)
    if not others:
        return bar.transfer.what, ""
    return f"{bar.transfer.what} from {others}", f"from {others}", others


def _level(facts: Facts, rank: int, bar: Bar) -> str:
    assert bar.transfer is not None, "only transfers have a level"
    node = facts.settings.node
    messages = bar.transfer.sends + bar.transfer.receives
    return BETWEEN if any(node(message.rank) != node(rank) for message in messages) else WITHIN


def _draw_legend(axes: Axes, bars: Sequence[Bar]) -> None:
    handles = [Patch(color=_OWN, label="own rows")]
    if any(bar.work and bar.work.part == "peer" for bar in bars):
        handles.append(Patch(color=_OTHERS, label="the team's rows"))
    handles += [Patch(color=WITHIN, label="within a node"), Patch(color=BETWEEN, label="between nodes")]
    if any(bar.is_exposed for bar in bars):
        exposed = f"nothing to hide behind (drawn {EXPOSED:g} long)"
        handles.append(Patch(facecolor="white", edgecolor=INK, hatch="////", label=exposed))
    axes.legend(
        handles=handles, loc="upper right", bbox_to_anchor=(1, -0.14), ncols=len(handles), frameon=False, fontsize=8.5
    )
