"""A run's options, and every check of them that needs no process group, no text and no torch."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Literal

from wallfacer_dt.algorithms.schedule import ScheduleName

Order = Literal["contiguous", "head_tail"]
Placement = Literal["team_in_node", "ring_in_node", "ulysses_in_node"]
Rotate = Literal["auto", "kv", "q"]
Precision = Literal["float32", "bfloat16"]
Weights = Literal["plain", "metp"]


class RecipeError(Exception):
    """Something the caller must change: shown as one line, exit status 2, never as a traceback."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One training run. Lengths in tokens (bytes of text); sizes of the model in elements.

    `ring` None means what the world leaves: world / (ulysses x team x data_parallel). `dtype` None
    means bfloat16 on GPUs, float32 on CPUs. `ffn` and `attention` say whether every rank holds the
    weights of feed-forward and attention whole, or METP's part of them.
    """

    ulysses: int = 1
    ring: int | None = None
    team: int = 1
    data_parallel: int = 1
    placement: Placement = "team_in_node"
    order: Order = "head_tail"
    schedule: ScheduleName = "2d"
    rotate: Rotate = "auto"
    rotate_forward: Rotate = "auto"
    ffn: Weights = "plain"
    attention: Weights = "plain"
    sequence: int = 4096
    batch: int = 2
    steps: int = 20
    dim: int = 128
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    tied: bool = False
    lr: float = 4e-3
    seed: int = 0
    text: str | None = None
    dtype: Precision | None = None

    @property
    def head_dim(self) -> int:
        """Elements of one attention head."""
        return self.dim // self.heads

    @property
    def metp(self) -> tuple[str, ...]:
        """The options that are "metp", of `ffn` and `attention`."""
        return tuple(option for option in ("ffn", "attention") if getattr(self, option) == "metp")


@dataclass(frozen=True, kw_only=True)
class Launch:
    """This process's place among those of one launch, as the launcher's environment tells it."""

    rank: int
    world: int
    local_rank: int
    local_world: int

    @classmethod
    def from_environment(cls) -> Launch:
        """Read RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE; without a launcher, one process."""
        rank = int(os.environ.get("RANK", "0"))
        world = int(os.environ.get("WORLD_SIZE", "1"))
        return cls(
            rank=rank,
            world=world,
            local_rank=int(os.environ.get("LOCAL_RANK", str(rank))),
            local_world=int(os.environ.get("LOCAL_WORLD_SIZE", str(world))),
        )


def context_sizes(settings: Settings, world: int) -> tuple[int, int, int]:
    """The sizes (ulysses, ring, team) of the context mesh on `world` ranks.

    Raises:
        RecipeError: ulysses x ring x team x data_parallel is not the number of ranks.
    """
    ulysses, ring, team = settings.ulysses, settings.ring, settings.team
    rest = ulysses * team * settings.data_parallel
    others = f"--team {team} x --data-parallel {settings.data_parallel}"
    if ring is None:
        if world % rest:
            raise RecipeError(f"--ulysses {ulysses} x {others} must divide the number of ranks, which is {world}")
        return ulysses, world // rest, team
    if ring * rest != world:
        raise RecipeError(
            f"--ulysses {ulysses} x --ring {ring} x {others} = {ring * rest} ranks, but there are"
            f" {world}; start as many (torchrun --nproc-per-node {ring * rest}) or change the sizes"
        )
    return ulysses, ring, team


def check_settings(settings: Settings, world: int) -> None:
    """Refuse sizes that do not fit together or do not fit `world` ranks.

    Raises:
        RecipeError: one line naming the options at fault and what would do.
    """
    _check_positive(settings)
    _check_heads(settings)
    ulysses, ring, team = context_sizes(settings, world)
    _check_schedule(settings, ring, team)
    _check_metp(settings, ulysses * ring * team)


def _check_positive(settings: Settings) -> None:
    names = ("ulysses", "team", "data_parallel", "sequence", "batch", "steps", "dim", "layers", "heads")
    sizes = {name: getattr(settings, name) for name in (*names, "kv_heads")}
    if settings.ring is not None:
        sizes["ring"] = settings.ring
    for name, size in sizes.items():
        if size < 1:
            raise RecipeError(f"--{name.replace('_', '-')} must be at least 1, got {size}")
    if not 0 < settings.lr < math.inf:
        raise RecipeError(f"--lr must be a number above 0, got {settings.lr}")
    if settings.seed < 0:
        raise RecipeError(f"--seed must be at least 0, got {settings.seed}")


def _check_heads(settings: Settings) -> None:
    if settings.dim % settings.heads:
        raise RecipeError(f"--dim {settings.dim} must be a multiple of --heads {settings.heads}")
    if settings.head_dim % 2:
        raise RecipeError(
            f"--dim {settings.dim} / --heads {settings.heads} = {settings.head_dim} elements a"
            " head, but rotary positions turn pairs of them: make it even"
        )
    if settings.heads % settings.kv_heads:
        raise RecipeError(f"--heads {settings.heads} must be a multiple of --kv-heads {settings.kv_heads}")
    if settings.heads < settings.ulysses:
        raise RecipeError(
            f"--ulysses {settings.ulysses} gives every rank of its axis some of the heads, of which"
            f" --heads has {settings.heads}: choose at most as many, or more heads"
        )


def _check_schedule(settings: Settings, ring: int, team: int) -> None:
    if settings.schedule != "published":
        return
    if ring % team:
        raise RecipeError(
            f"--schedule published needs a --ring that is a multiple of --team, got {ring} and {team};"
            " choose another --team, or --schedule 2d"
        )
    if settings.rotate == "kv":
        raise RecipeError("--schedule published rotates queries: choose --rotate q or auto, or --schedule 2d")
    if settings.rotate_forward == "q":
        raise RecipeError(
            "--schedule published rotates keys in its forward: choose --rotate-forward kv or auto, or --schedule 2d"
        )


def _check_metp(settings: Settings, ranks: int) -> None:
    if settings.attention == "metp" and settings.ulysses > 1:
        raise RecipeError(
            f"--attention metp goes by groups of heads already: --ulysses must be 1, got {settings.ulysses};"
            " choose --ring and --team, or --attention plain"
        )
    if settings.metp and ranks == 1:
        raise RecipeError(
            f"--{settings.metp[0]} metp shares weights among the ranks of a sequence, of which there is one;"
            " start more ranks (torchrun --nproc-per-node 4) or leave it out"
        )
