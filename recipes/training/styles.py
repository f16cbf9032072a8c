"""A model that begins alike on every rank, and the style of attention that a recipe's options ask for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from recipes.training.ranks import Ranks
from recipes.training.settings import RunSettings
from wallfacer_dt import WallFacerParallel

Model = TypeVar("Model", bound=nn.Module)


def begin(
    make: Callable[[], Model], plan: Callable[[], dict[str, ParallelStyle]], settings: RunSettings, ranks: Ranks
) -> Model:
    """A model begun alike on every rank, under a plan where ranks share a sequence."""
    # On the CPU whatever the device, so that the start depends on the seed alone.
    torch.manual_seed(settings.seed)
    model = make().to(ranks.device)
    if ranks.context is not None:
        # All have the same whole weights, of which each keeps its part under METP: nothing is sent.
        parallelize_module(model, ranks.context, plan(), src_data_rank=None)
    return model


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
