"""Where numbers stop being finite: in which module of which rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from recipes.training.settings import Launch


@torch.no_grad()
def first_not_finite(model: nn.Module, forward: Callable[[], Tensor]) -> str:
    """Run a forward again; the first module that returns what is not finite, by its name, or empty if none does."""
    found: list[str] = []

    def look(name: str, result: Any) -> None:
        tensors = [x for x in tree_leaves(result) if isinstance(x, Tensor) and x.is_floating_point()]
        if not found and not all(bool(x.isfinite().all()) for x in tensors):
            found.append(name)

    hooks = [
        module.register_forward_hook(lambda _module, _args, result, name=name: look(name or "the model", result))
        for name, module in model.named_modules()
    ]
    try:
        loss = forward()
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else "" if bool(loss.isfinite()) else "the loss"


def last_not_finite(model: nn.Module) -> tuple[int, str]:
    """The last weight whose gradient, or this rank's shard of it, is not finite: where in the model, and its name."""
    found = -1, ""
    for place, (name, weight) in enumerate(model.named_parameters()):
        grad = weight.grad.to_local() if isinstance(weight.grad, DTensor) else weight.grad
        if grad is not None and not bool(grad.isfinite().all()):
            found = place, name
    return found


def blame(
    module: str, loss_was_finite: bool, gradients_were_finite: bool | None, weight: tuple[int, str], launch: Launch
) -> str:
    """What all ranks found of a step, in words; all call it.

    Args:
        module: of this rank's model that is not finite when the forward is run again.
        loss_was_finite: this rank's, in the step itself.
        gradients_were_finite: likewise, before they were averaged; None where nobody knows.
        weight: the last whose gradient is not finite.
        launch: this rank.
    """
    mine = module, loss_was_finite, gradients_were_finite, weight
    heard: list[Any] = [mine]
    if dist.is_initialized():
        heard = [mine] * launch.world
        dist.all_gather_object(heard, mine)
    by_module: dict[str, list[int]] = {}
    for rank, (each, *_) in enumerate(heard):
        by_module.setdefault(each, []).append(rank)
    again = [f"{each} on rank {_listed(some)}" for each, some in by_module.items() if each]
    if again:
        return f"first not finite, when the forward was run again: {'; '.join(again)}; lower --lr, or see why"
    odd = [rank for rank, (_, was_finite, _, _) in enumerate(heard) if not was_finite]
    if odd:
        return (
            f"the loss was not finite on rank {_listed(odd)}, and was when the forward was run again: a device's fault?"
        )
    odd = [rank for rank, (_, _, were_finite, _) in enumerate(heard) if were_finite is False]
    where = f" of rank {_listed(odd)}" if odd else ""
    _, name = max(last for *_, last in heard)
    return f"the loss was finite, the gradients{where} were not, back from {name} on; lower --lr, or see why"


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
