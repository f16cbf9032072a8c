"""One buffer with what every other rank of a group is sent, written in place, or has sent."""

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor

from wallfacer_dt.collectives.send_buffer import Layout, pack
from wallfacer_dt.rows import Rows, pairs


class Shares:
    """Shares of the ranks of a group, of a layout each, one after the other, but for one's own."""

    def __init__(self, layouts: Sequence[Layout], me: int) -> None:
        self.layouts, self.me = layouts, me
        self.splits = [0 if rank == me else places.size for rank, places in enumerate(layouts)]
        # Neighbours with the same layout: the first, how many, and where their shares begin.
        self._runs: list[tuple[int, int, int]] = []
        for ranks in (range(me), range(me + 1, len(layouts))):
            for _, some in groupby(ranks, key=layouts.__getitem__):
                first, *others = some
                self._runs.append((first, 1 + len(others), sum(self.splits[:first])))

    def views(self, buffer: Tensor) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
        """The tensors of neighbouring ranks, stacked, with the first rank."""
        for first, count, start in self._runs:
            yield first, self.layouts[first].views(buffer, start, count)

    def packed(
        self, tensors: Sequence[Tensor], rows: Sequence[tuple[Rows, ...]], dim: int, *, padded: bool = False
    ) -> Tensor:
        """Of every tensor the rows, by rank, that it is to get; ``padded``: with zeros behind some of them."""
        if not all(self.layouts[first].is_even for first, _, _ in self._runs):
            others = [rank for rank in range(len(self.layouts)) if rank != self.me]
            parts = [[some[rank].of(x, dim) for x, some in zip(tensors, rows, strict=True)] for rank in others]
            return torch.cat([pack(part, self.layouts[rank]) for rank, part in zip(others, parts, strict=True)])
        empty = tensors[0].new_zeros if padded else tensors[0].new_empty
        buffer = empty(sum(self.splits), dtype=self.layouts[0].dtype)
        for first, stacked in self.views(buffer):
            for x, parts, some in zip(tensors, stacked, rows, strict=True):
                for there, here in pairs(some[first : first + parts.shape[0]], x, parts, dim):
                    here.copy_(there)
        return buffer
