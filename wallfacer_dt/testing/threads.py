"""Ranks that are threads of one process, and a process group whose collectives are copies between them.

One rank runs at a time, so that code written for one rank a process is tested as it is: no two ever change its tables
at once. What is received is NaN until it is waited for.
"""

import threading
import traceback
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Private: process groups by thread, and a world of each thread's own. Run on torch 2.13.0.
from torch._C._distributed_c10d import _set_thread_isolation_mode  # pyrefly: ignore[missing-module-attribute]
from torch.testing._internal.distributed.multi_threaded_pg import _install_threaded_pg

from wallfacer_dt.comparison import bytes_of
from wallfacer_dt.testing.turns import Answer, Turns

_reductions: dict[Any, Callable[[Tensor], Tensor]] = {
    dist.ReduceOp.SUM: lambda x: x.sum(0, dtype=x.dtype),
    dist.ReduceOp.AVG: lambda x: x.mean(0),
    dist.ReduceOp.MAX: lambda x: x.amax(0),
    dist.ReduceOp.MIN: lambda x: x.amin(0),
}


class Threads:
    """The ranks of one world, ``size`` of them; a process has one such world."""

    def __init__(self, size: int) -> None:
        self._turns = Turns(size)
        self._work: list[SimpleQueue[Any]] = [SimpleQueue() for _ in range(size)]
        self._answers: list[Answer] = []
        _set_thread_isolation_mode(True)
        _install_threaded_pg()
        # DeviceMesh tells its ranks apart by thread on a backend of this name.
        dist.Backend.register_backend("threaded", self._make_group, extended_api=True, devices=["cpu", "cuda"])
        store = dist.HashStore()
        for rank in range(size):
            threading.Thread(target=self._serve, args=(rank, store), daemon=True).start()
        self.run(dist.barrier, ())

    def run(self, function: Callable[..., Any], args: tuple) -> list[Answer]:
        """Call ``function(*args)`` on every rank: their answers by rank."""
        self._answers = [(False, "")] * self._turns.size
        for work in self._work:
            work.put((function, args))
        self._turns.go_round()
        return self._answers

    def _serve(self, rank: int, store: dist.Store) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("threaded", store=store, rank=rank, world_size=self._turns.size)
        drawn = torch.get_rng_state()
        while True:
            function, args = self._work[rank].get()
            self._turns.begin(rank)
            torch.set_rng_state(drawn)
            try:
                self._answers[rank] = True, function(*args)
            except BaseException:
                self._answers[rank] = False, traceback.format_exc()
            drawn = torch.get_rng_state()
            self._turns.end(rank)

    def _make_group(self, told: Any, _: object) -> "_Group":
        return _Group(told.group_id, tuple(told.global_ranks_in_group), told.group_rank, self._turns)


class _Arrival(dist.Work):
    def __init__(self, arrive: Callable[[], None]) -> None:
        super().__init__()
        self._pending: list[Callable[[], None]] = [arrive]

    def wait(self, *_: object) -> bool:
        while self._pending:
            self._pending.pop()()
        return True


class _Group(dist.ProcessGroup):
    """What attention, METP, DTensor and their tests ask of a process group; torch refuses the rest by name."""

    def __init__(self, name: str, ranks: tuple[int, ...], me: int, turns: Turns) -> None:
        ranks = ranks or tuple(range(turns.size))  # of the world none are told
        super().__init__(me, len(ranks))  # pyrefly: ignore[missing-argument, bad-argument-type]
        self._name, self._ranks, self._me, self._turns = name, ranks, me, turns

    def getBackendName(self) -> str:  # noqa: N802
        return "threaded"

    @property
    def group_name(self) -> str:
        """As torch registers it."""
        return self._name

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: object = None) -> _Arrival:
        (parts,) = outputs
        return self._meet("all_gather", inputs, parts, lambda given: zip(parts, (x for (x,) in given), strict=True))

    def all_gather_single(self, output: Tensor, given: Tensor, opts: object = None) -> _Arrival:
        return self.all_gather_single_coalesced([output], [given])

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: object = None) -> _Arrival:
        def copies(given: list[list[Tensor]]) -> Any:
            for i, output in enumerate(outputs):
                yield from zip(output.view(self.size(), *inputs[i].shape), (x[i] for x in given), strict=True)

        return self._meet("all_gather", inputs, outputs, copies)

    def all_to_all_single(
        self, output: Tensor, given: Tensor, received: list[int], sent: list[int], opts: object = None
    ) -> _Arrival:
        # Empty: equal parts.
        parts, mine = (x.split(sizes or len(x) // self.size()) for x, sizes in ((output, received), (given, sent)))
        return self._meet(
            "all_to_all", mine, parts, lambda given: zip(parts, (x[self._me] for x in given), strict=True)
        )

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> _Arrival:
        # The source's is read while it is sent.
        received = [] if self._me == opts.rootRank else tensors
        return self._meet(
            "broadcast", tensors, received, lambda given: zip(received, given[opts.rootRank], strict=False)
        )

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> _Arrival:
        given = [x for part in inputs for x in part]
        return self._meet(
            "scatter", given, outputs, lambda all_given: [(outputs[0], all_given[opts.rootRank][self._me])]
        )

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> _Arrival:
        reduce = _reduction(opts)
        return self._meet(
            "all_reduce", tensors, tensors,
            lambda given: [(x, reduce(torch.stack(all_x))) for x, *all_x in zip(tensors, *given, strict=True)],
        )  # fmt: skip

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any = None) -> _Arrival:
        return self.reduce_scatter_single_coalesced([output], [given], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> _Arrival:
        reduce = _reduction(opts)

        def copies(given: list[list[Tensor]]) -> Any:
            for i, output in enumerate(outputs):
                yield output, reduce(torch.stack([x[i].view(self.size(), *output.shape)[self._me] for x in given]))

        return self._meet("reduce_scatter", inputs, outputs, copies)

    # As torch 2.11 calls them.
    alltoall_base, _allgather_base, _reduce_scatter_base = all_to_all_single, all_gather_single, reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def barrier(self, opts: object = None) -> _Arrival:
        return self._meet("barrier", [], [], lambda _: [])

    def _meet(
        self,
        what: str,
        given: Sequence[Tensor],
        received: Sequence[Tensor],
        copies: Callable[[list[list[Tensor]]], Any],
    ) -> _Arrival:
        """Give copies of some tensors; once waited for, copy what ``copies`` pairs with what all have given.

        What has been written over by then, another transport might have sent instead: that is refused (RuntimeError).
        """
        rank = self._ranks[self._me]
        with torch.no_grad():
            sent = [x.detach().clone() for x in given]
            meeting = self._turns.come(rank, (self._name, self._ranks), what, sent)
            for x in received:
                _spoil(x)

        def arrive() -> None:
            if meeting.absent():
                drawn = torch.get_rng_state()  # a process has one default generator, so here every rank its state
                self._turns.wait(rank, meeting)
                torch.set_rng_state(drawn)
            with torch.no_grad():
                for x, copy in zip(given, sent, strict=True):
                    if all(x is not into for into in received) and not _is_as_sent(x, copy):
                        raise RuntimeError(f"{what}: rank {rank} wrote over {_said(x)} before they had been sent")
                for target, source in copies(meeting.given):
                    if target.numel() != source.numel() or target.dtype != source.dtype:
                        raise RuntimeError(f"{what}: rank {rank} expects {_said(target)}, and is sent {_said(source)}")
                    target.detach().copy_(source.view_as(target))

        return _Arrival(arrive)


def _is_as_sent(x: Tensor, copy: Tensor) -> bool:
    return bytes_of(x).equal(bytes_of(copy))


def _spoil(x: Tensor) -> None:
    if x.is_floating_point() or x.is_complex():
        x.detach().fill_(torch.nan)


def _reduction(opts: Any) -> Callable[[Tensor], Tensor]:
    chosen = [reduce for op, reduce in _reductions.items() if opts is not None and opts.reduceOp == op]
    if not chosen:
        raise NotImplementedError(f"threads reduce by {', '.join(map(str, _reductions))}, got {opts}")
    return chosen[0]


def _said(x: Tensor) -> str:
    return f"{x.numel()} of {x.dtype}"
