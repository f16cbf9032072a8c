"""Attention's projections while their groups of heads travel: to all ranks, and their gradients to their owners.

A group's weights are broadcast by whoever holds them (METP, algorithm 5, line 4). Their gradients are reduced to the
owners (algorithm 6, line 11) in two steps, each rank summing a part of all, in the accumulation dtype, and sending the
sum home: no rank ever receives a whole gradient from everyone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from wallfacer_dt.algorithms.head_groups import OUT, HeadGroup, Piece
from wallfacer_dt.collectives.functional import all_to_all, broadcast, wait
from wallfacer_dt.collectives.send_buffer import Layout, layout, pack
from wallfacer_dt.kernels.merge import accumulation_dtype


class Weights(NamedTuple):
    """What attention's projections consist of; rows are what a rank holds of it, or of one group of heads.

    Attributes:
        q: (rows, D); of a fused projection this is q, k and v.
        k: (rows, D), None where fused.
        v: (rows, D), None where fused.
        out: (rows, Do), transposed.
        q_bias: (rows,) or None, as those that follow.
        k_bias: (rows,) or None.
        v_bias: (rows,) or None.
    """

    q: Tensor
    k: Tensor | None
    v: Tensor | None
    out: Tensor
    q_bias: Tensor | None
    k_bias: Tensor | None
    v_bias: Tensor | None

    @property
    def inward(self) -> tuple[Tensor, Tensor, Tensor]:
        """The projections to q, k and v, of one group of heads: these are never fused."""
        assert self.k is not None
        assert self.v is not None
        return self.q, self.k, self.v


@dataclass(frozen=True, slots=True)
class Projections:
    """This rank's shards, and how groups of heads are put together from all ranks'.

    Attributes:
        own: this rank's shards.
        group: name of the process group of the ranks that hold the others.
        ranks: for every index along the mesh its rank in that group.
        index: this rank's.
    """

    own: Weights
    group: str
    ranks: tuple[int, ...]
    index: int

    @property
    def size(self) -> int:
        """How many ranks hold them."""
        return len(self.ranks)

    @property
    def is_fused(self) -> bool:
        """Whether one weight holds q, k and v."""
        return self.own.k is None

    def send(self, group: HeadGroup) -> "Sent":
        """Start to send a group's weights to all ranks."""
        pending = {owner: self._broadcast(pieces, owner) for owner, pieces in group.by_owner.items()}
        return Sent(self, group, pending)

    def _broadcast(self, pieces: Sequence[Piece], owner: int) -> Tensor:
        places = self.layout(pieces)
        if owner == self.index:
            buffer = pack(self.rows(pieces), places)
        else:
            buffer = self.own.q.new_empty(1, dtype=places.dtype).expand(places.size)
        if self.size == 1:
            return buffer
        return broadcast(buffer, self.ranks[owner], self.group)

    def rows(self, pieces: Sequence[Piece]) -> list[Tensor]:
        """This rank's rows of some pieces: of every piece its weight's, and its bias's."""
        return [x[piece.start : piece.stop] for piece in pieces for x in self.stored(piece.part) if x is not None]

    def layout(self, pieces: Sequence[Piece]) -> Layout:
        """The layout of a buffer with the rows of some pieces."""
        stored = ((piece, x) for piece in pieces for x in self.stored(piece.part) if x is not None)
        return layout(*[((piece.length, *x.shape[1:]), x.dtype) for piece, x in stored])

    def stored(self, part: int, weights: Weights | None = None) -> tuple[Tensor | None, Tensor | None]:
        """The weight and the bias that hold a part, of these weights or one's own."""
        weights = self.own if weights is None else weights
        if part == OUT:
            return weights.out, None
        if self.is_fused:
            return weights.q, weights.q_bias
        return weights[part], weights[OUT + 1 + part]


class Sent(NamedTuple):
    """A group's weights on their way."""

    projections: Projections
    group: HeadGroup
    pending: dict[int, Tensor]

    def wait(self) -> Weights:
        """The group's weights, whole."""
        arrived: dict[Piece, tuple[Tensor, ...]] = {}
        holders = self.projections
        for owner, pending in self.pending.items():
            if holders.size > 1:
                pending = wait(pending, "broadcast of a group of heads' weights", holders.group)
            pieces = self.group.by_owner[owner]
            tensors = iter(self.projections.layout(pieces).views(pending))
            for piece in pieces:
                count = sum(x is not None for x in self.projections.stored(piece.part))
                arrived[piece] = tuple(next(tensors) for _ in range(count))
        whole: list[tuple[Tensor, ...]] = []
        for part in range(OUT + 1):
            pieces = [arrived[piece] for piece in self.group.pieces if piece.part == part]
            whole.append(tuple(torch.cat(rows) if len(rows) > 1 else rows[0] for rows in zip(*pieces, strict=True)))
        biases = [part[1] if len(part) > 1 else None for part in whole[:OUT]]
        return Weights(*(part[0] for part in whole), *biases)


@dataclass(slots=True)
class Reduction:
    """Gradients on their way to the owners of their weights, one group of heads after the other.

    Attributes:
        projections: the weights.
        grads: what has arrived of this rank's shards.
    """

    projections: Projections
    grads: Weights
    _summing: list[tuple[HeadGroup, int, Tensor]] = field(default_factory=list)
    _homing: list[tuple[HeadGroup, int, Tensor]] = field(default_factory=list)

    @classmethod
    def of(cls, projections: Projections) -> "Reduction":
        """One to which nothing has been added."""
        nothing = (None if x is None else torch.zeros_like(x) for x in projections.own)
        return cls(projections, Weights(*nothing))  # pyrefly: ignore[bad-argument-type]

    def add(self, group: HeadGroup, grads: Weights) -> None:
        """Start to send a group's gradients, and let the previous group's go on."""
        self._advance()
        holders = self.projections
        for owner, pieces in group.by_owner.items():
            places = self.projections.layout(pieces)
            share = -(-places.size // holders.size)
            buffer = pack(self._rows_of(group, owner, grads), places._replace(size=share * holders.size))
            if holders.size == 1:
                self._take(group, owner, buffer)
                continue
            splits = [share] * holders.size
            self._summing.append((group, owner, all_to_all(buffer, splits, splits, holders.group)))

    def _advance(self) -> None:
        """Take up what has come home, and send home what is summed."""
        holders = self.projections
        for group, owner, pending in self._homing:
            arrived = wait(pending, "all_to_all of weights' gradients to their owner", holders.group)
            if owner == holders.index:
                self._take(group, owner, arrived)
        self._homing = []
        for group, owner, pending in self._summing:
            parts = wait(pending, "all_to_all of weights' gradients", holders.group).view(holders.size, -1)
            total = parts.to(accumulation_dtype(parts.dtype)).sum(0).to(parts.dtype)
            to = holders.ranks[owner]
            sent = [total.numel() if rank == to else 0 for rank in range(holders.size)]
            received = [total.numel() if owner == holders.index else 0] * holders.size
            self._homing.append((group, owner, all_to_all(total, sent, received, holders.group)))
        self._summing = []

    def finish(self) -> Weights:
        """The gradients of this rank's shards."""
        self._advance()
        self._advance()
        return self.grads

    def _rows_of(self, group: HeadGroup, owner: int, grads: Weights) -> list[Tensor]:
        """What an owner is to get, of the gradients of a whole group."""
        rows: list[Tensor] = []
        offsets = [0] * (OUT + 1)
        for piece in group.pieces:
            start = offsets[piece.part]
            offsets[piece.part] += piece.length
            if piece.owner == owner:
                both = (grads[piece.part], None if piece.part == OUT else grads[OUT + 1 + piece.part])
                rows += [x[start : start + piece.length] for x in both if x is not None]
        return rows

    def _take(self, group: HeadGroup, owner: int, buffer: Tensor) -> None:
        pieces = group.by_owner[owner]
        tensors = iter(self.projections.layout(pieces).views(buffer))
        for piece in pieces:
            for into in self.projections.stored(piece.part, self.grads):
                if into is not None:
                    into[piece.start : piece.stop] = next(tensors)
