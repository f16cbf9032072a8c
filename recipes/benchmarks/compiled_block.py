"""One Transformer block on context-parallel ranks: graphs, compile seconds, saved bytes, kernels, step seconds.

    torchrun --nproc-per-node 4 -m recipes.benchmarks.compiled_block --cache /tmp/cache

Eager, compiled and compiled for any length take turns, step after step. Run it twice with the same cache for cold and
for warm compile seconds.
"""

import os
import platform
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from torch import Tensor, nn
from torch.distributed.tensor.parallel import parallelize_module

from recipes.benchmarks.attention import commit
from recipes.train_bytes.model import Block, ModelConfig, rotations
from wallfacer_dt import TokenOrder, WallFacerParallel, context_mesh, sequence_positions

Step = Callable[[Tensor, tuple[Tensor, Tensor]], Tensor]


@dataclass
class Contender:
    """One way to run the block, and what was found of it on rank 0."""

    name: str
    run: Step
    compile_seconds: float = 0.0
    graphs: int = 0
    kernels: int = 0
    from_cache: int = 0
    saved: int = 0
    seconds: list[float] = field(default_factory=list)


def first_step(contender: Contender, block: nn.Module, x: Tensor, turn: tuple[Tensor, Tensor]) -> None:
    """Compile, forward and backward, and note what that made and kept."""
    from torch._dynamo.utils import counters
    from torch._inductor.utils import run_and_get_code

    counters.clear()
    parameters = {p.untyped_storage().data_ptr() for p in block.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    start = time.perf_counter()
    _, codes = run_and_get_code(lambda: contender.run(x, turn).sum().backward())
    contender.compile_seconds = time.perf_counter() - start
    contender.graphs = counters["stats"]["unique_graphs"]
    contender.kernels = sum(len(re.findall(r"^ +(?:cpp|triton)_\w+(?:\.run)?\(", code, re.M)) for code in codes)
    contender.from_cache = counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        contender.run(x, turn)
    contender.saved = sum(kept.values())


def one_step(contender: Contender, x: Tensor, turn: tuple[Tensor, Tensor]) -> float:
    """Seconds of forward and backward, from barrier to barrier."""
    dist.barrier()
    start = time.perf_counter()
    contender.run(x, turn).sum().backward()
    dist.barrier()
    return time.perf_counter() - start


def main(
    cache: Annotated[Path, typer.Option(help="Folder of torch's compile caches; empty for cold numbers.")],
    team: Annotated[int, typer.Option(help="Ranks in a team.")] = 2,
    length: Annotated[int, typer.Option(help="Tokens of the whole sequence.")] = 4096,
    dim: Annotated[int, typer.Option(help="Model dim.")] = 512,
    heads: Annotated[int, typer.Option(help="Query heads.")] = 8,
    kv_heads: Annotated[int, typer.Option(help="Key and value heads.")] = 2,
    rounds: Annotated[int, typer.Option(help="Steps of each contender that count.")] = 15,
) -> None:
    """Print a table in Markdown."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    dist.init_process_group("gloo", timeout=timedelta(seconds=600))
    torch.set_num_threads(1)
    size = dist.get_world_size()
    mesh = context_mesh("cpu", size // team, team)
    torch.manual_seed(0)
    config = ModelConfig(dim=dim, layers=1, heads=heads, kv_heads=kv_heads)
    block = Block(config)
    order = TokenOrder("head_tail", mesh)
    parallelize_module(block, mesh, {"attention.inner": WallFacerParallel(is_causal=True, order=order)})
    x = torch.randn(1, length // size, dim, requires_grad=True)
    turn = rotations(sequence_positions(length, order), config.head_dim, config.rope_base)
    contenders = [
        Contender("eager", block),
        Contender("compiled", torch.compile(block, fullgraph=True)),
        Contender("compiled for any length", torch.compile(block, fullgraph=True, dynamic=True)),
    ]
    for contender in contenders:
        torch._dynamo.reset()
        first_step(contender, block, x, turn)
    for _ in range(rounds + 1):
        for contender in contenders:
            contender.seconds.append(one_step(contender, x, turn))
    if dist.get_rank() == 0:
        print(
            f"{size} gloo ranks, ring {size // team} x team {team}, on {os.cpu_count()} cores ({platform.machine()}), "
            f"torch {torch.__version__}, commit {commit()};"
        )
        print(
            f"one block, dim {dim}, {heads}/{kv_heads} heads, N={length}, float32, causal in head-tail order, rank 0; "
            f"medians of {rounds} alternating steps\n"
        )
        print("| | graphs | compile s | from cache | generated kernels a step | saved MiB | step ms | spread |")
        print("| --- | --- | --- | --- | --- | --- | --- | --- |")
        for c in contenders:
            steps = c.seconds[1:]
            middle = statistics.median(steps)
            cached, spread = "yes" if c.from_cache else "no", (max(steps) - min(steps)) / middle
            print(
                f"| {c.name} | {c.graphs} | {c.compile_seconds:.1f} | {cached} | {c.kernels} | {c.saved / 2**20:.2f} | "
                f"{1e3 * middle:.0f} | {spread:.0%} |"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
