"""Whether the tests see what they are for: ``python -m tests.mutants`` breaks the code in one line after another.

``mutants.toml`` lists the lines and what they become, each with the tests that must fail then. Every mutant is applied
to a copy of the working tree; it dies if one of its tests fails, and survives if all pass. The same tests are first run
on the copy as it is, where all must pass.
"""

import os
import random
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Annotated

import typer
from rich.console import Console

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_name("mutants.toml")
NEEDED = 0.95  # of the mutants must die
LIMIT = 900  # seconds that a mutant's tests may take; whoever hangs longer has been noticed
DEAD, ALIVE, HUNG = "dead", "alive", "hung"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One line that is wrong.

    Attributes:
        name: what goes wrong.
        file: where, from the root.
        old: text that is there once.
        new: what it becomes.
        tests: arguments to pytest; one of these tests must fail.
        survives: why none of them does, for one that nothing can kill.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    survives: str = field(default="")

    def mutated(self, source: str) -> str:
        """The file's text with the line wrong, or a refusal (ValueError) where the text is not there once."""
        if source.count(self.old) != 1:
            raise ValueError(
                f"{self.name!r}: {self.file} must have {self.old!r} once, has it {source.count(self.old)} times"
            )
        return source.replace(self.old, self.new)


def listed() -> list[Mutant]:
    """All mutants of the list."""
    entries = tomllib.loads(LIST.read_text())["mutant"]
    return [Mutant(**entry | {"tests": tuple(entry["tests"])}) for entry in entries]


def copied(into: Path) -> Path:
    """A copy of the working tree: files that git knows or does not ignore."""
    asked = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(asked, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, into / name)
    return into


def outcome(copy: Path, tests: tuple[str, ...]) -> tuple[str, str]:
    """What became of a copy's tests, and what pytest said last."""
    # No bytecode: two versions of a file may be written within one tick of the clock.
    environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider"]
    command += ["--hypothesis-profile=mutants", *tests]
    try:
        run = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return HUNG, f"no answer within {LIMIT} s"
    lines = run.stdout.strip().splitlines() or [run.stderr]
    said = "; ".join([*[line for line in lines if line.startswith(("FAILED", "ERROR"))][:1], lines[-1]])
    if run.returncode not in (0, 1):  # 1: tests failed; anything else: none was found, or could be imported
        raise RuntimeError(f"pytest {' '.join(tests)} exited with {run.returncode}:\n{run.stdout}{run.stderr}")
    return ALIVE if run.returncode == 0 else DEAD, said


def tried(mutant: Mutant, copy: Path) -> tuple[str, str]:
    """What becomes of a mutant; the copy is afterwards as it was."""
    path = copy / mutant.file
    source = path.read_text()
    path.write_text(mutant.mutated(source))
    try:
        return outcome(copy, mutant.tests)
    finally:
        path.write_text(source)


def main(
    sample: Annotated[int, typer.Option(help="Try only so many, drawn at random.")] = 0,
    seed: Annotated[int, typer.Option(help="Of the draw.")] = 0,
    only: Annotated[str, typer.Option(help="Try those that have this in their name, or file.")] = "",
    jobs: Annotated[int, typer.Option(help="Mutants at a time.")] = 2,
) -> None:
    """Break the code in one line after another, and see tests fail."""
    console = Console()
    mutants = [mutant for mutant in listed() if only in mutant.name or only in mutant.file]
    for mutant in mutants:
        mutant.mutated((ROOT / mutant.file).read_text())  # all of them are still lines of the code
    if sample:
        mutants = random.Random(seed).sample(mutants, min(sample, len(mutants)))
    if not mutants:
        raise typer.BadParameter("no mutant has this in its name")
    with tempfile.TemporaryDirectory() as folder:
        copies: SimpleQueue[Path] = SimpleQueue()
        for job in range(jobs):
            copies.put(copied(Path(folder) / str(job)))
        tests = tuple(sorted({test for mutant in mutants for test in mutant.tests}))
        console.print(f"{len(mutants)} mutants; first their {len(tests)} tests, on the code as it is ...")
        first = copies.get()
        whole, said = outcome(first, tests)
        copies.put(first)
        if whole != ALIVE:
            console.print(f"these do not pass without a mutant: {said}", style="red")
            raise typer.Exit(2)

        def judged(mutant: Mutant) -> tuple[Mutant, str]:
            copy = copies.get()
            try:
                became, said = tried(mutant, copy)
            finally:
                copies.put(copy)
            console.print(f"{became:6}{mutant.name}  ({mutant.file}): {said}", style="red" if became == ALIVE else "")
            return mutant, became

        with ThreadPoolExecutor(jobs) as pool:
            results = list(pool.map(judged, mutants))
    count = Counter(became for _, became in results)
    died = len(results) - count[ALIVE]
    console.print(f"{died} of {len(results)} died ({died / len(results):.1%}), {count[HUNG]} of them by hanging")
    unexplained = [mutant.name for mutant, became in results if became == ALIVE and not mutant.survives]
    for mutant, became in results:
        if became == ALIVE:
            console.print(f"survives: {mutant.name}: {mutant.survives or 'unexplained'}")
        elif mutant.survives:
            console.print(f"said to survive, but died: {mutant.name}", style="red")
    raise typer.Exit(1 if unexplained or died < NEEDED * len(results) else 0)


if __name__ == "__main__":
    typer.run(main)
