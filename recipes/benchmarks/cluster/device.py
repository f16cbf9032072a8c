"""A clocked device: kernels that take as long as they would on a device, and use no core meanwhile.

What blocks of attention give is zeros, not attention. So the kernel is there only once :func:`register` has been
called, and runs only where it is asked for by name and a device has been given its rates.

A stream runs its kernels one after the other, and each after the transfers that were waited for before it. What a host
does takes no time here: where it comes late, as on cores that many ranks share, its device catches up: it sleeps less.
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from wallfacer_dt import Kernels, register_kernel
from wallfacer_dt.algorithms.tiles import pairs
from wallfacer_dt.kernels.block import How, Need
from wallfacer_dt.kernels.merge import accumulation_dtype
from wallfacer_dt.kernels.visible import visible_keys
from wallfacer_dt.planning.attention import Costs
from wallfacer_dt.planning.programs import Call

KERNEL = "clocked"

_BLOCKED = 2e-4
"""Seconds: who waits no longer has found a transfer that had arrived before."""


class Device:
    """A rank's device."""

    def __init__(self) -> None:
        self.kernels: Kernels | None = None  # its rates; None: nothing may run on it
        self.busy = self.held = 0.0  # seconds since ``begin`` that its kernels take, and took as the rank really slept
        self._free = self._left = 0.0  # when it is free, and the rank woke up

    def begin(self) -> None:
        """Begin to count; nothing is queued."""
        self.busy = self.held = 0.0
        self._free = self._left = time.perf_counter()

    def wait(self, wait: Callable[[], Tensor]) -> Tensor:
        """Wait for a transfer, before which nothing that follows begins."""
        since = time.perf_counter()
        arrived = wait()
        now = time.perf_counter()
        if now - since > _BLOCKED:
            self._free = max(self._free, now)
        return arrived

    def compute(self, seconds: float) -> None:
        """Compute for so long, after all that came before."""
        begins = max(self._free, self._left)
        self._free += seconds
        self.busy += seconds
        self._left = max(begins, self._free)
        if (rest := self._free - time.perf_counter()) > 0:
            time.sleep(rest)
            self._left = time.perf_counter()
        self.held += self._left - begins


_MM = torch.mm

DEVICE = Device()
"""This process'."""


def register() -> None:
    """Make the kernel known, by the name :data:`KERNEL`."""
    register_kernel(KERNEL, _forward, _backward, _supports)


def product(a: Tensor, b: Tensor) -> Tensor:
    """``torch.mm``, which takes as long as it would on the device."""
    assert DEVICE.kernels is not None, "a device has been given its rates"
    found = _MM(a, b)
    DEVICE.compute(2 * a.shape[0] * a.shape[1] * b.shape[1] / DEVICE.kernels.linear)
    return found


def _forward(q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, Tensor]:
    _compute(q, k, how, backward=False)
    lse = q.new_zeros(q.shape[:-1], dtype=accumulation_dtype(q.dtype))
    return q.new_zeros((*q.shape[:-1], v.shape[-1])), lse


def _backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, how: How
) -> tuple[Tensor, Tensor, Tensor]:
    del grad_out, out, lse
    _compute(q, k, how, backward=True)
    return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)


def _supports(need: Need) -> bool | str:
    del need
    return True if DEVICE.kernels is not None else "computes nothing: it is for benchmarks of the emulated cluster"


def _compute(q: Tensor, k: Tensor, how: How, *, backward: bool) -> None:
    assert DEVICE.kernels is not None, "the kernel says that it cannot run"
    costs = Costs(DEVICE.kernels, q.shape[0], q.shape[1], k.shape[1], (q.shape[3],) * 2, q.dtype, backward=backward)
    rows, columns = q.shape[2], k.shape[2]
    area = int(pairs(rows, columns, *how.band))
    if how.mask is not None and (seen := visible_keys(how, q, k)) is not None:
        # Of all rows of the batch and heads, which may see different keys.
        area = int(seen.expand(*q.shape[:2], rows, columns).sum()) // (q.shape[0] * q.shape[1])
    DEVICE.compute(costs.of_call(Call(area, rows, columns, area / max(1, rows))))
