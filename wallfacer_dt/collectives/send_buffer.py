"""Several tensors in one flat buffer, so that what travels together is one transfer.

A buffer has the narrowest dtype among its tensors; wider ones come first, as their bits. No padding, so it is as large
as its tensors. What is sent is copied once, from where it lies to its place; what arrives is seen in its place. There
(B, N, L, H) lie by tokens, as projections and kernels leave them: some tokens of one row of the batch have no gaps.
"""

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from wallfacer_dt.rows import Rows, pairs


class _Place(NamedTuple):
    """Where one tensor is, in elements of the buffer; its strides in its own."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    start: int
    size: int


class Layout(NamedTuple):
    """Where tensors are in a buffer of ``size`` elements."""

    dtype: torch.dtype
    size: int
    places: tuple[_Place, ...]

    def views(self, buffer: Tensor, start: int = 0, count: int | None = None) -> tuple[Tensor, ...]:
        """The tensors that begin at an element of a buffer; ``count``: stacked, of so many that follow one another.

        A wide tensor that begins in the middle of its elements cannot be seen there: it is a copy.
        """
        first = buffer.storage_offset() + start
        lead, over = ((), ()) if count is None else ((count,), (self.size,))
        found = []
        for place in self.places:
            if place.dtype == self.dtype:
                found.append(buffer.as_strided(lead + place.shape, over + place.strides, first + place.start))
                continue
            if not place.size:  # whose strides say nothing
                found.append(buffer.new_empty(lead + place.shape, dtype=place.dtype))
                continue
            bits = buffer.as_strided((*lead, place.size), (*over, 1), first + place.start)
            ratio = place.dtype.itemsize // self.dtype.itemsize
            if (first + place.start) % ratio or any(stride % ratio for stride in over):
                bits = bits.clone(memory_format=torch.contiguous_format)
            wide = bits.view(place.dtype)
            found.append(wide.as_strided(lead + place.shape, wide.stride()[:-1] + place.strides, wide.storage_offset()))
        return tuple(found)

    @property
    def is_even(self) -> bool:
        """Whether the tensors of all of several buffers in a row are seen in their places."""
        return self.size * self.dtype.itemsize % max(place.dtype.itemsize for place in self.places) == 0


@lru_cache(maxsize=4096)
def layout(*fields: tuple[Sequence[int], torch.dtype]) -> Layout:
    """The layout of tensors of these shapes and dtypes, worked out once."""
    carrier = min((dtype for _, dtype in fields), key=lambda dtype: dtype.itemsize)
    places: dict[int, _Place] = {}
    start = 0
    for i in sorted(range(len(fields)), key=lambda i: -fields[i][1].itemsize):
        shape, dtype = tuple(fields[i][0]), fields[i][1]
        size = math.prod(shape) * dtype.itemsize // carrier.itemsize
        places[i] = _Place(shape, _strides(shape), dtype, start, size)
        start += size
    return Layout(carrier, start, tuple(places[i] for i in range(len(fields))))


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    if len(shape) == 4:
        _, heads, length, width = shape
        return heads * length * width, width, heads * width, 1
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def pack(tensors: Sequence[Tensor], places: Layout) -> Tensor:
    """Tensors in a buffer of their own, zeros where it has room for more; one that lies so is its own buffer."""
    first, place = tensors[0], places.places[0]
    # A dim of one is never stepped along.
    steps = zip(first.shape, first.stride(), place.strides, strict=True)
    is_alone = len(tensors) == 1 and first.dtype == places.dtype and first.shape == place.shape
    if is_alone and places.size == place.size and all(n == 1 or step == own for n, step, own in steps):
        return first.as_strided((places.size,), (1,), first.storage_offset())
    is_full = all(place.shape == x.shape for place, x in zip(places.places, tensors, strict=True))
    is_full = is_full and places.size == sum(place.size for place in places.places)
    buffer = (first.new_empty if is_full else first.new_zeros)(places.size, dtype=places.dtype)
    for view, x in zip(places.views(buffer), tensors, strict=True):
        (view if is_full else view[tuple(map(slice, x.shape))]).copy_(x)
    return buffer


class Shares:
    """One buffer of what every other rank of a group is sent, or has sent, one after the other, of a layout each."""

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
