"""Stand-ins for what computes attention on CUDA, computed on any device as their sources say.

Signatures of flash-attn 2.8.3, of its repository at 0251105 (FlashAttention-3), of flash-attn-4 4.0.0b36 and of torch
2.13.0. What they refuse or get wrong is here too: how bounds are clipped, operands that are not aligned, head dims.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from wallfacer_dt.kernels import aten, flash_attn, reference
from wallfacer_dt.kernels.block import FULL, BlockKernel, How, Need
from wallfacer_dt.kernels.registry import register_kernel


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
    if left is not None and right is not None and left < 0 and right < 0:
        left = right = None
    return _visible(some.rows, some.columns, left, 0 if causal else right)


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
    out, lse = reference.forward(*by_heads, How(FULL, scale, _listed(seen[0]), softcap))
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
    how = How(FULL, scale, _listed(seen[0]), softcap)
    tensors = ((x[None] if is_ragged else x).transpose(1, 2) for x in (grad_out, q, k, v, out))
    grads = reference.backward(*tensors, lse[None] if is_ragged else lse, how)
    nothing = [seen[1], *[~seen[0].any(0)] * 2] if is_ragged else [torch.zeros(0, dtype=torch.long)] * 3
    for x, grad, rows in zip(into, grads, nothing, strict=True):
        whole = grad.transpose(1, 2).clone()
        whole[:, rows] = torch.nan
        x.copy_(whole[0] if is_ragged else whole)


deterministic_calls: list[tuple[str, bool]] = []
"""Of every backward of a package, whose it is, and whether it was to be deterministic."""


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
        deterministic_calls.append(("flash_attn", deterministic))
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
        deterministic_calls.append(("flash_attn_3", deterministic))
        _backward(dout, q, k, v, out, softmax_lse, softmax_scale, softcap, seen, [dq, dk, dv])
        return softmax_lse


class FlashAttention4:
    """``flash_attn.cute.interface`` of 4.0.0b36. What nobody gives is not computed."""

    @staticmethod
    def _flash_attn_fwd(
        q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=None,
        max_seqlen_k=None, min_seqlen_k=None, page_table=None, softmax_scale=None, causal=False, softcap=None,
        window_size_left=None, window_size_right=None, learnable_sink=None, tile_mn=None, mma_pv_is_rs=None,
        intra_wg_overlap=None, num_threads=384, num_splits=1, pack_gqa=None, _arch=None, score_mod=None, mask_mod=None,
        block_sparse_tensors=None, return_lse=False, out=None, lse=None, aux_tensors=None, aux_scalars=None,
        q_descale=None, k_descale=None, v_descale=None, gather_kv_indices=None, scheduler_metadata=None,
        seqlen_k_per_split=None, disable_scheduler_metadata=False, gather_bwd_recompute_p=False,
    ):  # fmt: skip
        assert qv is out is lse is None
        assert softcap != 0.0
        lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        seen = _seen(q, k, lengths, visible_4, causal, window_size_left, window_size_right)
        out, lse = _forward(q, k, v, softmax_scale, softcap or 0.0, seen, -torch.inf)
        # Without return_lse it is there only where q, k or v needs a gradient. The last three are of sparse MLA.
        return out, lse if return_lse else None, None, None, None

    @staticmethod
    def _flash_attn_bwd(
        q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
        window_size_right=None, m_block_size=64, n_block_size=128, num_threads=256, pack_gqa=False, num_stages_Q=2,
        num_stages_dO=2, SdP_swapAB=False, dKV_swapAB=False, dQ_swapAB=False, AtomLayoutMSdP=2, AtomLayoutNdKV=2,
        AtomLayoutMdQ=2, V_in_regs=False, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None,
        max_seqlen_q=None, max_seqlen_k=None, deterministic=False, dq=None, dk=None, dv=None, score_mod=None,
        score_mod_bwd=None, mask_mod=None, aux_tensors=None, aux_scalars=None, block_sparse_tensors=None, dlse=None,
        learnable_sink=None,
    ):  # fmt: skip
        assert dq is dk is dv is None
        # On compute capability 9.x: accumulators are of head dims rounded to 32, what is added to 16, up to 128.
        assert all(n > 128 or -n % 32 == -n % 16 for n in (q.shape[-1], v.shape[-1]))
        assert q.shape[-1] == v.shape[-1] or ((q.shape[-1], v.shape[-1]) == (192, 128) and q.shape[-2] == k.shape[-2])
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        seen = _seen(q, k, lengths, visible_4, causal, window_size_left, window_size_right)
        deterministic_calls.append(("flash_attn_4", deterministic))
        _backward(dout, q, k, v, out, lse, softmax_scale, softcap, seen, [dq, dk, dv])
        return dq, dk, dv


class Aten:
    """torch's kernels for CUDA as ``torch.ops.aten``: its copy of FlashAttention-2, memory-efficient attention, cuDNN.

    Each is asked what torch's own gives of tensors without contents, so what it is given fits torch's schema.

    Attributes:
        bounds: of every forward of flash attention.
        called: every operator that was called.
    """

    def __init__(self) -> None:
        self.bounds: list[tuple[int, int]] = []
        self.called: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        ours, torchs = getattr(self, name.removeprefix("_") + "_"), getattr(torch.ops.aten, name).default

        def call(*args: Any, **options: Any) -> tuple[Any, ...]:
            self.called.append(name)
            bare = [x.to("meta") if isinstance(x, Tensor) else x for x in args]
            shapes = [x.shape for x in torchs(*bare, **options) if isinstance(x, Tensor)]
            results = ours(*args, **options)
            found = [x.shape for x in results if isinstance(x, Tensor)]
            assert found == shapes[: len(found)]
            return results

        return call

    def flash_attention_forward_(
        self, q, k, v, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask,
        *, scale=None, window_size_left=None, window_size_right=None,
    ):  # fmt: skip
        self.bounds.append((window_size_left, window_size_right))
        assert cum_seq_q is not None or (max_q, max_k) == (q.shape[1], k.shape[1])
        return FlashAttention2._flash_attn_varlen_forward(
            q, k, v, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, scale, is_causal, window_size_left,
            window_size_right, 0.0, None, return_debug_mask,
        )[:2]  # fmt: skip

    def flash_attention_backward_(
        self, grad_out, q, k, v, out, lse, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, rng_state, unused,
        *, scale=None, window_size_left=None, window_size_right=None,
    ):  # fmt: skip
        assert cum_seq_q is not None or (max_q, max_k) == (q.shape[1], k.shape[1])
        grads = [torch.empty_like(x) for x in (q, k, v)]
        FlashAttention2._flash_attn_varlen_backward(
            grad_out, q, k, v, out, lse, *grads, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, scale, is_causal,
            window_size_left, window_size_right, 0.0, None, False,
        )  # fmt: skip
        return grads

    def scaled_dot_product_efficient_attention_(
        self, query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None
    ):
        _check_efficient(query, key, value, attn_bias)
        assert compute_log_sumexp
        scores = _scores(query, key, attn_bias, is_causal, scale)
        lse = scores.logsumexp(-1)
        out = (scores - lse.unsqueeze(-1)).exp() @ value  # of rows that see nothing NaN: nobody should read it
        padded = lse.new_full((*lse.shape[:-1], lse.shape[-1] + -lse.shape[-1] % 32), torch.inf)
        padded[..., : lse.shape[-1]] = lse.masked_fill(lse == -torch.inf, 0)
        return out.transpose(1, 2).contiguous().transpose(1, 2), padded

    def scaled_dot_product_efficient_attention_backward_(
        self, grad_out_, query, key, value, attn_bias, out, logsumexp, philox_seed, philox_offset, dropout_p,
        grad_input_mask, is_causal=False, *, scale=None,
    ):  # fmt: skip
        _check_efficient(query, key, value, attn_bias)
        _check(grad_out_, out)
        rows = query.shape[2]
        assert out.transpose(1, 2).is_contiguous(), "two of its strides are read"
        assert logsumexp.shape[-1] == rows + -rows % 32
        assert logsumexp[..., rows:].eq(torch.inf).all()
        assert grad_input_mask == [True, True, True, False]
        scores = _scores(query, key, attn_bias, is_causal, scale)
        return *_gradients(grad_out_, query, key, value, out, logsumexp[..., :rows], scores, scale), None

    def scaled_dot_product_cudnn_attention_(
        self, query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False,
        return_debug_mask=False, *, scale=None,
    ):  # fmt: skip
        _check_cudnn(query, key, value)
        assert attn_bias is None
        assert compute_log_sumexp
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        scores = _scores(query, key, None, is_causal, scale)
        return scores.softmax(-1) @ value, scores.logsumexp(-1, keepdim=True)

    def scaled_dot_product_cudnn_attention_backward_(
        self, grad_out, query, key, value, out, logsumexp, philox_seed, philox_offset, attn_bias, cum_seq_q, cum_seq_k,
        max_q, max_k, dropout_p, is_causal, *, scale=None,
    ):  # fmt: skip
        _check_cudnn(query, key, value, grad_out, out)
        assert logsumexp.is_contiguous()
        assert logsumexp.shape == (*query.shape[:-1], 1), "The dim for input_names::Stats is invalid"
        assert (max_q, max_k) == (query.shape[2], key.shape[2])
        assert attn_bias is cum_seq_q is cum_seq_k is None
        kv_heads, keys = key.shape[1], key.shape[2]
        key, value = (x.repeat_interleave(query.shape[1] // kv_heads, 1) for x in (key, value))
        scores = _scores(query, key, None, is_causal, scale)
        dq, dk, dv = _gradients(grad_out, query, key, value, out, logsumexp.squeeze(-1), scores, scale)
        overflows = logsumexp < -88.7  # in float32, and what is multiplied with it is 0
        if keys % 128 == 64 and not is_causal:
            dq = dq.masked_fill(overflows, torch.nan)
        if query.shape[2] == 1 and overflows.any():
            dk, dv = dk * torch.nan, dv * torch.nan
        return dq, *(x.unflatten(1, (kv_heads, -1)).sum(2) for x in (dk, dv))


def _check_efficient(query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor | None) -> None:
    """As attention_backward.cu and kernel_backward.h do."""
    _check(query, key, value)
    assert query.shape[1] == key.shape[1] == value.shape[1]
    assert query.shape[-1] == key.shape[-1]
    if attn_bias is not None:
        assert attn_bias.shape == (*query.shape[:-1], key.shape[2])
        assert attn_bias.dtype == query.dtype
        assert attn_bias.stride(-1) == 1
        assert all(step % 8 == 0 for step, n in zip(attn_bias.stride()[:-1], attn_bias.shape, strict=False) if n > 1)


def _check_cudnn(query: Tensor, key: Tensor, value: Tensor, *others: Tensor) -> None:
    """As sdp_utils.cpp does, and that no plan is kept for another layout: out and its gradient are as query."""
    _check(query, key, value, *others)
    for x in (query, key, value):
        assert any(y.is_contiguous() for y in (x, x.transpose(1, 2))), "it has gaps"
    by_tokens = query.stride(1) < query.stride(2)
    assert all((x.transpose(1, 2) if by_tokens else x).is_contiguous() for x in others)
    assert query.shape[1] % key.shape[1] == 0
    assert key.shape[2] > 1


def _scores(query: Tensor, key: Tensor, bias: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    """Causal from the top left corner."""
    scores = scale * query @ key.mT
    if is_causal:
        assert bias is None
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).tril() == 0, -torch.inf)
    return scores if bias is None else scores + bias


def _gradients(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, scores: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    p = (scores - lse.unsqueeze(-1)).exp()
    ds = scale * p * (grad_out @ value.mT - (grad_out * out).sum(-1, keepdim=True))
    return ds @ key, ds.mT @ query, p.mT @ grad_out


STANDINS = {"flash_attn": FlashAttention2, "flash_attn_3": FlashAttention3, "flash_attn_4": FlashAttention4}
"""By the name of the kernel."""


def _no_mask(need: Need) -> bool | str:
    return not need.masked or "takes no mask"


def _no_softcap(need: Need) -> bool | str:
    return not need.softcap or "has no soft cap"


def _neither(need: Need) -> bool | str:
    return _no_softcap(need) if need.softcap else _no_mask(need)


def flash_of_torch(operators: Aten) -> BlockKernel:
    """torch's flash attention on CUDA, by these."""
    flash = replace(aten.FLASH, functions=lambda: operators)
    return BlockKernel(
        "flash of CUDA on the CPU", flash.forward, flash.backward, _neither, takes_bands=True, takes_segments=True
    )


def _told(run: aten.Dense, supports: Callable[[Need], bool | str]) -> BlockKernel:
    run = replace(run, operators=Aten)
    return BlockKernel(f"{run.name} on the CPU", run.forward, run.backward, supports)


PACKAGES = {
    f"{package.name} on the CPU": flash_attn.kernel(package, lambda _, name=package.name: STANDINS[name])
    for package in flash_attn.PACKAGES
}
TORCHS = {
    kernel.name: kernel
    for kernel in (flash_of_torch(Aten()), _told(aten.EFFICIENT, _no_softcap), _told(aten.CUDNN, _neither))
}
KERNELS = PACKAGES | TORCHS
"""The adapters with stand-ins. Whoever imports this can choose them by name; torch's have no soft caps."""

for _name, _kernel in PACKAGES.items():
    register_kernel(_name, _kernel.forward, _kernel.backward, _no_mask, takes_bands=True, takes_segments=True)
for _kernel in TORCHS.values():
    register_kernel(*_kernel[:5], takes_bands=_kernel.takes_bands, takes_segments=_kernel.takes_segments)
