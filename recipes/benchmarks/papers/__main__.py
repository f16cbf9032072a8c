"""Predict WallFacer's figures 7, 9 and 10, and write the report (a minute on two cores).

python -m recipes.benchmarks.papers
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import typer

from recipes.benchmarks.papers.clusters import (
    DIT_1B,
    GPT_3B,
    GPT_7B,
    INFINIBAND,
    NAMES,
    SLOW_INFINIBAND,
    Setting,
    Step,
    Steps,
    a100,
    h100,
    predicted,
)  # fmt: skip
from recipes.benchmarks.pictures import BLACK, BLUE, GREEN, ORANGE, Panel, draw
from recipes.benchmarks.report import K, Table, write

PRINTED_DIT, PRINTED_GPT = 114.33, 60.71
"""Improvements over the ring in percent: of DiT on 32 A100s at 128K (section 4.3), of GPT on 64 H100s (figure 9)."""

Curves = Mapping[str, Sequence[Setting]]


def throughputs() -> Curves:
    """Figure 7 by model and cluster: 32 GPUs; the text names one length only, the figure itself could not be read."""
    groups = (
        ("A100, 2 x 16", DIT_1B, a100(2, 16)), ("A100, 4 x 8", DIT_1B, a100(4, 8)), ("H100, 4 x 8", GPT_7B, h100(32)),
        ("H100, 4 x 8, 200 Gbit/s", GPT_7B, h100(32, SLOW_INFINIBAND)),
        ("H100, 4 x 8, as one link", GPT_7B, h100(32, nics=1)), ("H100, 4 x 8", GPT_3B, h100(32)),
    )  # fmt: skip
    return {
        f"{name}, {NAMES[model]}": [Setting(name, model, n * K, cluster) for n in (128, 256, 512)]
        for name, model, cluster in groups
    }


def scalings(*, weak: bool) -> Curves:
    """Figure 9 at 128K tokens, or figure 10, whose sequences grow with the GPUs from 64K (GPT) and 128K (DiT) on 8."""
    curves = {}
    for nodes in (2, 4):
        curves[f"DiT 1B, A100s on {nodes} nodes"] = [
            Setting(f"{n} GPUs", DIT_1B, (16 * n if weak else 128) * K, a100(nodes, n // nodes)) for n in (8, 16, 32)
        ]
    adapters = (("400 Gbit/s", INFINIBAND, 8), ("200 Gbit/s", SLOW_INFINIBAND, 8), ("as one link", INFINIBAND, 1))
    for name, link, nics in adapters:
        curves[f"GPT 7B, H100s, {name}"] = [
            Setting(f"{n} GPUs", GPT_7B, (8 * n if weak else 128) * K, h100(n, link, nics)) for n in (8, 16, 32, 64)
        ]
    return curves


def printed(setting: Setting) -> float | None:
    """The paper's improvement over the ring in percent where its text has it; of which A100 cluster it has not."""
    if setting.tokens == 128 * K and (setting.model, setting.cluster.ranks) == (DIT_1B, 32):
        return PRINTED_DIT
    return PRINTED_GPT if setting.tokens == 128 * K and setting.cluster.ranks == 64 else None


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


def main(page: Path = Path("docs/benchmarks/papers.md")) -> None:
    """Write what is found into the page, and pictures beside it."""
    write(page, "recipes.benchmarks.papers", _parts(page.parent))


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
    typer.run(main)
