"""The style of attention that a recipe's options ask for."""

from __future__ import annotations

import torch

from recipes.training.ranks import Ranks
from recipes.training.settings import RunSettings
from wallfacer_dt import WallFacerParallel


def attention_style(settings: RunSettings, ranks: Ranks, *, is_causal: bool, length: int) -> WallFacerParallel:
    """Attention of sequences of `length` tokens, in (B, L, N, H)."""
    return WallFacerParallel(
        is_causal=is_causal,
        order=ranks.order,
        schedule=settings.schedule,
        rotate=settings.rotate,
        rotate_forward=settings.rotate_forward,
        length=length,
        kernel=attention_kernel(ranks),
        layout="BLNH",
    )


def attention_kernel(ranks: Ranks) -> str:
    """Of blocks of attention: torch has no flash attention in float32 on GPUs."""
    return "reference" if ranks.device.type == "cuda" and ranks.dtype == torch.float32 else "auto"
