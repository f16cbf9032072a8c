"""Blocks with masks on CUDA: torch's flex_attention, fused with the mask looked up.

Each direction is an operator of its own, opaque to compilers: flex_attention compiles itself when it runs, and takes
gradients by autograd, which a traced body cannot hold. Not run on CUDA so far; on CPU flex_attention was run without
its fused kernels, in both directions (there torch refuses gradients, but for the tests).

Note [Gradients of one block from autograd]
A block gives out_i and lse_i, and the row's result is out = sum_i w_i out_i with w_i = exp(lse_i - lse) and
lse = logsumexp_i lse_i. So, for a gradient grad_out of out, that of out_i is w_i grad_out, and since
d out / d lse_i = w_i (out_i - out), that of lse_i is w_i (rowsum(grad_out * out_i) - rowsum(grad_out * out)).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from wallfacer_dt.kernels.block import Band, BlockKernel, Need, no_softcap, refuse_softcap
from wallfacer_dt.kernels.merge import accumulation_dtype
from wallfacer_dt.kernels.visible import finite, visible_keys
from wallfacer_dt.mesh import outside_modes

_TILE = 128


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of one block by flex_attention, differentiable on CUDA.

    Args:
        q: queries (B, N, Lq, H).
        k: keys (B, Nkv, Lk, H).
        v: values (B, Nkv, Lk, Hv).
        mask: boolean (B or 1, N or 1, Lq, Lk), True: visible; None: all.
        scale: of the scores.

    Returns:
        out (B, N, Lq, Hv) and lse (B, N, Lq).
    """
    run: Callable = _fused() if q.is_cuda else flex_attention
    block_mask = None if mask is None else _block_mask(mask, q)
    out, aux = run(q, k, v, block_mask=block_mask, scale=scale, enable_gqa=True, return_aux=AuxRequest(lse=True))
    return out, aux.lse


def block_gradients(
    attend: Callable[..., tuple[Tensor, Tensor]],
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    scale: float,
) -> tuple[Tensor, ...]:
    """dq, dk, dv of one block of rows whose softmax is known. See Note [Gradients of one block from autograd].

    Args:
        attend: differentiable, of q, k, v, mask and scale: the block's own out and lse.
        grad_out: gradient of the rows' output.
        q: queries (B, N, Lq, H).
        k: keys (B, Nkv, Lk, H).
        v: values (B, Nkv, Lk, Hv).
        out: of the whole rows (B, N, Lq, Hv).
        lse: of the whole rows (B, N, Lq).
        mask: of the block.
        scale: of the scores.

    Returns:
        The gradients, in the inputs' dtype.
    """
    wide = lse.dtype
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    block_out, block_lse = attend(*inputs, mask, scale)
    weight = (block_lse.detach() - finite(lse)).exp()
    shift = (grad_out.to(wide) * (block_out.detach().to(wide) - out)).sum(-1)
    grad_block_out = (weight.unsqueeze(-1) * grad_out).to(block_out.dtype)
    return torch.autograd.grad((block_out, block_lse), inputs, (grad_block_out, weight * shift))


@cache
def _fused() -> Callable:
    # Not compiled, it would compute all scores; fullgraph: nor will it do so in silence after many recompilations.
    return torch.compile(flex_attention, fullgraph=True)


def _block_mask(mask: Tensor, q: Tensor) -> BlockMask:
    """The mask, with its tiles listed that are visible in part or whole.

    create_block_mask would look every entry of the mask up.
    """
    everywhere = mask.expand(*q.shape[:2], -1, -1)

    def visible(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return everywhere[b, h, q_idx, kv_idx]

    rows, columns = mask.shape[2:]
    whole_tiles = F.pad(mask, (0, -columns % _TILE, 0, -rows % _TILE), value=False)
    visible_BNRC = whole_tiles.unflatten(3, (-1, _TILE)).unflatten(2, (-1, _TILE)).sum((3, 5))
    full_BNRC = visible_BNRC == _TILE**2
    partial_BNRC = (visible_BNRC > 0) & ~full_BNRC
    return BlockMask(
        (rows, columns),
        *_listed(partial_BNRC),
        *_listed(full_BNRC),
        *_listed(partial_BNRC.mT),
        *_listed(full_BNRC.mT),
        BLOCK_SIZE=(_TILE, _TILE),
        mask_mod=visible,
    )


def _listed(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """For every row of tiles how many are set, and all columns, those of set tiles first."""
    indices = tiles.int().argsort(dim=-1, descending=True, stable=True)
    return tiles.sum(-1, dtype=torch.int32), indices.int().contiguous()


_KEYS = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()


@contextmanager
def _outside_dispatch() -> Iterator[None]:
    """As if called by the user: operators run below autograd, and below torch.vmap if in a dispatch mode."""
    with outside_modes(), torch._C._ForceDispatchKeyGuard(*_KEYS):
        yield


@torch.library.custom_op("wallfacer_dt::flex", mutates_args=())
def _flex(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    with _outside_dispatch(), torch.no_grad():  # whatever called: one compilation
        out, lse = attend(q, k, v, mask, scale)
    return out.contiguous(), lse.contiguous()


@torch.library.custom_op("wallfacer_dt::flex_backward", mutates_args=())
def _flex_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    with _outside_dispatch(), torch.enable_grad():
        dq, dk, dv = block_gradients(attend, grad_out, q, k, v, out, lse, mask, scale)
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


@_flex.register_fake
def _flex_fake(*inputs: Any) -> tuple[Tensor, Tensor]:
    q, _, v, *_ = inputs
    rows = q.shape[:-1]
    return q.new_empty((*rows, v.shape[-1])), q.new_empty(rows, dtype=accumulation_dtype(q.dtype))


@_flex_backward.register_fake
def _flex_backward_fake(*inputs: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in inputs[1:4])


def forward(
    q: Tensor, k: Tensor, v: Tensor, *, band: Band, mask: Tensor | None, scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """See :class:`wallfacer_dt.kernels.block.Forward`."""
    refuse_softcap("flex", softcap)
    return _flex(q, k, v, visible_keys(band, mask, q, k), scale)


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    band: Band,
    mask: Tensor | None,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """See :class:`wallfacer_dt.kernels.block.Backward`."""
    refuse_softcap("flex", softcap)
    return _flex_backward(grad_out, q, k, v, out, lse, visible_keys(band, mask, q, k), scale)


def _supports(need: Need) -> bool | str:
    if need.softcap:
        return no_softcap(need.softcap)
    if need.device_type == "cuda" and need.dtype != torch.float64:
        return True
    return (
        "is flex_attention, which runs on cuda, not in float64 (on cpu it has no backward); got "
        f"{need.device_type}, {need.dtype}: cast q, k and v, or pass kernel='reference' (on cpu: kernel='flash')"
    )


KERNEL = BlockKernel("flex", forward, backward, _supports, f"torch {torch.__version__}")
