"""The command line: `train` (also what options without a command mean) and `demo`."""

from __future__ import annotations

import sys
from pathlib import Path

from recipes.train_bytes.settings import Settings, check_settings
from recipes.training.command import Data, Recipe
from recipes.training.settings import Launch


def _load(settings: Settings, launch: Launch) -> Data:
    check_settings(settings, launch.world)
    from recipes.training.text import check_long_enough, load_text

    text = load_text(settings.text)
    check_long_enough(text, settings.sequence, settings.batch * settings.data_parallel)
    return text


main = Recipe(
    name="train_bytes",
    settings=Settings,
    what="Train a byte-level GPT with each sequence shared by a (ulysses, ring, team) mesh of ranks.",
    example="--ring 4 --team 2",
    out=(Path("runs/train"), Path("runs/demo")),
    compared=(
        "Train on one process, on four ranks as ring 2 x team 2, with METP too, ring of 4, ulysses 2 x ring 2; compare."
    ),
    load=_load,
).main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
