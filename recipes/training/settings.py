"""The options of every recipe, and every check of them that needs no process group, no data and no torch."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from typer import Option

from wallfacer_dt.algorithms.schedule import ScheduleName

Order = Literal["contiguous", "head_tail"]
Placement = Literal["team_in_node", "ring_in_node", "ulysses_in_node"]
Rotate = Literal["auto", "kv", "q"]
Precision = Literal["float32", "bfloat16"]
Weights = Literal["plain", "metp"]


_LONGEST = 86_400.0  # a day: more milliseconds than fit some backend's int end in none


class RecipeError(Exception):
    """Something the caller must change: shown as one line, exit status 2, never as a traceback."""


class LostError(Exception):
    """Other ranks were waited for in vain: each rank shows it as one line; exit status 1."""


def first_line(error: BaseException) -> str:
    """What an error says, within a line of one's own."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """What every training run has. `ring` None means what the world leaves: world / (ulysses x team x data_parallel).

    `dtype` None means bfloat16 on GPUs, float32 on CPUs.
    """

    ulysses: Annotated[int, Option(help="Ranks that split the heads.")] = 1
    ring: Annotated[int | None, Option(help="Ranks in a ring. [default: ranks / (ulysses x team x data-parallel)]")] = (
        None
    )
    team: Annotated[int, Option(help="Ranks in a team.")] = 1
    data_parallel: Annotated[int, Option(help="Groups of ulysses x ring x team ranks with different sequences.")] = 1
    placement: Annotated[
        Placement, Option(help="Whether neighbouring ranks form a team, form a ring or split heads.")
    ] = "team_in_node"
    order: Annotated[Order, Option(help="How a sequence is dealt out to its ranks.")] = "head_tail"
    schedule: Annotated[ScheduleName, Option(help="2d, with a ring for the team too, or the paper's own schedule.")] = (
        "2d"
    )
    rotate: Annotated[Rotate, Option(help="What goes round the ring in the backward.")] = "auto"
    rotate_forward: Annotated[Rotate, Option(help="The same in the forward.")] = "auto"
    batch: Annotated[int, Option(help="Sequences in a step of a data-parallel group.")] = 2
    steps: Annotated[int, Option(help="Optimiser steps.")] = 20
    lr: Annotated[float, Option(help="Peak learning rate.")] = 4e-3
    seed: Annotated[int, Option(help="Seed of the weights and of the sequences' order.")] = 0
    dtype: Annotated[
        Precision | None, Option(help="Precision of the layers. [default: bfloat16 on GPUs, else float32]")
    ] = None
    comm_timeout: Annotated[
        float, Option(help="Seconds that a rank waits for others; longer than a checkpoint takes to write.")
    ] = 120.0

    # What another part of a run may have otherwise: how ranks share the work, not what is computed. Data are told apart
    # by what they are.
    NO_MATTER: ClassVar[frozenset[str]] = frozenset({
        "ulysses", "ring", "team", "placement", "order", "schedule", "rotate", "rotate_forward", "ffn", "attention",
        "text", "model", "tokenizer", "sample_steps", "comm_timeout",
    })  # fmt: skip

    @property
    def samples(self) -> int:
        """Sequences of one step over all ranks."""
        return self.batch * self.data_parallel

    @property
    def metp(self) -> tuple[str, ...]:
        """The options that are "metp", of `ffn` and `attention`."""
        return tuple(option for option in ("ffn", "attention") if getattr(self, option, None) == "metp")


# Those options that may be a file's or a folder's name.
PATHS = frozenset({"text", "model", "tokenizer", "checkpoint"})
KEYWORDS = {"tokenizer": "bytes"}
"""What some of them take that is no path."""

# What the runs of a demo have of their own, or all alike.
DEMO_WITHOUT = frozenset({"ulysses", "ring", "team", "data_parallel", "placement", "ffn", "attention", "dtype"})


@dataclass(frozen=True, kw_only=True)
class Saving:
    """Whether, where and how often a run is kept, to go on from."""

    checkpoint: Annotated[
        Path | None, Option(metavar="DIR", help="Keep checkpoints there, in a folder that all machines share.")
    ] = None
    save_every: Annotated[int, Option(help="Steps from one checkpoint to the next.")] = 100
    keep: Annotated[int, Option(help="Checkpoints that are kept, of which the newest.")] = 2
    resume: Annotated[bool, Option("--resume", help="Go on from the newest checkpoint that is whole.")] = False
    save_async: Annotated[
        bool, Option("--save-async/--save-sync", help="Write checkpoints while training goes on, or before it does.")
    ] = True


@dataclass(frozen=True, kw_only=True)
class Output:
    """What a run leaves behind, and what of it could not be written, which is no option."""

    out: Annotated[Path, Option(metavar="DIR", help="Where run.json, metrics.jsonl and pictures go.")]
    tensorboard: Annotated[bool, Option("--tensorboard", help="Write the metrics for tensorboard, too.")] = False
    failures: list[str] = field(default_factory=list, compare=False)


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Of several runs that are compared."""

    timeout: Annotated[float, Option(help="Seconds after which a run is given up.")] = 300.0
    out: Annotated[Path, Option(metavar="DIR", help="Where run.json and pictures go.")]


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


def check_restarts() -> None:
    """Refuse (RecipeError) a torchrun that could not start ranks again.

    Its store lives through restarts, in which ranks find the addresses of those that are gone, and connect in vain
    (pytorch/pytorch issue 167288; torch 2.13.0).
    """
    could = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if could != "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        raise RecipeError(
            f"torchrun --max-restarts {could} needs the environment variable TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: "
            "without it ranks that are started again do not find each other"
        )


def context_sizes(settings: RunSettings, world: int) -> tuple[int, int, int]:
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


def check_run(settings: RunSettings, world: int, sizes: Mapping[str, int]) -> tuple[int, int, int]:
    """Refuse what does not fit together in any recipe, or does not fit `world` ranks.

    Args:
        settings: of the run.
        world: ranks.
        sizes: further options that must be at least 1, by their name here.

    Returns:
        (ulysses, ring, team).

    Raises:
        RecipeError: one line naming the options at fault and what would do.
    """
    own = {name: getattr(settings, name) for name in ("ulysses", "team", "data_parallel", "batch", "steps")}
    if settings.ring is not None:
        own["ring"] = settings.ring
    check_positive(own | dict(sizes))
    if not 0 < settings.lr < math.inf:
        raise RecipeError(f"--lr must be a number above 0, got {settings.lr}")
    if not 0 < settings.comm_timeout <= _LONGEST:
        raise RecipeError(f"--comm-timeout must be seconds above 0, at most {_LONGEST}, got {settings.comm_timeout}")
    if not 0 <= settings.seed < 2**63:
        raise RecipeError(f"--seed must be from 0 to 2**63 - 1, got {settings.seed}")
    ulysses, ring, team = context_sizes(settings, world)
    _check_schedule(settings, ring, team)
    _check_metp(settings, ulysses * ring * team)
    return ulysses, ring, team


def check_positive(sizes: Mapping[str, int]) -> None:
    """Refuse (RecipeError) an option below 1."""
    for name, size in sizes.items():
        if size < 1:
            raise RecipeError(f"--{name.replace('_', '-')} must be at least 1, got {size}")


def check_heads(settings: RunSettings, heads: int) -> None:
    """Refuse (RecipeError) Ulysses of more ranks than heads."""
    if heads < settings.ulysses:
        raise RecipeError(
            f"--ulysses {settings.ulysses} gives every rank of its axis some of the heads, of which"
            f" --heads has {heads}: choose at most as many, or more heads"
        )


def check_saving(saving: Saving) -> None:
    """Refuse (RecipeError) options of checkpoints that do not fit together."""
    check_positive({"save_every": saving.save_every, "keep": saving.keep})
    if saving.resume and saving.checkpoint is None:
        raise RecipeError("--resume goes on from a checkpoint: say where they are, --checkpoint DIR")
    if saving.checkpoint is None and saving != Saving():
        raise RecipeError(
            "--save-every, --keep and --save-sync are of checkpoints: say where they are, --checkpoint DIR, or leave "
            "them out"
        )


def _check_schedule(settings: RunSettings, ring: int, team: int) -> None:
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


def _check_metp(settings: RunSettings, ranks: int) -> None:
    if "attention" in settings.metp and settings.ulysses > 1:
        raise RecipeError(
            f"--attention metp goes by groups of heads already: --ulysses must be 1, got {settings.ulysses};"
            " choose --ring and --team, or --attention plain"
        )
    if settings.metp and ranks == 1:
        raise RecipeError(
            f"--{settings.metp[0]} metp shares weights among the ranks of a sequence, of which there is one;"
            " start more ranks (torchrun --nproc-per-node 4) or leave it out"
        )
