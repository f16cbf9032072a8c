"""Derivatives of operators, for autograd and for ``torch.func`` alike, and what ``torch.func`` does that is refused.

An operator made with ``torch.library`` has a derivative for autograd only. Under a transform of ``torch.func`` it is
therefore taken for an ``autograd.Function`` of the same formula, before any rule of its own is looked for.

Private APIs of ``torch.func`` are called here only; run on torch 2.13.0.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._C import _functorch
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor

_library = torch.library.Library("wallfacer_dt", "FRAGMENT")


def differentiable(op: OpOverload, backward: Callable[..., Any], setup_context: Callable[..., None]) -> None:
    """Register an operator's derivative, once differentiable, in reverse mode.

    Args:
        op: the operator.
        backward: as ``torch.library.register_autograd`` takes it.
        setup_context: likewise.
    """
    torch.library.register_autograd(op, backward, setup_context=setup_context)
    name = op.name()

    def refuse_jvp(*_: Any) -> NoReturn:
        raise NotImplementedError(f"{name} has no forward-mode derivative")

    def refuse_vmap(*_: Any) -> NoReturn:
        raise NotImplementedError(f"{name} cannot be mapped over by torch.vmap; call it once for each")

    rules: dict[str, Callable[..., Any]] = {
        "forward": op,
        "setup_context": setup_context,
        "backward": backward,
        "jvp": refuse_jvp,
        "vmap": refuse_vmap,
    }
    members = {key: staticmethod(rule) for key, rule in rules.items()}
    function: Any = type("Function", (torch.autograd.Function,), members)

    def transformed(*args: Any) -> Any:
        if _functorch.peek_interpreter_stack().key() == _functorch.TransformType.Functionalize:
            raise NotImplementedError(f"{name} changes nothing in place: leave torch.func.functionalize out")
        return function.apply(*args)

    _library.impl(name, transformed, "FuncTorchDynamicLayerFrontMode")


def not_differentiable(op: OpOverload, why: str) -> None:
    """Have an operator's results refuse (NotImplementedError) to be differentiated, saying why."""

    def backward(*_: Any) -> NoReturn:
        raise NotImplementedError(why)

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    differentiable(op, backward, setup_context)


def is_transforming() -> bool:
    """Whether this is called within a transform of ``torch.func`` (grad, vjp, vmap and what is made of them)."""
    return _functorch.peek_interpreter_stack() is not None


def check_transforms(name: str, x: Tensor) -> None:
    """Refuse (NotImplementedError) a tensor under a transform of ``torch.func`` that it cannot be under."""
    inside = x
    while _functorch.is_functorch_wrapped_tensor(inside):
        if _functorch.is_batchedtensor(inside):
            raise NotImplementedError(f"{name} is mapped over by torch.vmap, which is not implemented: ranks exchange "
                                      "whole batches; call it once for each")  # fmt: skip
        inside = _functorch.get_unwrapped(inside)
    if inside is not x and isinstance(inside, DTensor):
        raise NotImplementedError(
            f"{name} is a DTensor under a transform of torch.func, which does not show that it is one: differentiate "
            "with torch.autograd.grad, or local tensors"
        )
