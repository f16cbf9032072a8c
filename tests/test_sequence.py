"""Dealing sequences out and putting them together again, on real ranks."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.cases import Case, held, index_of, mesh_of
from wallfacer_dt import (
    context_mesh,
    context_parallel_attention,
    release_order,
    sequence_positions,
    shard_sequence,
    unshard_sequence,
)
from wallfacer_dt.layout import rank_spans
from wallfacer_dt.mesh import whole_context_group
from wallfacer_dt.testing import RankPool

pytestmark = pytest.mark.ranks
Ranks = Callable[[int], RankPool]


def round_trip(case: Case, shape: tuple[int, ...], dim: int) -> tuple[bool, bool, bool, bool]:
    mesh = mesh_of(case.ring, case.team, case.placement)
    whole = torch.arange(torch.Size(shape).numel()).view(shape).float()
    rows = torch.tensor(held(index_of(case), case.size, case.order, shape[dim]))
    shard = shard_sequence(whole, mesh, dim=dim, order=case.order)
    leaf = whole.clone().requires_grad_()
    shard_sequence(leaf, mesh, dim=dim, order=case.order).sum().backward()
    touched = torch.zeros_like(whole).index_fill(dim, rows, 1.0)
    return (
        shard.equal(whole.index_select(dim, rows)) and shard.is_contiguous(),
        unshard_sequence(shard, mesh, dim=dim, order=case.order).equal(whole),
        sequence_positions(shape[dim], mesh, order=case.order).equal(rows),
        leaf.grad is not None and leaf.grad.equal(touched),
    )


@pytest.mark.parametrize("order", ["contiguous", "head_tail"])
@pytest.mark.parametrize("placement", ["team_in_node", "ring_in_node"])
@pytest.mark.parametrize("mesh", [(1, 1), (4, 1), (2, 2), (1, 4), (3, 2)])
@pytest.mark.parametrize(("shape", "dim"), [((2, 24), 1), ((24,), 0), ((2, 3, 24, 5), -2)])
def test_round_trip(
    ranks: Ranks, mesh: tuple[int, int], placement: str, order: str, shape: tuple[int, ...], dim: int
) -> None:
    case = Case(*mesh, placement=placement, order=order)
    assert all(all(checks) for checks in ranks(case.size).run(round_trip, case, shape, dim))


def meshes_of_every_kind() -> list[tuple[str, tuple[int, ...]]]:
    """(axes, positions) on a mesh of one axis, a slice of a larger one, and the two placements."""
    one = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
    large = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("dp", "cp_ring", "cp_team"))
    kinds = [one, large["cp_ring", "cp_team"], context_mesh("cpu", 2, 2, placement="ring_in_node")]
    for mesh in kinds:
        release_order(mesh)
    return [(str(m.mesh_dim_names), tuple(sequence_positions(8, m, order="head_tail").tolist())) for m in kinds]


def test_meshes_of_every_kind(ranks: Ranks) -> None:
    answers = ranks(4).run(meshes_of_every_kind)
    assert [a[0][1] for a in answers] == [(0, 7), (1, 6), (2, 5), (3, 4)]
    assert [a[1][1] for a in answers] == [(0, 1, 6, 7), (2, 3, 4, 5)] * 2
    # Neighbouring ranks in the ring: ranks 0, 1 are (0, 0), (1, 0).
    assert [a[2][1] for a in answers] == [(0, 7), (2, 5), (1, 6), (3, 4)]


def bound_to_one_order() -> list[str]:
    large = init_device_mesh("cpu", (1, dist.get_world_size(), 1), mesh_dim_names=("dp", "cp_ring", "cp_team"))
    release_order(large["cp_ring", "cp_team"])
    sequence_positions(8, large["cp_ring", "cp_team"], order="head_tail")
    messages = []
    # Slices, and a mesh made apart: a loader and a model may each make their own.
    for mesh in (large["cp_ring", "cp_team"], large["cp_ring"], context_mesh("cpu", dist.get_world_size())):
        try:
            shard_sequence(torch.zeros(8), mesh, dim=0, order="contiguous")
        except ValueError as error:
            messages.append(str(error))
    release_order(mesh)
    shard_sequence(torch.zeros(8), mesh, dim=0, order="contiguous")
    return messages


def test_the_ranks_of_a_mesh_have_one_token_order(ranks: Ranks) -> None:
    for messages in ranks(2).run(bound_to_one_order):
        assert len(messages) == 3


def a_refused_call_binds_nothing() -> None:
    mesh = mesh_of(2, 1)
    q, k = torch.zeros(1, 2, 4, 8), torch.zeros(1, 2, 6, 8)
    with pytest.raises(ValueError, match="must agree in batch, length"):
        context_parallel_attention(q, k, k, mesh, is_causal=True)
    context_parallel_attention(q, q, q, mesh, is_causal=True, order="head_tail")


def test_a_refused_call_binds_nothing(ranks: Ranks) -> None:
    ranks(2).run(a_refused_call_binds_nothing)


def timeouts() -> list[float]:
    meshes = [context_mesh("cpu", 2, 2), context_mesh("cpu", 4)]
    whole_context_group(meshes[0])
    groups = [group for mesh in meshes for group in mesh.get_all_groups()]
    world = dist.group.WORLD
    return [g._get_backend(torch.device("cpu")).options._timeout.total_seconds() for g in (world, *groups)]


def test_the_groups_of_a_mesh_wait_as_long_as_the_world(ranks: Ranks) -> None:
    for found in ranks(4).run(timeouts):
        assert found == [60.0] * len(found)


def test_every_position_is_held_once() -> None:
    for size in range(1, 20):
        for order in ("contiguous", "head_tail"):
            spans = [span for i in range(size) for span in rank_spans(i, size, order, 6)]
            assert sorted(p for span in spans for p in range(*span)) == list(range(6 * size))
            assert [p for span in rank_spans(size // 2, size, order, 6) for p in range(*span)] == held(
                size // 2, size, order, 6 * size
            )
