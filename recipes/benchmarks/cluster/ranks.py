"""The ranks of one node: they wait for commands, which rank 0 of all reads and answers, and do them together.

    python -m recipes.benchmarks.cluster.ranks '{"node": 0, "nodes": 4, "per_node": 4, "store": "/tmp/..."}'

Commands and answers are lines of JSON. torch is imported once a node, and its ranks are forked.
"""

import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from recipes.benchmarks.cluster.cases import Case, Nodes
from recipes.benchmarks.cluster.chosen import choose
from recipes.benchmarks.cluster.contenders import Contender
from recipes.benchmarks.cluster.gathered import gathered_attention
from wallfacer_dt import TokenOrder, context_mesh, context_parallel_attention, sequence_positions
from wallfacer_dt.mesh import context_groups, temporary_groups
from wallfacer_dt.planning.probe import Probe
from wallfacer_dt.testing import worst_error

Answer = dict[str, Any] | None
Four = tuple[Tensor, ...]
"""Queries, keys, values and the output's gradient; or output and gradients of the first three."""

# A rank may wait while another computes alone, or while the run's owner thinks.
_PATIENCE = timedelta(minutes=30)


class Rank:
    """One rank: of the case at hand its inputs and the last result.

    Args:
        cluster: how ranks are spread over nodes.
    """

    def __init__(self, cluster: Nodes) -> None:
        self.cluster = cluster
        self.is_first = dist.get_rank() == 0
        self.probe: Probe | None = None
        self.case: Case | None = None
        self.positions: dict[str, Tensor] = {}
        self.shards: dict[tuple[int, ...], Four] = {}
        self.whole: Four = ()
        self.reference: Four = ()
        self.result: Four = ()

    def do(self, command: Mapping[str, Any]) -> Answer:
        """Do what a command says, on all ranks together; the first rank's answer counts."""
        contender = Contender(**command["contender"]) if "contender" in command else None
        case = Case(**command["case"]) if "case" in command else None
        match command["do"], contender, case:
            case "choose", _, Case() as case:
                self.probe = self.probe or Probe.on("cpu", self.cluster.per_node)
                return asdict(choose(case, self.probe))
            case "prepare", _, Case() as case:
                return self.prepare(case, [Contender(**fields) for fields in command["contenders"]])
            case "pass", Contender() as contender, _:
                return self.one_pass(contender)
            case "check", Contender() as contender, _:
                return self.check(contender)
            case "talk", _, _:
                return self.talk(command["where"], command["bytes"])
        raise ValueError(f"unknown command {command}")

    @contextmanager
    def mesh(self, contender: Contender) -> Iterator[DeviceMesh]:
        """The contender's mesh, while it takes its turn: gloo's threads, of every group, wake up all the while."""
        mesh = context_mesh(
            "cpu", contender.ring, contender.team, ulysses=contender.ulysses, placement=contender.placement
        )
        with temporary_groups(mesh):
            # What a call does once on a new mesh is no part of a turn.
            context_groups(mesh)
            for group in mesh.get_all_groups():
                dist.barrier(group)
            yield mesh
            dist.barrier()

    def prepare(self, case: Case, contenders: list[Contender]) -> Answer:
        """Make the inputs of a case, the same on every rank, and keep this rank's shards."""
        self.case, self.result, self.reference = case, (), ()
        self.positions, self.shards = {}, {}
        for contender in contenders:
            if contender.kind != "whole":
                with self.mesh(contender) as mesh:
                    self.positions[contender.name] = sequence_positions(case.length, TokenOrder(contender.order, mesh))
        held = {_place(positions): positions for positions in self.positions.values()}
        generator = torch.Generator().manual_seed(0)
        wholes, shards = [], []
        for heads in (case.heads, case.kv_heads, case.kv_heads, case.heads):
            x = torch.randn(1, heads, case.length, case.head_dim, generator=generator)
            shards.append([x[:, :, positions] for positions in held.values()])
            wholes += [x] * self.is_first
        self.shards = dict(zip(held, zip(*shards, strict=True), strict=True))
        self.whole = tuple(wholes)
        return None

    def one_pass(self, contender: Contender) -> Answer:
        """Seconds of forward and backward, each from barrier to barrier."""
        with self.mesh(contender) if contender.kind == "context" else nullcontext() as mesh:
            return self._timed(contender, self._attention(contender, mesh))

    def _timed(self, contender: Contender, attend: Callable[..., Tensor]) -> Answer:
        alone = contender.kind == "whole"
        idle = alone and not self.is_first
        inputs = () if idle else self.whole if alone else self.shards[_place(self.positions[contender.name])]
        leaves = [x.detach().requires_grad_() for x in inputs[:3]]
        out, grads = None, ()
        if alone:
            torch.set_num_threads(os.cpu_count() or 1)
        marks = [_barrier()]
        if not idle:
            out = attend(*leaves)
        marks.append(_barrier())
        if out is not None:
            grads = torch.autograd.grad(out, leaves, inputs[3])
        marks.append(_barrier())
        torch.set_num_threads(1)
        self.result = () if out is None else (out.detach(), *grads)
        return {"forward": marks[1] - marks[0], "backward": marks[2] - marks[1]}

    def _attention(self, contender: Contender, mesh: DeviceMesh | None) -> Callable[..., Tensor]:
        assert self.case is not None, "a case is prepared first"
        is_causal = self.case.is_causal
        if contender.kind == "whole":
            return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)
        if mesh is None:
            return lambda q, k, v: gathered_attention(q, k, v, is_causal=is_causal)
        order = TokenOrder(contender.order, mesh)
        return lambda q, k, v: context_parallel_attention(
            q, k, v, mesh, is_causal=is_causal, order=order, schedule=contender.schedule,
            rotate=contender.rotate, rotate_forward=contender.rotate_forward,
        )  # fmt: skip

    def check(self, contender: Contender) -> Answer:
        """The largest relative error of the last pass' result, of output and gradients; the floor's is the truth."""
        if contender.kind == "whole":
            self.reference = self.result
            return {"error": 0.0}
        places = self._gathered(self.positions[contender.name])
        pairs = []
        for index, shard in enumerate(self.result):
            parts = self._gathered(shard.contiguous())
            if self.is_first:
                truth = self.reference[index]
                found = torch.full_like(truth, torch.nan)
                for positions, part in zip(places, parts, strict=True):
                    found[:, :, positions] = part
                pairs.append((found, truth))
        return {"error": worst_error(pairs, relative_to="largest")} if self.is_first else None

    def _gathered(self, x: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())] if self.is_first else None
        dist.gather(x, parts)
        return parts or []

    def talk(self, where: str, count: int) -> Answer:
        """Exchange bytes with the ranks of one's own node, or (``where`` is "across") with those of all nodes."""
        with self.mesh(Contender("", ring=self.cluster.nodes, team=self.cluster.per_node)) as mesh:
            group = mesh["cp_ring" if where == "across" else "cp_team"].get_group()
            dist.all_reduce(torch.ones(count // 4), group=group)
        return None


def _place(positions: Tensor) -> tuple[int, int, int]:
    """What tells shards of one sequence apart."""
    return int(positions[0]), int(positions[-1]), len(positions)


def _barrier() -> float:
    dist.barrier()
    return time.perf_counter()


def _serve(rank: int, cluster: Nodes, store: str, answers: TextIO) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=cluster.ranks, timeout=_PATIENCE
    )
    one = Rank(cluster)
    answer: Answer = None
    while True:
        command = [None]
        if rank == 0:
            print(json.dumps(answer), file=answers, flush=True)
            line = sys.stdin.readline()
            command = [json.loads(line) if line else None]
        dist.broadcast_object_list(command, 0)
        if command[0] is None:
            return
        answer = one.do(command[0])


def _forked(rank: int, cluster: Nodes, store: str, answers: TextIO) -> int:
    pid = os.fork()
    if not pid:
        os._exit(_status(rank, cluster, store, answers))
    return pid


def _status(rank: int, cluster: Nodes, store: str, answers: TextIO) -> int:
    try:
        _serve(rank, cluster, store, answers)
    except BaseException:
        # Others fail because the first one did, or all because the folder and the network are being removed.
        with suppress(FileExistsError, FileNotFoundError):
            Path(f"{store}.failed").touch(exist_ok=False)
            print(f"rank {rank}: {traceback.format_exc()}", file=sys.stderr)
        sys.stderr.flush()
        return 1
    return 0


def main(settings: Mapping[str, Any]) -> int:
    """Run the ranks of one node until they are told to end, or one of them fails."""
    cluster = Nodes(settings["nodes"], settings["per_node"])
    # Answers have a descriptor of their own: what libraries print must not come between them.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    faulthandler.enable()  # what crashes a rank is else one line without a place
    first = settings["node"] * cluster.per_node
    pids = {_forked(rank, cluster, settings["store"], answers): rank for rank in range(first, first + cluster.per_node)}
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
