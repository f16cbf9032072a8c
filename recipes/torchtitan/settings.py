"""The fields that this recipe adds to torchtitan's parallelisms, and what they say about mesh and token order."""

from dataclasses import dataclass
from typing import Literal

from torchtitan.config import ParallelismConfig

# The order of this package in which each of torchtitan's load balancers deals tokens out.
ORDERS = {"headtail": "head_tail", None: "contiguous"}


@dataclass(kw_only=True, slots=True)
class ContextParallelism(ParallelismConfig):
    """torchtitan's parallelisms, and the shape of context parallelism's mesh."""

    spmd_backend: Literal["partial_dtensor", "full_dtensor", "spmd_types"] = "partial_dtensor"
    """SPMD backend selector; only "partial_dtensor" goes with this recipe."""

    context_parallel_ring: int | None = None
    """Ranks in a ring. None means `context_parallel_degree` / `context_parallel_team`."""

    context_parallel_team: int = 1
    """Ranks in a team: 1 is Ring Attention, more is WallFacer."""

    context_parallel_schedule: Literal["2d", "published"] = "2d"
    """The 2D schedule, or WallFacer's as published."""

    context_parallel_rotate: Literal["auto", "kv", "q"] = "auto"
    """What goes round the ring in the backward: keys and values, queries, or whichever has the fewest bytes."""

    context_parallel_kernel: Literal["auto", "flash", "reference"] = "auto"
    """Kernel of one block of attention."""


def context_sizes(parallelism: ContextParallelism) -> tuple[int, int]:
    """The sizes (ring, team) of the context mesh.

    Raises:
        ValueError: ring x team is not the degree of context parallelism.
    """
    degree, ring, team = (
        parallelism.context_parallel_degree,
        parallelism.context_parallel_ring,
        parallelism.context_parallel_team,
    )
    if team < 1 or (ring is not None and ring < 1):
        raise ValueError(
            "--parallelism.context_parallel_ring and --parallelism.context_parallel_team must be at least 1, "
            f"got {ring} and {team}"
        )
    if ring is None and degree % team == 0:
        return degree // team, team
    if ring is None or ring * team != degree:
        raise ValueError(
            "--parallelism.context_parallel_degree must be context_parallel_ring x context_parallel_team, "
            f"got {degree} and {'any' if ring is None else ring} x {team}"
        )
    return ring, team
