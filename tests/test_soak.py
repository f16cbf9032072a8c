"""Long runs on ranks: nothing grows, whatever lengths, packings of documents and masks come along."""

import gc
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed import distributed_c10d  # noqa: TID251  (nothing is sent here)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from tests.cases import Inner, mesh_of
from wallfacer_dt import TokenOrder, WallFacerParallel, context_parallel_attention, shard_sequence
from wallfacer_dt.testing import RankPool

pytestmark = pytest.mark.ranks

DIM, HEADS = 32, 4


class Layer(nn.Module):
    """Attention within packed documents, and what is added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.inner = Inner()

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (-1, DIM // HEADS)).chunk(3, -2)
        return x + self.out(self.inner(q, k, v, document_ids=documents).flatten(-2))


class Seen(NamedTuple):
    """What one rank's process has at a step.

    Attributes:
        step: it.
        resident: bytes.
        objects: that the garbage collector knows.
        held: what is never to grow, by name: torch's maps of process groups, threads, files, tensors and functions.
        graphs: that were compiled.
    """

    step: int
    resident: int
    objects: int
    held: dict[str, int]
    graphs: int


def seen(step: int, graphs: int) -> Seen:
    gc.collect()
    objects, world = gc.get_objects(), distributed_c10d._world
    held = {name: len(getattr(world, name)) for name in ("pg_map", "pg_names", "pg_group_ranks", "pg_to_tag")}
    held |= {
        "threads of Python": threading.active_count(),
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
        "tensors": sum(issubclass(type(x), Tensor) for x in objects),
        "functions": sum(type(x) is FunctionType for x in objects),  # masks, too
    }
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return Seen(step, resident, len(objects), held, graphs)


def packed(draw: random.Random, length: int) -> list[int]:
    """Where documents begin in a sequence, and its length."""
    return [0, *sorted(draw.sample(range(1, length), draw.randint(0, 6))), length]


def train(mesh: DeviceMesh, backend: str) -> Callable[[int, random.Random], int]:
    """A step of a styled model, compiled if a backend is named; and how many graphs there are."""
    torch.manual_seed(0)
    order = TokenOrder("head_tail", mesh)
    plan = {"*.inner": WallFacerParallel(is_causal=True, order=order, check=False)}
    model: Any = parallelize_module(nn.ModuleList([Layer()]), mesh, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    counter = CompileCounterWithBackend(backend or "eager")

    def forward(x: Tensor, documents: Tensor) -> Tensor:
        for layer in model:
            x = layer(x, documents)
        return x.square().mean()

    run = torch.compile(forward, backend=counter, fullgraph=True) if backend else forward

    def step(length: int, draw: random.Random) -> int:
        ends = packed(draw, length)
        documents = torch.arange(len(ends) - 1).repeat_interleave(torch.tensor(ends).diff()).unsqueeze(0)
        x = shard_sequence(torch.randn(1, length, DIM), order, dim=1)
        run(x, documents).backward()
        optimizer.step()
        optimizer.zero_grad()
        return counter.frame_count

    return step


def attend(mesh: DeviceMesh) -> Callable[[int, random.Random], None]:
    """A call of the function: an order that goes by documents, windows in documents, or a mask that is made anew."""
    by_document, contiguous = (TokenOrder(name, mesh) for name in ("document_head_tail", "contiguous"))

    def call(length: int, order: TokenOrder, dealing: dict[str, Tensor], **options: Any) -> None:
        q, k, v = (
            shard_sequence(torch.randn(1, n, length, 8), order, dim=2, **dealing).requires_grad_() for n in (4, 2, 2)
        )
        context_parallel_attention(q, k, v, mesh, order=order, length=length, **dealing, **options).sum().backward()

    def step(length: int, draw: random.Random) -> None:
        documents, way = {"cu_seqlens": torch.tensor(packed(draw, length))}, draw.randrange(3)
        if way == 0:
            call(length, by_document, documents, is_causal=True)
        elif way == 1:
            call(length, contiguous, documents, window_size=(draw.randint(1, 9), None))
        else:
            tags = torch.randint(0, 3, (length,))
            call(length, contiguous, {}, mask_mod=lambda b, h, q, kv: (tags[q] == tags[kv]) | (q == kv))

    return step


def soak(steps: int, every: int, backend: str, folder: str = "") -> list[Seen]:
    """What a rank has, from time to time, over steps of which each has its own length and documents.

    The model is compiled if a backend is named, with torch's caches in the folder.
    """
    if folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    mesh, draw = mesh_of(2, 2), random.Random(0)
    torch.manual_seed(1)
    training, attending, found = train(mesh, backend), attend(mesh), []
    for number in range(1, steps + 1):
        length = 4 * draw.randint(8, 40)
        graphs = training(length, draw)
        attending(length + draw.randint(0, 3), draw)
        if number % every == 0:
            found.append(seen(number, graphs))
    return found


def grown(found: list[Seen], warm: int) -> dict[str, Any]:
    """Of what is never to grow, what has after the step at which a rank is warm: how many there were, and are."""
    (before,) = (one for one in found if one.step == warm)
    after = [one.held for one in found if one.step > warm]
    assert after
    most = {name: max(held[name] for held in after) for name in before.held}
    return {name: (before.held[name], n) for name, n in most.items() if n > before.held[name]}


def test_what_grows_is_seen() -> None:
    flat = [Seen(step, 100, 100, {"files": 3, "threads": 9 - step}, 0) for step in (1, 2, 3, 4)]
    assert grown(flat, 2) == {}
    assert grown([*flat, flat[0]._replace(step=5, held={"files": 4, "threads": 7})], 2) == {"files": (3, 4)}


@pytest.mark.slow
def test_nothing_grows_within_a_few_steps(ranks: Callable[[int], RankPool]) -> None:
    for found in ranks(4).run(soak, 24, 8, ""):
        assert grown(found, 16) == {}


# Steps after which a rank has met every length, and most of its caches are full: of 64 to 1,024 entries, small ones.
WARM, STEPS = 200, 1000


@pytest.mark.whole
@pytest.mark.parametrize("backend", ["", "inductor"])
def test_nothing_grows_within_a_thousand_steps(backend: str, tmp_path: Path) -> None:
    """Process groups, threads, files, tensors and masks; memory by no more than 2%; a graph and one of any length."""
    pool = RankPool(4, timeout=3000)
    try:
        ranks = pool.run(soak, STEPS, 100, backend, str(tmp_path))
    finally:
        pool.close()
    for rank, found in enumerate(ranks):
        print(*(f"rank {rank}, {one}" for one in found), sep="\n")
        assert grown(found, 100) == {}
        assert {one.graphs for one in found} == {2 if backend else 0}
        warm, *after = (one for one in found if one.step >= WARM)
        assert max(one.resident for one in after) <= 1.02 * warm.resident
        # What caches that are not full yet take; each step's own plan, documents or mask would be dozens.
        assert after[-1].objects - warm.objects <= 5 * (STEPS - WARM)
