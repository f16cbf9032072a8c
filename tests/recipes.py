"""Recipes' command lines on the ranks of a pool, and what runs leave."""

import importlib
import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from wallfacer_dt.testing import worst_error

SMALL = ["--sequence", "256", "--dim", "32", "--layers", "1", "--batch", "1", "--steps", "20"]


def recipe_on_rank(arguments: list[str], recipe: str = "train_bytes") -> int:
    """The command line on a rank of a pool, which has a process group; returns the exit status."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    with (
        mock.patch.dict(os.environ, place),
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "destroy_process_group"),
    ):
        return recipe_here(arguments, recipe)


def recipe_here(arguments: list[str], recipe: str = "train_bytes") -> int:
    """The command line in this process, whose threads stay as many as they are; returns the exit status."""
    with mock.patch.object(torch, "set_num_threads"):
        return importlib.import_module(f"recipes.{recipe}.__main__").main(arguments)


def run_in(folder: Path) -> dict[str, Any]:
    """What the run in a folder recorded."""
    return json.loads((folder / "run.json").read_text())["run"]


def losses(folder: Path) -> list[float]:
    """Of the run in a folder."""
    return run_in(folder)["losses"]


def check_trains_alike(folder: Path, of_one: Path) -> None:
    """Losses and norms of gradients are those of another run; AdamW and clipping hide from losses how these scale."""
    found, expected = run_in(folder), run_in(of_one)
    assert worst_error([(found["losses"], expected["losses"])]) <= 1e-6
    assert worst_error([(found["grad_norms"], expected["grad_norms"])], relative_to="each") <= 1e-5
