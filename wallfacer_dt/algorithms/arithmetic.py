"""What attention computes on operands, forward and backward, and what of it travels.

Precision: partial results accumulate in float32 (float64 for float64). What gathers contributions hop by hop travels
in that dtype too, so the error does not grow with the ring; what is sent once travels in the inputs' dtype.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from wallfacer_dt.algorithms.tiles import Tile
from wallfacer_dt.kernels import BlockKernel, accumulation_dtype, merge_, output_with_delta

SEQUENCE_DIM = 2  # of everything here: (B, N, L, H) and (B, N, L)


@dataclass(slots=True)
class Operand:
    """Queries or keys on this rank, and what has been computed for them so far.

    Attributes:
        data: what a transfer sends. Keys: (k, v). Queries: (q,) forward, (q, grad_out, lse, delta) backward.
        partial: forward, for queries: (out, lse). Backward: (dq,) or (dk, dv). Empty until the first tile.
        out: backward, for queries: an output with rowsum(grad_out * out) = delta.
        message: data as it was received, to be sent on without packing it again.
    """

    data: tuple[Tensor, ...]
    partial: tuple[Tensor, ...] = ()
    out: Tensor | None = field(default=None, repr=False)
    message: Tensor | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Forward:
    """out and lse of queries over keys."""

    kernel: BlockKernel
    scale: float

    def attend(self, query: Operand, keys: Operand, tiles: Sequence[Tile]) -> None:
        """Merge the tiles into the queries' partial result."""
        (q,), (k, v) = query.data, keys.data
        for tile in tiles:
            out, lse = self.kernel.forward(
                _rows(q, tile.q),
                _rows(k, tile.k),
                _rows(v, tile.k),
                is_causal=tile.is_causal,
                scale=self.scale,
            )
            if not query.partial and _covers(tile.q, q):
                query.partial = (out.to(lse.dtype), lse)
                continue
            if not query.partial:
                query.partial = self.nothing(query)
            self.combine([_rows(x, tile.q) for x in query.partial], (out, lse))

    def nothing(self, query: Operand) -> tuple[Tensor, Tensor]:
        """The partial result of queries that have seen no key."""
        (q,) = query.data
        wide = accumulation_dtype(q.dtype)
        lse = torch.full(q.shape[:-1], -torch.inf, dtype=wide, device=q.device)
        return torch.zeros_like(q, dtype=wide), lse

    def outgoing(self, partial: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
        """A partial result as it is sent to its owner, once; ``dtype`` is the inputs'."""
        out, lse = partial
        return out.to(dtype), lse

    def combine(self, partial: Sequence[Tensor], more: Sequence[Tensor]) -> None:
        """Merge a partial result over other keys into one, in place."""
        (out, lse), (more_out, more_lse) = partial, more
        merge_(out, lse, more_out, more_lse)


@dataclass(frozen=True, slots=True)
class Backward:
    """Gradients of queries and keys, from the whole row's lse and delta = rowsum(grad_out * out)."""

    kernel: BlockKernel
    scale: float

    def attend(self, query: Operand, keys: Operand, tiles: Sequence[Tile]) -> None:
        """Add the tiles' gradients to both operands' partial results."""
        q, grad_out, lse, delta = query.data
        k, v = keys.data
        if not tiles:
            return
        if query.out is None:
            query.out = output_with_delta(grad_out, delta)
        for tile in tiles:
            rows = [_rows(x, tile.q) for x in (grad_out, q, query.out, lse)]
            dq, dk, dv = self.kernel.backward(
                rows[0], rows[1], _rows(k, tile.k), _rows(v, tile.k), rows[2], rows[3],
                is_causal=tile.is_causal, scale=self.scale,
            )  # fmt: skip
            self._add(query, (dq,), tile.q)
            self._add(keys, (dk, dv), tile.k)

    def nothing(self, operand: Operand) -> tuple[Tensor, ...]:
        """The gradients of an operand that took no part."""
        # Queries are (q, grad_out, lse, delta), keys (k, v).
        inputs = operand.data[:1] if len(operand.data) == 4 else operand.data
        return tuple(torch.zeros_like(x, dtype=accumulation_dtype(x.dtype)) for x in inputs)

    def outgoing(self, partial: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
        """A partial gradient as it is sent to its owner, once; ``dtype`` is the inputs'."""
        return tuple(grad.to(dtype) for grad in partial)

    def combine(self, partial: Sequence[Tensor], more: Sequence[Tensor]) -> None:
        """Add a partial gradient to another, in place."""
        for mine, theirs in zip(partial, more, strict=True):
            mine.add_(theirs)

    def _add(self, operand: Operand, grads: Sequence[Tensor], rows: tuple[int, int]) -> None:
        if not operand.partial and _covers(rows, operand.data[0]):
            operand.partial = tuple(grad.to(accumulation_dtype(grad.dtype)) for grad in grads)
            return
        if not operand.partial:
            operand.partial = self.nothing(operand)
        self.combine([_rows(x, rows) for x in operand.partial], grads)


def _rows(x: Tensor, rows: tuple[int, int]) -> Tensor:
    return x.narrow(SEQUENCE_DIM, rows[0], rows[1] - rows[0])


def _covers(rows: tuple[int, int], x: Tensor) -> bool:
    return rows == (0, x.shape[SEQUENCE_DIM])
