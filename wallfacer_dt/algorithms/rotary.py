"""Rotary positions: pairs of a head's elements turned by an angle of their token's position, and back.

The pairs are neighbours (``"interleaved"``: RoFormer, Llama's complex numbers) or an element of the first half and
one of the second (``"half"``: GPT-NeoX, Hugging Face).
"""

import torch
from torch import Tensor

from wallfacer_dt.kernels.merge import accumulation_dtype

PAIRS = ("interleaved", "half")


def turned(x: Tensor, cos: Tensor, sin: Tensor, pairs: str, *, back: bool = False) -> Tensor:
    """Turn every head of x (B, N, L, H) by angles (1 or B, L, H / 2), or ``back`` as a gradient is.

    In the accumulation dtype.
    """
    cos, sin = (angle.to(accumulation_dtype(x.dtype)).unsqueeze(1) for angle in (cos, sin))
    if back:
        sin = -sin
    if pairs == "half":
        first, second = x.chunk(2, -1)
        return torch.cat([first * cos - second * sin, first * sin + second * cos], -1).to(x.dtype)
    first, second = x[..., 0::2], x[..., 1::2]
    return torch.stack([first * cos - second * sin, first * sin + second * cos], -1).flatten(-2).to(x.dtype)
