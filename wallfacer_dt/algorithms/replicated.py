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
from wallfacer_dt.layout import shard_sizes


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
        return torch.cat([self._parts(x)[self._index], self._after(x)], SEQUENCE_DIM)

    def everyone(self, x: Tensor) -> Tensor:
        """From results for own rows the results for all replicated rows and the shard; gathers."""
        if not self.count:
            return x
        own = self._sizes[self._index]
        mine = x.narrow(SEQUENCE_DIM, 0, own)
        gathered = self._padded(mine)
        for group, size in self._axes():
            if size > 1:
                gathered = wait(all_gather(gathered.contiguous().view(-1), group))
        parts = gathered.view(-1, *self._padded(mine).shape).unbind(0)
        rows = [part.narrow(SEQUENCE_DIM, 0, n) for part, n in zip(parts, self._sizes, strict=True)]
        return torch.cat([*rows, self._after(x, own)], SEQUENCE_DIM)

    def summed(self, x: Tensor) -> Tensor:
        """From gradients of all replicated results and the shard those of own rows; sums over ranks."""
        if not self.count:
            return x
        wide = accumulation_dtype(x.dtype)
        parts = [self._padded(part).to(wide) for part in self._parts(x)]
        shape, flat = parts[0].shape, torch.stack(parts)
        for group, size in reversed(self._axes()):
            if size > 1:
                share = flat.numel() // size
                pending = all_to_all(flat.contiguous().view(-1), [share] * size, [share] * size, group)
                flat = wait(pending).view(size, -1, *shape).sum(0)
        mine = flat.view(shape).narrow(SEQUENCE_DIM, 0, self._sizes[self._index]).to(x.dtype)
        return torch.cat([mine, self._after(x)], SEQUENCE_DIM)

    def placed(self, x: Tensor) -> Tensor:
        """From gradients of own rows those of all: zero for the replicated rows that others take care of."""
        if not self.count:
            return x
        own, before = self._sizes[self._index], sum(self._sizes[: self._index])
        around = (0, 0) * (x.ndim - SEQUENCE_DIM - 1) + (before, self.count - before - own)
        return torch.cat([F.pad(x.narrow(SEQUENCE_DIM, 0, own), around), self._after(x, own)], SEQUENCE_DIM)

    @property
    def _index(self) -> int:
        return self.groups.place.index

    @property
    def _sizes(self) -> tuple[int, ...]:
        """By rank, how many of the replicated rows it takes care of."""
        return shard_sizes(self.count, self.groups.place.axes)

    def _axes(self) -> list[tuple[str, int]]:
        place = self.groups.place
        return [(self.groups.team, place.team), (self.groups.ring, place.ring), (self.groups.ulysses, place.ulysses)]

    def _parts(self, x: Tensor) -> tuple[Tensor, ...]:
        """By rank, the replicated rows that it takes care of."""
        return x.narrow(SEQUENCE_DIM, 0, self.count).split(self._sizes, SEQUENCE_DIM)

    def _after(self, x: Tensor, replicated: int | None = None) -> Tensor:
        """The shard, behind all replicated rows or so many of them."""
        start = self.count if replicated is None else replicated
        return x.narrow(SEQUENCE_DIM, start, x.shape[SEQUENCE_DIM] - start)

    def _padded(self, x: Tensor) -> Tensor:
        missing = max(self._sizes) - x.shape[SEQUENCE_DIM]
        return F.pad(x, (0, 0) * (x.ndim - SEQUENCE_DIM - 1) + (0, missing))
