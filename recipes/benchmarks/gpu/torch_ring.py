"""torch's own context parallelism, a contender of one rank's loop.

Private; run on fake CUDA tensors only, with CUDA wheels of torch 2.11.0 and 2.14.1.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental._context_parallel import _attention as cp

Step = Callable[[], object]


def torch_ring(q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, mesh: DeviceMesh) -> tuple[Step, Step]:
    """Causal ring attention as torch has it, with head and tail dealt out and keys and values sent hop by hop.

    Args:
        q: queries (B, N, L, H) of this rank.
        k: keys (B, Nkv, L, H).
        v: values (B, Nkv, L, H).
        grad_out: gradient of the output (B, N, L, H).
        mesh: of one axis.

    Returns:
        What runs the forward, and what runs forward and backward.
    """
    cp.set_rotate_method("alltoall")
    cp._cp_options.enable_load_balance = True

    def forward() -> Any:
        with torch.no_grad():
            return cp._scaled_dot_product_ring_flash_attention(mesh, q, k, v, is_causal=True)

    def both() -> tuple[Tensor, ...]:
        out, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = forward()
        with torch.no_grad():
            return cp._scaled_dot_product_ring_flash_attention_backward(
                mesh, grad_out, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, 0.0, True, seed, offset
            )

    return forward, both
