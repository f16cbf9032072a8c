"""The options of this recipe, and every check of them that needs no process group and no torch."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option

from recipes.training.settings import KEYWORDS, RecipeError, RunSettings, check_heads, check_run
from wallfacer_dt.layout import shard_sizes

BYTES = KEYWORDS["tokenizer"]  # in place of a folder
RANDOM = {"dim": 64, "layers": 2, "heads": 4, "kv_heads": 2}  # of the model that is made where none is named


@dataclass(frozen=True, kw_only=True)
class Settings(RunSettings):
    """One training run. Lengths in tokens; sizes, in elements, of the model that is made, None where one is named."""

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
    dim: Annotated[int | None, Option(help=f"Width of the random model. [default: {RANDOM['dim']}]")] = None
    layers: Annotated[int | None, Option(help=f"Its transformer blocks. [default: {RANDOM['layers']}]")] = None
    heads: Annotated[int | None, Option(help=f"Its query heads. [default: {RANDOM['heads']}]")] = None
    kv_heads: Annotated[int | None, Option(help=f"Its key and value heads. [default: {RANDOM['kv_heads']}]")] = None
    lr: Annotated[float, Option(help="Peak learning rate.")] = 3e-3

    def __post_init__(self) -> None:
        for name, size in RANDOM.items():
            if self.model is None and getattr(self, name) is None:
                object.__setattr__(self, name, size)


def check_settings(settings: Settings, world: int) -> None:
    """Refuse sizes that do not fit together or do not fit `world` ranks, and folders that are none.

    Raises:
        RecipeError: one line naming the options at fault and what would do.
    """
    told = {name: size for name in RANDOM if (size := getattr(settings, name)) is not None}
    sizes = check_run(settings, world, {"sequence": settings.sequence} | told)
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
        for name, size in told.items():
            raise RecipeError(
                f"--{name.replace('_', '-')} {size} is of the random model, but --model has sizes of its own: leave one"
                " of them out"
            )
        return
    dim, heads, kv_heads = told["dim"], told["heads"], told["kv_heads"]
    if dim % (2 * heads):
        raise RecipeError(f"--dim {dim} must be a multiple of twice --heads {heads}")
    if heads % kv_heads:
        raise RecipeError(f"--heads {heads} must be a multiple of --kv-heads {kv_heads}")
    check_heads(settings, heads)
