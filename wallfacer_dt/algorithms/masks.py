"""Masks: which keys a query sees, as numbers on the host. Pure numbers but for ``mask_mod``, see ``blocks``.

Within a row of the batch the keys that query i sees are an interval whose ends never move back as i grows: a band
around the diagonal (causal, sliding window), cut at the ends of i's document; or the keys up to a prefix or to i,
whichever is later. So what a block of queries sees of a block of keys is a few full rectangles and bands.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from wallfacer_dt.algorithms.blocks import FULL_BLOCK, Blocks
from wallfacer_dt.kernels import CAUSAL, FULL, Band
from wallfacer_dt.layout import Span

_UNBOUNDED = 1 << 62
# Windows narrower than this are computed in squares of this size, larger ones without anything hidden in between.
_SQUARE = 128


class Region(NamedTuple):
    """Queries at positions ``q`` see, of the keys at positions ``k``, those in the band from the corner on.

    ``asked``: which of them is for ``mask_mod`` to say.
    """

    q: Span
    k: Span
    band: Band
    asked: bool = False


@dataclass(frozen=True, slots=True)
class Mask:
    """What a query at position i sees: keys in [i - left, i + right] of its own document.

    Attributes:
        left: how far back, or None for any distance.
        right: how far ahead, or None; 0 is causal.
        prefix: keys before this position are seen by all queries; with ``right`` 0 only.
        documents: for every row of the batch the positions where documents begin, and the sequence's length; one row
            stands for all. Empty: one document.
        blocks: an arbitrary mask instead of all these.
    """

    left: int | None = None
    right: int | None = None
    prefix: int = 0
    documents: tuple[tuple[int, ...], ...] = ()
    blocks: Blocks | None = None

    @property
    def rows(self) -> int:
        """How many rows of the batch differ; one stands for all."""
        return self.blocks.rows if self.blocks else max(1, len(self.documents))

    @property
    def spares_hops(self) -> bool:
        """Whether there may be whole shards that nobody needs."""
        return self.left is not None or bool(self.documents) or self.blocks is not None or self.right not in (None, 0)

    def regions(self, row: int, q: Span, k: Span) -> Iterator[Region]:
        """What queries at ``q`` see of keys at ``k`` in one row of the batch, as disjoint regions."""
        if self.blocks:
            for q_piece, k_piece, kind in self.blocks.runs(row, q, k):
                yield Region(q_piece, k_piece, FULL, asked=kind != FULL_BLOCK)
        elif self.prefix:
            yield from _band(Span(q.start, min(q.stop, self.prefix)), _cut(k, 0, self.prefix), None, None)
            yield from _band(Span(max(q.start, self.prefix), q.stop), k, None, 0)
        else:
            for start, stop in self._shared_documents(row, q, k):
                yield from _band(_cut(q, start, stop), _cut(k, start, stop), self.left, self.right)

    def reach(self, row: int, q: Span) -> Span:
        """A span that holds all keys that some query at ``q`` sees: those and no other, but for ``blocks``."""
        if self.blocks:
            return Span(0, _UNBOUNDED)
        bounds = self._bounds(row)
        first = bounds[bisect_right(bounds, q.start) - 1]
        last = bounds[bisect_right(bounds, q.stop - 1)]
        low = 0 if self.left is None or self.prefix else q.start - self.left
        high = _UNBOUNDED if self.right is None else max(self.prefix, q.stop + self.right)
        return Span(max(first, low), min(last, high))

    def sees(self, row: int, q: Span, k: Span) -> bool:
        """Whether some query at ``q`` sees some key at ``k``."""
        return any(True for _ in self.regions(row, q, k))

    def _bounds(self, row: int) -> tuple[int, ...]:
        return self.documents[row] if self.documents else (0, _UNBOUNDED)

    def _shared_documents(self, row: int, q: Span, k: Span) -> Iterator[tuple[int, int]]:
        bounds = self._bounds(row)
        first = bisect_right(bounds, max(q.start, k.start)) - 1
        for start, stop in pairwise(bounds[first:]):
            if start >= min(q.stop, k.stop):
                return
            yield start, stop


def _cut(span: Span, start: int, stop: int) -> Span:
    return Span(max(span.start, start), min(span.stop, stop))


def _band(q: Span, k: Span, left: int | None, right: int | None) -> Iterator[Region]:
    """The band i - left <= j <= i + right within a rectangle.

    Query i sees from max(k.start, i - left) to min(k.stop, i + right + 1): each end stands still or moves along, so
    the rows fall into at most three pieces.
    """
    back = _UNBOUNDED if left is None else left
    ahead = _UNBOUNDED if right is None else right
    q = _cut(q, k.start - ahead, k.stop + back)
    if q.length <= 0 or k.length <= 0:
        return
    cuts = sorted(min(max(cut, q.start), q.stop) for cut in (k.start + back, k.stop - ahead))
    for start, stop in pairwise((q.start, *cuts, q.stop)):
        if start < stop:
            low_moves, high_moves = start >= k.start + back, stop <= k.stop - ahead
            low = start - back if low_moves else k.start
            high = start + ahead + 1 if high_moves else k.stop
            yield from _piece(Span(start, stop), low, high, low_moves, high_moves)


def _piece(q: Span, low: int, high: int, low_moves: bool, high_moves: bool) -> Iterator[Region]:
    """Rows of which the first sees [low, high), and each end stands still or moves along with the row."""
    n, width = q.length, high - low
    if n == 1:
        yield Region(q, Span(low, high), FULL)
        return
    if low_moves and high_moves and n >= width:
        step = max(width - 1, _SQUARE)
        for start in range(0, n, step):
            rows = Span(q.start + start, min(q.stop, q.start + start + step))
            if width > _SQUARE:
                yield from _piece(rows, low + start, high + start, True, True)
            else:
                yield Region(rows, Span(low + start, high + start + rows.length - 1), Band(0, width - 1))
        return
    # What all rows see is a rectangle; what only the later or only the earlier ones see, a triangle.
    full = Span(low + n if low_moves else low, high - 1 if high_moves else high)
    if full.length > 0:
        yield Region(q, full, FULL)
    if low_moves:
        yield Region(q, Span(low, low + n), Band(0, None))
    if high_moves:
        yield Region(q, Span(high - 1, high - 1 + n), CAUSAL)
