"""The context mesh: its axes, how it is made, and one rank's place in it.

P = ulysses * ring * team ranks share a sequence. Over axis ``cp_ulysses`` tokens are exchanged for heads; axis
``cp_ring`` is the one keys and values (or queries) travel along hop by hop, ``cp_team`` the one they are gathered
over.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from wallfacer_dt.agreement.agree import agree, refusing_together
from wallfacer_dt.agreement.meeting import outside_modes
from wallfacer_dt.agreement.worlds import name_mesh, world_timeout
from wallfacer_dt.dealing import notice_others_deal
from wallfacer_dt.layout import check_length

ULYSSES_AXIS = "cp_ulysses"
RING_AXIS = "cp_ring"
TEAM_AXIS = "cp_team"
CONTEXT_AXES = (ULYSSES_AXIS, RING_AXIS, TEAM_AXIS)

_T = TypeVar("_T")

Placement = Literal["team_in_node", "ring_in_node", "ulysses_in_node"]
PLACEMENTS: tuple[str, ...] = get_args(Placement)


@dataclass(frozen=True, slots=True)
class Coordinate:
    """One rank's place in a context mesh; pure numbers, so schedules can be made without ranks."""

    ring: int  # size R of axis ``cp_ring``
    team: int  # size C of axis ``cp_team`` (WallFacer's attention parallel size, table 1)
    ring_rank: int  # position on ``cp_ring`` (the paper's inter-team rank r_t)
    team_rank: int  # position on ``cp_team`` (the paper's intra-team rank r_a)
    ulysses: int = 1  # size of axis ``cp_ulysses``
    ulysses_rank: int = 0

    @property
    def axes(self) -> tuple[int, int, int]:
        """The sizes of the axes, outermost first."""
        return self.ulysses, self.ring, self.team

    @property
    def size(self) -> int:
        """P, the number of ranks that share a sequence."""
        return self.ulysses * self.ring * self.team

    @property
    def index(self) -> int:
        """This rank's index along the sequence, team innermost."""
        return self.ulysses_rank * self.ring * self.team + self.inner_index

    @property
    def inner_index(self) -> int:
        """This rank's index among those of one head group: ``ring_rank * team + team_rank``."""
        return self.ring_rank * self.team + self.team_rank


class ContextGroups(NamedTuple):
    """This rank's place in a mesh, and names of its groups of axes ulysses, ring and team; empty where none is.

    ``context``, of ring and team together, and ``context_ranks`` (the rank in it of every inner index) serve the
    published schedule.
    """

    coordinate: Coordinate
    names: tuple[str, str, str]
    context: str = ""
    context_ranks: tuple[int, ...] = ()


class _Known(NamedTuple):
    """A mesh, the world in which it was first seen, and what has been found out about it."""

    mesh: weakref.ref[DeviceMesh]
    world: weakref.ref[dist.ProcessGroup]
    facts: dict[str, Any]


# By identity, since meshes that compare equal may have other process groups.
_known: dict[int, _Known] = {}


def _fact(mesh: DeviceMesh, name: str, find: Callable[[], _T]) -> _T:
    """What ``find`` finds out about a mesh, now or before, while it and its world live: torch works it out every time.

    Refuses (TypeError, ValueError) what is no mesh, and one of another world: names of process groups are given again.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a DeviceMesh, got {type(mesh).__name__}")
    key, world = id(mesh), dist.group.WORLD
    known = _known.get(key)
    if world is not None and (known is None or known.mesh() is not mesh) and _has_groups_here(mesh):
        known = _known[key] = _Known(weakref.ref(mesh, lambda _: _known.pop(key, None)), weakref.ref(world), {})
    if known is None or world is None or known.world() is not world:
        raise ValueError(f"{mesh} is of a process group that has been destroyed since; make a new mesh")
    if name not in known.facts:
        with outside_modes():  # a mesh holds its ranks in a tensor
            known.facts[name] = find()
    return known.facts[name]


def _has_groups_here(mesh: DeviceMesh) -> bool:
    """Whether groups that are called like this rank's on the mesh are of its ranks, and not of another mesh's."""
    with outside_modes():
        lines = _lines(mesh)
        groups = mesh.get_all_groups() if lines else ()
        return all(
            sorted(dist.get_process_group_ranks(group)) == sorted(line)
            for group, line in zip(groups, lines, strict=True)
        )


def _lines(mesh: DeviceMesh) -> tuple[tuple[int, ...], ...]:
    place = mesh.get_coordinate() or ()
    lines = [(*place[:axis], slice(None), *place[axis + 1 :]) for axis in range(len(place))]
    return tuple(tuple(mesh.mesh[line].tolist()) for line in lines)


def axis_ranks(mesh: DeviceMesh) -> tuple[tuple[int, ...], ...]:
    """By axis of a mesh, the ranks along it through this one's place, as the mesh orders them."""
    if type(mesh) is DeviceMesh:
        return _fact(mesh, "ranks by axis", lambda: _lines(mesh))
    with outside_modes():  # a compiler's stand-in, which says less
        return _lines(mesh)


def name_of(mesh: DeviceMesh) -> str:
    """The name under which the ranks of a mesh compare their calls on it, all of which ask; empty for other ranks."""
    return _fact(mesh, "name", lambda: _name(mesh))


def _name(mesh: DeviceMesh) -> str:
    if mesh.get_coordinate() is None:
        return ""
    axes = mesh.mesh_dim_names or range(mesh.ndim)
    sizes = " x ".join(f"{axis} {size}" for axis, size in zip(axes, mesh.shape, strict=True))
    groups = [str(group.group_name) for group in mesh.get_all_groups()]
    return name_mesh(f"{mesh.device_type} mesh {sizes}", mesh_ranks(mesh), groups)


def context_mesh(
    device_type: str, ring: int = 1, team: int = 1, *, ulysses: int = 1, placement: Placement = "team_in_node"
) -> DeviceMesh:
    """Make a mesh with axes ``("cp_ring", "cp_team")``, and ``"cp_ulysses"`` before them, over all ranks.

    WallFacer section 3.4 knows two placements. With ``team_in_node`` neighbouring ranks form a team, so the
    gathers stay in a node; with ``ring_in_node`` neighbouring ranks form a ring, so the hops do; with
    ``ulysses_in_node`` they exchange heads. Results are the same in all. A wait on the mesh's process groups raises
    after the timeout that ``init_process_group`` was given.

    Args:
        device_type: ``"cpu"``, ``"cuda"``, ...
        ring: ranks in a ring, R.
        team: ranks in a team, C; 1 is Ring Attention.
        ulysses: ranks that split the heads.
        placement: which axis takes neighbouring ranks.

    Returns:
        The mesh of shape (ring, team), or with ``ulysses`` above 1 (ulysses, ring, team).

    Raises:
        TypeError: a size is not an int.
        ValueError: a size is below 1, their product is not the number of ranks, or the placement is unknown.
    """
    if not dist.is_initialized():
        dist.init_process_group()
    world = dist.get_world_size()
    everyone = name_mesh("world", range(world), ())
    with refusing_together(everyone):
        _check_axes(ring, team, ulysses, placement)
        if ulysses * ring * team != world:
            raise ValueError(
                f"ulysses * ring * team must be the number of ranks, got {ulysses} * {ring} * {team} = "
                f"{ulysses * ring * team} on {world} ranks; for a part of the ranks slice a larger mesh: "
                f"mesh[{RING_AXIS!r}, {TEAM_AXIS!r}]"
            )
        told = {"device_type": device_type, "ring": ring, "team": team, "ulysses": ulysses, "placement": placement}
        # Groups of other ranks would wait for each other, for torch's own half an hour.
        agree("context_mesh", told.items(), everyone)
    layout = placed_ranks(ring, team, ulysses=ulysses, placement=placement)
    names, layout = (CONTEXT_AXES, layout) if ulysses > 1 else (CONTEXT_AXES[1:], layout[0])
    mesh = DeviceMesh(device_type, layout, mesh_dim_names=names)
    inherit_timeout(mesh)
    return mesh


def _check_axes(ring: int, team: int, ulysses: int, placement: str) -> None:
    for option, size in (("ring", ring), ("team", team), ("ulysses", ulysses)):
        check_length(size, option)
    if placement not in PLACEMENTS:
        raise ValueError(f"placement must be one of {PLACEMENTS}, got {placement!r}")


def split_context_axis(
    mesh: DeviceMesh, ring: int = 1, team: int = 1, *, ulysses: int = 1, placement: Placement = "team_in_node"
) -> DeviceMesh:
    """Make the context mesh of the ranks of an axis that others have made, as torchtitan's ``cp``.

    A loader that deals tokens out along that axis deals to this mesh's ranks what :func:`shard_sequence` would: those
    of ``contiguous`` with the placement ``team_in_node``, and those of ``head_tail`` with ``ulysses_in_node`` (without
    Ulysses, with either). All ranks of the mesh's root call this together.

    Args:
        mesh: a mesh of one axis, perhaps a slice of a larger one.
        ring: ranks in a ring, R.
        team: ranks in a team, C.
        ulysses: ranks that split the heads.
        placement: which axis takes the axis' neighbouring ranks; see :func:`context_mesh`.

    Returns:
        As :func:`context_mesh`.

    Raises:
        TypeError: the mesh is none, or a size is not an int.
        ValueError: it has several axes, sizes do not multiply to its size, or the placement is unknown.
    """
    name_of(mesh)  # which refuses what is none
    everyone = name_of(_root(mesh))
    with refusing_together(everyone):
        _check_axes(ring, team, ulysses, placement)
        if mesh.ndim != 1 or ulysses * ring * team != mesh.size():
            raise ValueError(
                f"mesh must have one axis of ulysses * ring * team = {ulysses * ring * team} ranks, got "
                f"{tuple(mesh.shape)}"
            )
        told = {"ring": ring, "team": team, "ulysses": ulysses, "placement": placement, "axis": mesh.mesh_dim_names}
        agree("split_context_axis", told.items(), everyone)
    with outside_modes():
        rows = torch.tensor(_rows_like(mesh), device="cpu")
        layout = rows[:, placed_ranks(ring, team, ulysses=ulysses, placement=placement)]
    # As `context_mesh` makes it: without an axis of one rank for Ulysses.
    names, layout = (CONTEXT_AXES, layout) if ulysses > 1 else (CONTEXT_AXES[1:], layout.squeeze(1))
    inner = DeviceMesh(mesh.device_type, layout, mesh_dim_names=("others", *names))[names]
    notice_others_deal(mesh_ranks(inner))
    inherit_timeout(inner)
    return inner


def placed_ranks(ring: int, team: int, *, ulysses: int, placement: str) -> Tensor:
    """Which rank is where in a context mesh over ranks 0 to P - 1: (ulysses, ring, team), contiguous."""
    ranks = torch.arange(ulysses * ring * team, device="cpu")
    layout = {
        "team_in_node": lambda: ranks.view(ulysses, ring, team),
        "ring_in_node": lambda: ranks.view(ulysses, team, ring).transpose(1, 2),
        "ulysses_in_node": lambda: ranks.view(ring, team, ulysses).permute(2, 0, 1),
    }[placement]()
    # With the strides of its shape, those of axes of one rank, too, which `contiguous` leaves alone: torch 2.11 slices
    # no other mesh.
    return layout.flatten().view(layout.shape)


def context_groups(mesh: DeviceMesh, *, any_axis: str = "") -> ContextGroups:
    """This rank's coordinate and process groups in a mesh of axes (cp_ulysses, cp_ring, cp_team), or some of them.

    A mesh of one axis of another name is taken for one of ``any_axis``, if that is given. Refuses (TypeError,
    ValueError) other axes, a slice that leaves some out, a rank outside, and a mesh whose groups order ranks otherwise.
    """
    return _fact(mesh, f"groups as {any_axis}", lambda: _find_groups(mesh, any_axis))


def _find_groups(mesh: DeviceMesh, any_axis: str) -> ContextGroups:
    names = _context_names(mesh, any_axis)
    place = mesh.get_coordinate()
    if place is None:
        raise ValueError(f"rank {dist.get_rank()} is not in the mesh {mesh.mesh.tolist()}")
    check_ascending(mesh)
    _check_whole(mesh, names)
    groups = [str(group.group_name) for group in mesh.get_all_groups()]
    axes = dict(zip(names, zip(mesh.shape, place, groups, strict=True), strict=True))
    (u_size, u_rank, ulysses), (r_size, r_rank, ring), (t_size, t_rank, team) = (
        axes.get(axis, (1, 0, "")) for axis in CONTEXT_AXES
    )
    return ContextGroups(Coordinate(r_size, t_size, r_rank, t_rank, u_size, u_rank), (ulysses, ring, team))


def whole_context_group(mesh: DeviceMesh, axes: tuple[str, ...] = CONTEXT_AXES[1:]) -> tuple[str, tuple[int, ...]]:
    """The process group of several axes of a mesh together, made at the first call (by all ranks together).

    Not by flattening the mesh: torch would then gather DTensors that are sharded over these axes in one step, which
    takes shards that are nested, or placed otherwise, for others (torch 2.13.0).

    Gives the group's name, and for every index along these axes (the last innermost) its rank in that group.
    """
    with outside_modes():
        inner = mesh if mesh.mesh_dim_names == axes or mesh.ndim == 1 else mesh[axes]
        ranks = mesh_ranks(inner)
        if inner.ndim == 1:
            group = inner.get_group()
        else:
            made, rows = _whole_groups.setdefault(_world(), {}), _rows_like(inner)
            if rows not in made:
                # As any group of torch's: all that are alike are made, in one order, on every rank.
                groups = {row: dist.new_group(list(row)) for row in rows}
                made[rows] = groups[ranks]
            group = made[rows]
            assert isinstance(group, dist.ProcessGroup), "this rank is in its mesh"
    _inherit_timeout(group, torch.device(mesh.device_type))
    return str(group.group_name), tuple(dist.get_group_rank(group, rank) for rank in ranks)


_Rows = tuple[tuple[int, ...], ...]
# This rank's, by world and by the ranks of all that were made with it: so every rank has made these, or none has.
_whole_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[_Rows, Any]] = weakref.WeakKeyDictionary()


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None, "a mesh has been made, so there is a world"
    return world


def mesh_ranks(mesh: DeviceMesh) -> tuple[int, ...]:
    """The mesh's ranks, its last axis innermost."""
    return _fact(mesh, "ranks", lambda: tuple(mesh.mesh.flatten().tolist()))


def _context_names(mesh: DeviceMesh, any_axis: str) -> tuple[str, ...]:
    """The mesh's axes by their names here."""
    names = mesh.mesh_dim_names or ()
    held = tuple(axis for axis in CONTEXT_AXES if axis in names)
    if names and names == held:
        return names
    if any_axis and mesh.ndim == 1:
        return (any_axis,)
    remedy = (
        f"; slice it first: mesh[{', '.join(map(repr, held))}]"
        if len(held) > 1 and len(held) < len(names)
        else "; make one with context_mesh(device_type, ring, team)"
    )
    raise ValueError(f"mesh must have axes {CONTEXT_AXES}, or some of them in this order, got {names or None}{remedy}")


def check_ascending(mesh: DeviceMesh) -> None:
    """Refuse (ValueError) a mesh whose groups number ranks otherwise than it does."""
    with outside_modes():
        ascending = all(bool((mesh.mesh.diff(dim=axis) > 0).all()) for axis in range(mesh.ndim))
    if not ascending:
        raise ValueError(
            f"an axis of the mesh {mesh.mesh.tolist()} does not list its ranks in ascending order, so its process "
            "group numbers them otherwise; build the mesh with ascending ranks"
        )


def _check_whole(mesh: DeviceMesh, names: tuple[str, ...]) -> None:
    """Refuse a slice that leaves context axes out."""
    root = _root(mesh)
    axes = dict(zip(root.mesh_dim_names or (), root.shape, strict=False))
    missing = [axis for axis in CONTEXT_AXES if axes.get(axis, 1) > 1 and axis not in names]
    if missing and mesh.mesh_dim_names == names:
        whole = ", ".join(repr(axis) for axis in CONTEXT_AXES if axis in axes)
        raise ValueError(
            f"{', '.join(map(repr, names))} alone is only a part of the ranks that share a sequence, since its mesh "
            f"has a {missing[0]!r} of {axes[missing[0]]}; slice them all: mesh[{whole}]"
        )


# Private methods of DeviceMesh and process groups; run on torch 2.11.0, 2.13.0, 2.14.1 and 2.15.0.


def inherit_timeout(mesh: DeviceMesh) -> None:
    """Give the mesh's process groups the timeout of the world.

    DeviceMesh makes them with torch's default of up to half an hour, whatever ``init_process_group`` was told, and
    torch has no public way to say otherwise.
    """
    for group in mesh.get_all_groups():
        _inherit_timeout(group, torch.device(mesh.device_type))


def _inherit_timeout(group: dist.ProcessGroup, device: torch.device) -> None:
    timeout = world_timeout(device)
    if timeout is not None:
        group._get_backend(device)._set_default_timeout(timeout)


def _rows_like(mesh: DeviceMesh) -> _Rows:
    """The ranks of all slices of the root mesh that are like this one."""
    rows = mesh._layout.remap_to_tensor(mesh._rank_map).reshape(-1, mesh.size())
    return tuple(map(tuple, rows.tolist()))


@contextmanager
def temporary_groups(mesh: DeviceMesh) -> Iterator[None]:
    """Afterwards destroy the process groups of a mesh, which is then of no use, and those made for it meanwhile.

    All its ranks together. Not where groups are split from the world's, as NCCL's are once it is bound to a device:
    torch names these by how many there are, so that the next would be called like one that is gone (2.13.0, as read).
    """
    world = _world()
    made = _whole_groups.setdefault(world, {})
    before = set(made)
    yield
    if getattr(world, "bound_device_id", None) is not None:
        return
    groups = [*mesh.get_all_groups(), *(made.pop(rows) for rows in sorted(made.keys() - before))]
    _known.pop(id(mesh), None)
    for group in groups:
        # Of an axis of all ranks torch takes the world's.
        if group is not world:
            dist.destroy_process_group(group)


def is_flattened(mesh: DeviceMesh) -> bool:
    """Whether several axes of this mesh have also been made one, by ``_flatten``."""
    others = getattr(_root(mesh), "_flatten_mapping", {}).values()
    return mesh.ndim > 1 and any(set(mesh_ranks(other)) <= set(mesh_ranks(mesh)) for other in others)


def _root(mesh: DeviceMesh) -> DeviceMesh:
    return mesh._get_root_mesh()
