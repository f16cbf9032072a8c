"""The two operators ``wallfacer_dt::attention`` and ``wallfacer_dt::attention_backward``.

Made with ``torch.library``: autograd, torch.compile, checkpointing policies and dispatch modes see one opaque op each
way, which saves q, k, v, out and lse of this rank's size and nothing else. Groups travel by name. DTensors go through
a rule for each (``sharding``), and Inductor lowers each to its body (``lowering``).

Note [What a compiled graph bakes in]
Generated code holds constants of this rank (whom it sends to) and of this package (its schedules), and torch caches
code by the graph's text, on a disk that ranks may share. So both are arguments of the operators, although the bodies
could find them out: the rank's place in the mesh, and a digest of the package's sources.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wallfacer_dt import lowering, sharding
from wallfacer_dt.algorithms import (
    Backward,
    Forward,
    Groups,
    Operand,
    Schedule,
    execute,
    make_schedule,
)
from wallfacer_dt.kernels import accumulation_dtype, select_kernel
from wallfacer_dt.mesh import Coordinate


class Options(NamedTuple):
    """What both operators take after their tensors, in order.

    Attributes:
        place: this rank's ring size, team size, ring rank and team rank.
        ring: name of the ring's process group.
        team: name of the team's process group, or empty.
        context: name of both axes' process group, or empty where the schedule does not use it.
        context_ranks: for every sequence index its rank in ``context``.
        is_causal: mask keys that come later than the query.
        scale: of the scores.
        order: token order.
        schedule: ``"2d"`` or ``"published"``.
        rotate: ``"kv"`` or ``"q"``, which side moves round the ring in the backward.
        kernel: of the blocks.
        code: :data:`CODE`.
    """

    place: Sequence[int]
    ring: str
    team: str
    context: str
    context_ranks: Sequence[int]
    is_causal: bool
    scale: float
    order: str
    schedule: str
    rotate: str
    kernel: str
    code: str

    @property
    def groups(self) -> Groups:
        """Where the schedule runs."""
        return Groups(Coordinate(*self.place), self.ring, self.team, self.context, tuple(self.context_ranks))

    def make_schedule(self, shard_length: int, *, backward: bool) -> Schedule:
        """This rank's schedule."""
        return make_schedule(
            Coordinate(*self.place),
            shard_length,
            order=self.order,
            is_causal=self.is_causal,
            published=self.schedule == "published",
            stationary="kv" if backward and self.rotate == "q" else "q",
            backward=backward,
        )


_COMPARED = ("is_causal", "scale", "order", "schedule", "rotate", "kernel", "code")
_SCHEMA = (
    "int[] place, str ring, str team, str context, int[] context_ranks, bool is_causal, float scale, str order, "
    "str schedule, str rotate, str kernel, str code"
)


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


def attention_body(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """What ``wallfacer_dt::attention`` does on one rank.

    Args:
        q: queries (B, N, L, H).
        k: keys (B, Nkv, L, H).
        v: values (B, Nkv, L, H).
        *rest: the fields of :class:`Options`.

    Returns:
        out (B, N, L, H) in q's dtype and memory layout, lse (B, N, L) in the accumulation dtype, contiguous.

    Raises:
        ValueError: on every rank, before any tensor is sent: ranks disagree in shapes, dtype or options.
    """
    options = Options(*rest)
    signature = {
        "the shape of q": tuple(q.shape),
        "the shape of k": tuple(k.shape),
        "the dtype of q": q.dtype,
        **{name: getattr(options, name) for name in _COMPARED},
    }
    values = [str(value) for value in signature.values()]
    torch.ops.wallfacer_dt.agree(q, list(signature), values, options.team, options.ring)
    arithmetic = Forward(select_kernel(options.kernel, q.device.type, q.dtype, q.shape[-1]), options.scale)
    plan = options.make_schedule(q.shape[2], backward=False)
    (out, lse), _ = execute(plan, arithmetic, options.groups, Operand((q,)), Operand((k, v)))
    return _laid_out(out, q), lse.contiguous()


def attention_backward_body(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """What ``wallfacer_dt::attention_backward`` does on one rank.

    Args:
        grad_out: gradient of the output (B, N, L, H).
        q: queries (B, N, L, H).
        k: keys (B, Nkv, L, H).
        v: values (B, Nkv, L, H).
        out: the forward's output.
        lse: the forward's log-sum-exp.
        *rest: the fields of :class:`Options`.

    Returns:
        dq, dk, dv, each in its input's dtype and memory layout.
    """
    options = Options(*rest)
    plan = options.make_schedule(q.shape[2], backward=True)
    arithmetic = Backward(select_kernel(options.kernel, q.device.type, q.dtype, q.shape[-1]), options.scale)
    grad_out = grad_out.contiguous()
    delta = (grad_out.to(lse.dtype) * out).sum(-1)
    # One's own output is here: only queries that arrive from elsewhere need a stand-in.
    queries, keys = Operand((q, grad_out, lse, delta), out=out), Operand((k, v))
    if plan.stationary == "q":
        (dq,), (dk, dv) = execute(plan, arithmetic, options.groups, queries, keys)
    else:
        (dk, dv), (dq,) = execute(plan, arithmetic, options.groups, keys, queries)
    return _laid_out(dq, q), _laid_out(dk, k), _laid_out(dv, v)


def _laid_out(result: Tensor, like: Tensor) -> Tensor:
    """The result as its input is laid out, so that a model in (B, L, N, H) pays for no transposition."""
    laid_out = torch.empty_like(like)
    if result.dtype == like.dtype and result.stride() == laid_out.stride():
        return result
    return laid_out.copy_(result)


attention = torch.library.custom_op(
    "wallfacer_dt::attention",
    attention_body,
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {_SCHEMA}) -> (Tensor, Tensor)",
)
attention_backward = torch.library.custom_op(
    "wallfacer_dt::attention_backward",
    attention_backward_body,
    mutates_args=(),
    schema=(
        f"(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_SCHEMA}) "
        "-> (Tensor, Tensor, Tensor)"
    ),
)

BODIES = {
    torch.ops.wallfacer_dt.attention.default: attention_body,
    torch.ops.wallfacer_dt.attention_backward.default: attention_backward_body,
}


@attention.register_fake
def _attention_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    if lowering.is_compiling():
        # Inductor, perhaps; until here there was no reason to import it.
        lowering.register_opaque(torch.ops.wallfacer_dt.agree.default)
        for op, body in BODIES.items():
            lowering.register(op, body)
    lse = q.new_empty(q.shape[:-1], dtype=accumulation_dtype(q.dtype))
    return torch.empty_like(q), lse


@attention_backward.register_fake
def _attention_backward_fake(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x) for x in (q, k, v))


def _setup_context(ctx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _autograd(ctx, grad_out: Tensor | None, grad_lse: None) -> tuple[Tensor | None, ...]:
    nothing = (None,) * len(ctx.options)
    if grad_out is None:
        return (None, None, None, *nothing)
    saved = ctx.saved_tensors  # to be read once: a checkpoint unpacks it
    grads = torch.ops.wallfacer_dt.attention_backward(grad_out, *saved, *ctx.options)
    return (*map(sharding.placed_like, grads, saved), *nothing)


attention.register_autograd(_autograd, setup_context=_setup_context)

sharding.register(torch.ops.wallfacer_dt.attention.default, inputs="qkv", outputs=2)
sharding.register(torch.ops.wallfacer_dt.attention_backward.default, inputs="gqkvol", outputs=3)
