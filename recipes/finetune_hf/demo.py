"""The same training on one process and on four ranks, compared."""

from __future__ import annotations

from recipes.finetune_hf.documents import PackedDocuments
from recipes.finetune_hf.settings import Settings, check_settings
from recipes.training.demo import RUNS, compare_runs, runs_of
from recipes.training.settings import Demo


def demo(settings: Settings, options: Demo) -> int:
    """Make the runs; see `compare_runs`.

    Raises:
        RecipeError: sizes, model, text or folder will not do; raised before anything is started.
    """
    runs = runs_of(settings, RUNS, check_settings)
    documents = PackedDocuments(settings)
    title = (
        f"Training on {documents.source}: {len(runs)} runs of {settings.steps} steps,"
        f" {settings.batch * settings.sequence:,} tokens a step"
    )
    return compare_runs("finetune_hf", title, runs, options)
