"""What is planned for: the options that ``plan`` and ``profile`` share, and the shapes that they make."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Literal

import torch
import typer

from wallfacer_dt.command.options import OptionError, check_least
from wallfacer_dt.planning import ModelShape, SequenceShape

Seq = Annotated[int, typer.Option(help="Tokens in the sequence.")]
Hidden = Annotated[int, typer.Option(help="Model dim.")]
Heads = Annotated[int, typer.Option(help="Query heads.")]
KVHeads = Annotated[int | None, typer.Option(help="Key and value heads. [default: as many]")]
HeadDim = Annotated[int | None, typer.Option(help="Elements of a head. [default: hidden / heads]")]
Batch = Annotated[int, typer.Option(help="Sequences in a step.")]
Causal = Annotated[bool, typer.Option("--causal", help="A query sees the keys up to its own position.")]
Window = Annotated[
    int | None, typer.Option(help="How many tokens back (and ahead, if not causal) a query sees. [default: all]")
]
DType = Annotated[Literal["bfloat16", "float16", "float32"], typer.Option(help="Of activations.")]
Memory = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Of a rank, like 80GB; what needs more is dropped. [default: any]")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")]

_FIELDS = re.compile(r"\b(ranks_per_node|ranks|nics|hidden|kv_heads|heads|head_dim|ffn|layers|vocab|length|batch)\b")


@contextmanager
def as_options() -> Iterator[None]:
    """Say of a ValueError about a dataclass's fields which options these are.

    >>> with as_options():
    ...     raise ValueError("kv_heads must divide heads, got 5 and 52")
    Traceback (most recent call last):
    wallfacer_dt.command.options.OptionError: --kv-heads must divide --heads, got 5 and 52
    """
    try:
        yield
    except ValueError as error:
        raise OptionError(_FIELDS.sub(_option, str(error))) from error


def _option(field: re.Match[str]) -> str:
    return "--seq" if field[0] == "length" else f"--{field[0].replace('_', '-')}"


def make_model(
    hidden: int,
    heads: int,
    kv_heads: int | None,
    head_dim: int | None,
    *,
    ffn: int = 0,
    gated: bool = True,
    layers: int = 1,
    vocab: int = 0,
) -> ModelShape:
    """The model, with nothing left to a default, so that a profile's and a plan's are equal.

    Args:
        hidden: model dim.
        heads: query heads.
        kv_heads: key and value heads; None: as many.
        head_dim: of a head; None: hidden / heads.
        ffn: hidden units of the feed-forward, 0 for none.
        gated: it has a gate.
        layers: how many.
        vocab: entries of the output projection, 0 for none.

    Returns:
        The shape.

    Raises:
        OptionError: sizes that are none, or do not divide.
    """
    with as_options():
        model = ModelShape(hidden, heads, kv_heads, head_dim, ffn, gated, layers, vocab)
        return ModelShape(hidden, heads, model.keys, model.dim, ffn, gated, layers, vocab)


def make_sequence(seq: int, batch: int, causal: bool, window: int | None, dtype: str) -> SequenceShape:
    """The sequences.

    Args:
        seq: tokens.
        batch: sequences.
        causal: a query sees the keys up to its own position.
        window: tokens that a query sees back and, if not causal, ahead; None for all.
        dtype: of activations.

    Returns:
        The shape.

    Raises:
        OptionError: it is none.
    """
    if window is not None:
        check_least("--window", window, 0)
    sees = None if window is None else (window, 0 if causal else window)
    with as_options():
        return SequenceShape(seq, batch, causal, sees, getattr(torch, dtype))
