"""The same training on one process and on four ranks, compared, and what each draws at its end."""

from __future__ import annotations

from recipes.train_dit.settings import Settings, check_settings
from recipes.train_dit.sheets import Sheets
from recipes.training.demo import RUNS, compare_runs, runs_of
from recipes.training.settings import Demo


def demo(settings: Settings, options: Demo) -> int:
    """Make the runs; see `compare_runs`.

    Raises:
        RecipeError: sizes or folder will not do; raised before anything is started.
    """
    runs = runs_of(settings, RUNS, check_settings)
    title = (
        f"Training on {Sheets.source}: {len(runs)} runs of {settings.steps} steps,"
        f" {settings.batch} sheets of {settings.sequence:,} patches a step"
    )
    return compare_runs("train_dit", title, runs, options, ["samples.png"])
