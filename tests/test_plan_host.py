"""What the host launches, in the planner and in fact; and what comes of it where that takes longer than the device."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from tests.divided import KERNELS, MODEL, cost_of, divided
from tests.plan_cases import measured_shortly
from tests.strategies import examples
from wallfacer_dt import METPParallel, TokenOrder, context_mesh, context_parallel_attention, register_kernel
from wallfacer_dt.kernels.merge import accumulation_dtype
from wallfacer_dt.metp import BODIES as METP
from wallfacer_dt.ops import BODIES
from wallfacer_dt.planning import Candidate, Cluster, Kernels, Link, ModelShape, SequenceShape, plan
from wallfacer_dt.planning.attention import attention_events, head_patterns, least_seconds, programs_of
from wallfacer_dt.planning.candidates import node_of
from wallfacer_dt.planning.layer import Layer
from wallfacer_dt.planning.predict import attention_cost, predict_division
from wallfacer_dt.planning.probe import Probe
from wallfacer_dt.planning.profiling import Profile, profile
from wallfacer_dt.planning.timeline import run
from wallfacer_dt.planning.traffic import one_way, wires
from wallfacer_dt.planning.weights_ring import feed_forward_events
from wallfacer_dt.testing import RankPool
from wallfacer_dt.testing.fake import fake_world

WHERE = Cluster(64, 64, Link(1e9), Link(1e9), kernels=Kernels(launch=1.0))  # seconds are operations
VIEWS = {
    "view", "as_strided", "narrow", "slice", "transpose", "expand", "unbind", "split", "split_with_sizes", "unsqueeze",
    "squeeze", "detach", "detach_", "alias", "select", "permute", "t", "empty", "empty_like", "new_empty",
    "empty_strided", "_unsafe_view",
}  # fmt: skip
"""What a device is given nothing to do for."""


class Launched(TorchDispatchMode):
    """Counts what a GPU would be given, within this package's operators too."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        bodies = BODIES | METP
        if func in bodies:
            with self:
                return bodies[func](*args, **(kwargs or {}))
        Launched.count += func._schema.name.partition("::")[2] not in VIEWS
        return func(*args, **(kwargs or {}))


def forward(q: Tensor, k: Tensor, v: Tensor, how: object) -> tuple[Tensor, Tensor]:
    Launched.count += 1
    return torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)


def backward(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    """As torch's flash, which starts three kernels."""
    Launched.count += 3
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def combined(partial: tuple[Tensor, ...], more: object, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """As on CUDA, where it is one kernel."""
    Launched.count += 1
    dtypes = dtype, accumulation_dtype(dtype)
    return tuple(torch.empty_like(x, dtype=own) for x, own in zip(partial, dtypes, strict=False))


def launched(work: Any) -> tuple[int, Any]:
    Launched.count = 0
    with Launched():
        result = work()
    return Launched.count, result


def merge_(*_: object) -> None:
    """Likewise."""
    Launched.count += 1


OTHERS = (14, 7)  # in the planner, for what is no operation


@pytest.mark.parametrize(
    ("mesh", "heads", "options"),
    [
        *(((1, ring, team), (8, 2), {}) for ring, team in ((4, 1), (8, 1), (32, 1), (4, 2), (2, 4), (16, 4))),
        *(((ulysses, ring, 1), (32, 8), {}) for ulysses, ring in ((2, 1), (4, 1), (8, 1), (32, 1), (4, 2), (2, 4))),
        ((2, 2, 2), (8, 2), {}),
        ((1, 8, 1), (8, 2), {"is_causal": False}),
        ((1, 8, 1), (8, 2), {"window_size": (200, 0)}),
        ((1, 8, 1), (8, 2), {"documents": (100, 20)}),
    ],
)
def test_what_a_call_launches_is_told_within_a_quarter(
    mesh: tuple[int, int, int], heads: tuple[int, int], options: dict
) -> None:
    """Forward and backward, on the first rank, one in the middle and the last one."""
    (ulysses, ring, team), options = mesh, {"is_causal": True} | options
    way = Candidate(ring, team, ulysses, order="head_tail", rotate="kv", rotate_forward="kv")
    shape, sequence = ModelShape(16 * heads[0], *heads), SequenceShape(64 * way.size, **options)
    cost = attention_cost(way, shape, sequence, replace(WHERE, ranks=way.size, ranks_per_node=way.size))
    told = [one.line.host - others for one, others in zip(cost.ways, OTHERS, strict=True)]
    for back, one in enumerate(cost.ways):  # and the search knows it beforehand, or what one rank's host does
        _, least = least_seconds(way, shape, sequence, WHERE.kernels, backward=bool(back))
        assert least == one.line.host or (sequence.mask.spares_hops and least < one.line.host)
    for rank in {0, way.size // 2, way.size - 1}:
        with (
            fake_world(way.size, rank),
            mock.patch("wallfacer_dt.algorithms.arithmetic.is_fused", return_value=True),
            mock.patch("wallfacer_dt.algorithms.arithmetic.combined", combined),
            mock.patch("wallfacer_dt.algorithms.arithmetic.merge_", merge_),
            mock.patch.dict("wallfacer_dt.kernels.registry._kernels"),  # others try all that are known
        ):
            register_kernel("counted", forward, backward, lambda _: True, takes_bands=True, takes_segments=True)
            where = context_mesh("cpu", ring, team, ulysses=ulysses)
            order = TokenOrder("head_tail", where)
            q, k, v = (torch.randn(1, 64, n, 16, dtype=torch.bfloat16, requires_grad=True) for n in (*heads, heads[1]))
            turned = [x.transpose(1, 2) for x in (q, k, v)]
            given = {"order": order, "kernel": "counted", "rotate": "kv", "rotate_forward": "kv", **options}
            if given.pop("documents", None):
                given["cu_seqlens"] = torch.tensor(sequence.mask.documents[0])
                context_parallel_attention(*turned, where, **given)  # which makes what kernels are told of them
            counted, out = launched(lambda: context_parallel_attention(*turned, where, **given))  # noqa: B023
            grads, _ = launched(lambda: out.backward(torch.zeros_like(out)))  # noqa: B023
        assert told == [pytest.approx(counted, rel=1 / 4), pytest.approx(grads, rel=1 / 4)]


@examples(60)
@given(
    mesh=st.sampled_from([(1, 8, 1), (1, 4, 2), (2, 4, 1), (1, 1, 4), (4, 2, 1)]), left=st.integers(0, 600),
    heads=st.sampled_from([(8, 2), (5, 5)]), order=st.sampled_from(["contiguous", "head_tail"]),
    intra=st.sampled_from([1e2, 1e12]),
)  # fmt: skip
def test_of_ranks_that_run_together_the_slowest_host_counts(
    mesh: tuple[int, int, int], heads: tuple[int, int], order: str, left: int, intra: float
) -> None:
    """Whichever device is through last."""
    ulysses, ring, team = mesh
    way = Candidate(ring, team, ulysses, order=order, rotate="kv", rotate_forward="kv")
    model, sequence = ModelShape(16 * heads[0], *heads), SequenceShape(64 * 8, is_causal=True, window_size=(left, 0))
    where = replace(WHERE, ranks=way.size, ranks_per_node=way.size, intra=Link(intra))
    for backward, one in enumerate(attention_cost(way, model, sequence, where).ways):
        arrived = one_way(way, model, sequence, backward=bool(backward))
        mine = wires(arrived, node_of(way, way.size), ring * team)
        programs = programs_of(way, sequence, together=True, backward=bool(backward)).values()
        told = way, model, sequence, where.kernels
        lines = [
            run(attention_events(program, *told, on, groups, backward=bool(backward)), where)
            for groups in head_patterns(way, model)
            for program, on in zip(programs, mine, strict=True)
        ]
        assert one.line.host == max(line.host for line in lines)
        assert run(one.events, where) == one.line


class FeedForward(nn.Module):
    def __init__(self, *, gated: bool) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False)
        self.w3 = nn.Linear(32, 64, bias=False) if gated else None


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_what_metps_feed_forward_launches_is_told_within_a_fifth(ranks: int, gated: bool) -> None:
    with fake_world(ranks, 1):
        style = METPParallel(
            up="w3" if gated else "w1", down="w2", gate="w1" if gated else None, activation="silu", check=False
        )
        module = parallelize_module(FeedForward(gated=gated).bfloat16(), context_mesh("cpu", ranks, 1), style)
        x = torch.randn(1, 8, 32, dtype=torch.bfloat16, requires_grad=True)
        counted, out = launched(lambda: module(x))
        grads, _ = launched(lambda: out.backward(torch.zeros_like(out)))
    model, sequence = ModelShape(32, 2, ffn=64, gated=gated), SequenceShape(8 * ranks)
    told = (ranks,), 8, model, sequence, WHERE
    lines = [run(feed_forward_events(*told, backward=way), WHERE) for way in (False, True)]
    assert sum(line.host for line in lines) == pytest.approx(counted + grads, rel=0.2)


@examples(60)
@given(divided(), st.sampled_from([1e-6, 1e-4, 1e-2]))
def test_a_step_takes_what_its_device_does_or_its_host(layer: Layer, launch: float) -> None:
    """Nothing else changes; a layer's forward and backward each take what takes longer."""
    # Of unlike stages another may be the slowest then.
    assume(layer.division.pipeline == 1 or not layer.model.dense_layers)
    where = replace(layer.cluster, kernels=replace(KERNELS, launch=launch))
    free = replace(layer.cluster, kernels=replace(KERNELS, launch=0.0))
    hosted, alone = (
        predict_division(one.division, one.model, one.sequence, one.cluster, cost_of(one))
        for one in (replace(layer, cluster=where), replace(layer, cluster=free))
    )
    rounds, stage = layer.division.microbatches, layer.model.layers // layer.division.pipeline
    cost = cost_of(replace(layer, cluster=where))
    assert rounds * stage * (cost.forward.host + cost.backward.host) <= hosted.seconds * (1 + 1e-9)
    stages = (rounds + layer.division.pipeline - 1) / rounds  # whose hosts a microbatch waits for, one after the other
    most = alone.seconds + stages * hosted.host
    # Of a pipeline weights are gathered under the first forward alone, behind which they may then be hidden.
    assert alone.seconds <= hosted.seconds * (1 + 1e-9) <= most * (1 + 2e-9)
    assert layer.division.pipeline > 1 or hosted.seconds == pytest.approx(most)
    assert (alone.host, hosted.compute) == (0, alone.compute)
    same = {"seconds": 0.0, "exposed": 0.0, "host": 0.0}
    assert replace(hosted, **same) == replace(alone, **same)


def test_what_a_plan_says_where_its_host_binds() -> None:
    model, sequence = replace(MODEL, ffn=0), SequenceShape(256, is_causal=True)
    where = Cluster(4, 4, Link(1e12), Link(1e12), kernels=Kernels(1e15, 1e15, 1e15, 0.0, 1e15, launch=1e-3))
    first = plan(model, sequence, where).ranked[0]
    assert first.prediction.seconds == pytest.approx(first.prediction.host, rel=1e-3)
    assert first.why.startswith("best: 100% of the step is waiting, most for the host")
    # What is launched meanwhile is not waited for.
    slow = replace(where, intra=Link(1e4), kernels=replace(where.kernels, launch=1e-4))
    for other in (slow, replace(where, kernels=replace(where.kernels, launch=0.0))):
        one = plan(model, sequence, other).ranked[0]
        assert one.prediction.host == 0
        assert "host" not in one.why


def profiled(runs_ahead: bool, path: Path) -> float:
    sequence = SequenceShape(64, is_causal=True, dtype=torch.float32)
    with measured_shortly(), mock.patch.object(Probe, "runs_ahead", runs_ahead):
        _, found = profile(MODEL, sequence, "cpu", ranks_per_node=2, top=1, iterations=1, turns=1, path=path)
    return found.cluster.kernels.launch


@pytest.mark.ranks
def test_an_operations_time_is_measured_where_hosts_run_ahead(ranks: Any, tmp_path: Path) -> None:
    pool: RankPool = ranks(2)
    assert pool.run(profiled, False, tmp_path / "cpu.json") == [0.0, 0.0]
    one, other = pool.run(profiled, True, tmp_path / "gpu.json")
    assert one == other == Profile.load(tmp_path / "gpu.json").cluster.kernels.launch
    assert 1e-7 < one < 1e-1
