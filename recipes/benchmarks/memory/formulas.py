"""Tables 1 and 2 of METP's paper, in elements of one rank.

Liang et al., "Memory-efficient tensor parallelism for long-sequence Transformer training"; b, s, h, n and p are
theirs: batch, tokens, hidden size, heads and ranks. A feed-forward is h to 4h to h, attention has four h x h
projections; biases and row sums are left out. ``flash`` is their k = 0.
"""

from fractions import Fraction
from math import log2
from typing import Literal, NamedTuple

Method = Literal["tp", "rsa", "fsdp", "metp"]
Kind = Literal["feed-forward", "attention"]
METHODS: tuple[Method, ...] = ("tp", "rsa", "fsdp", "metp")
KINDS: tuple[Kind, ...] = ("feed-forward", "attention")


class Layer(NamedTuple):
    """b, s of the whole sequence, h, n, and the p ranks that share it."""

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
    def scores(self) -> Fraction:
        """b n s^2: all scores of all heads."""
        return Fraction(self.batch * self.heads * self.tokens**2)


class Overhead(NamedTuple):
    """A row of table 1 or 2, in elements.

    States are weights, gradients and Adam's moments; kept are activations after the forward, gathered and peak weights
    of others and activations at the peak of the forward, communication what is sent in a step.
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
    """A row of table 1 (feed-forward) or 2 (attention, whose scores are never stored with ``flash``)."""
    p, a, h2, zero = layer.ranks, layer.activation, Fraction(layer.hidden**2), Fraction(0)
    others = Fraction(p - 1, p)
    states = (32 if kind == "feed-forward" else 16) * h2
    scores = zero if flash or kind == "feed-forward" else layer.scores / p
    match kind, method:
        case _, "tp":
            return Overhead(states / p, 5 * a, zero, (4 + p) * a + scores, float(5 * others * p * a))
        case "feed-forward", "rsa":
            return Overhead(states, 5 * a, zero, 5 * a, 0.0)
        case "feed-forward", "fsdp":
            return Overhead(states / p, 5 * a, 4 * others * h2, 5 * a, float(24 * others * h2))
        case "feed-forward", _:
            return Overhead(states / p, a, zero, a + 4 * a / p, float(24 * others * h2))
        case _, "rsa":  # incompatible with flash attention (section 5.1): its row has no k
            return Overhead(states, 5 * a, zero, 5 * a + layer.scores / p, float(8 * others * p * a))
        case _, "fsdp":
            volume = float(12 * others * h2 + 8 * others * a)
            return Overhead(states / p, 5 * a, 3 * others * h2, 5 * a + scores, volume)
    volume = 12 * log2(p) * float(h2) + float(6 * others * p * a)
    return Overhead(states / p, 2 * a, zero, 2 * a + 3 * a / p + scores / p**2, volume)
