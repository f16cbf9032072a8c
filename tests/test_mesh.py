"""Meshes: the ranks of an axis that others have made, and what is remembered of a mesh."""

import gc
import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.strategies import examples
from wallfacer_dt import context_mesh, split_context_axis
from wallfacer_dt import mesh as mesh_module
from wallfacer_dt.mesh import PLACEMENTS, context_groups, mesh_ranks, name_of, placed_ranks, whole_context_group
from wallfacer_dt.testing.fake import fake_world

SIZES = st.integers(1, 3)
GONE = "is of a process group that has been destroyed since; make a new mesh"


def test_neighbouring_ranks_are_where_the_placement_says() -> None:
    expected = {
        "team_in_node": [[[0, 1], [2, 3], [4, 5]], [[6, 7], [8, 9], [10, 11]]],
        "ring_in_node": [[[0, 3], [1, 4], [2, 5]], [[6, 9], [7, 10], [8, 11]]],
        "ulysses_in_node": [[[0, 2], [4, 6], [8, 10]], [[1, 3], [5, 7], [9, 11]]],
    }
    assert set(expected) == set(PLACEMENTS)
    for placement, ranks in expected.items():
        assert placed_ranks(3, 2, ulysses=2, placement=placement).tolist() == ranks


@examples(30)
@given(
    sizes=st.tuples(SIZES, SIZES, SIZES), outer=SIZES, inner=SIZES, where=st.sampled_from(PLACEMENTS), data=st.data()
)
def test_an_axis_between_others_is_split(
    sizes: tuple[int, int, int], outer: int, inner: int, where: str, data: st.DataObject
) -> None:
    """Its ranks are placed as those of a world of their own would be, on every slice alike."""
    ulysses, ring, team = sizes
    world = outer * ulysses * ring * team * inner
    with fake_world(world, data.draw(st.integers(0, world - 1))):
        axis = init_device_mesh("cpu", (outer, world // outer // inner, inner), mesh_dim_names=("dp", "cp", "tp"))["cp"]
        mesh = split_context_axis(axis, ring, team, ulysses=ulysses, placement=where)
        assert mesh.mesh_dim_names == ("cp_ulysses", "cp_ring", "cp_team")[ulysses == 1 :]
        expected = axis.mesh[placed_ranks(ring, team, ulysses=ulysses, placement=where)]
        assert mesh.mesh.tolist() == (expected if ulysses > 1 else expected[0]).tolist()
        assert context_groups(mesh).coordinate.axes == sizes
        for dim, group in enumerate(mesh.get_all_groups()):
            line = mesh.mesh.movedim(dim, -1)
            mine = [row for row in line.reshape(-1, line.shape[-1]).tolist() if dist.get_rank() in row]
            assert [dist.get_process_group_ranks(group)] == mine


def test_meshes_that_compare_equal_have_their_own_groups() -> None:
    with fake_world(4):
        first, second = (
            DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("cp_ring", "cp_team")) for _ in "12"
        )
        assert first == second
        names = [context_groups(mesh).names for mesh in (first, second, first)]
        assert names[0] == names[2] != names[1]
        ring, team = (str(group.group_name) for group in second.get_all_groups())
        assert names[1] == ("", ring, team)


def test_a_mesh_is_asked_once_and_refused_in_a_new_world() -> None:
    """Whose groups may be called like its own."""
    with mock.patch.object(mesh_module, "_find_groups", side_effect=[1, 2]):
        with fake_world(4):
            mesh = context_mesh("cpu", 2, 2)
            other = context_mesh("cpu", 4)
            assert [context_groups(mesh), context_groups(mesh), context_groups(other)] == [1, 1, 2]
        with fake_world(4), pytest.raises(ValueError, match=GONE):
            context_groups(mesh)
        with pytest.raises(ValueError, match=GONE):
            context_groups(mesh)


def test_a_mesh_that_is_first_seen_in_a_new_world_has_no_groups_there() -> None:
    """Those that are called like its own are of other ranks."""
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp_ring", "cp_team"))
    with fake_world(4):
        context_mesh("cpu", 2, 2, placement="ring_in_node")
        for ask in (context_groups, name_of, mesh_ranks):
            with pytest.raises(ValueError, match=GONE):
                ask(mesh)


def test_nothing_is_kept_of_a_mesh_that_is_gone() -> None:
    with fake_world(4):
        mesh = context_mesh("cpu", 2, 2)
        context_groups(mesh)
        key = id(mesh)
        assert set(mesh_module._known[key].facts) == {"groups as "}
        del mesh
        gc.collect()
        assert key not in mesh_module._known


def groups_made(rank: int) -> list[list[int]]:
    """For two meshes, on whose slices some ranks are alike and others are not."""
    with fake_world(8, rank):
        first, second = torch.arange(8).view(2, 2, 2), torch.tensor([[[0, 1], [2, 3]], [[4, 6], [5, 7]]])
        axes = ("pp", "cp_ring", "cp_team")
        slices = [DeviceMesh("cpu", ranks, mesh_dim_names=axes)[axes[1:]] for ranks in (first, second, first)]
        with mock.patch.object(dist, "new_group", side_effect=dist.new_group) as new_group:
            for mesh in slices:
                whole_context_group(mesh)
        return [call.args[0] for call in new_group.call_args_list]


def test_every_rank_makes_the_same_groups() -> None:
    """Since all must make each of them."""
    assert groups_made(0) == groups_made(7) == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3], [4, 6, 5, 7]]


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_meshes_are_made_wherever_tensors_are(device: str) -> None:
    """As where a model is made without its weights."""
    with fake_world(8), torch.device(device):
        assert mesh_ranks(context_mesh("cpu", 4, 2, placement="ring_in_node")) == (0, 4, 1, 5, 2, 6, 3, 7)
        axis = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "cp"))["cp"]
        assert mesh_ranks(split_context_axis(axis, 2, 2)) == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("axes", "sizes", "message"),
    [
        ((6,), {"ring": 2}, "one axis of ulysses * ring * team = 2 ranks, got (6,)"),
        ((6,), {"ring": 4, "ulysses": 2}, "= 8 ranks, got (6,)"),
        ((2, 3), {"ring": 6}, "got (2, 3)"),
        ((6,), {"ring": 6, "placement": "anywhere"}, "placement must be one of"),
        ((6,), {"ring": 0}, "ring must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_split_is_refused(axes: tuple[int, ...], sizes: dict, message: str) -> None:
    with fake_world(6):
        mesh = init_device_mesh("cpu", axes, mesh_dim_names=("cp", "tp")[: len(axes)])
        with pytest.raises(ValueError, match=re.escape(message)):
            split_context_axis(mesh, **sizes)
