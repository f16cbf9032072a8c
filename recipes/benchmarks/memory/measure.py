"""What a layer holds on one rank, measured; see ``wallfacer_dt.planning.alive``."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor  # noqa: TID251  (its type, no operation)
from torch.distributed.tensor import DTensor

from recipes.benchmarks.memory.formulas import Kind, Layer, Overhead, overhead
from recipes.benchmarks.memory.layers import Contender, make, mesh_of
from wallfacer_dt.planning.alive import Alive, storage_of
from wallfacer_dt.testing.fake import fake_world


def plain(x: Tensor) -> Tensor:
    """What a tensor holds on this rank."""
    x = x.to_local() if isinstance(x, DTensor) else x
    return x.wait() if isinstance(x, AsyncCollectiveTensor) else x


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages of tensors on this rank, each storage once."""
    storages = {storage_of(plain(x))._cdata: storage_of(plain(x)).nbytes() for x in tensors}
    return sum(storages.values())


class Measured(NamedTuple):
    """Bytes of a rank's weights, and beyond these.

    After the forward x and what autograd keeps, without the output, which is the next layer's; the most in the forward,
    the output among it; the most in forward and backward, gradients among it; the forward's largest tensor.
    """

    weights: int
    kept: int
    peak: int
    step_peak: int
    largest: int


def measure(layer: nn.Module, x: Tensor, *, backward: bool = True) -> Measured:
    """Run a layer, whose parameters may be DTensors, on a leaf x, and say what was alive."""
    parameters = list(layer.parameters())
    weights = nbytes(parameters)
    with Alive(x, *(plain(w) for w in parameters)) as alive:
        y = layer(x)
        out = plain(y)  # which waits for it
        kept, peak, largest = alive.now - nbytes([out]), alive.peak, alive.largest
        if backward:
            y.backward(torch.ones_like(out))
        return Measured(weights, kept - weights, peak - weights, alive.peak - weights, largest)


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured: a layer, how ranks share it, the dtype's name, and whether the backward runs, too."""

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

    @property
    def formula(self) -> Overhead:
        """The paper's."""
        return overhead(self.kind, self.contender, self.layer, flash=self.flash)


@cache
def on_fake_ranks(case: Case) -> Measured:
    """Measure rank 0, on tensors without contents."""
    with fake_world(case.layer.ranks):
        mesh = mesh_of(case.contender, case.layer.ranks)
        with FakeTensorMode():
            module = make(case.kind, case.contender, case.layer, mesh, flash=case.flash, dtype=case.torch_dtype)
            x = torch.empty(case.shape, dtype=case.torch_dtype, requires_grad=True)
            if case.contender == "tp":
                # DTensor finds out shapes with fake tensors of the whole, once; the mode must not see those.
                y = module(x)
                y.backward(torch.ones_like(y))
                module.zero_grad()
                x.grad = None
            return measure(module, x, backward=case.backward)
