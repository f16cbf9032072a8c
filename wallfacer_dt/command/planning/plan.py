"""``wallfacer plan``: its options."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from wallfacer_dt import planning
from wallfacer_dt.command.options import OptionError, check_least
from wallfacer_dt.command.planning.document import plan_as_json
from wallfacer_dt.command.planning.machines import INTER_LATENCY, INTRA_LATENCY, RANKS_PER_NODE, Machines, load_profile
from wallfacer_dt.command.planning.shape import (
    Batch,
    Causal,
    DType,
    HeadDim,
    Heads,
    Hidden,
    Json,
    KVHeads,
    Memory,
    Seq,
    Window,
    make_model,
    make_sequence,
)
from wallfacer_dt.command.planning.text import make_console, print_plan

_RATE, _TIME, _SPEED, _FILE = "RATE", "TIME", "SPEED", "FILE"


def plan(
    seq: Seq,
    hidden: Hidden,
    heads: Heads,
    kv_heads: KVHeads = None,
    head_dim: HeadDim = None,
    ffn: Annotated[int, typer.Option(help="Hidden units of the feed-forward; 0 plans attention alone.")] = 0,
    gated: Annotated[bool, typer.Option("--gated/--no-gated", help="The feed-forward has a gate.")] = True,
    layers: Annotated[int, typer.Option(help="How many.")] = 1,
    vocab: Annotated[int, typer.Option(help="Entries of the vocabulary; 0 leaves it out.")] = 0,
    batch: Batch = 1,
    causal: Causal = False,
    window: Window = None,
    dtype: DType = "bfloat16",
    ranks: Annotated[int | None, typer.Option(help="That share a sequence.")] = None,
    ranks_per_node: Annotated[
        int | None, typer.Option(help=f"Neighbouring ranks in a node. [default: {RANKS_PER_NODE}]")
    ] = None,
    intra: Annotated[str | None, typer.Option(metavar=_RATE, help="Into a rank, from its node, like 300GB/s.")] = None,
    inter: Annotated[str | None, typer.Option(metavar=_RATE, help="Into a node, like 12.5GB/s or 100Gbps.")] = None,
    intra_latency: Annotated[
        str | None, typer.Option(metavar=_TIME, help=f"Of a message in a node. [default: {INTRA_LATENCY}]")
    ] = None,
    inter_latency: Annotated[
        str | None, typer.Option(metavar=_TIME, help=f"Of a message between nodes. [default: {INTER_LATENCY}]")
    ] = None,
    nics: Annotated[int | None, typer.Option(help="Interfaces that share a node's rate. [default: 1]")] = None,
    memory: Memory = None,
    attention_speed: Annotated[
        str | None,
        typer.Option(metavar=_SPEED, help="Of the forward; the backward's is 0.8 of it. [default: 500TFLOPS]"),
    ] = None,
    linear_speed: Annotated[
        str | None, typer.Option(metavar=_SPEED, help="Of other matrix products. [default: 600TFLOPS]")
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(metavar=_FILE, help="What wallfacer profile measured, instead of rates and speeds.")
    ] = None,
    top: Annotated[int, typer.Option(help="How many plans are shown.")] = 10,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw the plans' times, and the timeline of the first.")
    ] = None,
    as_document: Json = False,
) -> None:
    """Predict every way to share sequences among ranks, and rank those that fit.

    \b
    wallfacer plan --ranks 64 --ranks-per-node 8 --seq 65536 --hidden 6656 --heads 52 \\
        --kv-heads 52 --intra 300GB/s --inter 12.5GB/s
    """
    check_least("--top", top)
    if picture is not None:
        from wallfacer_dt.command.planning.picture import check_picture

        check_picture(picture, top)
    model = make_model(hidden, heads, kv_heads, head_dim, ffn=ffn, gated=gated, layers=layers, vocab=vocab)
    sequence = make_sequence(seq, batch, causal, window, dtype)
    machines = Machines(
        ranks=ranks, ranks_per_node=ranks_per_node, nics=nics, intra=intra, inter=inter, intra_latency=intra_latency,
        inter_latency=inter_latency, attention_speed=attention_speed, linear_speed=linear_speed, memory=memory,
    )  # fmt: skip
    measured = None if profile is None else load_profile(profile)
    cluster = machines.cluster() if measured is None else machines.measured(measured)
    with Console(stderr=True).status(f"planning for {cluster.ranks} ranks"):
        try:
            made = planning.plan(model, sequence, cluster, profile=measured, keep=top)
        except planning.PlanningError as error:
            raise OptionError(f"--{error.about}: {error}") from error
    if measured is not None and all(one.measured is None for one in made.ranked):
        note = f"{profile} has no run of this model and sequence: plans are ranked by its links and kernels"
        typer.echo(f"wallfacer plan: {note}", err=True)
    if picture is not None:
        from wallfacer_dt.command.planning.picture import draw_plan

        draw_plan(made, top, picture)
    if as_document:
        print(plan_as_json(made))
    else:
        print_plan(made, top, make_console())
