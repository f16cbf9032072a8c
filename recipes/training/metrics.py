"""Every step's numbers while a run goes on: JSON lines, and for tensorboard."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import TracebackType
from typing import Any

from recipes.training.settings import Output, RecipeError

FILE = "metrics.jsonl"


def check_tensorboard(output: Output) -> None:
    """Refuse (RecipeError) metrics for tensorboard where it is not installed."""
    if output.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise RecipeError(
            "--tensorboard: the package tensorboard is not installed; install it, or leave the option out"
        )


class Metrics:
    """Numbers of each step, written on one rank as they come.

    Args:
        output: the folder, and whether tensorboard is to show them.
        step: steps made already, of which what was written is kept; of later ones it is not.
        shown: whether this rank writes.
    """

    def __init__(self, output: Output, step: int, *, shown: bool) -> None:
        self._file, self._board = None, None
        if not shown:
            return
        path = output.out / FILE
        lines = _lines_until(path, step)
        self._file = path.open("w")
        self._file.writelines(lines)
        if output.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            # What a run before this one wrote of later steps is not shown.
            self._board = SummaryWriter(str(output.out / "tensorboard"), purge_step=step + 1)

    def write(self, step: int, **numbers: float) -> None:
        """The numbers of a step, the first being 1."""
        if self._file is not None:
            print(json.dumps({"step": step, **numbers}), file=self._file, flush=True)
        if self._board is not None:
            for name, number in numbers.items():
                self._board.add_scalar(name, number, step)

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()


def _lines_until(path: Path, step: int) -> list[str]:
    """What an earlier part of this run wrote, but for lines that were cut short or damaged."""
    if not step or not path.exists():
        return []
    lines = path.read_text(errors="replace").splitlines()
    return [f"{line}\n" for line in lines if 0 < _step_of(line) <= step]


def _step_of(line: str) -> int:
    """0 of a line that is none of ours."""
    try:
        step: Any = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return 0
    return step if type(step) is int else 0
