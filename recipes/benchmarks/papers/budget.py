"""The longest sequence that fits: a model's states, and activations by the paper's own terms. Nothing is fitted."""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from recipes.benchmarks.papers.models import K, Model


@dataclass(frozen=True, slots=True)
class States:
    """Bytes of a parameter's states, and among how many devices they are shared.

    Attributes:
        weights: bytes.
        gradients: bytes.
        optimizer: bytes, of a wide copy and Adam's moments.
        weights_shared: whether weights are sharded too (FSDP; with ZeRO-2 they are not).
    """

    weights: int
    gradients: int
    optimizer: int
    weights_shared: bool

    def of(self, model: Model, devices: int) -> Fraction:
        """Bytes on one device, with one layer's weights gathered where they are sharded."""
        shared = self.gradients + self.optimizer + (self.weights if self.weights_shared else 0)
        whole = model.per_layer if self.weights_shared else model.parameters
        return Fraction(shared * model.parameters, devices) + self.weights * whole


ZERO_2 = States(2, 2, 12, weights_shared=False)
"""WallFacer: Adam, bfloat16, ZeRO-2; the wide copy and the moments are taken to be in float32."""

FSDP = States(4, 4, 8, weights_shared=True)
"""Ring Attention: weights in float32 on GPUs and TPUs alike (its appendix B.1), Adam."""


def longest(needed: Callable[[int], Fraction], budget: int) -> int:
    """The most tokens that fit.

    >>> longest(lambda tokens: Fraction(3 * tokens), 10)
    3

    Args:
        needed: bytes by tokens, which never fall.
        budget: bytes.

    Returns:
        Tokens; 0 where nothing fits.
    """
    low, high = 0, 1
    while needed(high) <= budget:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if needed(middle) <= budget else (low, middle)
    return low


def power_of_two(tokens: int) -> int:
    """The most K tokens, in powers of two, as the papers' tables go; 0 for fewer than 1 K."""
    return 2 ** ((tokens // K).bit_length() - 1) if tokens >= K else 0
