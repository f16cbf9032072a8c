"""One query block against one key block, forward and backward, and the merging of partial results.

A kernel is a pair of functions on local tensors in SDPA's layout (B, N, L, H), grouped heads allowed, and what they can
run: see :class:`BlockKernel`. ``reference`` is the specification, in plain tensor operations; ``aten`` holds torch's
fused kernels, ``flex`` its flex_attention, for masks on CUDA; ``flash_attn`` the packages of that name. ``registry``
knows them by name, and a user's own.
"""

from wallfacer_dt.kernels.block import CAUSAL, FULL, Band, BlockKernel, How, Need, Ragged
from wallfacer_dt.kernels.merge import (
    accumulation_dtype,
    as_dtype,
    merge_,
    output_factor,
    output_from,
    row_delta,
    sinks_gradient,
    with_sinks,
)
from wallfacer_dt.kernels.registry import check_kernel, register_kernel, select_kernel
from wallfacer_dt.kernels.visible import strips

__all__ = [
    "CAUSAL",
    "FULL",
    "Band",
    "BlockKernel",
    "How",
    "Need",
    "Ragged",
    "accumulation_dtype",
    "as_dtype",
    "check_kernel",
    "merge_",
    "output_factor",
    "output_from",
    "register_kernel",
    "row_delta",
    "select_kernel",
    "sinks_gradient",
    "strips",
    "with_sinks",
]
