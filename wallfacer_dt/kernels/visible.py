"""Bands as boolean masks, and the rows that see no key."""

import torch
from torch import Tensor

from wallfacer_dt.kernels.block import FULL, Band


def visible_keys(band: Band, mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """The keys that each row sees, by band and mask together.

    Args:
        band: of the block.
        mask: of the block, boolean (B or 1, N or 1, Lq, Lk), or None.
        q: queries (B, N, Lq, H).
        k: keys (B, Nkv, Lk, H).

    Returns:
        A boolean mask (B or 1, N or 1, Lq, Lk), or None where all is visible.
    """
    if band == FULL:
        return mask
    rows = torch.arange(q.shape[-2], device=q.device).unsqueeze(-1)
    offset_LS = torch.arange(k.shape[-2], device=q.device) - rows
    visible_LS = torch.ones_like(offset_LS, dtype=torch.bool) if band.low is None else offset_LS >= band.low
    if band.high is not None:
        visible_LS = visible_LS & (offset_LS <= band.high)
    return visible_LS[None, None] if mask is None else mask & visible_LS


def finite(lse: Tensor) -> Tensor:
    """``lse`` with 0 for -inf: the probabilities exp(-inf - lse) of a row that sees no key are then 0, not NaN."""
    return lse.masked_fill(lse == -torch.inf, 0)
