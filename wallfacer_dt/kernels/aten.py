"""torch's fused attention kernels, called below autograd (private aten ops; run on torch 2.11.0, 2.13.0 and
2.14.1, CPU only so far: on CUDA neither the plain calls nor the windows have been run).

Traps of both: a last dim whose stride is not 1 is read as if it were, log-sum-exps come with odd strides, gradients
need not be contiguous, v must have q's head dim (so the smaller is padded). On CPU an empty block kills the process,
and a row that sees no key has lse 0. So has a row whose scores are all NaN, where no mask is given and keys are fewer
than a vector has lanes. CUDA's flash attention wants head dims in multiples of 8, gives a row that sees no key lse
+inf, and reads a negative bound of a window as none.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from wallfacer_dt.kernels.block import CAUSAL, FULL, Band, BlockKernel, refuse_softcap
from wallfacer_dt.kernels.merge import accumulation_dtype
from wallfacer_dt.kernels.visible import finite, visible_keys

_aten = torch.ops.aten

_LANES = 16
"""As many numbers as the longest vector of a CPU holds."""


def _cpu_forward(
    q: Tensor, k: Tensor, v: Tensor, *, band: Band, mask: Tensor | None, scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    refuse_softcap("flash", softcap)
    band = _simplest(band, q, k)
    if _is_causal_backwards(band, mask, q, k):
        out, lse = _cpu_forward(*_reversed(q, k, v), band=CAUSAL, mask=None, scale=scale, softcap=0.0)
        return out.flip(2), lse.flip(2)
    is_causal, visible = _cpu_visible(band, mask, q, k)
    width = max(q.shape[-1], v.shape[-1])
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
        *(_padded(x, width) for x in (q, k, v)), 0.0, is_causal, scale=scale, **_additive(visible, q.dtype)
    )
    # Fake tensors of torch 2.11 have another dtype here than real ones.
    lse = lse.to(accumulation_dtype(q.dtype))
    out = _cropped(out, v)
    if visible is not None:
        lse = lse.masked_fill(visible.any(-1).logical_not(), -torch.inf)
    elif k.shape[2] < _LANES:
        lost = _nan_rows(q, k, is_causal)
        out, lse = out.masked_fill(lost.unsqueeze(-1), torch.nan), lse.masked_fill(lost, torch.nan)
    return out, lse


def _cpu_backward(
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
    refuse_softcap("flash", softcap)
    band = _simplest(band, q, k)
    if _is_causal_backwards(band, mask, q, k):
        rows = _reversed(grad_out, q, k, v, out, lse)
        dq, dk, dv = _cpu_backward(*rows, band=CAUSAL, mask=None, scale=scale, softcap=0.0)
        return dq.flip(2), dk.flip(2), dv.flip(2)
    is_causal, visible = _cpu_visible(band, mask, q, k)
    width = max(q.shape[-1], v.shape[-1])
    dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *(_padded(x, width) for x in (grad_out, q, k, v, out)),
        lse if visible is None else finite(lse),
        0.0,
        is_causal,
        scale=scale,
        **_additive(visible, q.dtype),
    )
    return _cropped(dq, q), _cropped(dk, k), _cropped(dv, v)


def _simplest(band: Band, q: Tensor, k: Tensor) -> Band:
    # A block of one row stays causal, so that one causal schedule calls one kernel whatever its lengths.
    return band if band in (FULL, CAUSAL) else band.within(q.shape[2], k.shape[2])


def _is_causal_backwards(band: Band, mask: Tensor | None, q: Tensor, k: Tensor) -> bool:
    """Whether rows see what does not come before them: causal once rows are reversed, with no mask made."""
    return band == Band(0, None) and mask is None and q.shape[2] == k.shape[2]


def _reversed(*tensors: Tensor) -> list[Tensor]:
    return [x.flip(2) for x in tensors]


def _cpu_visible(band: Band, mask: Tensor | None, q: Tensor, k: Tensor) -> tuple[bool, Tensor | None]:
    """Whether the kernel is to be causal (from the top left corner, on CPU), or else what its rows see."""
    if band == CAUSAL and mask is None:
        return True, None
    return False, visible_keys(band, mask, q, k)


def _nan_rows(q: Tensor, k: Tensor, is_causal: bool) -> Tensor:
    """Rows (B, N, Lq) with a score that is NaN because a key is, or because q is or is infinite."""
    of_q = (q @ q.new_zeros(q.shape[-1])).isnan()
    of_k = k.isnan().any(-1)
    if is_causal:
        last = torch.arange(q.shape[2], device=q.device).clamp_max(k.shape[2] - 1)
        of_k = of_k.cumsum(-1)[..., last].bool()
    else:
        of_k = of_k.any(-1, keepdim=True)
    return of_q | of_k.repeat_interleave(q.shape[1] // k.shape[1], 1)


def _additive(visible: Tensor | None, dtype: torch.dtype) -> dict[str, Tensor]:
    if visible is None:
        return {}
    zeros = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return {"attn_mask": zeros.masked_fill(visible.logical_not(), -torch.inf)}


class Window(NamedTuple):
    """A band as CUDA's flash attention takes it: windows aligned at the bottom right corner.

    Attributes:
        rows: the queries to give; those after them see no key.
        columns: the keys to give; those after them are seen by no query.
        left: row t sees key s only if s >= t + columns - rows - left. -1: no bound.
        right: row t sees key s only if s <= t + columns - rows + right. -1: no bound.
    """

    rows: int
    columns: int
    left: int
    right: int


def flash_window(band: Band, rows: int, columns: int) -> Window | None:
    """The window of a band over ``rows`` queries and ``columns`` keys; None where it sees nothing.

    Bounds are counted from the corner and must not be negative. Where one is, the band leaves out the last queries
    or the last keys: without these the corner is in the band.

    >>> flash_window(Band(-2, 0), 8, 8)
    Window(rows=8, columns=8, left=2, right=0)
    >>> flash_window(Band(3, None), 8, 8)
    Window(rows=5, columns=8, left=0, right=-1)
    """
    low, high = band
    if low is not None:
        rows = min(rows, columns - low)
    if high is not None:
        columns = min(columns, rows + high)
    if rows <= 0 or columns <= 0 or (low is not None and high is not None and low > high):
        return None
    corner = columns - rows
    return Window(rows, columns, -1 if low is None else corner - low, -1 if high is None else high - corner)


def _cuda_forward(
    q: Tensor, k: Tensor, v: Tensor, *, band: Band, mask: Tensor | None, scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    _check_cuda(mask, softcap)
    band = _simplest(band, q, k)
    if not _is_plain(band, q, k):
        return _windowed_forward(q, k, v, band, scale)
    width = _cuda_width(q, v)
    out, lse, *_ = _aten._scaled_dot_product_flash_attention(
        *(_padded(x, width) for x in (q, k, v)), 0.0, band == CAUSAL, scale=scale
    )
    return _cropped(out, v), lse


def _cuda_backward(
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
    _check_cuda(mask, softcap)
    band = _simplest(band, q, k)
    if not _is_plain(band, q, k):
        return _windowed_backward(grad_out, q, k, v, out, lse, band, scale)
    width = _cuda_width(q, v)
    state = _random_state(q)
    dq, dk, dv = _aten._scaled_dot_product_flash_attention_backward(
        *(_padded(x, width) for x in (grad_out, q, k, v, out)),
        lse.contiguous(),
        None,
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        band == CAUSAL,
        state,
        state,
        scale=scale,
    )
    return _cropped(dq, q), _cropped(dk, k), _cropped(dv, v)


def _windowed_forward(q: Tensor, k: Tensor, v: Tensor, band: Band, scale: float) -> tuple[Tensor, Tensor]:
    window = flash_window(band, q.shape[2], k.shape[2])
    if window is None:
        lse = q.new_full(q.shape[:-1], -torch.inf, dtype=accumulation_dtype(q.dtype))
        return q.new_zeros((*q.shape[:-1], v.shape[-1])), lse
    q_BLNH, k_BLNH, v_BLNH = _cuda_operands(window, rows=(q,), columns=(k, v), width=_cuda_width(q, v))
    out_BLNH, lse, *_ = _aten._flash_attention_forward(
        q_BLNH,
        k_BLNH,
        v_BLNH,
        None,
        None,
        window.rows,
        window.columns,
        0.0,
        False,
        False,
        scale=scale,
        window_size_left=window.left,
        window_size_right=window.right,
    )
    missing = q.shape[2] - window.rows
    out = F.pad(_cropped(out_BLNH.transpose(1, 2), v), (0, 0, 0, missing))
    lse = F.pad(lse, (0, missing))
    return out, lse.masked_fill(_blind_rows(band, q, k), -torch.inf)


def _windowed_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, band: Band, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    window = flash_window(band, q.shape[2], k.shape[2])
    if window is None:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    go_BLNH, q_BLNH, out_BLNH, k_BLNH, v_BLNH = _cuda_operands(
        window, rows=(grad_out, q, out), columns=(k, v), width=_cuda_width(q, v)
    )
    state = _random_state(q)
    grads_BLNH = _aten._flash_attention_backward(
        go_BLNH,
        q_BLNH,
        k_BLNH,
        v_BLNH,
        out_BLNH,
        finite(lse[:, :, : window.rows]).contiguous(),
        None,
        None,
        window.rows,
        window.columns,
        0.0,
        False,
        state,
        state,
        scale=scale,
        window_size_left=window.left,
        window_size_right=window.right,
    )
    dq, dk, dv = (
        F.pad(_cropped(grad_BLNH.transpose(1, 2), x), (0, 0, 0, x.shape[2] - grad_BLNH.shape[1]))
        for grad_BLNH, x in zip(grads_BLNH, (q, k, v), strict=True)
    )
    return dq, dk, dv


def _check_cuda(mask: Tensor | None, softcap: float) -> None:
    refuse_softcap("flash", softcap)
    if mask is not None:
        raise ValueError("kernel='flash' takes no mask on cuda; pass kernel='flex' or kernel='reference'")


def _is_plain(band: Band, q: Tensor, k: Tensor) -> bool:
    return band == FULL or (band == CAUSAL and q.shape[2] == k.shape[2])


def _cuda_operands(window: Window, rows: tuple[Tensor, ...], columns: tuple[Tensor, ...], width: int) -> list[Tensor]:
    """The tensors cut to a window, as (B, L, N, H), padded."""
    cut = [x[:, :, : window.rows] for x in rows] + [x[:, :, : window.columns] for x in columns]
    return [_padded(x, width).transpose(1, 2) for x in cut]


def _blind_rows(band: Band, q: Tensor, k: Tensor) -> Tensor:
    """Rows (Lq,) that see no key."""
    rows = torch.arange(q.shape[2], device=q.device)
    first = 0 if band.low is None else rows + band.low
    last = k.shape[2] - 1 if band.high is None else rows + band.high
    blind = torch.zeros_like(rows, dtype=torch.bool)
    return blind | (first > torch.as_tensor(last).clamp_max(k.shape[2] - 1)) | (last < 0)


def _cuda_width(q: Tensor, v: Tensor) -> int:
    width = max(q.shape[-1], v.shape[-1])
    return width + -width % 8


def _random_state(q: Tensor) -> Tensor:
    # Only dropout reads it.
    return torch.zeros(2, dtype=torch.uint64, device=q.device)


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _padded(x: Tensor, width: int) -> Tensor:
    missing = width - x.shape[-1]
    # Padding by nothing would still copy.
    return F.pad(_dense(x), (0, missing)) if missing else _dense(x)


def _cropped(x: Tensor, like: Tensor) -> Tensor:
    return x if x.shape[-1] == like.shape[-1] else x[..., : like.shape[-1]]


FLASH_CPU = BlockKernel("flash", _cpu_forward, _cpu_backward)
FLASH_CUDA = BlockKernel("flash", _cuda_forward, _cuda_backward)
