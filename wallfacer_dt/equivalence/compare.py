"""Differences between tensors, and between the probabilities with which queries see keys."""

from typing import NamedTuple

import torch
from torch import Tensor

from wallfacer_dt.comparison import comparable
from wallfacer_dt.equivalence.inputs import Sizes, head_of

# What is drawn is of size 1. Channels that are smaller everywhere are what rounding has left of 0, as the gradient of
# the queries is where each sees one key.
_SMALLEST = 1e-2


class Row(NamedTuple):
    """With which probabilities (Nkv, kv_length) a query of a head sees the keys, in the module and under the style."""

    query: int
    head: int
    module: Tensor
    style: Tensor

    @property
    def kv_head(self) -> int:
        """Of the style, that of the query's head."""
        return int(self.style.sum(1).argmax())

    @property
    def pair(self) -> tuple[Tensor, Tensor]:
        """Module's and style's probabilities, in float64, of the keys of the query's head."""
        return self.module[self.kv_head].double(), self.style[self.kv_head].double()


def probabilities(queries: tuple[int, ...], ours: Tensor | None, theirs: Tensor | None, sizes: Sizes) -> list[Row]:
    """Rows by query, from what both have seen of the probe; none if there are no gradients."""
    if ours is None or theirs is None:
        return []
    rows = [
        Row(query, head_of(channel, sizes), ours[0, ..., channel], theirs[0, ..., channel])
        for channel, query in enumerate(queries)
        if head_of(channel, sizes) < sizes.heads
    ]
    return sorted(rows, key=lambda row: row.query)


def difference(
    name: str, ours: Tensor, theirs: Tensor, rtol: float, who: tuple[str, str] = ("in the module", "under the style")
) -> str:
    """In words, by position the first entry of (B, N, L, H) that differs; empty if none does. All must be finite."""
    ours, theirs = comparable(name, ours, theirs, who)
    size = torch.maximum(ours.abs(), theirs.abs()).amax((0, 1, 2))
    size = size.clamp_min(size.median()).clamp_min(_SMALLEST)
    relative = (ours - theirs).abs() / size  # no comparison: of what is comparable, by channel
    wrong = relative > rtol
    if not wrong.any():
        return ""
    position = int(wrong.any(3).any(1).any(0).int().argmax())
    batch, head, channel = wrong[:, :, position].nonzero()[0].tolist()
    there = (batch, head, position, channel)
    return (
        f"batch {batch}, head {head}, position {position}: {float(ours[there]):.3g} {who[0]}, "
        f"{float(theirs[there]):.3g} {who[1]} (largest relative difference {float(relative.max()):.1g})"
    )


def tolerance(dtype: torch.dtype, device_type: str) -> float:
    """By how much two results may differ, relative to the largest entry of each channel."""
    if dtype == torch.float64:
        return 1e-5
    if dtype == torch.float32:
        return 1e-3 if device_type == "cpu" else 2e-2
    return 8e-2
