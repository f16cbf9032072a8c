"""The reference kernel: what a block's attention is, in plain tensor operations on any device.

Memory grows with Lq * Lk. Half-precision inputs are computed in float32.

Legend: B batch, G kv heads, R query heads per kv head, L queries, S keys, H head dim.
"""

import torch
from torch import Tensor

from wallfacer_dt.kernels.block import BlockKernel
from wallfacer_dt.kernels.merge import accumulation_dtype


def _grouped(x_BNLH: Tensor, kv_heads: int) -> Tensor:
    return _wide(x_BNLH).unflatten(1, (kv_heads, -1))


def _scores(q: Tensor, k: Tensor, is_causal: bool, scale: float) -> Tensor:
    scores_BGRLS = torch.einsum("bgrlh,bgsh->bgrls", _grouped(q, k.shape[1]), _wide(k)) * scale
    if is_causal:
        hidden = torch.ones(scores_BGRLS.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores_BGRLS = scores_BGRLS.masked_fill(hidden, -torch.inf)
    return scores_BGRLS


def _wide(x: Tensor) -> Tensor:
    return x.to(accumulation_dtype(x.dtype))


def forward(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """See :class:`wallfacer_dt.kernels.block.Forward`."""
    scores_BGRLS = _scores(q, k, is_causal, scale)
    lse_BGRL = scores_BGRLS.logsumexp(-1)
    p_BGRLS = (scores_BGRLS - lse_BGRL.unsqueeze(-1)).exp()
    out_BGRLH = torch.einsum("bgrls,bgsh->bgrlh", p_BGRLS, _wide(v))
    return out_BGRLH.flatten(1, 2).to(q.dtype), lse_BGRL.flatten(1, 2)


def backward(
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
    """See :class:`wallfacer_dt.kernels.block.Backward`."""
    kv_heads = k.shape[1]
    go_BGRLH, q_BGRLH = _grouped(grad_out, kv_heads), _grouped(q, kv_heads)
    p_BGRLS = (_scores(q, k, is_causal, scale) - _grouped(lse.unsqueeze(-1), kv_heads)).exp()
    delta_BGRL1 = (go_BGRLH * _grouped(out, kv_heads)).sum(-1, keepdim=True)
    dp_BGRLS = torch.einsum("bgrlh,bgsh->bgrls", go_BGRLH, _wide(v))
    ds_BGRLS = p_BGRLS * (dp_BGRLS - delta_BGRL1) * scale
    dq = torch.einsum("bgrls,bgsh->bgrlh", ds_BGRLS, _wide(k)).flatten(1, 2)
    dk = torch.einsum("bgrls,bgrlh->bgsh", ds_BGRLS, q_BGRLH)
    dv = torch.einsum("bgrls,bgrlh->bgsh", p_BGRLS, go_BGRLH)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


KERNEL = BlockKernel("reference", forward, backward)
