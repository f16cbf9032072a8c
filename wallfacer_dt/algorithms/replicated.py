"""Tokens that every rank holds alike, before its shard: the text of a diffusion transformer's joint attention.

For attention they are tokens like others, dealt out to the ranks; their outputs are gathered, since every rank wants
them all. As in any SPMD program the loss is the sum of what ranks compute: what ranks say about their copies of an
output is summed, and the gradients of a rank's copies of the inputs are its part of a sum.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from wallfacer_dt.algorithms.arithmetic import SEQUENCE_DIM
from wallfacer_dt.algorithms.execute import Groups
from wallfacer_dt.collectives import all_gather, all_to_all, wait
from wallfacer_dt.kernels import accumulation_dtype
from wallfacer_dt.layout import Span, deal


@dataclass(frozen=True, slots=True)
class Replicated:
    """The first ``count`` rows of this rank's tensors, of which it takes care of a part.

    Attributes:
        count: T.
        groups: the process groups, and this rank's coordinate.
    """

    count: int
    groups: Groups

    def own(self, x: Tensor) -> Tensor:
        """The rows that this rank takes care of: its part of the replicated ones, and its shard."""
        if not self.count:
            return x
        part, rest = self._part(), x.shape[SEQUENCE_DIM] - self.count
        return torch.cat([_rows(x, part.start, part.length), _rows(x, self.count, rest)], SEQUENCE_DIM)

    def everyone(self, x: Tensor) -> Tensor:
        """From results for own rows the results for all replicated rows and the shard; gathers."""
        if not self.count:
            return x
        mine, length = _rows(x, 0, self._part().length), x.shape[SEQUENCE_DIM]
        gathered = self._padded(mine)
        for group, size in self._axes():
            if size > 1:
                gathered = wait(all_gather(gathered.contiguous().view(-1), group))
        parts = gathered.view(-1, *self._padded(mine).shape).unbind(0)
        rows = [_rows(part, 0, span.length) for part, span in zip(parts, self._spans(), strict=True)]
        return torch.cat([*rows, _rows(x, mine.shape[SEQUENCE_DIM], length - mine.shape[SEQUENCE_DIM])], SEQUENCE_DIM)

    def summed(self, x: Tensor) -> Tensor:
        """From gradients of all replicated results and the shard those of own rows; sums over ranks."""
        if not self.count:
            return x
        wide = accumulation_dtype(x.dtype)
        parts = [self._padded(_rows(x, span.start, span.length)).to(wide) for span in self._spans()]
        shape, flat = parts[0].shape, torch.stack(parts)
        for group, size in reversed(self._axes()):
            if size > 1:
                share = flat.numel() // size
                pending = all_to_all(flat.contiguous().view(-1), [share] * size, [share] * size, group)
                flat = wait(pending).view(size, -1, *shape).sum(0)
        mine = _rows(flat.view(shape), 0, self._part().length).to(x.dtype)
        return torch.cat([mine, _rows(x, self.count, x.shape[SEQUENCE_DIM] - self.count)], SEQUENCE_DIM)

    def placed(self, x: Tensor) -> Tensor:
        """From gradients of own rows those of all: zero for the replicated rows that others take care of."""
        if not self.count:
            return x
        part = self._part()
        mine, rest = _rows(x, 0, part.length), x.shape[SEQUENCE_DIM] - part.length
        around = (0, 0) * (x.ndim - SEQUENCE_DIM - 1) + (part.start, self.count - part.stop)
        return torch.cat([F.pad(mine, around), _rows(x, part.length, rest)], SEQUENCE_DIM)

    def _axes(self) -> list[tuple[str, int]]:
        place = self.groups.place
        return [(self.groups.team, place.team), (self.groups.ring, place.ring), (self.groups.ulysses, place.ulysses)]

    def _spans(self) -> list[Span]:
        held = deal(self.count, self.groups.place.axes, "contiguous")
        return [spans[0] if spans else Span(self.count, self.count) for spans in held]

    def _part(self) -> Span:
        return self._spans()[self.groups.place.index]

    def _padded(self, x: Tensor) -> Tensor:
        missing = max(span.length for span in self._spans()) - x.shape[SEQUENCE_DIM]
        return F.pad(x, (0, 0) * (x.ndim - SEQUENCE_DIM - 1) + (0, missing))


def _rows(x: Tensor, start: int, length: int) -> Tensor:
    return x.narrow(SEQUENCE_DIM, start, length)
