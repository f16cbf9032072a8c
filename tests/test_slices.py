"""Context meshes that are slices of larger ones: every data-parallel group attends within itself."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.cases import held
from wallfacer_dt import TokenOrder, context_parallel_attention
from wallfacer_dt.testing import RankPool, attention_oracle, worst_error

pytestmark = pytest.mark.ranks


def largest_error(shape: tuple[int, ...], axes: tuple[str, ...], schedule: str) -> float:
    """Largest difference of output and gradients, against an oracle of this group's own data."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=axes)
    inner = tuple(axis for axis in axes if axis != "dp")
    context: DeviceMesh = mesh[inner if len(inner) > 1 else inner[0]]
    group = mesh["dp"].get_local_rank()
    size = context.size()
    index = context.mesh.flatten().tolist().index(dist.get_rank())
    torch.manual_seed(group)
    q, grad_out = (torch.randn(1, 4, 4 * size, 8, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(1, 2, 4 * size, 8, dtype=torch.float64) for _ in range(2))
    expected = attention_oracle(q, k, v, grad_out, is_causal=True)
    sizes = dict(zip(axes, shape, strict=True))
    places = tuple(sizes.get(axis, 1) for axis in ("cp_ulysses", "cp_ring", "cp_team"))
    rows = held(index, places, "head_tail", 4 * size)
    leaves = [x[:, :, rows].requires_grad_() for x in (q, k, v)]
    order = TokenOrder("head_tail", context)
    out = context_parallel_attention(*leaves, context, is_causal=True, order=order, schedule=schedule)
    grads = torch.autograd.grad(out, leaves, grad_out[:, :, rows])
    got = (out.detach(), *grads)
    return worst_error([(a, b[:, :, rows]) for a, b in zip(got, expected, strict=True)])


@pytest.mark.parametrize("schedule", ["2d", "published"])
@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((2, 2, 2), ("dp", "cp_ring", "cp_team")),
        ((2, 2, 2), ("cp_ring", "cp_team", "dp")),
        ((2, 2, 2), ("cp_ulysses", "dp", "cp_ring")),
        ((2, 4), ("dp", "cp_ulysses")),
        ((4, 2), ("cp_ring", "dp")),
        ((1, 2, 2, 2), ("dp", "cp_ulysses", "cp_ring", "cp_team")),
    ],
)
def test_every_group_attends_within_itself(
    threads: Callable[[int], RankPool], shape: tuple[int, ...], axes: tuple[str, ...], schedule: str
) -> None:
    assert max(threads(8).run(largest_error, shape, axes, schedule)) < 1e-10
