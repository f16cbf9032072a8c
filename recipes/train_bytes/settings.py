"""The options of this recipe, and every check of them that needs no process group, no text and no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from typer import Option

from recipes.training.settings import RecipeError, RunSettings, Weights, check_heads, check_run


@dataclass(frozen=True, kw_only=True)
class Settings(RunSettings):
    """One training run. Lengths in tokens (bytes of text); sizes of the model in elements.

    `ffn` and `attention` say whether every rank holds the weights of feed-forward and attention whole, or METP's part
    of them.
    """

    ffn: Annotated[Weights, Option(help="Feed-forward weights: whole on every rank, or shared by METP.")] = "plain"
    attention: Annotated[Weights, Option(help="Attention's projections: whole on every rank, or shared by METP.")] = (
        "plain"
    )
    sequence: Annotated[int, Option(help="Bytes in a sequence.")] = 4096
    dim: Annotated[int, Option(help="Width of the model.")] = 128
    layers: Annotated[int, Option(help="Transformer blocks.")] = 2
    heads: Annotated[int, Option(help="Query heads.")] = 4
    kv_heads: Annotated[int, Option(help="Key and value heads.")] = 2
    tied: Annotated[bool, Option("--tied/--untied", help="Use the embedding as the output head too.")] = False
    text: Annotated[
        str | None, Option(metavar="FILE", help="Train on this file instead of Python's standard library.")
    ] = None

    @property
    def head_dim(self) -> int:
        """Elements of one attention head."""
        return self.dim // self.heads


def check_settings(settings: Settings, world: int) -> None:
    """Refuse sizes that do not fit together or do not fit `world` ranks.

    Raises:
        RecipeError: one line naming the options at fault and what would do.
    """
    names = ("sequence", "dim", "layers", "heads", "kv_heads")
    check_run(settings, world, {name: getattr(settings, name) for name in names})
    if settings.dim % settings.heads:
        raise RecipeError(f"--dim {settings.dim} must be a multiple of --heads {settings.heads}")
    if settings.head_dim % 2:
        raise RecipeError(
            f"--dim {settings.dim} / --heads {settings.heads} = {settings.head_dim} elements a"
            " head, but rotary positions turn pairs of them: make it even"
        )
    if settings.heads % settings.kv_heads:
        raise RecipeError(f"--heads {settings.heads} must be a multiple of --kv-heads {settings.kv_heads}")
    check_heads(settings, settings.heads)
