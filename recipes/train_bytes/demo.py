"""The same training on three meshes of four ranks, with METP, and on one process, compared."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from recipes.train_bytes.compare import compare
from recipes.train_bytes.picture import draw
from recipes.train_bytes.record import Run, make_folder, read_run
from recipes.train_bytes.report import print_comparison, write_comparison
from recipes.train_bytes.settings import RecipeError, Settings, check_settings
from recipes.train_bytes.text import Text, check_long_enough, load_text

# Of each run what is its own; the second is one process with plain attention.
RUNS: tuple[dict[str, Any], ...] = (
    {"ulysses": 1, "ring": 2, "team": 2},
    {"ulysses": 1, "ring": 1, "team": 1},
    {"ulysses": 1, "ring": 4, "team": 1},
    {"ulysses": 2, "ring": 2, "team": 1},
    {"ulysses": 1, "ring": 2, "team": 2, "ffn": "metp", "attention": "metp"},
)

MIN_STEPS = 20

# torch's launcher gives its ranks 30 seconds to end before it kills them.
_GRACE_SECONDS = 40

_ROOT = Path(__file__).resolve().parents[2]


class RunError(Exception):
    """A run did not end well; its own message is already on the terminal."""


def demo(settings: Settings, out: Path, timeout: float) -> int:
    """Make the runs, print and write what they show.

    Args:
        settings: of all runs; ulysses, ring, team, ffn and attention are each run's own.
        out: folder for `run.json`, `curves.png` and a folder of each run.
        timeout: seconds after which a run is stopped.

    Returns:
        Exit status: 0, or 1 if a run failed, losses differ, or bytes are not the formula's.

    Raises:
        RecipeError: sizes, text or `out` will not do; raised before anything is started.
    """
    text = _check(settings)
    make_folder(out)
    console = Console(highlight=False, soft_wrap=True)
    console.print(
        f"Training on {text.source}: {len(RUNS)} runs of {settings.steps} steps,"
        f" {settings.batch * settings.sequence:,} bytes a step"
    )
    try:
        with _stopped_like_ctrl_c():
            runs = [_run(replace(settings, **own), out, timeout) for own in RUNS]
    except RunError as failure:
        print(f"train_bytes: {failure}", file=sys.stderr)
        return 1
    comparison = compare(runs)
    write_comparison(out / "run.json", runs, comparison)
    draw(out / "curves.png", runs, comparison)
    print_comparison(console, runs, comparison)
    console.print(f"Written: {out / 'run.json'}, {out / 'curves.png'}")
    return 1 if comparison.failures else 0


def _check(settings: Settings) -> Text:
    """Refuse what a run would refuse; returns the text."""
    if "RANK" in os.environ:
        raise RecipeError("demo starts its own ranks; run it with python, not with torchrun")
    if settings.steps < MIN_STEPS:
        raise RecipeError(f"--steps must be at least {MIN_STEPS} for runs to be compared, got {settings.steps}")
    for own in RUNS:
        check_settings(replace(settings, **own), own["ulysses"] * own["ring"] * own["team"])
    text = load_text(settings.text)
    check_long_enough(text, settings.sequence, settings.batch)
    return text


def _run(settings: Settings, out: Path, timeout: float) -> Run:
    """Train in processes of its own and read the record.

    Raises:
        RunError: the run ended with an error or not in time.
    """
    assert settings.ring is not None
    mesh = f"ulysses{settings.ulysses}_ring{settings.ring}_team{settings.team}"
    name = "_".join([mesh, *(f"{option}-metp" for option in settings.metp)])
    ranks = settings.ulysses * settings.ring * settings.team
    record = (out / name / "run.json").resolve()
    # What an earlier demo left must not pass for this one's.
    record.unlink(missing_ok=True)
    status = _finish(_start(_command(settings, ranks, record.parent)), timeout)
    if status is None:
        raise RunError(f"the run {name} took more than {timeout:g} seconds and was stopped")
    if status or not record.exists():
        raise RunError(f"the run {name} failed with exit status {status}; see above")
    return read_run(record)


def _command(settings: Settings, ranks: int, out: Path) -> list[str]:
    options = [f"--out={out}", *_options(settings)]
    if ranks == 1:
        return [sys.executable, "-m", "recipes.train_bytes", "train", *options]
    return [sys.executable, "-m", "recipes.train_bytes.launch", str(ranks), *options]


def _options(settings: Settings) -> Iterator[str]:
    """Settings as the command line spells them."""
    for field in fields(settings):
        value = getattr(settings, field.name)
        if field.name == "tied":
            yield "--tied" if value else "--untied"
        elif field.name == "text" and value is not None:
            yield f"--text={Path(value).resolve()}"
        elif value is not None:
            yield f"--{field.name.replace('_', '-')}={value}"


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
