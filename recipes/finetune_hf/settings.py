"""The options of this recipe, and every check of them that needs no process group and no torch."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option

from recipes.training.settings import RecipeError, RunSettings, check_heads, check_run
from wallfacer_dt.layout import shard_sizes

BYTES = "bytes"  # in place of a tokenizer's folder


@dataclass(frozen=True, kw_only=True)
class Settings(RunSettings):
    """One training run. Lengths in tokens; sizes, in elements, of the model that is made where none is named."""

    sequence: Annotated[int, Option(help="Tokens in a sequence, of several documents.")] = 1024
    model: Annotated[
        str | None, Option(metavar="FOLDER", help="A model saved by transformers. [default: a small random Llama]")
    ] = None
    tokenizer: Annotated[
        str | None,
        Option(metavar="FOLDER|bytes", help="A tokenizer, or bytes as they are. [default: the model's, else bytes]"),
    ] = None
    text: Annotated[
        str | None, Option(metavar="FILE", help="Train on this file instead of Python's standard library.")
    ] = None
    dim: Annotated[int, Option(help="Width of the random model.")] = 64
    layers: Annotated[int, Option(help="Its transformer blocks.")] = 2
    heads: Annotated[int, Option(help="Its query heads.")] = 4
    kv_heads: Annotated[int, Option(help="Its key and value heads.")] = 2
    lr: Annotated[float, Option(help="Peak learning rate.")] = 3e-3


def check_settings(settings: Settings, world: int) -> None:
    """Refuse sizes that do not fit together or do not fit `world` ranks, and folders that are none.

    Raises:
        RecipeError: one line naming the options at fault and what would do.
    """
    names = ("sequence", "dim", "layers", "heads", "kv_heads")
    sizes = check_run(settings, world, {name: getattr(settings, name) for name in names})
    if settings.sequence < 2:
        raise RecipeError(f"--sequence must be at least 2, a token and the next, got {settings.sequence}")
    if 0 in shard_sizes(settings.sequence, sizes):
        raise RecipeError(
            f"--sequence {settings.sequence} leaves one of the {math.prod(sizes)} ranks that share it without a token:"
            f" take a multiple of {math.prod(sizes)}"
        )
    if importlib.util.find_spec("transformers") is None:
        raise RecipeError(
            "finetune_hf needs transformers, which is not installed: pip install 'wallfacer-dt[transformers]'"
        )
    for name in ("model", "tokenizer"):
        folder = getattr(settings, name)
        # A name that is no folder would be looked for on the internet.
        if folder not in (None, BYTES) and not Path(folder).is_dir():
            raise RecipeError(f"--{name}: {folder} is not a folder")
    if settings.model is not None:
        return
    if settings.dim % (2 * settings.heads):
        raise RecipeError(f"--dim {settings.dim} must be a multiple of twice --heads {settings.heads}")
    if settings.heads % settings.kv_heads:
        raise RecipeError(f"--heads {settings.heads} must be a multiple of --kv-heads {settings.kv_heads}")
    check_heads(settings, settings.heads)
