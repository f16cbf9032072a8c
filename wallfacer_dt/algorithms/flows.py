"""What ranks receive in one attention call, read off the transfers of their schedule; and how much a transfer carries.

A flow is what comes in transfers of one kind from the same ranks: of the schedule (``kind`` of ``steps``), in Ulysses'
exchanges (``to_heads``, ``to_tokens``), or of ``replicated`` tokens. Ranks are sequence indices, so placement does not
matter here.

Note [Many ranks at once]
A coordinate whose ranks are arrays stands for many ranks; all that depends on them is then an array of that shape,
which numpy spreads as it does. What a rank would receive from itself it does not receive.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from wallfacer_dt.algorithms.heads import split_heads
from wallfacer_dt.algorithms.holdings import peer_of
from wallfacer_dt.algorithms.schedule import outline
from wallfacer_dt.algorithms.sequences import Sequences, hops
from wallfacer_dt.algorithms.steps import CONTEXT, Hop, Side, Transfer
from wallfacer_dt.kernels.merge import accumulation_dtype
from wallfacer_dt.layout import shard_sizes
from wallfacer_dt.mesh import ULYSSES_AXIS, Coordinate

Ints = Any  # an int, or an array of them where there are many ranks


@dataclass(frozen=True, slots=True)
class Content:
    """How many elements are sent."""

    sent: Ints = 0  # in the inputs' dtype
    carried: Ints = 0  # of what is added to where it comes, and sent on, in the accumulation dtype
    statistics: Ints = 0  # of lse and delta, in the accumulation dtype

    @property
    def payload(self) -> Ints:
        """All but statistics."""
        return self.sent + self.carried

    def nbytes(self, dtype: torch.dtype) -> Ints:
        """Bytes; ``dtype`` is the inputs'."""
        return self.sent * dtype.itemsize + (self.carried + self.statistics) * accumulation_dtype(dtype).itemsize

    def __add__(self, more: "Content") -> "Content":
        return Content(self.sent + more.sent, self.carried + more.carried, self.statistics + more.statistics)


class Shape(NamedTuple):
    """What a call's tensors are, but for their length."""

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    shared_dim: int = 0

    def data(self, side: Side, rows: Ints, heads: Ints, *, backward: bool) -> Content:
        """Of rows of some heads of a side: (k, v), or q, or in a backward (q, grad_out, lse, delta)."""
        tokens = self.batch * rows
        if side == "kv":
            own = heads * (self.head_dim - self.shared_dim + self.value_dim)
            return Content(tokens * (own + self.shared_dim * (heads > 0)))
        if not backward:
            return Content(tokens * heads * self.head_dim)
        return Content(tokens * heads * (self.head_dim + self.value_dim), statistics=2 * tokens * heads)

    def partial(self, side: Side, rows: Ints, heads: Ints, *, backward: bool) -> Content:
        """Of what was computed for them, as it is sent once: (out, lse), or in a backward gradients."""
        if backward:
            return self.data(side, rows, heads, backward=False)
        tokens = self.batch * rows
        return Content(tokens * heads * self.value_dim, statistics=tokens * heads)

    def transferred(self, transfer: Transfer, rows: Ints, heads: Ints, *, backward: bool) -> Content:
        """What a transfer of so many rows and heads brings from each of its sources."""
        if not transfer.partial:
            return self.data(transfer.side, rows, heads, backward=backward)
        once = self.partial(transfer.side, rows, heads, backward=backward)
        return Content(0, once.sent, once.statistics) if transfer.kind == "carry" else once

    def exchanged(self, kind: str, rows: Sequence[Ints], heads: Sequence[Ints], *, backward: bool) -> Content:
        """What comes of rows of queries and of keys in one of Ulysses' exchanges, ``"to_heads"`` or ``"to_tokens"``."""
        of = self.data if kind == "to_heads" else self.partial
        content = of("q", rows[0], heads[0], backward=backward)
        if kind == "to_heads" or backward:
            content += of("kv", rows[1], heads[1], backward=backward)
        return content


class Flow(NamedTuple):
    """What ranks receive in transfers of one kind."""

    kind: str
    side: str  # whose data they carry, ``"q"``, ``"kv"``, or ``""`` for both
    axis: str  # of the mesh, or ``"cp"`` for ring and team together
    groups: tuple[int, ...]  # of heads, which are alike in that
    times: int  # for each of these
    receiver: Ints  # sequence indices, of what shape the coordinate says
    sources: Ints  # (n, *that shape) whom each receives from; itself where nothing comes
    content: Content  # of what comes from one source, once; spread over the sources

    @property
    def comes(self) -> np.ndarray:
        """From which of its sources a rank receives something."""
        return self.sources != self.receiver


def everyone(ulysses: int, ring: int, team: int) -> Coordinate:
    """The coordinate of all ranks: arrays of shape (ulysses, ring * team)."""
    inner: Ints = np.arange(ring * team)
    ulysses_rank: Ints = np.arange(ulysses)[:, None]
    return Coordinate(ring, team, inner // team, inner % team, ulysses, ulysses_rank)


@dataclass(frozen=True, slots=True)
class Flows:
    """What is received in the forward or the backward of a call."""

    place: Coordinate  # of the rank that receives; or of many, Note [Many ranks at once]
    shape: Shape
    sequences: Sequences  # what is attended, by whom it is held
    schedule: str
    rotate: str  # the side that moves
    backward: bool
    # The distances at which the 2D schedule goes round the ring, None for those that the mask needs.
    offsets: tuple[int, ...] | None = None

    def __iter__(self) -> Iterator[Flow]:
        place, shape, replicated = self.place, self.shape, self.sequences.replicated
        if place.ulysses > 1:
            yield from self._exchanged()
        yield from self.inner()
        if replicated:
            # Everyone's part of the output is gathered, and what everyone says of it summed, as long as the longest.
            sent = shape.batch * max(shard_sizes(replicated, place.axes)) * shape.heads * shape.value_dim
            content = Content(carried=sent) if self.backward else Content(sent)
            sources = self._some(0 * place.index, place.size)
            yield Flow("replicated", "q", CONTEXT, (0,), 1, place.index, sources, content)

    def inner(self) -> Iterator[Flow]:
        """Of the ring and the team alone, for every group of heads: read off the schedule."""
        place, resident = self.place, "kv" if self.rotate == "q" else "q"
        offsets = hops(place.axes, self.sequences, resident) if self.offsets is None else self.offsets
        schedule = outline(place, self.sequences, self.schedule, resident, self.backward, offsets)
        alike: dict[tuple[str, str, str, bytes], list[Transfer]] = {}
        for transfer in schedule.transfers:
            source = np.asarray(transfer.source).tobytes() if isinstance(transfer, Hop) else b""
            alike.setdefault((transfer.kind, transfer.side, transfer.axis, source), []).append(transfer)
        for groups, heads in self._heads:
            for transfer, *more in alike.values():
                mine = heads[place.ulysses_rank, int(transfer.side == "kv")]
                content = self.shape.transferred(transfer, schedule.rows(transfer), mine, backward=self.backward)
                # Of a group without heads there is no attention.
                sources = np.where(mine > 0, self._sources(transfer), place.index)
                of = transfer.kind, transfer.side, transfer.axis, groups
                yield Flow(*of, 1 + len(more), place.index, sources, content)

    def _sources(self, transfer: Transfer) -> np.ndarray:
        place = self.place
        if not isinstance(transfer, Hop):
            return self._some(place.index - place.team_rank, place.team)
        return self._some(place.index - place.inner_index + peer_of(place, transfer.axis, transfer.source), 1)

    def _exchanged(self) -> Iterator[Flow]:
        """Of Ulysses: tokens for heads, and back."""
        place, inner = self.place, self.place.ring * self.place.team
        sources = self._some(place.index % inner, place.ulysses, inner)
        rows = [np.array(self.sequences.sizes(side, place.axes)) for side in ("q", "kv")]
        theirs, own = ([some[index] for some in rows] for index in (sources, place.index))
        for groups, heads in self._heads:
            mine, others = (np.moveaxis(heads[u], -1, 0) for u in (place.ulysses_rank, sources // inner))
            for kind, *of in (("to_heads", theirs, mine), ("to_tokens", own, others)):
                content = self.shape.exchanged(kind, *of, backward=self.backward)
                yield Flow(kind, "", ULYSSES_AXIS, groups, 1, place.index, sources, content)

    @property
    def _heads(self) -> list[tuple[tuple[int, ...], np.ndarray]]:
        """Groups that are alike, with (ranks of ``cp_ulysses``, 2): how many query and key heads each rank computes."""
        shape, alike = self.shape, dict[tuple[tuple[int, int], ...], tuple[int, ...]]()
        ranks = split_heads(shape.heads, shape.kv_heads, self.place.ulysses, hidden=not shape.shared_dim)
        for group, some in enumerate(zip(*ranks, strict=True)):
            counts = tuple(one.counts for one in some)
            alike[counts] = (*alike.get(counts, ()), group)
        return [(groups, np.array(counts)) for counts, groups in alike.items()]

    def _some(self, first: Ints, count: int, step: int = 1) -> np.ndarray:
        """(count, ...) indices, from one on."""
        return first + step * np.arange(count).reshape(-1, *(1,) * np.ndim(self.place.index))
