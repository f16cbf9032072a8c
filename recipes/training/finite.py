"""Where numbers stop being finite: in which module of which rank."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from recipes.training.settings import Launch
from wallfacer_dt.agreement.progress import Waiting
from wallfacer_dt.bound import BoundForward


@torch.no_grad()
def first_not_finite(model: nn.Module, forward: Callable[[], Tensor]) -> tuple[int, str]:
    """Run a forward again; the first module that returns what is not finite: in which turn, and its name, or empty."""
    found: list[tuple[int, str]] = []
    turns = count()

    def look(name: str, result: Any) -> None:
        turn = next(turns)
        tensors = [local(x) for x in tree_leaves(result) if isinstance(x, Tensor) and x.is_floating_point()]
        if not found and not all(bool(x.isfinite().all()) for x in tensors):
            found.append((turn, name))

    # A style computes what the modules in its own do without calling them, and METP refuses their hooks.
    styled = [path and f"{path}." for path, module in model.named_modules() if _is_styled(module)]
    hooks = [
        module.register_forward_hook(lambda _module, _args, result, name=name: look(name or "the model", result))
        for name, module in model.named_modules()
        if not any(name.startswith(path) and name != path for path in styled)
    ]
    try:
        loss = forward()
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else (next(turns), "" if bool(loss.isfinite()) else "the loss")


def _is_styled(module: nn.Module) -> bool:
    return isinstance(getattr(module.forward, "__self__", None), BoundForward)


def local(x: Tensor) -> Tensor:
    """This rank's part."""
    return x.to_local() if isinstance(x, DTensor) else x


def last_not_finite(model: nn.Module) -> tuple[int, str]:
    """The last weight whose gradient, or this rank's shard of it, is not finite: where in the model, and its name."""
    found = -1, ""
    for place, (name, weight) in enumerate(model.named_parameters()):
        if weight.grad is not None and not bool(local(weight.grad).isfinite().all()):
            found = place, name
    return found


def blame(
    module: tuple[int, str],
    loss_was_finite: bool,
    gradients_were_finite: bool | None,
    weight: tuple[int, str],
    launch: Launch,
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
        with Waiting("all_gather of what is not finite"):
            dist.all_gather_object(heard, mine)
    # From the rank where it began attention has carried it to others.
    again = [(each, rank) for rank, (each, *_) in enumerate(heard) if each[1]]
    if again:
        first = min(each for each, _ in again)
        ranks = _listed([rank for each, rank in again if each == first])
        return f"first not finite, when the forward was run again: {first[1]} on rank {ranks}; lower --lr, or see why"
    odd = [rank for rank, (_, was_finite, _, _) in enumerate(heard) if not was_finite]
    if odd:
        return (
            f"the loss was not finite on rank {_listed(odd)}, and was when the forward was run again: a device's "
            "fault, or random numbers', of which it draws others?"
        )
    odd = [rank for rank, (_, _, were_finite, _) in enumerate(heard) if were_finite is False]
    where = f" of rank {_listed(odd)}" if odd else ""
    place, name = max(last for *_, last in heard)
    if place < 0:
        return "every gradient is finite, their norm or the sum of losses is not; lower --lr, or see why"
    return f"the loss was finite, the gradients{where} were not, back from {name} on; lower --lr, or see why"


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
