"""Joining the other ranks: device, process group, meshes, and whether all read the same data."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from recipes.training.settings import PATHS, Launch, RecipeError, RunSettings, Saving, context_sizes
from wallfacer_dt import TokenOrder, context_mesh, sequence_positions
from wallfacer_dt.agreement.progress import Waiting
from wallfacer_dt.command.planning.launch import cores
from wallfacer_dt.mesh import CONTEXT_AXES, inherit_timeout, placed_ranks

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Where this process stands.

    Attributes:
        launch: its rank among all.
        device: what it computes on.
        ulysses, ring, team: the sizes of the mesh that shares one sequence.
        dtype: precision of the layers.
        context: that mesh, or None where no sequence is shared.
        order: in which tokens are dealt out on it.
        data_parallel: the 1-D axis of groups with different sequences, or None where there is but
            one group.
    """

    launch: Launch
    device: torch.device
    ulysses: int
    ring: int
    team: int
    dtype: torch.dtype
    context: DeviceMesh | None = None
    order: TokenOrder | None = None
    data_parallel: DeviceMesh | None = None


def join_ranks(settings: RunSettings, saving: Saving, launch: Launch) -> Ranks:
    """Choose the device and, with more than one rank, start the process group and its meshes.

    Raises:
        RecipeError: bfloat16 was asked for where there is no GPU for each rank, or ranks have other options.
        WaitError: not all ranks are here.
    """
    torch.set_num_threads(max(1, cores() // launch.local_world))
    device = _device(launch)
    if settings.dtype == "bfloat16" and device.type != "cuda":
        raise RecipeError(
            f"--dtype bfloat16 needs a GPU for every rank of a machine, here {launch.local_world},"
            f" but torch sees {torch.cuda.device_count()}; use --dtype float32"
        )
    sizes = context_sizes(settings, launch.world)
    ulysses, ring, team = sizes
    dtype = getattr(torch, settings.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    if launch.world == 1:
        return Ranks(launch=launch, device=device, ulysses=ulysses, ring=ring, team=team, dtype=dtype)
    timeout = timedelta(seconds=settings.comm_timeout)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # Checkpoints are written by gloo, for which tensors are on the CPU by then.
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timeout, device_id=device)
    else:
        dist.init_process_group("gloo", timeout=timeout)
    check_options(settings, saving, launch)
    context, data_parallel = make_meshes(settings, device.type, sizes)
    shared = math.prod(sizes) > 1
    return Ranks(
        launch=launch,
        device=device,
        ulysses=ulysses,
        ring=ring,
        team=team,
        dtype=dtype,
        context=context if shared else None,
        order=TokenOrder(settings.order, context) if shared else None,
        data_parallel=data_parallel,
    )


def load_alike(load: Callable[[], tuple[T, tuple[int, ...]]], launch: Launch, source: str) -> T:
    """What is loaded on this rank, beside a fingerprint that must be the same on all: what one refuses, all do.

    Raises:
        RecipeError: of this rank or another, which it names, as it does the first whose fingerprint is not rank 0's.
        WaitError: not all ranks are here.
    """
    loaded, fingerprint, refusal = None, (), None
    try:
        loaded, fingerprint = load()
    except RecipeError as error:
        refusal = error
    heard = _heard((fingerprint, refusal), "what was loaded", launch)
    if refusal is not None:
        raise refusal
    for rank, (_, others) in enumerate(heard):
        if others is not None:
            raise RecipeError(f"rank {rank}: {others}")
    odd = next((rank for rank, one in enumerate(heard) if one != heard[0]), None)
    if odd is not None:
        raise RecipeError(
            f"of {source} rank {odd} found other data than rank 0: all ranks need the same files, or the same versions"
        )
    return cast(T, loaded)


def check_options(settings: RunSettings, saving: Saving, launch: Launch) -> None:
    """Refuse to train ranks with different options; machines may have files in different places.

    Raises:
        RecipeError: names the first rank and its first option that is not rank 0's.
        WaitError: not all ranks are here.
    """
    mine = asdict(settings) | asdict(saving)
    mine = {name: value is not None if name in PATHS else value for name, value in mine.items()}
    heard = _heard(mine, "options", launch)
    for rank, options in enumerate(heard):
        for name, value in options.items():
            if value != heard[0][name]:
                option = f"--{name.replace('_', '-')}"
                raise RecipeError(f"{option} is {value} on rank {rank}, {heard[0][name]} on rank 0: start all alike")


def _heard(mine: T, what: str, launch: Launch) -> list[T]:
    """What every rank has, by rank."""
    heard = [mine] * launch.world
    if dist.is_initialized():
        with Waiting(f"all_gather of {what}"):
            dist.all_gather_object(heard, mine)
    return heard


def sum_over_groups(x: Tensor, what: str, ranks: Ranks) -> None:
    """Add a tensor up in place over the groups with different sequences, if there are several.

    Raises:
        WaitError: not all ranks of this rank's line of the axis are here; it says where these are.
    """
    if ranks.data_parallel is not None:
        group = ranks.data_parallel.get_group()
        with Waiting(f"all_reduce of {what} along dp", lambda: dist.get_process_group_ranks(group)):
            dist.all_reduce(x, group=group)


def leave_ranks() -> None:
    """End the process group, if there is one; all ranks call it."""
    if dist.is_initialized():
        dist.destroy_process_group()


def make_meshes(
    settings: RunSettings, device_type: str, sizes: tuple[int, int, int]
) -> tuple[DeviceMesh, DeviceMesh | None]:
    """The context mesh and, with more than one group, the data-parallel axis."""
    ulysses, ring, team = sizes
    if settings.data_parallel == 1:
        return context_mesh(device_type, ring, team, ulysses=ulysses, placement=settings.placement), None
    groups = torch.arange(settings.data_parallel * math.prod(sizes)).view(settings.data_parallel, -1)
    grid, axes = groups[:, placed_ranks(ring, team, ulysses=ulysses, placement=settings.placement)], CONTEXT_AXES
    if ulysses == 1:
        grid, axes = grid.squeeze(1), CONTEXT_AXES[1:]
    mesh = DeviceMesh(device_type, grid, mesh_dim_names=("dp", *axes))
    inherit_timeout(mesh)
    return mesh[axes], mesh["dp"]


def _device(launch: Launch) -> torch.device:
    if torch.cuda.is_available() and torch.cuda.device_count() >= launch.local_world:
        return torch.device("cuda", launch.local_rank)
    return torch.device("cpu")


def device_name(device: torch.device) -> str:
    """What the device calls itself, "cpu" for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def positions(length: int, ranks: Ranks) -> Tensor:
    """Where this rank's tokens of a sequence of `length` stand in it: int64, on its device."""
    if ranks.order is None:
        return torch.arange(length, device=ranks.device)
    return sequence_positions(length, ranks.order).to(ranks.device)
