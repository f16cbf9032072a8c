"""A rank's schedule for a run on paper: what it sends, waits for and computes, with the sizes of its tiles.

A ring of many ranks has as many steps, and most of them are alike: what is computed of queries and keys that lie to
each other as others do is planned once.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

import numpy as np

from wallfacer_dt.algorithms.holdings import Holdings, Ranks, index_of, peer_of
from wallfacer_dt.algorithms.masks import UNBOUNDED, Mask
from wallfacer_dt.algorithms.schedule import SCHEDULES
from wallfacer_dt.algorithms.segments import Stored, Work, plan_work
from wallfacer_dt.algorithms.sequences import Sequences, hops
from wallfacer_dt.algorithms.steps import SIDES, Attend, Hop, Parts, Side, Start, Step, Transfer, Wait
from wallfacer_dt.layout import Spans
from wallfacer_dt.mesh import RING_AXIS, Coordinate


class Sent(NamedTuple):
    """Start a transfer.

    Attributes:
        name: it.
        kind: likewise, see ``steps``.
        side: whose data it carries.
        shift: see ``traffic.Key``.
        sources: inner indices of the ranks that it comes from.
    """

    name: str
    kind: str
    side: str
    shift: int
    sources: tuple[int, ...]


class Awaited(NamedTuple):
    """Wait for it."""

    name: str


class Attended(NamedTuple):
    """Compute."""

    name: str
    work: Work


_SQUARE = 128
"""Rows and columns that a kernel which takes segments computes at once, whatever of them is seen: FlashAttention-3's of
heads of 128 under a causal mask, forward; FlashAttention-2 has 64 columns there, and backwards differ.
"""


class Call(NamedTuple):
    """What a kernel computes in one call.

    Attributes:
        pairs: of a query and a key.
        rows: of queries.
        columns: rows of keys.
        depth: pairs of a row, in the mean of each segment, of all segments together.
    """

    pairs: int
    rows: int
    columns: int
    depth: float


@lru_cache(maxsize=4096)
def calls_of(work: Work, *, takes_segments: bool) -> tuple[Call, ...]:
    """The calls of a kernel that takes segments, and any band; or of one that takes dense tiles."""
    if not takes_segments:
        sizes = ((tile.area, tile.q[1] - tile.q[0], tile.k[1] - tile.k[0]) for some in work for tile in some.tiles)
        return tuple(Call(area, rows, columns, area / rows) for area, rows, columns in sizes if rows)
    found: list[Call] = []
    for segments in work:
        ends = np.concatenate(segments.rows)
        pairs, rows, columns = segments.squares(_SQUARE) * _SQUARE**2, ends[:, 1] - ends[:, 0], ends[:, 3] - ends[:, 2]
        numbers = np.stack([pairs, rows, columns, pairs / rows])
        numbers = numbers.sum(1, keepdims=True) if segments.is_ragged else numbers
        found += [
            Call(int(pairs), int(rows), int(columns), depth) for pairs, rows, columns, depth in numbers.T.tolist()
        ]
    return tuple(found)


Program = Parts[Sent | Awaited | Attended]


def area_of(program: Program) -> int:
    """How many pairs it computes."""
    return sum(segments.area for work in attended(program) for segments in work)


def attended(program: Program) -> Iterator[Work]:
    """What every step computes that does."""
    return (step.work for step in chain(*program) if isinstance(step, Attended))


@lru_cache(maxsize=4096)  # a plan for 1024 ranks asks for 426, twice; under a window one for 64 for 3,602
def program_of(place: Coordinate, sequences: Sequences, schedule: str, resident: Side, backward: bool) -> Program:
    """What a rank's schedule is, as of :func:`wallfacer_dt.algorithms.schedule.make_schedule`."""
    held = {side: sequences.inner(side, place.axes) for side in SIDES}
    offsets, works = hops(place.axes, sequences, resident), _works(place, sequences, resident)
    holdings = _Alike(place, resident, backward, offsets, sequences.mask, held, works=works)
    steps = SCHEDULES["2d" if place.team == 1 else schedule](holdings)
    by_shift = schedule != "published" or place.team == 1
    return Parts(*(tuple(_written(step, place, by_shift) for step in part) for part in Parts.of(steps)))


@lru_cache(maxsize=256)  # those of all ranks that are run together, of either side
def _works(place: Coordinate, sequences: Sequences, resident: Side) -> dict[tuple[Ranks, Ranks], Work]:
    """What has been planned to be computed, in every schedule and both ways alike."""
    del place, sequences, resident
    return {}


def _written(step: Step, place: Coordinate, by_shift: bool) -> Sent | Awaited | Attended:
    match step:
        case Start(transfer):
            return _sent(transfer, place, by_shift)
        case Wait(transfer):
            return Awaited(str(transfer))
        case Attend(resident, _, block, work):
            rotating = "kv" if resident == "q" else "q"
            return Attended(f"{step.part} {resident} x {rotating}[{block}]", work)


def _sent(transfer: Transfer, place: Coordinate, by_shift: bool) -> Sent:
    hops, shift = by_shift and transfer.axis == RING_AXIS, 0
    if isinstance(transfer, Hop):
        back = transfer.block if transfer.kind == "return" else 0
        shift = (place.ring_rank - transfer.source) % place.ring if hops else back
        sources = (peer_of(place, transfer.axis, transfer.source),)
    else:
        sources = tuple(index_of(place, place.ring_rank, member) for member in range(place.team))
    return Sent(str(transfer), transfer.kind, transfer.side, shift, sources)


class _Alike(Holdings):
    """Holdings of which what lies as other things do is planned once, under masks that do not ask where."""

    def planned(self, queries: Sequence[Stored], keys: Sequence[Stored]) -> Work:
        """As of any holdings."""
        if self.mask.prefix or self.mask.documents or self.mask.asked:
            return super().planned(queries, keys)
        (q,), (k,) = ([row.spans for row in some] for some in (queries, keys))
        left, right = self.mask.left, self.mask.right
        # Most of a sequence is out of a window's reach, which is sooner told.
        ahead = UNBOUNDED if right is None else right
        if left is not None and not ((k[:, 1] > q[:, :1] - left) & (k[:, 0] < q[:, 1:] + ahead)).any():
            return ()
        reach = (left or 0) + (right or 0) + 2
        return _work(self.mask, *_closed_up(q, k, reach))


Ends = tuple[tuple[int, int], ...]


def _closed_up(queries: Spans, keys: Spans, reach: int) -> list[Ends]:
    """Spans with at most so many positions between them, and before the first, that none of them has.

    What is computed depends on which positions are next to each other, which before, and which further than a window.
    """
    spans, depth = [some.tolist() for some in (queries, keys)], Counter[int]()
    for start, stop in chain(*spans):
        depth[start] += 1
        depth[stop] -= 1
    closed, before, there, inside = {}, 0, 0, 0
    for position in sorted(depth):
        there += position - before if inside else min(reach, position - before)
        closed[position], before, inside = there, position, inside + depth[position]
    return [tuple((closed[start], closed[stop]) for start, stop in some) for some in spans]


@lru_cache(maxsize=1024)
def _work(mask: Mask, queries: Ends, keys: Ends) -> Work:
    q, k = (np.array(ends).reshape(-1, 2) for ends in (queries, keys))
    return plan_work([q], [k], mask)
