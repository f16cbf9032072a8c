"""Token orders: which positions of the sequence a rank holds, as numbers made on the host.

A sequence of any length is cut into shards as DTensor's ``Shard`` cuts it: along each axis of the mesh in turn into
equal chunks, the last of which may be shorter or empty. ``contiguous`` gives sequence index d the d-th shard's
positions. ``head_tail`` (zigzag; WallFacer section 3.5) gives it as many, half of them counted from the beginning of
the sequence and half from its end, after which causal attention is the same work on every rank. Shards follow the
sequence index of the mesh, whatever the placement; those of ``head_tail`` with Ulysses are dealt out so that ranks that
exchange heads get neighbouring ones.

``document_head_tail`` does the same with every document of a packed sequence, so that attention within documents is
the same work on every rank, too. There shards of a sequence that does not divide differ by one token at most, and rows
of a batch whose documents differ are dealt out differently.
"""

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, chain
from operator import index
from typing import NamedTuple

import numpy as np

BY_DOCUMENT = "document_head_tail"
ORDERS = ("contiguous", "head_tail", BY_DOCUMENT)


Spans = np.ndarray
"""(n, 2) positions, start and stop (exclusive): what is held, in the order in which it is stored."""

Shards = tuple[Spans, ...]
"""By index, the spans that it holds, ascending."""


class Pieces(NamedTuple):
    """Where the rows of something that is put together from several members are: of n pieces whose, first row, span."""

    member: np.ndarray
    start: np.ndarray
    span: Spans


def check_order(order: str) -> None:
    """Refuse (ValueError) an order that is not one of ORDERS."""
    if order not in ORDERS:
        raise ValueError(f"order must be one of {ORDERS}, got {order!r}")


def dealing_turns(axes: tuple[int, ...], order: str) -> list[int]:
    """Sequence indices as tokens are dealt out to them: in a row, but ranks that exchange heads one after the other.

    What these put together is then one head and one tail, as few tiles as without them. Of three ``axes`` the first is
    ``cp_ulysses``. Contiguous tokens are dealt out as DTensor's ``Shard`` does it.

    >>> dealing_turns((2, 3, 1), "head_tail"), dealing_turns((2, 3, 1), "contiguous")
    ([0, 3, 1, 4, 2, 5], [0, 1, 2, 3, 4, 5])
    """
    size = math.prod(axes)
    ulysses = axes[0] if len(axes) == 3 and order != "contiguous" else 1
    return [first + rank * (size // ulysses) for first in range(size // ulysses) for rank in range(ulysses)]


def check_length(length: int, what: str = "sequence length", least: int = 1) -> None:
    """Refuse (TypeError, ValueError) what is not the length of a sequence, or another number of positions."""
    if not isinstance(length, int) or isinstance(length, bool):
        raise TypeError(f"{what} must be an int, got {length!r}")
    if length < least:
        raise ValueError(f"{what} must be at least {least}, got {index(length)}")  # a compiler's symbol has no text


def shard_sizes(length: int, axes: tuple[int, ...], order: str = "contiguous") -> tuple[int, ...]:
    """How many of ``length`` positions each index of a mesh of these axes holds, as DTensor's ``Shard`` cuts them.

    >>> shard_sizes(10, (4,)), shard_sizes(10, (2, 2)), shard_sizes(10, (4,), BY_DOCUMENT)
    ((3, 3, 3, 1), (3, 2, 3, 2), (3, 3, 2, 2))
    """
    if order == BY_DOCUMENT:
        parts = math.prod(axes)
        return tuple(length // parts + (part < length % parts) for part in range(parts))
    sizes = [length]
    for axis in axes:
        sizes = [part for size in sizes for part in _chunked(size, axis)]
    return tuple(sizes)


@lru_cache(maxsize=256)
def deal(length: int, axes: tuple[int, ...], order: str) -> Shards:
    """Deal the positions of a sequence out to a mesh of these axes, in an order that asks nothing of its documents.

    >>> deal(16, (2, 2), "head_tail")[1].tolist()
    [[2, 4], [12, 14]]
    """
    sizes = shard_sizes(length, axes)
    if order == "contiguous":
        return consecutive(sizes)
    if order != "head_tail":
        raise ValueError(f"deal is for 'contiguous' and 'head_tail', got {order!r}")
    turns = dealing_turns(axes, order)
    heads = [size - size // 2 for size in (sizes[index] for index in turns)]
    tails = [size // 2 for size in (sizes[index] for index in reversed(turns))]
    cut = spans_of(np.array([*heads, *tails]))
    held = {index: nonempty(cut[[turn, -1 - turn]]) for turn, index in enumerate(turns)}
    return tuple(held[index] for index in range(len(sizes)))


@lru_cache(maxsize=64)
def deal_documents(bounds: tuple[int, ...], axes: tuple[int, ...]) -> Shards:
    """Deal out every document head-tail; ``bounds`` are where documents begin, and the sequence's length.

    A document is cut in 2P chunks. Where it does not divide, ranks get a position more in turn, going on where the
    document before left off: first at the head, then at the tail.

    >>> deal_documents((0, 8, 16), (4,))[0].tolist()
    [[0, 1], [7, 9], [15, 16]]
    """
    starts, parts = np.array(bounds[:-1]), math.prod(axes)
    even, rest = np.divmod(np.diff(np.array(bounds)), 2 * parts)
    by_turn = dealing_turns(axes, BY_DOCUMENT)
    # By rank, in how many turns it gets its first position more of each document; its second comes ``parts`` later.
    first = (np.cumsum(rest) - rest) % parts
    turns = [turn + parts * (turn < 0) for turn in (index - first for index in by_turn)]
    more = chain((turn < rest for turn in turns), (turn + parts < rest for turn in reversed(turns)))
    cuts = [*accumulate(more, lambda at, one: at + even + one, initial=starts)]

    def spans(turn: int) -> Spans:
        return np.stack([cuts[turn], cuts[turn + 1], cuts[-2 - turn], cuts[-1 - turn]], -1).reshape(-1, 2)

    held = {index: merged(nonempty(spans(turn))) for turn, index in enumerate(by_turn)}
    return tuple(held[index] for index in range(parts))


def consecutive(sizes: Sequence[int]) -> Shards:
    """Shards of these sizes, one after the other; of an empty one there is no span."""
    return tuple(nonempty(span[None]) for span in spans_of(np.array(sizes)))


def spans_of(sizes: np.ndarray) -> Spans:
    """Spans of these sizes, one after the other."""
    stops = np.cumsum(sizes)
    return np.stack([stops - sizes, stops], -1)


def length_of(spans: Spans) -> int:
    """Number of positions in all."""
    return int((spans[:, 1] - spans[:, 0]).sum())


def stored_at(spans: Spans) -> np.ndarray:
    """(n,), the row at which each span is stored."""
    lengths = spans[:, 1] - spans[:, 0]
    return np.cumsum(lengths) - lengths


def begun(starts: np.ndarray, at: np.ndarray) -> np.ndarray:
    """How many of these starts are at or before each position; both ascend.

    To merge them is faster than ``np.searchsorted`` where both are many.
    """
    if len(at) < len(starts) >> 3 or len(starts) < len(at) >> 3:
        return np.searchsorted(starts, at, "right")
    order = np.argsort(np.concatenate([starts, at]), kind="stable")
    return np.flatnonzero(order >= len(starts)) - np.arange(len(at))


def positions(spans: Spans) -> np.ndarray:
    """All positions, one by one."""
    return np.arange(length_of(spans)) + np.repeat(spans[:, 0] - stored_at(spans), spans[:, 1] - spans[:, 0])


def in_order(shards: Iterable[tuple[int, Spans]]) -> Pieces:
    """The spans of some members' shards, ascending."""
    shards = list(shards)
    members = np.repeat([member for member, _ in shards], [len(spans) for _, spans in shards]).astype(np.int64)
    starts = np.concatenate([np.zeros(0, np.int64), *(stored_at(spans) for _, spans in shards)])
    spans = np.concatenate([np.zeros((0, 2), np.int64), *(spans for _, spans in shards)])
    order = np.argsort(spans[:, 0], kind="stable")
    return Pieces(members[order], starts[order], spans.take(order, 0))


def merged(spans: Spans) -> Spans:
    """Ascending spans, with neighbours that touch made one."""
    if len(spans) < 2:
        return spans
    apart = spans[1:, 0] != spans[:-1, 1]
    if apart.all():
        return spans
    return np.stack([spans[np.r_[True, apart], 0], spans[np.r_[apart, True], 1]], -1)


def _chunked(size: int, parts: int) -> list[int]:
    step = -(-size // parts)
    return [max(0, min(step, size - part * step)) for part in range(parts)]


def nonempty(spans: Spans) -> Spans:
    return np.compress(spans[:, 0] < spans[:, 1], spans, 0)  # a mask of whole rows takes numpy six times as long
