"""A pool of gloo ranks that stays up, so that a case on real ranks costs milliseconds instead of seconds."""

import faulthandler
import multiprocessing as mp
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist


class RankPool:
    """Processes that form one gloo world and run functions together.

    Processes come from a fork server that has imported torch and the package, so a pool is up in about a second. A
    function that raises on a rank raises here, with the rank's traceback; after a rank that hangs or dies the pool is
    closed and says so.

    Args:
        size: number of ranks.
        timeout: seconds that a call, or any collective in it, may take.
    """

    def __init__(self, size: int, *, timeout: float = 120) -> None:
        self.size, self.timeout = size, timeout
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed.tensor.parallel", "wallfacer_dt.testing"])
        self._folder = tempfile.TemporaryDirectory()
        store = os.path.join(self._folder.name, "store")
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, there, store, timeout), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)
        self._collect(range(size))

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call ``function(*args)`` on every rank at once.

        Args:
            function: importable by name; it and its arguments are pickled.
            *args: the same for every rank.

        Returns:
            What it returned, by rank.

        Raises:
            RuntimeError: it raised on a rank.
            TimeoutError: a rank did not answer, or died (of which signal is said); the pool is closed.
        """
        if self.closed:
            raise RuntimeError("this pool of ranks is closed")
        for pipe in self._pipes:
            with suppress(BrokenPipeError):  # whoever has died meanwhile does not answer
                pipe.send((function, args))
        return self._collect(range(self.size))

    @property
    def closed(self) -> bool:
        """Whether its processes have ended."""
        return not self._pipes

    def close(self) -> None:
        """End all processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(2)
            if process.is_alive():
                process.kill()
        self._pipes = []
        self._folder.cleanup()

    def _collect(self, ranks: range) -> list[Any]:
        deadline = time.monotonic() + self.timeout + 10
        answers = [self._answer(rank, deadline) for rank in ranks]
        failed = [(rank, text) for rank, (ok, text) in enumerate(answers) if not ok]
        if failed:
            # Others fail because this one did; it is most often the one without a connection error.
            rank, text = min(failed, key=lambda pair: ("Connection closed" in pair[1], pair[0]))
            raise RuntimeError(f"rank {rank} of {self.size}:\n{text}")
        return [value for _, value in answers]

    def _answer(self, rank: int, deadline: float) -> tuple[bool, Any]:
        try:
            if self._pipes[rank].poll(max(0, deadline - time.monotonic())):
                return self._pipes[rank].recv()
            why = f"did not answer within {self.timeout + 10} s"
        except (EOFError, ConnectionResetError):
            why = f"died{self._cause(rank)}"
        self.close()
        raise TimeoutError(f"rank {rank} of {self.size} {why}; the pool is closed")

    def _cause(self, rank: int) -> str:
        process = self._processes[rank]
        process.join(10)  # its pipe closes before it has ended, and written its core
        code = process.exitcode
        if code is None:
            return ""
        names = {each.value: each.name for each in signal.Signals}
        return f" of {names.get(-code, f'signal {-code}')}" if code < 0 else f" with exit status {code}"


def _serve(rank: int, size: int, pipe: Connection, store: str, timeout: float) -> None:
    with suppress(RuntimeError, OSError, AttributeError):  # where there is no stderr
        faulthandler.enable()  # what crashes a rank is else one line without a place
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout),
    )
    pipe.send((True, None))
    # A closed pool has nobody left to answer.
    with suppress(EOFError, BrokenPipeError):
        while True:
            function, args = pipe.recv()
            try:
                answer = True, function(*args)
            except BaseException:
                answer = False, traceback.format_exc()
            try:
                pipe.send(answer)
            except (pickle.PicklingError, AttributeError, TypeError):
                pipe.send((False, traceback.format_exc()))
    os._exit(0)
