"""The two operators ``wallfacer_dt::attention`` and ``wallfacer_dt::attention_backward``.

Made with ``torch.library``: autograd, torch.compile, checkpointing policies and dispatch modes see one opaque op each
way, which saves q, k, v, out and lse of this rank's size and nothing else. Groups travel by name. DTensors go through
a rule for each (``sharding``).
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from wallfacer_dt import sharding
from wallfacer_dt.agreement.agree import tell
from wallfacer_dt.algorithms.blocks import known_recording
from wallfacer_dt.autocast import operator_body
from wallfacer_dt.calls import agreed_call, said
from wallfacer_dt.inputs import INPUTS, INPUTS_SCHEMA, AttentionInputs
from wallfacer_dt.kernels.merge import accumulation_dtype
from wallfacer_dt.options import MASK_SCHEMA, Options
from wallfacer_dt.transforms import differentiable, no_second_derivative, operator


@operator_body
def attention_body(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """What ``wallfacer_dt::attention`` does on one rank, from :class:`AttentionInputs` and what :class:`Options` told.

    It gives out (B, N, L, Hv) in q's dtype and memory layout; lse (B, N, L) in the accumulation dtype, contiguous; the
    call's number on its mesh, and its contents (2,), int64, on the CPU. It raises a ValueError on every rank where
    ranks disagree in shapes, dtype or options; for when, see Note [Comparing calls].
    """
    inputs, options = AttentionInputs(*args[:_COUNT]), Options.of(*args[_COUNT:])
    call, number = agreed_call("attention", options, inputs)
    out, lse = call.forward(inputs.q, inputs.keys, inputs.sinks)
    out, lse = _laid_out(out, inputs.q), lse.contiguous()
    lse = lse if _is_alone(lse) else lse.clone()
    return out, lse, said(number, call.contents)


@operator_body
def attention_backward_body(grad_out: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """What ``wallfacer_dt::attention_backward`` does on one rank.

    From grad_out (B, N, L, Hv) and the forward's tensors, results and options it gives the gradients of q, k, v,
    k_shared and sinks, each in its input's dtype and memory layout; that of an absent input is empty. It raises a
    ValueError on every rank where ranks are at the backwards of different calls.
    """
    inputs, (out, lse, forward) = AttentionInputs(*args[:_COUNT]), args[_COUNT : _COUNT + 3]
    call, _ = agreed_call("attention", Options.of(*args[_COUNT + 3 :]), inputs, forward)
    grads, dsinks = call.backward(grad_out, out, lse, inputs.q, inputs.keys, inputs.sinks)
    laid_out = [_laid_out(g, x) for g, x in zip(grads, (inputs.q, *inputs.keys), strict=True)]
    if inputs.k_shared is None:
        laid_out.append(inputs.q.new_empty(0))
    return *laid_out, inputs.q.new_empty(0) if dsinks is None else dsinks


def _like(x: Tensor, head_dim: int) -> Tensor:
    """An empty tensor of another head dim, laid out as x: by tokens (as BLNH is, seen as BNLH) or by heads."""
    if head_dim == x.shape[-1]:
        return torch.empty_like(x)
    batch, heads, length, _ = x.shape
    if x.stride(1) < x.stride(2):
        return x.new_empty((batch, length, heads, head_dim)).transpose(1, 2)
    return x.new_empty((batch, heads, length, head_dim))


def _laid_out(result: Tensor, x: Tensor) -> Tensor:
    """The result in new memory, as its input is laid out, so that a model in (B, L, N, H) pays for no transposition."""
    # What fills its memory is laid out densely, and so is an input with the same strides.
    if result.stride() == x.stride() and result.shape == x.shape and result.dtype == x.dtype and _is_alone(result):
        return result
    like = _like(x, result.shape[-1])
    is_alike = result.stride() == like.stride() and result.dtype == x.dtype
    return result if is_alike and _is_alone(result) else like.copy_(result)


def _is_alone(x: Tensor) -> bool:
    """Whether a tensor is all that is in its memory: torch takes results for new tensors, and would keep a buffer."""
    return x.untyped_storage().nbytes() == x.numel() * x.itemsize


def _attention_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    lse = q.new_empty(q.shape[:-1], dtype=accumulation_dtype(q.dtype))
    return _like(q, v.shape[-1]), lse, said(0, 0)


def _attention_backward_fake(grad_out: Tensor, *args: Any) -> tuple[Tensor, ...]:
    return tuple(args[0].new_empty(0) if x is None else torch.empty_like(x) for x in args[: len(_GRADIENTS)])


_COUNT = len(INPUTS)
_OUTPUTS = "out", "lse", "said"
_GRADIENTS = INPUTS[:5]

attention = operator(
    "attention", attention_body, f"({INPUTS_SCHEMA}, {MASK_SCHEMA}) -> (Tensor, Tensor, Tensor)", _attention_fake
)
attention_backward = operator(
    "attention_backward",
    attention_backward_body,
    f"(Tensor grad_out, {INPUTS_SCHEMA}, Tensor out, Tensor lse, Tensor said, {MASK_SCHEMA}) "
    f"-> ({', '.join(['Tensor'] * len(_GRADIENTS))})",
    _attention_backward_fake,
)

BODIES = {attention: attention_body, attention_backward: attention_backward_body}


def _setup_context(ctx, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
    *told, captured = inputs[_COUNT:]
    ctx.save_for_backward(*inputs[:_COUNT], *output[:2], *captured)
    ctx.options = told
    # Not saved with them: a checkpoint that computes them again would put a number in its place that is new.
    ctx.said = output[2]
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    # What a mask does must not be forgotten before the backward has come.
    mask = Options.of_text(told[-1]).mask
    ctx.recording = known_recording(mask) if mask else None


def _autograd(ctx, grad_out: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    nothing = (None,) * (len(ctx.options) + 1)
    if grad_out is None:
        return (*[None] * _COUNT, *nothing)
    try:
        read = ctx.saved_tensors  # to be read once: a checkpoint unpacks it
    except Exception as error:  # what one rank has written into meanwhile
        tell(error, Options.of_text(ctx.options[-1]).setting.mesh)
        raise
    saved, captured = read[: _COUNT + 2], read[_COUNT + 2 :]
    grads = attention_backward(grad_out, *saved, ctx.said, *ctx.options, list(captured))
    if isinstance(grad_out, DTensor):
        grads = [
            grad if x is None else sharding.placed_like(grad, x, sums=name == "sinks")
            for name, grad, x in zip(_GRADIENTS, grads, saved, strict=False)
        ]
    wanted = [None if x is None else grad for grad, x in zip(grads, saved, strict=False)]
    return (*wanted, *[None] * (_COUNT - len(_GRADIENTS)), *nothing)


differentiable(attention, _autograd, _setup_context)
differentiable(attention_backward, no_second_derivative("context-parallel attention"), lambda *_: None)

sharding.register(attention, INPUTS, _OUTPUTS)
sharding.register(attention_backward, ("grad_out", *INPUTS, *_OUTPUTS), tuple(f"grad_{name}" for name in _GRADIENTS))
