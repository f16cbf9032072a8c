"""METP under torch.compile and activation checkpointing, with FSDP2 and tensor parallelism, and its state dicts."""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from functorch.compile import min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from tests import metp_cases
from tests.cases import Case, index_of, rows_of
from tests.metp_cases import (
    AttentionBlock,
    Block,
    FeedForwardBlock,
    OnRank,
    Results,
    assert_exact,
    expected,
    gradients,
    whole,
)
from tests.pairwise import few, tiers
from wallfacer_dt.testing import RankPool, worst_error

pytestmark = pytest.mark.ranks
Ranks = Callable[[int], RankPool]

CAUSAL = {"is_causal": True, "order": "head_tail"}
HEADS = {"heads": 4, "kv_heads": 2, "head_dim": 4}
FEED_FORWARD = FeedForwardBlock(gated=True, activation="silu", hidden=10, biases=("up", "gate", "down"))
ATTENTION = AttentionBlock(Case(**HEADS, **CAUSAL), rotary="half", biases=("query", "key", "value", "output"))
BLOCKS = {
    "feed_forward": FEED_FORWARD,
    "plain_feed_forward": FeedForwardBlock(hidden=7),
    "attention": ATTENTION,
    "fused": AttentionBlock(Case(**HEADS | {"kv_heads": 4}), fused=True, biases=("qkv",)),
    "plain_attention": AttentionBlock(Case(**HEADS)),
    "documents": AttentionBlock(Case(**HEADS, **CAUSAL, documents=((3, 4, 9),), length=16)),
}


def on(name: str, ring: int, team: int, **options: Any) -> Block:
    """A block on this mesh."""
    block = BLOCKS[name]
    return replace(block, case=replace(block.case, ring=ring, team=team, **({"batch": 2} | options)))


def styled(block: Block) -> tuple[nn.Module, list[int], Tensor, Tensor, tuple[Any, Any]]:
    """Module, rows, x, gradient of the output and further arguments on a rank."""
    rows = rows_of(block.case, index_of(block.case), block.case.total)
    module = parallelize_module(block.module(), block.mesh(), block.style(block.mesh()))
    x, grad = block.inputs()
    return module, rows, x[:, rows], grad[:, rows], block.call(rows)


class Compiled(NamedTuple):
    graphs: int
    shard: OnRank
    eager: Results


def compiled(block: Block, backend: str) -> Compiled:
    torch._dynamo.reset()
    module, rows, x, grad, call = styled(block)
    counting = CompileCounterWithBackend(backend)
    one_graph = torch.compile(module, backend=counting, fullgraph=True)
    for _ in range(2):
        found = gradients(one_graph, x, grad, call)
    found = {name.removeprefix("_orig_mod."): value for name, value in found.items()}
    return Compiled(counting.frame_count, (rows, found), gradients(module, x, grad, call))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "axes"),
    few(
        product(BLOCKS, [(2, 1), (2, 2)]),
        {("feed_forward", (2, 1)), ("attention", (2, 1)), ("fused", (2, 2)), ("documents", (2, 2))},
    ),
)
def test_one_graph_equal_to_eager(ranks: Ranks, name: str, axes: tuple[int, int]) -> None:
    block = on(name, *axes)
    results = ranks(block.case.size).run(compiled, block, "aot_eager")
    for found in results:
        assert found.graphs == 1
        assert_exact(found.shard[1], found.eager, 0.0)
    assert_exact(whole(block, [found.shard for found in results]), expected(block))


class WithScale(nn.Module):
    """A block that a call may scale."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        for name, child in block.named_children():
            setattr(self, name, child)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        raise NotImplementedError


def called_by_one_rank(name: str, what: str) -> str:
    """What this rank says where rank 1 alone calls a compiled module in a way that cannot be."""
    torch._dynamo.reset()
    block = on(name, 2, 1)
    module = parallelize_module(WithScale(block.module()), block.mesh(), block.style(block.mesh()))
    alone = dist.get_rank() == 1
    for parameter in module.parameters():
        parameter.requires_grad_(what != "gradient of x")
    x = block.inputs()[0][:, :4].requires_grad_(what == "gradient of x" and alone)
    scale = 2.0 if what == "scale" and alone else 1.0
    try:
        torch.compile(module, fullgraph=True, backend="aot_eager")(x, scale=scale)
    except ValueError as error:
        return str(error)
    return "nothing"


SAID = {
    "scale": "was called with scale=2.0",
    "gradient of x": "what needs a gradient must be the same on every rank of the mesh, got rank 0: nothing, rank",
    "": "nothing",
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "what"),
    few(
        product(["plain_feed_forward", "plain_attention"], SAID),
        {
            ("plain_attention", "scale"), ("plain_feed_forward", "gradient of x"), ("plain_feed_forward", ""),
            ("plain_attention", ""),
        },
    ),
)  # fmt: skip
def test_what_one_rank_refuses_in_a_graph_all_refuse(ranks: Ranks, name: str, what: str) -> None:
    for text in ranks(2).run(called_by_one_rank, name, what):
        assert SAID[what] in text


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("plain_feed_forward", marks=pytest.mark.whole), "plain_attention"])
def test_inductor(name: str) -> None:
    block = on(name, 2, 1, dtype="float32")
    pool = RankPool(2, timeout=500)
    try:
        for found in pool.run(compiled, block, "inductor"):
            assert found.graphs == 1
            assert_exact(found.shard[1], found.eager, 1e-5)
    finally:
        pool.close()


def saved_in_eager(block: Block) -> list[torch.Size]:
    """Shapes of what a forward keeps for the backward."""
    module, _, x, _, call = styled(block)
    shapes: list[torch.Size] = []

    def note(tensor: Tensor) -> Tensor:
        shapes.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        module(x.requires_grad_(), *call[0], **call[1])
    return shapes


def saved_in_a_graph(block: Block) -> list[torch.Size]:
    """The same of a compiled forward: its graph's outputs after the module's own."""
    torch._dynamo.reset()
    module, _, x, _, call = styled(block)
    shapes: list[torch.Size] = []

    def forward(graph: torch.fx.GraphModule, _: list[Any]) -> torch.fx.GraphModule:
        (outputs,) = next(iter(reversed(graph.graph.nodes))).args
        shapes.extend(node.meta["val"].shape for node in outputs[1:] if isinstance(node.meta["val"], Tensor))
        return graph

    partition = min_cut_rematerialization_partition  # Inductor's
    backend = aot_autograd(fw_compiler=forward, bw_compiler=lambda graph, _: graph, partition_fn=partition)
    torch.compile(module, backend=backend, fullgraph=True)(x.requires_grad_(), *call[0], **call[1])
    return shapes


def own_tensors(block: Block) -> list[torch.Size]:
    """x, this rank's shards of the weights, and of attention the heads' output and lse."""
    module, _, x, _, _ = styled(block)
    kept = [x, *(p.to_local() for name, p in module.named_parameters() if name not in ("down.bias", "output.bias"))]
    shapes = [tensor.shape for tensor in kept]
    if isinstance(block, AttentionBlock):
        case = block.case
        shapes += [(case.batch, case.heads, x.shape[1], case.head_dim), (case.batch, case.heads, x.shape[1])]
    return [torch.Size(shape) for shape in shapes]


def elements(shapes: list[torch.Size]) -> list[int]:
    """By size, as views of one tensor may have several shapes."""
    return sorted(shape.numel() for shape in shapes)


def saved(block: Block) -> list[list[int]]:
    return [elements(shapes) for shapes in (own_tensors(block), saved_in_eager(block), saved_in_a_graph(block))]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "axes"), tiers(product(["feed_forward", "plain_attention"], [(2, 1), (2, 2)]), strength=1)
)
def test_saved_are_x_and_a_ranks_own_weights(ranks: Ranks, name: str, axes: tuple[int, int]) -> None:
    """And nothing of what goes round."""
    block = on(name, *axes, shard=8)
    for own, eager, graph in ranks(block.case.size).run(saved, block):
        assert eager == own
        # And the number of the call and its contents.
        assert graph == sorted([2, *own])


def checkpointed(block: Block) -> tuple[Results, Results]:
    module, _, x, grad, (args, kwargs) = styled(block)

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, *args, use_reentrant=False, **kwargs)

    found = {name.removeprefix("inner."): value for name, value in gradients(Checkpointed(), x, grad).items()}
    return found, gradients(module, x, grad, (args, kwargs))


@pytest.mark.parametrize("name", ["feed_forward", "attention", "documents"])
def test_activation_checkpointing_changes_nothing(ranks: Ranks, name: str) -> None:
    for found, without in ranks(4).run(checkpointed, on(name, 2, 2)):
        assert_exact(found, without, 0.0)


@lru_cache
def mesh_of(axes: tuple[str, ...], shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=axes)


def context_of(mesh: DeviceMesh) -> tuple[DeviceMesh, int]:
    """The axes that share a sequence, and this rank's index along them."""
    context = mesh[tuple(axis for axis in mesh.mesh_dim_names if axis.startswith("cp_"))]
    index = 0
    for size, place in zip(context.shape, context.get_coordinate(), strict=True):
        index = index * size + place
    return context, index


def fsdp(block: Block, axes: tuple[str, ...]) -> tuple[OnRank, int]:
    """Rows, results, and which part of the batch this is; the others' weights are sharded over all ranks."""
    shape = tuple({"dp": 2, "cp_ring": block.case.ring, "cp_team": block.case.team}[axis] for axis in axes)
    mesh = mesh_of(axes, shape)
    context, index = context_of(mesh)
    module = parallelize_module(block.module(), context, block.style(context))
    model = Scaled(module, block.inputs()[1].shape[-1])
    fully_shard(module, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh[axes]._flatten("all"))
    for one in (module, model):
        one.set_gradient_divide_factor(1.0)
        one.set_force_sum_reduction_for_comms(True)  # gloo has no other reduction
    rows = rows_of(block.case, index, block.case.total)
    group = mesh["dp"].get_local_rank()
    x, grad = (t.chunk(2)[group][:, rows].clone() for t in block.inputs())
    args, kwargs = block.call(rows)
    x.requires_grad_()
    out = model(x, *args, **kwargs)
    out.backward(grad)
    found = {"out": out, "x": x.grad} | {name: p.grad for name, p in model.named_parameters()}
    return (rows, {name: metp_cases.array(value) for name, value in found.items()}), group


@pytest.mark.parametrize(
    ("name", "axes"),
    tiers(
        product(["feed_forward", "attention", "fused"], [("dp", "cp_ring"), ("dp", "cp_ring", "cp_team")]), strength=1
    ),
    ids=str,
)
def test_fsdp_over_other_sequences(ranks: Ranks, name: str, axes: tuple[str, ...]) -> None:
    block = on(name, 2, len(axes) - 1)
    groups: dict[int, list[OnRank]] = {0: [], 1: []}
    for shard, group in ranks(2 * block.case.size).run(fsdp, block, axes):
        groups[group].append(shard)
    half = replace(block, case=replace(block.case, batch=1))
    parts = [whole(half, shards) for shards in groups.values()]
    found = parts[0] | {key: np.concatenate([part[key] for part in parts]) for key in ("out", "x")}
    assert_exact(found, expected_of_scaled(block))


class Scaled(nn.Module):
    """A block, and weights of others behind it."""

    def __init__(self, block: nn.Module, size: int) -> None:
        super().__init__()
        self.block, self.scale = block, nn.Parameter(torch.full((size,), 2.0, dtype=torch.float64))

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.block(x, *args, **kwargs) * self.scale


def expected_of_scaled(block: Block) -> dict[str, np.ndarray]:
    """Of one process in float64."""
    x, grad = block.inputs()
    model = Scaled(block.module(torch.float64), grad.shape[-1])
    return gradients(model, x, grad, block.call([*range(block.case.total)]))


def scaled_by_fsdp(block: Block) -> OnRank:
    """Where FSDP shards the others' weights over METP's own ranks."""
    module, rows, x, grad, call = styled(block)
    model = Scaled(module, grad.shape[-1])
    fully_shard(model, mesh=block.mesh(), ignored_params={*module.parameters()})
    model.set_gradient_divide_factor(1.0)
    model.set_force_sum_reduction_for_comms(True)
    x = x.clone().requires_grad_()
    out = model(x, *call[0], **call[1])
    out.backward(grad)
    found = {"out": out, "x": x.grad} | {name: p.grad for name, p in model.named_parameters()}
    return rows, {name: metp_cases.array(value) for name, value in found.items()}


@pytest.mark.parametrize("name", ["feed_forward", "attention"])
def test_fsdp_of_others_over_the_same_ranks(ranks: Ranks, name: str) -> None:
    block = replace(on(name, 2, 1), axis="cp_ring")
    assert_exact(whole(block, ranks(2).run(scaled_by_fsdp, block)), expected_of_scaled(block))


def distributed(
    block: Block,
    axes: tuple[str, ...],
    layouts: tuple[Placement, Placement],
    as_dtensor: bool,
    is_checkpointed: bool = False,
) -> tuple[list[int], list[int], Results]:
    """With a plain x or a DTensor, ``layouts`` of x and the output on axis ``tp``: their rows here, and results."""
    sizes = {"dp": 2, "tp": 2, "cp_ring": block.case.ring, "cp_team": block.case.team}
    mesh = mesh_of(axes, tuple(sizes[axis] for axis in axes))
    context, index = context_of(mesh)
    rows = rows_of(block.case, index, block.case.total)
    held = [
        np.array_split(rows, 2)[mesh["tp"].get_local_rank()].tolist() if isinstance(layout, Shard) else rows
        for layout in layouts
    ]
    x, grad = (t[:, mine].clone() for t, mine in zip(block.inputs(), held, strict=True))
    style = block.style(context, input_layouts=layouts[0], output_layouts=layouts[1])
    module = parallelize_module(block.module(), mesh[tuple(axis for axis in axes if axis != "dp")], style)
    if as_dtensor:
        x, grad = (dealt(t, mesh, layout) for t, layout in zip((x, grad), layouts, strict=True))
    args, kwargs = block.call(rows)
    x.requires_grad_()
    run = partial(checkpoint, module, use_reentrant=False) if is_checkpointed else module
    out = run(x, *args, **kwargs)
    out.backward(grad)
    locals_ = [t.to_local() if as_dtensor else t for t in (out, x.grad)]
    found = dict(zip(("out", "x"), locals_, strict=True)) | {name: p.grad for name, p in module.named_parameters()}
    return *held, {name: metp_cases.array(value) for name, value in found.items()}


def dealt(x: Tensor, mesh: DeviceMesh, layout: Placement) -> DTensor:
    """A rank's tokens as a DTensor: dp has other sequences, tp is laid out so, other axes have other tokens."""
    by_axis = {"dp": Shard(0), "tp": layout}
    if "dp" in mesh.mesh_dim_names:
        x = x.chunk(2)[mesh["dp"].get_local_rank()]
    return DTensor.from_local(x, mesh, [by_axis.get(axis, Shard(1)) for axis in mesh.mesh_dim_names])


LAYOUTS = {
    "replicated": (Replicate(), Replicate()),
    "sequence": (Shard(1), Shard(1)),
    "mixed": (Shard(1), Replicate()),
}
TENSOR = [("cp_ring", "tp"), ("cp_ring", "cp_team", "tp")]


@pytest.mark.parametrize(
    ("name", "axes", "layouts", "as_dtensor"),
    tiers(product(["feed_forward", "plain_feed_forward", "attention"], TENSOR, LAYOUTS, [False, True])),
    ids=str,
)
def test_tensor_parallel(ranks: Ranks, name: str, axes: tuple[str, ...], layouts: str, as_dtensor: bool) -> None:
    block = on(name, 2, len(axes) - 1, length=16, heads=16, kv_heads=8)
    check(block, ranks(2 * block.case.size).run(distributed, block, axes, LAYOUTS[layouts], as_dtensor))


@pytest.mark.parametrize("name", ["feed_forward", "attention"])
def test_ranks_of_tensor_parallelism_compute_anew_together(ranks: Ranks, name: str) -> None:
    """A checkpoint computes anew where a backward first asks for what was saved, which all must have in one place."""
    block = on(name, 2, 1, length=16, heads=16, kv_heads=8)
    check(block, ranks(4).run(distributed, block, TENSOR[0], LAYOUTS["replicated"], False, True))


def check(block: Block, shards: list[tuple[list[int], list[int], Results]]) -> None:
    for rows, out_rows, results in shards:
        exact = expected(block)
        exact |= {"x": exact["x"][:, rows], "out": exact["out"][:, out_rows]}
        assert_exact(results, exact)


@pytest.mark.parametrize(
    ("name", "axes"),
    tiers(
        product(["feed_forward", "attention", "fused"], [("cp_ring",), ("cp_ring", "cp_team"), ("dp", "cp_ring")]),
        strength=1,
    ),
    ids=str,
)
def test_dtensors(ranks: Ranks, name: str, axes: tuple[str, ...]) -> None:
    """Gradients of parameters are sums over METP's mesh; dp has others."""
    groups = 1 + ("dp" in axes)
    block = on(name, 2, 1 + ("cp_team" in axes))
    shards = ranks(groups * block.case.size).run(distributed, block, axes, LAYOUTS["replicated"], True)
    for part in range(groups):
        exact = expected(block, part=part, parts=groups)
        mine = shards[part * block.case.size : (part + 1) * block.case.size]
        for rows, _, results in mine:
            assert_exact(results, exact | {key: exact[key][:, rows] for key in ("x", "out")})


def refused_with_tp() -> None:
    block = on("fused", 2, 1, heads=8, kv_heads=8)
    mesh = mesh_of(("cp_ring", "tp"), (2, 2))
    style = block.style(mesh["cp_ring"])
    with pytest.raises(ValueError, match="with an axis 'tp' projections must be query, key and value, not one qkv"):
        parallelize_module(block.module(), mesh, style)


def test_fused_projections_cannot_be_split_further(ranks: Ranks) -> None:
    """Rows of one weight, cut over tp as well, would not be heads of queries, keys and values that belong together."""
    ranks(4).run(refused_with_tp)


def state_dicts(block: Block) -> Results:
    """The plain module's output with METP's weights, METP's with weights it is given, and both expected."""
    module, rows, x, _, (args, kwargs) = styled(block)
    full = StateDictOptions(full_state_dict=True)
    there = get_model_state_dict(module, options=full)
    plain = block.module()
    for parameter in plain.parameters():
        nn.init.zeros_(parameter)
    plain.load_state_dict(there)
    everything = block.inputs()[0], *block.call(list(range(block.case.total)))[0]
    loaded = plain(*everything)
    for parameter in plain.parameters():
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(3))
    set_model_state_dict(module, plain.state_dict(), options=full)
    back, wanted = module(x, *args, **kwargs), plain(*everything)[:, rows]
    found = {"loaded": loaded, "expected": block.module()(*everything), "back": back, "wanted": wanted}
    return {name: metp_cases.array(value) for name, value in found.items()}


@pytest.mark.parametrize(
    ("name", "placement"),
    tiers(
        product(["feed_forward", "plain_feed_forward", "attention", "fused"], ["team_in_node", "ring_in_node"]),
        strength=1,
    ),
)
def test_state_dicts_go_to_the_plain_module_and_back(ranks: Ranks, name: str, placement: str) -> None:
    for found in ranks(4).run(state_dicts, on(name, 2, 2, placement=placement)):
        assert worst_error([(found["loaded"], found["expected"])]) == 0
        assert worst_error([(found["back"], found["wanted"])]) <= 1e-10


def full_tensors(block: Block) -> list[bool]:
    module, *_ = styled(block)
    wholes = dict(block.module().named_parameters())
    return [p.full_tensor().equal(wholes[name]) for name, p in module.named_parameters()]


@pytest.mark.parametrize(
    ("hidden", "placement"), tiers(product([5, 6, 8, 9], ["team_in_node", "ring_in_node"]), strength=1)
)
def test_full_tensors_of_uneven_shards(ranks: Ranks, hidden: int, placement: str) -> None:
    """Nested shards are not what one axis of as many ranks would have."""
    block = replace(on("feed_forward", 2, 2, placement=placement), hidden=hidden)
    assert all(all(equal) for equal in ranks(4).run(full_tensors, block))
