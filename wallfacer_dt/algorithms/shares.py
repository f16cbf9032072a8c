"""One send buffer with what every other rank of a group is to get, written in place."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from torch import Tensor

from wallfacer_dt.collectives import Layout, settle
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
    """Of every tensor the rows that each other rank is to get, in its layout, which may have room for more."""
    size = sum(one.size for rank, one in enumerate(layouts) if rank != me)
    is_full = all(
        place.shape[dim] == some[rank].length
        for rank, one in enumerate(layouts)
        if rank != me
        for place, some in zip(one.places, rows, strict=True)
    )
    buffer = (tensors[0].new_empty if is_full else tensors[0].new_zeros)(size, dtype=layouts[0].dtype)
    apart: list[tuple[Tensor, Tensor]] = []
    for first, count, start in shares(layouts, me):
        views = layouts[first].views(buffer, start, count, apart)
        for x, stacked, some in zip(tensors, views, rows, strict=True):
            for there, here in pairs(some[first : first + count], x, stacked, dim):
                here.copy_(there)
    settle(apart)
    return buffer
