"""``wallfacer plan``: its options."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from wallfacer_dt import planning
from wallfacer_dt.command.options import OptionError, check_least
from wallfacer_dt.command.planning.divided import check_divisible, print_divided
from wallfacer_dt.command.planning.document import plan_as_json
from wallfacer_dt.command.planning.figures import Figures
from wallfacer_dt.command.planning.machines import Machines, load_profile
from wallfacer_dt.command.planning.models import make_model
from wallfacer_dt.command.planning.shape import (
    Asked,
    Batch,
    Causal,
    Documents,
    DType,
    Full,
    HeadDim,
    Heads,
    Hidden,
    Json,
    KVHeads,
    Memory,
    Model,
    WindowOfSome,
    check_size,
    make_sequence,
    parse_only,
)
from wallfacer_dt.command.planning.text import asked_of, make_console, print_plan
from wallfacer_dt.planning.cluster import Kernels
from wallfacer_dt.planning.dividing import MOST_SEQUENCES
from wallfacer_dt.planning.gpus import GPUS, INTER_LATENCY, INTRA_LATENCY, NODE
from wallfacer_dt.planning.longest import MOST, length_unit, longest_length
from wallfacer_dt.planning.units import format_time

_RATE, _TIME, _SPEED, _FILE = "RATE", "TIME", "SPEED", "FILE"


def plan(
    seq: Annotated[
        str,
        typer.Option(
            metavar="TOKENS",
            help="Tokens of the sequence: 131072, 128k or 1M (k is 1024, M 1024^2), or longest: as many as fit.",
        ),
    ],
    model: Model = None,
    hidden: Hidden = None,
    heads: Heads = None,
    kv_heads: KVHeads = None,
    head_dim: HeadDim = None,
    ffn: Annotated[
        int | None,
        typer.Option(help="Hidden units of the feed-forward; 0 plans attention alone. [default: 0, or the model's]"),
    ] = None,
    gated: Annotated[
        bool | None,
        typer.Option("--gated/--no-gated", help="The feed-forward has a gate. [default: yes, or as the model]"),
    ] = None,
    experts: Annotated[
        int | None,
        typer.Option(
            help="Experts, each of --ffn hidden units; 0 for a plain feed-forward. [default: 0, or the model's]"
        ),
    ] = None,
    experts_per_token: Annotated[
        int | None, typer.Option(help="Experts that a token goes to. [default: 0, or the model's]")
    ] = None,
    dense_layers: Annotated[
        int | None,
        typer.Option(help="First layers that have no experts, but one feed-forward. [default: 0, or the model's]"),
    ] = None,
    dense_ffn: Annotated[int | None, typer.Option(help="Hidden units of these. [default: 0, or the model's]")] = None,
    layers: Annotated[int | None, typer.Option(help="Number of layers. [default: 1, or the model's]")] = None,
    windowed_layers: Annotated[
        int | None,
        typer.Option(help="Of these, those that --window is for; others see all. [default: all, or the model's]"),
    ] = None,
    vocab: Annotated[
        int | None, typer.Option(help="Entries of the vocabulary; 0 leaves it out. [default: 0, or the model's]")
    ] = None,
    batch: Batch = 1,
    sequences: Annotated[
        int | None,
        typer.Option(
            help="Sequences in a step of all ranks, which are then divided among data, tensor, pipeline, context and "
            "expert parallelism. [default: they all share --batch sequences]"
        ),
    ] = None,
    only: Asked = None,
    causal: Causal = False,
    full: Full = False,
    window: WindowOfSome = None,
    documents: Documents = None,
    dtype: DType = "bfloat16",
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="GPUxCOUNT",
            help=f"Like h100x64, of {', '.join(GPUS)}: nodes of {NODE} with an adapter for each GPU. Options below "
            "replace its parts, but for --ranks, which it says itself.",
        ),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(help="Number of ranks; all share a sequence, unless --sequences divides them.")
    ] = None,
    ranks_per_node: Annotated[int | None, typer.Option(help=f"Neighbouring ranks in a node. [default: {NODE}]")] = None,
    intra: Annotated[
        str | None, typer.Option(metavar=_RATE, help="Rate into a rank within a node, like 300GB/s.")
    ] = None,
    inter: Annotated[
        str | None, typer.Option(metavar=_RATE, help="Rate into a node, like 12.5GB/s or 100Gbps.")
    ] = None,
    intra_latency: Annotated[
        str | None, typer.Option(metavar=_TIME, help=f"Of a message in a node. [default: {format_time(INTRA_LATENCY)}]")
    ] = None,
    inter_latency: Annotated[
        str | None,
        typer.Option(metavar=_TIME, help=f"Of a message between nodes. [default: {format_time(INTER_LATENCY)}]"),
    ] = None,
    nics: Annotated[
        int | None, typer.Option(help="Interfaces that share a node's rate. [default: 1, or of --cluster]")
    ] = None,
    memory: Memory = None,
    kernel: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Kernel of attention, whose rates of --cluster are taken, as flash_attn_3. [default: auto, which is "
            "torch's flash, or of --profile]",
        ),
    ] = None,
    attention_speed: Annotated[
        str | None,
        typer.Option(
            metavar=_SPEED,
            help="Speed of attention's forward; the backward's is in proportion. [default: of --cluster, or an H100's]",
        ),
    ] = None,
    linear_speed: Annotated[
        str | None,
        typer.Option(metavar=_SPEED, help="Speed of other matrix products. [default: of --cluster, or an H100's]"),
    ] = None,
    memory_rate: Annotated[
        str | None,
        typer.Option(
            metavar=_RATE,
            help="At which a rank reads and writes its memory, as merging, norms and the optimizer do. [default: of "
            "--cluster, or an H100's]",
        ),
    ] = None,
    launch: Annotated[
        str | None,
        typer.Option(
            metavar=_TIME,
            help="Of the host for an operation of attention; 0s where a graph is replayed. "
            f"[default: {format_time(Kernels().launch)}]",
        ),
    ] = None,
    peak_speed: Annotated[
        str | None,
        typer.Option(
            metavar=_SPEED, help="Peak of a rank by its data sheet, for MFU. [default: of --cluster in 16 bits]"
        ),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(metavar=_FILE, help="What `wallfacer profile` measured, in place of rates and speeds."),
    ] = None,
    top: Annotated[int, typer.Option(help="How many plans are shown.")] = 5,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw the plans' times, and the timeline of the first.")
    ] = None,
    as_document: Json = False,
) -> None:
    """Predict every way to share sequences among ranks, and rank those that fit.

    \b
    wallfacer plan --cluster h100x64 --model llama3-8b --seq 128k --causal
    wallfacer plan --cluster h100x64 --model llama3-8b --seq 128k --causal --sequences 8
    """
    check_least("--top", top)
    if picture is not None:
        from wallfacer_dt.command.planning.picture import check_picture

        check_picture(picture, top)
    known = make_model(
        model, hidden=hidden, heads=heads, kv_heads=kv_heads, head_dim=head_dim, ffn=ffn, gated=gated, layers=layers,
        vocab=vocab, experts=experts, experts_per_token=experts_per_token, windowed_layers=windowed_layers,
        dense_layers=dense_layers, dense_ffn=dense_ffn,
    )  # fmt: skip
    window = known.window if window is None else window
    if windowed_layers is not None and window is None:
        raise OptionError("--windowed-layers: there is no window; give --window")
    if known.shape.windowed_layers == 0:
        known, window = replace(known, shape=replace(known.shape, windowed_layers=None)), None
    if gated is not None and not known.shape.ffn:
        raise OptionError("--gated/--no-gated: there is no feed-forward; give --ffn")
    asked = parse_only(only, divides=sequences is not None)
    is_longest = seq == "longest"
    if sequences is not None:
        check_divisible(sequences, batch=batch, is_longest=is_longest, picture=picture)
    if is_longest and documents is not None:
        raise OptionError("--documents: how many the longest sequence has is not known; say --seq")
    sequence = make_sequence(
        MOST if is_longest else seq, batch, causal=causal, full=full, window=window, documents=documents, dtype=dtype
    )
    if not is_longest:
        check_size(known.shape, sequence, min(sequences or 1, MOST_SEQUENCES))
    machines = Machines(
        name=cluster, ranks=ranks, ranks_per_node=ranks_per_node, nics=nics, intra=intra, inter=inter,
        intra_latency=intra_latency, inter_latency=inter_latency, attention_speed=attention_speed,
        linear_speed=linear_speed, memory_rate=memory_rate, launch=launch, peak_speed=peak_speed, memory=memory,
        kernel=kernel,
    )  # fmt: skip
    measured = None if profile is None else load_profile(profile)
    heads_of = sequence.dtype, known.shape.dims
    where = machines.cluster(*heads_of) if measured is None else machines.measured(measured, *heads_of)
    if measured is None and (idle := machines.idle(where.cluster)):
        _tell(f"there is {idle[1]}, so that {', '.join(idle[0])} did not count")
    if is_longest and where.cluster.memory is None:
        raise OptionError("--seq longest: the memory of a rank is not known; give --memory")
    if sequences is not None:
        runs = () if measured is None else measured.measured
        if any((one.model, one.sequence) == (known.shape, sequence) for one in runs):
            _tell(f"runs of {profile} do not count with --sequences: divisions are ranked by its links and kernels")
        print_divided(known, sequence, sequences, where, asked, top, as_document=as_document)
        return
    with Console(stderr=True).status(f"planning for {where.cluster.ranks} ranks"):
        unit = length_unit(where.cluster.ranks)
        if is_longest:
            check_size(known.shape, replace(sequence, length=unit))  # longer ones are held to the memory
            # Of what does not fit at all the plan says how much that needs.
            sequence = replace(sequence, length=longest_length(known.shape, sequence, where.cluster, asked) or unit)
        try:
            made = planning.plan(known.shape, sequence, where.cluster, only=asked, profile=measured, keep=top)
        except planning.PlanningError as error:
            raise OptionError(f"--{error.about}: {error}") from error
    figures = Figures.of(made, where, known)
    if measured is not None and all(one.measured is None for one in made.ranked):
        _tell(f"{profile} has no run of this model and sequence: plans are ranked by its links and kernels")
    if picture is not None:
        from wallfacer_dt.command.planning.picture import draw_plan

        draw_plan(made, top, picture)
    if as_document:
        print(plan_as_json(made, figures))
        return
    console = make_console()
    if is_longest:
        how = f"by bisection in steps of {unit}, is {'at least ' * (sequence.length + unit > MOST)}"
        console.print(f"the longest sequence of which a plan{asked_of(made)} fits, {how}{sequence.length} tokens")
    print_plan(made, figures, top, console)


def _tell(what: str) -> None:
    typer.echo(f"wallfacer plan: {what}", err=True)
