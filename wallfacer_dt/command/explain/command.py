"""``wallfacer explain``: its options."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from wallfacer_dt.algorithms.schedule import ScheduleName
from wallfacer_dt.command.explain.facts import as_json
from wallfacer_dt.command.explain.make import make_facts
from wallfacer_dt.command.explain.settings import Settings
from wallfacer_dt.command.explain.text import print_facts
from wallfacer_dt.command.options import OptionError, naming
from wallfacer_dt.planning.units import parse_tokens

_WIDTH = 100


def explain(
    ring: Annotated[int, typer.Option(help="Ranks in a ring.")],
    team: Annotated[int, typer.Option(help="Ranks in a team.")] = 1,
    ulysses: Annotated[int, typer.Option(help="Ranks that split the heads.")] = 1,
    schedule: Annotated[
        ScheduleName, typer.Option(help="2d; rings, where a team's rows go round, too; or the paper's own.")
    ] = "2d",
    rotate: Annotated[
        Literal["auto", "kv", "q"], typer.Option(help="What goes round the ring in the backward.")
    ] = "auto",
    rotate_forward: Annotated[
        Literal["auto", "kv", "q"], typer.Option(help="What goes round the ring in the forward.")
    ] = "auto",
    order: Annotated[Literal["contiguous", "head_tail"], typer.Option(help="How tokens are dealt out.")] = "contiguous",
    causal: Annotated[bool, typer.Option("--causal", help="A query sees the keys up to its own position.")] = False,
    window: Annotated[
        int | None, typer.Option(help="How many tokens back (and ahead, if not causal) a query sees.")
    ] = None,
    placement: Annotated[
        Literal["team_in_node", "ring_in_node", "ulysses_in_node"],
        typer.Option(help="Whether neighbouring ranks form a team, form a ring or split heads."),
    ] = "team_in_node",
    ranks_per_node: Annotated[int, typer.Option(help="Ranks in a node.")] = 4,
    seq: Annotated[
        str, typer.Option(metavar="TOKENS", help="Tokens of the sequence: 32, 128k or 1M; k is 1024, M 1024^2.")
    ] = "32",
    heads: Annotated[int, typer.Option(help="Query heads.")] = 8,
    kv_heads: Annotated[int | None, typer.Option(help="Key and value heads. [default: as many]")] = None,
    head_dim: Annotated[int, typer.Option(help="Elements of a head.")] = 64,
    batch: Annotated[int, typer.Option(help="Number of sequences.")] = 1,
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="Dtype of queries, keys and values.")
    ] = "bfloat16",
    rank: Annotated[int, typer.Option(help="The rank whose steps are shown.")] = 0,
    backward: Annotated[bool, typer.Option("--backward", help="The backward instead of the forward.")] = False,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw mesh, token order and the rank's steps.")
    ] = None,
    as_document: Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")] = False,
) -> None:
    """Show who holds what, and who sends what to whom at each step of an attention call.

    \b
    wallfacer explain --ring 4 --team 2 --order head_tail --causal
    """
    with naming("--seq"):
        length = parse_tokens(seq)
    settings = Settings(
        ring=ring, team=team, ulysses=ulysses, schedule=schedule, rotate=rotate, rotate_forward=rotate_forward,
        order=order, causal=causal, window=window, placement=placement, ranks_per_node=ranks_per_node, length=length,
        heads=heads, kv_heads=heads if kv_heads is None else kv_heads, head_dim=head_dim, batch=batch, dtype=dtype,
        backward=backward,
    )  # fmt: skip
    settings.check()
    if not 0 <= rank < settings.ranks:
        raise OptionError(f"--rank must be from 0 to {settings.ranks - 1}, got {rank}")
    if picture is not None:
        from wallfacer_dt.command.explain.picture import check_picture

        check_picture(picture, settings.ranks)
    facts = make_facts(settings)
    if picture is not None:
        from wallfacer_dt.command.explain.picture import draw_facts

        draw_facts(facts, rank, picture)
    if as_document:
        print(as_json(facts))
        return
    console = Console(highlight=False)
    if not sys.stdout.isatty():
        console = Console(highlight=False, width=_WIDTH)
    print_facts(facts, rank, console)
