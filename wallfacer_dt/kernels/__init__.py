"""One query block against one key block, forward and backward, and the merging of partial results.

A kernel is a pair of functions on local tensors in SDPA's layout (B, N, L, H), grouped heads allowed: see
:class:`BlockKernel`. ``reference`` is the specification, in plain tensor operations; ``aten`` holds torch's fused
kernels, ``flex`` its flex_attention, for masks on CUDA.
"""

from wallfacer_dt.kernels.block import CAUSAL, FULL, Band, BlockKernel
from wallfacer_dt.kernels.merge import accumulation_dtype, merge_, output_with_delta, sinks_gradient, with_sinks
from wallfacer_dt.kernels.select import KERNELS, check_kernel, select_kernel

__all__ = [
    "CAUSAL",
    "FULL",
    "KERNELS",
    "Band",
    "BlockKernel",
    "accumulation_dtype",
    "check_kernel",
    "merge_",
    "output_with_delta",
    "select_kernel",
    "sinks_gradient",
    "with_sinks",
]
