"""Checkpointed blocks do not rerun the ring."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import AotEagerAndRecordGraphs
from torch._ops import OpOverload
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.cases import Inner, mesh_of, told
from tests.metp_cases import Attention
from tests.pairwise import few
from wallfacer_dt import METPAttentionParallel, WallFacerParallel
from wallfacer_dt.checkpoint import ATTENTION_SAVE_OPS, save_attention
from wallfacer_dt.testing import RankPool, count_collectives, worst_error

pytestmark = pytest.mark.ranks
Ranks = Callable[[int], RankPool]


class Block(nn.Module):
    """One projection, attention, another; (B, L, 16) to the same."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.inner, self.output = nn.Linear(16, 48), Inner(), nn.Linear(16, 16)

    def forward(self, x: Tensor, **documents: Tensor) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (6, 8)).chunk(3, 2)
        return x + self.output(F.silu(self.inner(q, k, v, **documents).flatten(2)))


class Count(TorchDispatchMode):
    """How often each operator runs."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def count(self, op: OpOverload) -> None:
        self.counts[op.name().split("::")[1].split(".")[0]] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.count(func)
        return func(*args, **(kwargs or {}))


def torch_s_own_list(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saved = op in {torch.ops.aten.addmm.default, *ATTENTION_SAVE_OPS}
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


CONTEXTS: dict[str, Callable[[], Any] | None] = {
    "none": None,
    "plain": None,
    "full": save_attention(),
    "selective": save_attention([torch.ops.aten.addmm.default]),
    "policy": save_attention(lambda ctx, op, *args, **kwargs: CheckpointPolicy.PREFER_RECOMPUTE),
    "save list": partial(create_selective_checkpoint_contexts, torch_s_own_list),
}


def gradients(
    how: str, *, compiled: bool = False, packed: bool = False, backend: str = ""
) -> tuple[list[Tensor], Counter[str]]:
    """Gradients of two blocks, and how often operators ran (or stand in the compiled graphs), both ways together.

    ``packed``: of documents, on a mesh with an axis ``cp_ulysses``. ``backend``: compiled by that, and not counted.
    """
    torch.manual_seed(0)
    mesh = mesh_of(2, 1, ulysses=2) if packed else mesh_of(2, 2)
    documents = {"document_ids": torch.arange(16) // 6} if packed else {}
    blocks = nn.ModuleList(Block() for _ in range(2))
    parallelize_module(
        blocks, mesh, {"*.inner": WallFacerParallel(**told(mesh, "head_tail", is_causal=True, check=False))}
    )
    context = {} if CONTEXTS[how] is None else {"context_fn": CONTEXTS[how]}

    def model(x: Tensor) -> Tensor:
        for block in blocks:
            if how == "none":
                x = block(x, **documents)
            else:
                x = checkpoint(block, x, use_reentrant=False, **context, **documents)
        return x

    x = torch.randn(1, 4, 16, requires_grad=True)
    graphs = AotEagerAndRecordGraphs()
    counting = Count()
    if backend:
        torch.compile(model, fullgraph=True, backend=backend)(x).square().sum().backward()
    elif compiled:
        torch.compile(model, fullgraph=True, backend=graphs)(x).square().sum().backward()
        (forward,), (backward,) = graphs.fw_graphs, graphs.bw_graphs
        for node in (*forward.graph.nodes, *backward.graph.nodes):
            if node.op == "call_function" and isinstance(node.target, OpOverload):
                counting.count(node.target)
    else:
        with counting:
            model(x).square().sum().backward()
    return [p.grad for p in (x, *blocks.parameters())], counting.counts


class Compared(NamedTuple):
    """Largest difference to gradients without checkpoints; calls of attention, of its backward, of addmm; and
    collectives of forwards.
    """

    error: float
    forward: int
    backward: int
    addmm: int
    collectives: dict[Any, int]


def compare(how: str, compiled: bool, packed: bool = False) -> Compared:
    expected, _ = gradients("none", packed=packed)
    with count_collectives(mesh_of(2, 1, ulysses=2) if packed else mesh_of(2, 2)) as traffic:
        got, counts = gradients(how, compiled=compiled, packed=packed)
    error = worst_error(zip(got, expected, strict=True))
    ran = counts["attention"], counts["attention_backward"], counts["addmm"]
    return Compared(error, *ran, dict(traffic.forward.collectives))


ONCE = {
    ("all_gather_into_tensor", "cp_team"): 2,
    ("all_to_all_single", "cp_ring"): 2,
    ("all_to_all_single", "cp_team"): 2,
}


@pytest.mark.parametrize(
    ("how", "projections", "compiled"),
    few(
        [(*how, c) for how in (("full", 6), ("policy", 6), ("selective", 4), ("save list", 4)) for c in (False, True)],
        {("full", 6, False), ("save list", 4, False), ("policy", 6, True), ("selective", 4, True)},
    ),
)
def test_the_ring_runs_once(ranks: Ranks, how: str, projections: int, compiled: bool) -> None:
    """Once a layer, with the same gradients; projections run again where the policy does not save them."""
    for found in ranks(4).run(compare, how, compiled):
        assert found.error < 1e-6
        assert (found.forward, found.backward, found.addmm) == (2, 2, projections)
        assert found.collectives == ONCE


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_so_does_attention_of_documents_with_ulysses(ranks: Ranks, compiled: bool) -> None:
    for found in ranks(4).run(compare, "full", compiled, True):
        assert found.error < 1e-6
        assert (found.forward, found.backward, found.addmm) == (2, 2, 6)


@pytest.mark.parametrize("some", [torch.ops.aten.addmm, "addmm"])
def test_a_list_of_what_matches_nothing_is_refused(some: Any) -> None:
    for operators in ([torch.ops.aten.mm.default, some], frozenset({some})):
        with pytest.raises(ValueError, match=r"must list operators such as torch\.ops\.aten\.mm\.default, got .*addmm"):
            save_attention(operators)


def test_a_list_may_be_told_where_it_is_compiled() -> None:
    def block(x: Tensor) -> Tensor:
        context_fn = save_attention({torch.ops.aten.mm.default})  # pyrefly: ignore[bad-argument-type]
        return checkpoint(lambda x: torch.sin(x @ x), x, use_reentrant=False, context_fn=context_fn)

    x, whole = torch.randn(4, 4, requires_grad=True), torch.compile(block, fullgraph=True, backend="aot_eager")
    expected, found = (torch.autograd.grad(f(x).sum(), x)[0] for f in (block, whole))
    assert worst_error([(found, expected)]) < 1e-6


def test_without_the_policy_it_runs_twice(ranks: Ranks) -> None:
    """What the policy is for."""
    for found in ranks(4).run(compare, "plain", False):
        assert found.forward == 4
        assert found.collectives == {what: 2 * number for what, number in ONCE.items()}


def under(**config: Any) -> tuple[float, dict[Any, int]]:
    """Largest difference to gradients of eager code where a partitioner saves less, and collectives of forwards."""
    expected, _ = gradients("none")
    torch._dynamo.reset()
    with torch._functorch.config.patch(config), count_collectives(mesh_of(2, 2)) as traffic:
        got, _ = gradients("none", backend="aot_eager_decomp_partition")
    return worst_error(zip(got, expected, strict=True)), dict(traffic.forward.collectives)


@pytest.mark.parametrize("config", [{"activation_memory_budget": 0.2}, {"aggressive_recomputation": True}], ids=str)
def test_a_partitioner_that_saves_less_does_not_run_the_ring_again(ranks: Ranks, config: dict[str, Any]) -> None:
    for error, found in ranks(4).run(partial(under, **config)):
        assert error < 1e-6
        assert found == ONCE


def with_metp(compiled: bool) -> tuple[float, int, int]:
    """Largest difference to gradients without a checkpoint; calls of METP's attention and of its backward."""
    attention = WallFacerParallel(**told(mesh_of(2, 2), "head_tail", is_causal=True, check=False))
    style = METPAttentionParallel(
        query="query", key="key", value="value", output="output", head_dim=4, attention=attention, check=False
    )
    found, counting = [], Count()
    for context in (None, save_attention()):
        torch.manual_seed(0)
        module = Attention(6, (2, 2), 4, 6, False, None, (), None, {})
        parallelize_module(module, mesh_of(2, 2), style, src_data_rank=None)

        def model(x: Tensor, module: nn.Module = module, context: Any = context) -> Tensor:
            if context is None:
                return x + module(F.silu(x))
            return checkpoint(lambda x: x + module(F.silu(x)), x, use_reentrant=False, context_fn=context)

        x = torch.ones(1, 4, 6, requires_grad=True)
        graphs = AotEagerAndRecordGraphs()
        counting = Count()
        if compiled:
            torch.compile(model, fullgraph=True, backend=graphs)(x).square().sum().backward()
            for node in (*graphs.fw_graphs[0].graph.nodes, *graphs.bw_graphs[0].graph.nodes):
                if node.op == "call_function" and isinstance(node.target, OpOverload):
                    counting.count(node.target)
        else:
            with counting:
                model(x).square().sum().backward()
        found.append([x.grad, *(p.grad.to_local() for p in module.parameters())])
    error = worst_error(zip(*found, strict=True))
    return error, counting.counts["metp_attention"], counting.counts["metp_attention_backward"]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_so_does_metps_attention(ranks: Ranks, compiled: bool) -> None:
    for error, forward, backward in ranks(4).run(with_metp, compiled):
        assert error < 1e-6
        assert (forward, backward) == (1, 1)


def documents_of_another_call(context_fn: Any, metp: bool) -> str:
    """What a backward says whose checkpoint computes anew with documents that a module has been given meanwhile."""
    mesh = mesh_of(2, 1)
    style = WallFacerParallel(layout="BNLH", check=False, **told(mesh, is_causal=True))
    x, state = torch.randn(1, 2, 4, 8, requires_grad=True), {}
    if metp:
        style = METPAttentionParallel(
            query="query", key="key", value="value", output="output", head_dim=4, attention=style, check=False
        )
        module = Attention(8, (2, 2), 4, 8, False, None, (), None, {})
        attend = parallelize_module(module, mesh, style, src_data_rank=None)
    else:
        attend = parallelize_module(Inner(), mesh, style)

    def layer(x: Tensor) -> Tensor:
        return attend(x[:, 0], **state) if metp else attend(x, x, x, **state)

    told_how = {} if context_fn is None else {"context_fn": context_fn}
    state["document_ids"] = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1])
    out = checkpoint(layer, x, use_reentrant=False, **told_how)
    state["document_ids"] = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1])
    try:
        out.sum().backward()
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("metp", [False, True], ids=["attention", "METP"])
@pytest.mark.parametrize("context_fn", [None, save_attention()], ids=["plain", "save_attention"])
def test_documents_that_a_checkpoint_does_not_find_again_are_refused(ranks: Ranks, context_fn: Any, metp: bool) -> None:
    for said in ranks(2).run(documents_of_another_call, context_fn, metp):
        assert "documents in the backward are not those of the forward" in said
