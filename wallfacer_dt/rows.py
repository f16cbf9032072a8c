"""Rows of several tensors put together in another order, and taken apart again: few pieces by slices, many by index."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise
from threading import Lock

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from wallfacer_dt.layout import Pieces, Spans, length_of, merged, nonempty, positions, spans_of, stored_at

_FEW = 64
_KEPT = 16  # indices, of the size of the largest: those of about four packings
_indices: dict[tuple["Rows", torch.device], Tensor] = {}
"""On devices, the latest last: packings outlive their steps in caches of plans, and these do not with all of them."""
_lock = Lock()  # a backward has a thread for each device


@dataclass(frozen=True, eq=False)
class Rows:
    """Which rows of a tensor make another one, by row of the batch or for all.

    Where rows of the batch differ, the dim of these rows comes after that of the batch, which is the first.
    """

    pieces: tuple[Spans, ...]

    @classmethod
    def at(cls, by_row: Sequence[Spans]) -> "Rows":
        """The rows in these spans, some of which may be empty."""
        return cls(tuple(merged(nonempty(spans)) for spans in by_row))

    @cached_property
    def length(self) -> int:
        """How many rows."""
        return length_of(self.pieces[0])

    @property
    def are_two(self) -> bool:
        """Whether they are a head and a tail at most, which are likely to be evenly spaced among members."""
        return len(self.pieces) == 1 and len(self.pieces[0]) <= 2

    @cached_property
    def _slices(self) -> list[tuple[int, int]]:
        """Where they begin and how many they are, if these are few; otherwise none."""
        if len(self.pieces) > 1 or len(self.pieces[0]) > _FEW:
            return []
        return [(start, stop - start) for start, stop in self.pieces[0].tolist()] or [(0, 0)]

    def of(self, x: Tensor, dim: int) -> Tensor:
        """The other tensor, a view where it can be."""
        if self._slices:
            return _joined([x.narrow(dim, start, n) for start, n in self._slices], dim)
        index = self._index(x)
        if len(index) == 1:
            return x.index_select(dim, index[0])
        rows = torch.arange(len(index), device=index.device).unsqueeze(-1)
        return x.movedim(dim, 1)[rows, index].movedim(1, dim)

    def _index(self, x: Tensor) -> Tensor:
        """(rows of the batch, length)."""
        key = self, x.device
        with _lock:
            index = _indices.pop(key, None)
            if index is not None:
                _indices[key] = index
                return index
        index = torch.tensor(np.stack(list(map(positions, self.pieces))), device=x.device)
        if not isinstance(x, FakeTensor):
            with _lock:
                _indices[key] = index
                sizes = [one.nbytes for one in _indices.values()]
                left, most = sum(sizes), _KEPT * max(sizes)
                for old, size in zip(list(_indices), sizes, strict=True):
                    if left <= most:
                        break
                    del _indices[old]
                    left -= size
        return index


@dataclass(frozen=True, eq=False)
class Members:
    """How the rows of several members are put together, ascending in position, and taken apart."""

    # By row of the batch, or one for all: (n, 3) whose a piece is, its first row there, and how many.
    pieces: tuple[np.ndarray, ...]
    rows: tuple[Rows, ...]  # by member, its rows out of those of all
    _orders: dict[tuple[int, ...], Rows] = field(default_factory=dict, repr=False)

    @classmethod
    def made(cls, by_row: Sequence[Pieces], members: int) -> "Members":
        """By row of the batch, or for all, whose pieces they are."""
        whole = tuple(np.stack([p.member, p.start, p.span[:, 1] - p.span[:, 0]], -1) for p in by_row)
        stored = [(pieces[:, 0], spans_of(pieces[:, 2])) for pieces in whole]
        return cls(whole, tuple(Rows.at([spans[of == i] for of, spans in stored]) for i in range(members)))

    @cached_property
    def length(self) -> int:
        """Rows of all."""
        return sum(rows.length for rows in self.rows)

    def together(self, parts: Sequence[Tensor], dim: int, out: Tensor | None = None) -> Tensor:
        """The rows of all, from what members hold, perhaps more than that; a view where it can be, or in ``out``."""
        if len(self.pieces) == 1 and len(self.pieces[0]) <= _FEW:
            if out is not None:
                return torch.cat(self._in_order(parts, dim), dim, out=out)
            if len(self.pieces[0]) > 1 and _lie_by_tokens(parts[0], dim):
                return torch.cat(self._in_order([x.transpose(1, 2) for x in parts], 1), 1).transpose(1, 2)
            return _joined(self._in_order(parts, dim), dim)
        # To write every part where its rows belong is one copy less, and takes twice as long (torch 2.13.0, CPU).
        sizes = tuple(part.shape[dim] for part in parts)
        if sizes not in self._orders:
            first = np.cumsum(sizes) - sizes
            starts = [(first[of] + start, n) for of, start, n in (pieces.T for pieces in self.pieces)]
            self._orders[sizes] = Rows.at([np.stack([start, start + n], -1) for start, n in starts])
        whole = self._orders[sizes].of(_joined(parts, dim), dim)
        return whole if out is None else out.copy_(whole)

    def _in_order(self, parts: Sequence[Tensor], dim: int) -> list[Tensor]:
        """Pieces, if they are few, of what members hold."""
        sizes, order = self._cuts
        cuts = [_split(x, n, dim) for x, n in zip(parts, sizes, strict=True)]
        return [cuts[member][i] for member, i in order] or [parts[0].narrow(dim, 0, 0)]

    @cached_property
    def _cuts(self) -> tuple[list[list[int]], list[tuple[int, int]]]:
        """By member the lengths of its pieces, all that it holds; of every piece whose it is, and which of these."""
        lying: list[list[tuple[int, int]]] = [[] for _ in self.rows]
        for member, start, n in (pieces := self.pieces[0].tolist()):
            lying[member].append((start, n))
        for some in lying:
            some.sort()
            assert all(start + n == after for (start, n), (after, _) in pairwise([(0, 0), *some])), "rows left out"
        return [[n for _, n in some] for some in lying], [(of, lying[of].index((at, n))) for of, at, n in pieces]


def pairs(rows: tuple[Rows, ...], x: Tensor, stacked: Tensor, dim: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows of a tensor, and where they are in others of which each has some, (others, ...) stacked.

    Views, one pair for as many as are evenly spaced; of rows in more than a head and a tail the first may be a copy.
    """
    offset, step_of_rows, (steps, shape) = x.storage_offset(), x.stride(dim), (x.stride(), x.shape)
    for first, count, start, step, at, n in _runs(rows):
        sizes = (count, *shape[:dim], n, *shape[dim + 1 :])
        there = x.as_strided(sizes, (step * step_of_rows, *steps), offset + start * step_of_rows)
        yield there, cut(cut(stacked, 0, first, count), dim + 1, at, n)
    for member, some in enumerate(rows):
        if not some.are_two:
            yield some.of(x, dim), cut(stacked[member], dim, 0, some.length)


@lru_cache(maxsize=256)
def _runs(rows: tuple[Rows, ...]) -> list[tuple[int, int, int, int, int, int]]:
    """Pieces of neighbours: whose first, of how many, its first row, rows to the next one; where they go, how many."""
    found: list[tuple[int, int, int, int, int, int]] = []
    for member, some in enumerate(rows):
        pieces = some.pieces[0] if some.are_two else some.pieces[0][:0]
        for (start, stop), at in zip(pieces.tolist(), stored_at(pieces).tolist(), strict=True):
            n = stop - start
            for i, (first, count, start_of_first, step, *alike) in enumerate(found):
                step = start - start_of_first if count == 1 else step
                # Strides of a tensor are not negative.
                if (
                    alike == [at, n]
                    and first + count == member
                    and start == start_of_first + count * step
                    and step >= 0
                ):
                    found[i] = (first, count + 1, start_of_first, step, at, n)
                    break
            else:
                found.append((member, 1, start, 0, at, n))
    return found


def cut(x: Tensor, dim: int, start: int, n: int) -> Tensor:
    """``x.narrow``, where it leaves something out."""
    return x if n == x.size(dim) else x.narrow(dim, start, n)


def padded(x: Tensor, dim: int, length: int, before: int = 0) -> Tensor:
    """With zeros along a dim, so many before it and the others behind, in all as long as that; copied where any are."""
    after = length - before - x.shape[dim]
    return F.pad(x, (0, 0) * (x.ndim - dim - 1) + (before, after)) if before or after else x


def _split(x: Tensor, sizes: list[int], dim: int) -> Sequence[Tensor]:
    """The first rows of a tensor, in pieces."""
    rest = x.shape[dim] - sum(sizes)
    return (x,) if len(sizes) == 1 and not rest else x.split_with_sizes([*sizes, rest], dim)


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    """``torch.cat``, which copies even a single tensor, and puts together by heads what lies by tokens."""
    if len(parts) == 1:
        return parts[0]
    if _lie_by_tokens(parts[0], dim):
        return torch.cat([x.transpose(1, 2) for x in parts], 1).transpose(1, 2)
    return torch.cat(list(parts), dim)


def _lie_by_tokens(x: Tensor, dim: int) -> bool:
    """Whether rows of (B, N, L, H) do; without H they lie by heads anyway."""
    return x.ndim > 3 and dim == 2 and x.stride(1) < x.stride(2)
