"""Meshes: the ranks of an axis that others have made, and what is remembered of a mesh."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.cases import fake_world
from wallfacer_dt.mesh import PLACEMENTS, context_groups, placed_ranks, split_context_axis

SIZES = st.integers(1, 3)


@settings(max_examples=30)
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


def test_meshes_that_compare_equal_have_their_own_groups() -> None:
    with fake_world(4):
        first, second = (
            DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("cp_ring", "cp_team")) for _ in "12"
        )
        assert first == second
        names = [context_groups(mesh).names for mesh in (first, second, first)]
        assert names[0] == names[2] != names[1]
        ring, team = (str(group.group_name) for group in second.get_all_groups())
        assert names[1] == (team, ring, "")


def test_a_mesh_is_asked_anew_in_a_new_world() -> None:
    found = []
    for rank in (0, 3):
        with fake_world(4, rank):
            mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("cp_ring", "cp_team"))
            found.append(context_groups(mesh).coordinate.index)
    assert found == [0, 3]
