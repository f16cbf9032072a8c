"""Seconds of one attention call, forward and backward, for every mesh and schedule of the ranks there are.

    torchrun --nproc-per-node 4 -m recipes.benchmarks.attention --length 4096 --heads 16 --kv-heads 16

All contenders run in turn, round after round, so that whatever else the machine does hits them alike. The one process
that holds the whole sequence runs on rank 0 with all cores while the other ranks wait.
"""

import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from itertools import product
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import typer
from torch import Tensor

from wallfacer_dt import TokenOrder, attention_volume, context_mesh, context_parallel_attention

Seconds = tuple[float, float]


@dataclass(frozen=True)
class Contender:
    """One way to compute the same attention; ``attend`` takes this rank's shards, or on one process everything."""

    name: str
    attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    received: str
    whole: bool = False


def contenders(
    batch: int, length: int, heads: int, kv_heads: int, head_dim: int, is_causal: bool
) -> Iterator[Contender]:
    """Plain attention in one process, then every mesh with every schedule and rotation that fits it."""

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)

    yield Contender("one process, all cores", plain, "-", whole=True)
    size = dist.get_world_size()
    shape = {"batch": batch, "length": length, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    for ulysses, ring, team in meshes(size, heads):
        ways = [("2d", *rotations) for rotations in product(("kv", "q"), repeat=2)]
        ways += [("published", "q", "kv")] * (team > 1 and ring % team == 0)
        mesh = context_mesh("cpu", ring, team, ulysses=ulysses)
        order = TokenOrder("head_tail" if is_causal else "contiguous", mesh)
        for schedule, rotate, rotate_forward in ways if ring * team > 1 else [("2d", "auto", "auto")]:
            way = {"schedule": schedule, "rotate": rotate, "rotate_forward": rotate_forward}
            volume = attention_volume(ring, team, ulysses=ulysses, dtype=torch.float32, **way, **shape)

            def attend(q: Tensor, k: Tensor, v: Tensor, mesh=mesh, order=order, way: dict[str, Any] = way) -> Tensor:
                return context_parallel_attention(q, k, v, mesh, is_causal=is_causal, order=order, **way)

            name = f"ring {ring} x team {team}, {schedule}, rotates {rotate_forward}, backward {rotate}"
            if ulysses > 1:
                name = f"ulysses {ulysses} x {name}" if ring * team > 1 else f"ulysses {ulysses}"
            received = f"{volume.forward.bytes / 2**20:.1f} + {volume.backward.bytes / 2**20:.1f}"
            yield Contender(name, attend, received)


def meshes(size: int, heads: int) -> Iterator[tuple[int, int, int]]:
    """(ulysses, ring, team): rings with every team size, then Ulysses with rings and alone, as far as heads go."""
    divisors = [n for n in range(1, size + 1) if size % n == 0]
    yield from ((1, size // team, team) for team in divisors)
    yield from ((ulysses, size // ulysses, 1) for ulysses in divisors if 1 < ulysses <= heads)


def one_round(contender: Contender, shapes: tuple[tuple[int, ...], ...]) -> Seconds:
    """Forward and backward seconds on rank 0, from barrier to barrier."""
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    idle = contender.whole and dist.get_rank() > 0
    torch.set_num_threads(os.cpu_count() or 1 if contender.whole else 1)
    marks = []
    out = None
    for phase in range(2):
        dist.barrier()
        marks.append(time.perf_counter())
        if not idle and phase == 0:
            out = contender.attend(*inputs)
        elif out is not None:
            out.sum().backward()
    dist.barrier()
    marks.append(time.perf_counter())
    torch.set_num_threads(1)
    return marks[1] - marks[0], marks[2] - marks[1]


def commit() -> str:
    """The commit of this checkout, marked where it has changes."""
    done = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def main(
    length: Annotated[int, typer.Option(help="Tokens of the whole sequence.")] = 4096,
    heads: Annotated[int, typer.Option(help="Query heads.")] = 16,
    kv_heads: Annotated[int, typer.Option(help="Key and value heads.")] = 16,
    head_dim: Annotated[int, typer.Option(help="Elements of a head.")] = 64,
    batch: Annotated[int, typer.Option(help="Sequences.")] = 1,
    rounds: Annotated[int, typer.Option(help="Rounds after a first one that is not counted.")] = 7,
    causal: Annotated[bool, typer.Option(help="Causal, in head-tail order; otherwise no mask.")] = False,
) -> None:
    """Print a table in Markdown."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    torch.set_num_threads(1)
    size = dist.get_world_size()
    runners = list(contenders(batch, length, heads, kv_heads, head_dim, causal))
    seconds: dict[str, list[Seconds]] = {contender.name: [] for contender in runners}
    for counted in [False] + [True] * rounds:
        for contender in runners:
            tokens = length if contender.whole else length // size
            shapes = tuple((batch, n, tokens, head_dim) for n in (heads, kv_heads, kv_heads))
            taken = one_round(contender, shapes)
            if counted:
                seconds[contender.name].append(taken)
    if dist.get_rank() == 0:
        mask = "causal, head-tail" if causal else "no mask"
        print(
            f"{size} gloo ranks on {os.cpu_count()} cores ({platform.machine()}), torch {torch.__version__}, ", end=""
        )
        print(f"commit {commit()}; B={batch}, N={length}, {heads}/{kv_heads} heads of {head_dim}, float32, {mask};")
        print(f"medians of {rounds} alternating rounds, seconds; spread is (slowest - fastest) / median of the sum\n")
        print("| contender | forward | backward | sum | spread | MiB received, forward + backward |")
        print("| --- | --- | --- | --- | --- | --- |")
        for contender in runners:
            forward, backward = zip(*seconds[contender.name], strict=True)
            sums = [sum(pair) for pair in seconds[contender.name]]
            middle = statistics.median(sums)
            spread = (max(sums) - min(sums)) / middle
            cells = (statistics.median(forward), statistics.median(backward), middle)
            numbers = " | ".join(f"{cell:.3f}" for cell in cells)
            print(f"| {contender.name} | {numbers} | {spread:.0%} | {contender.received} |")
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
