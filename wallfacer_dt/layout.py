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
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple, get_args

Order = Literal["contiguous", "head_tail", "document_head_tail"]
BY_DOCUMENT = "document_head_tail"
ORDERS: tuple[str, ...] = get_args(Order)


class Span(NamedTuple):
    """Global positions ``start`` to ``stop`` (exclusive)."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        """Number of positions."""
        return self.stop - self.start


Spans = tuple[Span, ...]
Shards = tuple[Spans, ...]
"""By index, the spans that it holds, in the order in which its shard stores them."""


class Slice(NamedTuple):
    """Rows of a member's shard, from ``start`` on, and the positions they have: a piece of what is put together."""

    member: int
    start: int
    span: Span


def check_order(order: str) -> None:
    """Refuse (ValueError) an order that is not one of ORDERS."""
    if order not in ORDERS:
        raise ValueError(f"order must be one of {ORDERS}, got {order!r}")


def dealing_turns(axes: tuple[int, ...], order: str) -> list[int]:
    """Sequence indices as tokens are dealt out to them: in a row, but ranks that exchange heads one after the other.

    What these put together is then one head and one tail, as few tiles as without them.

    >>> dealing_turns((2, 3, 1), "head_tail"), dealing_turns((2, 3, 1), "contiguous")
    ([0, 3, 1, 4, 2, 5], [0, 1, 2, 3, 4, 5])

    Args:
        axes: of a mesh; of three the first is ``cp_ulysses``.
        order: in which the tokens are dealt out; contiguous ones as DTensor's ``Shard`` does it.

    Returns:
        The indices.
    """
    size = math.prod(axes)
    ulysses = axes[0] if len(axes) == 3 and order != "contiguous" else 1
    return [first + rank * (size // ulysses) for first in range(size // ulysses) for rank in range(ulysses)]


def check_length(length: int, what: str = "sequence length") -> None:
    """Refuse (TypeError, ValueError) what is not the length of a sequence."""
    if not isinstance(length, int) or isinstance(length, bool):
        raise TypeError(f"{what} must be an int, got {length!r}")
    if length < 1:
        raise ValueError(f"{what} must be at least 1, got {length}")


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

    >>> deal(16, (2, 2), "head_tail")[1]
    (Span(start=2, stop=4), Span(start=12, stop=14))
    """
    sizes = shard_sizes(length, axes)
    if order == "contiguous":
        return tuple(_some([span]) for span in _consecutive(sizes))
    if order != "head_tail":
        raise ValueError(f"deal is for 'contiguous' and 'head_tail', got {order!r}")
    turns = dealing_turns(axes, order)
    heads = [size - size // 2 for size in (sizes[index] for index in turns)]
    tails = [size // 2 for size in (sizes[index] for index in reversed(turns))]
    cut = _consecutive([*heads, *tails])
    held = {index: _some([cut[turn], cut[-1 - turn]]) for turn, index in enumerate(turns)}
    return tuple(held[index] for index in range(len(sizes)))


@lru_cache(maxsize=256)
def deal_documents(bounds: tuple[int, ...], axes: tuple[int, ...]) -> Shards:
    """Deal out every document head-tail; ``bounds`` are where documents begin, and the sequence's length.

    A document is cut in 2P chunks. Where it does not divide, those get a position more whose rank still lacks most.

    >>> deal_documents((0, 8, 16), (4,))[0]
    (Span(start=0, stop=1), Span(start=7, stop=9), Span(start=15, stop=16))
    """
    turns, sizes = dealing_turns(axes, BY_DOCUMENT), shard_sizes(bounds[-1], axes, BY_DOCUMENT)
    missing = [sizes[index] for index in turns]
    parts = len(missing)
    held: list[list[Span]] = [[] for _ in missing]
    for start, stop in pairwise(bounds):
        even, rest = divmod(stop - start, 2 * parts)
        chunks = [even] * (2 * parts)
        missing = [n - 2 * even for n in missing]
        lacking = sorted(range(parts), key=lambda rank: -missing[rank])
        for turn in range(rest):
            rank = lacking[turn % parts]
            chunks[rank if turn < parts else 2 * parts - 1 - rank] += 1
            missing[rank] -= 1
        for chunk, (first, last) in enumerate(_consecutive(chunks)):
            held[min(chunk, 2 * parts - 1 - chunk)].append(Span(start + first, start + last))
    by_index = dict(zip(turns, held, strict=True))
    return tuple(merged(_some(sorted(by_index[index]))) for index in range(parts))


def length_of(spans: Iterable[Span]) -> int:
    """Number of positions in all."""
    return sum(span.length for span in spans)


@lru_cache(maxsize=256)
def all_in_order(shards: Shards) -> tuple[Slice, ...]:
    """The slices of all members' shards in ascending order of position."""
    return in_order(enumerate(shards))


def in_order(shards: Iterable[tuple[int, Sequence[Span]]]) -> tuple[Slice, ...]:
    """The slices of some members' shards in ascending order of position."""
    pieces = [
        Slice(member, start, span)
        for member, spans in shards
        for span, start in zip(spans, accumulate((span.length for span in spans), initial=0), strict=False)
    ]
    return tuple(sorted(pieces, key=lambda piece: piece.span))


def merged(spans: Iterable[Span]) -> Spans:
    """Ascending spans, with neighbours that touch made one."""
    result: list[Span] = []
    for span in spans:
        if result and result[-1].stop == span.start:
            result[-1] = Span(result[-1].start, span.stop)
        else:
            result.append(span)
    return tuple(result)


def _chunked(size: int, parts: int) -> list[int]:
    step = -(-size // parts)
    return [max(0, min(step, size - part * step)) for part in range(parts)]


def _consecutive(sizes: Iterable[int]) -> list[Span]:
    return [Span(*ends) for ends in pairwise(accumulate(sizes, initial=0))]


def _some(spans: Iterable[Span]) -> Spans:
    return tuple(span for span in spans if span.length)
