"""What a layer holds on one rank, measured; see ``wallfacer_dt.planning.alive``."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor  # noqa: TID251  (its type, no operation)
from torch.distributed.tensor import DTensor

from wallfacer_dt.planning.alive import Alive, storage_of


def plain(x: Tensor) -> Tensor:
    """What a tensor holds on this rank."""
    x = x.to_local() if isinstance(x, DTensor) else x
    return x.wait() if isinstance(x, AsyncCollectiveTensor) else x


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages of tensors on this rank, each storage once."""
    storages = {storage_of(plain(x))._cdata: storage_of(plain(x)).nbytes() for x in tensors}
    return sum(storages.values())


@dataclass(frozen=True, slots=True)
class Measured:
    """Bytes on one rank beyond its own weights.

    Attributes:
        weights: those, which the others leave out.
        kept: x and what autograd keeps, after the forward; without the output, which is the next layer's.
        peak: the most during the forward, the output among it.
        step_peak: the most during forward and backward, gradients among it.
        grads: of the weights, after the backward.
        largest: the largest tensor made in the forward.
    """

    weights: int
    kept: int
    peak: int
    step_peak: int
    grads: int
    largest: int


def measure(layer: nn.Module, x: Tensor, *, backward: bool = True) -> Measured:
    """Run a layer forward and backward, and say what was alive.

    Args:
        layer: whose parameters may be DTensors.
        x: its input on this rank, a leaf.
        backward: run the backward too; otherwise what is said of it is that of the forward.

    Returns:
        The bytes.
    """
    parameters = list(layer.parameters())
    weights = nbytes(parameters)
    with Alive(x, *(plain(w) for w in parameters)) as alive:
        y = layer(x)
        out = plain(y)  # which waits for it
        kept, peak, largest = alive.now - nbytes([out]), alive.peak, alive.largest
        if backward:
            y.backward(torch.ones_like(out))
        grads = nbytes(w.grad for w in parameters if w.grad is not None)
        return Measured(weights, kept - weights, peak - weights, alive.peak - weights, grads, largest)
