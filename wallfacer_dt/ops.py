"""The two operators ``wallfacer_dt::attention`` and ``wallfacer_dt::attention_backward``.

Made with ``torch.library``: autograd, torch.compile, checkpointing policies and dispatch modes see one opaque op each
way, which saves q, k, v, out and lse of this rank's size and nothing else. Groups travel by name. DTensors go through
a rule for each (``sharding``), and Inductor keeps the order of all that communicate (``lowering``).

Note [What a compiled graph bakes in]
Generated code holds sizes and strides that this package states, and torch caches code by the graph's text, on a disk
that ranks may share. So a digest of the package's sources is an argument of the operators, as is the rank's place.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wallfacer_dt import lowering, sharding
from wallfacer_dt.agreement import refusing_together, settling
from wallfacer_dt.algorithms import known_recording
from wallfacer_dt.autocast import outside_autocast
from wallfacer_dt.calls import agree_on_backward, agreed_call, make_call
from wallfacer_dt.kernels import accumulation_dtype
from wallfacer_dt.options import MASK_SCHEMA, Options
from wallfacer_dt.transforms import differentiable, not_differentiable, operator


def _digest_of_sources() -> str:
    sources = sorted(Path(__file__).parent.rglob("*.py"))
    if not sources:
        raise ImportError("wallfacer_dt must be installed with its sources, which are part of torch's cache keys")
    digest = hashlib.sha256()
    for path in sources:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


CODE = _digest_of_sources()
"""Digest of the package's sources; see Note [What a compiled graph bakes in]."""


@outside_autocast
def attention_body(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_shared: Tensor | None,
    sinks: Tensor | None,
    documents: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """What ``wallfacer_dt::attention`` does on one rank.

    Args:
        q: queries (B, N, L, H).
        k: keys (B, Nkv, L, H), or (B, Nkv, L, H - Hs) with ``k_shared``.
        v: values (B, Nkv, L, Hv).
        k_shared: the end of every head's key (B, 1, L, Hs).
        sinks: for every head a logit without a value (N,).
        documents: where documents are in the whole sequence, on the CPU, a row for each of the batch or one for all.
        *rest: what :meth:`Options.told` gives.

    Returns:
        out (B, N, L, Hv) in q's dtype and memory layout; lse (B, N, L) in the accumulation dtype, contiguous; the
        call's number on its mesh, and that of the contents of what a mask captures (2,), int64, on the CPU.

    Raises:
        ValueError: on every rank: ranks disagree in shapes, dtype or options. See Note [Comparing calls] for when.
    """
    options = Options.of(*rest)
    call, number = agreed_call("attention", options, q, k, v, k_shared, sinks, documents)
    said = torch.tensor([number, options.captured.contents], device="cpu")
    out, lse = call.forward(q, _present(k, v, k_shared), sinks)
    return _laid_out(out, _like(q, v.shape[-1])), lse.contiguous(), said


@outside_autocast
def attention_backward_body(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_shared: Tensor | None,
    sinks: Tensor | None,
    documents: Tensor | None,
    out: Tensor,
    lse: Tensor,
    number: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What ``wallfacer_dt::attention_backward`` does on one rank.

    Args:
        grad_out: gradient of the output (B, N, L, Hv).
        q: queries (B, N, L, H).
        k: keys (B, Nkv, L, H).
        v: values (B, Nkv, L, Hv).
        k_shared: as the forward was given it.
        sinks: as the forward was given them.
        documents: as the forward was given it.
        out: the forward's output.
        lse: the forward's log-sum-exp.
        number: what the forward gave last.
        *rest: what :meth:`Options.told` gives.

    Returns:
        dq, dk, dv and the gradients of k_shared and sinks, each in its input's dtype and memory layout; that of an
        absent input is empty.

    Raises:
        ValueError: on every rank: ranks are at the backwards of different calls.
    """
    options = Options.of(*rest)
    with refusing_together(options.setting.mesh):
        if options.captured and options.captured.contents != int(number[1]):
            raise ValueError(
                "a tensor that mask_mod captures has been written into since the forward, whose mask is gone with it: "
                "write into it after the backward, or capture another tensor"
            )
        call = make_call(options, q, k, v, k_shared, documents)
        needed = call.needed(options)
    agree_on_backward("attention", q, options.setting.mesh, number[0])
    call = call.heard(options, q, k, v, k_shared, sinks, needed)
    grads, dsinks = call.backward(grad_out, out, lse, q, _present(k, v, k_shared), sinks)
    laid_out = [_laid_out(g, torch.empty_like(x)) for g, x in zip(grads, _present(q, k, v, k_shared), strict=True)]
    dq, dk, dv, dk_shared = (*laid_out, q.new_empty(0))[:4]
    return dq, dk, dv, dk_shared, q.new_empty(0) if dsinks is None else dsinks


def _present(*tensors: Tensor | None) -> tuple[Tensor, ...]:
    return tuple(x for x in tensors if x is not None)


def _like(x: Tensor, head_dim: int) -> Tensor:
    """An empty tensor of another head dim, laid out as x: by tokens (as BLNH is, seen as BNLH) or by heads."""
    if head_dim == x.shape[-1]:
        return torch.empty_like(x)
    batch, heads, length, _ = x.shape
    if x.stride(1) < x.stride(2):
        return x.new_empty((batch, length, heads, head_dim)).transpose(1, 2)
    return x.new_empty((batch, heads, length, head_dim))


def _laid_out(result: Tensor, like: Tensor) -> Tensor:
    """The result as its input is laid out, so that a model in (B, L, N, H) pays for no transposition."""
    if result.dtype == like.dtype and result.stride() == like.stride():
        return result
    return like.copy_(result)


def _attention_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    lse = q.new_empty(q.shape[:-1], dtype=accumulation_dtype(q.dtype))
    return _like(q, v.shape[-1]), lse, torch.empty(2, dtype=torch.int64, device="cpu")


def _attention_backward_fake(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, k_shared: Tensor | None, sinks: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    return tuple(q.new_empty(0) if x is None else torch.empty_like(x) for x in (q, k, v, k_shared, sinks))


attention = operator(
    "attention",
    settling(attention_body),
    f"(Tensor q, Tensor k, Tensor v, Tensor? k_shared, Tensor? sinks, Tensor? documents, {MASK_SCHEMA}) "
    "-> (Tensor, Tensor, Tensor)",
    _attention_fake,
)
attention_backward = operator(
    "attention_backward",
    settling(attention_backward_body),
    "(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor? k_shared, Tensor? sinks, Tensor? documents, "
    f"Tensor out, Tensor lse, Tensor number, {MASK_SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _attention_backward_fake,
)

BODIES = {attention: attention_body, attention_backward: attention_backward_body}


def _setup_context(ctx, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
    *told, captured = inputs[_TENSORS:]
    ctx.save_for_backward(*inputs[:_TENSORS], *output[:2], *captured)
    ctx.options = told
    # Not saved with them: a checkpoint that computes them again would put a number in its place that is new.
    ctx.number = output[2]
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    # What a mask does must not be forgotten before the backward has come.
    mask = Options.of(*told).mask
    ctx.recording = known_recording(mask) if mask else None


def _autograd(ctx, grad_out: Tensor | None, grad_lse: None, grad_number: None) -> tuple[Tensor | None, ...]:
    nothing = (None,) * (len(ctx.options) + 1)
    if grad_out is None:
        return (*[None] * _TENSORS, *nothing)
    with refusing_together(Options.of(*ctx.options).setting.mesh):  # what one rank has written into meanwhile
        read = ctx.saved_tensors  # to be read once: a checkpoint unpacks it
    saved, captured = read[: _TENSORS + 2], read[_TENSORS + 2 :]
    grads = attention_backward(grad_out, *saved, ctx.number, *ctx.options, list(captured))
    placed = [
        None if x is None else sharding.placed_like(grad, x, sums=name == "sinks")
        for name, grad, x in zip(_INPUTS, grads, saved, strict=False)
    ]
    return (*placed, None, *nothing)


_INPUTS = ("q", "k", "v", "k_shared", "sinks", "documents")
_TENSORS = len(_INPUTS)

differentiable(attention, _autograd, _setup_context)
not_differentiable(attention_backward, "context-parallel attention has no second derivative")

for _op in BODIES:
    lowering.keep_order(_op)


def _axes(options: Sequence[Any]) -> sharding.Axes:
    return sharding.Axes(*Options.of(*options).setting.groups)


sharding.register(attention, _axes, inputs=_INPUTS, outputs=("out", "lse", "number"))
sharding.register(
    attention_backward,
    _axes,
    inputs=("grad_out", *_INPUTS, "out", "lse", "number"),
    outputs=("grad_q", "grad_k", "grad_v", "grad_k_shared", "grad_sinks"),
)
