"""torch's fused attention kernels, called below autograd (private aten ops; run on torch 2.11.0, 2.13.0 and
2.14.1, CPU only so far).

Their traps: an empty block kills the process on CPU, a last dim whose stride is not 1 is read as if it were,
log-sum-exps come with odd strides, gradients need not be contiguous. CUDA's flash attention wants head dims in
multiples of 8.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from wallfacer_dt.kernels.block import BlockKernel
from wallfacer_dt.kernels.merge import accumulation_dtype

_aten = torch.ops.aten


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
        _dense(q), _dense(k), _dense(v), 0.0, is_causal, scale=scale
    )
    # Fake tensors of torch 2.11 have another dtype here than real ones.
    return out, lse.to(accumulation_dtype(q.dtype))


def _cpu_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    dense = [_dense(x) for x in (grad_out, q, k, v, out)]
    return _aten._scaled_dot_product_flash_attention_for_cpu_backward(*dense, lse, 0.0, is_causal, scale=scale)


def _cuda_forward(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    out, lse, *_ = _aten._scaled_dot_product_flash_attention(
        _padded(q), _padded(k), _padded(v), 0.0, is_causal, scale=scale
    )
    return out[..., : q.shape[-1]], lse


def _cuda_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    head_dim = q.shape[-1]
    padded = [_padded(x) for x in (grad_out, q, k, v, out)]
    # Only dropout reads the random state.
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)
    grads = _aten._scaled_dot_product_flash_attention_backward(
        *padded,
        lse.contiguous(),
        None,
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        is_causal,
        state,
        state,
        scale=scale,
    )
    dq, dk, dv = (grad[..., :head_dim] for grad in grads)
    return dq, dk, dv


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _padded(x: Tensor) -> Tensor:
    missing = -x.shape[-1] % 8
    # Padding by nothing would still copy.
    return F.pad(_dense(x), (0, missing)) if missing else _dense(x)


FLASH_CPU = BlockKernel("flash", _cpu_forward, _cpu_backward)
FLASH_CUDA = BlockKernel("flash", _cuda_forward, _cuda_backward)
