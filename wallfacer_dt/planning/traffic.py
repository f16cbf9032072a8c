"""Who receives what from whom in one call of attention, by transfer; and what of it crosses nodes.

Read off the schedule as for :func:`wallfacer_dt.attention_volume`, but of all ranks; here they meet a placement.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from wallfacer_dt.algorithms.flows import Flows, Shape, everyone
from wallfacer_dt.algorithms.sequences import Sequences
from wallfacer_dt.mesh import RING_AXIS
from wallfacer_dt.planning.candidates import Candidate
from wallfacer_dt.planning.model import ModelShape, SequenceShape

Ints = np.ndarray


class Key(NamedTuple):
    """Which transfers of a call: those of one kind, side and group of heads; see ``algorithms.flows``.

    ``shift``: how far round the ring hops go, under a window not all as far (but for the published schedule's); how far
    round the team what is returned goes.
    """

    backward: bool
    kind: str
    side: str
    group: int
    shift: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Arrivals:
    """What is received in transfers of one kind, over all ranks: one entry for every receiver and sender.

    Groups of heads that are alike have one object.

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
    """One transfer as links see it, at a rank and its node, or at those of some where it is most.

    Attributes:
        nbytes: bytes into one rank.
        near: how many messages from ranks of its own node one rank waits for, one after the other: in a gather, which
            goes round, as many as there are others; what all send at once counts once.
        intra: bytes into one rank from these.
        far: likewise from ranks of other nodes.
        inter: bytes into one rank from these; what a gather brings may enter a node by all of its members there.
        node: bytes into one node from others.
    """

    nbytes: int = 0
    near: int = 0
    intra: int = 0
    far: int = 0
    inter: int = 0
    node: int = 0


def arrivals(candidate: Candidate, model: ModelShape, sequence: SequenceShape) -> dict[Key, Arrivals]:
    """What every rank receives in one call of attention, forward and backward."""
    return one_way(candidate, model, sequence, backward=False) | one_way(candidate, model, sequence, backward=True)


def one_way(candidate: Candidate, model: ModelShape, sequence: SequenceShape, *, backward: bool) -> dict[Key, Arrivals]:
    """The same of the forward, or of the backward, alone."""
    rotate = candidate.rotate if backward else candidate.rotate_forward
    shape = Shape(sequence.batch, model.heads, model.keys, *model.dims)
    return _arrivals(candidate.axes, candidate.schedule, rotate, candidate.order, shape, sequence, backward)


def wires(
    arrived: dict[Key, Arrivals], node: Ints, inner: int = 1, *, siblings: int = 1, striped_gathers: bool = True
) -> list[dict[Key, Wire]]:
    """The same as links see it, by inner index, of so many: at those of its ranks where it is most.

    ``node`` is that of every sequence index, and ``siblings`` how many groups of such ranks share a node's link. For
    gathers see :class:`Cluster`.
    """
    found: list[dict[Key, Wire]] = [{} for _ in range(inner)]
    known: dict[tuple[int, ...], Wire] = {}  # ranks in the middle of a sequence are alike
    alike: dict[Arrivals, list[Wire]] = {}
    for key, some in arrived.items():
        if some not in alike:
            most = _by_inner(key, some, node, inner, striped_gathers)
            most[-1] *= siblings
            alike[some] = [known.setdefault(one, Wire(*one)) for one in map(tuple, most.T.tolist())]
        for mine, wire in zip(found, alike[some], strict=True):
            mine[key] = wire
    return found


def least_wires(
    arrived: dict[Key, Arrivals], node: Ints, inner: int, index: int, *, striped_gathers: bool = True
) -> tuple[dict[Key, Wire], dict[Key, Wire]]:
    """The same at one inner index of so many, and what there is at least of each at all of them."""
    own, least = {}, {}
    alike: dict[Arrivals, tuple[Wire, Wire]] = {}
    for key, some in arrived.items():
        if some not in alike:
            most = _by_inner(key, some, node, inner, striped_gathers)
            alike[some] = Wire(*most[:, index].tolist()), Wire(*most.min(1).tolist())
        own[key], least[key] = alike[some]
    return own, least


def _by_inner(key: Key, some: Arrivals, node: Ints, inner: int, is_striped: bool) -> Ints:
    """(fields, inner): what a :class:`Wire` has."""
    by_rank = _by_rank(some, node, goes_round=key.kind == "gather", is_striped=is_striped)
    return np.stack(by_rank).reshape(len(by_rank), -1, inner).max(1)


def into_ranks(arrived: Iterable[Arrivals], ranks: int) -> Ints:
    """Bytes that every sequence index receives."""
    sums = np.zeros(ranks, np.int64)
    for some, groups in Counter(arrived).items():
        sums += groups * _summed(some.receiver, some.total, ranks)
    return sums


def into_nodes(arrived: Iterable[Arrivals], node: Ints) -> Ints:
    """Bytes that every node receives from others."""
    sums = np.zeros(int(node.max()) + 1, np.int64)
    for some, groups in Counter(arrived).items():
        sums += groups * _summed(node[some.receiver], some.total * _crosses(some, node), len(sums))
    return sums


def _crosses(some: Arrivals, node: Ints) -> Ints:
    return node[some.receiver] != node[some.via]


def _summed(of: Ints, amounts: Ints, size: int) -> Ints:
    sums = np.zeros(size, np.int64)
    np.add.at(sums, of, amounts.astype(np.int64, copy=False))  # of another dtype it takes 36 times as long
    return sums


def _by_rank(some: Arrivals, node: Ints, *, goes_round: bool, is_striped: bool) -> tuple[Ints, ...]:
    """What a :class:`Wire` has, by rank."""
    crosses = _crosses(some, node)

    def by_rank(amounts: Ints) -> Ints:
        return _summed(some.receiver, amounts, len(node))

    def messages(amounts: Ints) -> Ints:
        count = by_rank(amounts)
        return count if goes_round else np.minimum(count, 1)

    nbytes = by_rank(some.nbytes)
    entering = some.nbytes * crosses
    inter = by_rank(entering)
    intra, node_bytes = nbytes - inter, _summed(node, inter, int(node.max()) + 1)[node]
    if goes_round and is_striped:
        together = by_rank(node[some.receiver] == node[some.sender]) + 1
        inter = by_rank(-(-entering // together[some.receiver]))
    return nbytes, messages(~crosses), intra, messages(crosses), inter, node_bytes


@lru_cache(maxsize=16)  # the placements of a candidate come in a row, and arrays of many ranks are large
def _arrivals(
    axes: tuple[int, int, int],
    schedule: str,
    rotate: str,
    order: str,
    shape: Shape,
    sequence: SequenceShape,
    backward: bool,
) -> dict[Key, Arrivals]:
    ring, team = axes[1:]
    sequences = Sequences(sequence.length, sequence.length, order, sequence.mask)
    entries: dict[tuple[str, str, tuple[int, ...], int], list[tuple[Ints, ...]]] = {}
    for flow in Flows(everyone(*axes), shape, sequences, schedule, rotate, backward):
        comes = flow.comes
        if comes.any():
            nbytes = flow.content.nbytes(sequence.dtype)
            receiver, sender, sent = (
                np.broadcast_to(x, comes.shape)[comes] for x in (flow.receiver, flow.sources, nbytes)
            )
            shift = 0
            if flow.axis == RING_AXIS and (schedule != "published" or team == 1):
                shift = int(receiver[0] // team - sender[0] // team) % ring
            elif flow.kind == "return":
                shift = int(sender[0] - receiver[0]) % team
            via = _before(receiver, team) if flow.kind == "gather" else sender
            some = entries.setdefault((flow.kind, flow.side, flow.groups, shift), [])
            some.append((receiver, sender, via, sent, np.full(len(sent), flow.times)))
    found = {}
    for (kind, side, groups, shift), some in entries.items():
        columns = zip(*some, strict=True)
        alike = Arrivals(*(parts[0] if len(parts) == 1 else np.concatenate(parts) for parts in columns))
        found.update({Key(backward, kind, side, group, shift): alike for group in groups})
    return found


def _before(indices: Ints, team: int) -> Ints:
    """The team's rank before each: gloo and NCCL hand on what an all-gather brings."""
    team_rank = indices % team
    return indices - team_rank + (team_rank - 1) % team
