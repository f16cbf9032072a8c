"""What operators give: new tensors that share no memory, laid out as their fake kernels state it to compilers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from wallfacer_dt import context_mesh, context_parallel_attention, register_kernel
from wallfacer_dt.kernels import reference
from wallfacer_dt.kernels.block import How, Need
from wallfacer_dt.ops import BODIES
from wallfacer_dt.testing import RankPool

Threads = Callable[[int], RankPool]


class Operators(TorchDispatchMode):
    """The calls of this package's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        if func in BODIES:
            self.calls.append((func, args, results))
        return results


def wide_views(q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, Tensor]:
    """The output as a view of something as wide as q, as kernels give it that take one head dim."""
    out, lse = reference.forward(q, k, F.pad(v, (0, q.shape[-1] - v.shape[-1])), how)
    return out[..., : v.shape[-1]], lse


def anything(need: Need) -> bool:
    return True


def described(results: Any) -> list[Any]:
    return [(x.shape, x.dtype, x.stride()) for x in results]


def flaws(ulysses: int, ring: int, team: int, options: dict[str, Any]) -> list[str]:
    """What is wrong with the results of a forward and a backward of this rank."""
    if options.get("kernel") == "wide views":
        register_kernel("wide views", wide_views, reference.backward, anything)
    mesh = context_mesh("cpu", ring, team, ulysses=ulysses)
    q, k, v = (torch.randn(2, 2, 6, dim, requires_grad=True) for dim in (16, 16, 12))
    with Operators() as operators:
        out = context_parallel_attention(q, k, v, mesh, **options)
        torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
    found = [] if len(operators.calls) == 2 else [f"{len(operators.calls)} calls"]
    for func, args, results in operators.calls:
        given, places = (
            [x.untyped_storage()._cdata for x in tree_leaves(some) if isinstance(x, Tensor)] for some in (args, results)
        )
        if len(set(places)) < len(places) or set(given) & set(places):
            found.append(f"{func} gives tensors that share memory")
        with FakeTensorMode() as mode:
            stated = func(*tree_map_only(Tensor, mode.from_tensor, args))
        if described(results) != described(stated):
            found.append(f"{func} gives {described(results)}, and states {described(stated)}")
    return found


WAYS = {
    "keys rotate": {},
    "queries rotate": {"rotate": "q", "rotate_forward": "q"},
    "published": {"schedule": "published"},
    "a kernel whose output is a view of a wider one": {"kernel": "wide views"},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("axes", [(1, 4, 1), (1, 2, 2), (1, 1, 4), (2, 2, 1), (1, 1, 1)])
def test_results_are_new_tensors_as_stated(threads: Threads, axes: tuple[int, int, int], way: str) -> None:
    if way == "published" and axes[1] % axes[2]:
        pytest.skip("a team that does not divide the ring")
    size = axes[0] * axes[1] * axes[2]
    assert threads(size).run(flaws, *axes, WAYS[way]) == [[]] * size
