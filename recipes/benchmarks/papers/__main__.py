"""`python -m recipes.benchmarks.papers`: WallFacer's figures 7, 9 and 10, predicted (minutes on one core)."""

from collections.abc import Iterator
from pathlib import Path

from recipes.benchmarks.papers.clusters import Curves, Step, Steps, predicted, printed, scalings, throughputs
from recipes.benchmarks.pictures import BLACK, BLUE, GREEN, ORANGE, Panel, draw
from recipes.benchmarks.report import K, Table, run


def table(title: str, curves: Curves) -> Table:
    """Predictions, and the paper's improvements where the text has them."""
    rows = []
    for name, setting in ((name, setting) for name, curve in curves.items() for setting in curve):
        steps, paper = predicted(setting), printed(setting)
        said = "not in the text" if paper is None else f"+{paper}%"
        where = f"{name}, {setting.cluster.ranks} GPUs, {setting.tokens // K}K"
        rows.append([where, said, *_cells(steps), f"predicted, best of {steps.considered} plans"])
    head = [
        "model, cluster, GPUs, N", "paper, better C over ring", "ring, K tokens/s", "Wall-2", "Wall-4", "plan",
        "ring waits", "Wall-2 over ring", "Wall-4", "plan", "attention alone, Wall-2", "Wall-4", "plan", "the plan",
        "how ours was got",
    ]  # fmt: skip
    return Table(title, head, rows)


def _cells(steps: Steps) -> list[str]:
    def gain(step: Step | None, *, attention: bool = False) -> str:
        return "-" if step is None else f"{100 * step.gain(steps.ring, attention=attention):+.1f}%"

    some = [*steps.walls.values(), steps.best]
    speeds = ["-" if step is None else f"{step.throughput / 1e3:.1f}" for step in (steps.ring, *some)]
    waits = f"{steps.ring.prediction.exposed / steps.ring.prediction.seconds:.0%}"
    plan = str(steps.best.candidate).replace(", checkpoint attention", "")
    return [*speeds, waits, *map(gain, some), *(gain(step, attention=True) for step in some), plan]


_STYLES = {
    "ring": {"color": BLACK, "marker": "D"}, "published, better C": {"color": ORANGE},
    "plan": {"color": GREEN, "marker": "s"}, "the paper": {"color": BLUE, "marker": "*", "ms": 14, "ls": ""},
}  # fmt: skip


def panels(curves: Curves) -> list[Panel]:
    """Throughput by GPUs, or where these are as many by length; the paper's improvement stands on our ring."""
    made = []
    for name, curve in curves.items():
        is_scaling = len({setting.cluster.ranks for setting in curve}) > 1
        lines: dict[str, dict[int, float]] = {name: {} for name in _STYLES}
        for setting in curve:
            steps, paper = predicted(setting), printed(setting)
            x = setting.cluster.ranks if is_scaling else setting.tokens // K
            named = {"ring": steps.ring, "published, better C": steps.best_wall, "plan": steps.best}
            lines |= {line: lines[line] | {x: step.throughput / 1e3} for line, step in named.items()}
            if paper is not None:
                lines["the paper"][x] = steps.ring.throughput / 1e3 * (1 + paper / 100)
        settings = {"xscale": "log", "xlabel": "GPUs" if is_scaling else "N, K tokens", "ylabel": "K tokens per second"}
        made.append(Panel(name, lines, settings))
    return made


def _parts(folder: Path) -> Iterator[Table | str]:
    figures = (
        ("7: throughput on 32 GPUs", throughputs()), ("9: strong scaling at 128K", scalings(weak=False)),
        ("10: weak scaling", scalings(weak=True)),
    )  # fmt: skip
    for title, curves in figures:
        picture = folder / f"papers_figure{title.partition(':')[0]}.png"
        yield table(f"WallFacer, figure {title}, predicted", curves)
        yield draw(picture, [panels(curves)], _STYLES, (3.2 * len(curves), 4.5))


if __name__ == "__main__":
    run("papers", _parts)
