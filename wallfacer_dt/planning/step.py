"""A step of training out of its layers: simulated, and the least that it can take, which is quick to say.

A layer runs as ``layer`` has its events. Beside layers the first one's weights and the last one's gradients are waited
for, a vocabulary's output projection and loss are computed, and weights are updated; what FSDP sends of the projection
counts as a layer's, and what it sends of the embedding not at all.

The loss reads logits twice, its backward once, and writes their gradient. AdamW reads a gradient, and reads and writes
two moments and the weight: 28 bytes, in float32 as well as with master weights beside 16 bits. Without a feed-forward,
where time is that of attention and of what a vocabulary needs, nothing is updated.

Note [Pipelines]
1F1B (Narayanan et al. 2021, section 2.2.1): a microbatch goes through all stages, and the others follow as the slowest
stage lets them, which is the last: it has the output projection. So of p stages and m microbatches it takes
``(p - 1) stage + m slowest``, of like stages a bubble of (p - 1) / m. What is sent between stages is waited for. As
torchtitan's FSDP does beside a pipeline, weights are gathered once, under the first microbatch's forward, and gradients
reduced after the last backward.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import add, attrgetter
from typing import Any

import numpy as np

from wallfacer_dt.planning.candidates import Candidate
from wallfacer_dt.planning.elementwise import norm_bytes
from wallfacer_dt.planning.layer import ELEMENTWISE, Layer, alone
from wallfacer_dt.planning.stack import rank_weights
from wallfacer_dt.planning.timeline import Compute, Event, Timeline, run

_UPDATED = 28
"""Bytes that AdamW reads or writes of a weight."""


@dataclass(frozen=True, slots=True, eq=False)
class OneWay:
    """Attention's forward or backward on the last rank. Equal is only the same object, so that it can be looked up by.

    Attributes:
        line: how it ran alone.
        events: of which.
        rank_bytes: received on the rank that receives most.
        node_bytes: received from other nodes, by the node that receives most.
        hops: by sequence index.
        inner: inner index of that rank; under METP, whose groups of heads may have one each, None.
    """

    line: Timeline
    events: tuple[Event, ...]
    rank_bytes: int
    node_bytes: int
    hops: np.ndarray
    inner: int | None = None


@dataclass(frozen=True, slots=True)
class Spent:
    """Of something that runs.

    Attributes:
        seconds: it takes.
        compute: seconds of computing.
        overlapped: seconds of transfers that are hidden.
        intra: seconds of work of the link within a node.
        inter: likewise between nodes.
        host: seconds in which the host launches it.
        hosted: seconds in which its device waits for that.
    """

    seconds: float = 0.0
    compute: float = 0.0
    overlapped: float = 0.0
    intra: float = 0.0
    inter: float = 0.0
    host: float = 0.0
    hosted: float = 0.0

    @classmethod
    def of(cls, line: Timeline) -> "Spent":
        """What ran, on a device that does not wait for its host."""
        return cls(line.seconds, line.compute, line.overlapped, *line.busy, line.host)

    @classmethod
    def of_many(cls, line: Timeline) -> "Spent":
        """What each takes of many like it in a row, of which the host has to launch all."""
        waits = max(0.0, line.host - line.seconds)
        return replace(cls.of(line), seconds=line.seconds + waits, hosted=waits)

    def __add__(self, other: "Spent") -> "Spent":
        return Spent(*map(add, _amounts(self), _amounts(other)))

    def __rmul__(self, times: int) -> "Spent":
        return Spent(*[times * one for one in _amounts(self)])

    def between(self, other: "Spent") -> "Spent":
        """The least of this and of something that goes on around it, whose waits this may hide."""
        return replace(self + other, seconds=max(self.seconds + other.compute, other.seconds))

    @property
    def least(self) -> float:
        """Seconds below which it cannot go, if what it was added up of had shared links."""
        return max(self.seconds, self.intra, self.inter, self.host)


_amounts = attrgetter(*Spent.__slots__)


def simulated_step(layer: Layer, ways: tuple[OneWay, OneWay]) -> Spent:
    """A step with a layer's attention, forward and backward.

    Args:
        layer: what all layers are.
        ways: of attention.

    Returns:
        What it takes.
    """
    forward, backward = ways
    again = forward if layer.division.context.checkpoint == "full" else None
    alike = _without_attention(layer)
    return _step(
        layer,
        _ends(alike),
        lambda shares: _forward(_without_attention(layer, checkpoint="none"), forward, shares),
        lambda shares: _backward(alike, backward, again, shares),
    )


def beside_attention(layer: Layer) -> dict[str, float]:
    """What a step computes but for attention, under METP with its projections, on the last stage of a pipeline.

    Args:
        layer: what all layers are.

    Returns:
        Seconds of matrix products, of what is elementwise, and of the optimizer.
    """
    division, seconds = layer.division, dict(zip(("products", "elementwise"), _head(layer), strict=True))
    for event in (*layer.forward((), shares_weights=False), *layer.backward((), (), shares_weights=False)):
        if isinstance(event, Compute):
            kind = "elementwise" if event.what == ELEMENTWISE else "products"
            seconds[kind] += layer.model.layers // division.pipeline * event.seconds
    return {kind: division.microbatches * some for kind, some in seconds.items()} | {"optimizer": _update(layer)}


def least_step(layer: Layer, forward: Spent, backward: Spent) -> float:
    """Seconds that no step is below, however transfers of attention and layers get along on the links.

    A layer takes at least what its parts take one after the other, each alone, and what each link has to carry; and no
    less than FSDP's transfers do alone, which begin with it and are waited for at its end.

    Args:
        layer: what all layers are.
        forward: attention's, or what it is at least.
        backward: likewise.

    Returns:
        The seconds.
    """
    again = forward if layer.division.context.checkpoint == "full" else Spent()
    alike = _without_attention(layer)

    def least(attention: Spent, parts: Callable[[Layer], Spent], *shared: str) -> Callable[[bool], Spent]:
        spent = attention + parts(alike)
        beside = _transfers(alike, *shared)
        with_shared = max((spent + replace(beside, seconds=0.0)).least, beside.seconds)
        return lambda shares: Spent(with_shared if shares else spent.least)

    forwards = least(forward, _forward_parts, "weights")
    backwards = least(backward + again, _backward_parts, "replicas", "gradients", "weights")
    return _step(layer, _ends(alike), forwards, backwards).seconds


_OneLayer = Callable[[bool], Spent]
"""What one layer takes, with FSDP's transfers or without."""


def _step(layer: Layer, ends: "_Ends", forward: _OneLayer, backward: _OneLayer) -> Spent:
    division = layer.division
    layers, rounds = layer.model.layers // division.pipeline, division.microbatches
    head, update = _computing(sum(_head(layer))), _computing(_update(layer))
    if division.pipeline == 1:
        return rounds * (ends.weights + layers * (forward(True) + backward(True)) + head + ends.gradients) + update
    # See Note [Pipelines].
    stage = layers * (forward(False) + backward(False)) + 2 * ends.activations
    waits = (division.pipeline - 1) * Spent(stage.seconds)
    gathered = ends.weights.seconds + layers * (forward(True).seconds - forward(False).seconds)
    return rounds * (stage + head) + waits + Spent(gathered) + layers * ends.gradients + update


def _computing(seconds: float) -> Spent:
    return Spent(seconds, seconds)


def _head(layer: Layer) -> tuple[float, float]:
    """Seconds of a vocabulary's output projection, and of the norm before it and the loss."""
    model = layer.model
    if not model.vocab:
        return 0.0, 0.0
    flops = 6 * layer.rows * model.hidden * model.vocab / layer.division.tensor
    loss = 4 * model.vocab * layer.rows * layer.sequence.dtype.itemsize
    both_ways = 2 * norm_bytes(model, layer.sequence, layer.rows)
    return flops / layer.cluster.kernels.linear, layer.touching(both_ways + loss)


def _update(layer: Layer) -> float:
    """Seconds of the optimizer, on the last stage, of which none has more weights."""
    if not layer.model.ffn:
        return 0.0
    weights = rank_weights(layer.division, layer.model, layer.division.pipeline - 1)
    return _UPDATED * weights / layer.cluster.kernels.merge


@dataclass(frozen=True, slots=True)
class _Ends:
    """What is waited for beside layers: a layer's weights, its gradients, and what stages send each other."""

    weights: Spent
    gradients: Spent
    activations: Spent


def _without_attention(layer: Layer, **changes: Any) -> Layer:
    """A layer with all that its own transfers depend on: ranks' numbers, and how what does not divide is dealt out."""
    context = layer.division.context
    if layer.sequence.length % context.size == layer.model.ffn % context.size == 0:
        ring = Candidate(context.size, **context.layers)
    else:
        ring = replace(context, placement="team_in_node", rotate="kv", rotate_forward="kv")
    return replace(layer, division=replace(layer.division, context=replace(ring, **changes), microbatches=1))


def _ends(layer: Layer) -> _Ends:
    # The last reduce-scatter while replicas reduce what the one before has left, then the same of the last.
    together = ("replicas", "gradients") if layer.division.pipeline == 1 else ("gradients",)
    last = _transfers(layer, *together) + _transfers(layer, "replicas")
    return _Ends(_transfers(layer, "weights"), last, _transfers(layer, "activations"))


@lru_cache(maxsize=64)
def _forward(layer: Layer, way: OneWay, shares_weights: bool) -> Spent:
    return Spent.of_many(run(layer.forward(way.events, shares_weights=shares_weights), layer.cluster))


@lru_cache(maxsize=64)
def _backward(layer: Layer, way: OneWay, again: OneWay | None, shares_weights: bool) -> Spent:
    repeated = () if again is None else again.events
    return Spent.of_many(run(layer.backward(way.events, repeated, shares_weights=shares_weights), layer.cluster))


@lru_cache(maxsize=256)
def _forward_parts(layer: Layer) -> Spent:
    """A forward without attention and without FSDP's transfers."""
    return Spent.of(run(layer.forward((), shares_weights=False), layer.cluster))


@lru_cache(maxsize=256)
def _backward_parts(layer: Layer) -> Spent:
    return Spent.of(run(layer.backward((), (), shares_weights=False), layer.cluster))


@lru_cache(maxsize=256)
def _transfers(layer: Layer, *names: str) -> Spent:
    """A layer's own transfers, by name, alone: begun together, and waited for."""
    return Spent.of(run(alone(*((name, getattr(layer, name)) for name in names)), layer.cluster))
