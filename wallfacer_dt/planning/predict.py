"""What a candidate costs: bytes, time and memory, predicted on the host."""

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from wallfacer_dt.algorithms.metp_volume import feed_forward_volume
from wallfacer_dt.planning.attention import attention_events, head_patterns
from wallfacer_dt.planning.candidates import Candidate, node_of
from wallfacer_dt.planning.cluster import Cluster
from wallfacer_dt.planning.model import ModelShape, SequenceShape
from wallfacer_dt.planning.timeline import Timeline, run
from wallfacer_dt.planning.traffic import into_nodes, into_ranks, one_way, wires


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a training step costs, all layers, forward and backward.

    Attributes:
        seconds: it takes.
        compute: seconds of these in which a rank computes.
        exposed: seconds in which it waits for others, or copies what comes.
        overlapped: seconds of transfers hidden behind these two.
        rank_bytes: received by attention on the rank that receives most, and by METP's feed-forward.
        node_bytes: the same into the node that receives most from other nodes, attention's only.
        hops: transfers that one rank's blocks take in one call of attention, forward and backward, of all head groups.
        memory: the most bytes a rank holds; 0 before anyone has asked, which takes longest.
    """

    seconds: float
    compute: float
    exposed: float
    overlapped: float
    rank_bytes: int
    node_bytes: int
    hops: int
    memory: int = 0


@dataclass(frozen=True, slots=True)
class AttentionCost:
    """Attention of one layer: its two timelines, and what they move."""

    forward: Timeline
    backward: Timeline
    rank_bytes: tuple[int, ...]
    node_bytes: tuple[int, ...]
    hops: int


def attention_cost(candidate: Candidate, model: ModelShape, sequence: SequenceShape, cluster: Cluster) -> AttentionCost:
    """Predict one call of attention.

    Args:
        candidate: how ranks share the sequence.
        model: whose heads.
        sequence: what is attended.
        cluster: where.

    Returns:
        Its cost.
    """
    # What moves the other way does not matter to either.
    forward = _one_way(replace(candidate, rotate="kv"), model, sequence, cluster, False)
    backward = _one_way(replace(candidate, rotate_forward="kv"), model, sequence, cluster, True)
    return AttentionCost(
        forward.line,
        backward.line,
        (forward.rank_bytes, backward.rank_bytes),
        (forward.node_bytes, backward.node_bytes),
        int((forward.hops + backward.hops).max()),
    )


@dataclass(frozen=True, slots=True)
class _OneWay:
    """A forward or a backward; hops are by sequence index."""

    line: Timeline
    rank_bytes: int
    node_bytes: int
    hops: np.ndarray


@lru_cache(maxsize=8)  # what differs in one way only comes in a row
def _one_way(
    candidate: Candidate, model: ModelShape, sequence: SequenceShape, cluster: Cluster, backward: bool
) -> _OneWay:
    arrived = one_way(candidate, model, sequence, backward=backward)
    node = node_of(candidate, cluster.ranks_per_node)
    on_wires = wires(arrived, node, striped_gathers=cluster.striped_gathers)
    # Ranks with other heads wait for each other: the slowest counts.
    by_heads = [
        run(attention_events(candidate, model, sequence, cluster.kernels, on_wires, heads, backward=backward), cluster)
        for heads in head_patterns(candidate, model)
    ]
    hops = np.zeros(candidate.size, np.int64)
    for key, some in arrived.items():
        if key.kind in ("move", "place"):
            np.add.at(hops, some.receiver, some.times)
    hops.flags.writeable = False
    return _OneWay(
        max(by_heads, key=lambda line: line.seconds),
        int(into_ranks(arrived.values(), candidate.size).max()),
        int(into_nodes(arrived.values(), node).max()),
        hops,
    )


def predict(
    candidate: Candidate, model: ModelShape, sequence: SequenceShape, cluster: Cluster, cost: AttentionCost
) -> Prediction:
    """Predict a step, but for its memory, which is :func:`stack_memory`'s.

    With a feed-forward, layers have projections, too, whose weights FSDP or METP shards over all ranks: a layer's
    weights and gradients travel while it computes, and what is longer than that is exposed.

    Args:
        candidate: attention and layers.
        model: sizes.
        sequence: what a step takes.
        cluster: where.
        cost: of the candidate's attention.

    Returns:
        The prediction.
    """
    # Computed again under a full checkpoint: attention's forward, with all that it sends.
    forwards = 2 if candidate.checkpoint == "full" else 1
    times = (forwards, 1)
    lines = [cost.forward, cost.backward]
    layer = _Layer.of(candidate, model, sequence, cluster)
    sums = {
        name: sum(n * getattr(line, name) for n, line in zip(times, lines, strict=True))
        for name in ("compute", "exposed", "overlapped")
    }
    layers = model.layers
    rank_bytes = sum(n * nbytes for n, nbytes in zip(times, cost.rank_bytes, strict=True)) + layer.metp_bytes
    node_bytes = sum(n * nbytes for n, nbytes in zip(times, cost.node_bytes, strict=True))
    compute, exposed = sums["compute"] + layer.compute, sums["exposed"] + layer.exposed
    tokens = sequence.batch * -(-sequence.length // candidate.size)
    logits = 6 * tokens * model.hidden * model.vocab / cluster.kernels.linear
    return Prediction(
        layers * (compute + exposed) + logits,
        layers * compute + logits,
        layers * exposed,
        layers * (sums["overlapped"] + layer.overlapped),
        layers * rank_bytes,
        layers * node_bytes,
        cost.hops,
    )


@dataclass(frozen=True, slots=True)
class _Layer:
    """What a layer costs beside attention."""

    compute: float = 0.0
    exposed: float = 0.0
    overlapped: float = 0.0
    metp_bytes: int = 0

    @classmethod
    def of(cls, candidate: Candidate, model: ModelShape, sequence: SequenceShape, cluster: Cluster) -> "_Layer":
        if not model.ffn:
            return cls()
        tokens = sequence.batch * -(-sequence.length // candidate.size)
        passes = 3 if candidate.checkpoint == "none" else 4
        # METP's backward computes hidden units anew, checkpoint or not: all projections but the last.
        again = (2 / 3 if model.gated else 1 / 2) if candidate.feed_forward == "metp" else 0
        flops = 2 * tokens * (passes * model.attention_weights + (passes + again) * model.ffn_weights)
        compute = flops / cluster.kernels.linear
        # Weights come for the forward and again for the backward, from which gradients go.
        sent = 3 * model.attention_weights * sequence.dtype.itemsize
        metp_bytes = 0
        if candidate.feed_forward == "metp":
            volumes = feed_forward_volume(
                candidate.axes, model_dim=model.hidden, hidden=model.ffn, dtype=sequence.dtype, gated=model.gated
            )
            metp_bytes = volumes[0].bytes * (passes - 2) + volumes[1].bytes
        else:
            sent += 3 * model.ffn_weights * sequence.dtype.itemsize
        received = sent * (candidate.size - 1) // candidate.size + metp_bytes
        seconds = _round_all(received, candidate.size, cluster)
        return cls(compute, max(0.0, seconds - compute), min(seconds, compute), metp_bytes)


def _round_all(nbytes: int, ranks: int, cluster: Cluster) -> float:
    """Seconds in which every rank receives so much, thrice round a ring of all; between nodes over all interfaces."""
    if not nbytes:
        return 0.0
    used = [cluster.intra] * (cluster.ranks_per_node > 1) + [cluster.inter] * (cluster.nodes > 1)
    return max(3 * (ranks - 1) * link.latency + nbytes / link.bandwidth for link in used)
