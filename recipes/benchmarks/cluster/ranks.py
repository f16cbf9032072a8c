"""The ranks: they wait for commands, which the first reads and answers, and do them together.

    python -m recipes.benchmarks.cluster.ranks '{"machines": {...}, "prefix": "wfnet", "store": "/run/..."}'

Commands and answers are lines of JSON: one of ``Rank``'s methods with its arguments, and what it returns. torch is
imported once; ranks are forked, each into its own namespace.
"""

import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO, get_type_hints
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C import _distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

import wallfacer_dt as wf
from recipes.benchmarks.cluster import device
from recipes.benchmarks.cluster.cases import DTYPE, Case, Machines
from recipes.benchmarks.cluster.network import OUT, Network, enter, run_first
from recipes.benchmarks.memory.layers import Attention, FeedForward
from wallfacer_dt.agreement import agree
from wallfacer_dt.collectives import functional
from wallfacer_dt.dealing import dealing_by_hand
from wallfacer_dt.mesh import context_groups, temporary_groups
from wallfacer_dt.planning.candidates import Candidate
from wallfacer_dt.planning.probe import Probe
from wallfacer_dt.reading import make
from wallfacer_dt.testing import attention_oracle, worst_error

_PATIENCE = timedelta(minutes=10)
_LEAD = 0.03  # seconds in which all ranks hear when to begin


class Rank:
    """One rank of those that are spread over nodes."""

    def __init__(self, machines: Machines) -> None:
        self.machines = machines

    def links(self) -> dict[str, Any]:
        """The links as the planner's probe sees them."""
        with _messages():
            return Probe.on("cpu", self.machines.per_node).links().as_json()

    def choose(self, case: Case, cluster: wf.Cluster, top: int) -> dict[str, Any]:
        """What a plan chooses, and what is fastest when that and those predicted to be fastest are run."""
        began = time.perf_counter()
        with _clocked(case), _messages():
            chosen, seen = wf.profile(case.model, case.sequence, "cpu", top=top, iterations=1, turns=1, cluster=cluster)
        return {
            "predicted": asdict(seen.measured[0].candidate), "profiled": asdict(chosen.chosen),
            "seconds": time.perf_counter() - began,
        }  # fmt: skip

    def turn(self, case: Case, way: Candidate) -> dict[str, Any]:
        """Of forward and backward: seconds until the last rank is done, and by rank those of its device."""
        if way.feed_forward == "metp" or way.projections == "metp":
            return self._metp(case, way)
        shape = (case.heads, case.kv_heads, case.kv_heads)
        leaves = [torch.randn(1, n, case.tokens, case.head_dim, dtype=DTYPE, requires_grad=True) for n in shape]
        with _clocked(case), self._mesh(way) as mesh:
            attend = self._attention(way, case, mesh, kernel=device.KERNEL)
            return _both(lambda: attend(*leaves), leaves, torch.ones_like(leaves[0]))

    def _metp(self, case: Case, way: Candidate) -> dict[str, Any]:
        """The same of METP's feed-forward, or of its attention."""
        hidden = case.model.hidden
        x = torch.randn(1, case.tokens, hidden, dtype=DTYPE, requires_grad=True)
        with _clocked(case), self._mesh(way) as mesh, patch.object(torch, "mm", device.product):
            block: nn.Module = FeedForward(hidden, DTYPE)
            style: ParallelStyle = wf.METPParallel(up="up", down="down", activation="gelu", check=False)
            if way.projections == "metp":
                block = Attention(hidden, case.heads, DTYPE, flash=True)
                moves = {"rotate": way.rotate, "rotate_forward": way.rotate_forward, "kernel": device.KERNEL}
                style = wf.METPAttentionParallel(
                    query="query", key="key", value="value", output="out", head_dim=case.head_dim, check=False,
                    attention=wf.RingParallel(check=False, **moves),
                )  # fmt: skip
            parallelize_module(block, mesh, style)
            return _both(lambda: block(x), [x, *block.parameters()], torch.ones_like(x))

    def check(self, case: Case, way: Candidate) -> dict[str, Any]:
        """The largest error of output and gradients with real kernels in float32, relative to the largest element."""
        sequence, generator = case.sequence, torch.Generator().manual_seed(0)
        whole = [
            torch.randn(1, heads, sequence.length, case.head_dim, generator=generator)
            for heads in (case.heads, case.kv_heads, case.kv_heads, case.heads)
        ]
        told = {"is_causal": sequence.is_causal, "window_size": sequence.window_size}
        truth = attention_oracle(*whole, dtype=None, **told)
        with self._mesh(way) as mesh:
            own = wf.sequence_positions(sequence.length, wf.TokenOrder(way.order, mesh))
            leaves = [x[:, :, own].requires_grad_() for x in whole[:3]]
            out = self._attention(way, case, mesh, kernel="auto")(*leaves)
            found = (out.detach(), *torch.autograd.grad(out, leaves, whole[3][:, :, own]))
        error = worst_error([(x, y[:, :, own]) for x, y in zip(found, truth, strict=True)], relative_to="largest")
        return {"errors": _everyones(error).flatten().tolist()}

    def talk(self, where: str, count: int) -> dict[str, Any]:
        """Exchange bytes with the ranks of one's own node, or (``where`` is "across") with those of all nodes."""
        with self._mesh(Candidate(self.machines.nodes, self.machines.per_node)) as mesh:
            group = mesh["cp_ring" if where == "across" else "cp_team"].get_group()
            dist.all_reduce(torch.ones(count // 4), group=group)
        return {}

    @contextmanager
    def _mesh(self, it: Candidate) -> Iterator[DeviceMesh]:
        """A mesh for one turn: gloo's threads, of every group, wake up all the while."""
        mesh = wf.context_mesh("cpu", it.ring, it.team, ulysses=it.ulysses, placement=it.placement)
        with temporary_groups(mesh), dealing_by_hand(range(self.machines.ranks)):
            # What a call does once on a new mesh is no part of a turn.
            context_groups(mesh)
            for group in mesh.get_all_groups():
                dist.barrier(group)
            with _messages():
                yield mesh
            dist.barrier()

    def _attention(self, it: Candidate, case: Case, mesh: DeviceMesh, kernel: str) -> Callable[..., Tensor]:
        order, sequence = wf.TokenOrder(it.order, mesh), case.sequence
        return lambda q, k, v: wf.context_parallel_attention(
            q, k, v, mesh, is_causal=sequence.is_causal, window_size=sequence.window_size, order=order,
            schedule=it.schedule, rotate=it.rotate, rotate_forward=it.rotate_forward, kernel=kernel,
        )  # fmt: skip


def _clocked(case: Case) -> AbstractContextManager[object]:
    """This process' device has a case's rates."""
    return patch.object(device.DEVICE, "kernels", case.kernels)


def _both(work: Callable[[], Tensor], leaves: Sequence[Tensor], grad: Tensor) -> dict[str, Any]:
    """What is timed of forward and backward, after what the first call plans, for which nothing is sent or computed."""
    with patch.object(functional, "_ops", _NOTHING), patch.object(device.DEVICE, "compute", lambda _: None):
        torch.autograd.grad(work(), leaves, grad)
    out, forward = _timed(work)
    _, backward = _timed(lambda: torch.autograd.grad(out, leaves, grad))
    return {"forward": forward, "backward": backward}


def _timed(work: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
    """What work gives; seconds until the last is done; and by rank its device's ``busy`` and ``held``."""
    begin = float(_everyones(time.perf_counter()).max()) + _LEAD  # one machine, one clock
    time.sleep(max(0.0, begin - time.perf_counter()))
    device.DEVICE.begin()
    result = work()
    ends, busy, held = _everyones(time.perf_counter(), device.DEVICE.busy, device.DEVICE.held).T
    return result, {"seconds": float(ends.max()) - begin, "busy": busy.tolist(), "held": held.tolist()}


def _everyones(*values: float) -> Tensor:
    """By rank its values."""
    mine = torch.tensor(values, dtype=torch.float64)
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    return torch.stack(found)


class _Messages:
    """The collectives, where gloo's are other messages as NCCL makes them (docs/planner.md, an emulated cluster)."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.ops._c10d_functional, name)

    def wait_tensor(self, pending: Tensor) -> Tensor:
        return device.DEVICE.wait(lambda: torch.ops._c10d_functional.wait_tensor(pending))

    def all_to_all_single(self, buffer: Tensor, received: list[int], sent: list[int], group: str) -> Tensor:
        if buffer.is_meta:  # the planner's
            return torch.ops._c10d_functional.all_to_all_single(buffer, received, sent, group)
        # torch 2.13 names a type of its own for group names.
        ranks = c10d._resolve_process_group(group)  # pyrefly: ignore[bad-argument-type]
        arrived = buffer.new_empty(sum(received))
        me, size = ranks.rank(), ranks.size()
        to, into = buffer.split(sent), arrived.split(received)
        into[me].copy_(to[me])
        # In turn, so that not all send to the same rank at once.
        sources, targets = ([(me + way * n) % size for n in range(1, size)] for way in (-1, 1))
        works = [ranks.recv([into[rank]], rank, 0) for rank in sources if received[rank]]
        works += [ranks.send([to[rank]], rank, 0) for rank in targets if sent[rank]]
        return _coming(arrived, works)

    def all_gather_into_tensor(self, buffer: Tensor, size: int, group: str) -> Tensor:
        if buffer.is_meta or size != 2:
            return torch.ops._c10d_functional.all_gather_into_tensor(buffer, size, group)
        # Gloo's is two messages to the one other rank, the second of which is announced behind the bytes of the first.
        return self.all_to_all_single(buffer.repeat(2), [len(buffer)] * 2, [len(buffer)] * 2, group)

    def broadcast(self, buffer: Tensor, source: int, group: str) -> Tensor:
        # As many bytes come to everybody, from the rank before and all at once; what they are no device asks.
        ranks = c10d._resolve_process_group(group)  # pyrefly: ignore[bad-argument-type]
        me, size = ranks.rank(), ranks.size()
        arrived = buffer.clone(memory_format=torch.contiguous_format)
        works = [ranks.recv([arrived], (me - 1) % size, 0)] if me != source else []
        works += [ranks.send([buffer.contiguous()], (me + 1) % size, 0)] if (me + 1) % size != source else []
        return _coming(arrived, works)


_NOTHING = SimpleNamespace(
    wait_tensor=lambda pending: pending,
    all_to_all_single=lambda buffer, received, *_: buffer.new_zeros(sum(received)),
    all_gather_into_tensor=lambda buffer, size, _: buffer.new_zeros(size * len(buffer)),
    broadcast=lambda buffer, *_: buffer.new_zeros(buffer.shape),
)
"""The collectives, of which nothing is sent, and zeros come."""


def _coming(arrived: Tensor, works: Iterable[Any]) -> Tensor:
    for work in works:
        c10d._register_work(arrived, work)
    return arrived


@contextmanager
def _messages() -> Iterator[None]:
    """Single messages; and ranks do not compare their calls, which on devices goes beside their work."""
    with patch.object(functional, "_ops", _Messages()), patch.object(agree, "_meeting", lambda *_: None):
        yield


def _serve(rank: int, machines: Machines, store: str, answers: TextIO) -> None:
    torch.set_num_threads(1)
    device.register()
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=machines.ranks, timeout=_PATIENCE
    )
    answer: dict[str, Any] = {}
    while True:
        command: list[Any] = [None]
        if rank == 0:
            print(json.dumps(answer), file=answers, flush=True)
            line = sys.stdin.readline()
            command = [json.loads(line) if line else None]
        dist.broadcast_object_list(command, 0)
        if command[0] is None:
            return
        do = getattr(Rank(machines), command[0].pop("do"))
        kinds = get_type_hints(do)
        answer = do(**{name: make(kinds[name], given) for name, given in command[0].items()})


def _forked(rank: int, network: Network, store: str, answers: TextIO) -> int:
    if pid := os.fork():
        return pid
    try:
        enter(network.namespace(rank))
        _serve(rank, network.machines, store, answers)
        os._exit(0)
    except BaseException:
        # Others fail because the first one did, or all because the folder and the network are being removed.
        with suppress(FileExistsError, FileNotFoundError):
            Path(f"{store}.failed").touch(exist_ok=False)
            print(f"rank {rank}: {traceback.format_exc()}", file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)


def main(settings: Mapping[str, Any]) -> int:
    """Run the ranks until they are told to end, or one of them fails."""
    machines = make(Machines, settings["machines"])
    os.environ["GLOO_SOCKET_IFNAME"] = OUT
    # Answers have a descriptor of their own: what libraries print must not come between them.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    faulthandler.enable()  # what crashes a rank is else one line without a place
    run_first()
    network = Network(machines, settings["prefix"])
    pids = {_forked(rank, network, settings["store"], answers): rank for rank in range(machines.ranks)}
    answers.close()
    failed = 0
    while pids:
        pid, status = os.wait()
        rank = pids.pop(pid)
        signalled = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        if signalled and not (failed and signalled == signal.SIGTERM):
            # Not always the first to end: others notice at once, while it is still writing its core.
            print(f"rank {rank} died of {signal.Signals(signalled).name}", file=sys.stderr)
        if status and not failed:
            failed = 1
            for left in pids:
                os.kill(left, signal.SIGTERM)
    return failed


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
