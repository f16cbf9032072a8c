"""Reports: people write the text of a page, and a program the tables and pictures beneath it."""

import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch

from wallfacer_dt.reading import read_bytes

_MOST_BYTES = 2**22
K, MIB, GIB = 2**10, 2**20, 2**30
GB = 10**9


@dataclass(frozen=True, slots=True)
class Table:
    """Cells by row, of which the first is text and the others are numbers; a note stands under the title."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def markdown(self) -> str:
        """As Markdown."""
        ruler = ["---"] + ["---:"] * (len(self.head) - 1)
        lines = [f"| {' | '.join(cells)} |" for cells in (self.head, ruler, *self.rows)]
        return "\n".join([f"## {self.title}", "", *([self.note, ""] if self.note else []), *lines])


def write(page: Path, command: str, parts: Iterable[Table | str]) -> None:
    """Write what a module finds under a page's text, which stays, once all is there; no text is a ValueError before."""
    mark = f"<!-- What follows is made by python -m {command} -->"
    text = read_bytes(page, _MOST_BYTES).decode().partition(mark)[0] if page.exists() else f"# {page.stem}\n\n"
    start, at = time.perf_counter(), commit(page)  # at which this began
    made = []
    for part in parts:
        made.append(part.markdown() if isinstance(part, Table) else part)
        print(f"{time.perf_counter() - start:5.0f} s  {made[-1].splitlines()[0]}", flush=True)
    took = f"{time.perf_counter() - start:.0f} s"
    found = f"{date.today()}, commit {at}, {machine()}; made in {took} by `python -m {command}`."
    page.write_text("\n\n".join([text + mark, found, *made]) + "\n")


def run(name: str, parts: Callable[[Path], Iterable[Table | str]]) -> None:
    """The command line of one of this package's modules: its page, of parts that are given the page's folder."""
    import typer

    def main(page: Path = Path(f"docs/benchmarks/{name}.md")) -> None:
        """Write what is found into the page, and pictures beside it."""
        write(page, f"recipes.benchmarks.{name}", parts(page.parent))

    typer.run(main)


def commit(page: Path | None = None) -> str:
    """The commit of this checkout, marked where more has changes than a page and what is beside it under its name."""

    def git(*words: str) -> list[str]:
        return subprocess.run(["git", *words], capture_output=True, text=True, check=False).stdout.splitlines()

    own = tuple(f"{page.parent.resolve() / page.stem}{end}" for end in "._") if page else ()
    top, at = git("rev-parse", "--show-toplevel"), git("describe", "--always") or ["unknown"]
    others = any(not f"{Path(*top, name).resolve()}".startswith(own) for name in git("diff", "--name-only", "HEAD"))
    return at[0] + "-dirty" * others


def machine() -> str:
    """Versions and cores, in words."""
    return f"torch {torch.__version__}, {os.cpu_count()} {platform.machine()} cores"
