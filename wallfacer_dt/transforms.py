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
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor

from wallfacer_dt.compiler import opaque
from wallfacer_dt.lowering import keep_order

is_transformed: Callable[[Tensor], bool] = _functorch.is_functorch_wrapped_tensor
"""Whether a tensor is one of a transform of ``torch.func``."""

_library = torch.library.Library("wallfacer_dt", "FRAGMENT")
_bodies: dict[OpOverload, Callable[..., Any]] = {}
_to_body: dict[int, bool] = {}  # by the bits of a set of keys
_DEVICES = (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA)


def operator(name: str, body: Callable[..., Any], schema: str, fake: Callable[..., Any]) -> OpOverload:
    """Make an operator, as ``torch.library.custom_op`` does, but for what that looks up and checks at every call.

    The schema is without name and defaults (torch fills these in slowly); what the body returns are new tensors. It
    communicates, so that Inductor keeps its place; see Note [One order on all ranks]. It is in no CUDA graph of
    Inductor's, whose replays would compare nothing, and have the documents and masks of when it was captured.
    """
    _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe))
    _library.impl(name, opaque(body), "CompositeExplicitAutograd")
    torch.library.register_fake(f"wallfacer_dt::{name}", fake, lib=_library)
    op = getattr(torch.ops.wallfacer_dt, name).default
    _bodies[op] = body
    keep_order(op)
    return op


def _comes_to_body(keys: Any) -> bool:
    """Whether the dispatcher would: no mode, no subclass, no view that conjugates or negates."""
    bits = keys.raw_repr()
    if bits not in _to_body:
        _to_body[bits] = (keys & torch._C._after_autograd_keyset).highestPriorityTypeId() in _DEVICES
    return _to_body[bits]


def differentiable(op: OpOverload, backward: Callable[..., Any], setup_context: Callable[..., None]) -> None:
    """Register an operator's derivative, once differentiable, in reverse mode: as ``torch.library.register_autograd``
    takes it.
    """
    name = op.name()
    body = _bodies[op]

    def below(keys: Any, *args: Any) -> Any:
        if keys is None:  # under a transform
            return op(*args)
        with torch._C._AutoDispatchBelowAutograd():
            if _comes_to_body(keys):
                return body(*args)
            return op.redispatch(keys & torch._C._after_autograd_keyset, *args)

    class Derivative(torch.autograd.Function):
        forward = staticmethod(below)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            setup_context(ctx, tuple(map(_savable, inputs[1:])), output)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return None, *(backward(ctx, *grads) or ())

        @staticmethod
        def jvp(ctx: Any, *grad_inputs: Any) -> NoReturn:
            raise NotImplementedError(f"{name} has no forward-mode derivative")

        @staticmethod
        def vmap(info: Any, in_dims: Any, *args: Any) -> NoReturn:
            raise NotImplementedError(f"{name} cannot be mapped over by torch.vmap; call it once for each")

    # What the method of the class does first, at every call, is for functions that are called by a user: it looks at
    # their signature, and for tensors of a transform that has ended, which the dispatcher has unwrapped by now.
    apply = super(torch.autograd.Function, Derivative).apply  # pyrefly: ignore[missing-attribute]

    def dispatched(keys: Any, *args: Any) -> Any:
        is_wanted = torch.is_grad_enabled() and torch._C._any_requires_grad(*args)
        return apply(keys, *args) if is_wanted else below(keys, *args)

    def transformed(*args: Any) -> Any:
        if _functorch.peek_interpreter_stack().key() == _functorch.TransformType.Functionalize:
            raise NotImplementedError(f"{name} changes nothing in place: leave torch.func.functionalize out")
        return Derivative.apply(None, *args)

    _library.impl(name, opaque(dispatched), "Autograd", with_keyset=True)
    _library.impl(name, opaque(transformed), "FuncTorchDynamicLayerFrontMode")
    # Autograd's is_grads_batched maps without a transform of torch.func.
    _library.impl(name, opaque(Derivative.vmap), "Batched")


def _savable(x: Any) -> Any:
    """What torch can save for a backward: of a tensor made in inference mode, such as documents' numbers, a copy."""
    if isinstance(x, list):
        return [*map(_savable, x)]
    return x.clone() if isinstance(x, Tensor) and x.is_inference() else x


def no_second_derivative(name: str) -> Callable[..., NoReturn]:
    """The derivative of a backward that has none."""

    def refuse(*_: Any) -> NoReturn:
        raise NotImplementedError(f"{name} has no second derivative")

    return refuse


def is_transforming() -> bool:
    """Whether this is called within a transform of ``torch.func`` (grad, vjp, vmap and what is made of them)."""
    return _functorch.peek_interpreter_stack() is not None


def has_tangent(x: Tensor) -> bool:
    """Whether forward-mode differentiation is under way, and this tensor takes part."""
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None


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
