"""What a compiler makes of a styled module on one rank of a world that does not exist: read, never run."""

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

import torch
import torch._functorch.config
import torch._inductor.config
import torch.distributed as dist
from torch import Tensor, fx
from torch._inductor.compile_fx import compile_fx
from torch._inductor.utils import get_code
from torch.distributed._functional_collectives import all_reduce  # noqa: TID251  (one that is not attention's)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from tests.cases import Inner, fake_world, told
from wallfacer_dt import WallFacerParallel, context_mesh

SHORT = {
    "_c10d_functional.all_gather_into_tensor": "gather",
    "_c10d_functional.all_to_all_single": "send",
    "_c10d_functional.all_reduce_": "all_reduce",
    "_c10d_functional.wait_tensor": "wait",
    "aten._scaled_dot_product_flash_attention_for_cpu": "flash",
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": "flash_backward",
    "wallfacer_dt.agree": "agree",
    "wallfacer_dt.attention": "attention",
    "wallfacer_dt.attention_backward": "attention_backward",
}


def styled(mesh: DeviceMesh, heads: tuple[int, int] = (4, 2), **options: Any) -> Callable[[Tensor], Tensor]:
    """A function of x (1, 64, 128) round attention with that many heads, and for keys and values: 4 of 16 and 2."""
    n, g = heads
    inner = parallelize_module(Inner(), mesh, WallFacerParallel(check=False, **told(mesh, **options)))

    def model(x: Tensor) -> Tensor:
        q, k, v = (x * 2).unflatten(-1, (n + 2 * g, -1)).split((n, g, g), 2)
        return inner(q, k, v).flatten(2).sin()

    return model


def packed(mesh: DeviceMesh) -> Callable[[Tensor], Tensor]:
    """The same of packed documents, which come with the call."""
    inner = parallelize_module(Inner(), mesh, WallFacerParallel(**told(mesh, is_causal=True, check=False)))
    ids = torch.arange(64 * mesh.size()) // 50

    def model(x: Tensor) -> Tensor:
        q, k, v = x.unflatten(-1, (8, 16)).split((4, 2, 2), 2)
        return inner(q, k, v, document_ids=ids).sin()

    return model


def two_and_a_sum(mesh: DeviceMesh, **options: Any) -> Callable[[Tensor], Tensor]:
    """Two attentions that do not depend on each other, and a sum over all ranks that depends on neither."""
    first, second = (styled(mesh, scale=scale, **options) for scale in (0.5, 0.25))
    other, long = torch.empty(1, 64, 128), torch.empty(40000)

    def model(x: Tensor) -> Tensor:
        a = first(x).sum()
        total = all_reduce(long.sin(), "sum", dist.group.WORLD)
        return a + second(other).sum() + total.sum()

    return model


@lru_cache
def code_of(
    ring: int,
    team: int,
    *,
    ulysses: int = 1,
    dtype: torch.dtype = torch.float32,
    dynamic: bool | None = None,
    rank: int = 0,
    model: Callable[..., Callable[[Tensor], Tensor]] = styled,
    requires_grad: bool = True,
    **options: Any,
) -> list[str]:
    """The code of forward and, with gradients, backward, as plain ``torch.compile`` makes it."""
    with fake_world(ulysses * ring * team, rank):
        mesh = context_mesh("cpu", ring, team, ulysses=ulysses)
        model = torch.compile(model(mesh, **options), fullgraph=True, dynamic=dynamic)
        x = torch.empty(1, 64, 128, dtype=dtype, requires_grad=requires_grad)

        def compiled() -> None:
            # Nothing is compiled to machine code, so running it fails.
            with suppress(Exception):
                model(x)

        with (
            torch._functorch.config.patch(force_non_lazy_backward_lowering=True, enable_autograd_cache=False),
            torch._inductor.config.patch(fx_graph_cache=False),
        ):
            codes = [code for code in get_code(compiled) if "def call(" in code]
        assert len(codes) == 1 + requires_grad
        return codes


def lines_of(ring: int, team: int, *, ulysses: int = 1, **options: Any) -> list[list[str]]:
    """The programs of forward and backward: collectives by axis, waits, kernels and fused kernels."""
    codes = code_of(ring, team, ulysses=ulysses, **options)
    with fake_world(ulysses * ring * team, options.get("rank", 0)):
        mesh = context_mesh("cpu", ring, team, ulysses=ulysses)
        axes = {str(mesh.get_group(axis).group_name): axis for axis in mesh.mesh_dim_names or ()}
    return [_program(code, axes) for code in codes]


def saved_bytes(ring: int, team: int) -> int:
    """What Inductor's partitioned forward hands its backward."""
    found: list[int] = []

    def inner_compile(graph_module: fx.GraphModule, examples: Sequence[Any], **kwargs: Any) -> Any:
        if not kwargs.get("is_backward"):
            (output,) = graph_module.graph.find_nodes(op="output")
            values = [node.meta["val"] for node in output.args[0][1:]]
            found.append(sum(value.nbytes for value in values if isinstance(value, Tensor)))
        raise NotImplementedError

    with fake_world(ring * team):
        model = styled(context_mesh("cpu", ring, team))
        x = torch.empty(1, 64, 128, requires_grad=True)
        with suppress(Exception):
            torch.compile(
                model,
                fullgraph=True,
                backend=lambda graph, inputs: compile_fx(graph, inputs, inner_compile=inner_compile),
            )(x)
    (saved,) = found
    return saved


def _program(code: str, axes: dict[str, str]) -> list[str]:
    pending: dict[str, int] = {}
    lines = []
    for line in map(str.strip, code[code.index("def call(") :].splitlines()):
        if match := re.match(r"(?:(\w+) = )?torch\.ops\.(\w+\.\w+)\.default\((.*)\)$", line):
            buffer, op, args = match.groups()
            name = SHORT.get(op, op)
            if name in ("gather", "send", "all_reduce"):
                # An in-place collective is waited for by its input.
                number = pending[buffer or args.partition(",")[0]] = len(pending)
                group = args.rpartition("'")[0].rpartition("'")[2]
                lines.append(f"{name} #{number} {axes.get(group, 'both axes')}")
            elif name == "wait":
                lines.append(f"wait #{pending[args]}")
            else:
                lines.append(f"  {name}")
        elif re.match(r"(?:cpp|triton)_fused_\w+\(", line):
            lines.append("    fused")
    return lines
