"""METP's attention in a plan: what is received and computed, in which order, and how long it takes at least."""

import copy
from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.parallel import parallelize_module

from tests.divided import KERNELS, cluster
from tests.plan_cases import Attention, Tracked, kernels_without_workspace
from tests.strategies import examples, meshes
from wallfacer_dt import (
    Cluster,
    Link,
    METPAttentionParallel,
    ModelShape,
    SequenceShape,
    TokenOrder,
    WallFacerParallel,
    context_mesh,
    metp_attention_volume,
    plan,
    shard_sequence,
)
from wallfacer_dt.command.planning.usage import code_of
from wallfacer_dt.planning import Candidate, PlanningError
from wallfacer_dt.planning.candidates import FEED_FORWARDS, attentions, with_layers
from wallfacer_dt.planning.division import Division
from wallfacer_dt.planning.dry_run import projected_peak
from wallfacer_dt.planning.layer import Layer
from wallfacer_dt.planning.memory import projected_memory
from wallfacer_dt.planning.only import ATTENTION
from wallfacer_dt.planning.predict import attention_cost, least_projections, predict
from wallfacer_dt.planning.projections import ProjectedAttention
from wallfacer_dt.planning.search import _Search
from wallfacer_dt.planning.stack import division_memory, stack_memory
from wallfacer_dt.planning.step import Spent, least_step
from wallfacer_dt.planning.timeline import Begin, Compute, End
from wallfacer_dt.planning.units import format_size
from wallfacer_dt.testing import RankPool, worst_error
from wallfacer_dt.testing.fake import fake_world

MODEL = ModelShape(hidden=64, heads=8, kv_heads=4, ffn=192, layers=2)
SEQUENCE = SequenceShape(256, is_causal=True)


@st.composite
def projected(draw: st.DrawFn, largest: int = 12) -> tuple[Candidate, ModelShape, SequenceShape, int]:
    """Any of METP's attentions, and how many ranks share a node; heads need not divide."""
    ranks = draw(st.integers(1, largest))
    kv_heads = draw(st.integers(1, 5))
    model = ModelShape(
        draw(st.integers(1, 40)), kv_heads * draw(st.integers(1, 3)), kv_heads, head_dim=8, ffn=draw(st.integers(1, 64))
    )
    sequence = SequenceShape(
        ranks * draw(st.integers(1, 6)), draw(st.integers(1, 2)), draw(st.booleans()),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
    )  # fmt: skip
    per_node = draw(st.sampled_from([n for n in range(1, ranks + 1) if ranks % n == 0]))
    some = [one for one in attentions(model, sequence, cluster(ranks, per_node)) if one.ulysses == 1]
    return replace(draw(st.sampled_from(some)), projections="metp"), model, sequence, per_node


@examples(60)
@given(projected())
def test_what_is_received_is_what_the_formula_says(drawn: tuple[Candidate, ModelShape, SequenceShape, int]) -> None:
    """To the byte, of every rank the weights and gradients, and of the one that receives most all."""
    it, model, sequence, per_node = drawn
    sizes = {
        "batch": sequence.batch, "length": sequence.length, "model_dim": model.hidden, "heads": model.heads,
        "kv_heads": model.keys, "head_dim": model.dim, "dtype": sequence.dtype,
    }  # fmt: skip
    cost = attention_cost(it, model, sequence, cluster(it.size, per_node))
    attending = ProjectedAttention(it, model, sequence, cluster(it.size, per_node))
    for way, backward in (("forward", False), ("backward", True)):
        received = [
            getattr(
                metp_attention_volume(
                    it.ring, it.team, schedule=it.schedule, rotate=it.rotate, rotate_forward=it.rotate_forward,
                    index=index, **sizes,
                ),
                way,
            ).bytes
            for index in range(it.size)
        ]  # fmt: skip
        assert cost.rank_bytes[backward] == max(received)
        # Those of a model of as wide heads, and nothing to project, are attention's.
        empty = [
            getattr(
                metp_attention_volume(
                    it.ring, it.team, schedule=it.schedule, rotate=it.rotate, rotate_forward=it.rotate_forward,
                    index=index, **(sizes | {"model_dim": 0}),
                ),
                way,
            ).bytes
            for index in range(it.size)
        ]  # fmt: skip
        weights = attending.received(backward=backward).tolist()
        assert weights == [one - other for one, other in zip(received, empty, strict=True)]


@examples(40)
@given(projected())
def test_every_transfer_begins_once_and_is_waited_for(drawn: tuple[Candidate, ModelShape, SequenceShape, int]) -> None:
    it, model, sequence, per_node = drawn
    where = cluster(it.size, per_node)
    cost = attention_cost(it, model, sequence, where)
    for way in cost.ways:
        begun = [one.name for one in way.events if isinstance(one, Begin)]
        assert sorted(begun) == sorted(one.name for one in way.events if isinstance(one, End))
        assert len(set(begun)) == len(begun)
        # None is waited for before it begins.
        order = {(type(one), one.name): i for i, one in enumerate(way.events) if not isinstance(one, Compute)}
        assert all(order[Begin, name] < order[End, name] for name in begun)


@examples(40)
@given(projected())
def test_attention_and_its_projections_are_computed_once(
    drawn: tuple[Candidate, ModelShape, SequenceShape, int],
) -> None:
    """In the forward each product once; the backward has inputs and weights of each, and projects anew."""
    it, model, sequence, per_node = drawn
    where = cluster(it.size, per_node, kernels=replace(KERNELS, overhead=0.0))
    both, alone = (attention_cost(replace(it, projections=name), model, sequence, where) for name in ("metp", "plain"))
    outward = model.hidden * model.heads * model.dim
    tokens = sequence.batch * sequence.length // it.size
    for one, other, weights in (
        (both.forward, alone.forward, model.attention_weights),
        (both.backward, alone.backward, 3 * model.attention_weights - outward),
    ):
        assert one.compute - other.compute == pytest.approx(2 * tokens * weights / KERNELS.linear)


@examples(60)
@given(projected(), st.sampled_from(FEED_FORWARDS), st.sampled_from([0.0, 1e-4, 1e-2, 1.0]))
def test_a_step_is_no_shorter_than_its_least(
    drawn: tuple[Candidate, ModelShape, SequenceShape, int], feed_forward: str, latency: float
) -> None:
    """What the search looks at plans by: attention of all heads at once, and the projections' work beside."""
    it, model, sequence, per_node = drawn
    where = cluster(it.size, per_node, inter=Link(1e8, latency))
    it = replace(it, feed_forward=feed_forward if it.size > 1 else "plain")
    spent = [
        Spent.of(way.line) for way in attention_cost(replace(it, projections="plain"), model, sequence, where).ways
    ]
    least = [a.between(b) for a, b in zip(spent, least_projections(it, model, sequence, where), strict=True)]
    layer = Layer(Division(it, microbatch=sequence.batch), model, sequence, where)
    step = predict(it, model, sequence, where, attention_cost(it, model, sequence, where))
    assert least_step(layer, *least) <= step.seconds * (1 + 1e-9)


def test_order_of_events_by_hand() -> None:
    """Two ranks, two groups: the next weights are sent before a group is computed, gradients while the next one is."""
    model = ModelShape(hidden=16, heads=2)
    attending = ProjectedAttention(Candidate(2, projections="metp"), model, SEQUENCE, cluster(2, 2))
    said = {Begin: "begin ", End: "end ", Compute: ""}

    def events(backward: bool) -> list[str]:
        found = attending.events(lambda heads: [Compute(1.0, f"attend {heads}")], backward=backward)
        return [said[type(one)] + (one.what if isinstance(one, Compute) else one.name) for one in found]

    assert events(False) == [
        "begin projections' weights 0 of 0",
        "end projections' weights 0 of 0", "begin projections' weights 1 of 1",
        "projections 0", "attend (1, 1)", "projections 0",
        "end projections' weights 1 of 1",
        "projections 1", "attend (1, 1)", "projections 1",
    ]  # fmt: skip
    assert events(True) == [
        "begin projections' weights 0 of 0",
        "end projections' weights 0 of 0", "begin projections' weights 1 of 1",
        "projections 0", "attend (1, 1)", "projections 0", "begin projections' sums 0 of 0",
        "end projections' weights 1 of 1",
        "projections 1", "attend (1, 1)", "projections 1",
        "end projections' sums 0 of 0", "begin projections' gradients 0 of 0", "begin projections' sums 1 of 1",
        "end projections' gradients 0 of 0", "end projections' sums 1 of 1", "begin projections' gradients 1 of 1",
        "end projections' gradients 1 of 1",
    ]  # fmt: skip
    begun = [one.wire for one in attending.events(lambda _: (), backward=True) if isinstance(one, Begin)]
    half = 4 * 16 * 8 * 2  # bytes: rows of four projections, in 16 bits; of gradients each rank sums a half
    assert [wire.nbytes for wire in begun] == [half, half, half // 2, half // 2, half // 2, half // 2]


def test_metps_attention_goes_without_ulysses_and_with_any_feed_forward() -> None:
    with pytest.raises(ValueError, match="projections='metp' goes by heads already: ulysses must be 1, got 2"):
        Candidate(2, ulysses=2, projections="metp")
    with pytest.raises(ValueError, match="projections must be one of"):
        Candidate(2, projections="fsdp")
    kinds = {(one.feed_forward, one.projections) for one in with_layers(Candidate(4), MODEL)}
    assert kinds == {("plain", "plain"), ("plain", "metp"), ("metp", "plain"), ("metp", "metp")}
    kinds = {(one.feed_forward, one.projections) for one in with_layers(Candidate(2, ulysses=2), MODEL)}
    assert kinds == {("plain", "plain"), ("metp", "plain")}


@pytest.mark.parametrize("gradients", [False, True])
def test_the_search_finds_it_where_memory_binds(gradients: bool) -> None:
    """Every layer of a ring predicted by hand: none that fits is faster than what is chosen."""
    model = replace(MODEL, hidden=256, kv_heads=8, ffn=512, layers=8)
    sequence = replace(SEQUENCE, length=64 if gradients else 512)
    where = Cluster(4, 4, Link(1e9), Link(1e9), kernels=KERNELS)
    ring = next(one for one in attentions(model, sequence, where) if one.axes == (1, 4, 1))
    only = {name: getattr(ring, name) for name in ATTENTION}
    every = plan(model, sequence, where, only=only)
    assert every.chosen.projections == "plain"
    sizes = {one: stack_memory(one, model, sequence).peak for one in with_layers(ring, model)}
    times = {
        one: predict(one, model, sequence, where, attention_cost(one, model, sequence, where)).seconds for one in sizes
    }
    seen = set()
    for limit in sizes.values():
        made = plan(model, sequence, replace(where, memory=limit), only=only)
        best = min(times[one] for one, size in sizes.items() if size <= limit)
        assert made.prediction.seconds == pytest.approx(best, rel=1e-3)
        assert made.prediction.memory == sizes[made.chosen] <= limit
        seen.add(made.chosen.projections)
    assert seen == {"plain", "metp"}
    least = f"the least that any plan with ring=4, .*order=head_tail needs is {format_size(min(sizes.values()))}"
    # However little formulas know of it.
    with mock.patch.object(_Search, "_least_memory", return_value=1001), pytest.raises(PlanningError, match=least):
        plan(model, sequence, replace(where, memory=1000), only=only)


class LlamaLayer(nn.Module):
    """Attention as Llama has it, with its names, and a feed-forward; called with cos and sin, one complex tensor."""

    class Attention(nn.Module):
        def __init__(self, model: ModelShape) -> None:
            super().__init__()
            self.dim = model.dim
            self.wq, self.wk, self.wv = (
                nn.Linear(model.hidden, n * model.dim, bias=False) for n in (model.heads, model.keys, model.keys)
            )
            self.wo = nn.Linear(model.heads * model.dim, model.hidden, bias=False)

        def forward(self, x: Tensor, freqs_cis: Tensor) -> Tensor:
            q, k, v = (project(x).unflatten(-1, (-1, self.dim)) for project in (self.wq, self.wk, self.wv))
            q, k, v = (y.transpose(1, 2) for y in (turned(q, freqs_cis), turned(k, freqs_cis), v))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return self.wo(out.transpose(1, 2).flatten(2))

    class FeedForward(nn.Module):
        def __init__(self, model: ModelShape) -> None:
            super().__init__()
            self.w1, self.w3 = (nn.Linear(model.hidden, model.ffn, bias=False) for _ in range(2))
            self.w2 = nn.Linear(model.ffn, model.hidden, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.w2(F.silu(self.w1(x)) * self.w3(x))

    def __init__(self, model: ModelShape) -> None:
        super().__init__()
        self.attention, self.feed_forward = self.Attention(model), self.FeedForward(model)

    def forward(self, x: Tensor, freqs_cis: Tensor) -> Tensor:
        x = x + self.attention(x, freqs_cis)
        return x + self.feed_forward(x)


class Llama(nn.Module):
    """A layer by its name in Llama."""

    def __init__(self, model: ModelShape) -> None:
        super().__init__()
        self.layers = nn.ModuleList([LlamaLayer(model)])

    def forward(self, x: Tensor, freqs_cis: Tensor) -> Tensor:
        return self.layers[0](x, freqs_cis)


def turned(x: Tensor, freqs_cis: Tensor) -> Tensor:
    """x (B, L, N, H) by cos and sin (L, H / 2)."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * freqs_cis[:, None]).flatten(-2).type_as(x)


def run_code(code: str, model: ModelShape, length: int) -> float:
    """On every rank: how far a model as the printed code makes it is from one in one process, with its gradients."""
    torch.manual_seed(0)
    alone = Llama(model).double()
    tokens, angles = (torch.randn(*shape).double() for shape in ((1, length, model.hidden), (length, model.dim // 2)))
    freqs_cis = torch.polar(torch.ones_like(angles), angles)
    expected = alone(tokens, freqs_cis)
    expected.sum().backward()
    found = {"model": copy.deepcopy(alone), "tokens": tokens, "parallelize_module": parallelize_module}
    exec(code, found)
    order, layer = found["order"], found["model"].layers[0]
    out = found["model"](found["tokens"], shard_sequence(freqs_cis, order, dim=0))
    out.sum().backward()
    pairs = [(out, shard_sequence(expected, order, dim=1))]
    for name, weight in alone.named_parameters():
        grad = found["model"].get_parameter(name).grad
        if not isinstance(grad, DTensor):  # of a rank's own tokens
            grad = DTensor.from_local(grad, found["mesh"], [Partial()] * found["mesh"].ndim)
        pairs.append((grad.full_tensor(), weight.grad))
    assert isinstance(layer.attention.wq.weight, DTensor)
    return worst_error(pairs)


@pytest.mark.ranks
@pytest.mark.parametrize(("axes", "feed_forward"), [((4, 1), "metp"), ((2, 2), "metp"), ((2, 2), "plain")])
def test_the_printed_code_runs(threads: Callable[[int], RankPool], axes: tuple[int, int], feed_forward: str) -> None:
    model, where = replace(MODEL, layers=1), cluster(4, 4, device_type="cpu")
    made = plan(model, SEQUENCE, where, only=dict(zip(("ring", "team", "rotate"), (*axes, "kv"), strict=True)))
    first = made.ranked[0]
    chosen = replace(first, candidate=replace(first.candidate, feed_forward=feed_forward, projections="metp"))
    code = code_of(replace(made, ranked=(chosen,)))
    assert "METPAttentionParallel" in code
    assert max(threads(4).run(run_code, code, model, SEQUENCE.length)) <= 1e-10


def test_fsdp_has_norms_alone_where_all_is_metps() -> None:
    both = Candidate(4, feed_forward="metp", projections="metp")
    memory = stack_memory(both, MODEL, SEQUENCE)
    assert memory.gathered == 3 * 2 * MODEL.hidden * 2  # this layer's, the next one's and gradients, of two norms
    # 8 query heads and 4 key heads of 8: 16 and 8 rows, and as many columns and rows again; 48 units of three.
    assert memory.weights == 2 * MODEL.layers * (MODEL.hidden * (2 * (16 + 8) + 3 * 48) + 2 * MODEL.hidden // 4)


def test_weights_of_metp_are_shared_with_ranks_that_have_other_sequences() -> None:
    """Whole at a time are those of a layer, also where ranks only have copies; in a pipeline those of all layers."""
    both = Candidate(4, feed_forward="metp", projections="metp")
    own = MODEL.hidden * (2 * (16 + 8) + 3 * 48)
    alone, shared, copied = (
        division_memory(division, MODEL, SEQUENCE)
        for division in (Division(both), Division(both, shards=2), Division(both, replicas=2))
    )
    assert (alone.weights - shared.weights) == 2 * MODEL.layers * (own // 2 + 2 * MODEL.hidden // 8)
    assert copied.weights == alone.weights
    for memory in (shared, copied):
        # Of a layer, the next one and its gradient, and what is reduced of one before, the most that there is now.
        assert memory.gathered - alone.gathered == (3 * 2 + 4) * own + 4 * 2 * MODEL.hidden
        assert memory.kept == alone.kept
    staged = [division_memory(Division(both, shards=n, pipeline=2), MODEL, SEQUENCE).gathered for n in (1, 2)]
    assert staged[1] - staged[0] == (2 + 4) * MODEL.layers // 2 * own


@st.composite
def calls(draw: st.DrawFn) -> tuple[Candidate, ModelShape, SequenceShape, int]:
    ring, team = draw(st.sampled_from([mesh for n in (2, 3, 4, 6, 8) for mesh in meshes(n)]))
    kv_heads = draw(st.sampled_from([1, 2, 3, 4, 8]))
    heads = kv_heads * draw(st.sampled_from([1, 2]))
    model = ModelShape(heads * 16, heads, kv_heads, ffn=64)
    sequence = SequenceShape(
        2 * ring * team * draw(st.integers(64, 128)), draw(st.integers(1, 2)), draw(st.booleans()),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
    )  # fmt: skip
    return Candidate(ring, team, projections="metp"), model, sequence, draw(st.integers(0, ring * team - 1))


MANY_HEADS = ModelShape(64, 64, 1, 16, ffn=64)
"""Whose queries are gathered in a forward that holds the most."""


@examples(6)
@example((Candidate(1, 8, rotate="q", projections="metp"), MANY_HEADS, SequenceShape(1024, is_causal=True), 7))
@given(calls())
def test_memory(call: tuple[Candidate, ModelShape, SequenceShape, int]) -> None:
    """The most at any rank, as ``MemTracker`` sees a real module's; the output and its gradient are the caller's."""
    it, model, sequence, index = call
    with fake_world(it.size, index):
        mesh = context_mesh("cpu", it.ring, it.team)
        inner = WallFacerParallel(
            is_causal=sequence.is_causal,
            order=TokenOrder(it.order, mesh),
            rotate=it.rotate,
            rotate_forward=it.rotate_forward,
            check=False,
        )
        style = METPAttentionParallel(
            query="query", key="key", value="value", output="output", head_dim=model.dim, attention=inner, check=False
        )
        with FakeTensorMode():
            module = parallelize_module(Attention(model, sequence.dtype), mesh, style, src_data_rank=None)
            shape = sequence.batch, sequence.length // it.size, model.hidden
            x = torch.empty(shape, dtype=sequence.dtype, requires_grad=True)
            for weight in module.parameters():
                weight.grad = torch.zeros_like(weight)
            seen = Tracked(module, x, [weight.grad for weight in module.parameters()])
            with seen.phase():
                y = module(x)
            forward = seen.peak
            grad_y = torch.empty_like(y)
            seen.tracker.track_external(grad_y)
            there = seen.now
            with seen.phase():
                y.backward(grad_y)
            most = max(forward + grad_y.nbytes, seen.peak)
    result = sequence.batch * model.heads * (sequence.length // it.size) * (model.dim * sequence.dtype.itemsize + 4)
    with kernels_without_workspace():
        said = projected_peak(it, model, sequence, index, it.axes, index)
    assert there - result + said == pytest.approx(most, rel=0.001)


@examples(8)
@example((Candidate(8, projections="metp"), ModelShape(256, 8, 8, 32, ffn=64), SequenceShape(64), 0))
@given(calls())
def test_some_ranks_stand_for_all(call: tuple[Candidate, ModelShape, SequenceShape, int]) -> None:
    """What is said of some of them, perhaps of a shorter ring, is within a tenth of the most of any."""
    it, model, sequence, _ = call
    alone = replace(it, projections="plain")
    most = max(projected_peak(alone, model, sequence, index, it.axes, index) for index in range(it.size))
    assert most / 1.1 <= projected_memory(it, model, sequence) <= 1.1 * most
