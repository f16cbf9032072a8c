"""The same training on one process and on four ranks, compared."""

from __future__ import annotations

from dataclasses import replace

from recipes.finetune_hf.documents import PackedDocuments
from recipes.finetune_hf.settings import Settings, check_settings
from recipes.training.demo import check_steps, compare_runs
from recipes.training.settings import Demo

MIN_STEPS = 20


def demo(settings: Settings, options: Demo) -> int:
    """Make the runs; see `compare_runs`.

    Raises:
        RecipeError: sizes, model, text or folder will not do; raised before anything is started.
    """
    check_steps(settings, MIN_STEPS)
    runs = [replace(settings, ulysses=1, ring=2, team=2), replace(settings, ulysses=1, ring=1, team=1)]
    for run, world in zip(runs, (4, 1), strict=True):
        check_settings(run, world)
    documents = PackedDocuments(settings)
    title = (
        f"Training on {documents.source}: {len(runs)} runs of {settings.steps} steps,"
        f" {settings.batch * settings.sequence:,} tokens a step"
    )
    return compare_runs("finetune_hf", title, runs, options)
