"""What Inductor makes of a styled module: order and memory; read from generated code, on a rank of a fake world."""

import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
import torch.distributed as dist
from torch import Tensor, fx
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.lowering import lowerings
from torch._inductor.utils import get_code
from torch.distributed._functional_collectives import all_reduce  # noqa: TID251  (one that is not attention's)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.fx.experimental.proxy_tensor import make_fx

from tests.cases import Inner, told
from tests.pairwise import few
from wallfacer_dt import WallFacerParallel, context_mesh
from wallfacer_dt.ops import BODIES
from wallfacer_dt.testing.fake import fake_world

Model = Callable[[Tensor], Tensor]


def styled(mesh: DeviceMesh, heads: tuple[int, int] = (4, 2), **options: Any) -> Model:
    """A function of x (1, L, 128) round attention with that many heads, and for keys and values: 4 of 16 and 2."""
    n, g = heads
    inner = parallelize_module(Inner(), mesh, WallFacerParallel(check=False, **told(mesh, **options)))

    def model(x: Tensor) -> Tensor:
        q, k, v = (x * 2).unflatten(-1, (n + 2 * g, -1)).split((n, g, g), 2)
        return inner(q, k, v).flatten(2).sin()

    return model


def two_and_a_sum(mesh: DeviceMesh, **options: Any) -> Model:
    """Two attentions that do not depend on each other, and a sum over all ranks that depends on neither."""
    first, second = (styled(mesh, scale=scale, **options) for scale in (0.5, 0.25))
    long = torch.empty(40000)

    def model(x: Tensor) -> Tensor:
        a = first(x).sum()
        total = all_reduce(long.sin(), "sum", dist.group.WORLD)
        return a + second(x.cos()).sum() + total.sum()

    return model


def generated(
    ring: int,
    team: int,
    model: Callable[..., Model] = styled,
    *,
    rank: int = 0,
    ulysses: int = 1,
    tokens: int = 64,
    dynamic: bool | None = None,
    **options: Any,
) -> list[list[str]]:
    """The operators that plain ``torch.compile``'s code of forward and backward calls, in order."""
    with fake_world(ulysses * ring * team, rank):
        mesh = context_mesh("cpu", ring, team, ulysses=ulysses)
        compiled = torch.compile(model(mesh, **options), fullgraph=True, dynamic=dynamic)
        x = torch.empty(1, tokens, 128, requires_grad=True)

        def run() -> None:
            # Nothing is compiled to machine code, so running it fails.
            with suppress(Exception):
                compiled(x)

        with (
            torch._functorch.config.patch(force_non_lazy_backward_lowering=True, enable_autograd_cache=False),
            torch._inductor.config.patch(fx_graph_cache=False),
        ):
            codes = [code for code in get_code(run) if "def call(" in code]
        assert len(codes) == 2
        return [re.findall(r"torch\.ops\.(\w+\.\w+)\.default\(", code[code.index("def call(") :]) for code in codes]


CALLS = {
    "even": ((0, 3), {"ring": 4}),
    "uneven": ((0, 1), {"ring": 2, "length": 65}),
    "uneven heads": ((0, 4), {"ring": 2, "ulysses": 3, "heads": (8, 4), "window_size": (20, None)}),
}


@pytest.mark.parametrize(
    ("call", "dynamic"), few(product(CALLS, [None, True]), {("even", True), ("uneven", None), ("uneven heads", None)})
)
def test_ranks_start_collectives_in_one_order(call: str, dynamic: bool | None) -> None:
    """That of the program, although ranks have tensors of different sizes; neither attention waits for the sum."""
    order = ["wallfacer_dt.attention", "_c10d_functional.all_reduce_", "wallfacer_dt.attention"]
    ranks, options = CALLS[call]
    for rank in ranks:
        tokens = 33 - rank if "length" in options else 64
        forward, backward = generated(
            team=1, model=two_and_a_sum, rank=rank, tokens=tokens, dynamic=dynamic, is_causal=True, **options
        )
        assert [name for name in forward if name in order] == order
        assert [name for name in backward if "attention" in name] == ["wallfacer_dt.attention_backward"] * 2


def saved_bytes(ring: int, team: int) -> int:
    """What Inductor's partitioned forward hands its backward."""
    found: list[int] = []

    def inner_compile(graph_module: fx.GraphModule, examples: Sequence[Any], **kwargs: Any) -> Any:
        if not kwargs.get("is_backward"):
            (output,) = graph_module.graph.find_nodes(op="output")
            values = [node.meta["val"] for node in output.args[0][1:]]
            found.append(sum(value.nbytes for value in values if isinstance(value, Tensor)))
        raise NotImplementedError

    def backend(graph: fx.GraphModule, inputs: list[Any]) -> Any:
        return compile_fx(graph, inputs, inner_compile=inner_compile)

    with fake_world(ring * team), suppress(Exception):
        model = styled(context_mesh("cpu", ring, team))
        torch.compile(model, fullgraph=True, backend=backend)(torch.empty(1, 64, 128, requires_grad=True))
    (saved,) = found
    return saved


@pytest.mark.parametrize("team", [1, 2])
def test_what_is_saved_does_not_grow_with_the_ring(team: int) -> None:
    """The partitioned graph keeps q, k, v, out and lse, and the model's own input."""
    tokens, heads, kv_heads, head_dim = 64, 4, 2, 16
    local = 4 * tokens * head_dim * (heads + 2 * kv_heads + heads) + 4 * tokens * heads
    x = 4 * tokens * head_dim * (heads + 2 * kv_heads)
    saved = [saved_bytes(ring, team) for ring in (2, 4, 8)]
    assert saved[0] == saved[1] == saved[2]
    assert saved[0] <= local + x


class Seen(CustomGraphPass):
    """A pass of the user's: notes the operators it is shown."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.names += [str(node.target) for node in graph.nodes if node.op == "call_function"]

    def uuid(self) -> str:
        return "seen"


def test_one_operator_in_passes_of_the_users_own_and_in_the_code() -> None:
    before, after = Seen(), Seen()
    with torch._inductor.config.patch(post_grad_custom_pre_pass=before, post_grad_custom_post_pass=after):
        assert generated(2, 2, is_causal=True) == [["wallfacer_dt.attention"], ["wallfacer_dt.attention_backward"]]
    for seen in (before, after):
        found = [name for name in seen.names if "wallfacer_dt" in name or "c10d" in name]
        assert found == ["wallfacer_dt.attention.default", "wallfacer_dt.attention_backward.default"]


def test_no_option_of_torch_changes() -> None:
    def options() -> tuple[dict[str, Any], dict[str, Any]]:
        return torch._inductor.config.get_config_copy(), torch._dynamo.config.get_config_copy()

    before = options()
    generated(2, 1)
    assert options() == before


def test_operators_are_lowered_once() -> None:
    generated(2, 1)
    found = [lowerings[op] for op in BODIES]
    generated(3, 1)
    assert [lowerings[op] for op in BODIES] == found


def test_an_operator_is_traced_where_inductor_was_not_imported() -> None:
    with fake_world(2), mock.patch.dict(sys.modules):
        del sys.modules["torch._inductor.lowering"]
        model = styled(context_mesh("cpu", 2))
        calls = [str(node.target) for node in make_fx(model)(torch.ones(1, 4, 128)).graph.nodes]
    assert calls.count("wallfacer_dt.attention.default") == 1
