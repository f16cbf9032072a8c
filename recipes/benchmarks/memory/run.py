"""Measuring a contender: on one rank of a world that does not exist, or on gloo ranks."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from recipes.benchmarks.memory.baselines import Contender, make, mesh_of
from recipes.benchmarks.memory.formulas import Kind, Layer
from recipes.benchmarks.memory.measure import Measured, measure
from wallfacer_dt.testing import RankPool


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured.

    Attributes:
        kind: of the layer.
        contender: how ranks share it.
        layer: its sizes.
        flash: with flash attention; otherwise scores are stored.
        dtype: name of the dtype of weights and tokens.
        backward: run it, too.
    """

    kind: Kind
    contender: Contender
    layer: Layer
    flash: bool = True
    dtype: str = "float32"
    backward: bool = True

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype."""
        return getattr(torch, self.dtype)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of one rank's tokens."""
        return self.layer.batch, self.layer.tokens // self.layer.ranks, self.layer.hidden


@contextmanager
def fake_world(size: int, rank: int = 0) -> Iterator[None]:
    """This process as one rank of a world that does not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def on_fake_ranks(case: Case) -> Measured:
    """Measure rank 0, on tensors without contents."""
    with fake_world(case.layer.ranks):
        mesh = mesh_of(case.contender, case.layer.ranks)
        with FakeTensorMode():
            module = make(case.kind, case.contender, case.layer, mesh, flash=case.flash, dtype=case.torch_dtype)
            x = torch.empty(case.shape, dtype=case.torch_dtype, requires_grad=True)
            if case.contender == "tp":
                # DTensor finds out shapes with fake tensors of the whole, once; the mode must not see those.
                _run(module, x)
                module.zero_grad()
                x.grad = None
            return measure(module, x, backward=case.backward)


@dataclass(frozen=True, slots=True)
class OnRank:
    """What one gloo rank saw.

    Attributes:
        measured: by the dispatch mode.
        grown: bytes by which the process' largest resident set grew in another such step, without the mode.
    """

    measured: Measured
    grown: int


def on_gloo_ranks(case: Case) -> list[OnRank]:
    """Measure every rank of a fresh pool, by rank."""
    pool = RankPool(case.layer.ranks, timeout=120)
    try:
        return pool.run(_on_rank, case)
    finally:
        pool.close()


def _on_rank(case: Case) -> OnRank:
    # What is loaded and allocated at a first call is not the layer's.
    small = replace(case.layer, tokens=16 * case.layer.ranks, hidden=8 * case.layer.heads)
    _step(replace(case, layer=small))
    before = _largest_resident()
    _step(case)
    grown = _largest_resident() - before
    mesh = mesh_of(case.contender, case.layer.ranks)
    module = make(case.kind, case.contender, case.layer, mesh, flash=case.flash, dtype=case.torch_dtype)
    x = torch.randn(case.shape, dtype=case.torch_dtype, requires_grad=True)
    return OnRank(measure(module, x, backward=case.backward), grown)


def _step(case: Case) -> None:
    mesh = mesh_of(case.contender, case.layer.ranks)
    module = make(case.kind, case.contender, case.layer, mesh, flash=case.flash, dtype=case.torch_dtype)
    x = torch.randn(case.shape, dtype=case.torch_dtype, requires_grad=True)
    _run(module, x)


def _run(module: nn.Module, x: Tensor) -> None:
    y = module(x)
    y.backward(torch.ones_like(y))


def _largest_resident() -> int:
    """Bytes; Linux counts kibibytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
