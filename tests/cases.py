"""What ranks run: one attention case, forward and backward, on seeded inputs.

Sharding is written out here once more, so that the tests do not trust the package's own.
"""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import wallfacer_dt
from wallfacer_dt.testing import AttentionResult, attention_oracle, count_collectives


class Inner(nn.Module):
    """Something for a style to replace."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True)
class Case:
    """One call: mesh, shapes (B, N, L, H), options and how the inputs are drawn."""

    ring: int = 2
    team: int = 2
    placement: str = "team_in_node"
    batch: int = 1
    heads: int = 2
    kv_heads: int = 2
    shard: int = 4
    head_dim: int = 16
    dtype: str = "float64"
    is_causal: bool = False
    order: str = "contiguous"
    schedule: str = "2d"
    rotate: str = "auto"
    kernel: str = "auto"
    scale: float | None = None
    inputs: str = "normal"

    @property
    def size(self) -> int:
        return self.ring * self.team

    @property
    def options(self) -> dict[str, Any]:
        names = ("is_causal", "order", "schedule", "rotate", "kernel", "scale")
        return {name: getattr(self, name) for name in names}


def draw(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and grad_out of the whole sequence, the same wherever they are drawn."""
    generator = torch.Generator().manual_seed(zlib.crc32(repr(replace(case, dtype="")).encode()))
    dtype = getattr(torch, case.dtype)
    length = case.shard * case.size

    def normal(heads: int) -> Tensor:
        shape = (case.batch, heads, length, case.head_dim)
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, k, v, grad_out = (normal(n) for n in (case.heads, case.kv_heads, case.kv_heads, case.heads))
    if case.inputs == "huge":  # scores of about +-1e4
        q, k = q * 1000, k.sign() * 40 / case.head_dim**0.5
    if case.inputs == "equal":  # all scores equal
        k = torch.ones_like(k)
    if case.inputs == "tiny_grad":  # squares of the gradient underflow
        grad_out = grad_out * 1e-25
    if case.inputs == "zero_grad":
        grad_out = torch.zeros_like(grad_out)
    return tuple(x.to(dtype) for x in (q, k, v, grad_out))


def held(index: int, size: int, order: str, length: int) -> list[int]:
    """Global positions that sequence index ``index`` holds."""
    if order == "contiguous":
        return list(np.split(np.arange(length), size)[index])
    chunks = np.split(np.arange(length), 2 * size)
    return [*chunks[index], *chunks[2 * size - 1 - index]]


@lru_cache
def _made(ring: int, team: int, placement: str) -> DeviceMesh:
    return wallfacer_dt.context_mesh("cpu", ring, team, placement=placement)


def mesh_of(ring: int, team: int, placement: str = "team_in_node") -> DeviceMesh:
    """A mesh of this world, made once, with no token order yet."""
    mesh = _made(ring, team, placement)
    wallfacer_dt.release_order(mesh)
    return mesh


def index_of(case: Case) -> int:
    """This rank's sequence index, from its rank and the placement."""
    rank = dist.get_rank()
    if case.placement == "team_in_node":
        return rank
    return rank % case.ring * case.team + rank // case.ring


def prepare(case: Case) -> tuple[int, DeviceMesh, list[Tensor], Tensor]:
    """This rank's sequence index, mesh, leaves [q, k, v] and gradient of the output."""
    mesh = mesh_of(case.ring, case.team, case.placement)
    index = index_of(case)
    rows = held(index, case.size, case.order, case.shard * case.size)
    q, k, v, grad_out = (x[:, :, rows] for x in draw(case))
    if case.inputs == "strided":  # last dims whose stride is not 1
        q, grad_out = (x.mT.contiguous().mT for x in (q, grad_out))
        k, v = (torch.stack([x, x], -1)[..., 0] for x in (k, v))
    return index, mesh, [x.requires_grad_() for x in (q, k, v)], grad_out


def attend(case: Case, mesh: DeviceMesh, leaves: list[Tensor], grad_out: Tensor) -> list[np.ndarray]:
    """[out, dq, dk, dv] of this rank's shard in float64."""
    out = wallfacer_dt.context_parallel_attention(*leaves, mesh, **case.options)
    grads = torch.autograd.grad(out, leaves, grad_out)
    return [x.detach().double().numpy() for x in (out, *grads)]


def run(case: Case) -> tuple[int, list[np.ndarray], dict[str, int]]:
    """Sequence index, results and the bytes counted."""
    index, mesh, leaves, grad_out = prepare(case)
    with count_collectives(mesh) as traffic:
        results = attend(case, mesh, leaves, grad_out)
    counted = {"forward": traffic.forward.received_bytes, "backward": traffic.backward.received_bytes}
    return index, results, counted


def run_uncounted(case: Case) -> tuple[int, list[np.ndarray]]:
    """The same through the operators as users run them, without a dispatch mode."""
    index, mesh, leaves, grad_out = prepare(case)
    return index, attend(case, mesh, leaves, grad_out)


@contextmanager
def fake_world(size: int, rank: int = 0) -> Iterator[None]:
    """This process as one rank of a world that does not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def whole(case: Case, shards: list[tuple[int, list[np.ndarray]]]) -> AttentionResult:
    """Shards of all ranks put back in sequence order."""
    length = case.shard * case.size
    heads = (case.heads, case.heads, case.kv_heads, case.kv_heads)
    wholes = [np.full((case.batch, n, length, case.head_dim), np.nan) for n in heads]
    for index, results in shards:
        for target, shard in zip(wholes, results, strict=False):
            target[:, :, held(index, case.size, case.order, length)] = shard
    return AttentionResult(*(torch.from_numpy(x) for x in wholes))


def oracle(case: Case, **kwargs: Any) -> AttentionResult:
    """The same case in one process."""
    return attention_oracle(*draw(case), is_causal=case.is_causal, scale=case.scale, **kwargs)
