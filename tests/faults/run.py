"""Provoking a fault of a recipe under torchrun, and what comes of it."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

from recipes.benchmarks.cluster.cases import Machines
from recipes.benchmarks.cluster.watcher import environment
from tests.machines import Site, site

ROOT = Path(__file__).parents[2]
RANKS, STRUCK_RANK, STRUCK_STEP, STEPS = 4, 2, 5, 8
# Seconds that ranks wait for each other, and after which a run is taken for one that hangs.
PATIENCE, HANGS = 10, 300
# Mbit/s of a machine's link, and of one that is slowed to a hundredth.
FAST, SLOW = 100.0, 1.0
RECIPES = {
    "train_bytes": (
        *("--sequence", "256", "--dim", "32", "--layers", "2", "--heads", "4", "--kv-heads", "2", "--batch", "1"),
        *("--text", str(ROOT / "LICENSE")),
    ),
    "train_dit": (
        *("--sheet", "1", "--patch", "2", "--dim", "16", "--heads", "2", "--layers", "2", "--batch", "2"),
        *("--sample-steps", "2"),
    ),
    "finetune_hf": (
        *("--sequence", "130", "--dim", "16", "--layers", "2", "--heads", "2", "--kv-heads", "1", "--batch", "2"),
        *("--text", str(ROOT / "LICENSE")),
    ),
}
"""Options of recipes that are small."""
_TELLS = re.compile(
    r"rank \d of 4, step \d of 8|step \d: loss|must be the same on every rank|could not be written"
    r"|on rank \d, .* on rank 0"
)
_RESUMED = re.compile(r"going on from step (\d+) ")


@dataclass(frozen=True)
class Outcome:
    """What came of a run.

    Attributes:
        status: of the last launcher; None if it had to be stopped.
        said: by all, in lines.
        seconds: from the fault to the first line that tells of it; None where none does.
        message: that line, with the one before it if that says what went wrong.
        resumed: the steps from which later attempts went on.
        losses: of the whole run, if it came to its end.
    """

    status: int | None
    said: tuple[str, ...]
    seconds: float | None
    message: str
    resumed: tuple[int, ...]
    losses: tuple[float, ...]


def provoke(recipe: str, fault: str, folder: Path, *, restarts: int = 1, rank: int = STRUCK_RANK) -> Outcome:
    """Have one rank of a run have a fault, and torchrun start all of them again.

    Args:
        recipe: the name of its package.
        fault: one of :data:`tests.faults.faulty.FAULTS`, or none.
        folder: empty, for whatever the run leaves.
        restarts: that torchrun may make.
        rank: which one.
    """
    launcher = ["--standalone", f"--nproc-per-node={RANKS}", f"--max-restarts={restarts}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *launcher, "-m", *_command(recipe, fault, folder, rank)],
        cwd=ROOT, env=_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace",
        start_new_session=True,
    )  # fmt: skip
    heard: list[tuple[float, str]] = []
    reader = threading.Thread(target=_read, args=(process, heard), daemon=True)
    reader.start()
    try:
        status: int | None = process.wait(HANGS)
    except subprocess.TimeoutExpired:
        status = None
    finally:
        _end(process)
    reader.join(10)
    return _outcome(status, heard, folder)


def fill_the_disk(recipe: str, folder: Path) -> Outcome:
    """Have no room for a checkpoint, on a disk of its own, until the run is started again."""
    (folder / "kept").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "none", str(folder / "kept")], check=True)
    try:
        return provoke(recipe, "the disk fills up", folder)
    finally:
        subprocess.run(["umount", str(folder / "kept")], check=True)


def cut_a_link(recipe: str, folder: Path) -> Outcome:
    """Unplug one of four machines; plugged in again, the run is started on all by hand."""
    with _on_machines(recipe, folder) as (machines, heard):
        machines.cut(STRUCK_RANK)
        # All that are not cut off say so.
        machines.wait_for(lambda: sum(bool(_TELLS.search(line)) for _, line in heard.so_far()) >= RANKS - 1)
        for machine in range(RANKS):
            machines.lose(machine)
        machines.mend(STRUCK_RANK)
        _start(machines, recipe, "none", folder)
        return _ended(machines, heard, folder)


def slow_a_link(recipe: str, folder: Path) -> Outcome:
    """Slow one of four machines' links to a hundredth."""
    with _on_machines(recipe, folder) as (machines, heard):
        machines.slow(STRUCK_RANK, SLOW)
        return _ended(machines, heard, folder)


@contextmanager
def _on_machines(recipe: str, folder: Path) -> "Iterator[tuple[Site, _Heard]]":
    """A run on four of them which has come to the step at which something is to happen."""
    with site(Machines(RANKS, 1, (FAST,) * RANKS), "wffault", folder) as machines:
        _start(machines, recipe, "begins", folder)
        heard = _Heard(folder)
        machines.wait_for((folder / "struck").exists)
        yield machines, heard


def _start(machines: Site, recipe: str, fault: str, folder: Path) -> None:
    for machine in range(RANKS):
        machines.torchrun(machine, [], _command(recipe, fault, folder))


def _ended(machines: Site, heard: "_Heard", folder: Path) -> Outcome:
    return _outcome(next(filter(None, machines.ended().values()), 0), heard.so_far(), folder)


class _Heard:
    """What machines say, and when it was heard."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lines: dict[Path, list[tuple[float, str]]] = {}

    def so_far(self) -> list[tuple[float, str]]:
        """All lines, by the time at which they were first seen here."""
        now = time.time()
        for path in self._folder.glob("machine*"):
            known = self._lines.setdefault(path, [])
            known += [(now, line) for line in path.read_text(errors="replace").splitlines()[len(known) :]]
        # In the order of each machine where they were seen together.
        return sorted((line for lines in self._lines.values() for line in lines), key=itemgetter(0))


def _command(recipe: str, fault: str, folder: Path, rank: int = STRUCK_RANK) -> list[str]:
    return [
        "tests.faults.faulty", recipe, fault, str(rank), str(STRUCK_STEP), str(folder),
        *RECIPES[recipe], "--ring", "2", "--team", "2", "--steps", str(STEPS), "--comm-timeout", str(PATIENCE),
        "--out", str(folder / "out"), "--checkpoint", str(folder / "kept"), "--save-every", "2", "--keep", "9",
        "--resume",
    ]  # fmt: skip


def _environment() -> dict[str, str]:
    return environment() | {
        "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }  # fmt: skip


def _read(process: subprocess.Popen[str], heard: list[tuple[float, str]]) -> None:
    assert process.stderr is not None
    with process.stderr as lines:
        for line in lines:
            heard.append((time.time(), line.rstrip()))


def _end(process: subprocess.Popen[str]) -> None:
    """Kill what is left of a launcher, whose ranks have sessions of their own."""
    if process.poll() is not None:
        return
    ranks = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=False)
    for pid in (*map(int, ranks.stdout.split()), process.pid):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def _outcome(status: int | None, heard: Iterable[tuple[float, str]], folder: Path) -> Outcome:
    struck, record = folder / "struck", folder / "out" / "run.json"
    when = float(struck.read_text()) if struck.exists() else None
    times, lines = zip(*heard, strict=True) if heard else ((), ())
    told = next((i for i, line in enumerate(lines) if _TELLS.search(line)), None)
    message, seconds = "", None
    if told is not None:
        # A note stands below the error that it is about.
        message = f"{lines[told - 1]} ({lines[told]})" if lines[told].startswith("rank ") else lines[told]
        seconds = None if when is None else max(0.0, times[told] - when)
    losses = tuple(json.loads(record.read_text())["run"]["losses"]) if record.exists() else ()
    resumed = tuple(int(found[1]) for line in lines if (found := _RESUMED.match(line)))
    return Outcome(status, lines, seconds, message, resumed, losses)
