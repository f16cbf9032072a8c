"""The tile plan: which rectangles of (queries x keys) a kernel must compute under a mask. Pure numbers.

Queries and keys come as spans of global positions, stored one after another in a tensor.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, groupby
from operator import itemgetter
from typing import NamedTuple

from wallfacer_dt.algorithms.masks import Mask
from wallfacer_dt.kernels import CAUSAL, FULL, Band
from wallfacer_dt.layout import Span, merged

Rows = tuple[int, int]
ByRow = Sequence[Sequence[Span]]


class Tile(NamedTuple):
    """One kernel call: rows ``q`` (start, stop) of the queries, rows ``k`` of the keys.

    Attributes:
        q: rows of the queries.
        k: rows of the keys.
        band: which of the pairs are seen.
        batch: rows of the batch, or None for all.
        at: the positions of the first query and key, where ``mask_mod`` is to be asked; otherwise None.
    """

    q: Rows
    k: Rows
    band: Band = FULL
    batch: Rows | None = None
    at: tuple[int, int] | None = None

    @property
    def area(self) -> int:
        """Number of (query, key) pairs that are computed in a row of the batch, what the band hides left out."""
        rows, columns = self.q[1] - self.q[0], self.k[1] - self.k[0]
        low, high = self.band
        before = 0 if low is None else _below(low, rows, columns)
        return max(0, (rows * columns if high is None else _below(high + 1, rows, columns)) - before)

    def __str__(self) -> str:
        names = {FULL: "", CAUSAL: " causal"}
        band = names.get(self.band, f" band {self.band.low}:{self.band.high}")
        batch = f" of batch {self.batch[0]}:{self.batch[1]}" if self.batch else ""
        asked = f" asked at {self.at[0]},{self.at[1]}" if self.at else ""
        return f"{self.q[0]}:{self.q[1]} x {self.k[0]}:{self.k[1]}{band}{batch}{asked}"


def plan_tiles(queries: ByRow, keys: ByRow, mask: Mask) -> tuple[Tile, ...]:
    """The tiles of a query block against a key block.

    Rectangles that touch are made one; rows of the batch that need the same tiles share them.

    >>> plan_tiles([[Span(2, 4), Span(12, 14)]], [[Span(0, 2), Span(14, 16)]], Mask(right=0))
    (Tile(q=(0, 4), k=(0, 2), band=Band(low=None, high=None), batch=None, at=None),)

    Args:
        queries: the spans that are stored, by row of the batch, or one for all.
        keys: likewise.
        mask: what is seen.

    Returns:
        The tiles.
    """
    queries, keys = [merged(row) for row in queries], [merged(row) for row in keys]
    by_row = [
        _tiles_of_row(queries[row % len(queries)], keys[row % len(keys)], mask, row % mask.rows)
        for row in range(max(mask.rows, len(queries)))
    ]
    if len(by_row) == 1:
        return by_row[0]
    tiles: list[Tile] = []
    for plan, run in groupby(enumerate(by_row), key=itemgetter(1)):
        rows = [row for row, _ in run]
        tiles += [tile._replace(batch=(rows[0], rows[-1] + 1)) for tile in plan]
    return tuple(tiles)


def split_tiles(tiles: Sequence[Tile]) -> tuple[tuple[Tile, ...], tuple[Tile, ...]]:
    """Two parts of about equal area, for work that has to hide something both before and after it."""
    if len(tiles) == 1:
        tiles = _halves(tiles[0])
    parts: tuple[list[Tile], list[Tile]] = ([], [])
    areas = [0, 0]
    for area, tile in sorted(((tile.area, tile) for tile in tiles), key=lambda pair: -pair[0]):
        lighter = areas.index(min(areas))
        parts[lighter].append(tile)
        areas[lighter] += area
    return tuple(parts[0]), tuple(parts[1])


def _below(offset: int, rows: int, columns: int) -> int:
    """How many pairs (t, s) of a rectangle have s - t < offset: row t has t + offset of them, from 0 to ``columns``."""
    first = min(max(0, -offset), rows)  # rows before have none
    last = min(max(first, columns - offset), rows)  # rows from here on have all
    some = last - first
    return some * (first + offset) + some * (some - 1) // 2 + (rows - last) * columns


def _tiles_of_row(queries: Sequence[Span], keys: Sequence[Span], mask: Mask, row: int) -> tuple[Tile, ...]:
    rectangles: list[tuple[Rows, Rows]] = []
    others: list[Tile] = []
    by_position = sorted(_stored(keys))
    starts = [key.start for key, _ in by_position]
    for query, q_offset in _stored(queries):
        reach = mask.reach(row, query)
        first = max(0, bisect_right(starts, reach.start) - 1)
        for key, k_offset in by_position[first : bisect_left(starts, reach.stop)]:
            for region in mask.regions(row, query, key):
                q, k = _shifted(region.q, q_offset - query.start), _shifted(region.k, k_offset - key.start)
                if region.asked:
                    others.append(Tile(q, k, region.band, at=(region.q.start, region.k.start)))
                elif region.band == FULL:
                    rectangles.append((q, k))
                else:
                    others.append(Tile(q, k, region.band))
    return (*(Tile(q, k) for q, k in _joined(rectangles)), *others)


def _stored(spans: Sequence[Span]) -> Iterator[tuple[Span, int]]:
    return zip(spans, accumulate((span.length for span in spans), initial=0), strict=False)


def _shifted(span: Span, by: int) -> Rows:
    return span.start + by, span.stop + by


def _joined(rectangles: Iterable[tuple[Rows, Rows]]) -> list[tuple[Rows, Rows]]:
    """Disjoint rectangles with those that share a whole side made one: first along the keys, then the queries."""
    wide = [(q, k) for q, run in _groups(rectangles, 0) for k in _touching(k for _, k in run)]
    return sorted((q, k) for k, run in _groups(wide, 1) for q in _touching(q for q, _ in run))


def _groups(rectangles: Iterable[tuple[Rows, Rows]], side: int) -> Iterator[tuple[Rows, Iterator[tuple[Rows, Rows]]]]:
    return groupby(sorted(rectangles, key=itemgetter(side)), key=itemgetter(side))


def _touching(rows: Iterable[Rows]) -> list[Rows]:
    return [tuple(span) for span in merged(Span(*r) for r in sorted(rows))]


def _halves(tile: Tile) -> tuple[Tile, ...]:
    (start, stop), keys = tile.q, tile.k
    middle = (start + stop) // 2
    if middle == start or tile.at or tile.band not in (FULL, CAUSAL):
        return (tile,)
    if tile.band == FULL:
        return tile._replace(q=(start, middle)), tile._replace(q=(middle, stop))
    split = keys[0] + middle - start
    return (
        tile._replace(q=(middle, stop), k=(keys[0], split), band=FULL),
        tile._replace(q=(start, middle), k=(keys[0], split)),
        tile._replace(q=(middle, stop), k=(split, keys[1])),
    )
