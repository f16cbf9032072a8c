"""The tile plan: which rectangles of (queries x keys) a kernel must compute under a mask. Pure numbers.

Queries and keys come as spans of global positions in ascending order, stored one after another in a tensor. Two
spans are equal or disjoint, so a causal mask leaves a staircase of full rectangles and causal squares.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

from wallfacer_dt.layout import Span


class Tile(NamedTuple):
    """One kernel call: rows ``q`` (start, stop) of the queries, rows ``k`` of the keys, causal or full."""

    q: tuple[int, int]
    k: tuple[int, int]
    is_causal: bool

    @property
    def area(self) -> int:
        """Number of (query, key) pairs that are computed, the mask's hidden half left out."""
        rows, columns = self.q[1] - self.q[0], self.k[1] - self.k[0]
        return rows * (rows + 1) // 2 if self.is_causal else rows * columns


def plan_tiles(queries: Sequence[Span], keys: Sequence[Span], is_causal: bool) -> tuple[Tile, ...]:
    """The tiles of a query block against a key block.

    Under a causal mask a query span sees the keys of all earlier spans, a prefix, and half of its own. Neighbouring
    query spans with the same prefix share a rectangle.

    >>> plan_tiles([Span(2, 4), Span(12, 14)], [Span(0, 2), Span(14, 16)], is_causal=True)
    (Tile(q=(0, 4), k=(0, 2), is_causal=False),)
    """
    q_rows, k_rows = _rows(queries), _rows(keys)
    if not is_causal:
        return (Tile((0, q_rows[-1][1]), (0, k_rows[-1][1]), False),)
    return tuple(_causal_tiles(queries, keys, q_rows, k_rows))


def split_tiles(tiles: Sequence[Tile]) -> tuple[tuple[Tile, ...], tuple[Tile, ...]]:
    """Two parts of about equal area, for work that has to hide something both before and after it."""
    if len(tiles) == 1:
        tiles = _halves(tiles[0])
    first: list[Tile] = []
    second: list[Tile] = []
    for tile in sorted(tiles, key=lambda tile: -tile.area):
        lighter = min(first, second, key=lambda part: sum(t.area for t in part))
        lighter.append(tile)
    return tuple(first), tuple(second)


def _rows(spans: Sequence[Span]) -> list[tuple[int, int]]:
    return list(pairwise(accumulate((span.length for span in spans), initial=0)))


def _causal_tiles(
    queries: Sequence[Span],
    keys: Sequence[Span],
    q_rows: Sequence[tuple[int, int]],
    k_rows: Sequence[tuple[int, int]],
) -> Iterator[Tile]:
    seen_whole = [sum(key.stop <= query.start for key in keys) for query in queries]
    for count, run in groupby(range(len(queries)), key=seen_whole.__getitem__):
        members = list(run)
        if count:
            yield Tile((q_rows[members[0]][0], q_rows[members[-1]][1]), (0, k_rows[count - 1][1]), False)
    for query, rows in zip(queries, q_rows, strict=True):
        if query in keys:
            yield Tile(rows, k_rows[keys.index(query)], True)


def _halves(tile: Tile) -> tuple[Tile, ...]:
    (start, stop), keys = tile.q, tile.k
    middle = (start + stop) // 2
    if middle == start:
        return (tile,)
    if not tile.is_causal:
        return Tile((start, middle), keys, False), Tile((middle, stop), keys, False)
    split = keys[0] + middle - start
    return (
        Tile((middle, stop), (keys[0], split), False),
        Tile((start, middle), (keys[0], split), True),
        Tile((middle, stop), (split, keys[1]), True),
    )
