"""The bar that shows a run's progress."""

from __future__ import annotations

import math

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class Bar:
    """A run's progress, loss and speed, on the terminal of the rank that shows it."""

    def __init__(self, name: str, steps: int, made: int = 0, *, shown: bool) -> None:
        self._shown = shown
        self._console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description:<21}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:.4f}  {task.fields[speed]:>7,.0f} tokens/s"),
            TimeElapsedColumn(),
            console=self._console,
            disable=not shown,
        )
        self._task = self._progress.add_task(name, total=steps, completed=made, loss=math.nan, speed=0.0)

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
        # Into a file rich writes the finished bar alone, and leaves its line open.
        if self._shown and not self._console.is_terminal:
            self._console.line()

    def advance(self, loss: float, speed: float) -> None:
        """One more step: its loss, and its tokens per second over all ranks."""
        self._progress.update(self._task, advance=1, loss=loss, speed=speed)
