"""The same training on three meshes of four ranks, with METP, and on one process, compared."""

from __future__ import annotations

from typing import Any

from recipes.train_bytes.settings import Settings, check_settings
from recipes.training.demo import compare_runs, runs_of
from recipes.training.settings import Demo
from recipes.training.text import check_long_enough, load_text

# Of each run what is its own; the second is one process with plain attention.
RUNS: tuple[dict[str, Any], ...] = (
    {"ulysses": 1, "ring": 2, "team": 2},
    {"ulysses": 1, "ring": 1, "team": 1},
    {"ulysses": 1, "ring": 4, "team": 1},
    {"ulysses": 2, "ring": 2, "team": 1},
    {"ulysses": 1, "ring": 2, "team": 2, "ffn": "metp", "attention": "metp"},
)


def demo(settings: Settings, options: Demo) -> int:
    """Make the runs; see `compare_runs`. Of settings ulysses, ring, team, ffn and attention are each run's own.

    Raises:
        RecipeError: sizes, text or folder will not do; raised before anything is started.
    """
    runs = runs_of(settings, RUNS, check_settings)
    text = load_text(settings.text)
    check_long_enough(text, settings.sequence, settings.batch)
    title = (
        f"Training on {text.source}: {len(RUNS)} runs of {settings.steps} steps,"
        f" {settings.batch * settings.sequence:,} bytes a step"
    )
    return compare_runs("train_bytes", title, runs, options)
