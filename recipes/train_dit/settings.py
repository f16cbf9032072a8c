"""The options of this recipe, and every check of them that needs no process group and no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from typer import Option

from recipes.training.settings import RecipeError, RunSettings, Weights, check_heads, check_run

CELL = 10  # pixels of a digit and of the border round it
SHEETS = 2**16  # of an epoch


@dataclass(frozen=True, kw_only=True)
class Settings(RunSettings):
    """One training run. A sequence is a sheet of `sheet` x `sheet` digits, in patches of `patch` x `patch` pixels."""

    ffn: Annotated[Weights, Option(help="Feed-forward weights: whole on every rank, or shared by METP.")] = "plain"
    sheet: Annotated[int, Option(help="Digits in a row, and in a column, of a sheet.")] = 4
    patch: Annotated[int, Option(help="Pixels in a row, and in a column, of a patch.")] = 2
    dim: Annotated[int, Option(help="Width of the model.")] = 64
    layers: Annotated[int, Option(help="Transformer blocks.")] = 3
    heads: Annotated[int, Option(help="Heads of attention.")] = 4
    batch: Annotated[int, Option(help="Sheets in a step of a data-parallel group.")] = 4
    steps: Annotated[int, Option(help="Optimiser steps.")] = 300
    lr: Annotated[float, Option(help="Peak learning rate.")] = 6e-3

    sample_steps: Annotated[int, Option(help="Steps from noise to a picture, at the end.")] = 50

    @property
    def side(self) -> int:
        """Patches in a row of a sheet."""
        return self.sheet * CELL // self.patch

    @property
    def sequence(self) -> int:
        """Patches of a sheet."""
        return self.side**2


def check_settings(settings: Settings, world: int) -> None:
    """Refuse sizes that do not fit together or do not fit `world` ranks.

    Raises:
        RecipeError: one line naming the options at fault and what would do.
    """
    names = ("sheet", "patch", "dim", "layers", "heads", "sample_steps")
    check_run(settings, world, {name: getattr(settings, name) for name in names})
    if settings.samples > SHEETS:
        raise RecipeError(
            f"--batch x --data-parallel must be at most {SHEETS}, the sheets of an epoch, got {settings.samples}"
        )
    if CELL % settings.patch:
        raise RecipeError(f"--patch {settings.patch} must divide the {CELL} pixels of a digit with its border")
    if settings.dim % (2 * settings.heads):
        raise RecipeError(f"--dim {settings.dim} must be a multiple of twice --heads {settings.heads}")
    check_heads(settings, settings.heads)
