"""The simplest way to share a sequence: every rank gathers all keys and values, and attends with its own queries.

Gradients of keys and values are summed over ranks by a reduce-scatter, made of an all-to-all and a sum: gloo's own
takes longer. Blocks are computed by the kernels that the package itself uses, and those that a causal mask hides are
not.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from wallfacer_dt.kernels import CAUSAL, FULL, Band, BlockKernel, How, Need, merge_, select_kernel

Block = tuple[slice, slice, Band]


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        own = torch.stack([k, v])
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, own)
        keys = _in_order(parts, is_causal)
        out, lse = torch.zeros_like(q), q.new_full(q.shape[:-1], -torch.inf)
        for rows, columns, band in _blocks(q.shape[2], is_causal):
            k_part, v_part = keys[:, :, :, columns]
            block = _kernel(q).forward(q[:, :, rows], k_part, v_part, How(band, q.shape[-1] ** -0.5))
            merge_(out[:, :, rows], lse[:, :, rows], *block)
        ctx.save_for_backward(q, keys, out, lse)
        ctx.is_causal = is_causal
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, keys, out, lse = ctx.saved_tensors
        dq, dkeys = torch.zeros_like(q), torch.zeros_like(keys)
        for rows, columns, band in _blocks(q.shape[2], ctx.is_causal):
            q_part, grad_part, out_part, lse_part = (x[:, :, rows] for x in (q, grads[0], out, lse))
            k_part, v_part = keys[:, :, :, columns]
            how = How(band, q.shape[-1] ** -0.5)
            block = _kernel(q).backward(grad_part, q_part, k_part, v_part, out_part, lse_part, how)
            dq[:, :, rows] += block[0]
            for whole, part in zip(dkeys, block[1:], strict=True):
                whole[:, :, columns] += part
        parts = torch.stack(_as_held(dkeys, ctx.is_causal))
        arrived = torch.empty_like(parts)
        dist.all_to_all_single(arrived, parts)
        dk, dv = arrived.sum(0)
        return dq, dk, dv, None


def gathered_attention(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Tensor:
    """Attention of this rank's queries to all ranks' keys and values.

    Args:
        q: queries (B, N, L, H) of this rank of the whole world: contiguous, or in head-tail order where causal.
        k: keys (B, Nkv, L, H).
        v: values (B, Nkv, L, H).
        is_causal: a query sees the keys up to its own position.

    Returns:
        The output (B, N, L, H).
    """
    return _Gathered.apply(q, k, v, is_causal)


def _kernel(q: Tensor) -> BlockKernel:
    return select_kernel("flash", Need.of(q, q, masked=False, softcap=0.0))


def _blocks(rows: int, is_causal: bool) -> list[Block]:
    """Which rows attend to which keys: for each half of a causal rank, what is before it and then itself."""
    if not is_causal:
        return [(slice(None), slice(None), FULL)]
    half, rank, last = rows // 2, dist.get_rank(), 2 * dist.get_world_size() - 1
    blocks = []
    for own, chunk in ((slice(0, half), rank), (slice(half, rows), last - rank)):
        start = chunk * half
        blocks += [(own, slice(0, start), FULL)] * (start > 0) + [(own, slice(start, start + half), CAUSAL)]
    return blocks


def _in_order(parts: list[Tensor], is_causal: bool) -> Tensor:
    """All ranks' tokens by position, along dim -2."""
    if not is_causal:
        return torch.cat(parts, -2)
    heads, tails = zip(*(part.chunk(2, -2) for part in parts), strict=True)
    return torch.cat([*heads, *reversed(tails)], -2)


def _as_held(whole: Tensor, is_causal: bool) -> list[Tensor]:
    """The inverse: what each rank holds."""
    ranks = dist.get_world_size()
    if not is_causal:
        return list(whole.chunk(ranks, -2))
    chunks = whole.chunk(2 * ranks, -2)
    return [torch.cat([chunks[rank], chunks[-1 - rank]], -2) for rank in range(ranks)]
