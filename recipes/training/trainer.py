"""One optimiser step of all ranks together."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from recipes.training.gradients import Gradients
from recipes.training.ranks import Ranks
from recipes.training.settings import RunSettings

CLIP_NORM = 1.0


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Up in a line over the first eighth of the steps, then down a cosine to a tenth of `peak`."""
    warmup = max(1, steps // 8)
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (0.55 + 0.45 * math.cos(math.pi * progress))


class Trainer:
    """Model and optimiser of one rank; `step` makes one step of all ranks together.

    Args:
        settings: of the run.
        ranks: that take part.
        model: this rank's.
        gradients: of its weights.
        loss: of a batch, this rank's part of the mean over all ranks' tokens: a sum over its tokens, divided by the
            number of all. Ranks need not have equally many.
    """

    def __init__(
        self,
        settings: RunSettings,
        ranks: Ranks,
        model: nn.Module,
        gradients: Gradients,
        loss: Callable[[Any], Tensor],
    ) -> None:
        self.settings, self.ranks, self.model = settings, ranks, model
        self._gradients, self._loss = gradients, loss
        groups = [{"params": kind} for kind in gradients.kinds]
        # By default AdamW makes a whole step of a gradient that is rounding alone, which differs between meshes.
        self.optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.01)

    def step(self, step: int, batch: Any) -> tuple[float, float]:
        """Make one step; returns the mean loss over all ranks and the norm before clipping."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, self.settings.steps, self.settings.lr)
        self.optimizer.zero_grad(set_to_none=True)
        with self._precision():
            loss = self._loss(batch)
        # Gradients are averaged over the ranks, which makes the parts' sum of this.
        (loss * self.ranks.launch.world).backward()
        norm = self._gradients.average()
        for kind in self._gradients.kinds:
            nn.utils.clip_grads_with_norm_(kind, CLIP_NORM, norm)
        self.optimizer.step()
        return _sum_over_ranks(loss.detach()), norm.item()

    def _precision(self) -> torch.autocast | nullcontext[None]:
        if self.ranks.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.ranks.device.type, self.ranks.dtype)


def _sum_over_ranks(loss: Tensor) -> float:
    if dist.is_initialized():
        dist.all_reduce(loss)
    return loss.item()
