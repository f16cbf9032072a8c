"""What is measured: attention shapes and masks, on links of several rates."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

HEAD_DIM = 64
RATES: tuple[int | None, ...] = (None, 1000, 500, 200)
HEADS = ((16, 16), (16, 4), (6, 2))
LENGTHS = (4096, 16384)
MASKS = ("full", "causal")


@dataclass(frozen=True, slots=True)
class Nodes:
    """The cluster: ranks are numbered node by node.

    Attributes:
        nodes: how many.
        per_node: ranks of a node.
    """

    nodes: int = 4
    per_node: int = 4

    @property
    def ranks(self) -> int:
        """All ranks."""
        return self.nodes * self.per_node


@dataclass(frozen=True, slots=True)
class Case:
    """One attention call of batch 1 in float32, forward and backward.

    Attributes:
        rate: Mbit/s of every node's link in each direction; None for no limit.
        heads: query heads.
        kv_heads: key and value heads.
        is_causal: whether a query sees the keys up to its own position only.
        length: N, tokens of the whole sequence.
        head_dim: elements of a head.
    """

    rate: int | None
    heads: int
    kv_heads: int
    is_causal: bool
    length: int
    head_dim: int = HEAD_DIM

    @property
    def mask(self) -> str:
        """The mask's name."""
        return MASKS[self.is_causal]

    @property
    def is_long(self) -> bool:
        """Whether a turn takes so long that it is taken less often, and warming up does not show."""
        return self.length > LENGTHS[0]

    @property
    def shape_name(self) -> str:
        """All but the rate, in words."""
        return f"{self.heads}/{self.kv_heads} heads, {self.mask}, N = {self.length}"

    @property
    def name(self) -> str:
        """The case in words."""
        return f"{rate_name(self.rate)}, {self.shape_name}"

    @property
    def cost(self) -> float:
        """Roughly how long it takes, in no unit."""
        return self.length**2 * self.heads / (1 + self.is_causal)


def rate_name(rate: int | None) -> str:
    """A rate in words."""
    return f"{rate} Mbit/s" if rate else "no limit"


def all_cases(
    rates: Sequence[int | None] = RATES,
    heads: Sequence[tuple[int, int]] = HEADS,
    lengths: Sequence[int] = LENGTHS,
    masks: Sequence[str] = MASKS,
) -> list[Case]:
    """Every combination, the cheapest first, fast links before slow ones."""
    every = [Case(r, *h, m == "causal", n) for r, h, n, m in product(rates, heads, lengths, masks)]
    return sorted(every, key=lambda case: (case.cost, -(case.rate or 10**9)))
