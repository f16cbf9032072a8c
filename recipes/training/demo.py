"""The same training by several meshes, in processes of their own, compared."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from rich.console import Console

from recipes.training.command import spelled
from recipes.training.compare import compare
from recipes.training.picture import draw
from recipes.training.record import Run, make_folder, read_run, remove_earlier
from recipes.training.report import print_comparison, write_comparison
from recipes.training.settings import Demo, RecipeError, RunSettings

# torch's launcher gives its ranks 30 seconds to end before it kills them.
_GRACE_SECONDS = 40

# Four ranks and one process.
RUNS = {"ulysses": 1, "ring": 2, "team": 2}, {"ulysses": 1, "ring": 1, "team": 1}
_MIN_STEPS = 20
_ROOT = Path(__file__).resolve().parents[2]

S = TypeVar("S", bound=RunSettings)


class RunError(Exception):
    """A run did not end well; its own message is already on the terminal."""


def runs_of(settings: S, ways: Iterable[dict[str, Any]], check: Callable[[S, int], object]) -> list[S]:
    """Checked settings of runs, each with its own of them; a demo under torchrun, or of few steps, is refused.

    Args:
        settings: of all.
        ways: of each run what is its own, ulysses, ring and team among it.
        check: of a run on so many ranks.

    Raises:
        RecipeError: of whatever will not do.
    """
    if "RANK" in os.environ:
        raise RecipeError("demo starts its own ranks; run it with python, not with torchrun")
    if settings.steps < _MIN_STEPS:
        raise RecipeError(f"--steps must be at least {_MIN_STEPS} for runs to be compared, got {settings.steps}")
    runs = [replace(settings, **own) for own in ways]
    for run in runs:
        assert run.ring is not None
        check(run, run.ulysses * run.ring * run.team)
    return runs


def compare_runs(
    recipe: str, title: str, settings: Sequence[RunSettings], options: Demo, pictures: Sequence[str] = ()
) -> int:
    """Make the runs, print and write what they show.

    Args:
        recipe: the name of its package, such as "train_bytes".
        title: what is trained on, and for how long.
        settings: of each run, checked.
        options: where `run.json`, `curves.png` and a folder of each run go, and how long a run may take.
        pictures: that each run leaves in its folder, of which those of the first are named.

    Returns:
        Exit status: 0, or 1 if a run failed, losses differ, or bytes are not the formula's.

    Raises:
        RecipeError: the folder or the time will not do; raised before anything is started.
    """
    out = options.out
    if not 0 < options.timeout < math.inf:
        raise RecipeError(f"--timeout must be finite and above 0, got {options.timeout}")
    make_folder(out)
    for folder in (out, *(out / folder_of(each) for each in settings)):
        make_folder(folder)
        remove_earlier(folder)
    console = Console(highlight=False, soft_wrap=True)
    console.print(title, markup=False)
    try:
        with _stopped_like_ctrl_c():
            runs = [_run(recipe, each, out / folder_of(each), options.timeout) for each in settings]
    except RunError as failure:
        print(f"{recipe}: {failure}", file=sys.stderr)
        return 1
    comparison = compare(runs)
    print_comparison(console, runs, comparison)  # first: a disk may be full
    write_comparison(out / "run.json", runs, comparison)
    draw(out / "curves.png", runs, comparison)
    written = [out / "run.json", out / "curves.png", *(out / folder_of(settings[0]) / name for name in pictures)]
    console.print(f"Written: {', '.join(map(str, written))}", markup=False)
    return 1 if comparison.failures else 0


def folder_of(settings: RunSettings) -> str:
    """The folder of a run in that of its demo."""
    mesh = f"ulysses{settings.ulysses}_ring{settings.ring}_team{settings.team}"
    return "_".join([mesh, *(f"{option}-metp" for option in settings.metp)])


def _run(recipe: str, settings: RunSettings, out: Path, timeout: float) -> Run:
    """Train in processes of its own and read the record.

    Raises:
        RunError: the run ended with an error or not in time.
    """
    assert settings.ring is not None
    record = (out / "run.json").resolve()
    ranks = settings.ulysses * settings.ring * settings.team
    status = _finish(_start(_command(recipe, settings, ranks, record.parent)), timeout)
    if status is None:
        raise RunError(f"the run {out.name} took more than {timeout:g} seconds and was stopped")
    if status or not record.exists():
        raise RunError(f"the run {out.name} failed with exit status {status}; see above")
    return read_run(record)


def _command(recipe: str, settings: RunSettings, ranks: int, out: Path) -> list[str]:
    options = [f"--out={out}", *spelled(settings)]
    if ranks == 1:
        return [sys.executable, "-m", f"recipes.{recipe}", "train", *options]
    return [sys.executable, "-m", "recipes.training.launch", recipe, str(ranks), *options]


def _start(command: Sequence[str]) -> subprocess.Popen[bytes]:
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join([str(_ROOT), *filter(None, [environment.get("PYTHONPATH")])])
    # Threads that spin while they wait take the cores from the ranks they wait for.
    environment.setdefault("OMP_WAIT_POLICY", "passive")
    # Otherwise gloo looks for the address of the host's name, which need not be one.
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    # What a run prints at its end is in the tables too; its bar and its errors go to standard error.
    # In a session of its own, so that Ctrl-C reaches this process alone, which then stops the run.
    return subprocess.Popen(command, env=environment, start_new_session=True, stdout=subprocess.DEVNULL)


def _finish(process: subprocess.Popen[bytes], timeout: float) -> int | None:
    """Wait for a run; its exit status, or None if it took too long. Leaves nothing running."""
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        return None
    finally:
        _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def _stopped_like_ctrl_c() -> Generator[None, None, None]:
    """Let SIGTERM unwind as Ctrl-C does, so that a stopped demo stops its runs."""

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
