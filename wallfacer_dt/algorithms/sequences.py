"""Whose queries and keys are attended, under which mask; and how far round a ring they are needed."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

from wallfacer_dt.algorithms.masks import Mask
from wallfacer_dt.algorithms.steps import Side
from wallfacer_dt.layout import BY_DOCUMENT, Shards, Span, Spans, deal, deal_documents, length_of, merged
from wallfacer_dt.mesh import Coordinate


@dataclass(frozen=True, slots=True)
class Sequences:
    """The queries and keys of a call, and who holds them.

    Attributes:
        q_length: queries in the whole sequence.
        k_length: keys in the whole sequence.
        order: token order.
        mask: what is seen.
        replicated: tokens before all these, that every rank holds and each takes care of a part of.

    Dealt out by document, rows of the batch differ in the positions that a rank holds, not in how many. What is then
    put together from several ranks is stored one rank after the other, and otherwise in order of position.
    """

    q_length: int
    k_length: int
    order: str
    mask: Mask
    replicated: int = 0

    @property
    def rows(self) -> int:
        """How many rows of the batch differ in their positions; one stands for all."""
        return len(self.mask.documents) if self.order == BY_DOCUMENT else 1

    def shards(self, side: Side, place: Coordinate, row: int = 0) -> Shards:
        """By sequence index, the positions that it takes care of on a side."""
        if self.order == BY_DOCUMENT:
            return deal_documents(self.mask.documents[row], place.axes)
        shards = deal(self.q_length if side == "q" else self.k_length, place.axes, self.order)
        if not self.replicated:
            return shards
        first = deal(self.replicated, place.axes, "contiguous")
        return tuple((*part, *_after(self.replicated, shard)) for part, shard in zip(first, shards, strict=True))

    def stored(self, side: Side, place: Coordinate) -> Shards:
        """The same by how it is stored: where rows differ, positions are numbered by rank."""
        return self.shards(side, place) if self.rows == 1 else _numbered(self.shards(side, place))

    def inner(self, side: Side, place: Coordinate, row: int = 0) -> Shards:
        """By inner index, what it works on: the positions of all ranks that it exchanges heads with."""
        return _together(self.shards(side, place, row), place.ulysses, in_order=self.rows == 1)

    def inner_stored(self, side: Side, place: Coordinate) -> Shards:
        """The same by how it is stored."""
        inner = self.inner(side, place)
        return inner if self.rows == 1 else _numbered(inner)


def _after(count: int, spans: Spans) -> Spans:
    return tuple(Span(count + span.start, count + span.stop) for span in spans)


@lru_cache(maxsize=64)
def _together(shards: Shards, ulysses: int, *, in_order: bool) -> Shards:
    inner = len(shards) // ulysses
    together = ([span for part in shards[i::inner] for span in part] for i in range(inner))
    return tuple(merged(sorted(spans) if in_order else spans) for spans in together)


def _numbered(shards: Shards) -> Shards:
    ends = list(accumulate(map(length_of, shards), initial=0))
    return tuple((Span(*pair),) if pair[0] < pair[1] else () for pair in pairwise(ends))


@lru_cache(maxsize=64)
def hops(place: Coordinate, sequences: Sequences, stationary: Side) -> tuple[int, ...]:
    """The distances round the ring, other than 0, at which some rank of the mesh needs a moving block.

    The 2D schedule makes as many hops; the same on every rank.

    Args:
        place: of any rank.
        sequences: what is attended.
        stationary: the side that stays.

    Returns:
        Distances from 1 to ring - 1, ascending.
    """
    if not sequences.mask.spares_hops:
        return tuple(range(1, place.ring))
    sign = 1 if stationary == "q" else -1
    needed = {0}
    for q, k in _seen(place, sequences):
        needed.add(sign * (q // place.team - k // place.team) % place.ring)
        if len(needed) == place.ring:
            break
    return tuple(sorted(needed - {0}))


def _seen(place: Coordinate, sequences: Sequences) -> Iterator[tuple[int, int]]:
    """Pairs of inner indices of which the first's queries see some of the second's keys."""
    mask = sequences.mask
    for row in range(mask.rows):
        queries, keys = (sequences.inner(side, place, row % sequences.rows) for side in ("q", "kv"))
        stored = sorted((span, index) for index, spans in enumerate(keys) for span in spans)
        starts = [span.start for span, _ in stored]
        for index, spans in enumerate(queries):
            for span in spans:
                reach = mask.reach(row, span)
                first = max(0, bisect_right(starts, reach.start) - 1)
                for key, owner in stored[first : bisect_left(starts, reach.stop)]:
                    if key.stop > reach.start and mask.sees(row, span, key):
                        yield index, owner
