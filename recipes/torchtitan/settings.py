"""The fields that this recipe adds to torchtitan's parallelisms, and what they say about mesh and token order."""

from dataclasses import dataclass
from typing import Literal

from torchtitan.config import ParallelismConfig

from wallfacer_dt.algorithms.schedule import ScheduleName

BY_DOCUMENT = "document_headtail"
"""The load balancer that torchtitan does not have: the Trainer of this recipe deals its tokens out."""

# The order of this package in which each load balancer deals tokens out.
ORDERS = {"headtail": "head_tail", BY_DOCUMENT: "document_head_tail", None: "contiguous"}


@dataclass(kw_only=True, slots=True)
class ContextParallelism(ParallelismConfig):
    """torchtitan's parallelisms, and the shape of context parallelism's mesh."""

    spmd_backend: Literal["partial_dtensor", "full_dtensor", "spmd_types"] = "partial_dtensor"
    """SPMD backend selector; only "partial_dtensor" goes with this recipe."""

    context_parallel_ulysses: int = 1
    """Ranks that split the heads: more than 1 is Ulysses, round what ring and team do."""

    context_parallel_ring: int | None = None
    """Ranks in a ring. None means the rest: `context_parallel_degree` / (ulysses x team)."""

    context_parallel_team: int = 1
    """Ranks in a team: 1 is Ring Attention, more is WallFacer."""

    context_parallel_schedule: ScheduleName = "2d"
    """The 2D schedule, the same with a ring for the team, or WallFacer's as published."""

    context_parallel_rotate: Literal["auto", "kv", "q"] = "auto"
    """What goes round the ring in the backward: keys and values, queries, or whichever has the fewest bytes."""

    context_parallel_rotate_forward: Literal["auto", "kv", "q"] = "auto"
    """The same in the forward."""

    context_parallel_kernel: str = "auto"
    """Kernel of one block of attention, by name."""


def context_sizes(parallelism: ContextParallelism) -> tuple[int, int, int]:
    """The sizes (ulysses, ring, team) of the context mesh.

    Raises:
        ValueError: ulysses x ring x team is not the degree of context parallelism.
    """
    degree, ulysses, ring, team = (
        parallelism.context_parallel_degree,
        parallelism.context_parallel_ulysses,
        parallelism.context_parallel_ring,
        parallelism.context_parallel_team,
    )
    if ulysses < 1 or team < 1 or (ring is not None and ring < 1):
        raise ValueError(
            "--parallelism.context_parallel_ulysses, --parallelism.context_parallel_ring and "
            f"--parallelism.context_parallel_team must be at least 1, got {ulysses}, {ring} and {team}"
        )
    if ring is None and degree % (ulysses * team) == 0:
        return ulysses, degree // (ulysses * team), team
    if ring is None or ulysses * ring * team != degree:
        raise ValueError(
            "--parallelism.context_parallel_degree must be context_parallel_ulysses x context_parallel_ring x "
            f"context_parallel_team, got {degree} and {ulysses} x {'any' if ring is None else ring} x {team}"
        )
    return ulysses, ring, team
