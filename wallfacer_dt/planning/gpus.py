"""GPUs by name, as the planner takes them: what data sheets say, and rates of kernels, which are assumed.

Nothing here was measured: ``profile`` measures. Rates of kernels are round numbers below the data sheet's dense peak.
For an H100 the FlashAttention-3 paper says 35% of it of FlashAttention-2, and up to 75% of itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from wallfacer_dt.planning.cluster import Cluster, Kernels, Link

NODE = 8  # GPUs
INTRA_LATENCY, INTER_LATENCY = 5e-6, 10e-6  # seconds, assumed
GB = 10**9


@dataclass(frozen=True, slots=True)
class GPU:
    """A GPU in nodes of eight, each with an adapter of its own.

    Attributes:
        peak: dense, in bfloat16 and float16, floating point operations per second.
        memory: bytes.
        intra: NVLink's bytes per second, in one direction.
        adapter: bytes per second of one adapter, in one direction.
        attention: by head dim, assumed rates of attention's forward and backward, as in :class:`Kernels`.
        linear: assumed rate of other matrix products.
        merge: assumed rate at which memory is read and written, bytes per second.
        capability: CUDA's.
        source: of the first four.
    """

    peak: float
    memory: int
    intra: float
    adapter: float
    attention: Mapping[int, tuple[float, float]]
    linear: float
    merge: float
    capability: tuple[int, int]
    source: str

    def row(self, head_dim: int) -> int:
        """The head dim whose rates are taken: the largest in the table that is no larger, or the smallest."""
        return max((dim for dim in self.attention if dim <= head_dim), default=min(self.attention))

    def kernels(self, head_dim: int) -> Kernels:
        """Rates for heads of a dim, in 16 bits."""
        forward, backward = self.attention[self.row(head_dim)]
        return Kernels(forward, backward, self.linear, merge=self.merge)

    def cluster(self, ranks: int, per_node: int = NODE, head_dim: int = 128) -> Cluster:
        """So many of them, in nodes of ``per_node``; raises ValueError as :class:`Cluster` does."""
        per_node = min(ranks, per_node)
        intra, inter = Link(self.intra, INTRA_LATENCY), Link(per_node * self.adapter, INTER_LATENCY)
        return Cluster(ranks, per_node, intra, inter, per_node, self.memory, self.kernels(head_dim))


_HDR, _NDR = 25e9, 50e9  # InfiniBand of 200 and 400 Gbit/s
_HOPPER = {64: (400e12, 300e12), 128: (500e12, 400e12), 256: (500e12, 350e12)}

GPUS = {
    "a100": GPU(
        312e12, 80 * GB, 300e9, _HDR, {64: (150e12, 115e12), 128: (170e12, 140e12), 256: (170e12, 130e12)},
        linear=200e12, merge=1e12, capability=(8, 0), source="NVIDIA A100 80GB SXM and DGX A100 data sheets",
    ),
    "h100": GPU(
        989e12, 80 * GB, 450e9, _NDR, _HOPPER, linear=600e12, merge=2e12, capability=(9, 0),
        source="NVIDIA H100 SXM and DGX H100 data sheets",
    ),
    "h200": GPU(
        989e12, 141 * GB, 450e9, _NDR, _HOPPER, linear=600e12, merge=3e12, capability=(9, 0),
        source="NVIDIA H200 SXM and DGX H200 data sheets",
    ),
    "b200": GPU(
        2250e12, 180 * GB, 900e9, _NDR, {64: (800e12, 600e12), 128: (1000e12, 800e12), 256: (1000e12, 700e12)},
        linear=1350e12, merge=5e12, capability=(10, 0), source="NVIDIA DGX B200 data sheet",
    ),
}  # fmt: skip
