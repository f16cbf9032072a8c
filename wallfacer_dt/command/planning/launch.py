"""How a rank was started: what torchrun says, and the process group made of it."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from wallfacer_dt.command.options import NodeError, OptionError, check_least, naming
from wallfacer_dt.planning import PlanningError
from wallfacer_dt.planning.units import parse_time

_START = "torchrun --nproc-per-node 4 -m wallfacer_dt.command profile"
_TOLD = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


@dataclass(frozen=True, slots=True)
class Launch:
    """How this rank was started.

    Attributes:
        ranks: how many there are.
        per_node: of a node.
        rank: this one.
        local_rank: among those of its node.
        device: ``"cpu"`` or ``"cuda"``.
        threads: of the CPU.
        timeout: of collectives.
    """

    ranks: int
    per_node: int
    rank: int
    local_rank: int
    device: str
    threads: int
    timeout: timedelta

    @classmethod
    def read(
        cls, environment: Mapping[str, str], device: str | None, per_node: int | None, threads: int | None, timeout: str
    ) -> "Launch":
        """Read what torchrun says, and refuse (OptionError) what does not go together.

        Args:
            environment: of this process.
            device: asked for, or None.
            per_node: ranks of a node, or None.
            threads: of the CPU, or None.
            timeout: as it was given.

        Returns:
            The launch.
        """
        if _TOLD - environment.keys():
            raise OptionError(f"ranks are needed; start it with {_START} ...")
        rank, ranks = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        local, local_ranks = int(environment["LOCAL_RANK"]), int(environment["LOCAL_WORLD_SIZE"])
        _check_nodes(ranks, per_node)
        if threads is not None:
            check_least("--threads", threads)
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        if device == "cuda" and torch.cuda.device_count() < local_ranks:
            found = torch.cuda.device_count()
            raise NodeError(f"--device cuda: {local_ranks} ranks on a node of {found} GPUs; try --device cpu")
        threads = threads or max(1, cores() // local_ranks)
        return cls(ranks, min(ranks, per_node or local_ranks), rank, local, device, threads, _read_timeout(timeout))

    @contextmanager
    def group(self) -> Iterator[None]:
        """The process group of all ranks, and what this one computes on.

        Yields:
            Nothing.

        Raises:
            OptionError: what the planner refuses on all ranks alike, or another device than that of rank 0.
        """
        torch.set_num_threads(self.threads)
        if self.device == "cuda":
            torch.cuda.set_device(self.local_rank)
        store, *_ = next(dist.rendezvous("env://", timeout=self.timeout))
        _check_device(store, self.rank, self.device)
        backend = "nccl" if self.device == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.ranks, timeout=self.timeout)
        try:
            yield
        except PlanningError as error:
            dist.destroy_process_group()
            raise OptionError(f"--{error.about.replace('_', '-')}: {error}") from error
        except ValueError as error:
            if len(getattr(error, "met", ())) < self.ranks:  # not all ranks have it
                raise
            dist.destroy_process_group()
            raise OptionError(str(error)) from error
        # Not after an error of one rank alone, for which the others may be waiting: it just ends.
        dist.destroy_process_group()


def cores() -> int:
    """CPU cores this process may use; of a machine that does not say, all."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _check_device(store: dist.Store, rank: int, device: str) -> None:
    """Refuse (NodeError) another device than rank 0's: their process groups would wait for each other."""
    if rank == 0:
        store.set("device", device)
    first = store.get("device").decode()
    if device != first:
        raise NodeError(f"--device: rank {rank} would run on {device}, rank 0 on {first}; say which")


def _check_nodes(ranks: int, per_node: int | None) -> None:
    if per_node is None:
        return
    check_least("--ranks-per-node", per_node)
    if ranks > per_node and ranks % per_node:
        raise OptionError(f"--ranks-per-node must divide the number of ranks, which is {ranks}, got {per_node}")


def _read_timeout(text: str) -> timedelta:
    with naming("--timeout"):
        seconds = parse_time(text)
        if not 1 <= seconds <= 1e6:
            raise ValueError(f"must be from 1s to 1000000s, got {text!r}")
    return timedelta(seconds=seconds)
