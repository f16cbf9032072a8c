"""Attention of a whole sequence in one process, by torch's own SDPA: shares no code with the package."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel


class AttentionResult(NamedTuple):
    """Output and gradients of an attention call."""

    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def attention_oracle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_out: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    dtype: torch.dtype | None = torch.float64,
    backend: SDPBackend = SDPBackend.MATH,
) -> AttentionResult:
    """Output and gradients of one process that holds the whole sequence.

    Args:
        q: queries (B, N, L, H).
        k: keys (B, Nkv, L, H), Nkv dividing N.
        v: values (B, Nkv, L, H).
        grad_out: gradient of the output (B, N, L, H).
        is_causal: a query sees the keys up to its own position.
        scale: factor of the scores; 1 / sqrt(H) by default.
        dtype: to compute in; None for the inputs' own.
        backend: torch's kernel.

    Returns:
        Out, dq, dk and dv in ``dtype``.
    """
    q, k, v = (x.detach().to(dtype or x.dtype, copy=True).requires_grad_() for x in (q, k, v))
    with sdpa_kernel(backend):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale, enable_gqa=True)
    grads = torch.autograd.grad(out, (q, k, v), grad_out.to(out.dtype))
    return AttentionResult(out.detach(), *grads)
