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
    """What an earlier part of this run wrote; its last line may have been cut short."""
    if not step or not path.exists():
        return []
    whole = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("}\n")]
    return [line for line in whole if _step_of(line) <= step]


def _step_of(line: str) -> int:
    fields: dict[str, Any] = json.loads(line)
    return fields["step"]
