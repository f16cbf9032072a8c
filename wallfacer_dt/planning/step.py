"""A step of training out of its layers: simulated, and the least that it can take, which is quick to say.

A layer runs as ``layer`` has its events. Beside layers the first weights (the embedding's, then a layer's) and the last
gradients are waited for, a vocabulary's output projection and loss are computed, and weights are updated.

The loss reads logits twice, its backward once, and writes their gradient, as where it is compiled, which makes them
float32 on the way. The embedding reads and writes a row of a token; its backward reads a gradient's and adds it to a
weight's, all of which begin as zeros. Clipping reads gradients for their norm, and reads and writes them
(``torch.nn.utils.clip_grad_norm_``). AdamW reads a gradient, and reads and writes two moments and the weight: 28 bytes,
in float32 as well as with master weights beside 16 bits, and 56 in float64. Without a feed-forward, where time is that
of attention and of what a vocabulary needs, there are no weights.

Note [Pipelines]
1F1B (Narayanan et al. 2021, section 2.2.1): a microbatch goes through all stages, and the others follow as the slowest
stage lets them: the last, which has the output projection, or the first of those that have most layers, or, where a
model's first layers have no experts, most with as many of these. So m microbatches take all stages once, and the
slowest m - 1 times more: of p like stages a bubble of (p - 1) / m. Where a rank has v stages (section 2.2.2) others
wait for one of them: the bubble is (p - 1) / (v m), and of unlike stages about as much. What is sent between stages is
waited for. As torchtitan's FSDP does beside a pipeline, weights are gathered once, under the first microbatch's
forward, and gradients reduced after the last backward.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from operator import add, attrgetter
from typing import Any, NamedTuple

import numpy as np

from wallfacer_dt.kernels.merge import accumulation_dtype
from wallfacer_dt.planning.candidates import Candidate
from wallfacer_dt.planning.division import Division
from wallfacer_dt.planning.elementwise import norm_bytes
from wallfacer_dt.planning.fsdp import Sent, added_up, copied_in, copied_out, sent_around, sent_beside
from wallfacer_dt.planning.layer import COPIES, ELEMENTWISE, Layer, alone
from wallfacer_dt.planning.model import Kinds, LayerKind
from wallfacer_dt.planning.stack import rank_weights
from wallfacer_dt.planning.timeline import Compute, Event, Timeline, run

_UPDATED, _CLIPPED = 7, 3
"""Elements that AdamW reads or writes of a weight, in the accumulation dtype; and clipping, of its gradient."""


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

    def __rmul__(self, times: float) -> "Spent":
        return Spent(*[times * one for one in _amounts(self)])

    def between(self, other: "Spent") -> "Spent":
        """The least of this and of something that goes on around it, whose waits this may hide."""
        return replace(self + other, seconds=max(self.seconds + other.compute, other.seconds))

    @property
    def least(self) -> float:
        """Seconds below which it cannot go, if what it was added up of had shared links."""
        return max(self.seconds, self.intra, self.inter, self.host)


_amounts = attrgetter(*Spent.__slots__)


def simulated_step(layer: Layer, ways: tuple[OneWay, OneWay]) -> dict[int, Spent]:
    """A step with a layer's attention, forward and backward.

    Args:
        layer: what all layers are.
        ways: of attention.

    Returns:
        What it takes; in a pipeline if a rank is the slowest, by those that may be.
    """
    forward, backward = ways
    again = forward if layer.division.context.checkpoint == "full" else None
    alike, unrepeated = _without_attention(layer), _without_attention(layer, checkpoint="none")
    return _steps(
        layer,
        _ends(alike),
        lambda sent: _forward(unrepeated, forward, sent),
        lambda sent: _backward(alike, backward, again, sent),
    )


def beside_attention(layer: Layer, rank: int = -1) -> dict[str, float]:
    """What a step computes but for attention, under METP with its projections, on a rank of a pipeline.

    Args:
        layer: what all layers are.
        rank: which, by default the last.

    Returns:
        Seconds of matrix products, of what is elementwise, of copies, and of the optimizer.
    """
    division = layer.division
    is_last = rank % division.pipeline == division.pipeline - 1
    products, elementwise, copies = _vocabulary(layer) if is_last else (0.0, 0.0, 0.0)
    seconds = {"products": products, "elementwise": elementwise, "copies": copies}
    kinds = {ELEMENTWISE: "elementwise", COPIES: "copies"}
    for kind, layers in division.rank_kinds(layer.model)[rank]:
        one = layer.of(kind)
        for event in (*one.forward(()), *one.backward((), ())):
            if isinstance(event, Compute):
                seconds[kinds.get(event.what, "products")] += layers * event.seconds
    every = {kind: division.microbatches * some for kind, some in seconds.items()}
    copies, update = _once(layer)
    return every | {"copies": every["copies"] + copies, "optimizer": update}


def by_kind(layer: Layer, compute: float, rank: int = -1) -> dict[str, float]:
    """All that a pipeline's rank computes in a step, of which this is the sum: attention, and what is beside it."""
    beside = beside_attention(layer, rank)
    return {"attention": compute - sum(beside.values())} | beside


def least_step(layer: Layer, forward: Spent, backward: Spent) -> float:
    """Seconds that no step is below, however transfers of attention and layers get along on the links.

    A layer takes at least what its parts take one after the other, each alone, and what each link has to carry; and no
    less than FSDP's transfers do alone, which begin with it and are waited for at its end. But what FSDP sends may also
    put off a transfer of a ring, so that it shares the link with others for less of the time from then on: by that a
    few steps, of small layers under METP, were seen to be up to 0.25% shorter.

    Args:
        layer: what all layers are.
        forward: attention's, or what it is at least.
        backward: likewise.

    Returns:
        The seconds.
    """
    beside = _beside(_without_attention(layer))
    return max(step.seconds for step in _least_steps(layer, beside, forward, backward).values())


def least_of_stages(layer: Layer, attention: Callable[[int], tuple[Spent, Spent]]) -> Iterator[tuple[float, int]]:
    """:func:`least_step` by how many layers less a pipeline's last stage has, whatever was said of that.

    They end where ranks with most layers take longer than a step of what was before: more layers less there would give
    them no fewer.

    Args:
        layer: what all layers are.
        attention: as of :func:`least_step`, of a rank with so many layers.

    Yields:
        The seconds, and how many.
    """
    least, beside = float("inf"), _beside(_without_attention(layer))
    for less in range(layer.model.layers):
        division = replace(layer.division, last_less=less)
        if less and (division.pipeline == 1 or min(division.stage_layers(layer.model)) < 1):
            return
        spent = attention(max(division.rank_layers(layer.model)))
        steps = _least_steps(replace(layer, division=division), beside, *spent)
        seconds = max(step.seconds for step in steps.values())
        least = min(least, seconds)
        yield seconds, less
        if any(step.seconds > least for rank, step in steps.items() if rank != division.pipeline - 1):
            return


def _least_steps(layer: Layer, beside: "_Beside", forward: Spent, backward: Spent) -> dict[int, Spent]:
    again = forward if layer.division.context.checkpoint == "full" else Spent()

    def least(attention: Spent, others: Mapping[LayerKind, Spent]) -> _OneLayer:
        every = {kind: attention + spent for kind, spent in others.items()}

        def with_sent(sent: Sent) -> Spent:
            transfers = beside.transfers(sent)
            return Spent(max((every[sent.beside] + replace(transfers, seconds=0.0)).least, transfers.seconds))

        return with_sent

    return _steps(layer, beside.ends, least(forward, beside.forward), least(backward + again, beside.backward))


_OneLayer = Callable[[Sent], Spent]
"""What one layer takes while this is sent."""


def _steps(layer: Layer, ends: "_Ends", forward: _OneLayer, backward: _OneLayer) -> dict[int, Spent]:
    """Of the ranks of a pipeline that may be the slowest; without one of rank 0."""
    division = layer.division
    rounds = division.microbatches
    products, *beside_it = _vocabulary(layer)
    head, once = _computing(products + sum(beside_it)) + ends.vocabulary, _computing(sum(_once(layer)))
    kinds = division.rank_kinds(layer.model)
    if division.pipeline == 1:
        ways = zip((forward, backward), _sent_beside(layer, kinds[0]), strict=True)
        every = sum((times * way(sent) for way, some in ways for sent, times in some.items()), Spent())
        waits = Spent(max(0.0, ends.again - 2 / 3 * products))
        return {0: rounds * (ends.weights + every + head + waits + ends.gradients) + once}
    # See Note [Pipelines].
    still: dict[LayerKind, Spent] = {kind: forward(Sent(beside=kind)) for kind, _ in layer.model.kinds}
    one = {kind: spent + backward(Sent(beside=kind)) for kind, spent in still.items()}
    last, fullest = division.pipeline - 1, division.fullest_ranks(layer.model)

    def of_layers(some: Mapping[LayerKind, Spent], rank: int) -> Spent:
        return sum((own * some[kind] for kind, own in kinds[rank]), Spent())

    def gathered(rank: int) -> float:
        (first, _), *_ = kinds[rank]
        return ends.layer_weights[first].seconds + sum(
            times * (forward(sent).seconds - still[sent.beside].seconds)
            for sent, times in _sent_beside(layer, kinds[rank])[0].items()
            if rank == last or sent.gathered != "vocabulary"  # the output projection's, which is the last one's
        )

    ranks = [of_layers(one, rank) + 2 * division.interleave * ends.activations for rank in range(division.pipeline)]
    ranks[last] += head
    weights = ends.weights.seconds + max(map(gathered, fullest))
    gradients = max((of_layers(ends.layer_gradients, rank) for rank in fullest), key=lambda spent: spent.seconds)
    through, around = sum(rank.seconds for rank in ranks), Spent(weights) + (ends.gradients + gradients) + once
    return {
        slowest: rounds * ranks[slowest] + Spent((through - ranks[slowest].seconds) / division.interleave) + around
        for slowest in (*fullest, last)
    }


def _sent_beside(layer: Layer, kinds: Kinds) -> tuple[Counter[Sent], Counter[Sent]]:
    """What is sent beside some layers of a rank, forward and backward, and beside how many."""
    has_replicas = layer.division.replicas > 1
    if layer.division.weight_ranks == 1 and not has_replicas:
        return (Counter({Sent(beside=kind): layers for kind, layers in kinds}),) * 2
    return sent_beside(kinds, has_vocabulary=layer.vocabulary > 0, has_replicas=has_replicas)


def _computing(seconds: float) -> Spent:
    return Spent(seconds, seconds)


def _vocabulary(layer: Layer) -> tuple[float, float, float]:
    """Seconds of a vocabulary's output projection; of the norm before it, the loss and the embedding; of copies.

    A pipeline's last stage has no embedding.
    """
    model, division, dtype = layer.model, layer.division, layer.sequence.dtype
    if not model.vocab:
        return 0.0, 0.0, 0.0
    flops = 6 * layer.rows * model.hidden * model.vocab / division.tensor
    beside = 2 * norm_bytes(model, layer.sequence, layer.rows) + 4 * model.vocab * layer.rows * dtype.itemsize
    if division.pipeline == 1:
        beside += (5 * layer.rows + model.vocab) * model.hidden * dtype.itemsize
    # The output projection is gathered once, the embedding once more.
    is_copied = division.weight_ranks > 1 and division.pipeline == 1
    copied = is_copied * (3 * copied_out(dtype) + 2 * copied_in(dtype)) * layer.vocabulary
    kernels = layer.cluster.kernels
    return flops / kernels.linear, layer.touching(beside), copied / kernels.merge


def _once(layer: Layer) -> tuple[float, float]:
    """Seconds of copies that a step needs once, and of clipping and the optimizer, on the rank where it is most.

    What is copied for each microbatch the layers have themselves.
    """
    some = {0, *layer.division.fullest_ranks(layer.model), layer.division.pipeline - 1}
    return max((_once_of(layer, rank) for rank in some), key=sum)


def _once_of(layer: Layer, rank: int) -> tuple[float, float]:
    division, dtype, rounds = layer.division, layer.sequence.dtype, layer.division.microbatches
    if not layer.model.ffn:
        return 0.0, 0.0
    mine = rank_weights(division, layer.model, rank)
    layers = division.rank_layers(layer.model)[rank]
    # Of gradients that are not FSDP's each is added to that of the microbatch before.
    unshared = layers * division.metp_weights(layer.model) * (division.data == 1)
    copied = 3 * (rounds - 1) * dtype.itemsize * (mine if division.weight_ranks == 1 else unshared)
    if division.weight_ranks > 1 and division.pipeline > 1:
        each = copied_out(dtype) + added_up(dtype, rounds)
        # What is more than that of an element is as without a pipeline, but that weights come once.
        for kind, own in division.rank_kinds(layer.model)[rank]:
            one = layer.of(kind)
            more = sum(one.copied(way) - way(dtype) * sum(one.weights) for way in (copied_out, copied_in))
            copied += own * (each * sum(one.weights) + more)
        copied += each * layer.vocabulary * (rank in (0, division.pipeline - 1))
    merge, updated = layer.cluster.kernels.merge, _UPDATED * accumulation_dtype(dtype).itemsize
    return copied / merge, (updated + _CLIPPED * dtype.itemsize) * mine / merge


@dataclass(frozen=True, slots=True)
class _Ends:
    """What is waited for beside layers: weights, gradients, what stages send each other, and tensor ranks.

    In a pipeline the weights of the first of its layers, and the gradients of each, too, by kind. By tensor ranks
    these are the tokens of the output projection, and their gradients; where there is no other stage, those of the
    embedding, too. And the seconds in which the last layer's weights come for its backward, under that of the output
    projection.
    """

    weights: Spent
    gradients: Spent
    layer_weights: Mapping[LayerKind, Spent]
    layer_gradients: Mapping[LayerKind, Spent]
    activations: Spent
    vocabulary: Spent
    again: float


class _Beside(NamedTuple):
    """What attention has beside it: by kind a layer's parts, one after the other; FSDP's transfers, alone; the ends."""

    forward: Mapping[LayerKind, Spent]
    backward: Mapping[LayerKind, Spent]
    transfers: Callable[[Sent], Spent]
    ends: _Ends


@lru_cache(maxsize=64)  # which many attentions have in common
def _beside(layer: Layer) -> _Beside:
    ring = _ring(layer, backward=False)
    again = Spent() if layer.division.context.checkpoint == "none" else ring
    kinds = [kind for kind, _ in layer.model.kinds]
    return _Beside(
        {kind: _beside_ring(layer.of(kind), backward=False) + ring for kind in kinds},
        {kind: _beside_ring(layer.of(kind), backward=True) + again + _ring(layer, backward=True) for kind in kinds},
        cache(partial(_transfers, _sending(layer))),  # a layer takes long to hash
        _ends(layer),
    )


def _without_attention(layer: Layer, **changes: Any) -> Layer:
    """A layer with all that its own transfers depend on: ranks' numbers, and how what does not divide is dealt out.

    How many layers a pipeline's ranks have does not matter to it.
    """
    context = layer.division.context
    if layer.sequence.length % context.size == layer.model.ffn % context.size == 0:
        ring = Candidate(context.size, **context.layers)
    else:
        ring = replace(context, placement="team_in_node", rotate="kv", rotate_forward="kv")
    alike = replace(layer.division, context=replace(ring, **changes), microbatches=1, interleave=1, last_less=0)
    return replace(layer, division=alike)


def _ends(layer: Layer) -> _Ends:
    sending = _sending(layer)
    layer_weights, layer_gradients = dict[LayerKind, Spent](), dict[LayerKind, Spent]()
    before, after = sent_around(layer.model.kinds, has_vocabulary=layer.vocabulary > 0)
    if layer.division.pipeline > 1:
        # Gradients of every group of weights, one after the other.
        before, after = before[:1], (Sent("", "vocabulary"), Sent("", "", "vocabulary"))
        for kind, _ in layer.model.kinds:
            layer_weights[kind] = _transfers(sending, Sent(kind))
            layer_gradients[kind] = _transfers(sending, Sent("", kind)) + _transfers(sending, Sent("", "", kind))
    weights, gradients = (sum((_transfers(sending, one) for one in some), Spent()) for some in (before, after))
    activations = Spent.of(run(alone([("activations", layer.activations)]), layer.cluster))
    vocabulary = Spent()
    if layer.model.vocab and layer.division.tensor > 1:
        exchanges = 4 if layer.division.pipeline == 1 else 2
        vocabulary = exchanges * Spent.of(run(alone([("tokens", layer.tokens)]), layer.cluster))
    again = _transfers(sending, Sent("layer")).seconds if layer.vocabulary else 0.0
    return _Ends(weights, gradients, layer_weights, layer_gradients, activations, vocabulary, again)


@lru_cache(maxsize=256)
def _forward(layer: Layer, way: OneWay, sent: Sent) -> Spent:
    return Spent.of_many(run(layer.of(sent.beside).forward(way.events, sent), layer.cluster))


@lru_cache(maxsize=256)
def _backward(layer: Layer, way: OneWay, again: OneWay | None, sent: Sent) -> Spent:
    repeated = () if again is None else again.events
    return Spent.of_many(run(layer.of(sent.beside).backward(way.events, repeated, sent), layer.cluster))


@lru_cache(maxsize=256)
def _beside_ring(layer: Layer, *, backward: bool) -> Spent:
    """Without attention, FSDP's transfers and METP's ring."""
    others = replace(layer, has_ring=False)
    return Spent.of(run(others.backward((), ()) if backward else others.forward(()), layer.cluster))


def _ring(layer: Layer, *, backward: bool) -> Spent:
    """METP's, which is long, and the same however others are divided."""
    context = layer.division.context
    if context.feed_forward == "plain":
        return Spent()
    alike = Candidate(context.ring, context.team, context.ulysses, feed_forward="metp")
    return _one_ring(replace(layer, division=Division(alike)), backward)


@lru_cache(maxsize=256)
def _one_ring(layer: Layer, backward: bool) -> Spent:
    return Spent.of(run(layer.ring(backward=backward), layer.cluster))


@lru_cache(maxsize=1024)
def _transfers(layer: Layer, sent: Sent) -> Spent:
    """What FSDP sends, alone: begun together, and waited for."""
    return Spent.of(run(alone(layer.transfers(sent)), layer.cluster))


def _sending(layer: Layer) -> Layer:
    """A layer with what FSDP's transfers depend on, and nothing else: whatever is computed, they are the same."""
    context = replace(layer.division.context, checkpoint="none")
    division = replace(layer.division, context=context, microbatch=1, microbatches=1)
    return replace(layer, division=division, sequence=replace(layer.sequence, batch=1))
