"""The command line: `train` (also what options without a command mean) and `demo`."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from recipes.train_bytes.settings import (
    Launch,
    Order,
    Placement,
    Precision,
    RecipeError,
    Rotate,
    Settings,
    Weights,
    check_settings,
)
from wallfacer_dt.algorithms.schedule import ScheduleName

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    help="Train a byte-level GPT with each sequence shared by a (ulysses, ring, team) mesh of ranks.",
)

_DEFAULTS = Settings()

TextOption = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Train on this file instead of Python's standard library."),
]
SequenceOption = Annotated[int, typer.Option(help="Bytes in a sequence.")]
BatchOption = Annotated[int, typer.Option(help="Sequences in a step of a data-parallel group.")]
StepsOption = Annotated[int, typer.Option(help="Optimiser steps.")]
DimOption = Annotated[int, typer.Option(help="Width of the model.")]
LayersOption = Annotated[int, typer.Option(help="Transformer blocks.")]
HeadsOption = Annotated[int, typer.Option(help="Query heads.")]
KVHeadsOption = Annotated[int, typer.Option(help="Key and value heads.")]
TiedOption = Annotated[bool, typer.Option("--tied/--untied", help="Use the embedding as the output head too.")]
RateOption = Annotated[float, typer.Option(help="Peak learning rate.")]
SeedOption = Annotated[int, typer.Option(help="Seed of the weights and of the sequences' order.")]
ScheduleOption = Annotated[
    ScheduleName, typer.Option(help="2d, with a ring for the team too, or the paper's own schedule.")
]
RotateOption = Annotated[Rotate, typer.Option(help="What goes round the ring in the backward.")]
RotateForwardOption = Annotated[Rotate, typer.Option(help="The same in the forward.")]
OrderOption = Annotated[Order, typer.Option(help="How a sequence is dealt out to its ranks.")]


@app.command("train")
def train_command(
    ulysses: Annotated[int, typer.Option(help="Ranks that split the heads.")] = _DEFAULTS.ulysses,
    ring: Annotated[
        int | None, typer.Option(help="Ranks in a ring. [default: ranks / (ulysses x team x data-parallel)]")
    ] = None,
    team: Annotated[int, typer.Option(help="Ranks in a team.")] = _DEFAULTS.team,
    data_parallel: Annotated[
        int, typer.Option(help="Groups of ulysses x ring x team ranks with different sequences.")
    ] = _DEFAULTS.data_parallel,
    placement: Annotated[
        Placement, typer.Option(help="Whether neighbouring ranks form a team, form a ring or split heads.")
    ] = _DEFAULTS.placement,
    order: OrderOption = _DEFAULTS.order,
    schedule: ScheduleOption = _DEFAULTS.schedule,
    rotate: RotateOption = _DEFAULTS.rotate,
    rotate_forward: RotateForwardOption = _DEFAULTS.rotate_forward,
    ffn: Annotated[
        Weights, typer.Option(help="Feed-forward weights: whole on every rank, or shared by METP.")
    ] = _DEFAULTS.ffn,
    attention: Annotated[
        Weights, typer.Option(help="Attention's projections: whole on every rank, or shared by METP.")
    ] = _DEFAULTS.attention,
    sequence: SequenceOption = _DEFAULTS.sequence,
    batch: BatchOption = _DEFAULTS.batch,
    steps: StepsOption = _DEFAULTS.steps,
    dim: DimOption = _DEFAULTS.dim,
    layers: LayersOption = _DEFAULTS.layers,
    heads: HeadsOption = _DEFAULTS.heads,
    kv_heads: KVHeadsOption = _DEFAULTS.kv_heads,
    tied: TiedOption = _DEFAULTS.tied,
    lr: RateOption = _DEFAULTS.lr,
    seed: SeedOption = _DEFAULTS.seed,
    text: TextOption = _DEFAULTS.text,
    dtype: Annotated[
        Precision | None, typer.Option(help="Precision of the layers. [default: bfloat16 on GPUs, else float32]")
    ] = _DEFAULTS.dtype,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where run.json goes.")] = Path("runs/train"),
) -> None:
    """Train on the ranks that torchrun started, or on this process alone.

    \b
    torchrun --nproc-per-node 8 -m recipes.train_bytes train --ring 4 --team 2
    """
    settings = Settings(
        ulysses=ulysses,
        ring=ring,
        team=team,
        data_parallel=data_parallel,
        placement=placement,
        order=order,
        schedule=schedule,
        rotate=rotate,
        rotate_forward=rotate_forward,
        ffn=ffn,
        attention=attention,
        sequence=sequence,
        batch=batch,
        steps=steps,
        dim=dim,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        tied=tied,
        lr=lr,
        seed=seed,
        text=text,
        dtype=dtype,
    )
    launch = Launch.from_environment()
    # Before the imports below, which take seconds: what is plainly wrong should be said at once.
    check_settings(settings, launch.world)
    from recipes.train_bytes.text import check_long_enough, load_text

    found = load_text(text)
    check_long_enough(found, sequence, batch * data_parallel)
    from recipes.train_bytes.record import make_folder, write_run

    if launch.rank == 0:
        make_folder(out)
    from recipes.train_bytes.report import print_run
    from recipes.train_bytes.train import train

    run = train(settings, launch, found)
    if launch.rank == 0:
        write_run(out / "run.json", run)
        print_run(run)


@app.command("demo")
def demo_command(
    order: OrderOption = _DEFAULTS.order,
    schedule: ScheduleOption = _DEFAULTS.schedule,
    rotate: RotateOption = _DEFAULTS.rotate,
    rotate_forward: RotateForwardOption = _DEFAULTS.rotate_forward,
    sequence: SequenceOption = _DEFAULTS.sequence,
    batch: BatchOption = _DEFAULTS.batch,
    steps: StepsOption = _DEFAULTS.steps,
    dim: DimOption = _DEFAULTS.dim,
    layers: LayersOption = _DEFAULTS.layers,
    heads: HeadsOption = _DEFAULTS.heads,
    kv_heads: KVHeadsOption = _DEFAULTS.kv_heads,
    tied: TiedOption = _DEFAULTS.tied,
    lr: RateOption = _DEFAULTS.lr,
    seed: SeedOption = _DEFAULTS.seed,
    text: TextOption = _DEFAULTS.text,
    timeout: Annotated[float, typer.Option(help="Seconds after which a run is given up.")] = 300.0,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where run.json and curves.png go.")] = Path("runs/demo"),
) -> None:
    """Train on one process, on four ranks as ring 2 x team 2, with METP too, ring of 4, ulysses 2 x ring 2; compare."""
    settings = Settings(
        order=order,
        schedule=schedule,
        rotate=rotate,
        rotate_forward=rotate_forward,
        sequence=sequence,
        batch=batch,
        steps=steps,
        dim=dim,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        tied=tied,
        lr=lr,
        seed=seed,
        text=text,
        # Runs are compared to 1e-4, on GPUs too.
        dtype="float32",
    )
    from recipes.train_bytes.demo import demo

    raise typer.Exit(demo(settings, out, timeout))


def main(arguments: Sequence[str]) -> int:
    """Run the command line; returns the exit status, 2 for anything the caller must change."""
    commandless = not arguments or (arguments[0].startswith("-") and arguments[0] != "--help")
    arguments = ["train", *arguments] if commandless else list(arguments)
    try:
        status = app(arguments, prog_name="train_bytes", standalone_mode=False)
    except RecipeError as error:
        return _refuse(str(error))
    except typer.TyperException as error:
        return _refuse(error.format_message())
    except (typer.Abort, KeyboardInterrupt):
        return 130
    return status if isinstance(status, int) else 0


def _refuse(message: str) -> int:
    # One rank of a machine speaks for all. torchrun stops every rank once one has gone, so the
    # others wait for the one that speaks.
    if Launch.from_environment().local_rank == 0:
        print(f"train_bytes: {message}", file=sys.stderr, flush=True)
    else:
        time.sleep(10)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
