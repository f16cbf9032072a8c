"""The reference kernel: what a block's attention is, in plain tensor operations on any device.

Memory grows with Lq * Lk. Half-precision inputs are computed in float32.

Legend: B batch, G kv heads, R query heads per kv head, L queries, S keys, H head dim (of v another, perhaps).
"""

import torch
from torch import Tensor

from wallfacer_dt.kernels.block import BlockKernel, Gradients, How, Need
from wallfacer_dt.kernels.merge import accumulation_dtype
from wallfacer_dt.kernels.visible import finite, visible_keys


def _grouped(x_BNLH: Tensor, kv_heads: int) -> Tensor:
    return _wide(x_BNLH).unflatten(1, (kv_heads, -1))


def _scores(q: Tensor, k: Tensor, how: How) -> Tensor:
    scores_BGRLS = torch.einsum("bgrlh,bgsh->bgrls", _grouped(q, k.shape[1]), _wide(k)) * how.scale
    return how.softcap * torch.tanh(scores_BGRLS / how.softcap) if how.softcap else scores_BGRLS


def _masked(scores_BGRLS: Tensor, how: How, q: Tensor, k: Tensor) -> Tensor:
    """The scores with -inf for what rows do not see."""
    visible = visible_keys(how, q, k)
    if visible is None:
        return scores_BGRLS
    # One row of heads for each kv head, where heads differ.
    hidden = visible.logical_not().unflatten(1, (k.shape[1], -1) if visible.shape[1] > 1 else (1, 1))
    return scores_BGRLS.masked_fill(hidden, -torch.inf)


def _wide(x: Tensor) -> Tensor:
    return x.to(accumulation_dtype(x.dtype))


def forward(q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, Tensor]:
    """See :class:`wallfacer_dt.kernels.block.Forward`."""
    scores_BGRLS = _masked(_scores(q, k, how), how, q, k)
    lse_BGRL = scores_BGRLS.logsumexp(-1)
    p_BGRLS = (scores_BGRLS - finite(lse_BGRL).unsqueeze(-1)).exp()
    out_BGRLH = torch.einsum("bgrls,bgsh->bgrlh", p_BGRLS, _wide(v))
    return out_BGRLH.flatten(1, 2).to(q.dtype), lse_BGRL.flatten(1, 2)


def backward(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, how: How) -> Gradients:
    """See :class:`wallfacer_dt.kernels.block.Backward`."""
    kv_heads = k.shape[1]
    go_BGRLH, q_BGRLH = _grouped(grad_out, kv_heads), _grouped(q, kv_heads)
    scores_BGRLS = _scores(q, k, how)
    masked_BGRLS = _masked(scores_BGRLS, how, q, k)
    p_BGRLS = (masked_BGRLS - _grouped(finite(lse).unsqueeze(-1), kv_heads)).exp()
    delta_BGRL1 = (go_BGRLH * _grouped(out, kv_heads)).sum(-1, keepdim=True)
    dp_BGRLS = torch.einsum("bgrlh,bgsh->bgrls", go_BGRLH, _wide(v))
    ds_BGRLS = p_BGRLS * (dp_BGRLS - delta_BGRL1) * how.scale
    if how.softcap:
        ds_BGRLS = ds_BGRLS * (1 - (scores_BGRLS / how.softcap).square())
    dq = torch.einsum("bgrls,bgsh->bgrlh", ds_BGRLS, _wide(k)).flatten(1, 2)
    dk = torch.einsum("bgrls,bgrlh->bgsh", ds_BGRLS, q_BGRLH)
    dv = torch.einsum("bgrls,bgrlh->bgsh", p_BGRLS, go_BGRLH)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _supports(need: Need) -> bool:  # noqa: ARG001  (anything)
    return True


KERNEL = BlockKernel("reference", forward, backward, _supports, f"torch {torch.__version__}")
