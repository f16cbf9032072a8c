"""Whose queries and keys are attended, under which mask; and how far round a ring they are needed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

import numpy as np

from wallfacer_dt.algorithms.masks import Mask, pairs_of
from wallfacer_dt.algorithms.steps import Side
from wallfacer_dt.layout import BY_DOCUMENT, Shards, deal, deal_documents, in_order, merged, shard_sizes
from wallfacer_dt.mesh import Coordinate
from wallfacer_dt.rows import Members


@dataclass(frozen=True, slots=True)
class Sequences:
    """The queries and keys of a call, and who holds them.

    Dealt out by document, rows of the batch differ in the positions that a rank holds, not in how many.
    """

    q_length: int  # of the whole sequence
    k_length: int
    order: str
    mask: Mask
    replicated: int = 0  # tokens before all these, that every rank holds and each takes care of a part of

    @property
    def rows(self) -> int:
        """How many rows of the batch differ in their positions; one stands for all."""
        return len(self.mask.documents) if self.order == BY_DOCUMENT else 1

    def shards(self, side: Side, axes: tuple[int, int, int], row: int = 0) -> Shards:
        """By sequence index, the positions that it takes care of on a side."""
        if self.order == BY_DOCUMENT:
            return deal_documents(self.mask.documents[row], axes)
        shards = deal(self.q_length if side == "q" else self.k_length, axes, self.order)
        if not self.replicated:
            return shards
        first = deal(self.replicated, axes, "contiguous")
        return tuple(np.concatenate([part, shard + self.replicated]) for part, shard in zip(first, shards, strict=True))

    def sizes(self, side: Side, axes: tuple[int, int, int]) -> tuple[int, ...]:
        """By sequence index, how many positions it takes care of on a side; asks nothing of documents."""
        return _sizes(self.q_length if side == "q" else self.k_length, self.replicated, axes, self.order)

    def inner_sizes(self, side: Side, axes: tuple[int, int, int]) -> tuple[int, ...]:
        """By inner index, on how many it works: those of all ranks it exchanges heads with."""
        sizes, inner = self.sizes(side, axes), axes[1] * axes[2]
        return tuple(sum(sizes[i::inner]) for i in range(inner))

    def inner(self, side: Side, axes: tuple[int, int, int]) -> Sequence[Shards]:
        """By row of the batch and inner index, what it works on: the positions of all ranks it exchanges heads with."""
        if self.q_length == self.k_length:  # the same tokens
            side = "q"
        return [_together(self, side, axes, row) for row in range(self.rows)]


@lru_cache(maxsize=64)
def _sizes(length: int, replicated: int, axes: tuple[int, int, int], order: str) -> tuple[int, ...]:
    return tuple(map(sum, zip(shard_sizes(length, axes, order), shard_sizes(replicated, axes), strict=True)))


@lru_cache(maxsize=64)
def _together(sequences: Sequences, side: Side, axes: tuple[int, int, int], row: int) -> Shards:
    ulysses, ring, team = axes
    shards, inner = sequences.shards(side, axes, row), ring * team
    if ulysses == 1:
        return shards
    return tuple(merged(in_order(enumerate(shards[i::inner])).span) for i in range(inner))


@lru_cache(maxsize=64)
def exchanged(sequences: Sequences, side: Side, place: Coordinate) -> Members:
    """How the rows are put together of all ranks, by rank of ``cp_ulysses``, that exchange heads with this one."""
    inner = place.ring * place.team
    held = [sequences.shards(side, place.axes, row)[place.inner_index :: inner] for row in range(sequences.rows)]
    return Members.made([in_order(enumerate(shards)) for shards in held], place.ulysses)


@lru_cache(maxsize=64)
def hops(axes: tuple[int, int, int], sequences: Sequences, resident: Side) -> tuple[int, ...]:
    """The distances round the ring, 1 to ring - 1, ascending, at which some rank of the mesh needs a rotating block.

    The 2D schedule makes as many hops; the same on every rank.
    """
    _, ring, team = axes
    if not sequences.mask.spares_hops:
        return tuple(range(1, ring))
    if resident == "kv":  # as far the other way
        return tuple(sorted(ring - distance for distance in hops(axes, sequences, "q")))
    needed = {0}
    # Of thousands of documents the first spans of all show that all are needed, and are sooner asked.
    first = _seen(axes, sequences, _FEW) if sequences.order == BY_DOCUMENT else ()
    for q, k in chain(first, _seen(axes, sequences)):
        needed.update(np.unique((q // team - k // team) % ring).tolist())
        if len(needed) == ring:
            break
    return tuple(sorted(needed - {0}))


_FEW, _AT_A_TIME = 4, 1024


def _seen(
    axes: tuple[int, int, int], sequences: Sequences, most: int | None = None
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Pairs of inner indices of which the first's queries see some of the second's keys, some at a time.

    ``most``: of every shard only so many spans, the first.
    """
    mask = sequences.mask
    queries, keys = (sequences.inner(side, axes) for side in ("q", "kv"))
    for row in range(mask.rows):
        q_shards, k_shards = queries[row % len(queries)], keys[row % len(keys)]
        q = in_order(enumerate(shard[:most] for shard in q_shards))
        k = q if k_shards is q_shards else in_order(enumerate(shard[:most] for shard in k_shards))
        for first in range(0, len(q.span), _AT_A_TIME):
            some, which = pairs_of(mask.reach(row, q.span[first : first + _AT_A_TIME]), k.span)
            yield q.member[first + some], k.member[which]
