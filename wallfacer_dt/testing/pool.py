"""A pool of ranks that stays up, so that a case on real ranks costs milliseconds instead of seconds."""

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
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Private; run on torch 2.11.0, 2.13.0, 2.14.1 and 2.15.0.
from torch.distributed import distributed_c10d  # noqa: TID251  (nothing is sent here)

from wallfacer_dt.testing.cores import core_of
from wallfacer_dt.testing.turns import STUCK, Answer


def fork_server() -> mp.context.ForkServerContext:
    """A context whose processes begin with torch and the package imported."""
    context = mp.get_context("forkserver")
    # The compiler is imported by the first call of any operator. Not Inductor: that of torch 2.11 asks for CUDA devices
    # where it is imported, which forks cannot use then.
    context.set_forkserver_preload(
        ["torch", "torch._dynamo", "torch.distributed.tensor.parallel", "wallfacer_dt.testing"]
    )
    return context


class RankPool:
    """Ranks that form one world and run functions together: gloo processes, or threads of one process.

    Processes come from a fork server that has imported torch and the package, so a pool is up in about a second. A
    function that raises on a rank raises here, with the rank's traceback; after a rank that hangs or dies the pool is
    closed and says so.

    Threads take turns, see :mod:`wallfacer_dt.testing.threads`: cheaper, the same order every time, and told at once
    where ranks wait for each other in vain. They show nothing of transport, timeouts or whatever a process has once.

    Args:
        size: number of ranks.
        timeout: seconds that a call, or any collective in it, may take.
        threads: whether ranks are threads.
    """

    def __init__(self, size: int, *, timeout: float = 120, threads: bool = False) -> None:
        self.size, self.timeout = size, timeout
        self._ranks_each = size if threads else 1
        context = fork_server()
        self._where = Path.cwd()
        self._folder = tempfile.TemporaryDirectory()
        store = os.path.join(self._folder.name, "store")
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(0, size, self._ranks_each):
            here, there = context.Pipe()
            begin, args = (_be_threads, (size,)) if threads else (_be_one, (rank, size, store, timeout))
            process = context.Process(target=_serve, args=(there, begin, args), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)
        self._collect()

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
        return self._collect()

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

    def _collect(self) -> list[Any]:
        deadline = time.monotonic() + self.timeout + 10
        try:
            answers = [answer for process in range(len(self._pipes)) for answer in self._answers(process, deadline)]
        except BaseException:  # what is left unread would be taken for the next call's answers
            self.close()
            raise
        failed = [(rank, text) for rank, (ok, text) in enumerate(answers) if not ok]
        if failed:
            # Others fail because this one did; it is most often the one that has not missed another.
            rank, text = min(failed, key=lambda pair: (any(what in pair[1] for what in _MISSED), pair[0]))
            raise RuntimeError(f"rank {rank} of {self.size}:\n{text}")
        return [value for _, value in answers]

    def _answers(self, process: int, deadline: float) -> list[Answer]:
        """By rank, those of a process."""
        try:
            if self._pipes[process].poll(max(0, deadline - time.monotonic())):
                return self._pipes[process].recv()
            why = f"did not answer within {self.timeout + 10} s"
        except (EOFError, ConnectionResetError):
            why = f"died{self._cause(process)}"
        who = f"the process of all {self.size} ranks" if self._ranks_each > 1 else f"rank {process} of {self.size}"
        raise TimeoutError(f"{who} {why}; the pool is closed")

    def _cause(self, number: int) -> str:
        process = self._processes[number]
        process.join(60)  # its pipe closes before it has ended, and written its core
        code = process.exitcode
        if code is None:
            return ""
        if code >= 0:
            return f" with exit status {code}"
        names = {each.value: each.name for each in signal.Signals}
        core = core_of(process.pid, self._where) if names.get(-code) in _DUMPING else ""
        return f" of {names.get(-code, f'signal {-code}')}" + (f" ({core})" if core else "")


# What an error says whose cause is another rank's.
_MISSED = "Connection closed", STUCK
# Of which the kernel writes a core file.
_DUMPING = "SIGABRT", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL"


def _serve(
    pipe: Connection, begin: Callable[..., Callable[[Callable[..., Any], tuple], list[Answer]]], args: tuple
) -> None:
    with suppress(RuntimeError, OSError, AttributeError):  # where there is no stderr
        faulthandler.enable()  # what crashes a rank is else one line without a place
    torch.set_num_threads(1)
    call = begin(*args)
    pipe.send([])
    # A closed pool has nobody left to answer.
    with suppress(EOFError, BrokenPipeError):
        while True:
            try:
                function, args = pipe.recv()
            except (AttributeError, ImportError, TypeError, pickle.UnpicklingError):  # as of a notebook's function
                function, args = _raise, (traceback.format_exc(),)
            answers = call(function, args)
            try:
                pipe.send(answers)
            except (pickle.PicklingError, AttributeError, TypeError, RuntimeError):  # as of a tensor with a graph
                pipe.send([(False, traceback.format_exc())] * len(answers))
    os._exit(0)


def _raise(text: str) -> None:
    raise RuntimeError(text)


def _be_one(rank: int, size: int, store: str, timeout: float) -> Callable[[Callable[..., Any], tuple], list[Answer]]:
    _share_a_device()
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=timeout)
    )

    def call(function: Callable[..., Any], args: tuple) -> list[Answer]:
        try:
            return [(True, function(*args))]
        except BaseException:
            return [(False, traceback.format_exc())]

    return call


def _be_threads(size: int) -> Callable[[Callable[..., Any], tuple], list[Answer]]:
    # Its module registers what only a process of threads may have.
    from wallfacer_dt.testing.threads import Threads

    return Threads(size).run


def _share_a_device() -> None:
    """Let all process groups that this process makes have one gloo device.

    Each has its own else, with a thread that wakes a hundred times a second: ranks of a test of many meshes have
    hundreds, which keep the machine busy while nothing is sent.
    """
    plain: Any = dist.ProcessGroupGloo
    device = plain.create_default_device()

    class SharedDevice(plain):
        # torch 2.15 gives an option by keyword: `enable_reconfigure`.
        def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta, **more: bool) -> None:
            options = plain._Options()
            options._devices, options._threads, options._timeout = [device], 2, timeout
            for name, value in more.items():
                setattr(options, name, value)
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = SharedDevice  # pyrefly: ignore[bad-assignment]
