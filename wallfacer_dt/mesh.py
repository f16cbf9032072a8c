"""The context mesh: its two axes, how it is made, and one rank's place in it.

P = ring * team ranks share a sequence. Axis ``cp_ring`` is the one keys and values (or queries) travel
along hop by hop; axis ``cp_team`` the one they are gathered over. A mesh also carries the name of the order in which
tokens are dealt out on it; what the order means is in ``layout``.
"""

import weakref
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

# Private; run on torch 2.11.0, 2.13.0 and 2.14.1. What is read off a mesh or a group must not be seen by tracing modes
# (fake tensors, say).
from torch.utils._python_dispatch import _disable_current_modes as outside_modes

RING_AXIS = "cp_ring"
TEAM_AXIS = "cp_team"
CONTEXT_AXES = (RING_AXIS, TEAM_AXIS)

Placement = Literal["team_in_node", "ring_in_node"]


@dataclass(frozen=True, slots=True)
class Coordinate:
    """One rank's place in a context mesh; pure numbers, so schedules can be made without ranks.

    Attributes:
        ring: size R of axis ``cp_ring``.
        team: size C of axis ``cp_team`` (WallFacer's attention parallel size, table 1).
        ring_rank: position on ``cp_ring`` (the paper's inter-team rank r_t).
        team_rank: position on ``cp_team`` (the paper's intra-team rank r_a).
    """

    ring: int
    team: int
    ring_rank: int
    team_rank: int

    @property
    def size(self) -> int:
        """P, the number of ranks that share a sequence."""
        return self.ring * self.team

    @property
    def index(self) -> int:
        """This rank's index along the sequence: ``ring_rank * team + team_rank``."""
        return self.ring_rank * self.team + self.team_rank


@dataclass(frozen=True, slots=True)
class ContextGroups:
    """What attention needs of a mesh: this rank's coordinate and the process groups of the two axes.

    ``team`` is None where the mesh has one axis only.
    """

    coordinate: Coordinate
    ring: dist.ProcessGroup
    team: dist.ProcessGroup | None

    @property
    def team_name(self) -> str:
        """Name of the team's process group, empty where there is none."""
        return self.team.group_name if self.team is not None else ""


def context_mesh(device_type: str, ring: int, team: int = 1, *, placement: Placement = "team_in_node") -> DeviceMesh:
    """Make a mesh with axes ``("cp_ring", "cp_team")`` over all ranks.

    WallFacer section 3.4 knows two placements. With ``team_in_node`` neighbouring ranks form a team, so the
    gathers stay in a node; with ``ring_in_node`` neighbouring ranks form a ring, so the hops do. Results are
    the same either way. A wait on the mesh's process groups raises after the timeout that
    ``init_process_group`` was given.

    Args:
        device_type: ``"cpu"``, ``"cuda"``, ...
        ring: ranks in a ring, R.
        team: ranks in a team, C; 1 is Ring Attention.
        placement: which axis takes neighbouring ranks.

    Returns:
        The mesh of shape (ring, team).

    Raises:
        TypeError: a size is not an int.
        ValueError: a size is below 1, ring * team is not the number of ranks, or the placement is unknown.
    """
    for option, size in (("ring", ring), ("team", team)):
        if not isinstance(size, int) or isinstance(size, bool):
            raise TypeError(f"{option} must be an int, got {size!r}")
        if size < 1:
            raise ValueError(f"{option} must be at least 1, got {size}")
    if placement not in ("team_in_node", "ring_in_node"):
        raise ValueError(f"placement must be 'team_in_node' or 'ring_in_node', got {placement!r}")
    if not dist.is_initialized():
        dist.init_process_group()
    world = dist.get_world_size()
    if ring * team != world:
        raise ValueError(
            f"ring * team must be the number of ranks, got {ring} * {team} = {ring * team} on {world} ranks; "
            f"for a part of the ranks slice a larger mesh: mesh[{RING_AXIS!r}, {TEAM_AXIS!r}]"
        )
    ranks = torch.arange(world)
    layout = ranks.view(ring, team) if placement == "team_in_node" else ranks.view(team, ring).T
    mesh = DeviceMesh(device_type, layout.contiguous(), mesh_dim_names=CONTEXT_AXES)
    inherit_timeout(mesh)
    return mesh


def context_groups(mesh: DeviceMesh, *, any_axis: bool = False) -> ContextGroups:
    """Find this rank's coordinate and process groups in a mesh of axes (cp_ring, cp_team), or (cp_ring,).

    Args:
        mesh: the context mesh, possibly a slice of a larger one.
        any_axis: also take a mesh of one axis of any other name as the ring.

    Returns:
        Coordinate and groups.

    Raises:
        TypeError: not a DeviceMesh.
        ValueError: other axes, a rank outside the mesh, or a mesh whose groups order ranks differently.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a DeviceMesh, got {type(mesh).__name__}")
    names = mesh.mesh_dim_names
    if not (names in (CONTEXT_AXES, (RING_AXIS,)) or (any_axis and mesh.ndim == 1)):
        remedy = (
            f"; slice it first: mesh[{RING_AXIS!r}, {TEAM_AXIS!r}]"
            if names and set(CONTEXT_AXES) < set(names)
            else "; make one with context_mesh(device_type, ring, team)"
        )
        raise ValueError(f"mesh must have axes {CONTEXT_AXES}, got {names}{remedy}")
    place = mesh.get_coordinate()
    if place is None:
        raise ValueError(f"rank {dist.get_rank()} is not in the mesh {mesh.mesh.tolist()}")
    ring_rank, team_rank = (*place, 0)[:2]
    ring, team = (*mesh.shape, 1)[:2]
    _check_whole(mesh)
    groups = mesh.get_all_groups()
    coordinate = Coordinate(ring, team, ring_rank, team_rank)
    return ContextGroups(coordinate, groups[0], groups[1] if len(groups) > 1 else None)


def whole_context_group(mesh: DeviceMesh) -> tuple[str, tuple[int, ...]]:
    """The process group of all P ranks of a context mesh, made at the first call (by all ranks together).

    Args:
        mesh: the context mesh, of two axes.

    Returns:
        The group's name, and for every sequence index (ring-major) its rank in that group.
    """
    with outside_modes():
        flat = _flattened(mesh)
    inherit_timeout(flat)
    group = flat.get_group()
    return group.group_name, tuple(dist.get_group_rank(group, rank) for rank in _ranks(mesh))


# Note [One token order per mesh]
# A shard does not show in which order its tokens were dealt out, and causal attention told another order than
# the loader used is silently wrong. So the ranks that share a sequence have one token order: whoever names it first
# (the loader's side, a style, or causal attention) binds it, and whoever names another is refused, on whichever mesh
# of the same ranks. Kept per world, so that a new process group starts afresh.
_bound_orders: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], str]] = weakref.WeakKeyDictionary()


def bind_order(mesh: DeviceMesh, order: str, who: str) -> None:
    """Bind the mesh's ranks to a token order, or refuse (ValueError) a second one.

    See Note [One token order per mesh].
    """
    bound = _orders().setdefault(_ranks(mesh), order)
    if bound != order:
        raise ValueError(
            f"{who} was given order={order!r}, but on this mesh tokens were sharded in order={bound!r}; its ranks "
            f"have one token order: pass order={bound!r}, or release_order(mesh) once no such tokens are left"
        )


def release_order(mesh: DeviceMesh) -> None:
    """Let the ranks of a mesh be given tokens in another order than so far.

    Call it on all of them, when no tensor in the old order is left that causal attention could be given.

    Args:
        mesh: the context mesh, or any mesh of the same ranks in the same order.
    """
    _orders().pop(_ranks(mesh), None)


def _orders() -> dict[tuple[int, ...], str]:
    return _bound_orders.setdefault(_world(), {})


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None, "a mesh has been made, so there is a world"
    return world


def _ranks(mesh: DeviceMesh) -> tuple[int, ...]:
    # A mesh holds its ranks in a tensor.
    with outside_modes():
        return tuple(mesh.mesh.flatten().tolist())


def _check_whole(mesh: DeviceMesh) -> None:
    """Refuse a mesh whose groups number ranks otherwise than it does, and a ring without its team."""
    with outside_modes():
        ascending = all(bool((mesh.mesh.diff(dim=axis) > 0).all()) for axis in range(mesh.ndim))
    if not ascending:
        raise ValueError(
            f"an axis of the mesh {mesh.mesh.tolist()} does not list its ranks in ascending order, so its process "
            "group numbers them otherwise; build the mesh with ascending ranks"
        )
    root = _root(mesh)
    axes = dict(zip(root.mesh_dim_names or (), root.shape, strict=False))
    if mesh.mesh_dim_names == (RING_AXIS,) and axes.get(TEAM_AXIS, 1) > 1:
        raise ValueError(
            f"axis {RING_AXIS!r} alone is only a part of the ranks that share a sequence, since its mesh has a "
            f"{TEAM_AXIS!r} of {axes[TEAM_AXIS]}; slice both: mesh[{RING_AXIS!r}, {TEAM_AXIS!r}]"
        )


# Private methods of DeviceMesh and process groups; run on torch 2.11.0, 2.13.0 and 2.14.1.


def inherit_timeout(mesh: DeviceMesh) -> None:
    """Give the mesh's process groups the timeout of the world.

    DeviceMesh makes them with torch's default of up to half an hour, whatever ``init_process_group`` was told, and
    torch has no public way to say otherwise.
    """
    device = torch.device(mesh.device_type)
    options = getattr(_world()._get_backend(device), "options", None)
    if options is not None:  # a fake process group has none
        for group in mesh.get_all_groups():
            group._get_backend(device)._set_default_timeout(options._timeout)


def _flattened(mesh: DeviceMesh) -> DeviceMesh:
    # The usual "cp" may be the name of an axis that the user has.
    return mesh._flatten("_wallfacer_dt_context")


def _root(mesh: DeviceMesh) -> DeviceMesh:
    return mesh._get_root_mesh()
