"""What is planned for: the options that ``plan`` and ``profile`` share, and the shapes that they make."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Literal

import torch
import typer

from wallfacer_dt.command.options import OptionError, check_least, naming
from wallfacer_dt.planning import ModelShape, SequenceShape
from wallfacer_dt.planning.known_models import MODELS
from wallfacer_dt.planning.only import ATTENTION, GROUPS, LAYERS, Only
from wallfacer_dt.planning.units import parse_tokens

Seq = Annotated[
    str, typer.Option(metavar="TOKENS", help="Tokens of the sequence: 131072, 128k or 1M; k is 1024, M 1024^2.")
]
Model = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|FILE",
        help=f"One of {', '.join(MODELS)}, or a config.json of Hugging Face. Sizes given as options replace its own.",
    ),
]
Hidden = Annotated[int | None, typer.Option(help="Model dim.")]
Heads = Annotated[int | None, typer.Option(help="Query heads.")]
KVHeads = Annotated[int | None, typer.Option(help="Key and value heads. [default: as many, or the model's]")]
HeadDim = Annotated[int | None, typer.Option(help="Elements of a head. [default: hidden / heads, or the model's]")]
Batch = Annotated[int, typer.Option(help="Sequences in a step, which all ranks share.")]
Causal = Annotated[
    bool, typer.Option("--causal", help="A query sees the keys up to its own position. This or --full must be said.")
]
Full = Annotated[bool, typer.Option("--full", help="Every query sees every key.")]
Window = Annotated[
    int | None, typer.Option(help="How many tokens back (and ahead, if not causal) a query sees. [default: all]")
]
WindowOfSome = Annotated[
    int | None,
    typer.Option(
        help="How many tokens back (and ahead, if not causal) a query sees, in all layers or those of "
        "--windowed-layers. [default: all, or the model's]"
    ),
]
Documents = Annotated[
    str | None,
    typer.Option(
        metavar="TOKENS,...",
        help="Tokens of the documents packed into a sequence, as 8k or 30k,2k,500: in turn and round again until it is "
        "full, the last one cut. [default: one]",
    ),
]
DType = Annotated[Literal["bfloat16", "float16", "float32"], typer.Option(help="Dtype of activations.")]
Memory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Memory of a rank, like 80GB; what needs more is dropped. [default: as known of the ranks, or any]",
    ),
]
Asked = Annotated[
    str | None,
    typer.Option(
        "--only",
        metavar="NAME=VALUE,...",
        help=f"What plans must have, as ring=8,checkpoint=full: {', '.join((*ATTENTION, *LAYERS))}; with --sequences "
        f"{', '.join(GROUPS)}, too. [default: anything]",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")]

_MOST_ELEMENTS = 2**56
_FIELDS = re.compile(
    r"\b(ranks_per_node|ranks|nics|hidden|kv_heads|heads|head_dim|ffn|dense_ffn|dense_layers|windowed_layers|layers|vocab|experts_per_token|experts|length|batch|documents)\b"
)


def parse_only(text: str | None, *, divides: bool) -> dict[str, int | str]:
    """Values by name of a text like ``ring=8,checkpoint=full``; refuse (OptionError) other texts, and names of no plan.

    >>> parse_only("ring=8,checkpoint=full", divides=False)
    {'ring': 8, 'checkpoint': 'full'}
    """
    values: dict[str, int | str] = {}
    for part in text.split(",") if text is not None else ():
        name, _, value = part.strip().partition("=")
        if not value or name in values:
            raise OptionError(f"--only must be like ring=8,checkpoint=full, every name once, got {text!r}")
        values[name] = int(value) if value.isdecimal() and len(value) < 10 else value
    try:
        Only.of(values, divides=divides)
    except ValueError as error:
        raise OptionError(f"--{error}") from error
    return values


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


def make_sequence(
    seq: str | int, batch: int, *, causal: bool, full: bool, window: int | None, documents: str | None, dtype: str
) -> SequenceShape:
    """The sequences.

    Args:
        seq: tokens, as :func:`wallfacer_dt.planning.units.parse_tokens` reads them, or read.
        batch: sequences.
        causal: a query sees the keys up to its own position.
        full: it sees all of them; one of the two was said.
        window: tokens that a query sees back and, if not causal, ahead; None for all.
        documents: their tokens, likewise, between commas; None for one.
        dtype: of activations.

    Returns:
        The shape.

    Raises:
        OptionError: it is none, or the mask was not said, or twice.
    """
    with naming("--seq"):
        length = parse_tokens(seq) if isinstance(seq, str) else seq
    if causal and full:
        raise OptionError("--causal and --full: a mask is one of them")
    if not (causal or full):
        raise OptionError(
            "the mask is missing: say --causal, as for a language model that predicts the next token, or --full, where "
            "every query sees every key; no model tells it, and what is planned and its code depend on it"
        )
    if window is not None:
        check_least("--window", window, 0)
    sees = None if window is None else (window, 0 if causal else window)
    with naming("--documents"):
        packed = () if documents is None else tuple(map(parse_tokens, documents.split(",")))
    with as_options():
        return SequenceShape(length, batch, causal, sees, getattr(torch, dtype), packed)


def check_size(model: ModelShape, sequence: SequenceShape, sequences: int = 1) -> None:
    """Refuse (OptionError) a step whose largest tensor nobody can count the bytes of; of so many batches."""
    widest = max(
        model.hidden,
        2 * model.heads * max(model.dims),
        model.ffn_units,
        model.ffn * (model.experts or 1),
        model.dense_ffn,
        model.vocab,
        model.layers,
    )
    if max(sequence.length * sequence.batch * sequences, model.hidden) * widest > _MOST_ELEMENTS:
        number, what = ("--sequences", "step") if sequences > 1 else ("--batch", "tensor")
        raise OptionError(f"--seq, {number} and the model's sizes: a {what} of more than 2^56 elements is not planned")
