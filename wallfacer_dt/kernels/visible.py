"""Bands and masks as booleans, and the rows that see no key."""

from collections.abc import Iterator
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask

from wallfacer_dt.agreement.meeting import outside_dispatch
from wallfacer_dt.kernels.block import FULL, How

_PAIRS = 1 << 24
"""As many pairs a mask is asked about at once, for each of which torch holds some integers."""
_KEPT = 1 << 16
"""Pairs of a block of which what a mask says is kept, as it takes torch 20 to 40 ms to ask about any."""
# As long as the mask is, which is that of some positions and of tensors as they are; it is known by what it is.
_known: WeakKeyDictionary[BlockMask, Tensor] = WeakKeyDictionary()


def strips(rows: int, width: int, multiple: int = 1) -> Iterator[slice]:
    """Rows with ``width`` answers each, in parts that a mask is asked about at once: a multiple, but for the last."""
    step = max(1, _PAIRS // max(1, width) // multiple) * multiple
    yield from (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def visible_keys(how: How, q: Tensor, k: Tensor) -> Tensor | None:
    """Which of the keys (B, Nkv, Lk, H) each query (B, N, Lq, H) sees, by band and mask together.

    A boolean mask (B or 1, N or 1, Lq, Lk), or None where all is visible. ``how.mask`` is of these rows and columns.
    """
    shown, band = None if how.mask is None else _shown(how.mask, q, k), how.band
    if band == FULL:
        return shown
    rows = torch.arange(q.shape[-2], device=q.device).unsqueeze(-1)
    offset_LS = torch.arange(k.shape[-2], device=q.device) - rows
    visible_LS = torch.ones_like(offset_LS, dtype=torch.bool) if band.low is None else offset_LS >= band.low
    if band.high is not None:
        visible_LS = visible_LS & (offset_LS <= band.high)
    return visible_LS[None, None] if shown is None else shown & visible_LS


def _shown(mask: BlockMask, q: Tensor, k: Tensor) -> Tensor:
    shown = _known.get(mask)
    if shown is None or shown.shape[-2:] != (q.shape[-2], k.shape[-2]) or shown.device != q.device:
        shown = _asked(mask, q, k)
        if shown.numel() > _KEPT:
            return shown
        _known[mask] = shown
    return shown.clone()  # a kernel may write into what it is given


def _asked(mask: BlockMask, q: Tensor, k: Tensor) -> Tensor:
    batch, heads = mask.shape[:2]
    columns, mask_mod = k.shape[-2], mask.mask_mod

    def asked(rows: slice) -> Tensor:
        def shifted(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return mask_mod(b, h, i + rows.start, j)

        return create_mask(shifted, batch, heads, rows.stop - rows.start, columns, device=q.device)

    # What is kept in an evaluation is for training, too.
    with outside_dispatch(), torch.inference_mode(False), torch.no_grad():
        return torch.cat([asked(rows) for rows in strips(q.shape[-2], columns * batch * heads)], 2)


def finite(lse: Tensor) -> Tensor:
    """``lse`` with 0 for -inf: the probabilities exp(-inf - lse) of a row that sees no key are then 0, not NaN."""
    return lse.nan_to_num(nan=torch.nan, posinf=torch.inf, neginf=0.0)
