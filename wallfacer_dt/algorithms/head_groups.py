"""METP's outer loop over groups of heads: whose weights each group needs, as data made on the host.

The projections of attention are sharded by rows (W_q, W_k, W_v, one after the other in a fused weight) and the output
projection by columns, as DTensor's ``Shard`` cuts them. A group is some key heads with their query heads. What it
needs of a weight is a range, which one rank holds where heads divide evenly, and several otherwise.
"""

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from wallfacer_dt.algorithms.heads import Heads
from wallfacer_dt.layout import shard_sizes


class Piece(NamedTuple):
    """Rows ``start`` to ``stop`` of one owner's shard of a weight; ``part`` says of which weight and what they are."""

    part: int
    owner: int
    start: int
    stop: int

    @property
    def length(self) -> int:
        """How many rows."""
        return self.stop - self.start


@dataclass(frozen=True)
class HeadGroup:
    """One turn of the outer loop."""

    heads: Heads  # its query heads and key heads
    pieces: tuple[Piece, ...]  # of q, k, v and the output (parts 0 to 3), in the order of their rows

    @cached_property
    def by_owner(self) -> dict[int, tuple[Piece, ...]]:
        """What each of those sends who send something, ascending."""
        found: dict[int, list[Piece]] = {}
        for piece in self.pieces:
            found.setdefault(piece.owner, []).append(piece)
        return {owner: (*found[owner],) for owner in sorted(found)}


OUT = 3  # the part that is the output; before it come q, k and v


@lru_cache(maxsize=64)
def head_groups(
    heads: int, kv_heads: int, head_dim: int, axes: tuple[int, ...], *, fused: bool
) -> tuple[HeadGroup, ...]:
    """The groups: as many as ranks, or as key heads where these are fewer.

    >>> groups = head_groups(4, 2, 8, (2,), fused=False)
    >>> [(group.heads.q, [*group.by_owner]) for group in groups]
    [((0, 2), [0]), ((2, 4), [1])]

    ``axes`` are those of the mesh that weights are sharded over; ``fused``: one weight holds q, k and v.
    """
    share = heads // kv_heads
    q, kv = heads * head_dim, kv_heads * head_dim
    # By part, how many rows the weight has in which it is stored, and from which row on.
    rows, firsts = (q, kv, kv, q), (0, 0, 0, 0)
    if fused:
        rows, firsts = (q + 2 * kv,) * 3 + (q,), (0, q, q + kv, 0)
    count = min(math.prod(axes), kv_heads)
    bounds = [kv_heads * i // count for i in range(count + 1)]
    groups = []
    for start, stop in pairwise(bounds):
        ranges = [(start * share, stop * share), (start, stop), (start, stop), (start * share, stop * share)]
        pieces = [
            piece
            for part, (first, (begin, end)) in enumerate(zip(firsts, ranges, strict=True))
            for piece in _pieces(part, rows[part], first + begin * head_dim, first + end * head_dim, axes)
        ]
        groups.append(HeadGroup(Heads(ranges[0], ranges[1]), tuple(pieces)))
    return tuple(groups)


def _pieces(part: int, rows: int, start: int, stop: int, axes: tuple[int, ...]) -> list[Piece]:
    """Who holds rows ``start`` to ``stop`` of a weight of so many, for a part."""
    pieces = []
    for owner, (first, last) in enumerate(pairwise(accumulate(shard_sizes(rows, axes), initial=0))):
        low, high = max(start, first), min(stop, last)
        if low < high:
            pieces.append(Piece(part, owner, low - first, high - first))
    return pieces
