"""torch's fused attention kernels, called below autograd (private aten ops; run on torch 2.11.0, 2.13.0, 2.14.1 and
2.15.0, CPU only so far: on CUDA with fake tensors).

Traps of the CPU's: a last dim whose stride is not 1 is read as if it were, log-sum-exps come with odd strides,
gradients need not be contiguous, v must have q's head dim (so the smaller is padded). An empty block kills the process,
and a row that sees no key has lse 0. So has a row whose scores are all NaN, where no mask is given and keys are fewer
than a vector has lanes. CUDA's: see ``windows``.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.attention
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from wallfacer_dt.kernels.block import (
    CAUSAL,
    FULL,
    HALF,
    NO_MASK,
    Band,
    BlockKernel,
    Need,
    Ragged,
    RaggedKernel,
    no_softcap,
    refuse_mask,
    refuse_softcap,
)
from wallfacer_dt.kernels.merge import accumulation_dtype
from wallfacer_dt.kernels.visible import finite, visible_keys
from wallfacer_dt.kernels.windows import (
    Window,
    backward_in_windows,
    backward_of_segments,
    cropped,
    forward_in_windows,
    forward_of_segments,
)

_aten = torch.ops.aten

_LANES = 16
"""As many numbers as the longest vector of a CPU holds."""


def _cpu_forward(
    q: Tensor, k: Tensor, v: Tensor, *, band: Band, mask: BlockMask | None, scale: float, softcap: float
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
    out = cropped(out, v)
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
    mask: BlockMask | None,
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
    return cropped(dq, q), cropped(dk, k), cropped(dv, v)


def _simplest(band: Band, q: Tensor, k: Tensor) -> Band:
    # A block of one row stays causal, so that one causal schedule calls one kernel whatever its lengths.
    return band if band in (FULL, CAUSAL) else band.within(q.shape[2], k.shape[2])


def _is_causal_backwards(band: Band, mask: BlockMask | None, q: Tensor, k: Tensor) -> bool:
    """Whether rows see what does not come before them: causal once rows are reversed, with no mask made."""
    return band == Band(0, None) and mask is None and q.shape[2] == k.shape[2]


def _reversed(*tensors: Tensor) -> list[Tensor]:
    return [x.flip(2) for x in tensors]


def _cpu_visible(band: Band, mask: BlockMask | None, q: Tensor, k: Tensor) -> tuple[bool, Tensor | None]:
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


def _cuda_forward(
    q: Tensor, k: Tensor, v: Tensor, *, band: Band, mask: BlockMask | None, scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    refuse_softcap("flash", softcap)
    refuse_mask("flash", mask)

    return forward_in_windows(partial(_run_forward, scale=scale), q, k, v, band)


def _run_forward(q: Tensor, k: Tensor, v: Tensor, window: Window | Ragged, *, scale: float) -> tuple[Tensor, Tensor]:
    lengths = window.lengths if isinstance(window, Ragged) else (None, None, q.shape[1], k.shape[1])
    out, lse, *_ = _aten._flash_attention_forward(
        q, k, v, *lengths, 0.0, window.is_causal, False, **_window_options(window, scale)
    )
    return out, lse


def _cuda_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    band: Band,
    mask: BlockMask | None,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    refuse_softcap("flash", softcap)
    refuse_mask("flash", mask)

    return backward_in_windows(partial(_run_backward, scale=scale), grad_out, q, k, v, out, lse, band)


def _run_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    window: Window | Ragged,
    *,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    # Only dropout reads it.
    state = torch.empty(2, dtype=torch.uint64, device=q.device)
    lengths = window.lengths if isinstance(window, Ragged) else (None, None, q.shape[1], k.shape[1])
    options = _window_options(window, scale)
    return _aten._flash_attention_backward(
        grad_out, q, k, v, out, lse, *lengths, 0.0, window.is_causal, state, state, **options
    )


def _cuda_forward_ragged(
    q: Tensor, k: Tensor, v: Tensor, *, ragged: Ragged, scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    refuse_softcap("flash", softcap)
    return forward_of_segments(partial(_run_forward, scale=scale), q, k, v, ragged)


def _cuda_backward_ragged(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    ragged: Ragged,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    refuse_softcap("flash", softcap)
    return backward_of_segments(partial(_run_backward, scale=scale), grad_out, q, k, v, out, lse, ragged)


def _window_options(window: Window | Ragged, scale: float) -> dict[str, Any]:
    return {"scale": scale, "window_size_left": window.left, "window_size_right": window.right}


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _padded(x: Tensor, width: int) -> Tensor:
    missing = width - x.shape[-1]
    # Padding by nothing would still copy.
    return F.pad(_dense(x), (0, missing)) if missing else _dense(x)


def _supports(need: Need) -> bool | str:
    if need.softcap:
        return no_softcap(need.softcap)
    if need.device_type in ("cpu", "meta"):  # without contents as on the CPU
        return True
    if need.device_type == "cuda" and need.masked:
        return NO_MASK
    head_dim = max(need.head_dim, need.value_dim)
    if need.device_type != "cuda" or need.dtype not in HALF or head_dim > 256:
        return (
            "runs on cpu, and on cuda in bfloat16 or float16 with a head dim of at most 256; got "
            f"{need.device_type}, {need.dtype}, head dim {head_dim}: cast q, k and v, or pass kernel='reference'"
        )
    major, minor = need.capability or (9, 0)
    if major < 8:
        return f"runs on compute capability 8.0 and later; got {major}.{minor}: pass kernel='reference'"
    if 192 < head_dim <= 224 and ((major, minor) in ((8, 6), (8, 9)) or major == 12):
        # As scaled_dot_product_attention refuses there (sdp_utils.cpp).
        return f"has no backward for head dims of 193 to 224 on compute capability {major}.{minor}; got {head_dim}"
    other = _current_implementation()
    if other is not None:
        return (
            f"is torch's own, for which activate_flash_attention_impl({other!r}) has put another: call "
            "restore_flash_attention_impl(), or pass kernel='flash_attn_3' or 'flash_attn_4'"
        )
    return True


def _current_implementation() -> str | None:
    # Not in every version of torch.
    current = getattr(torch.nn.attention, "current_flash_attention_impl", None)
    return None if current is None else current()


CPU = BlockKernel("flash", _cpu_forward, _cpu_backward, _supports, f"torch {torch.__version__}")
CUDA = CPU._replace(
    forward=_cuda_forward,
    backward=_cuda_backward,
    takes_bands=True,
    ragged=RaggedKernel(_cuda_forward_ragged, _cuda_backward_ragged),
)
