"""Tokens that every rank holds alike, before its shard: the text of a diffusion transformer's joint attention.

For attention they are tokens like others, dealt out to the ranks; their outputs are gathered, since every rank wants
them all. As in any SPMD program the loss is the sum of what ranks compute: what ranks say about their copies of an
output is summed, and the gradients of a rank's copies of the inputs are its part of a sum.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from wallfacer_dt.algorithms.arithmetic import SEQUENCE_DIM
from wallfacer_dt.collectives.over_axes import gathered_rows, summed_rows
from wallfacer_dt.kernels.merge import accumulation_dtype
from wallfacer_dt.layout import shard_sizes
from wallfacer_dt.mesh import ContextGroups
from wallfacer_dt.rows import padded


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
        mine = x.narrow(SEQUENCE_DIM, 0, own)
        rows = gathered_rows(mine, SEQUENCE_DIM, self._sizes, self.groups.names, "replicated rows")
        return torch.cat([*rows, _after(x, own)], SEQUENCE_DIM)

    def summed(self, x: Tensor) -> Tensor:
        """From gradients of all replicated results and the shard those of own rows; sums over ranks."""
        if not self.count:
            return x
        wide, what = accumulation_dtype(x.dtype), "replicated rows' gradients"
        parts = x.narrow(SEQUENCE_DIM, 0, self.count).split(self._sizes, SEQUENCE_DIM)
        mine = summed_rows(parts, SEQUENCE_DIM, self._own[1], self.groups.names, what, wide)
        return torch.cat([mine.to(x.dtype), _after(x, self.count)], SEQUENCE_DIM)

    def placed(self, *tensors: Tensor) -> Sequence[Tensor]:
        """From gradients of own rows those of all: zero for the replicated rows that others take care of."""
        if not self.count:
            return tensors
        before, own = self._own
        mine = [padded(x.narrow(SEQUENCE_DIM, 0, own), SEQUENCE_DIM, self.count, before) for x in tensors]
        return [torch.cat([rows, _after(x, own)], SEQUENCE_DIM) for rows, x in zip(mine, tensors, strict=True)]

    @property
    def _sizes(self) -> tuple[int, ...]:
        """By rank, how many of the replicated rows it takes care of."""
        return shard_sizes(self.count, self.groups.coordinate.axes)

    @property
    def _own(self) -> tuple[int, int]:
        """The replicated rows before those that this rank takes care of, and how many these are."""
        index = self.groups.coordinate.index
        return sum(self._sizes[:index]), self._sizes[index]


def _after(x: Tensor, rows: int) -> Tensor:
    """What comes behind some rows."""
    return x.narrow(SEQUENCE_DIM, rows, x.shape[SEQUENCE_DIM] - rows)
