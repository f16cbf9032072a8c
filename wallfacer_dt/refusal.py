"""What tensors attention accepts; and refusing together, so that no rank waits for one that has refused.

Note [Refusing together]
A rank that cannot make a call meets the others where they compare their calls before anything is sent (``agree``),
tells them, and all of them raise. While a compiler traces, ranks cannot meet: one may run, from a cache, while another
still traces. So there a refusal becomes an operator of the graph, which meets the others, and raises, when it runs.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual
from torch.distributed.tensor import DTensor

from wallfacer_dt import lowering, sharding
from wallfacer_dt.collectives import agree
from wallfacer_dt.kernels import select_kernel
from wallfacer_dt.layout import check_length


class Expected(NamedTuple):
    """What q, k and v are checked against.

    Attributes:
        device_type: of the mesh.
        size: ranks that share a sequence.
        order: token order.
        kernel: of the blocks.
        ring: name of the ring's process group.
        team: name of the team's process group, or empty.
    """

    device_type: str
    size: int
    order: str
    kernel: str
    ring: str
    team: str


@contextmanager
def refusing_together(expected: Expected) -> Iterator[None]:
    """Have all ranks refuse when one does; see Note [Refusing together]."""
    try:
        yield
    except (TypeError, ValueError, NotImplementedError) as error:
        _tell(str(error), expected)
        raise


def refused_in_graph(q: Tensor, k: Tensor, v: Tensor, error: str, expected: Expected) -> Tensor:
    """Put a refusal of plain tensors into the graph that is being traced; see Note [Refusing together].

    Args:
        q: as the call was given it.
        k: as the call was given it.
        v: as the call was given it.
        error: why; empty where the tensors themselves are refused, which then say so when the operator runs.
        expected: what they were checked against.

    Returns:
        Something of q's shape, in the graph.
    """
    return torch.ops.wallfacer_dt.refuse(q.detach(), k.detach(), v.detach(), error, *expected)


def check_tensors(q: Tensor, k: Tensor, v: Tensor, expected: Expected) -> None:
    """Refuse (TypeError, ValueError, NotImplementedError) tensors that attention cannot be given."""
    _check_each(q, k, v)
    _check_together(q, k, v, expected.device_type)
    shards = 1 if isinstance(q, DTensor) else expected.size
    check_length(q.shape[2] * shards, expected.size, expected.order)
    # A compiler asks the operator's rule, which checks the same.
    if not torch.compiler.is_compiling():
        sharding.check(q, k, v, expected.ring, expected.team)
    select_kernel(expected.kernel, q.device.type, q.dtype, q.shape[-1])


def _check_each(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
        if isinstance(x, DTensor) != isinstance(q, DTensor):
            raise TypeError(f"q, k and v must all be DTensors or all plain tensors, but q and {name} differ")
        if not torch.compiler.is_compiling() and unpack_dual(x).tangent is not None:
            raise NotImplementedError(
                f"context-parallel attention has no forward-mode derivative, but {name} has a tangent"
            )
        if x.ndim != 4 or 0 in x.shape:
            raise ValueError(f"{name} must have shape (B, N, L, H) without empty dims, got {tuple(x.shape)}")


def _check_together(q: Tensor, k: Tensor, v: Tensor, device_type: str) -> None:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k and v must have one dtype, got {q.dtype}, {k.dtype}, {v.dtype}; cast them")
    if q.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"q, k and v must be floating point, got {q.dtype}; cast them")
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k and v must be on one device, got {q.device}, {k.device}, {v.device}")
    if q.device.type != device_type:
        raise ValueError(f"q, k and v must be on the mesh's device type {device_type!r}, got {q.device}")
    if k.shape != v.shape:
        raise ValueError(f"k and v must have one shape, got {shapes}")
    if (q.shape[0], *q.shape[2:]) != (k.shape[0], *k.shape[2:]):
        raise ValueError(f"q, k and v must agree in batch, length and head dim (B, N, L, H), got {shapes}")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"query heads must be a multiple of key and value heads, got {shapes}")


# A compiler that has broken a graph off may want to trace this, too.
@torch.compiler.disable
def _tell(error: str, expected: Expected) -> None:
    with suppress(ValueError):  # one's own error says more than the comparison
        agree((), expected.team, expected.ring, every_call=expected.device_type == "cpu", error=error)


@torch.library.custom_op(
    "wallfacer_dt::refuse",
    mutates_args=(),
    schema=(
        "(Tensor q, Tensor k, Tensor v, str error, str device_type, int size, str order, str kernel, str ring, "
        "str team) -> Tensor"
    ),
)
def _refuse(q: Tensor, k: Tensor, v: Tensor, error: str, *rest: object) -> Tensor:
    expected = Expected(*rest)  # pyrefly: ignore[bad-argument-type]
    with refusing_together(expected):
        if error:
            raise ValueError(error)
        check_tensors(q, k, v, expected)
    raise AssertionError("what a compiler refused, these tensors do not show")


@_refuse.register_fake
def _refuse_fake(q: Tensor, *rest: object) -> Tensor:
    if lowering.is_compiling():
        lowering.register_opaque(torch.ops.wallfacer_dt.refuse.default)
    return torch.empty_like(q)
