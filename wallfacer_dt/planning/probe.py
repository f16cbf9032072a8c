"""What a plan needs to know of the machines, measured by all ranks together in seconds.

Links are measured with the transfer that attention uses, all ranks at once, since they share links; kernels with
the kernel of attention on blocks of a shard's size, all ranks at once, since ranks may share cores, too. Where they do,
their turns are milliseconds long, so what takes less is repeated: one call alone may have a core to itself.
"""

import math
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from wallfacer_dt.collectives.functional import permute, wait
from wallfacer_dt.kernels import reference
from wallfacer_dt.kernels.block import FULL, BlockKernel, How, Need
from wallfacer_dt.kernels.merge import accumulation_dtype, merge_
from wallfacer_dt.kernels.registry import select_kernel
from wallfacer_dt.planning.attention import flops_of_pair
from wallfacer_dt.planning.cluster import Cluster, Kernels, Link, PlanningError
from wallfacer_dt.planning.model import ModelShape, SequenceShape

_SMALL, _MANY = 1024, 50
_SECONDS = 0.05  # that a timed transfer should take at least
_LARGEST = 2**26
_ROWS, _MOST_ROWS = 2048, 8192  # queries of a block at most; of a GPU as many as there are with
_BUSY = 2**18  # queries of all heads, as with fewer starting kernels is what takes a GPU's time
_LONG, _MOST = 0.1, 1000  # seconds that repeating a kernel should take at least, and how often it is repeated at most
_REPEATS = 5


@dataclass(frozen=True, slots=True)
class Probe:
    """One rank's part in measuring.

    Attributes:
        device: to measure on.
        group: name of the process group of all ranks.
        ranks_per_node: how many share a node.
    """

    device: torch.device
    group: str
    ranks_per_node: int

    @classmethod
    def on(cls, device_type: str, ranks_per_node: int | None) -> "Probe":
        """Find out where this rank is; all ranks call it together."""
        if ranks_per_node is not None and (
            ranks_per_node < 1 or (dist.get_world_size() > ranks_per_node and dist.get_world_size() % ranks_per_node)
        ):
            raise PlanningError(
                f"ranks_per_node must be at least 1 and divide the {dist.get_world_size()} ranks, got {ranks_per_node}",
                about="ranks_per_node",
            )
        # It also takes this rank's own GPU, unless someone has.
        group = DeviceMesh(device_type, torch.arange(dist.get_world_size())).get_group()
        device = torch.device(device_type)
        if device_type != "cpu":
            device = torch.device(device_type, torch.get_device_module(device_type).current_device())
        return cls(device, str(group.group_name), ranks_per_node or _ranks_per_node())

    @property
    def runs_ahead(self) -> bool:
        """Whether hosts launch what devices run later."""
        return self.device.type != "cpu"

    @property
    def rank(self) -> int:
        """This rank."""
        return dist.get_rank()

    @property
    def ranks(self) -> int:
        """P."""
        return dist.get_world_size()

    def cluster(self, model: ModelShape, sequence: SequenceShape, memory: int | None, kernel: BlockKernel) -> Cluster:
        """Measure links and kernels, of attention this one; all ranks return the same."""
        kernels, contention = self.kernels(model, sequence, kernel)
        found = self.links(contention)
        return replace(found, memory=memory, kernels=replace(kernels, copy=found.kernels.copy))

    def links(self, contention: float = 1.0) -> Cluster:
        """Measure links alone: of kernels what copying takes, where a second of a processor takes ``contention``."""
        per_node = min(self.ranks_per_node, self.ranks)
        has_intra, has_inter = per_node > 1, self.ranks > per_node
        intra, copy = self._intra(per_node, contention) if has_intra else (Link(1e12), 0.0)
        inter, nics, copy_inter = self._inter(per_node, contention) if has_inter else (intra, 1, 0.0)
        return Cluster(
            self.ranks, per_node, intra, inter, nics, kernels=Kernels(copy=max(copy, copy_inter), launch=0.0),
            striped_gathers=self.device.type != "cpu",  # where gloo gathers
            device_type=self.device.type,
        )  # fmt: skip

    def kernels(self, model: ModelShape, sequence: SequenceShape, kernel: BlockKernel) -> tuple[Kernels, float]:
        """Rates of kernels, and how many seconds pass while a rank's processor works for one (ranks may share it)."""
        most = _ROWS
        if self.device.type != "cpu" and kernel is not reference.KERNEL:  # whose scores would fill the memory
            most = max(_ROWS, min(_MOST_ROWS, _BUSY // (sequence.batch * model.heads)))
        rows = max(16, min(most, sequence.length // self.ranks)) // 4 * 4
        few = rows // 4
        blocks = ((rows, rows), (few, few), (few, 4 * rows))
        forwards, backwards = zip(*(self._attention(kernel, model, sequence, *block) for block in blocks), strict=True)
        fit = fitted(rows, forwards, backwards)
        heads = sequence.batch * model.heads
        forward, backward = (heads * flops_of_pair(*model.dims, backward=way) for way in (False, True))
        shape, wide = (sequence.batch, model.heads, rows, model.dim_of_values), accumulation_dtype(sequence.dtype)
        out, lse = self._random(*shape, dtype=wide), self._random(*shape[:-1], dtype=wide)
        more = self._random(*shape, dtype=sequence.dtype)
        merging = self._repeated(lambda: merge_(out, lse, more, lse.clone()))
        size = 512 if self.device.type == "cpu" else 4096
        square = self._random(size, size, dtype=sequence.dtype)
        product = self._repeated(lambda: square @ square)
        kernels = Kernels(
            forward / fit.forward, backward / fit.backward, 2 * size**3 / product, fit.overhead,
            3 * out.nbytes / merging, half_rows=fit.half_rows, launch=0.0, takes_segments=kernel.takes_segments,
        )  # fmt: skip
        return kernels, self._contention(lambda: square @ square)

    def selected(self, name: str, model: ModelShape, sequence: SequenceShape) -> BlockKernel:
        """The kernel of attention; what a rank refuses all of them do (PlanningError), before one waits for another."""
        q = torch.empty(0, model.heads, 0, model.dim, dtype=sequence.dtype, device=self.device)
        v = q.new_empty(0, model.keys, 0, model.dim_of_values)
        found, refusal = None, ""
        try:
            found = select_kernel(name, Need.of(q, v, masked=False, softcap=0.0))
        except Exception as error:  # a kernel's own function may raise anything, and the others wait
            refusal = str(error) or repr(error)
        mine = refusal, f"{found.name!r}, {found.version}" if found else ""
        everyone = [mine] * self.ranks
        dist.all_gather_object(everyone, mine)
        for rank, (said, which) in enumerate(everyone):
            if said:
                raise PlanningError(f"every rank must take it, rank {rank}: {said}", about="kernel")
            if which != everyone[0][1]:
                raise PlanningError(
                    f"every rank must have the same, rank {rank} has {which}, rank 0 {everyone[0][1]}", about="kernel"
                )
        assert found is not None, "nobody refused"
        return found

    def _attention(
        self, kernel: BlockKernel, model: ModelShape, sequence: SequenceShape, rows: int, columns: int
    ) -> tuple[float, float]:
        """Seconds of a block forward and backward."""

        def tensor(heads: int, length: int, dim: int) -> Tensor:
            return self._random(sequence.batch, heads, length, dim, dtype=sequence.dtype)

        q, grad = tensor(model.heads, rows, model.dim), tensor(model.heads, rows, model.dim_of_values)
        k, v = tensor(model.keys, columns, model.dim), tensor(model.keys, columns, model.dim_of_values)
        how = How(FULL, model.dim**-0.5)
        out, lse = kernel.forward(q, k, v, how)
        forward = self._repeated(lambda: kernel.forward(q, k, v, how))
        backward = self._repeated(lambda: kernel.backward(grad, q, k, v, out, lse, how))
        return forward, backward

    def _contention(self, work: Callable[[], object]) -> float:
        """Wall seconds for one of the processor, all ranks at it and none waiting; 1 where a GPU computes."""
        if self.device.type != "cpu":
            return 1.0
        dist.barrier()
        busy, began = time.process_time(), time.perf_counter()
        while (passed := time.perf_counter() - began) < _LONG:
            work()
        busy = time.process_time() - busy
        return self._mean(max(1.0, passed / busy * torch.get_num_threads()) if busy > 0 else 1.0)

    def _intra(self, per_node: int, contention: float) -> tuple[Link, float]:
        first = self.rank // per_node * per_node
        to, source = (first + (self.rank - first + step) % per_node for step in (1, -1))
        latency, seconds, nbytes, copy = self._link(to, source, contention)
        return Link(nbytes / max(seconds - latency - 2 * copy * nbytes, 0.1 * seconds), latency), copy

    def _inter(self, per_node: int, contention: float) -> tuple[Link, int, float]:
        """A node's link, all its ranks sending; and over how many interfaces it goes, by one rank's share of it."""
        to, source = ((self.rank + step * per_node) % self.ranks for step in (1, -1))
        latency, seconds, nbytes, copy = self._link(to, source, contention)
        copying = 2 * copy * nbytes
        node = per_node * nbytes / max(seconds - latency - copying, 0.1 * seconds)
        alone = self.rank % per_node == 0
        buffer = torch.zeros(nbytes if alone else 0, dtype=torch.uint8, device=self.device)
        # The others take part with nothing.
        one = self.timed(lambda: self._hop(buffer, to, source))
        lane = nbytes / max(one - latency - copying, 0.1 * one)
        return Link(node, latency), max(1, round(node / lane)), copy

    def _link(self, to: int, source: int, contention: float) -> tuple[float, float, int, float]:
        """Latency, and for messages that take long enough seconds and bytes; and seconds of copying a byte."""

        def seconds(nbytes: int, times: int = 1) -> float:
            buffer = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
            return self.timed(lambda: self._hop(buffer, to, source), times)

        # Several, since ranks do not begin at the same moment.
        latency, nbytes = seconds(_SMALL, times=_MANY), 2**18
        while (taken := seconds(nbytes)) < _SECONDS and nbytes < _LARGEST:
            nbytes *= 4
        copy = 0.0
        if self.device.type == "cpu":
            busy = time.process_time()
            buffer = torch.zeros(nbytes, dtype=torch.uint8)
            for _ in range(_REPEATS):
                self._hop(buffer, to, source)
            copy = self._mean((time.process_time() - busy) * contention / (2 * _REPEATS * nbytes))
        return latency, taken, nbytes, copy

    def _hop(self, buffer: Tensor, to: int, source: int) -> None:
        wait(permute(buffer, to, source, self.ranks, self.group), "a hop whose time is taken", self.group)

    def timed(self, work: Callable[[], object], times: int = 1) -> float:
        """Median seconds of one of so many in a row, of the slowest rank; the first row is not counted."""

        def row() -> None:
            for _ in range(times):
                work()

        seconds = [slowest(row, self.device) for _ in range(_REPEATS + 1)]
        return max(statistics.median(seconds[1:]), 1e-9) / times

    def _repeated(self, work: Callable[[], object]) -> float:
        """The same of something short, so often in a row that ranks that share a processor have had their turns."""
        one = self.timed(work)
        return one if one >= _LONG else self.timed(work, math.ceil(min(_MOST, _LONG / one)))

    def _mean(self, value: float) -> float:
        total = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return float(total) / self.ranks

    def _random(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=self.device)


class Fit(NamedTuple):
    """What kernels take: ``overhead``, and for every query and key ``forward`` or ``backward``, in seconds.

    These times (1 + ``half_rows`` / queries of the block).
    """

    overhead: float
    half_rows: float
    forward: float
    backward: float


def fitted(rows: int, forward: tuple[float, float, float], backward: tuple[float, float, float]) -> Fit:
    """The costs of kernels, from blocks of unlike sizes; the square ones take as long as was measured.

    Args:
        rows: of the square block.
        forward: seconds of the forward in that block, in one of a quarter of both, and in one of a quarter of the
            queries and four times the keys.
        backward: of the backward.

    Returns:
        The costs, in seconds; where what was measured contradicts itself, none of them below zero.
    """
    times = forward, backward
    overheads = [min(max(0.0, (16 * small - flat) / 15), 0.95 * square) for square, small, flat in times]
    # Of as many pairs; if nothing but rows counted, a quarter of these would take four times as long.
    slower = [
        min(max(1.0, (flat - overhead) / (square - overhead)), 3.0)
        for (square, _, flat), overhead in zip(times, overheads, strict=True)
    ]
    share = statistics.mean((s - 1) / (4 - s) for s in slower)
    overhead = min(statistics.mean(overheads), *(0.95 * square for square, *_ in times))
    return Fit(overhead, share * rows, *((square - overhead) / (rows**2 * (1 + share)) for square, *_ in times))


def slowest(work: Callable[[], object], device: torch.device) -> float:
    """Seconds that something takes on the slowest rank; all begin together."""
    finish = None if device.type == "cpu" else torch.get_device_module(device.type).synchronize
    dist.barrier()
    if finish:
        finish()
    began = time.perf_counter()
    work()
    if finish:
        finish()
    mine = torch.tensor(time.perf_counter() - began, dtype=torch.float64, device=device)
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    return float(mine)


def _ranks_per_node() -> int:
    """As torchrun says it, or else by host names; nodes must have equally many neighbouring ranks."""
    here = (os.environ.get("LOCAL_WORLD_SIZE", ""), platform.node())
    everyone: list[tuple[str, str]] = [here] * dist.get_world_size()
    dist.all_gather_object(everyone, here)
    told = {size for size, _ in everyone}
    if len(told) == 1 and here[0]:
        return int(here[0])
    names = [name for _, name in everyone]
    count = names.count(names[0])
    if names != [names[i // count * count] for i in range(len(names))] or len(names) % count:
        raise PlanningError(
            f"neighbouring ranks must share a node, as many on each, got ranks on {', '.join(names)}: start them so, "
            "or say ranks_per_node",
            about="ranks_per_node",
        )
    return count
