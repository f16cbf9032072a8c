"""Provoking a fault of a recipe under torchrun, or its agent, and what comes of it."""

import atexit
import importlib
import json
import multiprocessing as mp
import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any
from unittest import mock

from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.multiprocessing.spawn import ProcessContext

from recipes.benchmarks.cluster.cases import Machines
from recipes.benchmarks.cluster.watcher import environment
from tests.faults import faulty
from tests.machines import Site, site
from wallfacer_dt.testing.pool import fork_server

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
# Seconds that ranks have to say that they wait for one that is gone, before the agent ends them; it would look after a
# tenth, which is too soon where the machine is busy.
_MONITORED = 1.5
# What recipes import once they run.
_IMPORTED_LATE = {"train_dit": ("sklearn.datasets",)}
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


def provoke(
    recipe: str, fault: str, folder: Path, *, restarts: int = 1, rank: int = STRUCK_RANK, forks: bool = True
) -> Outcome:
    """Have one rank of a run have a fault, and torchrun's agent start all of them again.

    Args:
        recipe: the name of its package.
        fault: one of :data:`tests.faults.faulty.FAULTS`, or none.
        folder: empty, for whatever the run leaves.
        restarts: that the agent may make.
        rank: which one.
        forks: ranks are forks of the agent, which has imported the recipe; otherwise processes that torchrun starts.
    """
    command = _command(recipe, fault, folder, rank)
    given = (command, restarts, folder / "machine", environment(), forks)
    launcher = fork_server().Process(target=_launch, args=given)
    launcher.start()
    heard, deadline = _Heard(folder), time.monotonic() + HANGS
    try:
        while launcher.is_alive() and time.monotonic() < deadline:
            launcher.join(0.05)
            heard.so_far()
        status = launcher.exitcode
    finally:
        if launcher.is_alive():  # which ends its ranks, of which those that torchrun has started are in no group of it
            launcher.terminate()
            launcher.join(40)
        with suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)
        launcher.kill()
        launcher.join(10)
    return _outcome(status, heard.so_far(ended=True), folder)


def _launch(command: list[str], restarts: int, said: Path, variables: dict[str, str], forks: bool) -> None:
    """What torchrun does, or it itself. Forks of this process need not import anything again."""
    os.setsid()
    os.chdir(ROOT)
    with said.open("wb") as file, open(os.devnull, "wb") as nowhere:
        os.dup2(file.fileno(), sys.stderr.fileno())
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
    os.environ.clear()
    os.environ |= variables | {
        "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }  # fmt: skip
    if not forks:
        given = f"--nproc-per-node={RANKS}", f"--max-restarts={restarts}", f"--monitor-interval={_MONITORED}"
        launcher = ["--standalone", *given]
        os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", *launcher, "-m", *command])
    threading.Thread(target=_end_with_parent, daemon=True).start()
    recipe = command[1]
    late = "pydantic.type_adapter", *_IMPORTED_LATE.get(recipe, ())
    for name in (f"recipes.{recipe}.__main__", f"recipes.{recipe}.train", *late):
        importlib.import_module(name)
    config = LaunchConfig(
        1, 1, RANKS, run_id=str(uuid.uuid4()), rdzv_backend="c10d", rdzv_endpoint="localhost:0",
        max_restarts=restarts, start_method="fork",
    )  # fmt: skip
    join = ProcessContext.join

    def join_later(self: ProcessContext, *args: Any, **options: Any) -> bool:
        """Which ends the other ranks if one has failed."""
        if any(process.exitcode for process in self.processes):
            time.sleep(_MONITORED)
        return join(self, *args, **options)

    with mock.patch.object(ProcessContext, "join", join_later):
        elastic_launch(config, _be_a_rank)(*command[1:])


def _end_with_parent() -> None:
    parent = mp.parent_process()
    assert parent is not None
    parent.join()
    os.killpg(0, signal.SIGKILL)


def _be_a_rank(*arguments: str) -> None:
    """As python -m would: what is raised is printed, and the exit status is what is returned."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):  # for which an agent has its own
        signal.signal(number, signal.SIG_DFL)
    try:
        status = faulty.main(*arguments)
    except SystemExit as left:  # the agent would take 0 for what is returned
        threading._shutdown()  # pyrefly: ignore[missing-attribute]  (an interpreter waits for threads, as one that saves)
        atexit._run_exitfuncs()
        sys.stderr.flush()
        os._exit(left.code if isinstance(left.code, int) else int(left.code is not None))
    except Exception:
        traceback.print_exc()
        status = 1
    if status:
        sys.exit(status)


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
    return _outcome(next(filter(None, machines.ended().values()), 0), heard.so_far(ended=True), folder)


class _Heard:
    """What machines say, or one does, and when it was heard."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lines: dict[Path, list[tuple[float, str]]] = {}

    def so_far(self, *, ended: bool = False) -> list[tuple[float, str]]:
        """All lines, by the time at which they were first seen here; the last may still be written."""
        now = time.time()
        for path in self._folder.glob("machine*"):
            known = self._lines.setdefault(path, [])
            text = path.read_text(errors="replace")
            lines = (text if ended else text.rpartition("\n")[0]).splitlines()
            known += [(now, line) for line in lines[len(known) :]]
        # In the order of each machine where they were seen together.
        return sorted((line for lines in self._lines.values() for line in lines), key=itemgetter(0))


def _command(recipe: str, fault: str, folder: Path, rank: int = STRUCK_RANK) -> list[str]:
    return [
        "tests.faults.faulty", recipe, fault, str(rank), str(STRUCK_STEP), str(folder),
        *RECIPES[recipe], "--ring", "2", "--team", "2", "--steps", str(STEPS), "--comm-timeout", str(PATIENCE),
        "--out", str(folder / "out"), "--checkpoint", str(folder / "kept"), "--save-every", "2", "--keep", "9",
        "--resume",
    ]  # fmt: skip


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
