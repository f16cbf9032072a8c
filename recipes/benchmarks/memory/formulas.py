"""Tables 1 and 2 of METP's paper and equations 3, 10 and 11, in elements of one rank.

Liang et al., "Memory-efficient tensor parallelism for long-sequence Transformer training"; b, s, h, n and p are
theirs: batch, tokens, hidden size, heads and ranks. A feed-forward is h to 4h to h, attention has four h x h
projections; biases and row sums are left out. ``flash`` is their k = 0.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from math import log2
from typing import Literal

Method = Literal["tp", "rsa", "fsdp", "metp"]
Kind = Literal["feed-forward", "attention"]
METHODS: tuple[Method, ...] = ("tp", "rsa", "fsdp", "metp")
KINDS: tuple[Kind, ...] = ("feed-forward", "attention")


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's sizes and how many ranks share its sequence.

    Attributes:
        batch: b, sequences.
        tokens: s, of the whole sequence.
        hidden: h.
        heads: n.
        ranks: p.
    """

    batch: int
    tokens: int
    hidden: int
    heads: int
    ranks: int

    @property
    def activation(self) -> Fraction:
        """bsh / p: what one rank holds of one tensor (b, s, h)."""
        return Fraction(self.batch * self.tokens * self.hidden, self.ranks)

    @property
    def square(self) -> Fraction:
        """h^2."""
        return Fraction(self.hidden**2)

    @property
    def scores(self) -> Fraction:
        """b n s^2: all scores of all heads."""
        return Fraction(self.batch * self.heads * self.tokens**2)


@dataclass(frozen=True, slots=True)
class Overhead:
    """What a row of table 1 or 2 says, in elements.

    Attributes:
        states: weights, their gradients and Adam's two moments.
        kept: activations after the forward; with ``states`` the column "Memory".
        gathered: weights of other ranks at the peak of the forward.
        peak: activations at that peak; with ``states`` and ``gathered`` the column "Peak memory".
        communication: elements sent in a training step.
    """

    states: Fraction
    kept: Fraction
    gathered: Fraction
    peak: Fraction
    communication: float

    @property
    def memory(self) -> Fraction:
        """The column "Memory"."""
        return self.states + self.kept

    @property
    def peak_memory(self) -> Fraction:
        """The column "Peak memory"."""
        return self.states + self.gathered + self.peak


def overhead(kind: Kind, method: Method, layer: Layer, *, flash: bool = True) -> Overhead:
    """A row of table 1 (feed-forward) or 2 (attention).

    Args:
        kind: of the layer.
        method: how ranks share it.
        layer: its sizes.
        flash: scores are never stored (k = 0); a feed-forward has none.

    Returns:
        The row.
    """
    return _feed_forward(method, layer) if kind == "feed-forward" else _attention(method, layer, flash=flash)


def _feed_forward(method: Method, layer: Layer) -> Overhead:
    """Table 1."""
    p, a, h2 = layer.ranks, layer.activation, layer.square
    others = Fraction(p - 1, p)
    match method:
        case "tp":
            return Overhead(32 * h2 / p, 5 * a, Fraction(0), 4 * a + p * a, float(5 * others * p * a))
        case "rsa":
            return Overhead(32 * h2, 5 * a, Fraction(0), 5 * a, 0.0)
        case "fsdp":
            return Overhead(32 * h2 / p, 5 * a, 4 * others * h2, 5 * a, float(24 * others * h2))
        case "metp":
            return Overhead(32 * h2 / p, a, Fraction(0), a + 4 * a / p, float(24 * others * h2))


def _attention(method: Method, layer: Layer, *, flash: bool) -> Overhead:
    """Table 2."""
    p, a, h2 = layer.ranks, layer.activation, layer.square
    others = Fraction(p - 1, p)
    scores = Fraction(0) if flash else layer.scores / p
    match method:
        case "tp":
            return Overhead(16 * h2 / p, 5 * a, Fraction(0), 4 * a + scores + p * a, float(5 * others * p * a))
        case "rsa":
            # Incompatible with flash attention (section 5.1): its table row has no k.
            return Overhead(16 * h2, 5 * a, Fraction(0), 5 * a + layer.scores / p, float(8 * others * p * a))
        case "fsdp":
            volume = float(12 * others * h2 + 8 * others * a)
            return Overhead(16 * h2 / p, 5 * a, 3 * others * h2, 5 * a + scores, volume)
        case "metp":
            volume = 12 * log2(p) * float(h2) + float(6 * others * p * a)
            return Overhead(16 * h2 / p, 2 * a, Fraction(0), 2 * a + 3 * a / p + scores / p**2, volume)


def peak_ratio(ranks: int) -> Fraction:
    """Equation 10: METP's peak of an attention layer's activations over TP's, with flash attention.

    >>> round(float(1 - peak_ratio(2)), 3)
    0.417

    Args:
        ranks: p.

    Returns:
        r.
    """
    return Fraction(3 + 2 * ranks, ranks * (4 + ranks))


def stacked_ratio(ranks: int, layers: int) -> Fraction:
    """Equation 11: the same of a stack, all of whose layers but one have ended.

    Args:
        ranks: p.
        layers: L.

    Returns:
        The ratio.
    """
    return peak_ratio(ranks) / layers + Fraction(2, 5) * Fraction(layers - 1, layers)


@dataclass(frozen=True, slots=True)
class Model:
    """A row of table 3.

    Attributes:
        name: of the model.
        hidden: h.
        heads: n.
        layers: on one device.
    """

    name: str
    hidden: int
    heads: int
    layers: int


MODELS = (
    Model("BERT-Large", 1024, 16, 24),
    Model("LLaMA-7B", 4096, 32, 32),
    Model("LLaMA-70B", 8192, 64, 5),
    Model("GPT-175B", 12288, 96, 1),
)
"""Table 3."""


def model_peak(
    model: Model, method: Method, tokens: int, ranks: int, *, batch: int = 1, flash: bool = True
) -> Fraction:
    """Elements that a rank needs for a model's layers: what all keep, and the largest peak of one beyond what it keeps.

    Args:
        model: whose layers.
        method: how ranks share them.
        tokens: s.
        ranks: p.
        batch: b.
        flash: scores are never stored.

    Returns:
        The elements.
    """
    layer = Layer(batch, tokens, model.hidden, model.heads, ranks)
    rows = [overhead(kind, method, layer, flash=flash) for kind in KINDS]
    return model.layers * sum((row.memory for row in rows), Fraction(0)) + max(r.peak_memory - r.memory for r in rows)


def longest(model: Model, method: Method, ranks: int, *, budget: int, itemsize: int = 2, flash: bool = True) -> int:
    """The longest sequence whose training fits, in tokens; 0 where the model does not.

    Args:
        model: whose layers.
        method: how ranks share them.
        ranks: p.
        budget: bytes of a rank.
        itemsize: bytes of an element, of states too.
        flash: scores are never stored.

    Returns:
        s.
    """

    def fits(tokens: int) -> bool:
        return model_peak(model, method, tokens, ranks, flash=flash) * itemsize <= budget

    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def gains(ranks: int, *, budget: int, itemsize: int = 2) -> Iterator[tuple[Model, Method, float]]:
    """By model and other method, how many times as long METP's longest sequence is, with flash attention.

    Args:
        ranks: p.
        budget: bytes of a rank.
        itemsize: bytes of an element.

    Yields:
        The model, the method and the factor.
    """
    for model in MODELS:
        ours = longest(model, "metp", ranks, budget=budget, itemsize=itemsize)
        for method in ("tp", "fsdp"):
            theirs = longest(model, method, ranks, budget=budget, itemsize=itemsize)
            if theirs:
                yield model, method, ours / theirs
