"""What a candidate costs: bytes, time and memory, predicted on the host."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import mul
from typing import Any, NamedTuple

import numpy as np

from wallfacer_dt.algorithms.metp_volume import feed_forward_volume
from wallfacer_dt.planning.attention import (
    Groups,
    attention_events,
    head_patterns,
    least_seconds,
    programs_of,
    runs_together,
)
from wallfacer_dt.planning.candidates import Candidate, node_of
from wallfacer_dt.planning.cluster import Cluster, Kernels
from wallfacer_dt.planning.division import Division
from wallfacer_dt.planning.layer import Layer
from wallfacer_dt.planning.model import ModelShape, SequenceShape, kinds_of_layers, layers_of_stage, mean_of_layers
from wallfacer_dt.planning.projections import Heads, ProjectedAttention
from wallfacer_dt.planning.step import OneWay, Spent, simulated_step
from wallfacer_dt.planning.timeline import Event, Lag, Timeline, last_of, launches, run, work
from wallfacer_dt.planning.traffic import Arrivals, Key, into_nodes, into_ranks, least_wires, one_way, wires


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a training step costs, all layers, forward and backward.

    Attributes:
        seconds: it takes.
        compute: seconds of these in which a rank computes.
        exposed: seconds in which it waits for others or its host, or copies what comes; a pipeline's bubble among them.
        overlapped: seconds of transfers hidden behind these two.
        rank_bytes: received by attention on the rank that receives most, weights and gradients under METP among it, and
            by METP's feed-forward.
        node_bytes: the same into the node that receives most from other nodes, of queries, keys and values only.
        hops: transfers that one rank's blocks take in one call of attention, forward and backward, of all head groups;
            the most of any layer.
        memory: the most bytes a rank holds; 0 before anyone has asked, which takes longest.
        host: seconds in which a rank's device waits for its host to launch attention and METP.
        pipeline_rank: the slowest of a pipeline, of which this is said.
    """

    seconds: float
    compute: float
    exposed: float
    overlapped: float
    rank_bytes: int
    node_bytes: int
    hops: int
    memory: int = 0
    host: float = 0.0
    pipeline_rank: int = 0

    @property
    def waiting(self) -> str:
        """How much of the step is waiting, in words; and for whom, where most of it is for the host."""
        said = f"{self.exposed / self.seconds if self.seconds else 0.0:.0%} of the step is waiting"
        return said + ", most for the host" * (self.host > 0.5 * self.exposed)


@dataclass(frozen=True, slots=True)
class AttentionCost:
    """Attention of one layer, under METP with its projections: its two ways."""

    ways: tuple[OneWay, OneWay]

    @property
    def forward(self) -> Timeline:
        """The forward alone on its links."""
        return self.ways[0].line

    @property
    def backward(self) -> Timeline:
        """The backward, likewise."""
        return self.ways[1].line

    @property
    def seconds(self) -> float:
        """Of both, one layer after the other: each as long as its device takes, or its host."""
        return sum(Spent.of_many(way.line).seconds for way in self.ways)

    @property
    def exposed(self) -> float:
        """Seconds of these in which nothing is computed."""
        return self.seconds - sum(way.line.compute for way in self.ways)

    @property
    def rank_bytes(self) -> tuple[int, int]:
        """Received on the rank that receives most, forward and backward."""
        return self.ways[0].rank_bytes, self.ways[1].rank_bytes

    @property
    def node_bytes(self) -> tuple[int, int]:
        """Received from other nodes, likewise."""
        return self.ways[0].node_bytes, self.ways[1].node_bytes

    @property
    def hops(self) -> int:
        """Transfers that one rank's blocks take, of both."""
        return int((self.ways[0].hops + self.ways[1].hops).max())


def attention_cost(
    candidate: Candidate,
    model: ModelShape,
    sequence: SequenceShape,
    cluster: Cluster,
    *,
    siblings: int = 1,
    together: bool = True,
) -> AttentionCost:
    """Predict one call of attention.

    Args:
        candidate: how ranks share the sequence.
        model: whose heads.
        sequence: what is attended.
        cluster: where.
        siblings: how many groups of such ranks share a node's link, each with heads or sequences of its own.
        together: run ranks together that wait for each other by turns; one alone is sooner told.

    Returns:
        Its cost.
    """
    together = together and runs_together(candidate, sequence)
    forward, backward = (
        _one_way(kind, model, sequence, cluster, siblings, together, bool(way))
        for way, kind in enumerate(_of_ways(candidate))
    )
    return AttentionCost((forward, backward))


def attention_costs(
    candidate: Candidate, model: ModelShape, sequence: SequenceShape, cluster: Cluster, **told: Any
) -> tuple[AttentionCost, ...]:
    """:func:`attention_cost` of a call in each of a model's :func:`kinds_of_layers`."""
    return tuple(attention_cost(candidate, model, one, cluster, **told) for _, one in kinds_of_layers(model, sequence))


def mean_spent(
    model: ModelShape, sequence: SequenceShape, costs: Iterable[AttentionCost], own: int | None = None
) -> tuple[Spent, Spent]:
    """What a layer's attention takes alone, forward and backward, in the mean of all layers, or of a stage's own."""
    ways = zip(*[[Spent.of(way.line) for way in cost.ways] for cost in costs], strict=True)
    forward, backward = (mean_of_layers(model, sequence, way, own) for way in ways)
    return forward, backward


def _of_ways(candidate: Candidate) -> tuple[Candidate, Candidate]:
    """A candidate for the forward and for the backward: what moves the other way does not matter, nor do layers."""
    alike = replace(candidate, feed_forward="plain", checkpoint="none")
    return replace(alike, rotate="kv"), replace(alike, rotate_forward="kv")


def least_computing(
    alike: Sequence[Candidate], model: ModelShape, sequence: SequenceShape, kernels: Kernels, *, together: bool = True
) -> list[Spent]:
    """What attention takes at least, forward and backward: what it computes, and launches, in the mean of all layers.

    Args:
        alike: attentions that differ in placement and rotations.
        model: whose layers.
        sequence: what is attended.
        kernels: rates.
        together: as of :func:`attention_cost`.

    Returns:
        The seconds.
    """
    of_kinds = [
        _least_computing(alike, model, one, kernels, together=together) for _, one in kinds_of_layers(model, sequence)
    ]
    return [mean_of_layers(model, sequence, way) for way in zip(*of_kinds, strict=True)]


def _least_computing(
    alike: Sequence[Candidate], model: ModelShape, sequence: SequenceShape, kernels: Kernels, *, together: bool
) -> list[Spent]:
    ways = []
    for backward, kinds in enumerate(zip(*map(_of_ways, alike), strict=True)):
        unlike = {replace(one, placement=alike[0].placement) for one in kinds}
        way = {"backward": bool(backward), "together": together}
        some = [least_seconds(one, model, sequence, kernels, **way) for one in unlike]
        seconds, host = map(min, zip(*some, strict=True))
        ways.append(Spent(seconds, seconds, host=host))
    return ways


class LeastAttention(NamedTuple):
    """What a call of attention takes at least, and what it receives, forward and backward.

    Attributes:
        spent: what it takes, or no more than that.
        rank_bytes: received on the rank that receives most.
        node_bytes: received from other nodes, by the node that receives most.
        cost: where it is exact, all of it.
    """

    spent: tuple[Spent, ...]
    rank_bytes: tuple[int, ...]
    node_bytes: tuple[int, ...]
    cost: AttentionCost | None = None


def least_attention(
    candidate: Candidate, model: ModelShape, sequence: SequenceShape, cluster: Cluster
) -> LeastAttention:
    """What :func:`attention_cost` has attention take at least, whichever rank is through last; sooner told.

    Args:
        candidate: without METP.
        model: whose heads.
        sequence: what is attended.
        cluster: where.

    Returns:
        What it takes; exactly where no ranks are run together.
    """
    if not runs_together(candidate, sequence):
        cost = attention_cost(candidate, model, sequence, cluster)
        return LeastAttention(tuple(Spent.of(way.line) for way in cost.ways), cost.rank_bytes, cost.node_bytes, cost)
    ways = [_least(kind, model, sequence, cluster, bool(way)) for way, kind in enumerate(_of_ways(candidate))]
    spent, rank_bytes, node_bytes = zip(*ways, strict=True)
    return LeastAttention(spent, rank_bytes, node_bytes)


@lru_cache(maxsize=16)  # as of what is run below
def _least(
    candidate: Candidate, model: ModelShape, sequence: SequenceShape, cluster: Cluster, backward: bool
) -> tuple[Spent, int, int]:
    """Of any pattern of heads: of a rank with much to do its time, and of links the work that there is on all ranks."""
    arrived = one_way(candidate, model, sequence, backward=backward)
    node, inner = node_of(candidate, cluster.ranks_per_node), candidate.ring * candidate.team
    ((index, program),) = programs_of(candidate, sequence, together=False, backward=backward).items()
    own, least = least_wires(arrived, node, inner, index, striped_gathers=cluster.striped_gathers)
    seconds, hosts, works = [], [], []
    for heads in head_patterns(candidate, model):
        told = candidate, model, sequence, cluster.kernels
        events = attention_events(program, *told, own, heads, backward=backward)
        line = run(events, cluster, shares_links=False)
        seconds.append(line.seconds)
        hosts.append(line.host)
        works.append(work(attention_events(program, *told, least, heads, backward=backward), cluster))
    intra, inter = map(min, zip(*works, strict=True))
    return Spent(max(seconds), intra=intra, inter=inter, host=max(hosts)), *_received(arrived, candidate.size, node)


def least_node_bytes(some: Iterable[Candidate], model: ModelShape, sequence: SequenceShape, cluster: Cluster) -> int:
    """Received in a step by the node that receives most, both ways, no more than of any candidate."""
    some = list(some)
    return sum(
        layers * _least_node_bytes(some, model, one, cluster) for layers, one in kinds_of_layers(model, sequence)
    )


def _least_node_bytes(some: Sequence[Candidate], model: ModelShape, sequence: SequenceShape, cluster: Cluster) -> int:
    least: tuple[list[int], list[int]] = ([], [])
    for way, kind in dict.fromkeys((way, kind) for one in some for way, kind in enumerate(_of_ways(one))):
        arrived = one_way(kind, model, sequence, backward=bool(way)).values()
        least[way].append(int(into_nodes(arrived, node_of(kind, cluster.ranks_per_node)).max()))
    return sum(map(min, least))


def _received(arrived: Mapping[Key, Arrivals], ranks: int, node: np.ndarray) -> tuple[int, int]:
    """Bytes, by the rank and by the node that receive most."""
    return int(into_ranks(arrived.values(), ranks).max()), int(into_nodes(arrived.values(), node).max())


@lru_cache(maxsize=16)  # what differs in one way only comes in a row, of each kind of layers
def _one_way(
    candidate: Candidate, model: ModelShape, sequence: SequenceShape, cluster: Cluster, siblings: int, together: bool,
    backward: bool,
) -> OneWay:  # fmt: skip
    if candidate.projections == "metp":
        return _by_groups(candidate, model, sequence, cluster, siblings, together, backward)
    arrived = one_way(candidate, model, sequence, backward=backward)
    node = node_of(candidate, cluster.ranks_per_node)
    programs = programs_of(candidate, sequence, together=together, backward=backward)
    indices = [*programs]
    on_wires = wires(arrived, node, len(indices), siblings=siblings, striped_gathers=cluster.striped_gathers)

    def of_heads(heads: Groups) -> tuple[Timeline, int, list[Event], int]:
        ranks = [
            [*attention_events(program, candidate, model, sequence, cluster.kernels, mine, heads, backward=backward)]
            for program, mine in zip(programs.values(), on_wires, strict=True)
        ]
        last, events = last_of(ranks, cluster) if len(ranks) > 1 else (0, ranks[0])
        return run(events, cluster), indices[last], events, max(sum(map(launches, events)) for events in ranks)

    # Ranks wait for each other: the slowest device counts, and the slowest host, which may be another rank's.
    patterns = [*map(of_heads, head_patterns(candidate, model))]
    line, inner, events, _ = max(patterns, key=lambda one: one[0].seconds)
    lag = max(most for *_, most in patterns) - sum(map(launches, events))
    if lag:
        events.insert(0, Lag(lag))
        line.host += cluster.kernels.launch * lag
    hops = np.zeros(candidate.size, np.int64)
    for key, some in arrived.items():
        if key.kind in ("move", "place"):
            np.add.at(hops, some.receiver, some.times)
    hops.flags.writeable = False
    rank_bytes, node_bytes = _received(arrived, candidate.size, node)
    return OneWay(line, tuple(events), rank_bytes, siblings * node_bytes, hops, inner)


def _by_groups(
    candidate: Candidate, model: ModelShape, sequence: SequenceShape, cluster: Cluster, siblings: int, together: bool,
    backward: bool,
) -> OneWay:  # fmt: skip
    """METP's attention, of whose groups of heads only some are unlike."""
    alike, node = replace(candidate, projections="plain"), node_of(candidate, cluster.ranks_per_node)
    projected = ProjectedAttention(candidate, model, sequence, cluster)
    rank_bytes = projected.received(backward=backward)
    node_bytes, hops = np.zeros(int(node.max()) + 1, np.int64), np.zeros(candidate.size, np.int64)
    inner: dict[Heads, OneWay] = {}
    for heads, times in Counter(group.heads.counts for group in projected.groups).items():
        some = replace(model, heads=heads[0], kv_heads=heads[1])
        inner[heads] = _one_way(alike, some, sequence, cluster, siblings, together, backward)
        arrived = one_way(alike, some, sequence, backward=backward).values()
        rank_bytes += times * into_ranks(arrived, candidate.size)
        node_bytes += times * into_nodes(arrived, node)
        hops += times * inner[heads].hops
    hops.flags.writeable = False
    events = tuple(projected.events(lambda heads: inner[heads].events, backward=backward))
    most = int(rank_bytes.max()), siblings * int(node_bytes.max())
    return OneWay(run(events, cluster), events, *most, hops)


def least_projections(
    candidate: Candidate, model: ModelShape, sequence: SequenceShape, cluster: Cluster
) -> tuple[Spent, Spent]:
    """What METP's attention takes if attention itself takes no time, forward and backward."""
    kept = replace(candidate, placement="team_in_node", schedule="2d", rotate="kv", rotate_forward="kv")
    return _least_projections(replace(kept, feed_forward="plain", checkpoint="none"), model, sequence, cluster)


@lru_cache(maxsize=64)
def _least_projections(
    candidate: Candidate, model: ModelShape, sequence: SequenceShape, cluster: Cluster
) -> tuple[Spent, Spent]:
    projected = ProjectedAttention(candidate, model, sequence, cluster)
    forward, backward = (
        run(projected.events(lambda _: (), backward=way), cluster, shares_links=False) for way in (False, True)
    )
    return Spent.of(forward), Spent.of(backward)


def predict(
    candidate: Candidate, model: ModelShape, sequence: SequenceShape, cluster: Cluster, *costs: AttentionCost
) -> Prediction:
    """:func:`predict_division` where all ranks share each sequence.

    Args:
        candidate: attention and layers.
        model: sizes.
        sequence: what a step takes.
        cluster: where.
        *costs: of the candidate's attention, as :func:`attention_costs` has them.

    Returns:
        The prediction.
    """
    return predict_division(Division(candidate, microbatch=sequence.batch), model, sequence, cluster, *costs)


def predict_division(
    division: Division, model: ModelShape, sequence: SequenceShape, cluster: Cluster, *costs: AttentionCost
) -> Prediction:
    """Predict a step, but for its memory, which is :func:`division_memory`'s.

    Where some layers alone have a window it is the mean of a step in which none has it and of one in which all have,
    by how many have: as if a layer of each kind were where any is; of a pipeline's ranks on the one that has most
    layers, and most of these without, where they are dealt out as evenly as can be.

    Args:
        division: of the cluster's ranks.
        model: sizes.
        sequence: what a context group takes at a time.
        cluster: where.
        *costs: of the context ranks' attention, with a tensor rank's heads, as :func:`attention_costs` has them.

    Returns:
        The prediction.
    """
    layer = Layer(division, model, sequence, cluster)
    steps, own = [simulated_step(layer, cost.ways) for cost in costs], max(division.rank_layers(model))
    slow = {rank: mean_of_layers(model, sequence, [one[rank] for one in steps], own) for rank in steps[0]}
    slowest = max(slow, key=lambda rank: slow[rank].seconds)
    step = slow[slowest]
    rank_bytes, node_bytes = step_bytes(division, model, sequence, *costs)
    return Prediction(
        step.seconds,
        step.compute,
        step.seconds - step.compute,
        step.overlapped,
        rank_bytes,
        node_bytes,
        max(cost.hops for cost in costs),
        host=step.hosted,
        pipeline_rank=slowest,
    )


def step_bytes(
    division: Division, model: ModelShape, sequence: SequenceShape, *costs: AttentionCost | LeastAttention
) -> tuple[int, int]:
    """A :class:`Prediction`'s ``rank_bytes`` and ``node_bytes``, which are quick to say.

    Under METP's attention ``costs`` may be of plain projections: a rank then receives at least what is said of it.
    """
    received = [received_bytes(division.context, cost) for cost in costs]
    own = max(division.rank_layers(model))
    layers = layers_of_stage(model, sequence, own)
    rank_bytes, node_bytes = (
        division.microbatches * sum(map(mul, layers, some)) for some in zip(*received, strict=True)
    )
    calls = division.microbatches * own
    return rank_bytes + calls * _feed_forward_bytes(division.context, model, sequence), node_bytes


def received_bytes(candidate: Candidate, cost: AttentionCost | LeastAttention) -> tuple[int, int]:
    """By attention in a layer, into a rank and into a node; a full checkpoint runs its forward once more."""
    forwards = 2 if candidate.checkpoint == "full" else 1
    rank_bytes, node_bytes = (forwards * some[0] + some[1] for some in (cost.rank_bytes, cost.node_bytes))
    return rank_bytes, node_bytes


def _feed_forward_bytes(candidate: Candidate, model: ModelShape, sequence: SequenceShape) -> int:
    """Received of METP's weights and gradients in a layer; a checkpoint has them come once more."""
    if candidate.feed_forward != "metp":
        return 0
    forward, backward = _feed_forward_volume(
        candidate.axes, model_dim=model.hidden, hidden=model.ffn, dtype=sequence.dtype, gated=model.gated
    )
    return forward.bytes * (1 if candidate.checkpoint == "none" else 2) + backward.bytes


_feed_forward_volume = lru_cache(maxsize=64)(feed_forward_volume)  # those of one mesh come in a row
