"""The tables of the report, each from what is computed or measured here."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import log2

from recipes.benchmarks.memory.baselines import CONTENDERS, Contender
from recipes.benchmarks.memory.formulas import (
    KINDS,
    METHODS,
    MODELS,
    Kind,
    Layer,
    Overhead,
    gains,
    longest,
    overhead,
    peak_ratio,
    stacked_ratio,
)
from recipes.benchmarks.memory.measure import Measured
from recipes.benchmarks.memory.picture import NAMES, Curve
from recipes.benchmarks.memory.run import Case, on_fake_ranks, on_gloo_ranks
from recipes.benchmarks.memory.tables import Table

MIB = 2**20
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the report is about.

    Attributes:
        hidden: h of the layers.
        heads: n.
        tokens: s.
        ranks: numbers of ranks.
        dtype: of weights and tokens.
        long: tokens beside which weights are small.
        short: further numbers of tokens, on 8 ranks.
        scores: of the layer whose scores are stored.
        real: of the layer on gloo ranks.
        real_ranks: their numbers.
        budget: bytes of a rank, for the longest sequences.
    """

    hidden: int = 4096
    heads: int = 32
    tokens: int = 32768
    ranks: tuple[int, ...] = (2, 4, 8, 16)
    dtype: str = "bfloat16"
    long: int = 2**20
    short: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
    scores: tuple[int, int, int] = (16384, 1024, 16)
    real: tuple[int, int, int] = (4096, 512, 8)
    real_ranks: tuple[int, ...] = (2, 4)
    budget: int = 80 * GIB

    def case(self, kind: Kind, contender: Contender, ranks: int, dtype: str | None = None) -> Case:
        """A case on the layer of this report."""
        layer = Layer(1, self.tokens, self.hidden, self.heads, ranks)
        return Case(kind, contender, layer, dtype=dtype or self.dtype)


@cache
def measured(case: Case) -> Measured:
    """On fake ranks, once."""
    return on_fake_ranks(case)


def row_of(case: Case) -> Overhead:
    """The paper's."""
    return overhead(case.kind, case.contender, case.layer, flash=case.flash)


def _mib(nbytes: float) -> str:
    return f"{nbytes / MIB:,.1f}"


def formulas(sizes: Sizes) -> Iterator[Table]:
    """Tables 1 and 2 on the report's layer, all methods, states among them."""
    size = {"bfloat16": 2, "float32": 4}[sizes.dtype]
    for kind in KINDS:
        rows = []
        for p in sizes.ranks:
            for method in METHODS:
                for flash in (True,) if kind == "feed-forward" else (True, False):
                    row = overhead(kind, method, Layer(1, sizes.tokens, sizes.hidden, sizes.heads, p), flash=flash)
                    if method == "rsa" and kind == "attention" and flash:
                        continue
                    name = f"{NAMES[method]}{'' if flash else ', scores stored'}"
                    numbers = (row.memory, row.peak_memory, row.communication)
                    rows.append([f"p = {p}, {name}", *(_mib(float(n) * size) for n in numbers)])
        number = 1 if kind == "feed-forward" else 2
        head = ["", "memory after forward", "peak memory", "sent in a step"]
        yield Table(f"Table {number} of the paper, {kind}, MiB a rank, states among them", head, rows)


def side_by_side(sizes: Sizes, kind: Kind) -> Table:
    """Activations by the formula and as measured."""
    rows = []
    for p in sizes.ranks:
        for contender in CONTENDERS:
            case = sizes.case(kind, contender, p)
            row, seen, size = row_of(case), measured(case), case.torch_dtype.itemsize
            paper = (row.kept, seen.kept / size, row.gathered + row.peak, seen.peak / size, seen.step_peak / size)
            rows.append([f"p = {p}, {NAMES[contender]}", *(_mib(float(n) * size) for n in paper)])
    head = [
        "",
        "after forward, formula",
        "measured",
        "peak of forward, formula",
        "measured",
        "peak of the step, measured",
    ]
    return Table(f"Side by side: {kind}, MiB a rank beyond its own weights", head, rows)


def ratios(sizes: Sizes) -> Table:
    """Equation 10, and what is measured."""
    rows = []
    for p in sizes.ranks:
        cells = [f"{p}", f"{float(peak_ratio(p)):.3f}", f"{float(stacked_ratio(p, 32)):.3f}"]
        for dtype in (sizes.dtype, "float32"):
            ours, theirs = (measured(sizes.case("attention", c, p, dtype=dtype)) for c in ("metp", "tp"))
            cells.append(f"{ours.peak / theirs.peak:.3f}")
            if dtype == sizes.dtype:
                cells.append(f"{ours.kept / theirs.kept:.3f}")
            ours, theirs = (measured(_long_case(sizes, c, p, dtype)) for c in ("metp", "tp"))
            cells.append(f"{ours.peak / theirs.peak:.3f}")
        against = ours.peak / (4 * float(row_of(_long_case(sizes, "tp", p, dtype)).peak))
        rows.append([*cells, f"{against:.3f}"])
    long = f"the same, {sizes.long:,} tokens"
    head = [
        "p", "equation 10", "equation 11, L = 32", f"measured peaks, {sizes.dtype}", "after forward", long,
        "measured peaks, float32", long, f"METP measured / TP+SP's formula, float32, {sizes.long:,} tokens",
    ]  # fmt: skip
    return Table("METP / TP+SP, attention with flash", head, rows)


def _long_case(sizes: Sizes, contender: Contender, ranks: int, dtype: str) -> Case:
    layer = Layer(1, sizes.long, sizes.hidden, sizes.heads, ranks)
    return Case("attention", contender, layer, dtype=dtype, backward=False)


def score_peaks(sizes: Sizes, *, flash: bool) -> tuple[dict[str, Curve], dict[str, Curve]]:
    """Peaks of the forward by ranks in MiB, measured and by the formula."""
    seen: dict[str, Curve] = {}
    paper: dict[str, Curve] = {}
    for contender in CONTENDERS:
        cases = {p: _scores_case(sizes, contender, p, flash=flash) for p in sizes.ranks}
        seen[contender] = {p: measured(case).peak / MIB for p, case in cases.items()}
        rows = {p: row_of(case) for p, case in cases.items()}
        paper[contender] = {p: 4 * float(row.gathered + row.peak) / MIB for p, row in rows.items()}
    return seen, paper


def _scores_case(sizes: Sizes, contender: Contender, ranks: int, *, flash: bool) -> Case:
    tokens, hidden, heads = sizes.scores
    return Case("attention", contender, Layer(1, tokens, hidden, heads, ranks), flash=flash, backward=False)


def scores(sizes: Sizes) -> Table:
    """The law of materialized scores."""
    rows = []
    curves, _ = score_peaks(sizes, flash=False)
    for p in sizes.ranks:
        cells = [f"p = {p}", *(_mib(curves[c][p] * MIB) for c in CONTENDERS)]
        layer = _scores_case(sizes, "metp", p, flash=False).layer
        tile = 4 * float(layer.scores) / p**3
        cells += [_mib(tile), _mib(measured(_scores_case(sizes, "metp", p, flash=False)).largest)]
        cells.append(_mib(measured(_scores_case(sizes, "fsdp", p, flash=False)).largest))
        rows.append(cells)
    first, last = sizes.ranks[0], sizes.ranks[-1]
    law = [log2(curves[c][first] / curves[c][last]) / log2(last / first) for c in CONTENDERS]
    rows.append([f"falls as p to the power of, {first} to {last}", *(f"-{n:.2f}" for n in law), "-3", "", ""])
    head = [
        "peak of the forward, MiB", *(NAMES[c] for c in CONTENDERS), "bns^2 / p^3, formula", "METP's largest tensor",
        "FSDP+Ulysses' largest tensor",
    ]  # fmt: skip
    tokens, hidden, heads = sizes.scores
    return Table(f"Scores stored: attention, {tokens:,} tokens, h = {hidden}, {heads} heads, float32", head, rows)


def short_sequences(sizes: Sizes, kind: Kind, ranks: int = 8) -> Table:
    """Where METP wins and loses, by tokens."""
    rows = []
    for tokens in sizes.short:
        layer = Layer(1, tokens, sizes.hidden, sizes.heads, ranks)
        seen = [measured(Case(kind, contender, layer, dtype=sizes.dtype)) for contender in CONTENDERS]
        peaks, steps = [one.peak for one in seen], [one.step_peak for one in seen]
        lowest = [NAMES[CONTENDERS[column.index(min(column))]] for column in (peaks, steps)]
        rows.append([f"{tokens:,}", *map(_mib, peaks), lowest[0], *map(_mib, steps), lowest[1]])
    names = [NAMES[c] for c in CONTENDERS]
    head = ["tokens", *(f"forward, {n}" for n in names), "least", *(f"step, {n}" for n in names), "least"]
    return Table(f"By tokens: {kind}, {ranks} ranks, peaks measured, MiB a rank beyond its own weights", head, rows)


def surcharges(sizes: Sizes, ranks: int = 8) -> Table:
    """What METP's peak has that the paper's formula has not: of the feed-forward every byte, of attention the sum."""
    rows = []
    for kind in KINDS:
        for dtype in (sizes.dtype, "float32"):
            case = sizes.case(kind, "metp", ranks, dtype=dtype)
            seen, size, layer = measured(case), case.torch_dtype.itemsize, case.layer
            formula = size * float(row_of(case).peak)
            output = 4 * float(layer.activation)
            buffers = 2 * float(seen.weights)
            rest = seen.peak - formula - output - buffers
            rows.append([f"{kind}, {dtype}", *map(_mib, (formula, output, buffers, rest, seen.peak))])
    head = ["", "formula", "output in float32", "two shards of weights", "rest", "measured"]
    return Table(f"What METP's forward holds at its peak on {ranks} ranks, MiB a rank", head, rows)


def on_ranks(sizes: Sizes) -> Table:
    """Real ranks: tensors and resident sets, the most of any rank."""
    rows = []
    tokens, hidden, heads = sizes.real
    for kind in KINDS:
        for p in sizes.real_ranks:
            for contender in CONTENDERS:
                case = Case(kind, contender, Layer(1, tokens, hidden, heads, p))
                fake, ranks = measured(case), on_gloo_ranks(case)
                seen = [max(getattr(rank.measured, name) for rank in ranks) for name in ("kept", "peak", "step_peak")]
                numbers = (seen[0], seen[1], seen[2], fake.peak, fake.step_peak, max(rank.grown for rank in ranks))
                rows.append([f"{kind}, p = {p}, {NAMES[contender]}", *map(_mib, numbers)])
    head = [
        "", "after forward", "peak of forward", "peak of the step", "forward on fake ranks", "step on fake ranks",
        "resident set grew by",
    ]  # fmt: skip
    title = f"On gloo ranks: {tokens:,} tokens, h = {hidden}, {heads} heads, float32, MiB, the most of any rank"
    return Table(title, head, rows)


def longest_curves(sizes: Sizes) -> list[tuple[str, dict[str, Curve]]]:
    """By model, by method, the longest sequence by ranks 1 to 16."""
    return [
        (
            model.name,
            {m: {p: longest(model, m, p, budget=sizes.budget) for p in range(1, 17)} for m in ("tp", "fsdp", "metp")},
        )
        for model in MODELS
    ]


def longest_table(sizes: Sizes, ranks: int = 8) -> Table:
    """The longest sequence of table 3's models, and how much longer METP's is."""
    factors = {(model.name, method): factor for model, method, factor in gains(ranks, budget=sizes.budget)}
    rows = []
    for model in MODELS:
        tokens = [longest(model, m, ranks, budget=sizes.budget) for m in ("tp", "fsdp", "metp")]
        cells = [f"{factors[model.name, m]:.2f}" if (model.name, m) in factors else "-" for m in ("tp", "fsdp")]
        rows.append([f"{model.name}, {model.layers} layers", *(f"{n:,}" for n in tokens), *cells])
    head = ["", "TP+SP", "FSDP+Ulysses", "METP", "METP / TP+SP", "METP / FSDP+Ulysses"]
    return Table(f"Longest sequence by the formulas, {ranks} ranks, tokens", head, rows)


def lengths_lost(sizes: Sizes, kind: Kind, name: str, ranks: int = 8) -> Sequence[int]:
    """The lengths measured at which METP's peak is not below TP+SP's."""
    lost = []
    for tokens in sizes.short:
        layer = Layer(1, tokens, sizes.hidden, sizes.heads, ranks)
        ours, theirs = (getattr(measured(Case(kind, c, layer, dtype=sizes.dtype)), name) for c in ("metp", "tp"))
        if ours >= theirs:
            lost.append(tokens)
    return lost


def ranks_lost(sizes: Sizes, other: Contender, name: str) -> Sequence[int]:
    """The numbers of ranks on which METP's peak of attention is not below another's."""

    def peak(contender: Contender, ranks: int) -> int:
        return getattr(measured(sizes.case("attention", contender, ranks)), name)

    return [p for p in sizes.ranks if peak("metp", p) >= peak(other, p)]
