"""A layer as one simulation: what groups put on links, what shares them, and how long a step is at least."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, chain, pairwise
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B

from tests.divided import KERNELS, MODEL, SEQUENCE, cost_of, divided, layer_of, step_of
from tests.strategies import examples
from wallfacer_dt import Cluster, Link, ModelShape, SequenceShape
from wallfacer_dt.algorithms.metp_volume import feed_forward_volume
from wallfacer_dt.planning import Candidate
from wallfacer_dt.planning.attention import compute_seconds, least_seconds, runs_together
from wallfacer_dt.planning.candidates import CHECKPOINTS
from wallfacer_dt.planning.division import Division
from wallfacer_dt.planning.elementwise import attention_bytes, feed_forward_bytes, norm_bytes
from wallfacer_dt.planning.flops import model_flops
from wallfacer_dt.planning.fsdp import Sent
from wallfacer_dt.planning.gpus import GPUS
from wallfacer_dt.planning.groups import Group
from wallfacer_dt.planning.layer import Layer, alone
from wallfacer_dt.planning.model import LayerKind
from wallfacer_dt.planning.predict import attention_cost, predict, predict_division, step_bytes
from wallfacer_dt.planning.step import Spent, _once, _vocabulary, beside_attention, by_kind, least_step, simulated_step
from wallfacer_dt.planning.timeline import Begin, Compute, End, on_links, run
from wallfacer_dt.planning.traffic import Arrivals, Key, Wire, wires

ONE = Cluster(4, 2, Link(1.0), Link(1.0))  # a byte a second


def touched(model: ModelShape, tokens: float, itemsize: int = 2, expert: int = 1) -> tuple[float, float]:
    """Seconds in which norms, positions and activations read and write so many tokens, forward and backward.

    Rows that come to one of several expert ranks, or go back, are read and written once more.
    """
    norms, positions = 2 * (2 + 2) * model.hidden, 2 * (model.heads + model.keys) * model.dim
    forward, backward = (2 + 1, 3 + 2 + 1) if model.gated else (1 + 1, 2 + 1 + 1)
    units, routed = max(1, model.experts_per_token) * model.ffn, model.experts_per_token * model.hidden
    # Rows to experts are read and written, theirs read and their sum written; and once more read, backward.
    moved = 2 * 2 * (expert > 1)
    dealt = [(2 + 1 + more + moved) * routed + model.hidden * bool(model.experts) for more in (0, 1)]
    return tuple(
        itemsize * tokens * (norms + positions + activation * units + rows) / KERNELS.merge
        for activation, rows in zip((forward, backward), dealt, strict=True)
    )


def updated(elements: float) -> float:
    """Seconds of AdamW: two moments and a weight read and written in four bytes, and a gradient read; and of clipping.

    That reads a gradient of two bytes twice, and writes it.
    """
    return elements * (2 * 3 * 4 + 4 + 3 * 2) / KERNELS.merge


def lost(model: ModelShape, tokens: float) -> float:
    """Seconds of a last norm, which is as those of layers, and of the loss: logits read three times, one gradient."""
    return 2 * tokens * ((2 + 2) * 2 * model.hidden + (3 + 1) * model.vocab) / KERNELS.merge


def embedded(model: ModelShape, tokens: float) -> float:
    """Seconds of an embedding: a row is read and written, and its gradient read and added to one of zeros."""
    return 2 * ((2 + 3) * tokens + model.vocab) * model.hidden / KERNELS.merge


def near(nbytes: int) -> Wire:
    return Wire(nbytes, 1, nbytes)


@st.composite
def groups(draw: st.DrawFn) -> tuple[Group, int]:
    """A group's axis, and all ranks."""
    per_node, nodes = draw(st.sampled_from([1, 2, 3, 4, 8])), draw(st.integers(1, 6))
    ranks = per_node * nodes
    size = draw(st.sampled_from([n for n in range(1, ranks + 1) if ranks % n == 0]))
    stride = draw(st.sampled_from([n for n in range(1, ranks // size + 1) if (ranks // size) % n == 0]))
    return Group(size, stride, per_node), ranks


def places(group: Group, ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """Every rank's place in its group, and its node."""
    every = np.arange(ranks)
    return every // group.stride % group.size, every // group.per_node


@given(groups(), st.integers(1, 100), st.booleans())
def test_a_gather_is_one_of_all_groups_rank_by_rank(drawn: tuple[Group, int], part: int, striped: bool) -> None:
    """Every sender and receiver written out, as attention's transfers are."""
    group, ranks = drawn
    if not group.is_aligned:
        return
    place, node = places(group, ranks)
    pairs = [(r, r + (k - place[r]) * group.stride) for r in range(ranks) for k in range(group.size) if k != place[r]]
    if not pairs:
        assert group.gather(part) == Wire()
        return
    receiver, sender = np.array(pairs).T
    via = receiver + ((place[receiver] - 1) % group.size - place[receiver]) * group.stride
    arrived = Arrivals(receiver, sender, via, np.full(len(pairs), part), np.ones(len(pairs), int))
    key = Key(False, "gather", "", 0)
    counted = wires({key: arrived}, node, striped_gathers=False)[0][key]
    assert group.gather(part, is_striped=False) == counted
    members = [sum(node[s] == node[r] for s in range(ranks) if (s - r) % group.stride == 0
                   and (place[s] - place[r]) * group.stride == s - r) for r in range(ranks)]  # fmt: skip
    assert set(members) == {group.members}
    entering = (group.size - 1) * -(-part // group.members) if counted.far else 0
    assert group.gather(part) == replace(counted, inter=entering)
    twice = group.all_reduce(group.size * part, is_striped=striped)
    once = group.gather(part, is_striped=striped)
    assert twice == Wire(*(2 * n for n in (once.nbytes, once.near, once.intra, once.far, once.inter, once.node)))


@given(groups(), st.integers(1, 100))
def test_what_goes_to_all_or_to_one_is_so_rank_by_rank(drawn: tuple[Group, int], part: int) -> None:
    group, ranks = drawn
    if not group.is_aligned or group.size == 1:
        return
    place, node = places(group, ranks)
    pairs = np.array(
        [(r, r + (k - place[r]) * group.stride) for r in range(ranks) for k in range(group.size) if k != place[r]]
    )
    key = Key(False, "exchange", "", 0)

    def counted(some: np.ndarray, via: np.ndarray | None = None) -> Wire:
        receiver, sender = some.T
        via = sender if via is None else via
        arrived = Arrivals(receiver, sender, via, np.full(len(some), part), np.ones(len(some), int))
        return wires({key: arrived}, node, striped_gathers=False)[0][key]

    assert group.exchange(part) == counted(pairs)
    assert group.collect(part) == counted(pairs[place[pairs[:, 0]] == 0])
    # From the first to all others, each of which has it from the one before.
    sent = pairs[place[pairs[:, 1]] == 0]
    once = counted(sent, sent[:, 0] - group.stride)
    nodes = group.size // group.members
    hops = replace(once, near=group.size - nodes, far=nodes - 1)
    assert group.broadcast(part, is_striped=False) == hops
    assert group.broadcast(part) == replace(hops, inter=-(-once.inter // group.members))


@given(groups())
def test_aligned_groups_are_alike_on_all_nodes(drawn: tuple[Group, int]) -> None:
    """And only these: of each group as many ranks on every node that has any."""
    group, ranks = drawn
    place, node = places(group, ranks)
    of = np.arange(ranks) - place * group.stride
    counts = Counter(zip(of.tolist(), node.tolist(), strict=True))
    assert group.is_aligned == (len(set(counts.values())) == 1)


@given(groups(), st.integers(1, 100))
def test_a_pipeline_sends_to_the_next_stage(drawn: tuple[Group, int], nbytes: int) -> None:
    group, ranks = drawn
    group = replace(group, stride=ranks // group.size)
    if not group.is_aligned or group.size == 1:
        return
    place, node = places(group, ranks)
    sender = np.flatnonzero(place < group.size - 1)
    receiver = sender + group.stride
    key = Key(False, "move", "", 0)
    arrived = Arrivals(receiver, sender, sender, np.full(len(sender), nbytes), np.ones(len(sender), int))
    assert group.send(nbytes) == wires({key: arrived}, node)[0][key]


def metp_elements(layer: Layer) -> int:
    """Of a layer of MODEL's, those that a rank has of METP: of its units, of 64 rows of queries and 32 of keys."""
    p, model, units = layer.division.context.size, layer.model, 0
    if layer.division.context.feed_forward == "metp":
        units = (3 if model.gated else 2) * -(-model.ffn // p)
    return 64 * (units + 2 * (64 // p + 32 // p) * (layer.division.context.projections == "metp"))


@examples(60)
@given(divided())
def test_what_a_layer_sends_is_what_formulas_say(layer: Layer) -> None:
    """FSDP: (n-1)/n of a layer's weights; tensor ranks: (t-1)/t of tokens, four times each way; METP: its volume.

    What METP has on a context rank is shared by the ranks that have other sequences alone.

    Expert ranks: (e-1)/e of what goes to experts, and back, each way; theirs is (n/e-1)/(n/e) of the experts' weights.

    Of METP's attention what a rank would receive that owns no weights: as much as all of it is.
    """
    division, model = layer.division, layer.model
    ways = cost_of(layer).ways
    beside = Sent("layer", "layer", "layer")
    forward = list(layer.forward(ways[0].events, Sent("layer")))
    backward = list(layer.backward(ways[1].events, ways[0].events, beside))
    sent: list[Counter[str]] = []
    for events in (forward, backward):
        begun = [event for event in events if isinstance(event, Begin)]
        assert sorted(one.name for one in begun) == sorted(one.name for one in events if isinstance(one, End))
        sent.append(Counter())
        for one in begun:
            is_whose = one.name.startswith(("experts'", "METP's"))
            sent[-1][one.name if is_whose else one.name.split()[0]] += one.wire.nbytes
    itemsize, n, t, r = layer.sequence.dtype.itemsize, division.weight_ranks, division.tensor, division.replicas
    is_metp = division.context.feed_forward == "metp"
    is_projected = division.context.projections == "metp"
    fsdp = (0 if is_projected else model.attention_weights) + (0 if is_metp else model.ffn_weights)
    e = division.expert
    experts = 4 * model.hidden * model.ffn * (3 if model.gated else 2) if e > 1 else 0
    weights = (fsdp - experts) // t
    shard, of_experts = -(-weights // n), -(-experts // n)
    assert sent[0]["weights"] == sent[1]["weights"] == (n - 1) * shard * itemsize
    # Gradients in float32.
    assert (sent[0]["gradients"], sent[1]["gradients"]) == (0, (n - 1) * shard * 4)
    assert sent[1]["replicas"] == 2 * (r - 1) * -(-shard * 4 // r)
    assert sent[1]["experts' replicas"] == 2 * (r - 1) * -(-of_experts * 4 // r)
    for way in sent:
        assert way["experts' weights"] == (n // e - 1) * of_experts * itemsize
    assert (sent[0]["experts' gradients"], sent[1]["experts' gradients"]) == (0, (n // e - 1) * of_experts * 4)
    s = division.shards
    of_metp = -(-metp_elements(layer) // s)
    assert sent[1]["METP's replicas"] == 2 * (r - 1) * -(-of_metp * 4 // r)
    for way in sent:
        assert way["METP's weights"] == (s - 1) * of_metp * itemsize
    assert (sent[0]["METP's gradients"], sent[1]["METP's gradients"]) == (0, (s - 1) * of_metp * 4)
    repeats = 1 if division.context.checkpoint == "none" else 2
    tokens = 256 // division.context.size * division.microbatch
    assert sent[0]["tokens"] == 4 * (t - 1) * (tokens // t) * model.hidden * itemsize
    for name in ("tokens", "dispatch", "combine"):
        assert sent[1][name] == repeats * sent[0][name]
    dealt = (e - 1) * -(-tokens * model.experts_per_token // e) * model.hidden * itemsize
    assert sent[0]["dispatch"] == sent[0]["combine"] == dealt
    # Of every expert a number in eight bytes.
    assert sent[0]["counts"] == (e - 1) * 4 // e * 8
    assert sent[1]["counts"] == (repeats - 1) * sent[0]["counts"]
    if is_metp:
        volumes = feed_forward_volume(
            division.context.axes, model_dim=model.hidden, hidden=model.ffn, dtype=layer.sequence.dtype,
            gated=model.gated,
        )  # fmt: skip
        assert sent[0]["feed-forward"] == volumes[0].bytes
        assert sent[1]["feed-forward"] == volumes[1].bytes + (repeats - 1) * volumes[0].bytes
    whole = model.attention_weights * itemsize * is_projected
    again = 2 if division.context.checkpoint == "full" else 1
    p = division.context.size
    assert sent[0]["projections'"] == whole * (p > 1)
    # Of MODEL's 64 rows of queries and outputs and 32 of keys and values a rank holds a p-th, of one group of heads.
    parts = p * -(-64 * 2 * (64 // p + 32 // p) // p) * itemsize
    assert sent[1]["projections'"] == whole * (p > 1) * again + 2 * (p - 1) * parts * is_projected


@examples(40)
@given(divided())
def test_a_layer_computes_every_product(layer: Layer) -> None:
    """Twice as much in the backward, once more under a checkpoint, and what METP computes again of its units."""
    division, model = layer.division, layer.model
    tokens = 256 // division.context.size * division.microbatch
    share = 2 * tokens / division.tensor / KERNELS.linear
    again = (2 / 3 if model.gated else 1 / 2) if division.context.feed_forward == "metp" else 0
    passes = 2 if division.context.checkpoint == "none" else 3
    # METP's attention has its projections among its own events.
    projections = model.attention_weights if division.context.projections == "plain" else 0
    weights = projections + model.ffn_products
    beside = touched(model, tokens / division.tensor, layer.sequence.dtype.itemsize, division.expert)
    repeated = beside[0]
    if "metp" in (division.context.feed_forward, division.context.projections):
        # What METP touches is compared with what it does (test_plan_elementwise.py).
        told, norms = (division.context, model, layer.sequence, tokens), 2 * norm_bytes(model, layer.sequence, tokens)
        attention = [attention_bytes(*told, backward=way) for way in (False, True)]
        is_dealt = division.expert > 1
        units = [feed_forward_bytes(*told, backward=way, is_dealt=is_dealt) for way in (False, True)]
        beside = tuple((norms + some) / KERNELS.merge for some in map(sum, zip(attention, units, strict=True)))
        repeated = beside[0]
        if (division.context.projections, division.context.checkpoint) == ("metp", "attention"):
            repeated -= attention[0] / KERNELS.merge  # it is saved
    # Each element that came is read and written, and a gradient is written in four bytes.
    fsdp = model.attention_weights * (division.context.projections == "plain")
    fsdp += model.ffn_weights * (division.context.feed_forward == "plain")
    experts = model.experts * model.hidden * model.ffn * (3 if model.gated else 2) // division.expert
    fsdp -= (division.expert - 1) * experts  # of these a rank has its own
    is_copied = division.weight_ranks > 1 and division.pipeline == 1
    itemsize = layer.sequence.dtype.itemsize
    out, back = (each * (fsdp // division.tensor) for each in (2 * itemsize, itemsize + 4))
    if division.expert == division.weight_ranks:
        # If no others have them they are made of float32, and their gradients copied.
        out, back = out + experts * (itemsize + 4) * (itemsize < 4), back + experts * 2 * 4
    elif division.weight_ranks > 4:  # than there are experts: these are put together once more
        out, back = (some + 2 * itemsize * experts for some in (out, back))
    if division.data > 1:
        metp, alone = metp_elements(layer), division.shards == 1
        out += metp * (2 * itemsize + alone * (itemsize + 4) * (itemsize < 4))
        back += metp * (itemsize + 4 + alone * 2 * 4)
    out, back = (is_copied * some / KERNELS.merge for some in (out, back))
    assert run(layer.forward(()), layer.cluster).compute == pytest.approx(share * weights + beside[0] + out)
    backward = run(layer.backward((), ()), layer.cluster).compute - beside[1] - (passes - 2) * repeated - out - back
    assert backward == pytest.approx(share * (passes * weights + again * model.ffn_weights))


@examples(40)
@given(divided(), st.sampled_from(["intra", "inter"]), st.floats(1, 100), st.floats(0, 1))
def test_a_better_link_makes_no_step_longer(layer: Layer, level: str, factor: float, latency: float) -> None:
    link = getattr(layer.cluster, level)
    better = replace(layer, cluster=replace(layer.cluster, **{
        level: Link(link.bandwidth * factor, link.latency * latency)
    }))  # fmt: skip
    before, after = (step_of(one, cost_of(one).ways) for one in (layer, better))
    assert after.seconds <= before.seconds * (1 + 1e-9)
    assert after.compute == pytest.approx(before.compute)


@examples(60)
@given(divided())
def test_a_step_is_no_shorter_than_its_least(layer: Layer) -> None:
    cost = cost_of(layer)
    step = step_of(layer, cost.ways)
    spent = [Spent.of(way.line) for way in cost.ways]
    least = least_step(layer, *spent)
    assert least <= step.seconds * (1 + 1e-9)
    assert step.compute <= step.seconds * (1 + 1e-9)
    # Nothing is left out of it: what is on no link but one after the other is all there is.
    free = replace(layer, cluster=replace(layer.cluster, intra=Link(1e40), inter=Link(1e40)))
    ways = cost_of(free).ways
    alone = least_step(free, *(Spent.of(way.line) for way in ways))
    assert step_of(free, ways).seconds == pytest.approx(alone)


@examples(60)
@given(divided())
def test_the_least_is_no_less_where_more_is_computed_again(layer: Layer) -> None:
    spent = [Spent.of(way.line) for way in cost_of(layer).ways]
    division = layer.division
    again = [replace(division, context=replace(division.context, checkpoint=name)) for name in CHECKPOINTS]
    none, attention, full = (least_step(replace(layer, division=one), *spent) for one in again)
    assert none <= attention * (1 + 1e-9)
    assert attention <= full * (1 + 1e-9)


@examples(60)
@given(divided())
def test_a_step_computes_attention_and_what_is_beside(layer: Layer) -> None:
    cost, division = cost_of(layer), layer.division
    forwards = 2 if division.context.checkpoint == "full" else 1
    attention = forwards * cost.forward.compute + cost.backward.compute
    calls = division.microbatches * layer.model.layers // division.pipeline
    for rank, step in simulated_step(layer, cost.ways).items():
        beside = beside_attention(layer, rank)
        assert step.compute == pytest.approx(calls * attention + sum(beside.values()))


def test_first_layers_without_experts_send_no_tokens() -> None:
    model = replace(MODEL, experts=8, experts_per_token=2, dense_layers=1, dense_ffn=64)
    layer = layer_of(Division(Candidate(2), shards=2, expert=4), model=model)
    kinds: tuple[LayerKind, ...] = ("layer", "dense")
    for some, names in zip(map(layer.of, kinds), (["counts", "dispatch", "combine"], []), strict=True):
        assert [event.name for event in some.forward(()) if isinstance(event, Begin)] == names


def test_flops_are_those_of_each_layers_own_weights() -> None:
    model = replace(MODEL, experts=8, experts_per_token=2, dense_layers=1, dense_ffn=64)
    told = [
        model_flops(some, SEQUENCE) for some in (model, model.of("dense"), replace(model, dense_layers=0, dense_ffn=0))
    ]
    assert 4 * told[0] == told[1] + 3 * told[2]
    assert told[1] < told[0] < told[2]


@examples(30)
@given(divided(pipeline=1), st.integers(1, 3))
def test_what_layers_of_two_kinds_compute_is_what_layers_of_each_do(layer: Layer, dense: int) -> None:
    """By how many there are, of experts that are dealt to ranks or not."""
    experts = replace(layer.model, experts=4, experts_per_token=2, dense_layers=0, dense_ffn=0)
    context = replace(layer.division.context, feed_forward="plain")
    layer = replace(layer, division=replace(layer.division, tensor=1, context=context), model=experts)
    both = replace(layer, model=replace(experts, dense_layers=dense, dense_ffn=1000))
    alike = replace(
        layer,
        division=replace(layer.division, expert=1),
        model=replace(MODEL, ffn=1000, gated=experts.gated, vocab=experts.vocab),
    )
    found, *each = (beside_attention(one) for one in (both, layer, alike))
    for kind, seconds in found.items():
        assert seconds == pytest.approx(((4 - dense) * each[0][kind] + dense * each[1][kind]) / 4)


@examples(60)
@given(divided())
def test_what_attention_computes_and_launches_is_known_before_its_transfers(layer: Layer) -> None:
    cost, division = cost_of(layer), layer.division
    plain = replace(division.context, projections="plain")
    model, where = division.heads_of(layer.model), division.context_cluster(layer.cluster)
    if division.context.projections == "metp":
        cost = attention_cost(plain, model, layer.sequence, where)
    for backward, line in enumerate((cost.forward, cost.backward)):
        told = plain, model, layer.sequence, where.kernels
        seconds = compute_seconds(*told, backward=bool(backward))
        assert line.compute <= seconds * (1 + 1e-9)  # that of the rank with most to do
        least, host = least_seconds(*told, backward=bool(backward))
        assert max(seconds, least) <= line.seconds * (1 + 1e-9)
        assert (host > 0) == (where.kernels.launch > 0)
        assert host <= line.host * (1 + 1e-9)  # of METP's groups of heads each has as many operations
        if division.context.projections == "plain" and not runs_together(plain, layer.sequence):
            assert host == pytest.approx(line.host)


def test_one_rank_only_computes() -> None:
    """By hand: 6 for every token and weight, of which the backward has two thirds, attention's rates, and the rest."""
    division = Division(Candidate(1, order="head_tail"), microbatch=3, microbatches=5)
    layer = layer_of(division)
    cost = cost_of(layer)
    it = predict_division(division, MODEL, layer.sequence, layer.cluster, cost)
    tokens = 5 * 3 * 256
    weights = MODEL.layers * (MODEL.attention_weights + MODEL.ffn_weights) + MODEL.hidden * MODEL.vocab
    attention = MODEL.layers * (cost.forward.compute + cost.backward.compute)
    assert (it.exposed, it.overlapped, it.rank_bytes, it.node_bytes) == (pytest.approx(0, abs=1e-12), 0, 0, 0)
    beside = MODEL.layers * sum(touched(MODEL, tokens)) + lost(MODEL, tokens) + 5 * embedded(MODEL, tokens / 5)
    # The embedding and norms are updated, too.
    mine = weights + MODEL.hidden * MODEL.vocab + (2 * MODEL.layers + 1) * MODEL.hidden
    products = 6 * tokens * weights / KERNELS.linear
    # Of four microbatches gradients are added to those of the one before, in two bytes.
    added = 4 * 3 * 2 * mine / KERNELS.merge
    assert it.seconds == pytest.approx(products + 5 * attention + beside + added + updated(mine))
    told = {"products": products, "elementwise": beside, "copies": added, "optimizer": updated(mine)}
    assert beside_attention(layer) == pytest.approx(told)


@pytest.mark.parametrize("pipeline", [1, 2])
def test_gradients_of_metp_that_no_others_share_are_added_up(pipeline: int) -> None:
    """Those of three microbatches twice, in two bytes; with others FSDP adds shards, but in a pipeline whole ones."""
    copies = {}
    context = Candidate(2, feed_forward="metp", projections="metp")
    for rounds, data in ((1, 1), (3, 1), (1, 2), (3, 2)):
        division = Division(context, shards=data, pipeline=pipeline, microbatches=rounds)
        layer = replace(layer_of(division), model=replace(MODEL, vocab=0))
        copies[rounds, data] = beside_attention(layer)["copies"]
    metp = MODEL.layers // pipeline * metp_elements(layer)
    repeated = 1 if pipeline == 2 else 3
    assert copies[3, 1] - repeated * copies[1, 1] == pytest.approx(2 * 3 * 2 * metp / KERNELS.merge)
    added = 2 * (2 + 2 * 4) * metp / KERNELS.merge if pipeline == 2 else 0.0
    assert copies[3, 2] - repeated * copies[1, 2] == pytest.approx(added)
    assert copies[1, 1] == 0


def test_what_is_beside_products_is_what_a_gpu_took() -> None:
    """Four layers on an H200, 8192 tokens: 3.5 ms, compiled (docs/benchmarks/gpu_2026-11-26.md)."""
    model = ModelShape(4096, 32, 8, ffn=10944, layers=4)
    layer = Layer(Division(Candidate(1)), model, SequenceShape(8192), GPUS["h200"].cluster(1))
    forward, backward = layer.forward(()), layer.backward((), ())
    computed = (one for one in (*forward, *backward) if isinstance(one, Compute))
    beside = sum(one.seconds for one in computed if one.what == "norms, positions, activation")
    assert 4 * beside == pytest.approx(3.6e-3, rel=0.02)  # as these pages say
    assert 3.5e-3 <= 4 * beside <= 1.2 * 3.5e-3


def test_attention_alone_updates_nothing() -> None:
    """Its time is attention's; with a vocabulary that has its products and loss, and no norm of a layer."""
    for vocab in (0, MODEL.vocab):
        model = replace(MODEL, ffn=0, vocab=vocab)
        layer = Layer(Division(Candidate(1)), model, SEQUENCE, layer_of(Division(Candidate(1))).cluster)
        cost = cost_of(layer)
        beside = (lost(model, 256) + embedded(model, 256)) * bool(vocab)
        head = 6 * 256 * model.hidden * vocab / KERNELS.linear + beside
        assert step_of(layer, cost.ways).seconds == pytest.approx(model.layers * cost.seconds + head)


def test_in_float64_twice_as_many_bytes_are_updated() -> None:
    where = layer_of(Division(Candidate(1))).cluster
    layers = [
        Layer(Division(Candidate(1)), MODEL, replace(SEQUENCE, dtype=dtype), where)
        for dtype in (torch.float32, torch.float64)
    ]
    updated = [beside_attention(layer)["optimizer"] for layer in layers]
    assert updated[1] == pytest.approx(2 * updated[0])


def test_the_stage_with_most_weights_is_waited_for() -> None:
    """Both ends have a vocabulary's matrix, the last one more norm; its tensor ranks halve all but norms."""
    division = Division(Candidate(1), pipeline=2, tensor=2, microbatches=1)
    layer = Layer(division, MODEL, SEQUENCE, Cluster(4, 4, Link(1e40), Link(1e40), kernels=KERNELS))
    ways = cost_of(layer).ways
    with mock.patch.multiple("wallfacer_dt.planning.step", _UPDATED=0, _CLIPPED=0):
        without = step_of(layer, ways)
    half = MODEL.layers // 2
    split = half * (MODEL.attention_weights + MODEL.ffn_weights) + MODEL.vocab * MODEL.hidden
    mine = split // 2 + (2 * half + 1) * MODEL.hidden
    step = step_of(layer, ways)
    assert step.seconds - without.seconds == pytest.approx(updated(mine))
    assert step.compute - without.compute == pytest.approx(updated(mine))


@pytest.mark.parametrize("name", ["weights", "gradients", "replicas", "tokens", "activations"])
def test_a_transfer_alone_takes_what_its_links_say(name: str) -> None:
    division = Division(Candidate(2), tensor=2, shards=2, replicas=2, pipeline=2)
    layer = layer_of(division)
    transfers = dict(layer.transfers(Sent("layer", "layer", "layer")))
    wire = transfers.get(name) or getattr(layer, name)
    assert wire.nbytes
    slower = max(map(sum, on_links(wire, layer.cluster)))
    assert run(alone([(name, wire)]), layer.cluster).seconds == pytest.approx(slower)
    by_hand = {
        # 3 others of 4 on two nodes, each a fourth of half the weights; two of a node go round at once.
        "weights": 3 * 1e-4 + 2 * 3 * (MODEL.attention_weights + MODEL.ffn_weights) // 8 * 2 / 4e8,
        "gradients": 3 * 1e-4 + 2 * 3 * (MODEL.attention_weights + MODEL.ffn_weights) // 8 * 4 / 4e8,
        # All four ranks of a node, each twice half of an eighth.
        "replicas": 2 * 1e-4 + 4 * (MODEL.attention_weights + MODEL.ffn_weights) // 8 * 4 / 4e8,
        "tokens": 1e-5 + 64 * 64 * 2 / 1e9,
        "activations": 1e-4 + 4 * 64 * 64 * 2 / 4e8,
    }
    assert slower == pytest.approx(by_hand[name])


@pytest.mark.parametrize("replicas", [1, 2])
def test_weights_hide_behind_all_that_computes_and_gradients_of_the_last_layer_do_not(replicas: int) -> None:
    """Of a chain of layers by hand: what is longer than the layer is exposed, and a layer's at both ends."""
    model = replace(MODEL, vocab=0)
    for bandwidth, is_hidden in ((1e12, True), (1e6, False)):
        where = Cluster(2 * replicas, 2 * replicas, Link(bandwidth), Link(1.0), kernels=KERNELS)
        layer = Layer(Division(Candidate(1), shards=2, replicas=replicas), model, SEQUENCE, where)
        cost = cost_of(layer)
        elements = (model.attention_weights + model.ffn_weights) / 2
        gather, reduce = elements * 2 / bandwidth, elements * 4 / bandwidth
        # Of two that hold the same each receives half of its part as a sum, and the other half summed.
        alike = elements * 4 / bandwidth * (replicas > 1)
        beside = touched(model, 256)
        out, back = (2 * elements * each / KERNELS.merge for each in (2 + 2, 2 + 4))
        forward = cost.forward.compute + 2 * 256 * 2 * elements / KERNELS.linear + beside[0] + out
        backward = cost.backward.compute + 4 * 256 * 2 * elements / KERNELS.linear + beside[1] + out + back
        step = step_of(layer, cost.ways)
        layers = max(forward, gather) + max(backward, gather + reduce + alike)
        assert (gather < forward) is is_hidden
        # Of the last layer but one the replicas' sum is still to be made, and then that of the last.
        update = updated(model.layers * (elements + model.hidden))
        assert step.seconds == pytest.approx(gather + model.layers * layers + reduce + 2 * alike + update)


@pytest.mark.parametrize("bandwidth", [1e12, 1e6, 2e8])
def test_a_vocabulary_is_gathered_and_reduced_as_layers_are(bandwidth: float) -> None:
    """By hand, in order: the embedding, four layers and the output projection, and back."""
    where = Cluster(2, 2, Link(bandwidth), Link(1.0), kernels=KERNELS)
    layer = Layer(Division(Candidate(1), shards=2), MODEL, SEQUENCE, where)
    cost = cost_of(layer)
    own, ends = MODEL.attention_weights + MODEL.ffn_weights, MODEL.vocab * MODEL.hidden
    (gather, reduce), (gather_ends, reduce_ends) = (
        [elements / 2 * each / bandwidth for each in (2, 4)] for elements in (own, ends)
    )
    out, back = (own * each / KERNELS.merge for each in (2 + 2, 2 + 4))
    before, after = touched(MODEL, 256)
    forward = cost.forward.compute + 2 * 256 * own / KERNELS.linear + before + out
    backward = cost.backward.compute + 4 * 256 * own / KERNELS.linear + after + out + back
    products = 6 * 256 * ends / KERNELS.linear
    copies = ends * (3 * (2 + 2) + 2 * (2 + 4)) / KERNELS.merge
    head = products + lost(MODEL, 256) + embedded(MODEL, 256) + copies
    there = gather_ends + gather + 3 * max(forward, gather) + max(forward, gather_ends)
    again = max(0.0, gather - 2 / 3 * products)  # the last layer's weights, under the output projection's backward
    layers = max(backward, gather + reduce_ends) + 2 * max(backward, gather + reduce)
    layers += max(backward, gather_ends + reduce)
    mine = (4 * own + 2 * ends + (2 * 4 + 1) * MODEL.hidden) / 2
    expected = there + head + again + layers + reduce + reduce_ends + updated(mine)
    assert step_of(layer, cost.ways).seconds == pytest.approx(expected)


@pytest.mark.parametrize(("pipeline", "exchanges"), [(1, 4), (2, 2)])
def test_tensor_ranks_exchange_the_tokens_of_embedding_and_output_projection(pipeline: int, exchanges: int) -> None:
    """Each forward and backward, on the last stage those of the output projection, of every microbatch."""
    waits = []
    for vocab in (0, MODEL.vocab):
        where = Cluster(2 * pipeline, 2, Link(1e6), Link(1e40), kernels=KERNELS)
        division = Division(Candidate(1), tensor=2, pipeline=pipeline, microbatches=2)
        layer = Layer(division, replace(MODEL, vocab=vocab), SEQUENCE, where)
        step = step_of(layer, cost_of(layer).ways)
        waits.append(step.seconds - step.compute)
    part = 256 / 2 * MODEL.hidden * 2 / 1e6
    assert waits[1] - waits[0] == pytest.approx(2 * exchanges * part)


def test_a_pipeline_by_hand() -> None:
    """Two stages, three microbatches: the bubble is a stage's, the output projection the last one's."""
    where = Cluster(2, 1, Link(1e40), Link(1e40), kernels=KERNELS)
    division = Division(Candidate(1), pipeline=2, microbatches=3)
    layer = Layer(division, MODEL, SEQUENCE, where)
    cost = cost_of(layer)
    weights = MODEL.attention_weights + MODEL.ffn_weights
    beside = sum(touched(MODEL, 256))
    stage = 2 * (cost.forward.compute + cost.backward.compute + 6 * 256 * weights / KERNELS.linear + beside)
    head = 6 * 256 * MODEL.hidden * MODEL.vocab / KERNELS.linear + lost(MODEL, 256)
    mine = 2 * weights + MODEL.hidden * MODEL.vocab + 5 * MODEL.hidden
    update = updated(mine) + 2 * 3 * 2 * mine / KERNELS.merge  # of the second and third microbatch gradients are added
    it = predict_division(division, MODEL, SEQUENCE, where, cost)
    assert it.seconds == pytest.approx(4 * stage + 3 * head + update)
    assert it.compute == pytest.approx(3 * (stage + head) + update)
    assert division.bubble == pytest.approx(stage / (3 * stage))
    # What is sent is waited for, forward and backward, by all but the last that many times.
    slow = replace(layer, cluster=replace(where, inter=Link(1e6)))
    sent = 2 * 256 * 64 * 2 / 1e6
    assert step_of(slow, cost.ways).seconds == pytest.approx(it.seconds + 4 * sent)


@examples(60)
@given(
    st.integers(2, 6), st.sampled_from([1, 1, 2, 3]), st.integers(2, 36), st.integers(0, 3), st.integers(0, 20),
    st.sampled_from([0, 100, 3000]), st.sampled_from([0, 0, 1, 3, 9]),
)  # fmt: skip
@example(pipeline=4, interleave=2, layers=16, less=0, more=4, vocab=0, dense=0)
@example(pipeline=3, interleave=3, layers=18, less=0, more=0, vocab=0, dense=0)
@example(pipeline=4, interleave=1, layers=8, less=0, more=2, vocab=0, dense=0)
def test_a_pipeline_takes_what_its_schedule_does(
    pipeline: int, interleave: int, layers: int, less: int, more: int, vocab: int, dense: int
) -> None:
    """Event by event, as torch orders them: of like stages to rounding; of others, one after the other, no more than
    is told, and interleaved about as much. And as much is in flight. First layers may have no experts.
    """
    model, rounds = replace(MODEL, layers=layers, vocab=vocab), pipeline + more
    if dense:
        first = {"dense_layers": min(dense, layers - 1), "dense_ffn": 100 * dense}
        model = replace(model, ffn=64, experts=4, experts_per_token=2, **first)
    division = Division(Candidate(1), pipeline=pipeline, microbatches=rounds, interleave=interleave, last_less=less)
    stages = division.stage_layers(model)
    assert sum(stages) == sum(division.rank_layers(model)) == layers
    assume(min(stages) > 0)
    assume(interleave == 1 or rounds % (rounds // pipeline) == 0)
    layer = Layer(division, model, SEQUENCE, Cluster(pipeline, 1, Link(1e40), Link(1e40), kernels=KERNELS))
    once, head = _once(layer), sum(_vocabulary(layer))
    forward, backward = (way.line.compute for way in cost_of(layer).ways)
    one: dict[str, tuple[float, float]] = {}
    for kind, _ in model.kinds:
        own = model.of(kind)
        products = 2 * 256 * (own.attention_weights + own.ffn_products) / KERNELS.linear
        ahead, back = touched(own, 256)
        one[kind] = forward + products + ahead, backward + 2 * products + back
    every = [kind for kind, number in model.kinds for _ in range(number)]
    each = [every[begin:end] for begin, end in pairwise(accumulate(stages, initial=0))]
    assert [*map(Counter, each)] == [*map(Counter, map(dict, division.stage_kinds(model)))]
    times = [tuple(sum(one[kind][way] for kind in stage) for way in (0, 1)) for stage in each]
    times[-1] = times[-1][0] + head / 3, times[-1][1] + 2 / 3 * head
    orders = orders_of(division)
    for rank, order in enumerate(orders):
        for weights in ([1] * len(stages), stages):
            alive = np.cumsum([-weights[stage] if way else weights[stage] for way, _, stage in order])
            assert alive.max() == division.in_flight(rank, tuple(weights[rank::pipeline]))
    told = step_of(layer, cost_of(layer).ways).seconds - sum(once)
    share = ends(orders, times) / told
    if len({*map(sum, times)}) == 1:
        assert share == pytest.approx(1)
    elif interleave == 1:
        assert 0.8 < share <= 1 + 1e-9
    else:
        assert 0.8 < share < 1.25


def test_the_rank_that_is_slowest_is_told_of() -> None:
    """What it computes by kind: its layers' attention; and the weights are updated where most are."""
    model, where = replace(MODEL, layers=4, vocab=0), Cluster(3, 1, Link(1e40), Link(1e40), kernels=KERNELS)
    division = Division(Candidate(1), pipeline=3, microbatches=3)
    assert division.rank_layers(model) == (1, 2, 1)
    layer = Layer(division, model, SEQUENCE, where)
    cost = cost_of(layer)
    found = predict_division(division, model, SEQUENCE, where, cost)
    assert found.pipeline_rank == 1
    kinds = by_kind(layer, found.compute, found.pipeline_rank)
    assert kinds["attention"] == pytest.approx(3 * 2 * (cost.forward.compute + cost.backward.compute))
    weights = 2 * (model.attention_weights + model.ffn_weights + 2 * model.hidden)
    assert kinds["optimizer"] == pytest.approx(updated(weights))
    # With a vocabulary that takes as long as both of its layers it is the last.
    wide = replace(model, vocab=5000)
    assert predict_division(division, wide, SEQUENCE, where, cost).pipeline_rank == 2


def test_a_pipelines_rank_receives_what_its_layers_do() -> None:
    """Of four layers three ranks have one, two and one."""
    model, where = replace(MODEL, layers=4), Cluster(6, 2, Link(1e9), Link(1e9), kernels=KERNELS)
    division = Division(Candidate(2), pipeline=3, microbatches=3)
    cost = cost_of(Layer(division, model, SEQUENCE, where))
    whole = step_bytes(Division(Candidate(2)), replace(model, layers=1), SEQUENCE, cost)
    assert step_bytes(division, model, SEQUENCE, cost) == tuple(3 * 2 * n for n in whole)


Order = list[tuple[int, int, int]]
"""Of a rank: forward (0) or backward (1), which microbatch, of which stage."""


def orders_of(division: Division) -> list[Order]:
    """Of every rank: 1F1B written out; interleaved as torch has it."""
    p, v, m = division.pipeline, division.interleave, division.microbatches
    orders: list[Order] = []
    if v > 1:
        schedule = object.__new__(ScheduleInterleaved1F1B)  # which would have stages
        schedule.pp_group_size, schedule.n_local_stages, schedule._n_microbatches = p, v, m
        schedule.microbatches_per_round = m // (m // p)
        for rank in range(p):
            actions = filter(None, schedule._calculate_single_rank_operations(rank))
            orders.append(
                [(it.computation_type.name != "FORWARD", it.microbatch_index, it.stage_index) for it in actions]
            )
        return orders
    for stage in range(p):
        first = min(m, p - stage)
        alternating = chain.from_iterable([(1, n), (0, n + first)] for n in range(m))
        turns = [*((0, n) for n in range(first)), *((way, n) for way, n in alternating if n < m)]
        orders.append([(*turn, stage) for turn in turns])
    return orders


def ends(orders: list[Order], times: Sequence[tuple[float, float]]) -> float:
    """Seconds until all is done, of stages, forward and backward, by ranks of which each does one thing at a time."""
    left, ended, last = [[*order] for order in orders], dict[tuple[int, int, int], float](), len(times) - 1
    clocks = [0.0] * len(orders)
    while any(left):
        for rank, order in enumerate(left):
            way, n, stage = order[0] if order else (0, -1, 0)
            begins = (0, n, stage - 1) if way == 0 else (0, n, stage) if stage == last else (1, n, stage + 1)
            if order and (begins[-1] < 0 or begins in ended):
                clocks[rank] = max(clocks[rank], ended.get(begins, 0.0)) + times[stage][way]
                ended[order.pop(0)] = clocks[rank]
    return max(clocks)


def test_a_pipelines_weights_come_once_and_gradients_leave_once() -> None:
    where = Cluster(4, 2, Link(1e6), Link(1e40), kernels=KERNELS)
    model = replace(MODEL, vocab=0)
    times = {}
    for rounds in (2, 3):
        layer = Layer(Division(Candidate(1), shards=2, pipeline=2, microbatches=rounds), model, SEQUENCE, where)
        times[rounds] = step_of(layer, cost_of(layer).ways).seconds
    cost = cost_of(layer)
    weights = model.attention_weights + model.ffn_weights
    beside = touched(model, 256)
    stage = 2 * (cost.forward.compute + cost.backward.compute + 6 * 256 * weights / KERNELS.linear + sum(beside))
    # Whole gradients become float32 once, and are added once, and once more of another microbatch.
    copied, added = 2 * weights * (2 + 2 + (2 + 4) + (2 + 8) + 8) / KERNELS.merge, 2 * weights * 10 / KERNELS.merge
    assert times[3] - times[2] == pytest.approx(stage + added)
    gather, forward = weights / 1e6, cost.forward.compute + 2 * 256 * weights / KERNELS.linear + beside[0]
    assert gather > forward
    update = updated(weights + 2 * model.hidden)
    exposed = gather + 2 * (gather - forward) + 2 * 2 * gather
    assert times[2] == pytest.approx(3 * stage + exposed + update + copied)


def test_the_output_projection_comes_to_the_last_stage_alone() -> None:
    """The first one waits for the embedding, a layer, and the rest of another; last for gradients of each."""
    division = Division(Candidate(1), shards=2, pipeline=2, microbatches=2)
    seconds = []
    for intra in (Link(1e6), Link(1e40)):
        layer = Layer(division, MODEL, SEQUENCE, Cluster(4, 2, intra, Link(1e40), kernels=KERNELS))
        seconds.append(step_of(layer, cost_of(layer).ways).seconds)
    weights = MODEL.attention_weights + MODEL.ffn_weights
    gather, ends = weights / 1e6, MODEL.vocab * MODEL.hidden / 1e6
    forward = cost_of(layer).forward.compute + 2 * 256 * weights / KERNELS.linear + touched(MODEL, 256)[0]
    assert gather > forward
    assert seconds[0] - seconds[1] == pytest.approx(ends + gather + (gather - forward) + 2 * (ends + 2 * gather))


def test_attention_shares_its_links_with_weights() -> None:
    """Ulysses' exchange takes up to twice as long while weights come, and everything else that long alone."""
    model, sequence = ModelShape(64, 4, ffn=4096), SequenceShape(512)
    where = Cluster(4, 4, Link(1e7), Link(1.0), kernels=KERNELS)
    candidate = Candidate(1, 1, 4)
    cost = attention_cost(candidate, model, sequence, where)
    together = predict(candidate, model, sequence, where, cost)
    layer = Layer(Division(candidate), model, sequence, where)
    parts, sent = run(layer.forward(cost.ways[0].events), where), Sent("layer")
    weights = run(alone(layer.transfers(sent)), where)
    forward = run(layer.forward(cost.ways[0].events, sent), where)
    assert weights.seconds > parts.transfer > 0
    # The link has both to carry, and carries without a break.
    assert forward.seconds == pytest.approx(weights.seconds + parts.transfer, rel=0.05)
    assert forward.waiting < parts.waiting + weights.seconds + parts.transfer
    assert together.seconds > parts.seconds


def test_tensor_ranks_attend_at_the_same_time_over_their_nodes_link() -> None:
    """Each pair of context ranks sends from node to node: two on every node take twice as long, and bring twice."""
    where = Cluster(4, 2, Link(1e40), Link(1e5), kernels=KERNELS)
    division = Division(Candidate(2, order="head_tail"), tensor=2)
    heads, sequence = division.heads_of(MODEL), replace(SEQUENCE, is_causal=True)
    context = division.context_cluster(where)
    assert (context.ranks, context.ranks_per_node) == (2, 1)
    assert division.groups(where)["context"].siblings == 2
    one, two = (attention_cost(division.context, heads, sequence, context, siblings=n) for n in (1, 2))
    assert two.node_bytes == tuple(2 * n for n in one.node_bytes)
    assert two.rank_bytes == one.rank_bytes
    for single, shared in zip(one.ways, two.ways, strict=True):
        assert shared.line.inter == pytest.approx(2 * single.line.inter)
    # With an adapter for each rank none waits for the other.
    wide = replace(where, inter=Link(2e5), nics=2)
    context = division.context_cluster(wide)
    assert attention_cost(division.context, heads, sequence, context, siblings=2).forward.inter == pytest.approx(
        one.forward.inter
    )
