"""METP's equations 10 and 11 and tables 1 to 3, with what is measured, and the bisection for all papers."""

from collections.abc import Callable
from fractions import Fraction
from math import log2

from recipes.benchmarks.memory.__main__ import LAYER, LONG, RANKS, STORED
from recipes.benchmarks.memory.formulas import KINDS, METHODS, Kind, Layer, Method, overhead
from recipes.benchmarks.memory.layers import CONTENDERS, NAMES
from recipes.benchmarks.memory.measure import Case, on_fake_ranks
from recipes.benchmarks.report import GIB, MIB, Table
from wallfacer_dt import ModelShape


def peak_ratio(ranks: int) -> Fraction:
    """Equation 10: METP's peak of an attention layer's activations over TP's, with flash attention.

    >>> round(float(1 - peak_ratio(2)), 3)
    0.417
    """
    return Fraction(3 + 2 * ranks, ranks * (4 + ranks))


def stacked_ratio(ranks: int, layers: int) -> Fraction:
    """Equation 11: the same of a stack, all of whose layers but one have ended."""
    return peak_ratio(ranks) / layers + Fraction(2, 5) * Fraction(layers - 1, layers)


MODELS = {
    "BERT-Large": ModelShape(1024, 16, layers=24), "LLaMA-7B": ModelShape(4096, 32, layers=32),
    "LLaMA-70B": ModelShape(8192, 64, layers=5), "GPT-175B": ModelShape(12288, 96, layers=1),
}  # fmt: skip
"""Table 3, with layers on one device."""


def model_peak(model: ModelShape, method: Method, tokens: int, ranks: int, *, flash: bool = True) -> Fraction:
    """Elements that a rank needs for a model's layers: what all keep, and the largest peak of one beyond that."""
    layer = Layer(1, tokens, model.hidden, model.heads, ranks)
    rows = [overhead(kind, method, layer, flash=flash) for kind in KINDS]
    return model.layers * sum((row.memory for row in rows), Fraction(0)) + max(r.peak_memory - r.memory for r in rows)


def longest(needed: Callable[[int], Fraction], budget: int) -> int:
    """The most tokens, of which what is needed never falls, that fit; 0 where nothing does.

    >>> longest(lambda tokens: Fraction(3 * tokens), 10)
    3
    """
    low, high = 0, 1
    while needed(high) <= budget:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if needed(middle) <= budget else (low, middle)
    return low


def longest_table(ranks: int = 8) -> Table:
    """METP's table 3: the longest sequence in 80 GiB a rank, states too in 16 bits, and how much longer METP's is."""
    rows = []
    for name, model in MODELS.items():
        lengths = [longest(lambda n: 2 * model_peak(model, c, n, ranks), 80 * GIB) for c in CONTENDERS]  # noqa: B023
        gains = [f"{lengths[2] / theirs:.2f}" if theirs else "-" for theirs in lengths[:2]]
        rows.append([f"{name}, {model.layers} layers", *(f"{n:,}" for n in lengths), *gains])
    head = ["", "TP+SP", "FSDP+Ulysses", "METP", "METP / TP+SP", "METP / FSDP+Ulysses"]
    return Table(f"Longest sequence by the formulas, {ranks} ranks, tokens", head, rows)


def overhead_table(kind: Kind) -> Table:
    """METP's table 1 or 2 in MiB of bfloat16, 32,768 tokens, h = 4096, 32 heads."""
    rows = []
    for layer in (Layer(1, 2**15, 4096, 32, p) for p in (2, 4, 8, 16)):
        for method in METHODS:
            for flash in (True, False) if kind == "attention" else (True,):
                if flash and (kind, method) == ("attention", "rsa"):
                    continue  # it has no flash attention
                row = overhead(kind, method, layer, flash=flash)
                numbers = (2 * float(n) / MIB for n in (row.memory, row.peak_memory, row.communication))
                name = f"p = {layer.ranks}, {NAMES[method]}{'' if flash else ', scores stored'}"
                rows.append([name, *(f"{n:,.1f}" for n in numbers)])
    number = 1 if kind == "feed-forward" else 2
    head = ["", "memory after forward", "peak memory", "sent in a step"]
    return Table(f"Table {number} of the paper, {kind}, MiB a rank, states among them", head, rows)


def ratios_table() -> Table:
    """Equations 10 and 11, and METP's bytes over TP+SP's as measured."""
    rows = []
    for p in RANKS:
        cells = [f"{p}", f"{float(peak_ratio(p)):.3f}", f"{float(stacked_ratio(p, 32)):.3f}"]
        for dtype in ("bfloat16", "float32"):
            ours, theirs = (
                on_fake_ranks(Case("attention", c, LAYER._replace(ranks=p), dtype=dtype)) for c in ("metp", "tp")
            )
            cells += [f"{ours.peak / theirs.peak:.3f}"] + [f"{ours.kept / theirs.kept:.3f}"] * (dtype == "bfloat16")
            long = [Case("attention", c, LONG._replace(ranks=p), dtype=dtype, backward=False) for c in ("metp", "tp")]
            cells.append(f"{on_fake_ranks(long[0]).peak / on_fake_ranks(long[1]).peak:.3f}")
        rows.append([*cells, f"{on_fake_ranks(long[0]).peak / (4 * float(long[1].formula.peak)):.3f}"])
    same = f"the same, {LONG.tokens:,} tokens"
    head = [
        "p", "equation 10", "equation 11, L = 32", "measured peaks, bfloat16", "after forward", same,
        "measured peaks, float32", same, f"METP measured / TP+SP's formula, float32, {LONG.tokens:,} tokens",
    ]  # fmt: skip
    return Table("METP / TP+SP, attention with flash", head, rows)


def surcharges_table(ranks: int = 8) -> Table:
    """What METP's peak has that the paper's formula has not: of the feed-forward every byte, of attention the sum."""
    rows = []
    for kind in KINDS:
        for dtype in ("bfloat16", "float32"):
            case = Case(kind, "metp", LAYER._replace(ranks=ranks), dtype=dtype)
            seen = on_fake_ranks(case)
            named = (case.torch_dtype.itemsize * case.formula.peak, 4 * case.layer.activation, 2 * seen.weights)
            numbers = (*named, seen.peak - sum(named), seen.peak)
            rows.append([f"{kind}, {dtype}", *(f"{float(n) / MIB:,.1f}" for n in numbers)])
    head = ["", "formula", "output in float32", "two shards of weights", "rest", "measured"]
    return Table(f"What METP's forward holds at its peak on {ranks} ranks, MiB a rank", head, rows)


def scores_table() -> Table:
    """How peaks fall where scores are stored."""
    cases = {
        c: [Case("attention", c, STORED._replace(ranks=p), flash=False, backward=False) for p in RANKS]
        for c in CONTENDERS
    }
    rows = []
    for place, p in enumerate(RANKS):
        seen = {c: on_fake_ranks(cases[c][place]) for c in CONTENDERS}
        numbers = (
            *(seen[c].peak for c in CONTENDERS),
            4 * float(STORED.scores) / p**3,
            *(seen[c].largest for c in ("metp", "fsdp")),
        )
        rows.append([f"p = {p}", *(f"{n / MIB:,.1f}" for n in numbers)])
    ends = [(on_fake_ranks(cases[c][0]).peak, on_fake_ranks(cases[c][-1]).peak) for c in CONTENDERS]
    law = (f"-{log2(first / last) / log2(RANKS[-1] / RANKS[0]):.2f}" for first, last in ends)
    rows.append([f"falls as p to the power of, {RANKS[0]} to {RANKS[-1]}", *law, "-3", "", ""])
    head = [
        "peak of the forward, MiB", *(NAMES[c] for c in CONTENDERS), "bns^2 / p^3, formula", "METP's largest tensor",
        "FSDP+Ulysses' largest tensor",
    ]  # fmt: skip
    return Table("How peaks fall with stored scores", head, rows)
