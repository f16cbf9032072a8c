"""Segments: what a rank computes of a block, in as few calls of a kernel as it can be. Pure numbers.

Queries and keys come as spans of positions, stored one after another, ascending. What a query sees of the stored keys
is then a range of rows, and of neighbouring queries a segment: rows of queries, rows of keys, and a window. Segments
with the same window, which share neither queries nor keys, are one call of a kernel that takes cumulative lengths.

Note [Three ways to find segments]
Where all queries of a span see the same keys, as they do of most blocks of packed documents, segments are read off,
whatever the mask (``_whole``). Elsewhere, without a bound on the left, all queries of a document see its stored keys
from the first one on, up to a row that stands still or moves along from query to query, whatever positions lie between
two stored spans. So rows are cut only where it does neither: of a rank's own tokens nowhere (``_stairs``). Under a
window, rows that are stored side by side may lie far apart, so spans are paired (``_windows``): a span with itself has
the mask's window, what lies before it a bound on the left, what lies after it one on the right. These bounds depend on
where spans end; where that makes many calls, what all queries see is cut off, and what is left are triangles, all with
one window (``_triangles``).
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from wallfacer_dt.algorithms.masks import UNBOUNDED, Mask, pairs_of
from wallfacer_dt.algorithms.tiles import Rows, Tile, pairs, rectangles
from wallfacer_dt.kernels.block import Band
from wallfacer_dt.layout import Spans, begun, length_of, merged, positions, spans_of, stored_at

Ints = np.ndarray
ByRow = Sequence[Spans]
Window = tuple[int, int]
Call = tuple[Window, Ints]

_FULL, _CAUSAL = (-1, -1), (-1, 0)
_MOST = 2
_JUMP = 2


@dataclass(frozen=True, eq=False)
class Segments:
    """Segments of one window: one call of a kernel that takes cumulative lengths.

    Query t of n sees key s of m in its segment only if t + m - n - left <= s <= t + m - n + right: windows are aligned
    at the bottom right corner, as flash attention has them.
    """

    left: int  # -1: no bound
    right: int  # -1: no bound
    # By row of the batch, or one for all: (segments, 4) first and last row of queries, first and last row of keys
    # (exclusive). Ascending; no row is in two of them, and every query sees a key.
    rows: tuple[Ints, ...]
    # The positions of queries and keys, where it is for ``mask_mod`` to say which of the pairs are seen.
    asked: tuple[Spans, Spans] | None = None
    # What a kernel was given for them, by device and sizes.
    cumulative: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def window(self) -> Window:
        """The bounds."""
        return self.left, self.right

    @cached_property
    def is_ragged(self) -> bool:
        """Whether cumulative lengths say it in fewer calls than one for each segment.

        A bound on the right but the diagonal, or none beside one on the left, flash attention may get wrong in segments
        of fewer keys than queries: see ``kernels.windows``.
        """
        q, q_stop, k, k_stop = np.concatenate(self.rows).T
        is_safe = self.window == _FULL or self.right == 0 or not (q_stop - q > k_stop - k).any()
        return is_safe and len(q) > 1

    @property
    def calls(self) -> int:
        """How often a kernel is called that takes cumulative lengths."""
        return 1 if self.is_ragged else sum(map(len, self.rows))

    @cached_property
    def extents(self) -> tuple[Rows, Rows]:
        """From the first row to the last, of queries and of keys."""
        first, last = np.concatenate(self.rows).min(0).tolist(), np.concatenate(self.rows).max(0).tolist()
        return (first[0], last[1]), (first[2], last[3])

    @cached_property
    def areas(self) -> tuple[Ints, ...]:
        """By row of the batch, how many pairs each segment has."""
        return tuple(map(self.area_of, self.rows))

    @property
    def area(self) -> int:
        """How many pairs there are, in rows of the batch that differ of all of them."""
        return int(sum(some.sum() for some in self.areas))

    def area_of(self, some: Ints) -> Ints:
        """How many pairs segments (n, 4) of this window have."""
        n, m = some[:, 1] - some[:, 0], some[:, 3] - some[:, 2]
        return pairs(n, m, *self._band(n, m))

    def squares(self, size: int) -> Ints:
        """Of each segment, row of the batch after row, in how many squares of so many rows and columns a pair is seen.

        They begin at the segment's first query and key.
        """
        rows = np.concatenate(self.rows)
        n, m = rows[:, 1] - rows[:, 0], rows[:, 3] - rows[:, 2]
        number = -(-n // size)
        which = np.repeat(np.arange(len(rows)), number)
        first = (np.arange(len(which)) - np.repeat(np.cumsum(number) - number, number)) * size
        last, (low, high) = np.minimum(first + size, n[which]) - 1, self._band(n, m)
        stop = m[which] if high is None else np.clip(last + high[which] + 1, 0, m[which])
        start = 0 if low is None else np.clip(first + low[which], 0, stop)
        return np.bincount(which, -(-stop // size) - start // size, len(rows)).astype(np.int64)

    def _band(self, n: Any, m: Any) -> tuple[Any, Any]:
        """The bounds of s - t in a segment."""
        return None if self.left < 0 else m - n - self.left, None if self.right < 0 else m - n + self.right

    @cached_property
    def bands(self) -> tuple[Tile, ...]:
        """A tile for each segment, for kernels that take any band."""
        segments = [(row, *some) for row, of_row in enumerate(self.rows) for some in of_row.tolist()]
        return tuple(
            Tile(
                (q, q_stop), (k, k_stop), Band(*self._band(q_stop - q, k_stop - k)).within(q_stop - q, k_stop - k),
                row if len(self.rows) > 1 else None, self.asked,
            )
            for row, q, q_stop, k, k_stop in segments
        )  # fmt: skip

    @cached_property
    def tiles(self) -> tuple[Tile, ...]:
        """The same for those that are fast without bands only."""
        return tuple(piece for tile in self.bands for piece in (rectangles(tile) if self.asked is None else [tile]))

    def __str__(self) -> str:
        names = {_FULL: "", _CAUSAL: " causal"}
        window = names.get(self.window, f" window {self.left}:{self.right}") + " asked" * bool(self.asked)
        return ", ".join(self._text(row, some) for row, some in enumerate(self.rows) if len(some)) + window

    def _text(self, row: int, some: Ints) -> str:
        shown = [f"{q}:{q_stop} x {k}:{k_stop}" for q, q_stop, k, k_stop in some[:4].tolist()]
        more = f" and {len(some) - 4} more" if len(some) > 4 else ""
        batch = f"batch {row}: " if len(self.rows) > 1 else ""
        return batch + " | ".join(shown) + more


Work = tuple[Segments, ...]


def pairs_seen(queries: Spans, mask: Mask, length: int) -> int:
    """How many keys, of a sequence of such a length, queries at these positions see in all, in the batch's first row;
    by bounds and documents, which is all that the mask may have.

    >>> pairs_seen(np.array([[0, 6]]), Mask(right=0, documents=((0, 4, 6),)), 6)
    13
    """
    assert not mask.prefix
    assert not mask.asked
    if not len(queries):
        return 0
    pieces, bounds = Stored(queries, mask, 0).pieces, np.minimum(mask.bounds(0), length)
    after = begun(bounds, pieces[:, 0])
    first = bounds[after - 1]
    low, high = (
        None if bound is None else pieces[:, 0] - first + bound
        for bound in (mask.left if mask.left is None else -mask.left, mask.right)
    )
    return int(pairs(pieces[:, 1] - pieces[:, 0], bounds[after] - first, low, high).sum())


Sees = Callable[[Spans, Spans], bool]
"""Whether, under a mask that is asked, some query at these positions sees some key at those."""


@dataclass(frozen=True, eq=False)
class Stored:
    """Positions stored one after another, in one row of the batch: what one block after another asks of them, kept."""

    spans: Spans  # ascending
    mask: Mask
    row: int

    @classmethod
    def by_row(cls, spans: ByRow, mask: Mask) -> "list[Stored]":
        """By row of the batch, where some differ in positions or documents."""
        return [cls(spans[row % len(spans)], mask, row % mask.rows) for row in range(max(mask.rows, len(spans)))]

    @cached_property
    def pieces(self) -> Spans:
        """Spans as few as can be of which each is in one document."""
        return _cut_at(merged(self.spans), self.mask.bounds(self.row))

    @cached_property
    def rows(self) -> Ints:
        """Where each piece is stored, and how many positions there are."""
        return np.append(0, np.cumsum(self.pieces[:, 1] - self.pieces[:, 0]))

    def before(self, at: Ints) -> Ints:
        """How many are stored whose position is before each of these, which ascend."""
        starts, stops, rows = self._found
        number = begun(starts, at)
        return rows[number] - np.maximum(stops[number] - at, 0)

    @cached_property
    def _found(self) -> tuple[Ints, Ints, Ints]:
        """Where spans start; by how many have, where the last of these stops, and how many are stored in them."""
        starts, stops = np.ascontiguousarray(merged(self.spans).T)
        return starts, np.append(0, stops), np.append(0, np.cumsum(stops - starts))

    @cached_property
    def ends(self) -> list[tuple[Ints, Ints]]:
        """Positions before which queries see no keys, and positions before which they see some, both ascending.

        With where among them are those of the first and of the last query of each piece.
        """
        return [_places(*some) for some in zip(*_seen(self, self.pieces), strict=True)]


def plan_work(queries: ByRow, keys: ByRow, mask: Mask, sees: Sees | None = None) -> Work:
    """What is computed of a block of queries and one of keys, stored as these spans; ``sees``: of a mask that is asked.

    >>> print(*plan_work([np.array([[2, 4], [12, 14]])], [np.array([[2, 4], [12, 14]])], Mask(right=0)))
    0:4 x 0:4 causal
    """
    return plan_block(Stored.by_row(queries, mask), Stored.by_row(keys, mask), sees)


def plan_block(q: Sequence[Stored], k: Sequence[Stored], sees: Sees | None = None) -> Work:
    """:func:`plan_work` of what may be asked again."""
    mask, rows = q[0].mask, len(q)
    assert len(k) == rows, "as many rows of queries as of keys"
    if mask.asked:
        assert sees is not None, "a mask that is asked answers"
        asked = q[0].spans, k[0].spans
        whole = np.array([[0, length_of(asked[0]), 0, length_of(asked[1])]])
        seen = len(asked[0]) and len(asked[1]) and sees(*asked)
        return (Segments(*_FULL, (whole,), asked=asked),) if seen else ()
    # The n-th call of a window is one for all rows of the batch.
    calls: dict[tuple[Window, int], list[Ints]] = {}
    for row in range(rows):
        numbers: Counter[Window] = Counter()
        for window, some in _row_of_batch(q[row], k[row]):
            calls.setdefault((window, numbers[window]), [np.zeros((0, 4), np.int64)] * rows)[row] = some
            numbers[window] += 1
    return tuple(part for (window, _), by_row in calls.items() for part in _as_ragged(Segments(*window, tuple(by_row))))


@lru_cache(maxsize=64)
def split_work(work: Work) -> tuple[Work, Work]:
    """Two parts of about equal area, for work that has to hide something both before and after it."""
    half = sum(call.area for call in work) / 2
    done = 0
    for number, call in enumerate(work):
        if done + call.area >= half:
            share = (half - done) / max(1, call.area)
            cut = zip(*(_cut(call, *row, share) for row in zip(call.rows, call.areas, strict=True)), strict=True)
            parts = [Segments(*call.window, rows, call.asked) for rows in cut]
            first, second = ((part,) if part.area else () for part in parts)
            return (*work[:number], *first), (*second, *work[number + 1 :])
        done += call.area
    return work, ()


def _cut(call: Segments, some: Ints, areas: Ints, share: float) -> tuple[Ints, Ints]:
    """Of one row of the batch the first segments, with about that share of its area, and the others."""
    if not len(some):
        return some, some
    before = np.cumsum(areas) - areas
    target = areas.sum() * share
    number = max(0, int(np.searchsorted(before, target, "right")) - 1)
    target -= before[number]
    if call.asked or (call.window != _FULL and call.right != 0):
        # Cut inside, its parts would have other windows.
        number += target > areas[number] / 2
        return some[:number], some[number:]
    q, q_stop, k, k_stop = some[number].tolist()

    def first(rows: int) -> Ints:
        return np.array([[q, q + rows, k, k_stop if call.right < 0 else k_stop - (q_stop - q - rows)]])

    def area(rows: int) -> int:
        return int(call.area_of(first(rows))[0])

    rows = bisect_left(range(q_stop - q), target, key=area)
    if rows and 2 * target <= area(rows - 1) + area(rows):
        rows -= 1
    seen = k if call.left < 0 else max(k, k_stop - q_stop + q + rows - call.left)
    rest = np.array([[q + rows, q_stop, seen, k_stop]])
    return np.concatenate([some[:number], first(rows)[:rows]]), np.concatenate(
        [rest[: q_stop - q - rows], some[number + 1 :]]
    )


def _row_of_batch(q: Stored, k: Stored) -> list[Call]:
    """The calls of one row of the batch."""
    if not len(q.spans) or not len(k.spans):
        return []
    whole = _whole(q, k)
    if whole is not None:
        return whole
    if q.mask.left is None:
        found = (_calls(*_stairs(q, k, between)) for between in (True, False))
    else:
        paired = _windows(q, k)
        found = (_calls(*(_triangles(*paired) if apart else paired)) for apart in (False, True))
    calls = next(found)
    return calls if _count(calls) <= _MOST else min(calls, next(found), key=_count)


def _as_ragged(call: Segments) -> Work:
    """The same in two calls at most, where there is a bound on the left only: queries that see all keys go apart."""
    if call.is_ragged or call.right >= 0 or sum(map(len, call.rows)) < 2:
        return (call,)
    first, others = [], []
    for some in call.rows:
        start = np.maximum(some[:, 0], some[:, 1] - some[:, 3] + some[:, 2])
        first.append(np.stack([some[:, 0], start, *some.T[2:]], -1)[some[:, 0] < start])
        others.append(np.stack([start, *some.T[1:]], -1))
    return Segments(*_FULL, tuple(first)), Segments(*call.window, tuple(others))


def _count(calls: list[Call]) -> int:
    return sum(Segments(*window, (some,)).calls for window, some in calls)


def _calls(windows: Ints, segments: Ints) -> list[Call]:
    """Segments by window, those that share queries or keys in calls of their own."""
    order = np.lexsort((segments[:, 0], windows[:, 1], windows[:, 0]))
    windows, segments = windows.take(order, 0), segments.take(order, 0)
    left, right = windows.T
    starts = np.flatnonzero(np.append(True, (left[1:] != left[:-1]) | (right[1:] != right[:-1]))[: len(windows)])
    parts = zip(windows[starts].tolist(), np.split(segments, starts[1:]), strict=False)
    return [((left, right), part) for (left, right), some in parts for part in _apart(some)]


def _apart(some: Ints) -> list[Ints]:
    """Each goes to the first call in which it shares neither queries nor keys with those before it."""
    q, q_stop, k, k_stop = some.T
    if (q[1:] >= q_stop[:-1]).all() and (k[1:] >= k_stop[:-1]).all():
        return [some]
    # Where all before have ended as all others begin, every call is free again; two in between are never in one.
    later = np.minimum.accumulate(k[::-1])[::-1][1:]
    ended = (q[1:] >= np.maximum.accumulate(q_stop)[:-1]) & (later >= np.maximum.accumulate(k_stop)[:-1])
    starts = np.flatnonzero(np.append(True, ended))
    sizes = np.diff(starts, append=len(some))
    numbers = np.zeros(len(some), np.int64)
    numbers[starts[sizes == 2] + 1] = 1
    for start, size in zip(starts[sizes > 2].tolist(), sizes[sizes > 2].tolist(), strict=True):
        ends: list[tuple[int, int]] = []
        for at, (q, q_stop, k, k_stop) in enumerate(some[start : start + size].tolist(), start):
            numbers[at] = next((i for i, end in enumerate(ends) if q >= end[0] and k >= end[1]), len(ends))
            ends[numbers[at] :] = [(q_stop, k_stop), *ends[numbers[at] + 1 :]]
    return [np.compress(numbers == number, some, 0) for number in range(numbers.max() + 1)]


def _whole(q: Stored, k: Stored) -> list[Call] | None:
    """The calls where all queries of a piece see the same keys, as in most blocks of others; None elsewhere."""
    rows = []
    for at, places in q.ends:
        first, last = k.before(at)[places]
        if (first != last).any():
            return None
        rows.append(first)
    low, high = rows
    some = np.flatnonzero(low < high)
    if not len(some):
        return []
    low, high = low[some], high[some]
    starts = np.flatnonzero(np.append(True, (low[1:] != low[:-1]) | (high[1:] != high[:-1])))
    ends = np.append(starts[1:], len(some)) - 1
    segments = np.stack([q.rows[some[starts]], q.rows[some[ends] + 1], low[starts], high[starts]], -1)
    if (segments[_MOST:, 2] == segments[:-_MOST, 2]).any():
        return None
    calls = [(_FULL, some) for some in _apart(segments)]
    # Single queries that see one key more each may be stairs, and fewer calls.
    are_stairs = len(calls) == 2 and (segments[:, 1] - segments[:, 0] == 1).all()
    return None if are_stairs or len(calls) > _MOST else calls


def _seen(q: Stored, spans: Spans) -> list[tuple[Ints, Ints]]:
    """What the first and the last query of each span see, as :meth:`Mask.seen` says it."""
    return [q.mask.seen(q.row, at) for at in (spans[:, 0], spans[:, 1] - 1)]


def _places(first: Ints, last: Ints) -> tuple[Ints, Ints]:
    """Of positions that ascend from a first to a last one and on: those that differ, and where each is among them."""
    at = np.stack([first, last], -1).reshape(-1)
    differs = np.append(True, at[1:] != at[:-1])
    return at[differs], (np.cumsum(differs) - 1).reshape(-1, 2).T


def _stairs(q: Stored, k: Stored, between: bool) -> tuple[Ints, Ints]:
    """Windows and segments where queries see all stored keys of their document up to some row.

    ``between``: that row moves along from one span of queries to the next, too, where it happens to lie one further.
    """
    # Between two of these positions, in a span of queries, the last row that is seen stands still or moves along.
    spans = q.pieces
    if q.mask.right is not None:
        ahead = q.mask.right + 1
        cuts = [k.pieces.reshape(-1) - ahead, q.mask.bounds(q.row) - ahead, np.array([q.mask.prefix - ahead])]
        spans = _cut_at(spans, np.sort(np.concatenate(cuts), kind="stable"))
    (start, first), (_, last) = _seen(q, spans)
    low, high, last = map(k.before, (start, first, last))
    lengths, moves = spans[:, 1] - spans[:, 0], last > high
    step = np.where(start[1:] == start[:-1], high[1:] - last[:-1], _JUMP)
    at = np.cumsum(lengths) - lengths
    firsts = _segment_starts(moves, np.where((step >= 0) & (step <= between), step, _JUMP), lengths)

    def seen(rows: Ints) -> Ints:
        piece = np.searchsorted(at, rows, "right") - 1
        return high[piece] + moves[piece] * (rows - at[piece])

    rows = np.stack([firsts, np.append(firsts[1:], lengths.sum())], -1)
    low = low[np.searchsorted(at, firsts, "right") - 1]
    first, end = seen(rows[:, 0]), seen(rows[:, 1] - 1)
    early = (low == first) & (first < end)  # of those whose end moves the first, which sees nothing yet
    rows[:, 0] += early
    first += early
    segments = _beside(low < end, rows[:, 0], rows[:, 1], low, end)
    causal = (first < end)[low < end]
    causal |= (segments[:, 1] - segments[:, 0] == 1) & causal.any()
    return np.where(causal[:, None], _CAUSAL, _FULL), segments


def _segment_starts(moves: Ints, between: Ints, lengths: Ints) -> Ints:
    """The rows at which segments begin, in each of which the end of what is seen makes steps of 0, or of 1.

    Of pieces of rows: whether the steps in each are 1, the step from one to the next, and how many rows each has.
    """
    steps, counts = np.empty(2 * len(lengths) - 1, np.int64), np.ones(2 * len(lengths) - 1, np.int64)
    steps[::2], steps[1::2], counts[::2] = moves, between, lengths - 1
    steps, counts = steps[counts > 0], counts[counts > 0]
    if not len(steps):
        return np.zeros(1, np.int64)
    runs = np.flatnonzero(np.append(True, steps[1:] != steps[:-1]))
    steps, counts = steps[runs], np.add.reduceat(counts, runs)
    rows = spans_of(counts)
    # Of a run of other steps than before the first one leads to a new segment, unless it is in none yet.
    leads = np.append(False, (steps[1:] != _JUMP) & (steps[:-1] != _JUMP))
    for run in np.flatnonzero(leads & (counts == 1)).tolist():
        if leads[run] and run + 1 < len(leads):
            leads[run + 1] = False
    ends = np.concatenate([rows[leads, 0], positions(rows[steps == _JUMP])])
    return np.append(0, np.sort(ends) + 1)


def _windows(q: Stored, k: Stored) -> tuple[Ints, Ints]:
    """Windows and segments of every pair of spans in one document, cut where one ends within the other."""
    mask = q.mask
    assert mask.left is not None, "a bound on the left"
    length = int(max(q.spans[-1, 1], k.spans[-1, 1]))
    left, right = min(mask.left, length), length if mask.right is None else min(mask.right, length)
    rows, columns = _cut_at(q.pieces, k.pieces.reshape(-1)), _cut_at(k.pieces, q.pieces[:, 1])
    pair, other = pairs_of(mask.reach(q.row, rows), columns)
    (a, b, q_at), (c, d, k_at) = (
        (some[:, 0][which], some[:, 1][which], (stored_at(some) - some[:, 0])[which])  # and from positions to rows
        for some, which in ((rows, pair), (columns, other))
    )
    a, b = np.maximum(a, c - right), np.minimum(b, d + left)  # queries that see some of these keys
    c, d = np.maximum(c, a - left), np.minimum(d, b + right)
    own = d == b
    back = np.where(own, left, np.where(b - 1 - left > c, left + d - b, -1))
    ahead = np.where(own, right, np.where(a + right < d - 1, right + b - d, -1))
    if mask.right is None:
        ahead = np.full_like(back, -1)
    some = (a < b) & (c < d)
    return _beside(some, back, ahead), _beside(some, q_at + a, q_at + b, k_at + c, k_at + d)


def _triangles(windows: Ints, segments: Ints) -> tuple[Ints, Ints]:
    """The same with what all queries see apart from what a bound on one side cuts."""
    (left, right), (q, q_stop, k, k_stop) = windows.T, segments.T
    before, after = (left >= 0) & (right < 0), (left < 0) & (right >= 0)
    # Rows of a document are apart from one another by as much as their keys are.
    from_key = k_stop - q_stop - left
    cut = np.clip(k - from_key, q, q_stop)
    to_key = k_stop - q_stop + right
    seen = np.clip(k_stop - to_key, q, q_stop)
    parts = [
        (before, _FULL, (q, cut, k, k_stop)),
        (before, (0, -1), (cut, q_stop, cut + from_key, q_stop + from_key)),
        (before, _FULL, (cut, q_stop, q_stop + from_key, k_stop)),
        (after, _CAUSAL, (q, seen, k, seen + to_key)),
        (after, _FULL, (seen, q_stop, k, k_stop)),
    ]
    others = ~(before | after)
    found = [(np.compress(others, windows, 0), np.compress(others, segments, 0))]
    for chosen, window, columns in parts:
        start, stop, k_start, k_end = columns
        some = _beside(chosen & (start < stop) & (k_start < k_end), *columns)
        found.append((np.full((len(some), 2), window), some))
    return np.concatenate([w for w, _ in found]), np.concatenate([s for _, s in found])


def _beside(chosen: Ints, *columns: Ints) -> Ints:
    """Columns beside each other, of them the chosen rows: masks of whole rows take numpy six times as long."""
    rows = np.flatnonzero(chosen)
    return np.stack([column[rows] for column in columns], -1)


def _cut_at(spans: Spans, at: Ints) -> Spans:
    """Spans cut at ascending positions."""
    span = begun(spans[:, 0], at) - 1
    at = at[(span >= 0) & (spans[span, 0] < at) & (at < spans[span, 1])]
    if not len(at):
        return spans
    # What is nearly in order np.unique takes ten times as long to sort.
    starts = np.sort(np.append(spans[:, 0], at), kind="stable")
    starts = starts[np.append(True, starts[1:] != starts[:-1])]
    span = begun(spans[:, 0], starts) - 1
    return np.stack([starts, np.minimum(np.append(starts[1:], UNBOUNDED), spans[span, 1])], -1)
