"""A process that outlives its parent, to remove the parent's network however that ended.

Its standard input is a pipe whose other end the parent alone holds: it reads until the parent closes it, or dies.
While it lives it holds the prefix' lock, so that no other network of that prefix is made, or removed, meanwhile.
"""

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from recipes.benchmarks.cluster.network import STATE, ClusterError, check_host, remove

ROOT = Path(__file__).resolve().parents[3]


def environment() -> dict[str, str]:
    """The environment for processes that import this package, wherever they start."""
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}


@contextmanager
def watched(prefix: str, *, patience: float = 15) -> Iterator[None]:
    """Have this prefix' network and processes removed when this, or this process, ends; one run of it at a time."""
    check_host()
    lock = _locked(prefix, patience)
    command = [sys.executable, "-m", "recipes.benchmarks.cluster.watcher", prefix]
    # A session of its own: what is sent to the parent's whole group, Ctrl-C too, must not reach it.
    watcher = subprocess.Popen(
        command, stdin=subprocess.PIPE, env=environment(), pass_fds=[lock], start_new_session=True
    )
    os.close(lock)
    try:
        yield
    finally:
        watcher.communicate()  # closes its input


def _locked(prefix: str, patience: float) -> int:
    path = STATE / f"{prefix}.lock"
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    deadline = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(lock)
                raise ClusterError(f"another emulated cluster is running, it holds {path}; end it first") from None
            time.sleep(0.2)


if __name__ == "__main__":
    sys.stdin.buffer.read()
    remove(sys.argv[1])
