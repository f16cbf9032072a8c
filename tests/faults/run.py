"""Provoking a fault of a recipe under torchrun, and what comes of it."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
RANKS, STRUCK_RANK, STRUCK_STEP, STEPS = 4, 2, 5, 8
# Seconds that ranks wait for each other, and after which a run is taken for one that hangs.
PATIENCE, HANGS = 10, 240
MESH = ("--ring", "2", "--team", "2")
SIZES = {
    "train_bytes": (
        *("--sequence", "256", "--dim", "32", "--layers", "2", "--heads", "4", "--kv-heads", "2", "--batch", "1"),
        *("--text", str(ROOT / "README.md")),
    ),
    "train_dit": (
        *("--sheet", "1", "--patch", "2", "--dim", "16", "--heads", "2", "--layers", "2", "--batch", "2"),
        *("--sample-steps", "2"),
    ),
    "finetune_hf": (
        *("--sequence", "130", "--dim", "16", "--layers", "2", "--heads", "2", "--kv-heads", "1", "--batch", "2"),
        *("--text", str(ROOT / "README.md")),
    ),
}


@dataclass(frozen=True)
class Outcome:
    """What came of a run.

    Attributes:
        status: of the launcher; None if it had to be stopped.
        said: on standard error, by line.
        seconds: from the fault to the first line that says it; None where none does.
        message: that line.
        resumed: the steps from which later attempts went on.
        losses: of the whole run, if it came to its end.
    """

    status: int | None
    said: tuple[str, ...]
    seconds: float | None
    message: str
    resumed: tuple[int, ...]
    losses: tuple[float, ...]


def options(recipe: str, folder: Path) -> list[str]:
    """Of a run that keeps checkpoints of every second step in a folder."""
    return [
        *SIZES[recipe], *MESH, "--steps", str(STEPS), "--comm-timeout", str(PATIENCE), "--out", str(folder / "out"),
        "--checkpoint", str(folder / "kept"), "--save-every", "2", "--keep", "9", "--resume",
    ]  # fmt: skip


def launcher(restarts: int) -> list[str]:
    """torchrun of this machine's ranks."""
    return [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}",
        f"--max-restarts={restarts}",
    ]  # fmt: skip


def environment() -> dict[str, str]:
    """Of ranks on the loopback."""
    return os.environ | {
        "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }  # fmt: skip


def provoke(recipe: str, fault: str, folder: Path, says: str, *, restarts: int = 1, step: int = STRUCK_STEP) -> Outcome:
    """Have a rank of a run have a fault, and let torchrun start it again.

    Args:
        recipe: the name of its package.
        fault: one of `faulty.FAULTS`, "another version", "other options", or "none".
        folder: empty, for whatever the run leaves.
        says: a pattern of the line that is to tell of it.
        restarts: that torchrun may make.
        step: at which it comes, counted from 1.
    """
    faulty = ["-m", "tests.faults.faulty", recipe, fault, str(STRUCK_RANK), str(step), str(folder)]
    process = subprocess.Popen(
        [*launcher(restarts), *faulty, *options(recipe, folder)], cwd=ROOT, env=environment(),
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True,
    )  # fmt: skip
    return watch([process], folder, says)


def watch(processes: Sequence[subprocess.Popen[str]], folder: Path, says: str) -> Outcome:
    """Wait for launchers to end, and read what they say; leaves nothing running."""
    heard: list[tuple[float, str]] = []
    readers = [threading.Thread(target=_read, args=(process, heard), daemon=True) for process in processes]
    for reader in readers:
        reader.start()
    deadline, status = time.monotonic() + HANGS, None
    try:
        found = [process.wait(max(0.0, deadline - time.monotonic())) for process in processes]
        status = max(found, key=abs)
    except subprocess.TimeoutExpired:
        pass
    finally:
        for process in processes:
            _end(process)
    for reader in readers:
        reader.join(10)
    return _outcome(status, heard, folder, says)


def _read(process: subprocess.Popen[str], heard: list[tuple[float, str]]) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        heard.append((time.time(), line.rstrip()))


def _end(process: subprocess.Popen[str]) -> None:
    """Kill what is left of a launcher's session, whose ranks have sessions of their own."""
    ranks = subprocess.run(
        ["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=False
    ).stdout.split()
    for pid in (*map(int, ranks), process.pid):
        if process.poll() is None or pid != process.pid:
            os.kill(pid, signal.SIGKILL)
    process.wait()


def _outcome(status: int | None, heard: Sequence[tuple[float, str]], folder: Path, says: str) -> Outcome:
    struck = folder / "struck"
    when = float(struck.read_text()) if struck.exists() else None
    told = next(((at, line) for at, line in heard if re.search(says, line)), None)
    seconds = None if when is None or told is None else told[0] - when
    lines = tuple(line for _, line in heard)
    resumed = tuple(int(found[1]) for line in lines if (found := re.match(r"going on from step (\d+) ", line)))
    record = folder / "out" / "run.json"
    losses = tuple(json.loads(record.read_text())["run"]["losses"]) if record.exists() else ()
    return Outcome(status, lines, seconds, told[1] if told else "", resumed, losses)
