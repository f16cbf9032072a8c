"""What one rank receives in one attention call, by transfer and by whom it comes from: closed formulas.

Independent of the schedules, which say when; the table is in ``volume``, which adds these up. A flow is one kind of
transfer, named as in ``steps``: ``gather`` and ``exchange`` in the team, ``move`` and ``carry`` round the ring,
``place`` and ``home`` for the published schedule's way to its ring and back; ``to_heads`` and ``to_tokens`` of
Ulysses; ``replicated``. Ranks are sequence indices, so placement does not matter here.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from wallfacer_dt.algorithms.heads import Heads, split_heads
from wallfacer_dt.algorithms.routes import PublishedRoute, Route
from wallfacer_dt.algorithms.steps import CONTEXT, Side
from wallfacer_dt.kernels import accumulation_dtype
from wallfacer_dt.mesh import RING_AXIS, TEAM_AXIS, ULYSSES_AXIS, Coordinate


class Flow(NamedTuple):
    """What one rank receives in transfers of one kind.

    Attributes:
        kind: of the transfer.
        side: whose data they carry, ``"q"``, ``"kv"``, or ``""`` for both.
        axis: of the mesh, or ``"cp"`` for ring and team together.
        group: of heads.
        sources: sequence indices of the ranks that it comes from, from each as much.
        times: how often.
        sent: elements from one source, once, in the inputs' dtype.
        carried: in the accumulation dtype.
        statistics: of lse and delta, in the accumulation dtype.
    """

    kind: str
    side: Side | str
    axis: str
    group: int
    sources: tuple[int, ...]
    times: int
    sent: int = 0
    carried: int = 0
    statistics: int = 0

    def nbytes(self, dtype: torch.dtype) -> int:
        """Bytes from one source, once; ``dtype`` is the inputs'."""
        return self.sent * dtype.itemsize + (self.carried + self.statistics) * accumulation_dtype(dtype).itemsize

    @property
    def arrivals(self) -> int:
        """How often something comes, from all sources."""
        return len(self.sources) * self.times


class Shape(NamedTuple):
    """What a token's tensors are; the batch counts as part of a token."""

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    shared_dim: int

    def q(self, heads: int) -> int:
        """Elements of a token's queries."""
        return self.batch * heads * self.head_dim

    def out(self, heads: int) -> int:
        """Elements of a token's outputs."""
        return self.batch * heads * self.value_dim

    def kv(self, heads: int) -> int:
        """Elements of a token's keys and values."""
        shared = self.shared_dim if heads else 0
        return self.batch * (heads * (self.head_dim - shared + self.value_dim) + shared)


class _Unit(NamedTuple):
    """Elements of one shard, or of a team's: q, output, k with v, a statistic."""

    q: int
    out: int
    kv: int
    statistic: int

    def operand(self, side: Side, *, backward: bool) -> dict[str, int]:
        """What is sent of a side's data: (k, v), or q, in a backward (q, grad_out, lse, delta)."""
        if side == "kv":
            return {"sent": self.kv}
        return {"sent": self.q + self.out, "statistics": 2 * self.statistic} if backward else {"sent": self.q}

    def partial(self, side: Side, *, backward: bool) -> dict[str, int]:
        """What is sent of what was computed for a side: (out, lse), in a backward gradients."""
        if not backward:
            return {"sent": self.out, "statistics": self.statistic}
        return {"sent": self.q if side == "q" else self.kv}

    def carried(self, side: Side, *, backward: bool) -> dict[str, int]:
        """The same of what is added to hop by hop."""
        partial = self.partial(side, backward=backward)
        return partial | {"sent": 0, "carried": partial["sent"]}


@dataclass(frozen=True)
class Held:
    """How many tokens each sequence index holds.

    Attributes:
        q: queries.
        k: keys.
        ulysses: size of that axis.
    """

    q: tuple[int, ...]
    k: tuple[int, ...]
    ulysses: int

    @cached_property
    def rows(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Queries and keys by inner index: those of all ranks that exchange heads."""
        inner = len(self.q) // self.ulysses
        q, k = (tuple(sum(sizes[i::inner]) for i in range(inner)) for sizes in (self.q, self.k))
        return q, k

    @cached_property
    def shard(self) -> tuple[int, int]:
        """The longest shard of queries, and of keys."""
        q, k = self.rows
        return max(q), max(k)

    def together(self, team: int) -> tuple[int, int]:
        """The most that a team has."""
        q, k = (max(sum(rows[i : i + team]) for i in range(0, len(rows), team)) for rows in self.rows)
        return q, k


@dataclass(frozen=True, slots=True)
class Flows:
    """The flows of one rank.

    Attributes:
        place: the rank's coordinate.
        shape: of a token.
        held: by every rank.
        hop: the longest of queries and of keys that travel together: a shard's, or of the published schedule a team's.
        published: the published schedule, on a mesh that it fits, with a team.
        distances: round the ring, ascending, at which the 2D schedule visits blocks of keys.
    """

    place: Coordinate
    shape: Shape
    held: Held
    hop: tuple[int, int]
    published: bool
    distances: tuple[int, ...]

    def all(self, rotate: str, *, backward: bool) -> Iterator[Flow]:
        """What is received in the forward or the backward; ``rotate`` is the side that moves."""
        yield from self._exchanged(backward=backward)
        yield from self.inner(rotate, backward=backward)

    def inner(self, rotate: str, *, backward: bool) -> Iterator[Flow]:
        """The same without Ulysses' exchanges, which are the same in both rotations."""
        return self._inner("kv" if rotate == "q" else "q", backward=backward)

    @property
    def _groups(self) -> tuple[tuple[Heads, ...], ...]:
        hidden = not self.shape.shared_dim
        return split_heads(self.shape.heads, self.shape.kv_heads, self.place.ulysses, hidden=hidden)

    def _inner(self, resident: Side, *, backward: bool) -> Iterator[Flow]:
        """Of the ring and the team, for every group of heads."""
        heads = [(self.shape.heads, self.shape.kv_heads)]
        if self.place.ulysses > 1:
            heads = [(g.q[1] - g.q[0], g.kv[1] - g.kv[0]) for g in self._groups[self.place.ulysses_rank]]
        for group, (n, m) in enumerate(heads):
            if n:
                shard = self._unit(*self.held.shard, n, m)
                if self.published:
                    hop = self._unit(*self.hop, n, m)
                    yield from self._published(group, resident, shard, hop, backward=backward)
                else:
                    yield from self._two_dimensional(group, resident, shard, backward=backward)

    def _unit(self, q: int, k: int, n: int, m: int) -> _Unit:
        shape = self.shape
        return _Unit(q * shape.q(n), q * shape.out(n), k * shape.kv(m), q * shape.batch * n)

    def _two_dimensional(self, group: int, resident: Side, shard: _Unit, *, backward: bool) -> Iterator[Flow]:
        rotating: Side = "kv" if resident == "q" else "q"
        ring, distances = self.place.ring, self.distances
        if resident == "kv":
            # As far as a query's keys are one way, a key's queries are the other.
            distances = tuple(sorted(-distance % ring for distance in distances))
        mates, route = self._mates, Route.of(ring, distances)
        blocks = range(1, route.blocks)
        yield Flow("gather", resident, TEAM_AXIS, group, mates, 1, **shard.operand(resident, backward=backward))
        for source, times in _runs(self._from(route.move(block)) for block in blocks):
            yield Flow("move", rotating, RING_AXIS, group, source, times, **shard.operand(rotating, backward=backward))
        if backward or rotating == "q":
            carried = shard.carried(rotating, backward=backward)
            for source, times in _runs(self._from(route.carry(block)) for block in blocks):
                yield Flow("carry", rotating, RING_AXIS, group, source, times, **carried)
        if backward or resident == "q":
            data = shard.partial(resident, backward=backward)
            yield Flow("exchange", resident, TEAM_AXIS, group, mates, 1, **data)

    def _published(self, group: int, resident: Side, shard: _Unit, hop: _Unit, *, backward: bool) -> Iterator[Flow]:
        rotating: Side = "kv" if resident == "q" else "q"
        mates, route = self._mates, PublishedRoute(self.place)
        before = (self._index(route.previous, self.place.team_rank),)
        for side in (rotating, resident):
            yield Flow("gather", side, TEAM_AXIS, group, mates, 1, **shard.operand(side, backward=backward))
        data = hop.operand(rotating, backward=backward)
        yield Flow("place", rotating, CONTEXT, group, self._unless_here(route.placed_from), 1, **data)
        yield Flow("move", rotating, RING_AXIS, group, before, route.blocks - 1, **data)
        if backward:
            carried = hop.carried(rotating, backward=backward)
            yield Flow("carry", rotating, RING_AXIS, group, before, route.blocks - 1, **carried)
            yield Flow("home", rotating, CONTEXT, group, self._unless_here(route.fetched_from), 1, **carried)
        yield Flow("exchange", resident, TEAM_AXIS, group, mates, 1, **shard.partial(resident, backward=backward))
        if backward:
            yield Flow("exchange", rotating, TEAM_AXIS, group, mates, 1, **shard.partial(rotating, backward=backward))

    def _exchanged(self, *, backward: bool) -> Iterator[Flow]:
        """Of Ulysses: tokens for heads, and back."""
        place, shape = self.place, self.shape
        if place.ulysses == 1:
            return
        inner = place.ring * place.team
        peers = [rank for rank in range(place.ulysses) if rank != place.ulysses_rank]
        mine_q, mine_k = self.held.q[place.index], self.held.k[place.index]
        for number, mine in enumerate(self._groups[place.ulysses_rank]):
            n, m = mine.q[1] - mine.q[0], mine.kv[1] - mine.kv[0]
            coming, going = {}, {}
            for peer in peers:
                index = peer * inner + place.inner_index
                q, k = self.held.q[index], self.held.k[index]
                theirs = self._groups[peer][number]
                their_n, their_m = theirs.q[1] - theirs.q[0], theirs.kv[1] - theirs.kv[0]
                data = q * (shape.q(n) + backward * shape.out(n)) + k * shape.kv(m)
                coming.setdefault((data, 2 * backward * q * shape.batch * n), []).append(index)
                results = mine_q * (shape.q(their_n) if backward else shape.out(their_n))
                results += backward * mine_k * shape.kv(their_m)
                going.setdefault((results, (not backward) * mine_q * shape.batch * their_n), []).append(index)
            for kind, flows in (("to_heads", coming), ("to_tokens", going)):
                for (sent, statistics), sources in flows.items():
                    yield Flow(kind, "", ULYSSES_AXIS, number, tuple(sources), 1, sent=sent, statistics=statistics)

    @property
    def _mates(self) -> tuple[int, ...]:
        place = self.place
        return tuple(self._index(place.ring_rank, mate) for mate in range(place.team) if mate != place.team_rank)

    def _from(self, shift: int) -> tuple[int, ...]:
        return (self._index((self.place.ring_rank - shift) % self.place.ring, self.place.team_rank),)

    def _unless_here(self, inner_index: int) -> tuple[int, ...]:
        return () if inner_index == self.place.inner_index else (self._index(*divmod(inner_index, self.place.team)),)

    def _index(self, ring_rank: int, team_rank: int) -> int:
        place = self.place
        return (place.ulysses_rank * place.ring + ring_rank) * place.team + team_rank


def _runs(sources: Iterable[tuple[int, ...]]) -> Iterator[tuple[tuple[int, ...], int]]:
    """Each source with how often it occurs."""
    counts: dict[tuple[int, ...], int] = {}
    for source in sources:
        counts[source] = counts.get(source, 0) + 1
    return iter(counts.items())
