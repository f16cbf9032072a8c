"""torch.func on ranks: gradients equal autograd's, and what is refused is refused by name on all of them."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.func import functional_call, functionalize, grad, hessian, jacrev, jvp, vjp, vmap

from recipes.train_bytes.model import ByteGPT, ModelConfig
from tests.cases import Inner, mesh_of
from tests.metp_cases import AttentionBlock, FeedForward
from wallfacer_dt import METPParallel, TokenOrder, WallFacerParallel, context_parallel_attention
from wallfacer_dt.testing import RankPool, worst_error

pytestmark = pytest.mark.ranks
Ranks = Callable[[int], RankPool]
Function = Callable[..., Tensor]


def drawn() -> list[Tensor]:
    """q, k, v, sinks and k_shared of this rank."""
    torch.manual_seed(dist.get_rank())
    shapes = (1, 4, 6, 10), (1, 2, 6, 8), (1, 2, 6, 8), (4,), (1, 1, 6, 2)
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def functions() -> dict[str, Function]:
    """The function and a styled module, of documents, to a number."""
    mesh = mesh_of(2, 1)
    ids = torch.arange(12) // 5
    order = TokenOrder("contiguous", mesh)
    style = WallFacerParallel(is_causal=True, order=order, layout="BNLH", check=False)
    inner = parallelize_module(Inner(), mesh, style)

    def function(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, shared: Tensor) -> Tensor:
        out = context_parallel_attention(
            q, k, v, mesh, is_causal=True, order=order, document_ids=ids, sinks=sinks, k_shared=shared
        )
        return out.sin().sum()

    def styled(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, shared: Tensor) -> Tensor:
        return inner(q, k, v, document_ids=ids, sinks=sinks, k_shared=shared).sin().sum()

    return {"function": function, "style": styled}


def by_autograd(function: Function, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    return torch.autograd.grad(function(*leaves), leaves)


def by_vjp(function: Function, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    out, pull = vjp(function, *inputs)
    return pull(torch.ones_like(out))


def gradients(of: str, how: str) -> float:
    """Largest difference between a transform's gradients and autograd's."""
    function, inputs = functions()[of], drawn()
    every = tuple(range(len(inputs)))
    found = {
        "grad": lambda: grad(function, every)(*inputs),
        "vjp": lambda: by_vjp(function, inputs),
        "grad in a graph": lambda: torch.compile(grad(function, every), backend="aot_eager", fullgraph=True)(*inputs),
    }[how]()
    return worst_error(zip(found, by_autograd(function, inputs), strict=True))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("of", "how"), [("function", "grad"), ("function", "vjp"), ("style", "grad"), ("style", "vjp"),
                    ("style", "grad in a graph")]
)  # fmt: skip
def test_gradients_are_those_of_autograd(ranks: Ranks, of: str, how: str) -> None:
    assert ranks(2).run(gradients, of, how) == [0, 0]


def published() -> float:
    """Which makes a process group of its own at its first call."""
    mesh = mesh_of(2, 2)
    q, k, v = (x[:, :2, :, :8] for x in drawn()[:3])

    def function(q: Tensor) -> Tensor:
        return context_parallel_attention(q, k, v, mesh, schedule="published").sin().sum()

    return worst_error([(grad(function)(q), by_autograd(function, [q])[0])])


def test_gradients_of_the_published_schedule(ranks: Ranks) -> None:
    assert ranks(4).run(published) == [0] * 4


def of_parameters() -> float:
    """The same of a model's parameters."""
    torch.manual_seed(0)
    model = ByteGPT(ModelConfig(dim=32, layers=2, heads=4, kv_heads=2)).double()
    mesh = mesh_of(2, 1)
    style = WallFacerParallel(is_causal=True, order=TokenOrder("contiguous", mesh), check=False)
    parallelize_module(model, mesh, {"layers.*.attention.inner": style})
    tokens, positions = torch.randint(0, 256, (1, 8)), torch.arange(8) + 8 * dist.get_rank()
    parameters = dict(model.named_parameters())
    found = grad(lambda p: functional_call(model, p, (tokens, positions)).square().mean())(parameters)
    model(tokens, positions).square().mean().backward()
    return worst_error({name: (found[name], x.grad) for name, x in parameters.items() if x.grad is not None})


def test_gradients_of_a_functional_call(ranks: Ranks) -> None:
    # torch.func adds the norms' gradients up in another order.
    assert max(ranks(2).run(of_parameters)) < 1e-15


def twice(function: Function, inputs: list[Tensor]) -> Tensor:
    return grad(lambda q: grad(function)(q, *inputs[1:]).sum())(inputs[0])


def of_dtensors(function: Function, inputs: list[Tensor]) -> Tensor:
    mesh = mesh_of(2, 1)
    q, k, v = (DTensor.from_local(torch.ones(1, 2, 4, 8), mesh, [Shard(2), Shard(2)]) for _ in range(3))
    return grad(lambda q: context_parallel_attention(q, k, v, mesh).to_local().sum())(q)


def one_alone(function: Function, inputs: list[Tensor]) -> Tensor:
    return vmap(function)(*(x[None] for x in inputs)) if dist.get_rank() == 1 else function(*inputs)


def batched(function: Function, inputs: list[Tensor]) -> Any:
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    return torch.autograd.grad(out, leaves, torch.ones(2, *out.shape), is_grads_batched=True)


TRANSFORMS: dict[str, tuple[Callable[[Function, list[Tensor]], Any], str]] = {
    "vmap": (lambda f, x: vmap(f)(*(part[None] for part in x)), "q is mapped over by torch.vmap"),
    "vmap of grad": (lambda f, x: vmap(grad(f))(*(part[None] for part in x)), "q is mapped over by torch.vmap"),
    "vmap on one rank": (one_alone, "q is mapped over by torch.vmap"),
    "jacrev": (lambda f, x: jacrev(f)(*x), "attention_backward cannot be mapped over by torch.vmap"),
    "batched gradients": (batched, "attention_backward cannot be mapped over by torch.vmap"),
    "hessian": (lambda f, x: hessian(f)(*x), "no forward-mode derivative"),
    "jvp": (lambda f, x: jvp(f, tuple(x), tuple(x)), "no forward-mode derivative, but q has a tangent"),
    "grad of grad": (twice, "context-parallel attention has no second derivative"),
    "functionalize": (lambda f, x: functionalize(f)(*x), "leave torch.func.functionalize out"),
    "DTensors": (of_dtensors, "is a DTensor under a transform of torch.func"),
}


def refused(of: str, what: str) -> str:
    transform, _ = TRANSFORMS[what]
    try:
        transform(functions()[of], drawn())
    except (NotImplementedError, ValueError) as error:  # of a rank alone others hear in a ValueError
        return str(error)
    return "nothing"


@pytest.mark.parametrize("what", TRANSFORMS)
@pytest.mark.parametrize("of", ["function", "style"])
def test_other_transforms_are_refused_by_name(ranks: Ranks, of: str, what: str) -> None:
    for said in ranks(2).run(refused, of, what):
        assert TRANSFORMS[what][1] in said


def of_metp(what: str) -> str:
    torch.manual_seed(0)
    module = FeedForward(6, 8, 6, "gelu", False, ("up", "down"))
    mesh = mesh_of(2, 1)
    metp: nn.Module = parallelize_module(module, mesh, METPParallel(up="up", down="down", activation="gelu"))
    x, parameters = torch.randn(1, 3, 6), dict(metp.named_parameters())
    try:
        if what == "x":
            grad(lambda x: metp(x).sum())(x)
        else:
            grad(lambda p: functional_call(metp, p, (x,)).sum())(parameters)
    except NotImplementedError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("what", ["x", "parameters"])
def test_metp_is_refused_by_name(ranks: Ranks, what: str) -> None:
    for said in ranks(2).run(of_metp, what):
        assert "METP is not implemented under transforms of torch.func" in said


def written_into(kind: str) -> bool:
    """Whether what a call gives can be written into, as what SDPA gives can."""
    torch.manual_seed(dist.get_rank())
    outputs = []
    if kind == "METP":
        module = FeedForward(6, 8, 6, "gelu", False, ())
        metp = parallelize_module(module, mesh_of(4, 1), METPParallel(up="up", down="down", activation="gelu"))
        outputs.append(metp(torch.randn(1, 3, 6, requires_grad=True)))
    elif kind == "METP's attention":
        block = AttentionBlock()
        projected = parallelize_module(block.module(), block.mesh(), block.style(block.mesh()))
        outputs.append(projected(torch.randn(1, block.case.shard, block.dim, dtype=torch.float64, requires_grad=True)))
    else:
        for mesh, side, by_tokens in product(((4, 1), (2, 2), (1, 4)), ("q", "kv"), (False, True)):
            x = torch.randn(3, 1, 4, 6, 8)
            x = (x.transpose(2, 3).contiguous().transpose(2, 3) if by_tokens else x).requires_grad_()
            outputs.append(context_parallel_attention(*x, mesh_of(*mesh), rotate_forward=side))
    halves = [out.detach() * 0.5 for out in outputs]
    return all(out.mul_(0.5).equal(half) for out, half in zip(outputs, halves, strict=True))


@pytest.mark.parametrize("kind", ["attention", "METP", "METP's attention"])
def test_what_is_given_can_be_written_into(ranks: Ranks, kind: str) -> None:
    assert ranks(4).run(written_into, kind) == [True] * 4


def made_in_inference_mode(ranks: tuple[int, ...]) -> float:
    """How far gradients are from those that documents, or what a mask captures, have if they are made otherwise."""
    mesh, block = mesh_of(4, 1), AttentionBlock(case=replace(AttentionBlock().case, is_causal=True))
    order = TokenOrder("contiguous", mesh)
    projected = parallelize_module(block.module(), block.mesh(), block.style(block.mesh()))
    x = torch.randn(1, block.case.shard, block.dim, dtype=torch.float64, requires_grad=True)
    leaves = [each.requires_grad_() for each in torch.randn(3, 1, 4, 6, 8, dtype=torch.float64).unbind()]

    def gradients(ids: Tensor, others: Tensor) -> list[Tensor]:
        def mask(_b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return ids[i] == ids[j]

        outs = [
            context_parallel_attention(*leaves, mesh, is_causal=True, order=order, document_ids=ids),
            context_parallel_attention(*leaves, mesh, order=order, mask_mod=mask),
        ]
        found = [grad for out in outs for grad in torch.autograd.grad(out.sin().sum(), leaves)]
        return [*found, *torch.autograd.grad(projected(x, document_ids=others).sin().sum(), x)]

    def ids() -> tuple[Tensor, Tensor]:
        return torch.arange(24) // 5, torch.arange(4 * block.case.shard) // 5

    expected = gradients(*ids())
    with torch.inference_mode(dist.get_rank() in ranks):
        made = ids()
    return worst_error(zip(gradients(*made), expected, strict=True))


@pytest.mark.parametrize("where", [(1,), (0, 1, 2, 3)])
def test_masks_may_be_made_in_inference_mode(ranks: Ranks, where: tuple[int, ...]) -> None:
    assert ranks(4).run(made_in_inference_mode, where) == [0.0] * 4
