"""Styles applied by parallelize_module to a model: values and gradients as on one process."""

import copy
import inspect
import pickle
from collections.abc import Callable
from dataclasses import fields
from itertools import product
from typing import Any, get_type_hints
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode

from tests.cases import mesh_of, told
from tests.pairwise import tiers
from wallfacer_dt import (
    RingParallel,
    TokenOrder,
    UlyssesParallel,
    WallFacerParallel,
    context_mesh,
    context_parallel_attention,
    sequence_positions,
    shard_sequence,
)
from wallfacer_dt.options import AttentionKeywords, AttentionOptions
from wallfacer_dt.testing import RankPool, worst_error
from wallfacer_dt.testing.fake import fake_world

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
    local = shard_sequence(x.detach(), TokenOrder(order, mesh), dim=1).requires_grad_()
    out = model(local, sequence_positions(LENGTH, TokenOrder(order, mesh)))
    out.square().sum().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)

    def shard(whole: Tensor) -> Tensor:
        return shard_sequence(whole, TokenOrder(order, mesh), dim=1)

    return (
        worst_error([(out, shard(expected))]),
        worst_error([(local.grad, shard(x.grad))]),
        worst_error((a.grad, b.grad) for a, b in zip(model.parameters(), reference.parameters(), strict=True)),
    )


def wallfacer(ring: int, team: int, options: dict, layout: str) -> tuple[float, float, float]:
    mesh = mesh_of(ring, team)
    model, _ = model_and_input(layout)
    style = WallFacerParallel(**told(mesh, is_causal=True, layout=layout, scale=0.4, **options))
    parallelize_module(model, mesh, {"layers.*.inner": style})
    return errors(model, mesh, options.get("order", "contiguous"), layout)


def ring(one_axis: bool, layout: str) -> tuple[float, float, float]:
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("cp",)) if one_axis else context_mesh("cpu", size)
    model, _ = model_and_input(layout)
    parallelize_module(model, mesh, {"layers.*.inner": RingParallel(**told(mesh, is_causal=True, layout=layout))})
    return errors(model, mesh, "contiguous", layout)


ON_MESHES: list[tuple[tuple[int, int], dict[str, Any]]] = [
    ((2, 2), {"order": "head_tail"}),
    ((2, 2), {"schedule": "published", "order": "head_tail"}),
    ((4, 2), {"rotate": "q"}),
    ((1, 4), {"kernel": "reference", "order": "head_tail"}),
]


@pytest.mark.parametrize(
    ("mesh", "options", "layout"),
    tiers([(*on, layout) for on in ON_MESHES for layout in ("BLNH", "BNLH")], strength=1),
)
def test_wallfacer_in_a_model(ranks: Ranks, mesh: tuple[int, int], options: dict, layout: str) -> None:
    for found in ranks(mesh[0] * mesh[1]).run(wallfacer, *mesh, options, layout):
        assert max(found) < 1e-10


def ulysses(one_axis: bool, layout: str) -> tuple[float, float, float]:
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("cp",)) if one_axis else mesh_of(1, 1, ulysses=size)
    model, _ = model_and_input(layout)
    style = UlyssesParallel(**told(mesh, "head_tail", is_causal=True, layout=layout))
    parallelize_module(model, mesh, {"layers.*.inner": style})
    return errors(model, mesh, "head_tail", layout)


def hybrid(layout: str) -> tuple[float, float, float]:
    mesh = mesh_of(2, 1, ulysses=2)
    model, _ = model_and_input(layout)
    style = WallFacerParallel(**told(mesh, is_causal=True, layout=layout))
    parallelize_module(model, mesh, {"layers.*.inner": style})
    return errors(model, mesh, "contiguous", layout)


@pytest.mark.parametrize(("one_axis", "layout"), tiers(product([True, False], ["BLNH", "BNLH"]), strength=1))
def test_ulysses_in_a_model(ranks: Ranks, one_axis: bool, layout: str) -> None:
    for found in ranks(2).run(ulysses, one_axis, layout):
        assert max(found) < 1e-10


def test_the_hybrid_in_a_model(ranks: Ranks) -> None:
    for found in ranks(4).run(hybrid, "BLNH"):
        assert max(found) < 1e-10


@pytest.mark.parametrize(("one_axis", "layout"), tiers(product([True, False], ["BLNH", "BNLH"]), strength=1))
def test_ring_in_a_model(ranks: Ranks, one_axis: bool, layout: str) -> None:
    for found in ranks(4).run(ring, one_axis, layout):
        assert max(found) < 1e-10


def shared_by_layers() -> tuple[float, float, float]:
    mesh = mesh_of(2, 1)
    model, _ = model_and_input("BLNH")
    model.layers[1].inner = model.layers[0].inner
    options = told(mesh, is_causal=True, scale=0.4)
    plan = {"layers.*.inner": WallFacerParallel(**options)}
    parallelize_module(model, mesh, plan)
    for other in (WallFacerParallel(**options), None):
        style, where = (other, mesh) if other else (plan["layers.*.inner"], mesh["cp_ring"])
        with pytest.raises(ValueError, match="the module Inner already has a context-parallel style"):
            parallelize_module(model.layers[0].inner, where, style)
    return errors(model, mesh, "contiguous", "BLNH")


def test_two_layers_may_share_their_inner_attention(ranks: Ranks) -> None:
    for found in ranks(2).run(shared_by_layers):
        assert max(found) < 1e-10


def neutral_options() -> float:
    mesh = mesh_of(dist.get_world_size(), 1)
    options = told(mesh, is_causal=True)
    module = parallelize_module(Inner("BNLH"), mesh, RingParallel(**options, layout="BNLH"))
    torch.manual_seed(0)
    whole = [torch.randn(1, heads, 8, 8) for heads in (4, 2, 2)]
    q, k, v = (shard_sequence(x, options["order"], dim=2) for x in whole)
    out = module(q, k, v, is_causal=True, enable_gqa=True, dropout_p=0.0, scale=None, window_size=(-1, -1), sinks=None)
    expected = F.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True)
    return worst_error([(out, shard_sequence(expected, options["order"], dim=2))])


def test_options_that_ask_for_nothing_are_taken(ranks: Ranks) -> None:
    assert max(ranks(2).run(neutral_options)) <= 1e-6


def saved_bytes(ring: int, team: int) -> int:
    mesh = context_mesh("cpu", ring, team)
    module = parallelize_module(Inner("BNLH"), mesh, WallFacerParallel(layout="BNLH", check=False))
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


class SDPAShaped(nn.Module):
    """Called like torch's function, with its defaults."""

    scale = 0.3

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.0)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
        scale: float | None = None,
    ) -> Tensor:  # fmt: skip
        scale = self.scale if scale is None else scale
        return F.scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, scale=scale)


def sdpa_shaped() -> float:
    mesh = mesh_of(2, 1)
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 8, 4, dtype=torch.float64) for _ in range(3))
    expected = SDPAShaped()(q, k, v, None, 0.0, True)
    module = parallelize_module(SDPAShaped(), mesh, RingParallel(**told(mesh, is_causal=True, layout="BNLH")))
    local = [shard_sequence(x, TokenOrder("contiguous", mesh), dim=2) for x in (q, k, v)]
    with pytest.raises(ValueError, match="is_causal=False, the style was given is_causal=True"):
        module(*local)
    expected = shard_sequence(expected, TokenOrder("contiguous", mesh), dim=2)
    return worst_error((module(*local, is_causal=True, **scale), expected) for scale in ({}, {"scale": None}))


def test_a_modules_own_scale_and_defaults_count(ranks: Ranks) -> None:
    assert max(ranks(2).run(sdpa_shaped)) < 1e-12


def attributes_that_change(compiled: bool, how: str) -> tuple[float, list[str]]:
    """Of a module, or a copy of it: the error with another scale than at first, and what refuses other attributes."""
    torch._dynamo.reset()
    mesh = mesh_of(2, 1)
    q, k, v = (torch.randn(1, 2, 8, 4, generator=torch.Generator().manual_seed(i)) for i in range(3))
    module = SDPAShaped()
    module.table = torch.zeros(3)  # which a copy has a copy of
    module = parallelize_module(module, mesh, RingParallel(layout="BNLH", check=False))
    order = TokenOrder("contiguous", mesh)
    local = [shard_sequence(x, order, dim=2) for x in (q, k, v)]
    attend = (
        torch.compile(lambda: module(*local), backend="aot_eager", fullgraph=True)
        if compiled
        else lambda: module(*local)
    )
    attend()
    if how == "copied":
        module = copy.deepcopy(module)
    elif how == "pickled":
        module = pickle.loads(pickle.dumps(module))
    plain = SDPAShaped()
    plain.scale = module.scale = 2.0
    error = worst_error([(attend(), shard_sequence(plain(q, k, v), order, dim=2))])
    said = []
    for name, value in {"is_causal": True, "softcap": 3.0, "dropout": nn.Dropout(0.5), "drop": nn.Dropout(0.5)}.items():
        setattr(module, name, value)
        try:
            attend()
        except ValueError as refusal:
            said.append(str(refusal))
        delattr(module, name)
    return error, said


@pytest.mark.parametrize(
    ("compiled", "how"), [(False, "itself"), (True, "itself"), (False, "copied"), (False, "pickled")]
)
def test_attributes_are_read_at_every_call(ranks: Ranks, compiled: bool, how: str) -> None:
    for error, said in ranks(2).run(attributes_that_change, compiled, how):
        assert error < 1e-6
        assert [text.partition("SDPAShaped has ")[2].partition(",")[0].partition(":")[0] for text in said] == [
            "is_causal=True", "softcap=3.0", "dropout", "drop",
        ]  # fmt: skip


def layouts() -> list[bool]:
    mesh = mesh_of(2, 2)
    q_BLNH = torch.randn(1, 4, 2, 8, requires_grad=True)
    results = []
    for q in (q_BLNH.transpose(1, 2), torch.randn(1, 2, 4, 8, requires_grad=True)):
        out = context_parallel_attention(q, q, q, mesh)
        (grad,) = torch.autograd.grad(out.sum(), q)
        results += [out.stride() == q.stride(), grad.stride() == q.stride()]
    return results


class ByName(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, scale: float = 0.5) -> Tensor:
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale).transpose(1, 2)


def called_by_name(compiled: bool) -> bool:
    mesh = mesh_of(2, 1)
    style = RingParallel(is_causal=True, scale=0.5, order=TokenOrder("head_tail", mesh))
    module = parallelize_module(ByName(), mesh, style)
    call = torch.compile(module, fullgraph=True, backend="aot_eager") if compiled else module
    q, k, v = torch.randn(3, 1, 4, 2, 8).unbind()
    expected = call(q, k, v)
    found = call(q, k, value=v, scale=0.5), call(value=v, query=q, key=k), call(q, k, v, 0.5)
    for lacks, names in {"value": {"query": q, "key": k}, "query": {"q": q, "key": k, "value": v}}.items():
        with pytest.raises(
            Unsupported if compiled else TypeError, match=f"attention is called without {lacks}: pass q, k and v"
        ):
            call(**names)
    return all(torch.equal(x, expected) for x in found)


@pytest.mark.parametrize("compiled", [False, True])
def test_q_k_and_v_have_the_modules_names(ranks: Ranks, compiled: bool) -> None:
    assert ranks(2).run(called_by_name, compiled) == [True] * 2


def test_results_are_laid_out_as_inputs_are(ranks: Ranks) -> None:
    assert all(all(found) for found in ranks(4).run(layouts))


class Recording(TorchDispatchMode):
    """The arguments that the operator was last called with."""

    args: tuple = ()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.ops.wallfacer_dt.attention.default:
            self.args = args
        return func(*args, **(kwargs or {}))


def operator_check() -> None:
    leaves = [torch.randn(1, n, 4, 8, requires_grad=True) for n in (4, 2, 2)]
    with Recording() as recording:
        context_parallel_attention(*leaves, mesh_of(2, 1), **told(mesh_of(2, 1), is_causal=True))
    # It compares results of several calls, and among them is the call's number.
    with mock.patch("wallfacer_dt.calls.agree", return_value=1):
        torch.library.opcheck(torch.ops.wallfacer_dt.attention.default, (*leaves, *recording.args[3:]))


def test_the_operator_passes_torchs_own_check(ranks: Ranks) -> None:
    ranks(2).run(operator_check)


def test_a_module_keeps_its_style_as_it_was() -> None:
    """Of one that is changed for another module; of what it has become the module takes nothing, and not the half."""
    with fake_world(1, 0):
        mesh, style = context_mesh("cpu", ring=1), WallFacerParallel(layout="BNLH", is_causal=True, check=False)
        module, q = parallelize_module(Whatever(), mesh, style), torch.randn(1, 4, 4, 8)
        expected = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        style.layout, style.options = "BLNH", AttentionOptions(scale=0.1)
        assert worst_error([(module(q, q, q), expected)]) <= 1e-6
        other = parallelize_module(Whatever(), mesh, style)
        expected = F.scaled_dot_product_attention(*[q.transpose(1, 2)] * 3, scale=0.1).transpose(1, 2)
        assert worst_error([(other(q, q, q), expected)]) <= 1e-6
        with pytest.raises(ValueError, match="already has a context-parallel style"):
            parallelize_module(module, mesh, style)


class Whatever(nn.Module):
    """Takes any options; for styles that are not checked."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        raise NotImplementedError


def unchecked(style: Any, mesh: DeviceMesh, module: nn.Module | None = None) -> nn.Module:
    return parallelize_module(module or Whatever(), mesh, style)


def blocky(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q >= k) & (q // 3 % 2 != k // 3 % 2)


def another(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def block_mask(mask_mod: Any = blocky, batch: int | None = None, heads: int | None = None) -> BlockMask:
    return create_block_mask(mask_mod, batch, heads, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=4)


def tensors(width: int = 0) -> list[Tensor]:
    """This rank's shards (B, N, L, H) on two ranks; queries have ``width`` channels more."""
    torch.manual_seed(dist.get_rank())
    shapes = ((HEADS, HEAD_DIM + width), (KV_HEADS, HEAD_DIM), (KV_HEADS, HEAD_DIM))
    return [torch.randn(2, n, LENGTH // 2, dim, dtype=torch.float64) for n, dim in shapes]


# By what a call hands to attention: its options, and the same for the function.
HANDED: dict[str, Callable[[], tuple[dict[str, Any], dict[str, Any]]]] = {
    "document_ids": lambda: ({"document_ids": torch.arange(LENGTH) // 5},) * 2,
    "cu_seqlens": lambda: ({"cu_seqlens": torch.tensor([0, 7, LENGTH])},) * 2,
    "sinks": lambda: ({"sinks": torch.arange(4.0)},) * 2,
    "s_aux": lambda: ({"s_aux": torch.arange(4.0)}, {"sinks": torch.arange(4.0)}),
    "k_shared": lambda: ({"k_shared": torch.full((2, 1, LENGTH // 2, 3), 0.7, dtype=torch.float64)},) * 2,
    "attention_masks": lambda: ({"attention_masks": block_mask()}, {"mask_mod": block_mask()}),
    "block_mask": lambda: ({"block_mask": block_mask()}, {"mask_mod": block_mask()}),
    "mask_mod": lambda: ({"mask_mod": blocky}, {"mask_mod": blocky}),
}


def handed(name: str, layout: str) -> float:
    mesh = mesh_of(2, 1)
    masked = name in ("attention_masks", "block_mask", "mask_mod")
    called, expected = HANDED[name]()
    q, k, v = tensors(3 if name == "k_shared" else 0)
    out = context_parallel_attention(q, k, v, mesh, **told(mesh, is_causal=not masked), **expected)
    plain = context_parallel_attention(q[..., :HEAD_DIM], k, v, mesh, **told(mesh, is_causal=not masked))
    assert worst_error([(out, plain)]) > 1e-3, "it does something"
    module = unchecked(RingParallel(**told(mesh, is_causal=not masked, layout=layout, check=False)), mesh)
    turn = (lambda x: x.transpose(1, 2)) if layout == "BLNH" else (lambda x: x)
    if "k_shared" in called:
        called = {"k_shared": turn(called["k_shared"])}
    return worst_error([(turn(module(turn(q), turn(k), turn(v), **called)), out)])


@pytest.mark.parametrize("layout", ["BLNH", "BNLH"])
@pytest.mark.parametrize("name", HANDED)
def test_a_call_hands_on_what_attention_takes(ranks: Ranks, name: str, layout: str) -> None:
    assert ranks(2).run(handed, name, layout) == [0.0, 0.0]


class Near:
    def sees(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i - j < 3) & (j - i < 3)


NEAR = Near()
# A style's options, a call's, and what is said of them.
STATED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"is_causal": True, "window_size": (4, 0)}, {"sliding_window": 5, "is_causal": True}, ""),
    ({"window_size": (4, 0)}, {"sliding_window": 5}, ""),
    ({"is_causal": True, "window_size": (4, None)}, {"window_size": (4, 0)}, ""),
    ({"is_causal": True, "window_size": (4, 0)}, {"window_size": (4, -1)}, ""),
    ({"is_causal": True}, {"window_size": (-1, 0)}, ""),
    ({"is_causal": True}, {"window_size": (-1, -1)}, ""),
    ({"window_size": (4, 2)}, {"window_size": (4, 2)}, ""),
    ({"softcap": 20.0, "kernel": "reference"}, {"softcap": 20.0}, ""),
    ({"softcap": 20.0, "kernel": "reference"}, {"soft_cap": None}, ""),
    ({}, {"softcap": 0.0, "sinks": None, "document_ids": None, "prefix_length": 0}, ""),
    ({"is_causal": True, "prefix_length": 3}, {"prefix_length": 3}, ""),
    ({"mask_mod": blocky}, {"mask_mod": blocky, "block_mask": None}, ""),
    ({}, {"length": LENGTH}, ""),
    ({"length": LENGTH}, {"length": LENGTH}, ""),
    ({"length": LENGTH}, {"length": None}, ""),
    ({"length": LENGTH}, {"length": 2 * LENGTH}, "which this style was not given: length="),
    ({}, {"length": 3 * LENGTH}, "tokens this rank holds"),
    ({}, {"length": 0}, "length must be at least 1"),
    ({}, {"length": "zeros"}, "length=a tensor of shape (4,), which this style does not implement"),
    ({"mask_mod": blocky}, {"attention_masks": "blocky"}, ""),
    ({"is_causal": True, "window_size": (4, 0)}, {"sliding_window": 4}, "sliding_window=4, which this style was not "
     "given: window_size=(4, 0)"),
    ({"is_causal": True}, {"sliding_window": 4}, "sliding_window=4, which this style does not implement unless it is "
     "given window_size"),
    ({"window_size": (4, 2)}, {"sliding_window": 5}, "sliding_window=5, which this style was not given"),
    ({"window_size": (4, 2)}, {"window_size": (4, -1)}, "window_size=(4, -1), which this style was not given"),
    ({"is_causal": True, "window_size": (4, 0)}, {"window_size": (4, 3)}, "window_size=(4, 3), which this style was "
     "not given: window_size=(4, 0)"),
    ({}, {"window_size": (-1, 0)}, "window_size=(-1, 0), which this style does not implement"),
    ({"softcap": 20.0, "kernel": "reference"}, {"softcap": 30.0}, "softcap=30.0, which this style was not given: "
     "softcap=20.0"),
    ({"softcap": 20.0, "kernel": "reference"}, {"softcap": 0.0}, "softcap=0.0, which this style was not given"),
    ({"is_causal": True, "prefix_length": 3}, {"prefix_length": 0}, "prefix_length=0, which this style was not given"),
    ({"mask_mod": NEAR.sees}, {"mask_mod": NEAR.sees}, ""),  # of which each access makes another
    ({"mask_mod": blocky}, {"mask_mod": another}, "the style was given another mask_mod"),
    ({"mask_mod": blocky}, {"attention_masks": "another"}, "the style was given another mask_mod"),
    ({}, {"attention_masks": "three rows"}, "the BlockMask must be for 2 rows, which q has, or for one"),
    ({}, {"attention_masks": "three heads"}, "the BlockMask must be for 4 heads, which q has, or for one"),
    ({"is_causal": True}, {"mask_mod": blocky}, "mask_mod must say everything by itself, got is_causal as well"),
    ({}, {"attention_masks": {"full": None}}, "attention_masks={'full': None}, which this style does not implement"),
    ({}, {"sinks": 0.5}, "sinks=0.5, which this style does not implement"),
    ({}, {"sinks": "zeros", "s_aux": "ones"}, "sinks twice, under two names"),
    ({"scale": 0.3}, {"scale": "ones"}, "scale must be a float or None, got tensor([1., 1., 1., 1.])"),
    ({}, {"softcap": "zeros"}, "softcap=a tensor of shape (4,), which this style does not implement"),
    ({}, {"window_size": "zeros"}, "window_size=a tensor of shape (4,), which this style does not implement"),
]  # fmt: skip
MADE: dict[str, Callable[[], Any]] = {
    "blocky": block_mask, "another": lambda: block_mask(another), "zeros": lambda: torch.zeros(4),
    "three rows": lambda: block_mask(batch=3), "three heads": lambda: block_mask(heads=3),
    "ones": lambda: torch.ones(4),
}  # fmt: skip


def stated(index: int) -> tuple[str, float]:
    """What a call is told, or how far it is from the function with the style's options."""
    options, called, _ = STATED[index]
    called = {name: MADE[value]() if isinstance(value, str) else value for name, value in called.items()}
    mesh = mesh_of(2, 1)
    module = unchecked(WallFacerParallel(**told(mesh, layout="BNLH", check=False, **options)), mesh)
    try:
        out = module(*tensors(), **called)
    except (TypeError, ValueError) as error:
        return str(error), 0.0
    return "", worst_error([(out, context_parallel_attention(*tensors(), mesh, **told(mesh, **options)))])


@pytest.mark.parametrize("index", range(len(STATED)))
def test_options_of_a_call_are_the_styles(ranks: Ranks, index: int) -> None:
    for said, error in ranks(2).run(stated, index):
        assert STATED[index][2] in said
        assert bool(STATED[index][2]) == bool(said)
        assert error == 0


class WithSinks(Whatever):
    def __init__(self, parameter: bool) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.ones(HEADS)) if parameter else torch.arange(4.0)


def own_sinks() -> float:
    mesh = mesh_of(2, 1)
    with pytest.raises(ValueError, match="WithSinks has sinks: keep that in the module"):
        unchecked(RingParallel(check=False), mesh, WithSinks(parameter=True))
    q, k, v = tensors()
    module = unchecked(RingParallel(check=False, layout="BNLH"), mesh, WithSinks(parameter=False))
    pairs = [(module(q, k, v), context_parallel_attention(q, k, v, mesh, sinks=torch.arange(4.0)))]
    module.sinks = torch.ones(HEADS)  # as they are now
    pairs.append((module(q, k, v), context_parallel_attention(q, k, v, mesh, sinks=torch.ones(HEADS))))
    module.register_forward_hook(lambda it, _, out: setattr(it, "noted", out.detach()))
    pairs += [(module(q, k, v), pairs[-1][1]) for _ in range(2)]  # what a hook notes is no bias
    error = worst_error(pairs)
    # Nor do they become one; what is None is nothing.
    del module.sinks
    module.register_buffer("mask", None)
    module.register_parameter("bias", None)
    calls = module, torch.compile(module, backend="aot_eager", fullgraph=True)
    for add in (
        lambda: module.register_buffer("sinks", torch.ones(HEADS)),
        lambda: module.register_parameter("sinks", nn.Parameter(torch.ones(HEADS))),
    ):
        for call in calls:
            call(q, k, v)
            add()
            with pytest.raises(ValueError, match="WithSinks has sinks: keep that in the module"):
                call(q, k, v)
            del module.sinks
    return error


def test_sinks_of_a_module_are_no_parameter(ranks: Ranks) -> None:
    assert ranks(2).run(own_sinks) == [0.0, 0.0]


def of_fewer_blocks() -> float:
    """How far a call with a BlockMask that hides more than the style's mask_mod is from the function's."""
    mesh, (q, k, v), whole = mesh_of(2, 1), tensors(), block_mask()
    fewer = BlockMask.from_kv_blocks(
        whole.kv_num_blocks.clamp(max=1), whole.kv_indices, BLOCK_SIZE=4, mask_mod=blocky, seq_lengths=(LENGTH, LENGTH)
    )
    module = unchecked(RingParallel(**told(mesh, layout="BNLH", check=False, mask_mod=blocky)), mesh)
    out, own = module(q, k, v, block_mask=fewer), module(q, k, v, block_mask=whole)
    assert worst_error([(out, own)]) > 0.1
    return worst_error(
        (got, context_parallel_attention(q, k, v, mesh, **told(mesh, mask_mod=mask)))
        for got, mask in ((out, fewer), (own, whole), (module(q, k, v), blocky))
    )


def test_a_mask_of_fewer_blocks_is_not_the_styles(ranks: Ranks) -> None:
    assert ranks(2).run(of_fewer_blocks) == [0.0, 0.0]


def compiled_mask(styles: str) -> tuple[str, float]:
    """What a compiled call with a mask raises, or how far it is from the function's."""
    torch._dynamo.reset()
    mesh = mesh_of(2, 1)
    mask = block_mask()
    own = {"the same": mask, "its mask_mod": blocky, "none": None}[styles]
    module = unchecked(RingParallel(**told(mesh, layout="BNLH", check=False, mask_mod=own)), mesh)

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return module(q, k, v, attention_masks=mask) * 1

    q, k, v = tensors()
    try:
        out = torch.compile(model, backend="aot_eager", fullgraph=True)(q, k, v)
    except ValueError as error:
        return str(error), 0.0
    return "", worst_error([(out, context_parallel_attention(q, k, v, mesh, **told(mesh, mask_mod=mask)))])


@pytest.mark.filterwarnings("ignore")
def test_masks_of_compiled_calls_are_the_styles(ranks: Ranks) -> None:
    assert ranks(2).run(compiled_mask, "the same") == [("", 0.0)] * 2
    for styles in ("its mask_mod", "none"):
        for said, _ in ranks(2).run(compiled_mask, styles):
            assert "attention_masks under torch.compile, where masks are constants: give it to the style" in said


def without_an_order(options: dict[str, Any], called: dict[str, Any]) -> str:
    """What a style, or a call of it, says that has not been told in which order tokens were dealt out."""
    mesh = mesh_of(2, 1)
    try:
        unchecked(RingParallel(layout="BNLH", check=False, **options), mesh)(*tensors(), **called)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("options", "called", "needed"),
    [
        ({}, {}, False),
        ({}, {"sinks": torch.zeros(HEADS)}, False),
        ({"is_causal": True}, {}, True),
        ({"window_size": (4, 4)}, {}, True),
        ({"mask_mod": blocky}, {}, True),
        ({}, {"mask_mod": blocky}, True),
        ({}, {"document_ids": torch.arange(LENGTH) // 5}, True),
        ({}, {"cu_seqlens": torch.tensor([0, 5, LENGTH])}, True),
    ],
)
def test_masks_need_the_token_order(
    ranks: Ranks, options: dict[str, Any], called: dict[str, Any], needed: bool
) -> None:
    for said in ranks(2).run(without_an_order, options, called):
        assert bool(said) == needed
        if needed:
            assert "attention under a mask on 2 ranks must be told in which order tokens were dealt out" in said
            assert 'order = TokenOrder("head_tail", mesh)' in said


def on_another_mesh() -> dict[str, str]:
    meshes = {"team": mesh_of(1, 2), "ring": mesh_of(2, 1), "ulysses": mesh_of(1, 1, ulysses=2)}
    styles = {"ring": RingParallel, "ulysses": UlyssesParallel, "wallfacer": WallFacerParallel}
    said = {}
    for of, style in styles.items():
        for on, mesh in meshes.items():
            try:
                unchecked(style(check=False), mesh)
            except ValueError as error:
                said[f"{of} on {on}"] = str(error).split("; ")[0]
    return said


def test_styles_refuse_meshes_of_others(ranks: Ranks) -> None:
    for said in ranks(2).run(on_another_mesh):
        assert said == {
            "ring on team": "RingParallel needs a mesh with cp_team of size 1, got 2",
            "ring on ulysses": "RingParallel needs a mesh with cp_ulysses of size 1, got 2",
            "ulysses on team": "UlyssesParallel needs a mesh with cp_team of size 1, got 2",
            "ulysses on ring": "UlyssesParallel needs a mesh with cp_ring of size 1, got 2",
        }


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"check": 1}, TypeError, "check must be a bool, got 1"),
        ({"layout": "BHLD"}, ValueError, "layout must be one of"),
        ({"window_size": 5}, TypeError, "window_size must be a pair"),
        ({"is_causal": True, "mask_mod": blocky}, ValueError, "mask_mod must say everything by itself"),
    ],
)
@pytest.mark.parametrize("style", [RingParallel, WallFacerParallel, UlyssesParallel])
def test_a_style_refuses_options_that_do_not_fit(style: Any, options: Any, kind: Any, text: str) -> None:
    with pytest.raises(kind, match=text):
        style(**options)


def test_styles_take_the_options_of_attention() -> None:
    """Each but those that mean nothing to it."""
    for style, missing in ((RingParallel, {"schedule"}), (WallFacerParallel, set()),
                           (UlyssesParallel, {"schedule", "rotate", "rotate_forward"})):  # fmt: skip
        parameters = inspect.signature(style).parameters.values()
        assert all(p.kind is p.KEYWORD_ONLY for p in parameters)
        defaults = {p.name: p.default for p in parameters}
        assert defaults.pop("layout") == "BLNH"
        assert defaults.pop("check") is True
        assert defaults == {f.name: f.default for f in fields(AttentionOptions) if f.name not in missing}
        told = {name: object() for name in defaults}
        with mock.patch.object(AttentionOptions, "check"):
            options = style(**told).options
        assert all(getattr(options, name) is value for name, value in told.items())
        for name in missing:
            with pytest.raises(TypeError, match=f"^{style.__name__} got .* argument {name!r}, which it does not take$"):
                style(**{name: "2d"})


def test_keywords_are_typed_as_the_options_are() -> None:
    assert get_type_hints(AttentionKeywords) == get_type_hints(AttentionOptions)


def test_a_style_of_ones_own_says_what_it_takes() -> None:
    class Causal(WallFacerParallel):
        def __init__(self, **options: Any) -> None:
            super().__init__(is_causal=True, **options)

    class Plain(WallFacerParallel):
        def __init__(self, kernel: str) -> None:
            super().__init__(kernel=kernel)

    assert Causal(softcap=2.0).options == AttentionOptions(is_causal=True, softcap=2.0)
    assert "softcap" in inspect.signature(Causal).parameters
    assert list(inspect.signature(Plain).parameters) == ["kernel"]
    assert Plain("flash").options.kernel == "flash"


def test_a_styled_forward_has_the_names_of_q_k_and_v() -> None:
    """By which ``torch.export`` knows dynamic shapes."""

    class Attention(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v)

    with fake_world(1):
        module = parallelize_module(Attention(), context_mesh("cpu", 1, 1), WallFacerParallel(check=False))
        assert [*inspect.signature(module.forward).parameters] == ["q", "k", "v", "args", "kwargs"]


@pytest.mark.parametrize(
    ("name", "meant"),
    [("windowsize", "; did you mean 'window_size'?"), ("layot", "; did you mean 'layout'?"), ("x", "")],
)
def test_an_unknown_option_is_refused_by_name(name: str, meant: str) -> None:
    with pytest.raises(TypeError) as refused:
        UlyssesParallel(**{name: 1})
    assert str(refused.value) == f"UlyssesParallel got an unexpected keyword argument {name!r}{meant}"
    with fake_world(1):
        x, mesh = torch.zeros(1, 1, 4, 8), context_mesh("cpu")
        with pytest.raises(TypeError) as refused:
            context_parallel_attention(x, x, x, mesh, **{name: 1})
        meant = "" if name == "layot" else meant
        assert str(refused.value) == f"context_parallel_attention got an unexpected keyword argument {name!r}{meant}"
        with pytest.raises(TypeError, match="did you mean 'cu_seqlens'"):
            context_parallel_attention(x, x, x, mesh, cu_seqlen=None)
