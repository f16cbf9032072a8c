"""The two operators ``wallfacer_dt::attention`` and ``wallfacer_dt::attention_backward``.

Made with ``torch.library``: autograd, torch.compile, checkpointing policies and dispatch modes see one opaque op each
way, which saves q, k, v, out and lse of this rank's size and nothing else. Groups travel by name.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from wallfacer_dt.algorithms import (
    Backward,
    Forward,
    Groups,
    Operand,
    Schedule,
    execute,
    make_schedule,
)
from wallfacer_dt.collectives import agree, group_rank, group_size
from wallfacer_dt.kernels import accumulation_dtype, select_kernel
from wallfacer_dt.mesh import Coordinate


def attention_body(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ring: str,
    team: str,
    context: str,
    context_ranks: Sequence[int],
    is_causal: bool,
    scale: float,
    order: str,
    schedule: str,
    rotate: str,
    kernel: str,
) -> tuple[Tensor, Tensor]:
    """What ``wallfacer_dt::attention`` does on one rank.

    Args:
        q: queries (B, N, L, H).
        k: keys (B, Nkv, L, H).
        v: values (B, Nkv, L, H).
        ring: name of the ring's process group.
        team: name of the team's process group, or empty.
        context: name of both axes' process group, or empty where the schedule does not use it.
        context_ranks: for every sequence index its rank in ``context``.
        is_causal: mask keys that come later than the query.
        scale: of the scores.
        order: token order.
        schedule: ``"2d"`` or ``"published"``.
        rotate: ``"kv"`` or ``"q"``, for the backward.
        kernel: of the blocks.

    Returns:
        out (B, N, L, H) in q's dtype and memory layout, lse (B, N, L) in the accumulation dtype, contiguous.

    Raises:
        ValueError: on every rank, before any tensor is sent: ranks disagree in shapes, dtype or options.
    """
    signature = (
        ("the shape of q", tuple(q.shape)),
        ("the shape of k", tuple(k.shape)),
        ("the dtype of q", q.dtype),
        ("is_causal", is_causal),
        ("scale", scale),
        ("order", order),
        ("schedule", schedule),
        ("rotate", rotate),
    )
    agree(signature, team, ring, every_call=q.device.type == "cpu")
    groups = _groups(ring, team, context, context_ranks)
    plan = _schedule(groups.place, q, order, is_causal, schedule, "kv", backward=False)
    arithmetic = Forward(select_kernel(kernel, q.device.type, q.dtype, q.shape[-1]), scale)
    (out, lse), _ = execute(plan, arithmetic, groups, Operand((q,)), Operand((k, v)))
    return _laid_out(out, q), lse.contiguous()


def attention_backward_body(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    ring: str,
    team: str,
    context: str,
    context_ranks: Sequence[int],
    is_causal: bool,
    scale: float,
    order: str,
    schedule: str,
    rotate: str,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """What ``wallfacer_dt::attention_backward`` does on one rank.

    Args:
        grad_out: gradient of the output (B, N, L, H).
        q: queries (B, N, L, H).
        k: keys (B, Nkv, L, H).
        v: values (B, Nkv, L, H).
        out: the forward's output.
        lse: the forward's log-sum-exp.
        ring: name of the ring's process group.
        team: name of the team's process group, or empty.
        context: name of both axes' process group, or empty.
        context_ranks: for every sequence index its rank in ``context``.
        is_causal: mask keys that come later than the query.
        scale: of the scores.
        order: token order.
        schedule: ``"2d"`` or ``"published"``.
        rotate: which side moves round the ring.
        kernel: of the blocks.

    Returns:
        dq, dk, dv, each in its input's dtype and memory layout.
    """
    groups = _groups(ring, team, context, context_ranks)
    plan = _schedule(groups.place, q, order, is_causal, schedule, rotate, backward=True)
    arithmetic = Backward(select_kernel(kernel, q.device.type, q.dtype, q.shape[-1]), scale)
    grad_out = grad_out.contiguous()
    delta = (grad_out.to(lse.dtype) * out).sum(-1)
    # One's own output is here: only queries that arrive from elsewhere need a stand-in.
    queries, keys = Operand((q, grad_out, lse, delta), out=out), Operand((k, v))
    if plan.stationary == "q":
        (dq,), (dk, dv) = execute(plan, arithmetic, groups, queries, keys)
    else:
        (dk, dv), (dq,) = execute(plan, arithmetic, groups, keys, queries)
    return _laid_out(dq, q), _laid_out(dk, k), _laid_out(dv, v)


attention = torch.library.custom_op("wallfacer_dt::attention", mutates_args=())(attention_body)
attention_backward = torch.library.custom_op("wallfacer_dt::attention_backward", mutates_args=())(
    attention_backward_body
)


@attention.register_fake
def _attention_fake(q: Tensor, k: Tensor, v: Tensor, *options: object) -> tuple[Tensor, Tensor]:
    lse = q.new_empty(q.shape[:-1], dtype=accumulation_dtype(q.dtype))
    return torch.empty_like(q), lse


@attention_backward.register_fake
def _attention_backward_fake(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: object) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x) for x in (q, k, v))


def _setup_context(ctx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _autograd(ctx, grad_out: Tensor | None, grad_lse: None) -> tuple[Tensor | None, ...]:
    if grad_out is None:
        return (None,) * (3 + len(ctx.options))
    grads = torch.ops.wallfacer_dt.attention_backward(grad_out, *ctx.saved_tensors, *ctx.options)
    return (*grads, *(None for _ in ctx.options))


attention.register_autograd(_autograd, setup_context=_setup_context)

BODIES = {
    torch.ops.wallfacer_dt.attention.default: attention_body,
    torch.ops.wallfacer_dt.attention_backward.default: attention_backward_body,
}


def _laid_out(result: Tensor, like: Tensor) -> Tensor:
    """The result as its input is laid out, so that a model in (B, L, N, H) pays for no transposition."""
    laid_out = torch.empty_like(like)
    if result.dtype == like.dtype and result.stride() == laid_out.stride():
        return result
    return laid_out.copy_(result)


def _groups(ring: str, team: str, context: str, context_ranks: Sequence[int]) -> Groups:
    place = Coordinate(
        group_size(ring),
        group_size(team) if team else 1,
        group_rank(ring),
        group_rank(team) if team else 0,
    )
    return Groups(place, ring, team, context, tuple(context_ranks))


def _schedule(
    place: Coordinate,
    q: Tensor,
    order: str,
    is_causal: bool,
    schedule: str,
    rotate: str,
    *,
    backward: bool,
) -> Schedule:
    return make_schedule(
        place,
        q.shape[2],
        order=order,
        is_causal=is_causal,
        published=schedule == "published",
        stationary="q" if rotate == "kv" else "kv",
        backward=backward,
    )
