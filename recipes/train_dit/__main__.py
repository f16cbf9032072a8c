"""The command line: `train` (also what options without a command mean) and `demo`."""

from __future__ import annotations

import sys
from pathlib import Path

from recipes.train_dit.settings import Settings, check_settings
from recipes.training.command import Data, Recipe
from recipes.training.settings import Launch


def _load(settings: Settings, launch: Launch) -> Data:
    check_settings(settings, launch.world)
    from recipes.train_dit.sheets import Sheets

    return Sheets(settings)


main = Recipe(
    name="train_dit",
    settings=Settings,
    what="Train a diffusion transformer with each picture shared by a (ulysses, ring, team) mesh of ranks.",
    example="--ring 4 --team 2 --sheet 16",
    out=(Path("runs/train_dit"), Path("runs/demo_dit")),
    compared="Train on one process and on four ranks as ring 2 x team 2, and compare; each run makes pictures.",
    load=_load,
).main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
