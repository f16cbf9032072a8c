"""One send buffer with what every other rank of a group is to get, written in place."""

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor

from wallfacer_dt.collectives.send_buffer import Layout, pack
from wallfacer_dt.rows import Rows, pairs


def shares(layouts: Sequence[Layout], me: int) -> Iterator[tuple[int, int, int]]:
    """Neighbouring other ranks with the same layout: the first, how many, and where in a buffer their shares begin."""
    start = 0
    for ranks in (range(me), range(me + 1, len(layouts))):
        for same, some in groupby(ranks, key=layouts.__getitem__):
            first, *others = some
            yield first, 1 + len(others), start
            start += same.size * (1 + len(others))


def packed_shares(
    tensors: Sequence[Tensor], rows: Sequence[tuple[Rows, ...]], dim: int, layouts: Sequence[Layout], me: int
) -> Tensor:
    """Of every tensor the rows that each other rank is to get, in its layout; zeros where that has room for more."""
    others = [rank for rank in range(len(layouts)) if rank != me]
    if not all(layouts[rank].is_even for rank in others):
        parts = [[some[rank].of(x, dim) for x, some in zip(tensors, rows, strict=True)] for rank in others]
        return torch.cat([pack(part, layouts[rank]) for rank, part in zip(others, parts, strict=True)])
    is_full = all(
        place.shape[dim] == some[rank].length
        for rank in others
        for place, some in zip(layouts[rank].places, rows, strict=True)
    )
    size, dtype = sum(layouts[rank].size for rank in others), layouts[0].dtype
    buffer = (tensors[0].new_empty if is_full else tensors[0].new_zeros)(size, dtype=dtype)
    for first, count, start in shares(layouts, me):
        for x, stacked, some in zip(tensors, layouts[first].views(buffer, start, count), rows, strict=True):
            for there, here in pairs(some[first : first + count], x, stacked, dim):
                here.copy_(there)
    return buffer
