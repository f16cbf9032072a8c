"""``wallfacer profile``, which torchrun starts: its options."""

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from wallfacer_dt import planning
from wallfacer_dt.command.options import OptionError, check_least, naming
from wallfacer_dt.command.planning.document import profile_as_json
from wallfacer_dt.command.planning.launch import Launch
from wallfacer_dt.command.planning.machines import check_kernel_name, load_profile, read_memory
from wallfacer_dt.command.planning.models import make_model
from wallfacer_dt.command.planning.shape import (
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
    Seq,
    Window,
    check_size,
    make_sequence,
)
from wallfacer_dt.command.planning.text import make_console, print_profile
from wallfacer_dt.planning.profiling import check_writable


def profile(
    seq: Seq,
    model: Model = None,
    hidden: Hidden = None,
    heads: Heads = None,
    kv_heads: KVHeads = None,
    head_dim: HeadDim = None,
    batch: Batch = 1,
    causal: Causal = False,
    full: Full = False,
    window: Window = None,
    documents: Documents = None,
    dtype: DType = "bfloat16",
    device: Annotated[
        Literal["cpu", "cuda"] | None, typer.Option(help="Device of all ranks. [default: cuda where there is one]")
    ] = None,
    ranks_per_node: Annotated[
        int | None, typer.Option(help="Neighbouring ranks in a node. [default: as torchrun started them]")
    ] = None,
    memory: Memory = None,
    kernel: Annotated[
        str, typer.Option(metavar="NAME", help="Kernel of attention that is measured and run, as flash_attn_3.")
    ] = "auto",
    top: Annotated[int, typer.Option(help="How many plans are run.")] = 4,
    iterations: Annotated[int, typer.Option(help="Runs of each plan, after one that is not counted.")] = 3,
    threads: Annotated[
        int | None, typer.Option(help="CPU threads of a rank. [default: its share of the node's cores]")
    ] = None,
    timeout: Annotated[
        str, typer.Option(metavar="TIME", help="How long ranks wait for one that does not come.")
    ] = "120s",
    out: Annotated[
        Path,
        typer.Option(metavar="FILE", help="Made, or added to if of these ranks; `wallfacer plan --profile` reads it."),
    ] = Path("profile.json"),
    as_document: Json = False,
) -> None:
    """Measure links and kernels, run the few fastest plans of attention, and choose the fastest.

    \b
    torchrun --nproc-per-node 4 -m wallfacer_dt.command profile --seq 4096 --hidden 1024 \\
        --heads 16 --causal --out profile.json
    """
    # All that can be wrong is found before ranks meet, since one that is missing keeps the others waiting.
    for option, number in (("--top", top), ("--iterations", iterations)):
        check_least(option, number)
    check_kernel_name(kernel)
    known = make_model(model, hidden=hidden, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    if window is None and known.shape.windowed_layers is None:  # otherwise most of the time goes into the others
        window = known.window
    shape, sequence = (
        known.shape.attention_alone,
        make_sequence(seq, batch, causal=causal, full=full, window=window, documents=documents, dtype=dtype),
    )
    check_size(shape, sequence)
    limit = read_memory(memory)
    launch = Launch.read(os.environ, device, ranks_per_node, threads, timeout)
    if launch.rank == 0:
        _check_out(out, launch, kernel)
    with launch.group():
        chosen, measured = planning.profile(
            shape, sequence, launch.device, ranks_per_node=ranks_per_node, memory=limit, top=top,
            iterations=iterations, kernel=kernel, path=out,
        )  # fmt: skip
    if launch.rank == 0 and as_document:
        print(profile_as_json(chosen, measured, out))
    elif launch.rank == 0:
        print_profile(chosen, measured, out, make_console())


def _check_out(path: Path, launch: Launch, kernel: str) -> None:
    """Refuse (OptionError) a file that cannot be written, is something else, or of other ranks, devices or kernels."""
    with naming("--out"):
        check_writable(path)
    if not path.exists():
        return
    try:
        known = load_profile(path).cluster
    except OptionError as error:
        raise OptionError(f"--out{str(error).removeprefix('--profile')}") from error
    if (known.ranks, known.ranks_per_node) != (launch.ranks, launch.per_node):
        raise OptionError(
            f"--out: {path} is of {known.ranks} ranks, {known.ranks_per_node} a node, these are {launch.ranks}, "
            f"{launch.per_node} a node; name another file"
        )
    if known.device_type != launch.device:
        raise OptionError(f"--out: {path} is of --device {known.device_type}, not {launch.device}; name another file")
    if known.kernels.attention != kernel:
        raise OptionError(f"--out: {path} is of --kernel {known.kernels.attention}, not {kernel}; name another file")
