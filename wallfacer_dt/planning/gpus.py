"""GPUs by name, as the planner takes them: what data sheets say, what was measured, and what others have published.

Rates that were measured are of one call, 32 query and 8 key heads, 8192 queries that see all of 32768 keys (for heads
of 128 as ``make gpu`` takes time, for others by events), and what ``profile`` found of matrix products
(docs/benchmarks/gpu_2026-11-26.md). What was published, and by whom, is listed in docs/benchmarks/published.md; what is
assumed are round numbers beside these, and of a host one between those of two.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import torch

from wallfacer_dt.kernels.block import Need
from wallfacer_dt.kernels.registry import select_kernel, takes_segments
from wallfacer_dt.planning.attention import flops_of_pair
from wallfacer_dt.planning.cluster import Cluster, Kernels, Link

NODE = 8  # GPUs
INTRA_LATENCY, INTER_LATENCY = 5e-6, 10e-6  # seconds, assumed
GB = 10**9
AUTO = "flash"  # what ``auto`` is on GPUs, see :func:`wallfacer_dt.kernels.registry.select_kernel`


class Rates(NamedTuple):
    """Of attention's forward and backward, as in :class:`Kernels`, and who says so: measured, published or assumed."""

    forward: float
    backward: float
    source: str = "assumed"


@dataclass(frozen=True, slots=True)
class GPU:
    """A GPU in nodes of eight, each with an adapter of its own.

    Attributes:
        peak: dense, in bfloat16 and float16, floating point operations per second.
        memory: bytes.
        intra: bytes per second into a GPU from its node, as NCCL's rings reach them over NVLink.
        adapter: bytes per second into a node over one adapter, likewise.
        attention: of kernels by name, by head dim.
        linear: rate of other matrix products.
        merge: assumed rate at which memory is read and written, bytes per second.
        capability: CUDA's.
        source: of the first two.
        linear_source: who says that rate.
    """

    peak: float
    memory: int
    intra: float
    adapter: float
    attention: Mapping[str, Mapping[int, Rates]]
    linear: float
    merge: float
    capability: tuple[int, int]
    source: str
    linear_source: str = "published"

    def kernels(self, head_dim: int, kernel: str = "auto", value_dim: int | None = None) -> Kernels:
        """Rates of a kernel for heads of a dim, and perhaps of another of values, in 16 bits.

        Where one is padded to the other, that is computed, too.
        """
        dims = head_dim, head_dim if value_dim is None else value_dim
        _, (forward, backward, _) = self._row(max(dims), kernel)
        if self._pads(kernel, *dims):
            padded = [max(dims)] * 2
            forward *= flops_of_pair(*dims, backward=False) / flops_of_pair(*padded, backward=False)
            backward *= flops_of_pair(*dims, backward=True) / flops_of_pair(*padded, backward=True)
        return Kernels(
            forward, backward, self.linear, merge=self.merge, attention=kernel,
            takes_segments=takes_segments(kernel, "cuda"),
        )  # fmt: skip

    def origins(self, head_dim: int, kernel: str = "auto", value_dim: int | None = None) -> list[str]:
        """Who says these rates of attention, forward and backward."""
        widest = head_dim if value_dim is None else max(head_dim, value_dim)
        dim, (*_, source) = self._row(widest, kernel)
        name = f" with {AUTO}" * (kernel == "auto")
        if source != "assumed" and dim == head_dim and value_dim in (None, head_dim):
            return [f"{source}{name}"] * 2
        heads = f" as for heads of {dim}" * (dim != head_dim)
        heads += ", padded" * (value_dim is not None and self._pads(kernel, head_dim, value_dim))
        kernels = self.kernels(head_dim, kernel, value_dim)
        rates = kernels.forward, kernels.backward
        return [f"assumed{name}, {rate / self.peak:.0%} of the peak{heads}" for rate in rates]

    def fastest(self, dtype: torch.dtype, head_dim: int, value_dim: int | None = None) -> tuple[str, Kernels]:
        """The kernel that one call takes least time with, of those that take such heads, and its rates."""
        every = {}
        for name in self.attention:
            with suppress(ValueError):
                check_kernel_of(name, self.capability, dtype, head_dim, value_dim)
                every[name] = self.kernels(head_dim, name, value_dim)
        dims = head_dim, head_dim if value_dim is None else value_dim
        forward, backward = (flops_of_pair(*dims, backward=way) for way in (False, True))
        return min(every.items(), key=lambda of: forward / of[1].forward + backward / of[1].backward)

    def _pads(self, kernel: str, head_dim: int, value_dim: int) -> bool:
        """Whether it computes heads of one dim for those whose values have another, see ``kernels.flash_attn``."""
        takes_two = kernel == "flash_attn_4" and (self.capability[0] > 9 or (head_dim, value_dim) == (192, 128))
        return head_dim != value_dim and not takes_two

    def _row(self, head_dim: int, kernel: str) -> tuple[int, Rates]:
        """Rates, and of which head dim: of the largest in the table that is no larger, or else of the smallest."""
        rows = self.attention[AUTO if kernel == "auto" else kernel]
        dim = max((dim for dim in rows if dim <= head_dim), default=min(rows))
        return dim, rows[dim]

    def cluster(self, ranks: int, per_node: int = NODE) -> Cluster:
        """So many of them in nodes of ``per_node``, with rates for heads of 128; raises as :class:`Cluster` does."""
        per_node = min(ranks, per_node)
        intra, inter = Link(self.intra, INTRA_LATENCY), Link(per_node * self.adapter, INTER_LATENCY)
        return Cluster(ranks, per_node, intra, inter, per_node, self.memory, self.kernels(128))


def check_kernel_of(
    kernel: str, capability: tuple[int, int] | None, dtype: torch.dtype, head_dim: int, value_dim: int | None = None
) -> None:
    """Refuse (ValueError) a kernel that takes no such heads on such GPUs, whatever is installed on this machine."""
    value_dim = head_dim if value_dim is None else value_dim
    select_kernel(kernel, Need("cuda", dtype, head_dim, value_dim, capability=capability, is_elsewhere=True))


_HDR, _NDR = 24e9, 46e9  # what nccl-tests get of InfiniBand's 200 and 400 Gbit/s
_MEASURED, _PUBLISHED = "measured", "published"
_AMPERE = {64: Rates(190e12, 165e12), 128: Rates(203e12, 175e12, _PUBLISHED), 256: Rates(194e12, 139e12, _PUBLISHED)}
_HOPPER = {
    "flash": {
        64: Rates(304e12, 288e12, _MEASURED), 128: Rates(343e12, 319e12, _MEASURED),
        256: Rates(318e12, 267e12, _MEASURED),
    },
    "flash_attn": {
        64: Rates(314e12, 296e12, _MEASURED), 128: Rates(377e12, 323e12, _MEASURED),
        256: Rates(327e12, 271e12, _MEASURED),
    },
    "flash_attn_3": {
        64: Rates(521e12, 523e12, _MEASURED), 128: Rates(699e12, 587e12, _MEASURED),
        256: Rates(733e12, 457e12, _MEASURED),
    },
    "flash_attn_4": {
        64: Rates(450e12, 400e12), 128: Rates(682e12, 605e12, _MEASURED), 256: Rates(810e12, 385e12, _PUBLISHED),
    },
    "cudnn": {64: Rates(462e12, 452e12, _MEASURED), 128: Rates(592e12, 553e12, _MEASURED)},
}  # fmt: skip
"""An H200's; attention on an H100 is assumed to be as fast."""
_ASSUMED = {name: {dim: it._replace(source="assumed") for dim, it in rows.items()} for name, rows in _HOPPER.items()}

GPUS = {
    "a100": GPU(
        312e12, 80 * GB, 230e9, _HDR, {"flash": _AMPERE, "flash_attn": _AMPERE}, linear=250e12, merge=1.4e12,
        capability=(8, 0), source="NVIDIA A100 80GB SXM and DGX A100 data sheets",
    ),
    "h100": GPU(
        989e12, 80 * GB, 360e9, _NDR,
        _ASSUMED | {"flash": _ASSUMED["flash"] | {128: Rates(357e12, 322e12, _MEASURED)}},
        linear=666e12, merge=2.5e12, capability=(9, 0),
        source="NVIDIA H100 SXM and DGX H100 data sheets",
    ),
    "h200": GPU(
        989e12, 141 * GB, 360e9, _NDR, _HOPPER, linear=710e12, merge=3.4e12, capability=(9, 0),
        source="NVIDIA H200 SXM and DGX H200 data sheets", linear_source=_MEASURED,
    ),
    "b200": GPU(
        2250e12, 180 * GB, 680e9, _NDR,
        {
            "flash": {64: Rates(343e12, 329e12, _PUBLISHED), 128: Rates(345e12, 330e12), 256: Rates(345e12, 300e12)},
            "flash_attn_4": {
                64: Rates(840e12, 650e12), 128: Rates(1360e12, 1209e12, _PUBLISHED), 256: Rates(1590e12, 870e12),
            },
        },
        linear=1420e12, merge=5.5e12, capability=(10, 0), source="NVIDIA DGX B200 data sheet",
    ),
}  # fmt: skip
