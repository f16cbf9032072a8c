"""Rows of several tensors put together in another order, and taken apart again: few pieces by slices, many by index."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from wallfacer_dt.layout import Pieces, Spans, stored_at

_FEW = 64


@dataclass(frozen=True, eq=False)
class Rows:
    """Which rows of some tensors make a new one.

    Attributes:
        pieces: by row of the batch, or one for all: (n, 3) of the tensor's number, the first row, and how many.
    """

    pieces: tuple[np.ndarray, ...]
    _indices: dict[tuple[tuple[int, ...], torch.device], Tensor] = field(default_factory=dict, repr=False)

    @classmethod
    def at(cls, by_row: Sequence[Spans]) -> "Rows":
        """Rows of one tensor."""
        return cls(tuple(_pieces(np.zeros(len(spans), np.int64), spans[:, 0], _lengths(spans)) for spans in by_row))

    def of(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """The new tensor; where rows of the batch differ, ``dim`` comes after that of the batch, which is the first."""
        if len(self.pieces) == 1 and len(self.pieces[0]) <= _FEW:
            narrowed = [parts[part].narrow(dim, start, n) for part, start, n in self.pieces[0].tolist()]
            return joined(narrowed or [parts[0].narrow(dim, 0, 0)], dim)
        index = self._index(parts, dim)
        whole = joined(parts, dim)
        if len(index) == 1:
            return whole.index_select(dim, index[0])
        rows = torch.arange(len(index), device=index.device).unsqueeze(-1)
        return whole.movedim(dim, 1)[rows, index].movedim(1, dim)

    def _index(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """(rows, length) of the parts laid end to end."""
        x, sizes = parts[0], tuple(part.shape[dim] for part in parts)
        if (sizes, x.device) in self._indices:
            return self._indices[sizes, x.device]
        first = np.cumsum(sizes) - sizes
        rows = [np.repeat(first[part] + start - (np.cumsum(n) - n), n) for part, start, n in (p.T for p in self.pieces)]
        index = torch.tensor(np.stack([row + np.arange(len(row)) for row in rows]), device=x.device)
        if not isinstance(x, FakeTensor):
            self._indices[sizes, x.device] = index
        return index


class Members(NamedTuple):
    """How the rows of several members are put together, ascending in position, and taken apart.

    Attributes:
        together: the rows of all, out of what the members hold.
        of: by member, its rows out of these.
    """

    together: Rows
    of: tuple[Rows, ...]

    @classmethod
    def made(cls, by_row: Sequence[Pieces], members: int) -> "Members":
        """By row of the batch, or for all, whose pieces they are."""
        whole = [_pieces(pieces.member, pieces.start, _lengths(pieces.span)) for pieces in by_row]
        stored = [np.stack([stored_at(pieces.span), *pieces.span.T], -1) for pieces in by_row]
        apart = []
        for member in range(members):
            rows = [some[pieces.member == member] for some, pieces in zip(stored, by_row, strict=True)]
            apart.append(Rows(tuple(_pieces(0 * row[:, 0], row[:, 0], row[:, 2] - row[:, 1]) for row in rows)))
        return cls(Rows(tuple(whole)), tuple(apart))


def joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    """``torch.cat``, which copies even a single tensor."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


def _lengths(spans: Spans) -> np.ndarray:
    return spans[:, 1] - spans[:, 0]


def _pieces(part: np.ndarray, start: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Pieces without empty ones, those that follow one another made one."""
    part, start, length = (x[length > 0] for x in (part, start, length))
    apart = np.append(True, (part[1:] != part[:-1]) | (start[1:] != start[:-1] + length[:-1]))[: len(part)]
    first = np.flatnonzero(apart)
    lengths = np.add.reduceat(length, first) if len(first) else length
    return np.stack([part[apart], start[apart], lengths], -1)
