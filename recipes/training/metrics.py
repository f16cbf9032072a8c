"""Every step's numbers while a run goes on: JSON lines, and for tensorboard."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from recipes.training.record import writing
from recipes.training.settings import Output, RecipeError

FILE, BOARD = "metrics.jsonl", "tensorboard"


def check_tensorboard(output: Output) -> None:
    """Refuse (RecipeError) metrics for tensorboard where it is not installed."""
    if output.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise RecipeError(
            "--tensorboard: the package tensorboard is not installed; install it, or leave the option out"
        )


class Metrics:
    """Numbers of each step, written on one rank as they come; where they cannot be, training goes on without them.

    Args:
        output: the folder, and whether tensorboard is to show them.
        made: those of the steps that were made already, which are written first, whatever is there of them.
        shown: whether this rank writes.
    """

    def __init__(self, output: Output, made: list[dict[str, float]], *, shown: bool) -> None:
        self._output, self._file, self._board = output, None, None
        self._failed: set[str] = set()
        if not shown:
            return
        with self._writing(FILE):
            self._file = (output.out / FILE).open("w")
        if output.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            # What a run before this one wrote is not shown: of steps that were made it is written anew.
            with self._writing(BOARD):
                self._board = SummaryWriter(str(output.out / BOARD), purge_step=1)
        for step, numbers in enumerate(made, 1):
            self.write(step, **numbers)

    def write(self, step: int, **numbers: float) -> None:
        """The numbers of a step, the first being 1."""
        if self._file is not None and FILE not in self._failed:
            with self._writing(FILE):
                print(json.dumps({"step": step, **numbers}), file=self._file, flush=True)
        if self._board is not None and BOARD not in self._failed:
            with self._writing(BOARD):
                for name, number in numbers.items():
                    self._board.add_scalar(name, number, step)

    @contextmanager
    def _writing(self, name: str) -> Iterator[None]:
        failures = self._output.failures
        before = len(failures)
        with writing(self._output, name):
            yield
        if len(failures) > before and name not in self._failed:
            self._failed.add(name)
            print(f"{failures[-1]}; training goes on without it", file=sys.stderr, flush=True)

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        # Which tries once more what could not be written.
        for name, each in ((FILE, self._file), (BOARD, self._board)):
            if each is not None:
                with self._writing(name):
                    each.close()
