"""The command line: `train` (also what options without a command mean) and `demo`."""

from __future__ import annotations

import sys
from pathlib import Path

from recipes.finetune_hf.settings import Settings, check_settings
from recipes.training.command import Data, Recipe
from recipes.training.settings import Launch


def _load(settings: Settings, launch: Launch) -> Data:
    check_settings(settings, launch.world)
    from recipes.finetune_hf.documents import PackedDocuments

    return PackedDocuments(settings)


main = Recipe(
    name="finetune_hf",
    settings=Settings,
    what="Train a model of transformers with each sequence shared by a (ulysses, ring, team) mesh of ranks.",
    example="--ring 4 --team 2 --model FOLDER --text FILE",
    out=(Path("runs/finetune_hf"), Path("runs/demo_hf")),
    compared="Train on one process and on four ranks as ring 2 x team 2, and compare.",
    load=_load,
).main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
