"""Styles applied by parallelize_module to a model: values and gradients as on one process."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from tests.cases import mesh_of
from wallfacer_dt import (
    RingParallel,
    WallFacerParallel,
    context_mesh,
    context_parallel_attention,
    release_order,
    sequence_positions,
    shard_sequence,
)
from wallfacer_dt.mesh import context_groups
from wallfacer_dt.testing import RankPool

pytestmark = pytest.mark.ranks
Ranks = Callable[[int], RankPool]
HEADS, KV_HEADS, HEAD_DIM, LENGTH = 4, 2, 6, 16


class Inner(nn.Module):
    """An inner attention in either layout, as models have it."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        self.layout = layout

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, attn_mask: Any = None) -> Tensor:
        if self.layout == "BLNH":
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        return out.transpose(1, 2) if self.layout == "BLNH" else out


class Attention(nn.Module):
    """Projections and RoPE around the inner attention."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        self.layout = layout
        width = HEADS * HEAD_DIM
        self.q, self.o = nn.Linear(width, width), nn.Linear(width, width)
        self.kv = nn.Linear(width, 2 * KV_HEADS * HEAD_DIM)
        self.inner = Inner(layout)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        q = rotate(self.q(x).unflatten(-1, (HEADS, HEAD_DIM)), positions)
        k, v = self.kv(x).unflatten(-1, (2 * KV_HEADS, HEAD_DIM)).chunk(2, 2)
        k = rotate(k, positions)
        if self.layout == "BNLH":
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = self.inner(q, k, v, scale=0.4, attn_mask=None)
        if self.layout == "BNLH":
            out = out.transpose(1, 2)
        return self.o(out.flatten(2))


class Model(nn.Module):
    def __init__(self, layout: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Attention(layout) for _ in range(2)])

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, positions)
        return x


def rotate(x_BLNH: Tensor, positions: Tensor) -> Tensor:
    half = x_BLNH.shape[-1] // 2
    angles = positions[:, None, None] * 10.0 ** -torch.arange(half, dtype=x_BLNH.dtype)
    a, b = x_BLNH.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


def model_and_input(layout: str) -> tuple[Model, Tensor]:
    torch.manual_seed(0)
    return Model(layout).double(), torch.randn(2, LENGTH, HEADS * HEAD_DIM, dtype=torch.float64)


def errors(model: Model, mesh: DeviceMesh, order: str, layout: str) -> tuple[float, float, float]:
    """Largest differences to one process: output, input gradient, parameter gradients."""
    reference, x = model_and_input(layout)
    x.requires_grad_()
    expected = reference(x, torch.arange(LENGTH))
    expected.square().sum().backward()
    local = shard_sequence(x.detach(), mesh, dim=1, order=order).requires_grad_()
    out = model(local, sequence_positions(LENGTH, mesh, order=order))
    out.square().sum().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)

    def shard(whole: Tensor) -> Tensor:
        return shard_sequence(whole, mesh, dim=1, order=order)

    return (
        float((out - shard(expected)).detach().abs().max()),
        float((local.grad - shard(x.grad)).abs().max()),
        max(
            float((a.grad - b.grad).abs().max())
            for a, b in zip(model.parameters(), reference.parameters(), strict=True)
        ),
    )


def wallfacer(ring: int, team: int, options: dict, layout: str) -> tuple[float, float, float]:
    mesh = mesh_of(ring, team)
    model, _ = model_and_input(layout)
    style = WallFacerParallel(is_causal=True, layout=layout, scale=0.4, **options)
    parallelize_module(model, mesh, {"layers.*.inner": style})
    return errors(model, mesh, options.get("order", "contiguous"), layout)


def ring(one_axis: bool, layout: str) -> tuple[float, float, float]:
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("cp",)) if one_axis else context_mesh("cpu", size)
    release_order(mesh)
    model, _ = model_and_input(layout)
    parallelize_module(model, mesh, {"layers.*.inner": RingParallel(is_causal=True, layout=layout)})
    return errors(model, mesh, "contiguous", layout)


@pytest.mark.parametrize("layout", ["BLNH", "BNLH"])
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ((2, 2), {"order": "head_tail"}),
        ((2, 2), {"schedule": "published", "order": "head_tail"}),
        ((4, 2), {"rotate": "q"}),
        ((1, 4), {"kernel": "reference", "order": "head_tail"}),
    ],
)
def test_wallfacer_in_a_model(ranks: Ranks, mesh: tuple[int, int], options: dict, layout: str) -> None:
    for found in ranks(mesh[0] * mesh[1]).run(wallfacer, *mesh, options, layout):
        assert max(found) < 1e-10


@pytest.mark.parametrize("layout", ["BLNH", "BNLH"])
@pytest.mark.parametrize("one_axis", [True, False])
def test_ring_in_a_model(ranks: Ranks, one_axis: bool, layout: str) -> None:
    for found in ranks(4).run(ring, one_axis, layout):
        assert max(found) < 1e-10


def neutral_options() -> Tensor:
    mesh = mesh_of(dist.get_world_size(), 1)
    module = parallelize_module(Inner("BNLH"), mesh, RingParallel(is_causal=True, layout="BNLH"))
    x = torch.ones(1, 2, 4, 8)
    return module(x, x, x, is_causal=True, enable_gqa=True, dropout_p=0.0, scale=None, window_size=(-1, -1), sinks=None)


def test_options_that_ask_for_nothing_are_taken(ranks: Ranks) -> None:
    for out in ranks(2).run(neutral_options):
        torch.testing.assert_close(out, torch.ones(1, 2, 4, 8))


def saved_bytes(ring: int, team: int) -> int:
    mesh = context_mesh("cpu", ring, team)
    module = parallelize_module(Inner("BNLH"), mesh, WallFacerParallel(layout="BNLH"))
    q, k, v = (torch.randn(1, n, 4, 8, requires_grad=True) for n in (4, 2, 2))
    saved: list[int] = []

    def note(x: Tensor) -> Tensor:
        saved.append(x.nbytes)
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        module(q, k, v)
    return sum(saved)


@pytest.mark.parametrize("mesh", [(1, 1), (4, 1), (2, 2), (1, 4), (8, 1)])
def test_the_forward_keeps_local_q_k_v_out_and_lse(ranks: Ranks, mesh: tuple[int, int]) -> None:
    elements = 4 * 8 * (4 + 2 + 2 + 4) + 4 * 4
    assert ranks(mesh[0] * mesh[1]).run(saved_bytes, *mesh) == [elements * 4] * (mesh[0] * mesh[1])


def compiled(ring: int, team: int, backend: str) -> tuple[float, float]:
    """Largest differences between eager and one compiled graph: output and input gradients."""
    mesh = mesh_of(ring, team)
    style = WallFacerParallel(is_causal=True, order="head_tail", layout="BNLH", rotate="kv")
    module = parallelize_module(Inner("BNLH"), mesh, style)
    inputs = [torch.randn(1, n, 4, 8, requires_grad=True) for n in (4, 2, 2)]

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return module(q.sin(), k, v, scale=0.3).square()

    results = []
    for function in (forward, torch.compile(forward, fullgraph=True, backend=backend)):
        out = function(*inputs)
        results.append([out.detach(), *torch.autograd.grad(out.sum(), inputs)])
    difference = [float((a - b).abs().max()) for a, b in zip(*results, strict=True)]
    return difference[0], max(difference[1:])


@pytest.mark.parametrize("mesh", [(2, 1), (2, 2)])
def test_a_styled_module_is_one_graph(ranks: Ranks, mesh: tuple[int, int]) -> None:
    """The operators are opaque in it; its backward is one too."""
    for found in ranks(mesh[0] * mesh[1]).run(compiled, *mesh, "aot_eager"):
        assert max(found) < 1e-6


class SDPAShaped(nn.Module):
    """Called like torch's function, with its defaults."""

    scale = 0.3

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.0)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False
    ) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, scale=self.scale)


def sdpa_shaped() -> float:
    mesh = mesh_of(2, 1)
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 8, 4, dtype=torch.float64) for _ in range(3))
    expected = SDPAShaped()(q, k, v, None, 0.0, True)
    module = parallelize_module(SDPAShaped(), mesh, RingParallel(is_causal=True, layout="BNLH"))
    local = [shard_sequence(x, mesh, dim=2, order="contiguous") for x in (q, k, v)]
    with pytest.raises(ValueError, match="is_causal=False, the style was given is_causal=True"):
        module(*local)
    out = module(*local, is_causal=True)
    return float((out - shard_sequence(expected, mesh, dim=2, order="contiguous")).abs().max())


def test_a_modules_own_scale_and_defaults_count(ranks: Ranks) -> None:
    assert max(ranks(2).run(sdpa_shaped)) < 1e-12


def layouts() -> list[bool]:
    mesh = mesh_of(2, 2)
    q_BLNH = torch.randn(1, 4, 2, 8, requires_grad=True)
    results = []
    for q in (q_BLNH.transpose(1, 2), torch.randn(1, 2, 4, 8, requires_grad=True)):
        out = context_parallel_attention(q, q, q, mesh)
        (grad,) = torch.autograd.grad(out.sum(), q)
        results += [out.stride() == q.stride(), grad.stride() == q.stride()]
    return results


def test_results_are_laid_out_as_inputs_are(ranks: Ranks) -> None:
    assert all(all(found) for found in ranks(4).run(layouts))


def operator_check() -> None:
    groups = context_groups(mesh_of(2, 1))
    q, k, v = (torch.randn(1, n, 4, 8, requires_grad=True) for n in (4, 2, 2))
    options = ([2, 1, groups.coordinate.ring_rank, 0], groups.ring.group_name, "", "", [], True, 0.5)
    options += ("contiguous", "2d", "kv", "flash", "")
    torch.library.opcheck(torch.ops.wallfacer_dt.attention.default, (q, k, v, *options))


def test_the_operator_passes_torchs_own_check(ranks: Ranks) -> None:
    ranks(2).run(operator_check)


def second_derivative() -> None:
    mesh = mesh_of(2, 1)
    q = torch.randn(1, 2, 4, 8, requires_grad=True)
    (grad,) = torch.autograd.grad(context_parallel_attention(q, q, q, mesh).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="attention_backward"):
        grad.sum().backward()


def test_a_second_derivative_is_refused(ranks: Ranks) -> None:
    ranks(2).run(second_derivative)
