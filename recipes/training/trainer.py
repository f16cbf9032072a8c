"""One optimiser step of all ranks together."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from recipes.training.finite import blame, first_not_finite, last_not_finite
from recipes.training.gradients import ShardedGradients, WholeGradients
from recipes.training.ranks import Ranks
from recipes.training.settings import RecipeError, RunSettings
from wallfacer_dt import note_progress
from wallfacer_dt.agreement.progress import Waiting

CLIP_NORM = 1.0


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Up in a line over the first eighth of the steps, then down a cosine to a tenth of `peak`."""
    warmup = max(1, steps // 8)
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (0.55 + 0.45 * math.cos(math.pi * progress))


def precision(ranks: Ranks) -> torch.autocast | nullcontext[None]:
    """What every forward of a recipe's model runs within: autocast, unless layers are in float32 as weights are."""
    if ranks.dtype == torch.float32:
        return nullcontext()
    return torch.autocast(ranks.device.type, ranks.dtype)


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
        gradients: WholeGradients | ShardedGradients,
        loss: Callable[[Any], Tensor],
    ) -> None:
        self.settings, self.ranks, self.model = settings, ranks, model
        self._gradients, self._loss = gradients, loss
        groups = [{"params": kind} for kind in gradients.kinds]
        # By default AdamW makes a whole step of a gradient that is rounding alone, which differs between meshes.
        self.optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.01)

    def step(self, step: int, batch: Any) -> tuple[float, float]:
        """Make one step; returns the mean loss over all ranks and the norm before clipping.

        Raises:
            RecipeError: one of the two is not finite; weights and optimizer are as they were.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, self.settings.steps, self.settings.lr)
        self.optimizer.zero_grad(set_to_none=True)
        note_progress(f"step {step + 1}, forward")
        with precision(self.ranks):
            loss = self._loss(batch)
        note_progress(f"step {step + 1}, backward")
        # Gradients are averaged over the ranks, which makes the parts' sum of this.
        (loss * self.ranks.launch.world).backward()
        note_progress(f"step {step + 1}, gradients")
        norm, mean = self._gradients.average(), _sum_over_ranks(loss.detach().clone())
        if not (math.isfinite(mean) and norm.isfinite()):
            # Before the weights are no numbers either.
            raise RecipeError(f"step {step + 1}: loss {mean}, gradient norm {norm.item()}; {self._blame(batch, loss)}")
        note_progress(f"step {step + 1}, optimizer")
        for kind in self._gradients.kinds:
            nn.utils.clip_grads_with_norm_(kind, CLIP_NORM, norm)
        self.optimizer.step()
        return mean, norm.item()

    def _blame(self, batch: Any, loss: Tensor) -> str:
        """What is not finite first, where; all ranks call it."""
        weight = last_not_finite(self.model)  # first: a forward under FSDP leaves weights whole, which have no gradient
        with precision(self.ranks):
            module = first_not_finite(self.model, lambda: self._loss(batch))
        return blame(module, bool(loss.isfinite()), self._gradients.are_finite, weight, self.ranks.launch)


def _sum_over_ranks(loss: Tensor) -> float:
    if dist.is_initialized():
        with Waiting("all_reduce of the loss"):
            dist.all_reduce(loss)
    return loss.item()
