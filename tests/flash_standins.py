"""Stand-ins for flash attention's CUDA functions, computed on any device as their sources say.

Signatures of flash-attn 2.8.3, of its repository at 0251105 (FlashAttention-3 and -4) and of torch 2.13.0. What they
refuse or get wrong is here too: how bounds are clipped, operands that are not aligned, head dims.
"""

from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from wallfacer_dt.kernels import FULL, Need, flash_attn, reference, register_kernel


def _visible(rows: int, columns: int, left: int | None, right: int | None) -> Tensor:
    """(rows, columns), aligned at the bottom right corner; None: no bound."""
    offset = torch.arange(columns) - torch.arange(rows).unsqueeze(-1) - (columns - rows)
    visible = torch.ones_like(offset, dtype=torch.bool) if left is None else offset >= -left
    return visible if right is None else visible & (offset <= right)


class Lengths(NamedTuple):
    """Of a call, or of one of its segments: queries and keys, and the most that any segment has."""

    rows: int
    columns: int
    most_rows: int
    most_columns: int


def visible_2(some: Lengths, causal: bool, left: int, right: int) -> Tensor:
    """Of FlashAttention-2, and torch's copy of it: flash_api.cpp of 2.8.3, lines 138 to 144, 399 to 404, 591 to 603."""
    left = -1 if left >= some.most_columns else left
    right = -1 if right >= some.most_columns else right
    right = 0 if causal and some.most_rows > 1 else right
    if left < 0 and right < 0:
        return _visible(some.rows, some.columns, None, None)
    left, right = (some.most_columns if bound < 0 else bound for bound in (left, right))
    return _visible(some.rows, some.columns, left, right)


def visible_3(some: Lengths, causal: bool, left: int, right: int) -> Tensor:
    """Of FlashAttention-3: hopper/flash_api.cpp, lines 576 to 588."""
    left = -1 if left >= some.most_columns - 1 else left
    right = 0 if causal else -1 if right >= some.most_rows - 1 else right
    return _visible(some.rows, some.columns, None if left < 0 else left, None if right < 0 else right)


def visible_4(some: Lengths, causal: bool, left: int | None, right: int | None) -> Tensor:
    """Of FlashAttention-4: ``_resolve_causal_local_window``."""
    right = 0 if causal else right
    if left is not None and right is not None and left + right < 0:
        return _visible(some.rows, some.columns, None, None)
    return _visible(some.rows, some.columns, left, right)


def _seen(
    q: Tensor, k: Tensor, lengths: tuple[Any, ...], visible: Callable[..., Tensor], *bounds: Any
) -> tuple[Tensor, Tensor]:
    """What a call's rows see, and which of them are in a segment without keys; of (B, L, N, H) or (T, N, H)."""
    if lengths[0] is None:
        rows, columns = q.shape[1], k.shape[1]
        return visible(Lengths(rows, columns, rows, columns), *bounds), torch.zeros(rows, dtype=torch.bool)
    cu_q, cu_k, most_rows, most_columns = lengths
    assert cu_q.dtype == cu_k.dtype == torch.int32
    assert (cu_q[0], cu_k[0], cu_q[-1], cu_k[-1]) == (0, 0, len(q), len(k))
    seen, blind = torch.zeros(len(q), len(k), dtype=torch.bool), torch.zeros(len(q), dtype=torch.bool)
    for (a, b), (c, d) in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True):
        assert b - a <= most_rows, "rows that no block of threads is for"
        assert d - c <= most_columns
        seen[a:b, c:d] = visible(Lengths(b - a, d - c, most_rows, most_columns), *bounds)
        blind[a:b] = c == d
    return seen, blind


def _listed(seen: Tensor) -> BlockMask:
    """Booleans (rows, columns) as the reference is given them: one block, partly visible."""

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return seen[q, k]

    one = torch.ones(1, 1, 1, dtype=torch.int32)
    shape = (seen.shape[0], seen.shape[1])
    return BlockMask.from_kv_blocks(one, one[..., None] * 0, BLOCK_SIZE=shape, mask_mod=mask_mod, seq_lengths=shape)


def _check(*operands: Tensor) -> None:
    for x in operands:
        assert x.stride(-1) == 1
        assert x.shape[-1] % 8 == 0
        assert x.data_ptr() % 16 == 0
        assert all(n == 1 or step * x.itemsize % 16 == 0 for step, n in zip(x.stride()[:-1], x.shape, strict=False))


def _forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float, seen: tuple[Tensor, Tensor], blind: float
) -> tuple[Tensor, Tensor]:
    _check(q, k, v)
    is_ragged = q.ndim == 3
    by_heads = ((x[None] if is_ragged else x).transpose(1, 2) for x in (q, k, v))
    out, lse = reference.forward(*by_heads, band=FULL, mask=_listed(seen[0]), scale=scale, softcap=softcap)
    out, lse = out.transpose(1, 2).contiguous(), lse.masked_fill((lse == -torch.inf) | lse.isnan(), blind)
    out[:, seen[1]] = torch.nan  # nobody says what is there
    return (out[0], lse[0]) if is_ragged else (out, lse)


def _backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, softcap: float,
    seen: tuple[Tensor, Tensor], into: list[Tensor],
) -> None:  # fmt: skip
    _check(grad_out, q, k, v, out)
    assert out.shape == grad_out.shape
    assert lse.is_contiguous()
    assert not lse.isinf().any()
    is_ragged = q.ndim == 3
    options = {"band": FULL, "mask": _listed(seen[0]), "scale": scale, "softcap": softcap}
    tensors = ((x[None] if is_ragged else x).transpose(1, 2) for x in (grad_out, q, k, v, out))
    grads = reference.backward(*tensors, lse[None] if is_ragged else lse, **options)
    nothing = [seen[1], *[~seen[0].any(0)] * 2] if is_ragged else [torch.zeros(0, dtype=torch.long)] * 3
    for x, grad, rows in zip(into, grads, nothing, strict=True):
        whole = grad.transpose(1, 2).clone()
        whole[:, rows] = torch.nan
        x.copy_(whole[0] if is_ragged else whole)


class FlashAttention2:
    """``flash_attn.flash_attn_interface``."""

    @staticmethod
    def _flash_attn_forward(
        q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
        return_softmax,
    ):  # fmt: skip
        return FlashAttention2._flash_attn_varlen_forward(
            q, k, v, None, None, None, None, dropout_p, softmax_scale, causal, window_size_left, window_size_right,
            softcap,
        )  # fmt: skip

    @staticmethod
    def _flash_attn_varlen_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
        block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False,
    ):  # fmt: skip
        assert q.shape[-1] == v.shape[-1]
        lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        seen = _seen(q, k, lengths, visible_2, causal, window_size_left, window_size_right)
        out, lse = _forward(q, k, v, softmax_scale, softcap, seen, torch.inf)
        return out, lse, q.new_empty(0), torch.empty(2, dtype=torch.int64)

    @staticmethod
    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left,
        window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
    ):  # fmt: skip
        return FlashAttention2._flash_attn_varlen_backward(
            dout, q, k, v, out, softmax_lse, dq, dk, dv, None, None, None, None, dropout_p, softmax_scale, causal,
            window_size_left, window_size_right, softcap, alibi_slopes, deterministic,
        )  # fmt: skip

    @staticmethod
    def _flash_attn_varlen_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
        softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic,
        rng_state=None, zero_tensors=False,
    ):  # fmt: skip
        lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        seen = _seen(q, k, lengths, visible_2, causal, window_size_left, window_size_right)
        _backward(dout, q, k, v, out, softmax_lse, softmax_scale, softcap, seen, [dq, dk, dv])
        return softmax_lse


class FlashAttention3:
    """``flash_attn_interface``."""

    @staticmethod
    def _flash_attn_forward(
        q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, cu_seqlens_k=None,
        cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, page_table=None,
        kv_batch_idx=None, leftpad_k=None, rotary_cos=None, rotary_sin=None, seqlens_rotary=None, q_descale=None,
        k_descale=None, v_descale=None, softmax_scale=None, causal=False, window_size_left=-1, window_size_right=-1,
        attention_chunk=0, softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=1, pack_gqa=None,
        sm_margin=0,
    ):  # fmt: skip
        assert q.shape[-1] == v.shape[-1]
        lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        seen = _seen(q, k, lengths, visible_3, causal, window_size_left, window_size_right)
        return *_forward(q, k, v, softmax_scale, softcap, seen, -torch.inf), q.new_empty(0), q.new_empty(0)

    @staticmethod
    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None, sequed_k=None,
        max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False,
        window_size_left=-1, window_size_right=-1, softcap=0.0, deterministic=False, sm_margin=0,
    ):  # fmt: skip
        lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        seen = _seen(q, k, lengths, visible_3, is_causal, window_size_left, window_size_right)
        _backward(dout, q, k, v, out, softmax_lse, softmax_scale, softcap, seen, [dq, dk, dv])
        return softmax_lse


class FlashAttention4:
    """``flash_attn.cute.interface``; of its many arguments those that are given."""

    @staticmethod
    def _flash_attn_fwd(
        q, k, v, *, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, softmax_scale=None,
        causal=False, softcap=None, window_size_left=None, window_size_right=None, return_lse=False,
    ):  # fmt: skip
        assert softcap != 0.0
        lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        seen = _seen(q, k, lengths, visible_4, causal, window_size_left, window_size_right)
        out, lse = _forward(q, k, v, softmax_scale, softcap or 0.0, seen, -torch.inf)
        return out, lse if return_lse else None, None, None

    @staticmethod
    def _flash_attn_bwd(
        q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
        window_size_right=None, *, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
        deterministic=False,
    ):  # fmt: skip
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        seen = _seen(q, k, lengths, visible_4, causal, window_size_left, window_size_right)
        _backward(dout, q, k, v, out, lse, softmax_scale, softcap, seen, [dq, dk, dv])
        return dq, dk, dv


def aten_namespace(calls: list[Any]) -> SimpleNamespace:
    """torch's copy of FlashAttention-2 as ``torch.ops.aten``; notes the bounds of every forward."""

    def forward(
        q, k, v, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask,
        *, scale=None, window_size_left=None, window_size_right=None,
    ):  # fmt: skip
        calls.append((window_size_left, window_size_right))
        assert cum_seq_q is not None or (max_q, max_k) == (q.shape[1], k.shape[1])
        return FlashAttention2._flash_attn_varlen_forward(
            q, k, v, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, scale, is_causal, window_size_left,
            window_size_right, 0.0, None, return_debug_mask,
        )  # fmt: skip

    def backward(
        grad_out, q, k, v, out, lse, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, rng_state, unused,
        *, scale=None, window_size_left=None, window_size_right=None,
    ):  # fmt: skip
        assert cum_seq_q is not None or (max_q, max_k) == (q.shape[1], k.shape[1])
        grads = [torch.empty_like(x) for x in (q, k, v)]
        FlashAttention2._flash_attn_varlen_backward(
            grad_out, q, k, v, out, lse, *grads, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, scale, is_causal,
            window_size_left, window_size_right, 0.0, None, False,
        )  # fmt: skip
        return grads

    return SimpleNamespace(_flash_attention_forward=forward, _flash_attention_backward=backward)


STANDINS = {"flash_attn": FlashAttention2, "flash_attn_3": FlashAttention3, "flash_attn_4": FlashAttention4}
"""By the name of the kernel."""


def _anything(need: Need) -> bool | str:
    return not need.masked or "takes no mask"


KERNELS = {
    f"{package.name} on the CPU": flash_attn.kernel(package, lambda _, name=package.name: STANDINS[name])
    for package in flash_attn.PACKAGES
}
"""The adapters with stand-ins. Whoever imports this can choose them by name."""

for _name, _kernel in KERNELS.items():
    register_kernel(_name, _kernel.forward, _kernel.backward, _anything, takes_bands=True, ragged=_kernel.ragged)
