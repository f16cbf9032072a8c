"""Attention of a whole sequence in one process: shares no code with the package.

Who sees whom is one dense boolean tensor, made from positions; the mathematics is torch's own SDPA where that knows it,
and written out otherwise.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask

Mask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | BlockMask


class _Outcome(NamedTuple):
    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


class AttentionResult(_Outcome):
    """Output and gradients of an attention call. Unpacks as out, dq, dk, dv.

    Attributes:
        dsinks: gradient of the sinks, None where there are none.
        dk_shared: gradient of the keys that heads share, None where there are none.
    """

    dsinks: Tensor | None
    dk_shared: Tensor | None

    def __new__(
        cls,
        out: Tensor,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        dsinks: Tensor | None = None,
        dk_shared: Tensor | None = None,
    ) -> "AttentionResult":
        """A tuple of the four that every call has; the others are attributes."""
        result = super().__new__(cls, out, dq, dk, dv)
        result.dsinks, result.dk_shared = dsinks, dk_shared
        return result

    def by_name(self) -> dict[str, Tensor]:
        """All that the call has, by name."""
        others = {"dsinks": self.dsinks, "dk_shared": self.dk_shared}
        return self._asdict() | {name: x for name, x in others.items() if x is not None}


def attention_oracle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_out: Tensor,
    *,
    is_causal: bool = False,
    window_size: tuple[int | None, int | None] | None = None,
    prefix_length: int = 0,
    mask_mod: Mask | None = None,
    document_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    sinks: Tensor | None = None,
    k_shared: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dtype: torch.dtype | None = torch.float64,
    backend: SDPBackend = SDPBackend.MATH,
) -> AttentionResult:
    """Output and gradients of one process that holds the whole sequence.

    Args:
        q: queries (B, N, Lq, H), with ``k_shared`` (B, N, Lq, H + Hs).
        k: keys (B, Nkv, Lk, H), Nkv dividing N.
        v: values (B, Nkv, Lk, Hv).
        grad_out: gradient of the output (B, N, Lq, Hv).
        is_causal: a query sees the keys up to its own position.
        window_size: (left, right): keys from ``left`` before the query to ``right`` after it; None or -1 is no bound.
        prefix_length: with ``is_causal``, keys before it are seen by all queries.
        mask_mod: ``mask_mod(b, h, q_idx, kv_idx)`` is true where the key is seen, or a BlockMask.
        document_ids: (B, L) or (L,); a document is a run of equal ids, and its keys are seen by its own queries.
        cu_seqlens: or where documents start and the last one ends, (documents + 1,).
        sinks: (N,) one more logit per head in the softmax's denominator.
        k_shared: (B, 1, Lk, Hs), appended to every head of k.
        scale: factor of the scores; 1 / sqrt of q's head dim by default.
        softcap: scores s, scaled, become softcap * tanh(s / softcap).
        dtype: to compute in; None for the inputs' own.
        backend: torch's kernel, where there is one for the call.

    Returns:
        Out, dq, dk and dv in ``dtype``, with dsinks and dk_shared where there are such inputs. A query that sees no key
        has output and gradient 0.
    """
    given = {"q": q, "k": k, "v": v, "sinks": sinks, "k_shared": k_shared}
    leaves = {
        name: x.detach().to(dtype or x.dtype, copy=True).requires_grad_() for name, x in given.items() if x is not None
    }
    seen = None
    if window_size or mask_mod is not None or document_ids is not None or cu_seqlens is not None or prefix_length:
        seen = visibility(
            q.shape[0], q.shape[1], q.shape[2], k.shape[2], is_causal=is_causal, window_size=window_size,
            prefix_length=prefix_length, mask_mod=mask_mod, document_ids=document_ids, cu_seqlens=cu_seqlens,
            device=q.device,
        )  # fmt: skip
    out = _attend(**leaves, is_causal=is_causal, seen=seen, scale=scale, softcap=softcap, backend=backend)
    grads = torch.autograd.grad(out, list(leaves.values()), grad_out.to(out.dtype))
    return AttentionResult(out.detach(), **{f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)})


def visibility(
    batch: int,
    heads: int,
    q_length: int,
    kv_length: int,
    *,
    is_causal: bool = False,
    window_size: tuple[int | None, int | None] | None = None,
    prefix_length: int = 0,
    mask_mod: Mask | None = None,
    document_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """Which keys each query sees: what all of the masks asked for let through, as booleans (B or 1, N or 1, Lq, Lk).

    They are on the CPU; a ``mask_mod`` is asked for positions on ``device``, where its own tensors are, or there, too.
    """
    if cu_seqlens is not None and document_ids is not None:
        raise ValueError("documents must be given once, got document_ids and cu_seqlens")
    if prefix_length and not is_causal:
        raise ValueError(f"prefix_length must go with is_causal=True, got {prefix_length} without it")
    i, j = torch.arange(q_length)[:, None], torch.arange(kv_length)
    seen = torch.ones(1, 1, q_length, kv_length, dtype=torch.bool)
    if is_causal:
        seen = seen & ((j <= i) | (j < prefix_length))
    left, right = window_size or (None, None)
    if left is not None and left != -1:
        seen = seen & (i - j <= left)
    if right is not None and right != -1:
        seen = seen & (j - i <= right)
    if cu_seqlens is not None:
        document_ids = (torch.arange(q_length)[:, None] >= cu_seqlens.cpu()).sum(-1)
    if document_ids is not None:
        ids = document_ids.cpu().reshape(-1, 1, q_length)
        run = F.pad((ids[..., 1:] != ids[..., :-1]).cumsum(-1), (1, 0))
        seen = seen & (run[..., :, None] == run[..., None, :])
    if mask_mod is not None:
        seen = seen & _visible_by_mask(mask_mod, batch, heads, i, j, device)
    return seen


def _visible_by_mask(mask: Mask, batch: int, heads: int, i: Tensor, j: Tensor, device: torch.device | None) -> Tensor:
    b, h = torch.arange(batch)[:, None, None, None], torch.arange(heads)[:, None, None]
    mask_mod = mask.mask_mod if isinstance(mask, BlockMask) else mask
    seen = mask_mod(*(x.to(device) for x in (b, h, i, j))).cpu()
    if isinstance(mask, BlockMask):
        partial = _listed_blocks(mask, mask.kv_num_blocks, mask.kv_indices)
        seen = seen & partial[..., : len(i), : len(j)]
        if mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None:
            full = _listed_blocks(mask, mask.full_kv_num_blocks, mask.full_kv_indices)
            seen = seen | full[..., : len(i), : len(j)]
    return seen.broadcast_to(torch.broadcast_shapes(seen.shape, (1, 1, len(i), len(j))))


def _listed_blocks(mask: BlockMask, counts: Tensor, indices: Tensor) -> Tensor:
    """Booleans per token: whether the block (of queries, of keys) is among those listed."""
    columns = indices.shape[-1]
    is_listed = torch.arange(columns) < counts.cpu()[..., None]
    blocks = (F.one_hot(indices.cpu().long(), columns).bool() & is_listed[..., None]).any(-2)
    rows, columns = mask.BLOCK_SIZE
    return blocks.repeat_interleave(rows, -2).repeat_interleave(columns, -1)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None = None,
    k_shared: Tensor | None = None,
    *,
    is_causal: bool,
    seen: Tensor | None,
    scale: float | None,
    softcap: float | None,
    backend: SDPBackend,
) -> Tensor:
    if k_shared is not None:
        k = torch.cat([k, k_shared.expand(-1, k.shape[1], -1, -1)], -1)
    seen = None if seen is None else seen.to(q.device)
    # torch's fast kernels want one head dim; its mathematical one makes NaN of rows that see nothing.
    is_math = backend == SDPBackend.MATH
    torch_knows = seen is None if is_math else q.shape[-1] == v.shape[-1]
    if sinks is None and not softcap and torch_knows:
        causal = is_causal and seen is None
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=seen, is_causal=causal, scale=scale, enable_gqa=True
            )
    if seen is None:
        seen = visibility(q.shape[0], q.shape[1], q.shape[2], k.shape[2], is_causal=is_causal)
    return _explicit(q, k, v, sinks, seen.to(q.device), q.shape[-1] ** -0.5 if scale is None else scale, softcap)


def _explicit(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, seen: Tensor, scale: float, softcap: float | None
) -> Tensor:
    """Attention written out; scores and softmax in float32 at least, as kernels have them."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(wide) @ k.to(wide).mT * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    # A row of -inf alone would be NaN: such rows keep their scores and lose their weights.
    is_masked = ~seen.any(-1, keepdim=True)
    scores = scores.masked_fill(~seen & ~is_masked, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(wide)[:, None, None].expand(*scores.shape[:-1], 1)], -1)
    weights = scores.softmax(-1)[..., : k.shape[2]].masked_fill(is_masked, 0)
    return weights.to(v.dtype) @ v
