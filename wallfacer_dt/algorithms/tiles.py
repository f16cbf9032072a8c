"""Tiles: rows of queries against rows of keys, as dense kernels take them."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from wallfacer_dt.algorithms.masks import UNBOUNDED
from wallfacer_dt.kernels.block import CAUSAL, FULL, Band
from wallfacer_dt.layout import Spans

Rows = tuple[int, int]

# Windows narrower than this are computed in squares of this size, larger ones without anything hidden in between.
_SQUARE = 128


class Tile(NamedTuple):
    """One call of a dense kernel: rows (start, stop) of the queries and of the keys, in one row of the batch or in all.

    ``asked``: the positions of its queries and keys, where it is for ``mask_mod`` to say which of the pairs are seen.
    ``ragged``: the segments that are computed at once, instead of a band.
    """

    q: Rows
    k: Rows
    band: Band = FULL
    batch: int | None = None
    asked: tuple[Spans, Spans] | None = None
    ragged: Any = None

    @property
    def area(self) -> int:
        """How many of the pairs are computed, what the band hides left out."""
        return int(pairs(self.q[1] - self.q[0], self.k[1] - self.k[0], *self.band))


def pairs(n: Any, m: Any, low: Any, high: Any) -> Any:
    """How many pairs (t, s) of n x m have low <= s - t <= high; None: no bound. Of integers, or arrays of them."""

    def below(offset: Any) -> Any:
        """Row t has t + offset keys before that, from 0 to m."""
        # np.clip takes ten times as long for one number.
        first = np.minimum(np.maximum(-offset, 0), n)  # rows before have none
        last = np.minimum(np.maximum(m - offset, first), n)  # rows from here on have all
        some = last - first
        return some * (first + offset) + some * (some - 1) // 2 + (n - last) * m

    return np.maximum(0, (n * m if high is None else below(high + 1)) - (0 if low is None else below(low)))


def rectangles(tile: Tile) -> Iterator[Tile]:
    """A tile cut where its band begins and ends, so that kernels without bands compute little that is not seen.

    Query t sees keys from t + low to t + high: each end stands still or moves along, so the rows fall into at most
    three pieces. What is left are rectangles, triangles and, of narrow bands, squares with a band.

    >>> [(str(piece.band.high), piece.k) for piece in rectangles(Tile((0, 2), (0, 6), Band(None, 4)))]
    [('None', (0, 4)), ('0', (4, 6))]
    """
    low, high = tile.band
    n, m = tile.q[1] - tile.q[0], tile.k[1] - tile.k[0]
    back = UNBOUNDED if low is None else -low
    ahead = UNBOUNDED if high is None else high
    first, last = max(0, -ahead), min(n, m + back)  # rows that see something
    cuts = sorted(min(max(cut, first), last) for cut in (back, m - ahead))
    for start, stop in pairwise((first, *cuts, last)):
        if start < stop:
            low_moves, high_moves = start >= back, stop <= m - ahead
            columns = start - back if low_moves else 0, start + ahead + 1 if high_moves else m
            for q, k, band in _pieces((start, stop), *columns, low_moves, high_moves):
                yield tile._replace(q=_shifted(tile.q, q), k=_shifted(tile.k, k), band=band)


def _shifted(within: Rows, part: Rows) -> Rows:
    return within[0] + part[0], within[0] + part[1]


def _pieces(q: Rows, low: int, high: int, low_moves: bool, high_moves: bool) -> Iterator[tuple[Rows, Rows, Band]]:
    """Rows of which the first sees [low, high), and each end stands still or moves along with the row."""
    n, width = q[1] - q[0], high - low
    if width <= 0:
        return
    if n == 1:
        yield q, (low, high), FULL
        return
    if low_moves and high_moves and n >= width:
        step = max(width - 1, _SQUARE)
        for start in range(0, n, step):
            rows = q[0] + start, min(q[1], q[0] + start + step)
            if width > _SQUARE:
                yield from _pieces(rows, low + start, high + start, True, True)
            else:
                yield rows, (low + start, high + start + rows[1] - rows[0] - 1), Band(0, width - 1)
        return
    # What all rows see is a rectangle; what only the later or only the earlier ones see, a triangle.
    full = low + n if low_moves else low, high - 1 if high_moves else high
    if full[0] < full[1]:
        yield q, full, FULL
    if low_moves:
        yield q, (low, low + n), Band(0, None)
    if high_moves:
        yield q, (high - 1, high - 1 + n), CAUSAL
