"""Operators, their derivatives for autograd and for ``torch.func`` alike, and what ``torch.func`` does that is refused.

An operator made with ``torch.library`` has a derivative for autograd only. Under a transform of ``torch.func`` it is
therefore taken for an ``autograd.Function`` of the same formula, before any rule of its own is looked for.

Private APIs of ``torch.func`` and of the dispatcher are called here only; run on torch 2.11.0, 2.13.0, 2.14.1 and
2.15.0.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._C import _functorch
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor

from wallfacer_dt.compiler import untraced

_library = torch.library.Library("wallfacer_dt", "FRAGMENT")


def operator(name: str, body: Callable[..., Any], schema: str, fake: Callable[..., Any]) -> OpOverload:
    """Make an operator, as ``torch.library.custom_op`` does, but for what that looks up and checks at every call.

    Args:
        name: in the package's namespace.
        body: what it does; its results are new tensors.
        schema: without the name and without defaults, which torch would fill in slowly.
        fake: what it gives for fake tensors.

    Returns:
        The operator.
    """
    _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, untraced("an operator is opaque")(body), "CompositeExplicitAutograd")
    torch.library.register_fake(f"wallfacer_dt::{name}", fake, lib=_library)
    return getattr(torch.ops.wallfacer_dt, name).default


def differentiable(op: OpOverload, backward: Callable[..., Any], setup_context: Callable[..., None]) -> None:
    """Register an operator's derivative, once differentiable, in reverse mode.

    Args:
        op: of :func:`operator`.
        backward: as ``torch.library.register_autograd`` takes it.
        setup_context: likewise.
    """

    def below(keys: Any, *args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return op.redispatch(keys & torch._C._after_autograd_keyset, *args)

    def forward(ctx: Any, keys: Any, *args: Any) -> Any:
        output = below(keys, *args)
        setup_context(ctx, args, output)
        return output

    def backward_of_all(ctx: Any, *grads: Any) -> Any:
        return None, *(backward(ctx, *grads) or ())

    plain: Any = type(
        "Function",
        (torch.autograd.Function,),
        {"forward": staticmethod(forward), "backward": staticmethod(backward_of_all)},
    )

    def dispatched(keys: Any, *args: Any) -> Any:
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
            return plain.apply(keys, *args)
        return below(keys, *args)

    _library.impl(op.name(), dispatched, "Autograd", with_keyset=True)
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


def is_transformed(x: Tensor) -> bool:
    """Whether a tensor is one of a transform of ``torch.func``."""
    return _functorch.is_functorch_wrapped_tensor(x)


def check_transforms(name: str, x: Tensor) -> None:
    """Refuse (NotImplementedError) a tensor under a transform of ``torch.func`` that it cannot be under."""
    inside = x
    while is_transformed(inside):
        if _functorch.is_batchedtensor(inside):
            raise NotImplementedError(f"{name} is mapped over by torch.vmap, which is not implemented: ranks exchange "
                                      "whole batches; call it once for each")  # fmt: skip
        inside = _functorch.get_unwrapped(inside)
    if inside is not x and isinstance(inside, DTensor):
        raise NotImplementedError(
            f"{name} is a DTensor under a transform of torch.func, which does not show that it is one: differentiate "
            "with torch.autograd.grad, or local tensors"
        )
