"""Who receives what from whom in one call of attention, by transfer; and what of it crosses nodes.

The formulas are those of :func:`wallfacer_dt.attention_volume`, evaluated for every rank; here they meet a placement.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from wallfacer_dt.algorithms import Flow, Sequences, attention_flows, hops
from wallfacer_dt.algorithms.routes import PublishedRoute
from wallfacer_dt.mesh import RING_AXIS, Coordinate
from wallfacer_dt.planning.candidates import Candidate
from wallfacer_dt.planning.model import ModelShape, SequenceShape

Ints = np.ndarray
_MANY = 128  # ranks, above which a length that does not divide is taken for the next one that does


class Key(NamedTuple):
    """Which transfers of a call: those of one kind, side and group of heads; see ``algorithms.flows``.

    ``shift``: how far round the ring hops of the 2D schedule go, under a window not all as far.
    """

    backward: bool
    kind: str
    side: str
    group: int
    shift: int = 0


@dataclass(frozen=True, slots=True)
class Arrivals:
    """What is received in transfers of one kind, over all ranks: one entry for every receiver and sender.

    Attributes:
        receiver: sequence indices.
        sender: likewise.
        via: from whom the receiver has it: the sender, or in a gather, which goes round, its neighbour.
        nbytes: bytes, once.
        times: how often.
    """

    receiver: Ints
    sender: Ints
    via: Ints
    nbytes: Ints
    times: Ints

    @property
    def total(self) -> Ints:
        """Bytes of all times."""
        return self.nbytes * self.times


@dataclass(frozen=True, slots=True)
class Wire:
    """One transfer as links see it, at the rank and the node where it is most.

    Attributes:
        nbytes: bytes into one rank.
        near: how many messages from ranks of its own node one rank waits for, one after the other: in a gather, which
            goes round, as many as there are others; what all send at once counts once.
        intra: bytes into one rank from these.
        far: likewise from ranks of other nodes.
        inter: bytes into one rank from these; what a gather brings enters a node by all of its members there.
        node: bytes into one node from others.
    """

    nbytes: int = 0
    near: int = 0
    intra: int = 0
    far: int = 0
    inter: int = 0
    node: int = 0


def arrivals(candidate: Candidate, model: ModelShape, sequence: SequenceShape) -> dict[Key, Arrivals]:
    """What every rank receives in one call of attention, forward and backward.

    Of more than 128 ranks a length that does not divide is taken for the next one that does.
    """
    return one_way(candidate, model, sequence, backward=False) | one_way(candidate, model, sequence, backward=True)


def one_way(candidate: Candidate, model: ModelShape, sequence: SequenceShape, *, backward: bool) -> dict[Key, Arrivals]:
    """The same of the forward, or of the backward, alone."""
    rotate = candidate.rotate if backward else candidate.rotate_forward
    return _arrivals(
        candidate.axes, candidate.schedule, rotate, candidate.order, model.heads, model.keys, model.dim, sequence,
        backward,
    )  # fmt: skip


def wires(arrived: dict[Key, Arrivals], node: Ints) -> dict[Key, Wire]:
    """The same as links see it; ``node`` is that of every sequence index."""
    return {key: _wire(some, node, goes_round=key.kind == "gather") for key, some in arrived.items()}


def into_ranks(arrived: Iterable[Arrivals], ranks: int) -> Ints:
    """Bytes that every sequence index receives."""
    return sum((_summed(some.receiver, some.total, ranks) for some in arrived), np.zeros(ranks, np.int64))


def into_nodes(arrived: Iterable[Arrivals], node: Ints) -> Ints:
    """Bytes that every node receives from others."""
    nodes = int(node.max()) + 1
    return sum(
        (_summed(node[some.receiver], some.total * _crosses(some, node), nodes) for some in arrived),
        np.zeros(nodes, np.int64),
    )


def _crosses(some: Arrivals, node: Ints) -> Ints:
    return node[some.receiver] != node[some.via]


def _summed(of: Ints, amounts: Ints, size: int) -> Ints:
    sums = np.zeros(size, np.int64)
    np.add.at(sums, of, amounts)
    return sums


def _wire(some: Arrivals, node: Ints, *, goes_round: bool) -> Wire:
    crosses, ranks = _crosses(some, node), len(node)

    def most(of: Ints, amounts: Ints, size: int) -> int:
        return int(_summed(of, amounts, size).max())

    def messages(amounts: Ints) -> int:
        return most(some.receiver, amounts, ranks) if goes_round else int(amounts.any())

    entering = some.nbytes * crosses
    node_bytes = most(node[some.receiver], entering, int(node.max()) + 1)
    if goes_round:
        together = _summed(some.receiver, (node[some.receiver] == node[some.sender]).astype(np.int64), ranks) + 1
        entering = -(-entering // together[some.receiver])
    return Wire(
        nbytes=most(some.receiver, some.nbytes, ranks),
        near=messages(~crosses),
        intra=most(some.receiver, some.nbytes * ~crosses, ranks),
        far=messages(crosses),
        inter=most(some.receiver, entering, ranks),
        node=node_bytes,
    )


@lru_cache(maxsize=16)  # the placements of a candidate come in a row, and arrays of many ranks are large
def _arrivals(
    axes: tuple[int, int, int],
    schedule: str,
    rotate: str,
    order: str,
    heads: int,
    kv_heads: int,
    head_dim: int,
    sequence: SequenceShape,
    backward: bool,
) -> dict[Key, Arrivals]:
    ulysses, ring, team = axes
    first = Candidate(ring, team, ulysses)
    if first.size > _MANY:
        # Asked one by one, that many ranks take minutes.
        sequence = replace(sequence, length=first.size * -(-sequence.length // first.size))
    sequences = Sequences(sequence.length, sequence.length, order, sequence.mask)
    distances = hops(axes, sequences, "q") if sequences.mask.spares_hops else None

    flows, _ = attention_flows(
        ring, team, ulysses=ulysses, batch=sequence.batch, length=sequence.length, kv_length=None, heads=heads,
        kv_heads=kv_heads, head_dim=head_dim, value_dim=None, shared_dim=0, dtype=sequence.dtype, schedule=schedule,
        rotate=rotate if backward else "auto", rotate_forward="auto" if backward else rotate, distances=distances,
        order=order, replicated=0,
    )  # fmt: skip
    # Of equal shards all ranks of one place on cp_ulysses receive the same, only from others.
    alike = sequence.length % first.size == 0
    blocks = _block_sources(ring, team) if alike and schedule == "published" and team > 1 else {}
    entries: dict[Key, list[tuple[Ints, ...]]] = {}
    for index in range(0, first.size, ring * team) if alike else range(first.size):
        for flow in flows(index)[backward]:
            sent = flow.nbytes(sequence.dtype), flow.times
            if alike and flow.kind in blocks:
                ends = _ends(blocks[flow.kind], index)
            elif alike:
                ends = _shifted(flow, index, ring, team)
            else:
                ends = np.full(len(flow.sources), index), np.array(flow.sources, np.int64)
            if len(ends[0]) and flow.times:
                steps = (schedule == "2d" or team == 1) and flow.axis == RING_AXIS
                shift = (index // team - flow.sources[0] // team) % ring if steps else 0
                key = Key(backward, flow.kind, flow.side, flow.group, shift)
                via = _before(ends[0], team) if flow.kind == "gather" else ends[1]
                entries.setdefault(key, []).append((*ends, via, *(np.full(len(ends[0]), n) for n in sent)))
    return {
        key: Arrivals(*(parts[0] if len(parts) == 1 else np.concatenate(parts) for parts in zip(*some, strict=True)))
        for key, some in entries.items()
    }


def _shifted(flow: Flow, index: int, ring: int, team: int) -> tuple[Ints, Ints]:
    """Receivers and senders of what the first rank of a ring and team receives, for all of them: as many steps away."""
    r, c = (x.reshape(-1, 1) for x in np.divmod(np.arange(ring * team), team))

    def moved(indices: Ints) -> Ints:
        u, inner = np.divmod(indices, ring * team)
        ring_rank, team_rank = np.divmod(inner, team)
        return ((u * ring + (ring_rank + r) % ring) * team + (team_rank + c) % team).reshape(-1)

    return moved(np.full(len(flow.sources), index)), moved(np.array(flow.sources, np.int64))


def _before(indices: Ints, team: int) -> Ints:
    """The team's rank before each: gloo and NCCL hand on what an all-gather brings."""
    team_rank = indices % team
    return indices - team_rank + (team_rank - 1) % team


def _block_sources(ring: int, team: int) -> dict[str, Ints]:
    """By inner index, where blocks of the published schedule come from; they go other ways than step by step."""
    routes = [PublishedRoute(Coordinate(ring, team, *divmod(index, team))) for index in range(ring * team)]
    before = np.array([route.previous * team + route.place.team_rank for route in routes])
    placed, fetched = (np.array([getattr(route, name) for route in routes]) for name in ("placed_from", "fetched_from"))
    return {"move": before, "carry": before, "place": placed, "home": fetched}


def _ends(senders: Ints, first: int) -> tuple[Ints, Ints]:
    """Receivers and senders, without those that would receive from themselves."""
    receivers = np.arange(len(senders))
    others = senders != receivers
    return receivers[others] + first, senders[others] + first
