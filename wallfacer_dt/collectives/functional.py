"""The operations, on the raw ``_c10d_functional`` ops (private; run on torch 2.11.0, 2.13.0, 2.14.1 and 2.15.0).

All take flat contiguous buffers: these ops split dim 0 whatever the caller meant. All are traceable and run on
gloo and NCCL alike, but that gloo gathers nothing on CUDA; point-to-point transfers are an all-to-all with one nonzero
split, because the functional send and receive of torch 2.13 are missing in 2.11 and write into buffers that their
schemas call functional.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch

# Importing the module defines the ops' fake implementations.
import torch.distributed._functional_collectives
from torch import Tensor

from wallfacer_dt.agreement.progress import Waiting
from wallfacer_dt.collectives.groups import group_ranks, group_size, is_sent_by

_ops = torch.ops._c10d_functional


def all_gather(buffer: Tensor, group: str) -> Tensor:
    """Start gathering ``buffer`` (n,) from every rank of the group: pending (size * n,), by rank."""
    check_gather(buffer.device, group)
    return _ops.all_gather_into_tensor(buffer, group_size(group), group)


def check_gather(device: torch.device, group: str) -> None:
    """Refuse (ValueError) to gather what is on a GPU in a group of gloo.

    Its gathering into one tensor would read a device's memory as the host's, and end the process.
    """
    if device.type == "cuda" and is_sent_by(group, device, "gloo"):
        raise ValueError(
            "gloo does not gather what is on cuda into one tensor: initialise the process group with 'nccl' or "
            "'cpu:gloo,cuda:nccl'"
        )


def permute(buffer: Tensor, to: int, source: int, size: int, group: str) -> Tensor:
    """Start sending ``buffer`` (n,) to rank ``to`` of the ``size``, receiving as much from ``source``: pending (n,)."""
    n = buffer.numel()
    return all_to_all(buffer, _one(size, to, n), _one(size, source, n), group)


@lru_cache(maxsize=1024)
def _one(size: int, rank: int, n: int) -> list[int]:
    return [n if other == rank else 0 for other in range(size)]


def all_to_all(buffer: Tensor, sent: Sequence[int], received: Sequence[int], group: str) -> Tensor:
    """Start sending ``sent[j]`` elements of ``buffer`` to rank j, receiving ``received[j]`` from it: pending."""
    return _ops.all_to_all_single(buffer, received, sent, group)


def broadcast(buffer: Tensor, source: int, group: str) -> Tensor:
    """Start sending ``buffer`` (n,) of rank ``source`` to all: pending (n,).

    Others give something of that shape, which is copied first and may therefore be one element expanded.
    """
    return _ops.broadcast(buffer, source, group)


def received(pending: Tensor) -> Tensor:
    """Wait until a started operation has arrived, within a :class:`Waiting` that says what it brings."""
    return _ops.wait_tensor(pending)


def wait(pending: Tensor, what: object, group: str) -> Tensor:
    """Wait until a started operation has arrived; ``what`` it brings is said as :class:`Waiting` does."""
    with Waiting(what, lambda: group_ranks(group)):
        return received(pending)
