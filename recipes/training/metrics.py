"""Every step's numbers while a run goes on: JSON lines, and for tensorboard."""

from __future__ import annotations

import importlib.util
import json
from types import TracebackType

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
        made: those of the steps that were made already, which the file is to have too, whatever it has.
        shown: whether this rank writes.
    """

    def __init__(self, output: Output, made: list[dict[str, float]], *, shown: bool) -> None:
        self._file, self._board = None, None
        if not shown:
            return
        self._file = (output.out / FILE).open("w")
        for step, numbers in enumerate(made, 1):
            self.write(step, **numbers)
        if output.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            # What a run before this one wrote of later steps is not shown.
            self._board = SummaryWriter(str(output.out / "tensorboard"), purge_step=len(made) + 1)

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
