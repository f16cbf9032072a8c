"""RoPE that depends on the largest position (``dynamic``, ``longrope``), which one rank holds and the others do not.

transformers takes it from the positions that such a module is called with. So on a mesh they are one more, the largest
of the whole batch, and of what the module makes of them the last is cut off: it is told what one process tells it.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from wallfacer_dt.compiler import untraced
from wallfacer_dt.integrations.transformers.sequence import ForwardPass

_POSITIONS = "position_ids"
_UNTRACED = "the largest position is another at every call"


def largest_matters(module: nn.Module) -> str:
    """The type of a module's RoPE if that depends on the largest position, or nothing."""
    kinds = getattr(module, "rope_type", None)
    told = [str(kind) for kind in (kinds.values() if isinstance(kinds, dict) else [kinds]) if kind is not None]
    # Phimoe's scales of any type but the default are of long sequences or of short ones.
    parameters = getattr(getattr(module, "config", None), "rope_parameters", None) or {}
    scales = "long_mscale" in parameters
    return next((one for one in told if "dynamic" in one or one == "longrope" or (scales and one != "default")), "")


def takes_positions(module: nn.Module) -> bool:
    """Whether a module is called with positions."""
    return _POSITIONS in inspect.signature(module.forward).parameters


def tell_largest_position(model: nn.Module, in_forward: Callable[[], ForwardPass]) -> list[RemovableHandle]:
    """Have every such module of a model see the largest position of the forward that it is called in.

    Args:
        model: whose.
        in_forward: finds the forward, or refuses.

    Returns:
        Handles that undo it.
    """

    @untraced(_UNTRACED)
    def add(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        given = inspect.signature(module.forward).bind(*args, **kwargs)
        positions = given.arguments[_POSITIONS]
        largest = torch.full_like(positions[..., :1], in_forward().sequence.largest_position)
        given.arguments[_POSITIONS] = torch.cat((positions, largest), dim=-1)
        return given.args, given.kwargs

    @untraced(_UNTRACED)
    def cut(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any) -> Any:
        tokens = inspect.signature(module.forward).bind(*args, **kwargs).arguments[_POSITIONS].shape[-1]
        parts = made if isinstance(made, tuple) else (made,)
        if any(not isinstance(x, Tensor) or x.ndim < 2 or x.shape[-2] != tokens for x in parts):
            raise ValueError(f"{type(module).__name__} must make a row of every position, as RoPE does")
        rows = tuple(x[..., :-1, :] for x in parts)
        return rows if isinstance(made, tuple) else rows[0]

    return [
        hook
        for module in model.modules()
        if largest_matters(module)
        for hook in (
            module.register_forward_pre_hook(add, with_kwargs=True),
            module.register_forward_hook(cut, with_kwargs=True),
        )
    ]
