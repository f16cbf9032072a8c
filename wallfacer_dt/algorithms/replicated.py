"""Tokens that every rank holds alike, before its shard: the text of a diffusion transformer's joint attention.

For attention they are tokens like others, dealt out to the ranks; their outputs are gathered, since every rank wants
them all. As in any SPMD program the loss is the sum of what ranks compute: what ranks say about their copies of an
output is summed, and the gradients of a rank's copies of the inputs are its part of a sum.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from wallfacer_dt.algorithms.arithmetic import SEQUENCE_DIM
from wallfacer_dt.collectives.over_axes import gathered, summed
from wallfacer_dt.kernels.merge import accumulation_dtype
from wallfacer_dt.layout import shard_sizes
from wallfacer_dt.mesh import ContextGroups


@dataclass(frozen=True, slots=True)
class Replicated:
    """The first ``count`` (T) rows of this rank's tensors, of which it takes care of a part."""

    count: int
    groups: ContextGroups

    def own(self, *tensors: Tensor) -> Sequence[Tensor]:
        """The rows that this rank takes care of: its part of the replicated ones, and its shard."""
        if not self.count:
            return tensors
        before, own = self._own
        return [torch.cat([x.narrow(SEQUENCE_DIM, before, own), _after(x, self.count)], SEQUENCE_DIM) for x in tensors]

    def everyone(self, x: Tensor) -> Tensor:
        """From results for own rows the results for all replicated rows and the shard; gathers."""
        if not self.count:
            return x
        _, own = self._own
        mine = self._padded(x.narrow(SEQUENCE_DIM, 0, own)).contiguous()
        all_rows = gathered(mine.view(-1), self.groups.names, "replicated rows")
        parts = zip(all_rows.view(-1, *mine.shape).unbind(0), self._sizes, strict=True)
        rows = [part.narrow(SEQUENCE_DIM, 0, n) for part, n in parts]
        return torch.cat([*rows, _after(x, own)], SEQUENCE_DIM)

    def summed(self, x: Tensor) -> Tensor:
        """From gradients of all replicated results and the shard those of own rows; sums over ranks."""
        if not self.count:
            return x
        wide = accumulation_dtype(x.dtype)
        parts = x.narrow(SEQUENCE_DIM, 0, self.count).split(self._sizes, SEQUENCE_DIM)
        flat = torch.stack([self._padded(part).to(wide) for part in parts])
        mine = summed(flat, self.groups.names, "replicated rows' gradients")
        mine = mine.narrow(SEQUENCE_DIM, 0, self._own[1]).to(x.dtype)
        return torch.cat([mine, _after(x, self.count)], SEQUENCE_DIM)

    def placed(self, *tensors: Tensor) -> Sequence[Tensor]:
        """From gradients of own rows those of all: zero for the replicated rows that others take care of."""
        if not self.count:
            return tensors
        before, own = self._own
        around = before, self.count - before - own
        return [
            torch.cat([_filled(x.narrow(SEQUENCE_DIM, 0, own), *around), _after(x, own)], SEQUENCE_DIM) for x in tensors
        ]

    @property
    def _sizes(self) -> tuple[int, ...]:
        """By rank, how many of the replicated rows it takes care of."""
        return shard_sizes(self.count, self.groups.coordinate.axes)

    @property
    def _own(self) -> tuple[int, int]:
        """The replicated rows before those that this rank takes care of, and how many these are."""
        index = self.groups.coordinate.index
        return sum(self._sizes[:index]), self._sizes[index]

    def _padded(self, x: Tensor) -> Tensor:
        return _filled(x, 0, max(self._sizes) - x.shape[SEQUENCE_DIM])


def _after(x: Tensor, rows: int) -> Tensor:
    """What comes behind some rows."""
    return x.narrow(SEQUENCE_DIM, rows, x.shape[SEQUENCE_DIM] - rows)


def _filled(x: Tensor, before: int, after: int) -> Tensor:
    """Rows with zeros around them."""
    return F.pad(x, (0, 0) * (x.ndim - SEQUENCE_DIM - 1) + (before, after)) if before or after else x
