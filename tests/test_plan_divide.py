"""Ranks divided among data, tensor, pipeline and context parallelism: what can be, what fits, what is chosen."""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, pairwise, product
from operator import attrgetter, itemgetter
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from tests.divided import HOSTS, KERNELS, MODEL, SEQUENCE, attentions_of, cluster, cost_of, costs_of, divided, layer_of
from tests.strategies import examples
from wallfacer_dt import Cluster, Link, ModelShape, SequenceShape, plan
from wallfacer_dt.planning import Candidate, PlanningError, dividing, stack
from wallfacer_dt.planning.alive import Alive
from wallfacer_dt.planning.candidates import CHECKPOINTS, attentions
from wallfacer_dt.planning.dividing import (
    DivisionPlan,
    RankedDivision,
    _alone,
    _divisors,
    _kind,
    _Search,
    divide,
    divisions,
)
from wallfacer_dt.planning.division import Division
from wallfacer_dt.planning.elementwise import feed_forward_bytes
from wallfacer_dt.planning.flops import model_flops
from wallfacer_dt.planning.gpus import GPUS
from wallfacer_dt.planning.known_models import MODELS
from wallfacer_dt.planning.layer import Layer
from wallfacer_dt.planning.only import GROUPS, Only, has
from wallfacer_dt.planning.predict import least_computing, predict_division
from wallfacer_dt.planning.stack import (
    _between_stages,
    _Layer,
    division_memory,
    least_memory,
    rank_weights,
    stack_memory,
)
from wallfacer_dt.planning.step import _once, beside_attention, simulated_step
from wallfacer_dt.planning.units import format_size
from wallfacer_dt.testing import RankPool
from wallfacer_dt.versions import PIPELINES_KEEP_BUFFERS

Ranks = Callable[[int], RankPool]


@examples(40)
@given(st.sampled_from([(1, 1), (2, 1), (4, 4), (8, 4), (12, 4), (16, 2), (24, 8)]), st.integers(1, 16))
def test_divisions_are_all_that_can_be(size: tuple[int, int], sequences: int) -> None:
    """Every product of the ranks tried."""
    where = cluster(*size)
    found = list(divisions(MODEL, SEQUENCE, where, sequences))
    assert len(set(found)) == len(found)
    for it in found:
        assert it.size == where.ranks
        assert it.sequences == sequences
        assert all(group.is_aligned for group in it.groups(where).values())
    sizes = {(it.pipeline, it.replicas, it.shards, it.context.size, it.tensor) for it in found}
    assert sizes == set(possible(where, sequences))
    assert all(it.microbatches >= it.pipeline for it in found)
    assert all(it.interleave == 1 or it.pipeline > 1 for it in found)
    assert {it.context.checkpoint for it in found} <= {"none", "attention", "full"}
    for it in found:
        if "metp" in it.context.layers.values():
            assert it.context.size > 1 == it.tensor
    # Beside others METP is wherever it can be.
    beside = {(it.data > 1, it.pipeline > 1) for it in found if "metp" in it.context.layers.values()}
    assert beside == {(it.data > 1, it.pipeline > 1) for it in found if it.context.size > 1 == it.tensor}


@examples(40)
@given(st.sampled_from([(4, 4), (8, 4), (12, 4)]), st.sampled_from([4, 8, 12]), st.sampled_from([0, 4]), st.data())
def test_divisions_of_groups_that_are_asked_for_are_those_of_all(
    size: tuple[int, int], sequences: int, experts: int, data: st.DataObject
) -> None:
    """Other groups of ranks are passed over."""
    model, where = replace(MODEL, experts=experts, experts_per_token=experts // 2), cluster(*size)
    every = list(divisions(model, SEQUENCE, where, sequences))
    one = data.draw(st.sampled_from(every))
    names = sorted(data.draw(st.sets(st.sampled_from(GROUPS), min_size=1, max_size=3)))
    asked = tuple((name, one.context.size if name == "context" else getattr(one, name)) for name in names)
    found = list(divisions(model, SEQUENCE, where, sequences, groups=asked))
    assert [it for it in found if has(it, asked)] == [it for it in every if has(it, asked)]
    of_ranks = tuple((name, value) for name, value in asked if name not in ("interleave", "microbatch"))
    assert all(has(it, of_ranks) for it in found)


def possible(where: Cluster, sequences: int) -> Iterator[tuple[int, ...]]:
    """By the rules written out: 2 key heads, 4 layers, 192 hidden units, 256 tokens."""
    numbers, per_node = range(1, where.ranks + 1), where.ranks_per_node
    for p, t in product((1, 2, 3, 4), (1, 2)):
        for r, s in product(numbers, numbers):
            c, rest = divmod(where.ranks, p * t * r * s)
            if c == 0 or rest or sequences % (r * s) or sequences < r * s * p or per_node % t or -(-256 // c) % t:
                continue
            if r > 1 and t * s * c % per_node:
                continue
            spans = [(c, t), (s * c, t), (r, t * s * c), (p, t * s * c * r)]
            if all(is_alike(where, *span) for span in spans):
                yield p, r, s, c, t


def is_alike(where: Cluster, size: int, stride: int) -> bool:
    """Whether of a group every node that has some of its ranks has as many."""
    counts: dict[tuple[int, int], int] = {}
    for rank in range(where.ranks):
        place = rank // stride % size
        key = rank - place * stride, rank // where.ranks_per_node
        counts[key] = counts.get(key, 0) + 1
    return len(set(counts.values())) == 1


@pytest.mark.parametrize("where", [(64, 8), (32, 8), (16, 4)])
def test_tensor_ranks_stay_in_a_node_and_divide_heads(where: tuple[int, int]) -> None:
    for heads, keys in ((32, 8), (12, 4), (6, 1)):
        model = replace(MODEL, hidden=96, heads=heads, kv_heads=keys, head_dim=16)
        found = {it.tensor for it in divisions(model, replace(SEQUENCE, length=4096), cluster(*where), 4)}
        assert found == {t for t in (1, 2, 4, 8) if where[1] % t == 0 == heads % t == keys % t}


def test_experts_are_no_tensor_ranks_nor_metps() -> None:
    model = replace(MODEL, experts=8, experts_per_token=2)
    plain, found = ([*divisions(one, SEQUENCE, cluster(16, 4), 4)] for one in (MODEL, model))
    assert {it.tensor for it in plain} > {1} == {it.tensor for it in found}
    assert {it.context.feed_forward for it in plain} > {"plain"} == {it.context.feed_forward for it in found}
    alike = [it for it in plain if it.tensor == 1 and it.context.feed_forward == "plain"]
    assert [it for it in found if it.expert == 1] == alike
    assert "metp" in {it.context.projections for it in found}
    # Experts are dealt to ranks that share weights, and divide them.
    for it in alike:
        dealt = {other.expert for other in found if replace(other, expert=1) == it}
        assert dealt == {e for e in (1, 2, 4, 8) if (it.shards * it.context.size) % e == 0}
    assert len(set(found)) == len(found)


def test_experts_that_are_dealt_to_ranks() -> None:
    """Ranks have as many weights as before, and whole at a time are those of their experts alone."""
    model = replace(MODEL, experts=8, experts_per_token=2, vocab=0)
    one = Division(Candidate(2), shards=4)
    groups = replace(one, expert=4).groups(cluster(8, 4))
    assert (groups["expert"].size, groups["expert"].stride) == (4, 1)
    assert (groups["expert_weights"].size, groups["expert_weights"].stride) == (2, 4)
    experts = 8 * 3 * MODEL.hidden * MODEL.ffn
    short = replace(SEQUENCE, length=16)  # so that weights are most of what there is
    before = division_memory(one, model, short)
    for expert, whole in ((2, experts // 2), (4, experts // 4), (8, experts // 8)):
        memory = division_memory(replace(one, expert=expert), model, short)
        assert (memory.states, memory.kept, memory.working) == (before.states, before.kept, before.working)
        # Of three layers, and of one gradient in float32.
        assert before.gathered - memory.gathered == (3 * 2 + 4) * (experts - whole)
    assert str(replace(one, expert=4)) == "shards 4 x context 2, experts dealt to 4: ring 2, rotates kv"


def test_of_experts_that_are_one_ranks_alone_all_is_cast_and_copied() -> None:
    """In a pipeline once in a step; beyond what is copied of others, in 16 bits: 4 + 2 bytes, and 2 * 4."""
    model = replace(MODEL, experts=8, experts_per_token=2)
    division = Division(Candidate(2), shards=4, pipeline=2)

    def copies(expert: int, rounds: int) -> tuple[float, int]:
        layer = layer_of(replace(division, expert=expert, microbatches=rounds), model=model)
        return beside_attention(layer)["copies"] * KERNELS.merge, sum(layer.weights)

    for rounds in (1, 3):
        (alone, own), (shared, elements) = copies(8, rounds), copies(4, rounds)
        each = (2 + 2) + (2 + 4) + (rounds - 1) * (2 + 2 * 4) + 2 * 4
        dealt = MODEL.layers // 2 * 3 * MODEL.hidden * MODEL.ffn
        assert alone - shared == pytest.approx(MODEL.layers // 2 * each * (own - elements) + (4 + 2 + 2 * 4) * dealt)


@pytest.mark.parametrize(
    ("sizes", "ranks", "left_out"),
    [
        ((192, 64), 16, set()),
        ((200, 64), 16, {1}),
        ((192, 72), 16, {1}),
        ((204, 64), 16, {1, 2}),
        ((204, 60), 8, set()),
    ],
)
def test_what_fsdp2_cannot_shard_is_left_out(sizes: tuple[int, int], ranks: int, left_out: set[int]) -> None:
    """Experts that are fewer than ranks go by their second dim, hidden units or the model's, which must divide."""
    model = replace(MODEL, ffn=sizes[0], hidden=sizes[1], head_dim=16, experts=8, experts_per_token=2)
    found = {it.expert for it in divisions(model, SEQUENCE, cluster(ranks, 4), 1) if it.weight_ranks == ranks}
    assert found == {1, 2, 4, 8} - left_out


def test_experts_take_the_time_of_those_that_a_token_goes_to_and_the_memory_of_all() -> None:
    """Against one feed-forward of as many units as a token meets, and one of all of them."""
    each, model = MODEL.ffn, replace(MODEL, experts=8, experts_per_token=2)
    few, all_of_them = (replace(MODEL, ffn=n * each) for n in (2, 8))
    router = MODEL.hidden * 8
    assert model.ffn_weights - router == all_of_them.ffn_weights
    assert model.ffn_products - router == few.ffn_weights == few.ffn_products
    assert model_flops(model, SEQUENCE) - model_flops(few, SEQUENCE) == 6 * SEQUENCE.length * MODEL.layers * router
    division = Division(Candidate(2))
    layer = layer_of(division)
    products = [
        sum(one.seconds for one in replace(layer, model=some).forward(()) if getattr(one, "what", "") == "feed-forward")
        for some in (model, few)
    ]
    assert products[0] - products[1] == pytest.approx(2 * layer.rows * router / KERNELS.linear)
    # Rows that two experts are given, give, and get gradients of, forward and backward, and their sum's.
    for backward, rows in ((False, 7), (True, 9)):
        moved = [
            feed_forward_bytes(division.context, some, SEQUENCE, layer.rows, backward=backward) for some in (model, few)
        ]
        assert moved[0] - moved[1] == rows * MODEL.hidden * layer.rows * 2
    memory, by_few, by_all = (division_memory(division, some, SEQUENCE) for some in (model, few, all_of_them))
    elements = MODEL.layers * router // 2
    assert memory.weights - by_all.weights == 2 * elements
    # What two experts took and gave of 128 tokens.
    assert memory.kept - by_few.kept == MODEL.layers * 2 * 2 * 128 * MODEL.hidden * 2
    assert memory.gathered > by_all.gathered


def test_stages_have_first_layers_without_experts_or_not() -> None:
    """Of eight layers the first five; two ranks of two stages each, or four, or one."""
    model = replace(MODEL, layers=8, vocab=0, ffn=64, experts=4, experts_per_token=2, dense_layers=5, dense_ffn=500)
    one = Division(Candidate(1), microbatches=4)
    assert one.rank_kinds(model) == one.stage_kinds(model) == ((("dense", 5), ("layer", 3)),)
    four, two = replace(one, pipeline=4), replace(one, pipeline=2, interleave=2)
    stages = (("dense", 2),), (("dense", 2),), (("dense", 1), ("layer", 1)), (("layer", 2),)
    assert four.stage_layers(model) == two.stage_layers(model) == (2, 2, 2, 2)
    assert four.rank_kinds(model) == four.stage_kinds(model) == two.stage_kinds(model) == stages
    assert two.rank_kinds(model) == ((("dense", 3), ("layer", 1)), (("dense", 2), ("layer", 2)))
    assert four.fullest_ranks(model) == [0, 2, 3]
    # Each has the weights of its own, and the steps of a pipeline are as long as the slowest of them.
    experts = replace(model, layers=2, dense_layers=0, dense_ffn=0)
    dense = replace(experts, ffn=500, experts=0, experts_per_token=0)
    each = [rank_weights(one, some, 0) for some in (dense, experts)]
    assert each == [2 * (some.attention_weights + some.ffn_weights + 2 * 64) for some in (dense, experts)]
    told = [rank_weights(four, model, rank) for rank in range(4)]
    assert told == [each[0], each[0], sum(each) / 2, each[1]]
    # In its backward a stage of both keeps what layers of each do; the first holds most activations of layers that are
    # alike.
    kept = [division_memory(one, some, SEQUENCE).kept for some in (dense, experts)]
    assert division_memory(one, model, SEQUENCE).kept == (5 * kept[0] + 3 * kept[1]) / 2
    assert kept[0] > 1.2 * kept[1]
    x = 256 * MODEL.hidden * 2
    staged = division_memory(four, model, SEQUENCE)
    assert staged.kept == 4 * kept[0] + (4 + 4) * x
    assert staged.weights == 2 * each[0]
    # With many experts it is the last stage's weights that count, whose activations are there once.
    many = replace(model, experts=64, ffn=256)
    last = replace(experts, experts=64, ffn=256)
    staged = division_memory(four, many, SEQUENCE)
    assert staged.weights == 2 * rank_weights(one, last, 0)
    assert staged.kept == division_memory(one, last, SEQUENCE).kept + (4 - 1) * x


@pytest.mark.parametrize("dense_ffn", [64, 3000])
def test_the_stage_that_is_slowest_may_be_of_first_layers(dense_ffn: int) -> None:
    """A step takes all stages once, and the slowest three times more."""
    model = replace(
        MODEL, layers=4, vocab=0, ffn=64, experts=4, experts_per_token=2, dense_layers=2, dense_ffn=dense_ffn
    )
    where = Cluster(2, 1, Link(1e40), Link(1e40), kernels=KERNELS)
    halves = Division(Candidate(1), pipeline=2, microbatches=4, last_less=1)
    assert halves.rank_kinds(model) == ((("dense", 2),), (("layer", 2),))
    layer = Layer(halves, model, SEQUENCE, where)
    costs, once = costs_of(layer), sum(_once(layer))
    steps = simulated_step(layer, costs[0].ways)
    slowest = max(steps, key=lambda rank: steps[rank].seconds)
    found = predict_division(halves, model, SEQUENCE, where, *costs)
    assert found.pipeline_rank == slowest == (0 if dense_ffn == 3000 else 1)
    stages = []
    for some in (model.of("dense"), replace(model, dense_layers=0, dense_ffn=0)):
        alone = Layer(Division(Candidate(1)), replace(some, layers=2), SEQUENCE, where)
        stages.append(simulated_step(alone, costs[0].ways)[0].seconds - sum(_once(alone)))
    assert found.seconds == pytest.approx(sum(stages) + 3 * max(stages) + once)
    assert found.compute == pytest.approx(4 * max(stages) + once)


@pytest.mark.parametrize(("length", "is_dealt"), [(256, True), (16384, False)])
def test_experts_are_dealt_out_where_gathering_them_takes_longer(length: int, is_dealt: bool) -> None:
    """Than sending their tokens, which may be few or many."""
    model = replace(MODEL, experts=8, experts_per_token=1, ffn=1024)
    made = divide(model, replace(SEQUENCE, length=length), cluster(8, 1), 8)
    assert (made.chosen.expert > 1) == is_dealt


@pytest.mark.parametrize(
    "name",
    ["tensor", "shards", "replicas", "pipeline", "microbatch", "microbatches", "expert", "loss_chunks", "interleave"],
)
def test_what_is_no_division_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        Division(Candidate(2), **{name: 0})
    if name == "expert":
        with pytest.raises(ValueError, match=r"expert must divide the ranks that share weights, .* got 4 and 6"):
            Division(Candidate(2), shards=3, expert=4)
        for changes in ({"tensor": 2}, {"context": Candidate(2, feed_forward="metp")}):
            with pytest.raises(ValueError, match="expert must be 1 beside tensor parallelism or METP's feed-forward"):
                Division(**({"context": Candidate(2), "expert": 2} | changes))
        for experts in (0, 6):
            sizes = replace(MODEL, experts=experts, experts_per_token=min(experts, 1))
            with pytest.raises(ValueError, match=f"expert must divide experts, got 4 and {experts}"):
                Division(Candidate(4), expert=4).heads_of(sizes)
    elif name == "tensor":
        for what in ("feed_forward", "projections"):
            with pytest.raises(ValueError, match=f"{what} must be 'plain' beside tensor parallelism, got 'metp'"):
                Division(Candidate(2, **{what: "metp"}), tensor=2)
    with pytest.raises(ValueError, match="tensor must divide heads, got 8 and 4"):
        Division(Candidate(1), tensor=8).heads_of(MODEL)
    with pytest.raises(ValueError, match="tensor must divide kv_heads, got 4 and 2"):
        Division(Candidate(1), tensor=4).heads_of(MODEL)


@examples(25)
@given(divided(tensor=1, shards=1, replicas=1, pipeline=1, expert=1), st.integers(1, 3))
def test_where_all_share_a_sequence_it_is_the_plan_there_was(layer: Layer, rounds: int) -> None:
    """Memory as the stack's, whatever the number of microbatches; and of one microbatch time as ``plan`` has it."""
    alike = {"tensor": 1, "shards": 1, "replicas": 1, "pipeline": 1, "expert": 1, "loss_chunks": 1}
    division = replace(layer.division, **alike, microbatches=rounds)
    where = cluster(division.size, min(4, division.size))
    memory = stack_memory(division.context, layer.model, layer.sequence)
    assert division_memory(division, layer.model, layer.sequence) == memory
    if rounds == 1 and division.context.checkpoint == "none":
        axes = {name: getattr(division.context, name) for name in ("ulysses", "ring", "team")}
        made = plan(layer.model, layer.sequence, where, only=axes)
        it = next(one for one in made.ranked if one.candidate.axes == division.context.axes)
        divided = replace(division, context=it.candidate)
        cost = cost_of(replace(layer, division=divided, cluster=where))
        assert predict_division(divided, layer.model, layer.sequence, where, cost) == replace(it.prediction, memory=0)


@examples(40)
@given(divided())
def test_memory_is_at_least_its_least(layer: Layer) -> None:
    division, model, sequence = layer.division, layer.model, layer.sequence
    memory = division_memory(division, model, sequence)
    assert least_memory(division, model, sequence) <= memory.peak
    assert min(memory.weights, memory.gradients, memory.optimizer, memory.kept, memory.working) >= 0
    # All ranks together have every weight; of stages that are unlike the one told of may have few.
    layers = sum(n * (model.attention_weights + model.of(kind).ffn_weights) for kind, n in model.kinds)
    elements = layers + model.layers * 2 * model.hidden
    elements += 2 * model.vocab * model.hidden
    shares = division.tensor * division.weight_ranks * division.pipeline
    if division.pipeline == 1 or not model.dense_layers:
        assert memory.weights * shares >= elements * sequence.dtype.itemsize * (1 - 0.5 * (division.pipeline > 1))
    parts = (1, 1, 2) if sequence.dtype == torch.float32 else (1, 1, 6)
    assert (memory.gradients, memory.optimizer) == (memory.weights * parts[1], memory.weights * parts[2])
    assert (memory.gathered == 0) == (division.weight_ranks == 1)


@examples(25)
@given(divided(tensor=1, shards=1, replicas=1, expert=1), st.sampled_from([2, 3]), st.sampled_from([1, 2]))
def test_a_pipelines_first_rank_needs_no_less_where_its_last_stage_has_less(
    layer: Layer, pipeline: int, interleave: int
) -> None:
    model = replace(layer.model, layers=13, vocab=40_000)
    division = replace(layer.division, pipeline=pipeline, interleave=interleave, microbatches=4 * pipeline)
    needed = [least_memory(replace(division, last_less=0), model, layer.sequence, of_first=True)]
    for less in range(3):
        one = replace(division, last_less=less)
        needed.append(least_memory(one, model, layer.sequence, of_first=True))
        assert needed[-2] <= needed[-1] <= least_memory(one, model, layer.sequence)


# Tensors between stages of two and of four ranks, of one microbatch, of many and of the last of two; and of many how
# many quarters of a stack are kept.
@pytest.mark.parametrize(
    ("torch_keeps", "halved", "single", "quartered", "last", "many", "quarters"),
    [(True, 4 + 2, 1 + 1, 4 + 4, 4 - 1, 2 * 400 - 3 + 3, 3), (False, 0, 1, 0, 1 + 3, 1 + 399, 1)],
)
def test_memory_of_a_stage_by_hand(
    torch_keeps: bool, halved: int, single: int, quartered: int, last: int, many: int, quarters: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The first keeps what its microbatches in flight do, the last one of them, and the loss's.

    And what comes of all microbatches, activations or gradients, and went to the next stage of those in flight; or,
    where torch does not keep these, the gradient sent last, and the last stage what came before.
    """
    monkeypatch.setattr(stack, "PIPELINES_KEEP_BUFFERS", torch_keeps)
    model, x = replace(MODEL, vocab=0), 256 * MODEL.hidden * 2
    one = Division(Candidate(1))
    whole = division_memory(one, model, SEQUENCE)
    halves = replace(one, pipeline=2, microbatches=4)
    staged = division_memory(halves, model, SEQUENCE)
    assert staged.weights == whole.weights / 2
    assert staged.kept == whole.kept + halved * x  # two in flight of half as many layers
    assert division_memory(replace(halves, microbatches=1), model, SEQUENCE).kept == whole.kept / 2 + single * x
    assert division_memory(replace(halves, pipeline=4), model, SEQUENCE).kept == whole.kept + quartered * x
    # Where there are many the second stage, which receives from both sides, holds most, or else the last.
    rounds = division_memory(replace(halves, pipeline=4, microbatches=400), model, SEQUENCE)
    assert rounds.kept == whole.kept * quarters / 4 + many * x
    # Weights and gradients of a stage are whole until the step ends, and added up in float32.
    sharded = division_memory(replace(halves, shards=2), model, SEQUENCE)
    assert division_memory(replace(halves, shards=2, microbatches=1), model, SEQUENCE).gathered == sharded.gathered
    elements = 2 * (model.attention_weights + model.ffn_weights + 2 * model.hidden)
    assert sharded.gathered == (2 + 4) * elements
    assert sharded.weights == whole.weights / 4
    # A vocabulary so large that the last stage holds most.
    wide = replace(MODEL, vocab=10**5)
    loss = division_memory(halves, wide, SEQUENCE)
    # Logits in float32, tokens and targets; a norm's input, its output and its scale. The activations of three
    # microbatches: of one layers keep them.
    kept = whole.kept / 2 + last * x
    assert loss.kept - kept == pytest.approx(256 * (10**5 * 4 + 2 * 8 + 2 * 64 * 2 + 4))
    # In chunks: one's logits and the gradient of its tokens, in float32 gradients of what the norm gave, and those
    # logits three times in float32; or of few tokens their gradient, and that weight's.
    chunked = division_memory(replace(halves, loss_chunks=8), wide, SEQUENCE)
    assert chunked.kept == loss.kept - 256 * 10**5 * 4
    assert chunked.working == 32 * 10**5 * (2 + 3 * 4) + 32 * 64 * 2 + 256 * 64 * 4
    few = division_memory(replace(halves, loss_chunks=8), wide, replace(SEQUENCE, length=32))
    assert few.working == 4 * 10**5 * 2 * 2 + 10**5 * 64 * 2 + 4 * 64 * 2 + 32 * 64 * 4


@pytest.mark.parametrize(("each", "rounds"), [(1, 3), (1, 5), (2, 3), (2, 6)])
def test_what_stages_send_each_other(ranks: Ranks, each: int, rounds: int) -> None:
    """As torch's pipeline has it, on three ranks, of one stage or two: Note [Between stages]."""
    told = _Layer(Division(Candidate(1), pipeline=3, microbatches=rounds, interleave=each), MODEL, SEQUENCE)
    found = ranks(3).run(in_flight_and_between, each, rounds, told.x)
    for rank, (in_flight, between) in enumerate(found):
        assert in_flight == told.division.in_flight(rank, (1,) * each)
        # To a last rank with several stages gradients come before they are due.
        early = 2 if each > 1 and rank == 2 and not PIPELINES_KEEP_BUFFERS else 1
        assert _between_stages(told, rank, in_flight) == pytest.approx(between * told.x, abs=early * told.x)


@pytest.mark.parametrize(("each", "tensors"), [(1, (0, 1, 6)), (2, (8 + 2, 6 + 6, 3 + 8 + 5))])
def test_what_stages_keep_of_each_other_since_torch_2_15(
    each: int, tensors: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By hand, of six microbatches, whatever torch there is: what they gave, sent back, and the last one received."""
    monkeypatch.setattr(stack, "PIPELINES_KEEP_BUFFERS", False)
    told = _Layer(Division(Candidate(1), pipeline=3, microbatches=6, interleave=each), MODEL, SEQUENCE)
    in_flight = (told.division.in_flight(rank, (1,) * each) for rank in range(3))
    assert [_between_stages(told, rank, n) // told.x for rank, n in enumerate(in_flight)] == [*tensors]


def in_flight_and_between(each: int, rounds: int, nbytes: int) -> tuple[int, int]:
    """How many microbatches a rank's stages have in flight at most, and tensors that they receive and give then.

    Without inputs, which layers keep, and what a layer's backward counts.
    """
    rank, device, last = dist.get_rank(), torch.device("cpu"), 3 * each - 1
    stages = [PipelineStage(nn.Linear(64, 64, bias=False), rank + 3 * n, 3 * each, device) for n in range(each)]
    alive, flight, found = Alive(are_resized=False), Counter[int](), []

    def watch(stage: PipelineStage) -> None:
        forward, backward, index = stage.forward_one_chunk, stage.backward_one_chunk, stage.stage_index

        def go(*args: Any, **kwargs: Any) -> Any:
            flight[index] += 1
            return forward(*args, **kwargs)

        def back(*args: Any, **kwargs: Any) -> Any:
            kept, given = (flight.total() - flight[end] for end in (0, last))
            storages = [storage for ref in alive._refs.values() if (storage := ref()) is not None]
            there = sum(storage.nbytes() == nbytes for storage in storages)
            found.append((flight.total(), given - kept, there - kept - flight[last] - (index < last)))
            flight[index] -= 1
            return backward(*args, **kwargs)

        stage.forward_one_chunk, stage.backward_one_chunk = go, back

    for stage in stages:
        watch(stage)
    of = {"loss_fn": lambda out, target: (out - target).sum()}
    schedule = Schedule1F1B(stages[0], rounds, **of) if each == 1 else ScheduleInterleaved1F1B(stages, rounds, **of)
    x = torch.zeros(rounds, nbytes // 4 // 64, 64)
    with alive:
        ends = {"target": x, "losses": []} if rank == 2 else {}
        schedule.step(*[x] * (rank == 0), return_outputs=False, **ends)
    in_flight, more, between = max(reversed(found), key=itemgetter(0))
    if PIPELINES_KEEP_BUFFERS:  # the rest of what there is are gloo's sends, which nobody has waited for yet
        comes = chain.from_iterable([*one.args_recv_info.values(), *one.grad_recv_info.values()] for one in stages)
        buffers = [one for infos in comes for one in infos if getattr(one, "buffer", None) is not None]
        assert all(one.buffer.nbytes == nbytes for one in buffers)
        return in_flight, len(buffers) + more
    return in_flight, between


def test_tensor_ranks_have_a_part_of_all_but_what_they_gather() -> None:
    one, two = (division_memory(Division(Candidate(1), tensor=t), replace(MODEL, vocab=0), SEQUENCE) for t in (1, 2))
    norms = MODEL.layers * 2 * MODEL.hidden
    assert 2 * two.weights - one.weights == 2 * norms
    tokens = 256 * MODEL.hidden * 2
    # Of a layer two norms' outputs are whole.
    assert 2 * two.kept - one.kept == pytest.approx(MODEL.layers * 2 * tokens, rel=1e-3)


def test_six_attentions_of_each_token_order_are_tried() -> None:
    """Under a window tokens may lie in either."""
    where, causal = cluster(8, 4), replace(SEQUENCE, is_causal=True)
    for sequence, orders in (
        (causal, {"head_tail": 6}),
        (replace(causal, window_size=(100, 0)), {"contiguous": 6, "head_tail": 6}),
    ):
        whole = next(one for one in divisions(MODEL, sequence, where, 1) if one.context.size == 8)
        tried = _Search(MODEL, sequence, where)._attentions(whole)
        assert Counter(one.order for one in tried) == orders


@examples(8)
@given(
    size=st.sampled_from([(4, 4), (8, 2), (8, 8)]), window=st.sampled_from([None, 20, 100]), launch=HOSTS,
    half_rows=st.sampled_from([0.0, 64.0]), causal=st.booleans(), windowed=st.sampled_from([None, 1]),
)  # fmt: skip
def test_attentions_that_are_not_looked_at_take_longer(
    size: tuple[int, int], window: int | None, launch: float, half_rows: float, causal: bool, windowed: int | None
) -> None:
    """What is said of some at least, they take at least, alone: by devices, and by hosts as well."""
    where = cluster(*size, kernels=replace(KERNELS, launch=launch, half_rows=half_rows))
    bounds = None if window is None else (window, 0 if causal else window)
    sequence, model = replace(SEQUENCE, is_causal=causal, window_size=bounds), replace(MODEL, windowed_layers=windowed)
    kinds: dict[tuple, list[Candidate]] = {}
    for one in attentions(model, sequence, where):
        kinds.setdefault((one.order, one.axes, one.schedule), []).append(one)
    for alike in map(tuple, kinds.values()):
        ways = least_computing(alike, model, sequence, where.kernels, together=False)
        (device, _), (both, _) = _alone(alike, model, where, 1, sequence)
        assert sum(way.seconds for way in ways) <= device[0] * (1 + 1e-9)
        assert sum(max(way.seconds, way.host) for way in ways) <= both[0] * (1 + 1e-9)


def test_other_rotations_are_tried_where_the_fastest_do_not_fit() -> None:
    """Of ring 2 x team 4 that is the one which rotates keys forward and queries backward."""
    where = cluster(8, 4, kernels=replace(KERNELS, launch=1e-5), memory=838_560)
    only: dict[str, int | str] = {"ring": 2, "team": 4, "schedule": "2d"}
    made = divide(MODEL, replace(SEQUENCE, is_causal=False, window_size=(100, 100)), where, 4, only=only)
    context = made.chosen.context
    assert (context.size, context.axes, context.rotate_forward, context.rotate) == (8, (1, 2, 4), "kv", "q")
    assert made.prediction.seconds == pytest.approx(0.06388, rel=1e-3)
    # But not those that are not asked for.
    only |= {"rotate": "kv", "microbatch": made.chosen.microbatch}
    with pytest.raises(PlanningError, match="nothing fits"):
        divide(MODEL, made.sequence, where, 4, only=only | context.layers)


@pytest.mark.parametrize(("pipeline", "windowed", "like"), [(4, 2, [0]), (2, 2, [0, 4]), (4, 4, [4]), (2, 3, [0, 4])])
def test_of_stages_that_with_most_layers_without_a_window_counts(pipeline: int, windowed: int, like: list[int]) -> None:
    """It takes as long as one of which all layers are so, or as the mean of both."""
    division = Division(Candidate(2, order="head_tail"), pipeline=pipeline, microbatches=4)
    sequence, where = replace(SEQUENCE, window_size=(20, 0)), cluster(2 * pipeline, 2)

    def predicted(layers: int) -> tuple[float, float]:
        layer = Layer(division, replace(MODEL, windowed_layers=layers), sequence, where)
        found = predict_division(division, layer.model, sequence, where, *costs_of(layer))
        return found.seconds, found.rank_bytes

    assert predicted(4)[0] < 0.95 * predicted(0)[0]
    expected = [sum(some) / len(like) for some in zip(*map(predicted, like), strict=True)]
    assert predicted(windowed) == pytest.approx(expected)


@pytest.mark.parametrize("size", [(4, 2), *(pytest.param(more, marks=pytest.mark.whole) for more in ((4, 4), (8, 4)))])
@examples(5)
@given(
    sequences=st.sampled_from([1, 2, 4]),
    tight=st.floats(0.3, 1.5),
    causal=st.booleans(),
    window=st.sampled_from([None, 20, 100]),
    launch=HOSTS,
    experts=st.sampled_from([0, 0, 4]), dense=st.sampled_from([0, 1, 3]),
    windowed=st.sampled_from([None, None, 1]),
    only=st.sampled_from([
        {}, {}, {"checkpoint": "full"}, {"ring": 2, "rotate": "kv"}, {"tensor": 1, "team": 2},
        {"shards": 2, "microbatch": 1}, {"context": 4, "placement": "team_in_node"}, {"projections": "metp"},
        {"pipeline": 2},
    ]),
    layers=st.sampled_from([4, 4, 5]), vocab=st.sampled_from([100, 100, 3000]),
    documents=st.sampled_from([(), (), (100, 7), (30,)]), has_latents=st.sampled_from([False, False, True]),
    segments=st.booleans(),
)  # fmt: skip
def test_the_chosen_is_the_fastest_that_fits(
    size: tuple[int, int], sequences: int, tight: float, causal: bool, window: int | None, launch: float, experts: int,
    dense: int, windowed: int | None, only: dict[str, int | str], layers: int, vocab: int, documents: tuple[int, ...],
    has_latents: bool, segments: bool,
) -> None:  # fmt: skip
    """Every division with every attention predicted: none that fits, and is asked for, is faster by more than 1% (see
    _TRIED).
    """
    asked = Only.of(only, divides=True)
    bounds = None if window is None else (window, 0 if causal else window)
    model = replace(
        MODEL, experts=experts, experts_per_token=experts // 2, windowed_layers=windowed, layers=layers, vocab=vocab
    )
    if experts and dense:
        model = replace(model, dense_layers=dense, dense_ffn=500)
    if has_latents:
        latents = {"kv_rank": 16, "q_rank": 24, "rotary_dim": 4, "value_dim": 8, "shared_ffn": experts * 32}
        model = replace(model, kv_heads=model.heads, **latents)
    where = cluster(*size, kernels=replace(KERNELS, launch=launch, takes_segments=segments))
    sequence = replace(SEQUENCE, is_causal=causal, window_size=bounds, documents=documents)
    typical = division_memory(next(divisions(model, sequence, where, sequences)), model, sequence).peak
    where = replace(where, memory=int(tight * typical))
    every: list[tuple[float, Division, SequenceShape]] = []
    for division, less in product(divisions(model, sequence, where, sequences), range(model.layers)):
        staged = replace(division, last_less=less)
        if less and (division.pipeline == 1 or min(staged.stage_layers(model)) < 1):
            continue
        heads, taken = division.heads_of(model), replace(sequence, batch=division.microbatch)
        for attention in attentions_of(division, heads, sequence, where):
            one = replace(staged, context=replace(attention, **division.context.layers))
            if not (has(one, asked.groups) and has(one.context, asked.attention + asked.layers)):
                continue
            layer = Layer(one, model, taken, where)
            every.append((predict_division(one, model, taken, where, *costs_of(layer)).seconds, one, taken))
    best: dict[int, float] = {}
    for seconds, one, taken in sorted(every, key=lambda it: it[0]):
        size = one.context.size
        if size not in best and division_memory(one, model, taken).peak <= where.memory:
            best[size] = seconds
    if not best:
        with pytest.raises(PlanningError, match="nothing fits" if every else "no plan has "):
            divide(model, sequence, where, sequences, only=only)
        return
    made = divide(model, sequence, where, sequences, only=only, keep=1)
    assert has(made.chosen, asked.groups)
    assert has(made.chosen.context, asked.attention + asked.layers)
    assert len(made.ranked) == 1
    assert made.prediction.seconds <= min(best.values()) * 1.01
    assert made.prediction.memory <= where.memory
    assert {one.division.context.size for one in made.by_context} == set(best)
    for one in made.by_context:
        assert best[one.division.context.size] <= one.seconds * (1 + 1e-9)
        assert one.seconds <= best[one.division.context.size] * 1.01


def test_ranked_are_different_and_in_order() -> None:
    made = divide(MODEL, SEQUENCE, cluster(8, 4), 4, keep=7)
    assert len(made.ranked) == 7
    assert all(before.seconds <= after.seconds for before, after in pairwise(made.ranked))
    kinds = [(d.pipeline, d.replicas, d.shards, d.context.size, d.tensor) for d in (o.division for o in made.ranked)]
    assert len(set(kinds)) == 7
    assert made.ranked[0].why.startswith("fastest: ")
    assert all(one.why.startswith("+") for one in made.ranked[1:])
    assert made.chosen.size == 8
    assert made.considered == len(list(divisions(MODEL, SEQUENCE, cluster(8, 4), 4)))
    assert made.contexts == (1, 2, 4, 8)


def test_what_does_not_fit_is_not_ranked_and_every_number_of_context_ranks_is_looked_for() -> None:
    free = divide(MODEL, SEQUENCE, cluster(8, 4), 4, keep=1)
    assert [one.division.context.size for one in free.by_context] == [1, 2, 4, 8]
    memory = free.prediction.memory - 1
    tight = divide(MODEL, SEQUENCE, cluster(8, 4, memory=memory), 4, keep=3)
    assert all(one.prediction.memory <= memory for one in (*tight.ranked, *tight.by_context))
    assert tight.prediction.seconds >= free.prediction.seconds


@pytest.mark.parametrize(
    ("changes", "about", "message"),
    [
        ({"sequences": 2**20 + 1}, "sequences", "must be at most 1048576, got 1048577"),
        ({"model": replace(MODEL, ffn=0)}, "ffn", "there is no feed-forward"),
        ({"cluster": cluster(8, 4, memory=1000)}, "memory", "nothing fits: memory is 1 kB a rank, and the least"),
    ],
)
def test_what_cannot_be_divided_is_refused_by_name(changes: dict, about: str, message: str) -> None:
    given = {"model": MODEL, "sequence": SEQUENCE, "cluster": cluster(8, 4), "sequences": 4} | changes
    with pytest.raises(PlanningError, match=message) as refused:
        divide(**given)
    assert refused.value.about == about


@pytest.mark.parametrize(
    ("layers", "vocab", "only"),
    [
        (4, 100, {}), (8, 3000, {"pipeline": 4}), (9, 0, {"pipeline": 4}), (9, 2000, {"pipeline": 2, "interleave": 2}),
    ],
)  # fmt: skip
def test_the_least_that_is_needed_is_that_of_all(layers: int, vocab: int, only: dict[str, int | str]) -> None:
    model, where, asked = (
        replace(MODEL, layers=layers, vocab=vocab),
        cluster(8, 4, memory=1),
        Only.of(only, divides=True),
    )
    every = list(divisions(model, SEQUENCE, where, 4, groups=asked.groups))
    search = _Search(model, SEQUENCE, where, asked)
    for one in every:
        search.add(one)
    staged = (replace(one, last_less=n) for one, n in product(every, range(layers)) if n == 0 or one.pipeline > 1)
    needed = [
        least_memory(one, model, replace(SEQUENCE, batch=one.microbatch))
        for one in staged if min(one.stage_layers(model)) > 0
    ]  # fmt: skip
    assert search.least_needed() == min(needed)


def test_of_many_layers_few_stages_are_asked_for_what_they_need() -> None:
    """As where somebody mistypes their number."""
    model, where = replace(MODEL, layers=10_000), cluster(8, 4, memory=1000)
    refused = pytest.raises(PlanningError, match=r"nothing fits: .* needs is 1\.31 GB or more")
    with mock.patch.object(dividing, "least_memory", wraps=least_memory) as asked, refused:
        divide(model, SEQUENCE, where, 8, only={"pipeline": 8})
    assert asked.call_count < 50


def test_what_is_no_request_is_refused() -> None:
    with pytest.raises(ValueError, match="keep must be at least 1, got 0"):
        divide(MODEL, SEQUENCE, cluster(), 1, keep=0)
    with pytest.raises(ValueError, match="sequences must be at least 1, got 0"):
        divide(MODEL, SEQUENCE, cluster(), 0)
    with pytest.raises(TypeError, match="sequences must be an int, got True"):
        divide(MODEL, SEQUENCE, cluster(), True)
    with pytest.raises(ValueError, match="batch must be 1 where ranks are divided"):
        divide(MODEL, replace(SEQUENCE, batch=2), cluster(), 1)


def contexts(*seconds: float) -> DivisionPlan:
    """With 1, 2, 4, ... context ranks of so many seconds."""
    made = divide(MODEL, SEQUENCE, cluster(1, 1), 1)
    by_context = tuple(
        replace(
            made.ranked[0],
            division=Division(Candidate(2**i)),
            prediction=replace(made.prediction, seconds=one),
        )
        for i, one in enumerate(seconds)
    )
    return replace(made, by_context=by_context, contexts=tuple(2**i for i in range(len(seconds))))


@pytest.mark.parametrize(
    ("seconds", "enough"),
    [((1.0,), 1), ((4, 2, 1), 4), ((1, 2, 3), 1), ((2, 1, 0.995, 1.2), 2), ((2, 1, 0.98, 1.2), 4), ((1, 1.1, 0.5), 4)],
)
def test_enough_context_ranks(seconds: tuple[float, ...], enough: int) -> None:
    assert contexts(*seconds).enough_context() == enough


@pytest.mark.parametrize("gain", [-0.1, 1, 2, math.nan])
def test_a_gain_that_is_no_part_of_a_step(gain: float) -> None:
    made = contexts(2, 1)
    assert (made.enough_context(0), made.enough_context(0.4), made.enough_context(0.5)) == (2, 2, 1)
    with pytest.raises(ValueError, match=f"gain must be at least 0 and below 1, got {gain}"):
        made.enough_context(gain)


@examples(100)
@given(st.integers(1, 5000))
def test_divisors_are_all_numbers_that_divide(number: int) -> None:
    assert _divisors(number) == tuple(n for n in range(1, number + 1) if number % n == 0)


@examples(60)
@given(
    st.integers(1, 130), st.integers(2, 32), st.integers(1, 3), st.integers(0, 4),
)  # fmt: skip
def test_stages_have_the_layers_that_torchtitan_gives_them(layers: int, ranks: int, each: int, less: int) -> None:
    split = pytest.importorskip("torchtitan.distributed.pipeline_parallel")._generate_llm_fqn_per_model_part
    assume((layers + 1 + less) // (ranks * each) >= max(1, less))  # or it refuses
    division = Division(Candidate(1), pipeline=ranks, interleave=each, last_less=less)
    parts = split(ranks * each, layers, 1, less)
    counts = [sum(name.startswith("layers.") for name in part) for part in parts]
    assert division.stage_layers(replace(MODEL, layers=layers)) == tuple(counts)
    assert division.rank_layers(replace(MODEL, layers=layers)) == tuple(sum(counts[r::ranks]) for r in range(ranks))


@pytest.mark.parametrize(
    ("layers", "vocab", "pipeline", "stages"),
    [
        (4, 0, 2, (2, 2)), (5, 0, 2, (2, 3)), (126, 0, 16, (7, *[8] * 14, 7)),
        # The output projection and the loss take as long as two layers, or a little longer.
        (8, 2048, 4, (2, 3, 2, 1)), (12, 2048, 4, (3, 4, 3, 2)), (4, 2048, 4, (1, 1, 1, 1)),
    ],
)  # fmt: skip
def test_the_last_stage_has_fewer_layers(layers: int, vocab: int, pipeline: int, stages: tuple[int, ...]) -> None:
    """Of all that it may have fewer the slowest stage is then as quick as can be."""
    model, where = replace(MODEL, layers=layers, vocab=vocab), cluster(pipeline, 1)
    made = divide(model, SEQUENCE, where, pipeline, only={"pipeline": pipeline, "interleave": 1, "checkpoint": "none"})
    assert {one.division.stage_layers(model) for one in made.ranked} == {stages}


def test_what_fits_with_fewer_layers_on_the_last_stage_is_found() -> None:
    """Where that one holds most, of its logits."""
    model, sequence = ModelShape(2048, 16, 8, ffn=8192, layers=18, vocab=256000), SequenceShape(4096, is_causal=True)
    one = Division(Candidate(1, order="head_tail", checkpoint="full"), pipeline=8, microbatches=8, loss_chunks=8)
    most, least = (division_memory(replace(one, last_less=n), model, sequence).peak for n in (0, 1))
    assert least < most
    where, only = GPUS["h100"].cluster(8), {"pipeline": 8, "interleave": 1, "checkpoint": "full"}
    made = divide(model, sequence, replace(where, memory=least), 8, only=only)
    assert (made.chosen, made.prediction.memory) == (replace(one, last_less=1), least)
    with pytest.raises(PlanningError, match="nothing fits"):
        divide(model, sequence, replace(where, memory=least - 1), 8, only=only)


def test_stages_that_take_longer_are_had_where_the_quickest_do_not_fit() -> None:
    model, sequence, where = replace(MODEL, layers=8, vocab=3000), replace(SEQUENCE, length=1024), cluster(4, 1)
    one = Division(Candidate(1, order="head_tail"), pipeline=4, microbatches=8, loss_chunks=8)
    only = {"pipeline": 4, "interleave": 1, "checkpoint": "none", "microbatch": 1}
    assert divide(model, sequence, where, 8, only=only).chosen == replace(one, last_less=1)
    memory = division_memory(one, model, sequence).peak
    made = divide(model, sequence, replace(where, memory=memory), 8, only=only)
    assert (made.chosen, made.prediction.memory) == (one, memory)


def test_what_is_computed_again_is_tried_in_its_turn() -> None:
    """Divisions are as fast as the fastest of those that compute nothing again, a part, or all."""
    model, sequence, where = replace(MODEL, layers=4, vocab=3000), replace(SEQUENCE, length=1024), cluster(4, 2)
    where = replace(where, memory=divide(model, sequence, where, 8, keep=1).prediction.memory // 2)
    every = [divide(model, sequence, where, 8, only={"checkpoint": name}, keep=100).ranked for name in CHECKPOINTS]
    fastest: dict[tuple[int, ...], RankedDivision] = {}
    for one in sorted(chain(*every), key=attrgetter("seconds")):
        fastest.setdefault(_kind(one.division), one)
    ranked = divide(model, sequence, where, 8, keep=100).ranked
    assert {_kind(one.division): one.seconds for one in ranked} == {k: one.seconds for k, one in fastest.items()}
    assert [one.seconds for one in ranked] == [one.seconds for one in fastest.values()]
    assert {one.division.context.checkpoint for one in ranked} > {"none"}


@pytest.mark.parametrize("layers", [8, 12, 16])
@pytest.mark.parametrize("vocab", [1000, 8000])
def test_what_fits_is_found_whatever_layers_the_last_stage_has(layers: int, vocab: int) -> None:
    """And of what does not fit the least that is needed is told."""
    model, sequence, where = replace(MODEL, layers=layers, vocab=vocab), replace(SEQUENCE, length=64), cluster(4, 4)
    only = {"pipeline": 4, "interleave": 1}
    some = [
        (replace(one, last_less=less), replace(sequence, batch=one.microbatch))
        for one in divisions(model, sequence, where, 8)
        if (one.pipeline, one.interleave) == (4, 1)
        for less in range(layers)
        if min(replace(one, last_less=less).stage_layers(model)) > 0
    ]
    least = min(division_memory(one, model, each).peak for one, each in some)
    made = divide(model, sequence, replace(where, memory=math.ceil(1.01 * least)), 8, only=only)
    assert least <= made.prediction.memory <= 1.01 * least + 1
    bound = min(least_memory(one, model, each) for one, each in some)
    with pytest.raises(PlanningError, match=re.escape(f"needs is {format_size(bound)} or more")):
        divide(model, sequence, replace(where, memory=bound // 2), 8, only=only)


def test_layers_less_are_looked_for_beyond_those_that_make_nothing_quicker() -> None:
    """Where weights are waited for: one less takes longer than none, and five take less."""
    model = ModelShape(2048, 16, ffn=8192, layers=60, vocab=2**18)
    where = Cluster(10, 1, Link(3e11, 5e-6), Link(1e10, 1e-5), kernels=GPUS["h100"].kernels(128))
    sequence = SequenceShape(4096, is_causal=True)
    only = {"pipeline": 5, "shards": 2, "interleave": 1, "checkpoint": "none", "microbatch": 1}
    one = divide(model, sequence, where, 10, only=only).chosen
    layer, found = Layer(one, model, sequence, where), []
    for less in range(12):
        it = replace(one, last_less=less)
        found.append(predict_division(it, model, sequence, where, *costs_of(replace(layer, division=it))).seconds)
    assert found[0] < found[1]
    assert one.last_less > 1
    assert found[one.last_less] <= min(found) * (1 + 1e-3)


def test_ranks_of_a_pipeline_have_one_stage_or_two() -> None:
    """Or as many as are asked for; where layers are enough, and microbatches go round evenly."""
    model, where = replace(MODEL, layers=9), cluster(4, 1)
    by_microbatches: dict[int, set[int]] = {}
    for it in divisions(model, SEQUENCE, where, 12):
        if it.pipeline == 4:
            by_microbatches.setdefault(it.microbatches, set()).add(it.interleave)
    assert by_microbatches == {4: {1, 2}, 6: {1, 2}, 12: {1, 2}}
    ten = {it.interleave for it in divisions(model, SEQUENCE, where, 11) if it.pipeline == 4}
    assert ten == {1}  # of 11 microbatches there are two rounds
    assert {it.interleave for it in divisions(model, SEQUENCE, where, 12) if it.pipeline == 1} == {1}
    assert divide(model, SEQUENCE, where, 12, only={"interleave": 4, "pipeline": 2}).chosen.interleave == 4
    for wrong in (3, 10**9, 0, "2"):
        with pytest.raises(PlanningError, match="no plan has "):
            divide(model, SEQUENCE, where, 12, only={"interleave": wrong, "pipeline": 4})


def test_there_is_no_stage_without_a_layer() -> None:
    found = {it.pipeline for it in divisions(replace(MODEL, layers=3), SEQUENCE, cluster(8, 1), 8)}
    assert found == {1, 2}


def test_slow_nodes_are_told_apart_by_a_pipeline() -> None:
    """Where hardly anything can be sent between two nodes, stages are on them."""
    model = replace(MODEL, hidden=512, head_dim=16, ffn=2048, vocab=0)
    where = cluster(8, 4, inter=Link(1e6), intra=Link(1e10, 1e-6))
    made = divide(model, replace(SEQUENCE, length=64), where, 32)
    assert made.chosen.pipeline == 2
    fast = divide(model, replace(SEQUENCE, length=64), cluster(8, 4, inter=Link(1e12), intra=Link(1e12)), 32)
    assert fast.chosen.pipeline == 1


def lines(gpus: str, model: str, length: int, sequences: int, **changes: int) -> str:
    name, ranks = gpus.split("x")
    made = divide(
        replace(MODELS[model].shape, **changes), SequenceShape(length, is_causal=True),
        GPUS[name].cluster(int(ranks)), sequences, keep=4,
    )  # fmt: skip
    ranked = [
        f"{one.seconds:.3f} s, {one.prediction.memory / 1e9:.1f} GB, {one.why}\n  {one.division}" for one in made.ranked
    ]
    by_context = ", ".join(f"{one.division.context.size}: {one.seconds:.3f}" for one in made.by_context)
    return "\n".join([f"of {made.considered}", *ranked, by_context, f"enough: {made.enough_context()}"])


@pytest.mark.slow
def test_golden_llama3_8b_on_16_h100s() -> None:
    assert_expected_inline(
        lines("h100x16", "llama3-8b", 32768, 16),
        """\
of 1035
5.752 s, 59.1 GB, fastest: 2% of the step is waiting
  shards 4 x context 4, 4 microbatches of 1: ulysses 4, head-tail
5.779 s, 67.2 GB, +0.5%: waits 19.8 ms longer
  replicas 2 x shards 2 x context 4, 4 microbatches of 1: ulysses 4, head-tail
5.797 s, 59.1 GB, +0.8%: computes 104 ms longer (smaller tiles, more merging, or idle heads)
  shards 2 x context 8, 4 microbatches of 2: team 8, 2d, rotates q, head-tail
5.823 s, 67.3 GB, +1.2%: computes 111 ms longer (smaller tiles, more merging, or idle heads)
  replicas 2 x context 8, 4 microbatches of 2: team 8, 2d, rotates q, head-tail
1: 6.140, 2: 5.868, 4: 5.752, 8: 5.797, 16: 5.850
enough: 4""",
    )


@pytest.mark.slow
def test_golden_llama3_70b_on_32_a100s() -> None:
    assert_expected_inline(
        lines("a100x32", "llama3-70b", 8192, 32),
        """\
of 2331
21.355 s, 70.5 GB, fastest: 0% of the step is waiting
  shards 32: one rank, head-tail, checkpoint attention
21.400 s, 70.6 GB, +0.2%: waits 35.4 ms longer
  shards 16 x context 2: ulysses 2, head-tail, checkpoint attention
21.462 s, 70.6 GB, +0.5%: waits 103 ms longer
  shards 8 x context 4: ulysses 4, head-tail, checkpoint attention
21.540 s, 70.6 GB, +0.9%: computes 185 ms longer (smaller tiles, more merging, or idle heads)
  shards 4 x context 8: team 8, 2d, rotates q, head-tail, checkpoint attention
1: 21.355, 2: 21.400, 4: 21.462, 8: 21.540, 16: 21.640, 32: 21.946
enough: 1""",
    )


@pytest.mark.slow
def test_golden_qwen3_8b_on_8_h200s() -> None:
    assert_expected_inline(
        lines("h200x8", "qwen3-8b", 131072, 2),
        """\
of 96
16.118 s, 115.7 GB, fastest: 0% of the step is waiting
  context 8, 2 microbatches of 1: team 8, 2d, rotates q, head-tail
16.277 s, 123.3 GB, +1.0%: waits 210 ms longer
  context 4 x tensor 2, 2 microbatches of 1: team 4, 2d, rotates q, head-tail
16.692 s, 94.2 GB, +3.6%: computes 521 ms longer (METP's units once more and METP's sums)
  shards 2 x context 4: ulysses 4, head-tail, METP
17.025 s, 49.0 GB, +5.6%: computes 553 ms longer (layers but for attention twice)
  shards 2 x context 2 x tensor 2: ulysses 2, head-tail, checkpoint attention
1: 17.620, 2: 17.025, 4: 16.277, 8: 16.118
enough: 4""",
    )
