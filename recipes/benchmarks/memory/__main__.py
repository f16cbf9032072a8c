"""`python -m recipes.benchmarks.memory`: METP's memory beside others' on fake ranks, and by formula (a minute)."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from recipes.benchmarks.memory.formulas import KINDS, Layer
from recipes.benchmarks.memory.layers import CONTENDERS, NAMES, Contender
from recipes.benchmarks.memory.measure import Case, on_fake_ranks
from recipes.benchmarks.pictures import BLUE, GREEN, ORANGE, Panel, draw
from recipes.benchmarks.report import MIB, Table, run

RANKS = (2, 4, 8, 16)
LAYER = Layer(1, 2**15, 4096, 32, 1)
LONG = LAYER._replace(tokens=2**20)
STORED = Layer(1, 2**14, 1024, 16, 1)
"""The layer whose scores are stored."""


def _parts(folder: Path) -> Iterator[Table | str]:
    by_tokens = [LAYER._replace(tokens=2**n, ranks=8) for n in range(9, 17)]
    both: tuple[Contender, ...] = ("tp", "metp")
    for kind in KINDS:
        for name, layers in (("ranks", _on_ranks(LAYER)), ("tokens", by_tokens)):
            cases = [Case(kind, c, it, dtype="bfloat16") for it in layers for c in CONTENDERS]
            yield table(f"By {name}: {kind}, bfloat16", cases)
        cases = [Case(kind, c, it) for it in _on_ranks(LAYER) for c in both]
        yield table(f"METP and TP+SP: {kind}, float32", cases)
    for dtype in ("bfloat16", "float32"):
        long = [Case("attention", c, it, dtype=dtype, backward=False) for it in _on_ranks(LONG) for c in both]
        yield table(f"METP and TP+SP at length: attention, {dtype}", long)
    stored, flash = (
        [Case("attention", c, it, flash=flash, backward=False) for it in _on_ranks(STORED) for c in CONTENDERS]
        for flash in (False, True)
    )
    yield table(f"Scores stored: attention, h = {STORED.hidden}, {STORED.heads} heads, float32", stored)
    titles = (f"{what}, {STORED.tokens:,} tokens, h = {STORED.hidden}" for what in ("Scores stored", "Flash attention"))
    panels = [Panel(title, _curves(cases), _AXES) for title, cases in zip(titles, (stored, flash), strict=True)]
    yield draw(folder / "memory_peak.png", [panels], _STYLES, (12, 5))


def _on_ranks(layer: Layer) -> list[Layer]:
    return [layer._replace(ranks=p) for p in RANKS]


def table(title: str, cases: Iterable[Case]) -> Table:
    """Formulas and what is measured, case by case."""
    rows = []
    for case in cases:
        row, seen, size = case.formula, on_fake_ranks(case), case.torch_dtype.itemsize
        kept, peak = size * float(row.kept), size * float(row.gathered + row.peak)
        step = f"{seen.step_peak / MIB:,.1f}" if case.backward else "-"
        cells = [f"{n / MIB:,.1f}" for n in (kept, seen.kept, peak, seen.peak)]
        where = f"{case.layer.tokens:,} tokens, p = {case.layer.ranks}, {NAMES[case.contender]}"
        rows.append([where, *cells, step, f"{seen.largest / MIB:,.1f}"])
    head = [
        "MiB a rank beyond its own weights", "after forward, formula", "measured", "peak of forward, formula",
        "measured", "peak of the step, measured", "largest tensor of the forward",
    ]  # fmt: skip
    return Table(title, head, rows)


_AXES = {"xscale": "log", "yscale": "log", "xlabel": "ranks p", "ylabel": "peak of the forward, MiB a rank"}
_STYLES = {
    f"{NAMES[c]}{what}": {"color": colour, **style}
    for what, style in (("", {}), (", formula", {"ls": "--", "marker": ""}))
    for c, colour in (("tp", ORANGE), ("fsdp", GREEN), ("metp", BLUE))
}


def _curves(cases: list[Case]) -> dict[str, dict[int, float]]:
    curves: dict[str, dict[int, float]] = {name: {} for name in _STYLES}
    for case in cases:
        row, name, p = case.formula, NAMES[case.contender], case.layer.ranks
        curves[name][p] = on_fake_ranks(case).peak / MIB
        curves[f"{name}, formula"][p] = 4 * float(row.gathered + row.peak) / MIB
    return curves


if __name__ == "__main__":
    run("memory", _parts)
