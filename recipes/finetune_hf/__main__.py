"""The command line: `train` (also what options without a command mean) and `demo`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from recipes.finetune_hf.settings import Settings, check_settings
from recipes.training.command import as_command, new_app, run
from recipes.training.settings import DEMO_WITHOUT, Demo, Launch, Output, Saving, check_saving

app = new_app("Train a model of transformers with each sequence shared by a (ulysses, ring, team) mesh of ranks.")


def train_command(settings: Settings, saving: Saving, output: Output) -> None:
    """Train on the ranks that torchrun started, or on this process alone.

    \b
    torchrun --nproc-per-node 8 -m recipes.finetune_hf train --ring 4 --team 2 --model FOLDER --text FILE
    """
    launch = Launch.from_environment()
    # Before the imports below, which take seconds: what is plainly wrong should be said at once.
    check_settings(settings, launch.world)
    check_saving(saving)
    from recipes.training.metrics import check_tensorboard
    from recipes.training.record import make_folders

    check_tensorboard(output)
    make_folders(output.out, saving.checkpoint, launch)
    from recipes.finetune_hf.documents import PackedDocuments
    from recipes.finetune_hf.train import train
    from recipes.training.report import leave_behind

    leave_behind(train(settings, launch, PackedDocuments(settings), saving, output), output.out, launch)


def demo_command(settings: Settings, demo_options: Demo) -> int:
    """Train on one process and on four ranks as ring 2 x team 2, and compare."""
    from recipes.finetune_hf.demo import demo

    # Runs are compared to 1e-4, on GPUs too.
    return demo(replace(settings, dtype="float32"), demo_options)


app.command("train")(as_command(train_command, Settings, Saving, Output, out=Path("runs/finetune_hf")))
app.command("demo")(as_command(demo_command, Settings, Demo, without=DEMO_WITHOUT, out=Path("runs/demo_hf")))


def main(arguments: Sequence[str]) -> int:
    """Run the command line; returns the exit status, 2 for anything the caller must change."""
    return run(app, "finetune_hf", arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
