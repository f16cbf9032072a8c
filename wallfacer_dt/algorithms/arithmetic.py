"""What attention computes on operands, forward and backward, and what of it travels.

Precision: partial results accumulate in float32 (float64 for float64). What gathers contributions hop by hop travels
in that dtype too, so the error does not grow with the ring; what is sent once, or comes to its owner, travels in the
inputs' dtype.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from wallfacer_dt.algorithms.cumulative import cumulative
from wallfacer_dt.algorithms.segments import Work
from wallfacer_dt.algorithms.steps import Side
from wallfacer_dt.algorithms.tiles import Rows, Tile
from wallfacer_dt.collectives.send_buffer import Layout
from wallfacer_dt.kernels.block import BlockKernel, How
from wallfacer_dt.kernels.merge import (
    accumulation_dtype,
    as_dtype,
    combined,
    is_fused,
    merge_,
    output_factor,
    output_from,
    row_delta,
)
from wallfacer_dt.layout import Spans
from wallfacer_dt.rows import cut

BATCH_DIM, HEADS_DIM, SEQUENCE_DIM = 0, 1, 2  # of everything here: (B, N, L, H) and (B, N, L)

Asked = Callable[[Spans, Spans], BlockMask]
"""What ``mask_mod`` says of queries and keys at these positions."""


class Sent(NamedTuple):
    """Tensors in one flat buffer, as they travel."""

    buffer: Tensor
    layout: Layout


@dataclass(slots=True)
class Operand:
    """Queries or keys on this rank, and what has been computed for them so far.

    Attributes:
        data: keys: (k, v) or (k, v, k_shared), the last (B, 1, L, Hs) being the end of every head's key. Queries: (q,)
            forward, (q, grad_out, lse) backward, and what has come from elsewhere with a factor in place of ``out``.
        partial: forward, for queries: (out, lse). Backward: gradients of q, or of the keys' data. Empty until the
            first call of a kernel, then as the kernel gave it, and from the second on in the accumulation dtype; when
            it is complete perhaps in the inputs'.
        out: backward, for queries: their output, or one that has the same rowsum(grad_out * out).
        sent: data where it was received, to be sent on as it is.
        sent_partial: partial likewise.
    """

    data: tuple[Tensor, ...]
    partial: tuple[Tensor, ...] = ()
    out: Tensor | None = field(default=None, repr=False)
    sent: Sent | None = field(default=None, repr=False)
    sent_partial: Sent | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Scores:
    """What becomes of q k^T on its way to the softmax."""

    kernel: BlockKernel
    scale: float
    softcap: float = 0.0  # s becomes softcap * tanh(s / softcap); 0 for none
    asked: Asked | None = None  # the mask, where there is one to be asked

    def calls(self, work: Work) -> Iterator[tuple[Tile, bool]]:
        """As the kernel takes them: at once, one by one, or in pieces that need no band; and whether it is the last."""
        for segments in work:
            if self.kernel.takes_segments and segments.is_ragged:
                tiles = (Tile(*segments.extents, ragged=segments),)
            else:
                tiles = segments.bands if self.kernel.takes_bands else segments.tiles
            for tile in tiles:
                yield tile, segments is work[-1] and tile is tiles[-1]

    def how(self, tile: Tile, q: Tensor, k: Tensor) -> How:
        """What the kernel is told of a tile."""
        seen = cumulative(tile.ragged, q, k) if tile.ragged else tile.band
        if not tile.asked:
            return How(seen, self.scale, None, self.softcap)
        assert self.asked is not None, "a schedule that asks has a mask to be asked"
        return How(seen, self.scale, self.asked(*tile.asked), self.softcap)


class Arithmetic(ABC):
    """What is computed on segments of queries and keys: partial results that are combined in some way."""

    gives_to_keys: ClassVar[bool]  # whether something is computed for the keys, too, as a backward does

    @abstractmethod
    def attend(self, query: Operand, keys: Operand, work: Work, completed: Collection[Side] = ()) -> None:
        """Compute segments, and combine what comes of them with the operands' partial results.

        ``completed``: nothing more is combined with those of these sides.
        """

    @abstractmethod
    def nothing(self, operand: Operand) -> tuple[Tensor, ...]:
        """The partial result of an operand that has seen nothing, in the accumulation dtype."""

    def sent(self, operand: Operand) -> tuple[Tensor, ...]:
        """An own operand's data, as others are sent it."""
        return operand.data

    @abstractmethod
    def combine_(self, partial: Sequence[Tensor], more: Sequence[Tensor]) -> None:
        """Combine a partial result in the accumulation dtype with another one, in place."""

    def home_dtypes(self, tensors: int, dtype: torch.dtype) -> tuple[torch.dtype, ...]:
        """In what the tensors of a partial result are sent to its owner, once; ``dtype`` is the inputs'."""
        return (dtype,) * tensors

    def outgoing(self, partial: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
        """A partial result as its owner has it; ``dtype`` is the inputs'."""
        dtypes = self.home_dtypes(len(partial), dtype)
        return tuple([as_dtype(x, own) for x, own in zip(partial, dtypes, strict=True)])

    @abstractmethod
    def fused(self, partial: Sequence[Tensor], more: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Two partial results as one in ``dtype``, by one kernel each."""

    def combine(self, operand: Operand, more: Sequence[Tensor], *, last: bool = False) -> None:
        """Combine a partial result with the operand's, which is changed in place once it is wide.

        ``last``: nothing more is, so that it can be written as it is wanted.
        """
        if not operand.partial:
            operand.partial = tuple(more)
        elif is_fused(operand.partial[0]):
            dtype = operand.data[0].dtype
            operand.partial = self.fused(operand.partial, more, dtype if last else accumulation_dtype(dtype))
        else:
            operand.partial = _widened(operand.partial)  # and what was narrow is let go
            self.combine_(operand.partial, more)

    def add(self, operand: Operand, more: Sequence[Tensor], tile: Tile, rows: Rows | None, *, last: bool) -> None:
        """Combine what a tile gives with the operand's partial result, in these rows or, None, in all."""
        if rows is None:
            self.combine(operand, more, last=last)
        else:
            operand.partial = _widened(operand.partial or self.nothing(operand))
            self.combine_(_parts(operand.partial, tile, rows), more)


@dataclass(frozen=True, slots=True)
class Forward(Arithmetic):
    """out and lse of queries over keys."""

    scores: Scores
    value_dim: int
    stays_wide: bool = False  # something else is to be done with what comes of it, before it is rounded
    gives_to_keys: ClassVar[bool] = False

    def attend(self, query: Operand, keys: Operand, work: Work, completed: Collection[Side] = ()) -> None:
        """Merge what segments give into the queries' partial result."""
        scores = self.scores
        for tile, is_last in scores.calls(work):
            rows, (q,) = _taken(query.data, tile, tile.q)
            _, (k, v, *shared) = _taken(keys.data, tile, tile.k)
            k = _with_shared(k, *shared) if shared else k
            more = scores.kernel.forward(q, k, v, scores.how(tile, q, k))
            self.add(query, more, tile, rows, last=is_last and "q" in completed)

    def fused(self, partial: Sequence[Tensor], more: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Merged."""
        return combined(partial, more, accumulation_dtype(dtype) if self.stays_wide else dtype)

    def nothing(self, operand: Operand) -> tuple[Tensor, Tensor]:
        """Of queries that have seen no key."""
        (q,) = operand.data
        wide = accumulation_dtype(q.dtype)
        lse = torch.full(q.shape[:-1], -torch.inf, dtype=wide, device=q.device)
        return q.new_zeros((*q.shape[:-1], self.value_dim), dtype=wide), lse

    def home_dtypes(self, tensors: int, dtype: torch.dtype) -> tuple[torch.dtype, ...]:
        """The lse stays wide."""
        return (dtype, accumulation_dtype(dtype))[:tensors]

    def combine_(self, partial: Sequence[Tensor], more: Sequence[Tensor]) -> None:
        """Merge in a partial result over other keys."""
        merge_(*partial, *more)


class Sums(Arithmetic):
    """Partial results that are added up, each of its operand's shape."""

    def nothing(self, operand: Operand) -> tuple[Tensor, ...]:
        """The sum of nothing."""
        return tuple(torch.zeros_like(x, dtype=accumulation_dtype(x.dtype)) for x in operand.data)

    def fused(self, partial: Sequence[Tensor], more: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Added."""
        return tuple([combined((mine,), (theirs,), dtype)[0] for mine, theirs in zip(partial, more, strict=True)])

    def combine_(self, partial: Sequence[Tensor], more: Sequence[Tensor]) -> None:
        """Add a partial sum."""
        for mine, theirs in zip(partial, more, strict=True):
            mine.add_(theirs)


@dataclass(frozen=True, slots=True)
class Backward(Sums):
    """Gradients of queries and keys, from the whole row's lse and an output that stands for its delta."""

    scores: Scores
    gives_to_keys: ClassVar[bool] = True

    def attend(self, query: Operand, keys: Operand, work: Work, completed: Collection[Side] = ()) -> None:
        """Add the segments' gradients to both operands' partial results."""
        if not work:
            return
        scores, (q, grad_out, lse, *factor) = self.scores, query.data
        if query.out is None:
            query.out = output_from(grad_out, *factor)
        given = q, grad_out, query.out, lse
        for tile, is_last in scores.calls(work):
            rows, (q, grad_out, out, lse) = _taken(given, tile, tile.q)
            key_rows, (own, v, *shared) = _taken(keys.data, tile, tile.k)
            k = _with_shared(own, *shared) if shared else own
            dq, dk, dv = scores.kernel.backward(grad_out, q, k, v, out, lse, scores.how(tile, q, k))
            self.add(query, (dq,), tile, rows, last=is_last and "q" in completed)
            of_keys = dk, dv
            if shared:
                dk, of_shared = dk.split([own.shape[-1], shared[0].shape[-1]], -1)
                of_keys = dk, dv, of_shared.sum(HEADS_DIM, keepdim=True, dtype=accumulation_dtype(dk.dtype))
            self.add(keys, of_keys, tile, key_rows, last=is_last and "kv" in completed)

    def nothing(self, operand: Operand) -> tuple[Tensor, ...]:
        """The gradients of an operand that took no part."""
        are_queries = operand.out is not None or _has_factor(operand)
        return Sums.nothing(self, Operand(operand.data[:1] if are_queries else operand.data))

    def sent(self, operand: Operand) -> tuple[Tensor, ...]:
        """Of queries with a factor for each row in place of an output, which is as large as they are."""
        if operand.out is None or _has_factor(operand):
            return operand.data
        _, grad_out, lse = operand.data
        return *operand.data, output_factor(grad_out, row_delta(grad_out, operand.out, lse.dtype))


def _has_factor(operand: Operand) -> bool:
    return len(operand.data) == 4  # keys are three at most


def _taken(tensors: Sequence[Tensor], tile: Tile, rows: Rows) -> tuple[Rows | None, Sequence[Tensor]]:
    """A tile's rows of an operand's tensors; None in place of the rows if these are all that it has."""
    shape = tensors[0].shape
    if rows == (0, shape[SEQUENCE_DIM]) and (tile.batch is None or shape[BATCH_DIM] == 1):
        return None, tensors
    return rows, _parts(tensors, tile, rows)


def _parts(tensors: Sequence[Tensor], tile: Tile, rows: Rows) -> Sequence[Tensor]:
    """Rows of an operand's tensors, in the rows of the batch that a tile is for."""
    if tile.batch is not None:
        tensors = [cut(x, BATCH_DIM, tile.batch, 1) for x in tensors]
    return [cut(x, SEQUENCE_DIM, rows[0], rows[1] - rows[0]) for x in tensors]


def _with_shared(k: Tensor, shared: Tensor) -> Tensor:
    """Keys with the part that heads share."""
    return torch.cat([k, shared.expand(-1, k.shape[HEADS_DIM], -1, -1)], -1)


def _widened(partial: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """In the accumulation dtype, each: a kernel of one's own may give some wide and others not."""
    wide = accumulation_dtype(partial[0].dtype)
    return tuple([as_dtype(x, wide) for x in partial])
