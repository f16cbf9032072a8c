"""The operators ``wallfacer_dt::metp_attention`` and ``wallfacer_dt::metp_attention_backward``.

Projections, rotary positions, attention and the output projection, in groups of heads (METP, algorithms 5 and 6): the
next group's weights are on their way while one is computed, the previous group's gradients on theirs. Saved are x, the
attention's output and its lse; q, k and v are computed anew. The inner loop is this package's attention on a group's
heads, whatever its mesh, schedule, mask and order.
"""

from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wallfacer_dt.agreement.agree import tell
from wallfacer_dt.algorithms.feed_forward import add_product_, linear
from wallfacer_dt.algorithms.head_groups import HeadGroup, head_groups
from wallfacer_dt.algorithms.heads import Heads
from wallfacer_dt.autocast import operator_body
from wallfacer_dt.calls import Call, agreed_call, make_call, said
from wallfacer_dt.compiler import as_text, from_text
from wallfacer_dt.inputs import AttentionInputs
from wallfacer_dt.kernels.merge import accumulation_dtype
from wallfacer_dt.metp.projections import Projections, Reduction, Weights
from wallfacer_dt.metp.rotation import turned
from wallfacer_dt.options import SCHEMA, Options
from wallfacer_dt.transforms import differentiable, no_second_derivative, operator


class BlockOptions(NamedTuple):
    """What both operators are told beside attention's :class:`Options`, as text: see Note [Options as text].

    Attributes:
        heads: query heads.
        kv_heads: key and value heads.
        head_dim: H.
        pairs: which elements rotary positions turn together, or empty where there are none.
        axes: sizes of the axes of the mesh that weights are sharded over.
        ranks: for every index along them its rank in the group.
        index: this rank's.
        group: name of their common process group.
        whole: name of the mesh on which ranks compare their calls, ``tp`` and all.
        gradients: names of what needs a gradient, or empty; see :func:`wallfacer_dt.metp.modules.needing_gradients`.
    """

    heads: int
    kv_heads: int
    head_dim: int
    pairs: str
    axes: Sequence[int]
    ranks: Sequence[int]
    index: int
    group: str
    whole: str
    gradients: str = ""

    def told(self) -> str:
        """As operators take them after their tensors."""
        return as_text(self)

    @classmethod
    def of(cls, text: str) -> "BlockOptions":
        """What :meth:`told` gave."""
        return cls(*from_text(text))

    def groups(self, *, fused: bool) -> tuple[HeadGroup, ...]:
        """The turns of the outer loop."""
        return head_groups(self.heads, self.kv_heads, self.head_dim, tuple(self.axes), fused=fused)


_TENSORS = (
    "Tensor x, Tensor q, Tensor? k, Tensor? v, Tensor out, Tensor? q_bias, Tensor? k_bias, Tensor? v_bias, "
    "Tensor? cos, Tensor? sin, Tensor? document_ids, Tensor? cu_seqlens"
)
_COUNT = 12
_RESULTS = 3  # that the backward takes
_NAME = "METP's attention"


class _Block(NamedTuple):
    """One call on one rank."""

    x: Tensor
    projections: Projections
    angles: tuple[Tensor, Tensor] | None
    block: BlockOptions
    calls: list[tuple[HeadGroup, Call]]
    number: Tensor

    @classmethod
    def of(cls, tensors: Sequence[Tensor | None], rest: Sequence[Any], number: Tensor | None) -> "_Block":
        """From an operator's arguments, of the backward with the forward's number; compared with the other ranks'."""
        x, q, k, v, out, *biases, cos, sin, document_ids, cu_seqlens = tensors
        assert x is not None
        assert q is not None
        assert out is not None
        block, attention = BlockOptions.of(rest[0]), Options.of(*rest[1:])
        projections = Projections(Weights(q, k, v, out.t(), *biases), block.group, tuple(block.ranks), block.index)
        groups = block.groups(fused=projections.is_fused)
        documents = {"document_ids": document_ids, "cu_seqlens": cu_seqlens}
        given = [shaped(x, block, group.heads)._replace(**documents) for group in groups]
        further = None if number is not None else _signature(x, projections.own, block, attention.setting.lengths)
        first, called = agreed_call(_NAME, attention, given[0], number, mesh=block.whole, further=further)
        if number is None:
            number = said(called, first.contents)
        calls = zip(groups, [first, *(make_call(attention, inputs) for inputs in given[1:])], strict=True)
        return cls(x, projections, None if cos is None or sin is None else (cos, sin), block, list(calls), number)

    def turns(self) -> Iterator["_Turn"]:
        """The outer loop: every group with its weights, the next one's being on their way.

        Whoever goes through it lets go of a turn before the next one, or as many weights more stay alive.
        """
        coming = self.projections.send(self.calls[0][0])
        for number, (group, call) in enumerate(self.calls):
            weights = coming.wait()
            if number + 1 < len(self.calls):
                coming = self.projections.send(self.calls[number + 1][0])
            yield _Turn(self, group, call, weights)

    def turned(self, x: Tensor, *, back: bool = False) -> Tensor:
        """Rotary positions, where there are any."""
        return x if self.angles is None else turned(x, *self.angles, self.block.pairs, back=back)

    @property
    def tokens(self) -> Tensor:
        """x (B L, D)."""
        return self.x.flatten(0, 1)

    def by_heads(self, x: Tensor) -> Tensor:
        """(B L, heads H) as (B, heads, L, H)."""
        return x.unflatten(0, self.x.shape[:2]).unflatten(-1, (-1, self.block.head_dim)).transpose(1, 2)


class _Turn(NamedTuple):
    """One group of heads of a call."""

    block: _Block
    group: HeadGroup
    call: Call
    weights: Weights

    def forward(self, y: Tensor, attended: Tensor, sums: Tensor) -> None:
        """Add to y (B L, Do), and fill in this group's heads of the others."""
        out, sums[:, self._heads] = self.call.forward(*self._projected())
        attended[:, self._heads] = out
        add_product_(y, _by_tokens(out), self.weights.out)

    def backward(self, dy: Tensor, attended: Tensor, sums: Tensor, dx: Tensor) -> Weights:
        """Add to the gradient of x (B L, D); the gradients of this group's weights."""
        block, weights = self.block, self.weights
        out, lse = attended[:, self._heads], sums[:, self._heads].contiguous()
        d_out = torch.mm(_by_tokens(out).t(), dy)
        grad_out = block.by_heads(torch.mm(dy, weights.out.t()))
        (dq, dk, dv), _ = self.call.backward(grad_out, out, lse, *self._projected())
        by_tokens = [_by_tokens(d) for d in (block.turned(dq, back=True), block.turned(dk, back=True), dv)]
        for d, weight in zip(by_tokens, weights.inward, strict=True):
            add_product_(dx, d, weight)
        d_q, d_k, d_v = (torch.mm(d.t(), block.tokens) for d in by_tokens)
        biases = (None if b is None else d.sum(0) for d, b in zip(by_tokens, weights[4:], strict=True))
        return Weights(d_q, d_k, d_v, d_out, *biases)

    @property
    def _heads(self) -> slice:
        return slice(*self.group.heads.q)

    def _projected(self) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """q and (k, v), (B, heads, L, H)."""
        block = self.block
        with_biases = zip(self.weights.inward, self.weights[4:], strict=True)
        q, k, v = (block.by_heads(linear(block.tokens, weight, bias)) for weight, bias in with_biases)
        return block.turned(q), (block.turned(k), v)


@operator_body
def metp_attention_body(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What ``wallfacer_dt::metp_attention`` does on one rank (METP, Algorithm 5).

    Args:
        *args: x (B, L, D); this rank's rows of the projections q, k and v (rows, D), or of one fused, k and v None;
            the output's columns (Do, columns); biases (rows,) or None; cos and sin (1 or B, L, H / 2) or None;
            document_ids and cu_seqlens, as attention's operator takes them; what :class:`BlockOptions` and
            :class:`Options` have told.

    Returns:
        y (B, L, Do) without the output projection's bias, attention's output (B, N, L, H) and lse (B, N, L), and the
        call's number on its mesh, and its contents (2,), int64, on the CPU.

    Raises:
        ValueError: on every rank: ranks disagree in shapes, dtype or options. See Note [Comparing calls] for when.
    """
    block = _Block.of(args[:_COUNT], args[_COUNT:], None)
    x, options = block.x, block.block
    wide = accumulation_dtype(x.dtype)
    y = x.new_zeros((x.shape[0] * x.shape[1], args[4].shape[0]), dtype=wide)
    attended = x.new_empty((x.shape[0], options.heads, x.shape[1], options.head_dim))
    sums = x.new_empty(attended.shape[:-1], dtype=wide)
    for turn in block.turns():
        turn.forward(y, attended, sums)
        del turn
    return y.to(x.dtype).unflatten(0, x.shape[:2]), attended, sums, block.number


@operator_body
def metp_attention_backward_body(grad_y: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """What ``wallfacer_dt::metp_attention_backward`` does on one rank (METP, Algorithm 6).

    Args:
        grad_y: gradient of y (B, L, Do).
        *args: the forward's tensors, its other three results, and its options.

    Returns:
        The gradients of x and of this rank's weights and biases, from all ranks' tokens; an absent one's is empty.
    """
    attended, sums, number = args[_COUNT : _COUNT + _RESULTS]
    block = _Block.of(args[:_COUNT], args[_COUNT + _RESULTS :], number)
    x, dy = block.x, grad_y.flatten(0, 1).contiguous()
    dx = torch.zeros_like(block.tokens, dtype=accumulation_dtype(x.dtype))
    reduction = Reduction.of(block.projections)
    for turn in block.turns():
        reduction.add(turn.group, turn.backward(dy, attended, sums, dx))
        del turn
    grads = reduction.finish()
    grads = grads._replace(out=grads.out.t())
    given = args[1:8]
    return dx.to(x.dtype).view(x.shape), *(
        x.new_empty(0) if grad is None or own is None else torch.empty_like(own).copy_(grad)
        for grad, own in zip(grads, given, strict=True)
    )


def shaped(x: Tensor | None, block: BlockOptions, heads: Heads | None = None) -> AttentionInputs:
    """What has the shapes of q, k and v of x (B, L, D), all heads or some, and no memory."""
    assert x is not None
    counts = (block.heads, block.kv_heads) if heads is None else heads.counts
    q, k = (x.new_empty(1).expand(x.shape[0], n, x.shape[1], block.head_dim) for n in counts)
    return AttentionInputs(q, k, k)


def _by_tokens(x: Tensor) -> Tensor:
    """(B, heads, L, H) as (B L, heads H)."""
    return x.transpose(1, 2).flatten(2).flatten(0, 1)


def _signature(x: Tensor, own: Weights, block: BlockOptions, lengths: Sequence[int]) -> dict[str, Hashable]:
    return {
        "the batch and tokens of attention": (x.shape[0], "L" if lengths else x.shape[1]),
        "the model dims of attention": (x.shape[-1], own.q.shape[1], own.out.shape[1]),
        "which projections and biases there are": tuple(part is not None for part in own),
        "the dtypes of x and weights": (x.dtype, *(part.dtype for part in own if part is not None)),
        "heads, kv_heads and head_dim": (block.heads, block.kv_heads, block.head_dim),
        "pairs of rotary positions": block.pairs or "none",
        "what needs a gradient": block.gradients or "nothing",
        "axes of the weights' mesh": tuple(block.axes),
    }


def _metp_attention_fake(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, out = args[0], args[4]
    block = BlockOptions.of(args[_COUNT])
    attended = x.new_empty((x.shape[0], block.heads, x.shape[1], block.head_dim))
    lse = x.new_empty(attended.shape[:-1], dtype=accumulation_dtype(x.dtype))
    return x.new_empty((*x.shape[:-1], out.shape[0])), attended, lse, said(0, 0)


def _metp_attention_backward_fake(*args: Any) -> tuple[Tensor, ...]:
    x, *weights = args[1:9]
    return x.new_empty(x.shape), *(x.new_empty(0) if w is None else torch.empty_like(w) for w in weights)


metp_attention = operator(
    "metp_attention",
    metp_attention_body,
    f"({_TENSORS}, str block, {SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor)",
    _metp_attention_fake,
)
metp_attention_backward = operator(
    "metp_attention_backward",
    metp_attention_backward_body,
    f"(Tensor grad_y, {_TENSORS}, Tensor attended, Tensor lse, Tensor number, str block, {SCHEMA}) "
    f"-> ({', '.join(['Tensor'] * 8)})",
    _metp_attention_backward_fake,
)

BODIES = {metp_attention: metp_attention_body, metp_attention_backward: metp_attention_backward_body}


def _setup_context(ctx, inputs: tuple, output: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:_COUNT], *output[1:3])
    ctx.number = output[3]  # which a checkpoint must not replace
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.options = inputs[_COUNT:]


def _autograd(ctx, grad_y: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    rest = (None,) * (_COUNT - 8 + len(ctx.options))
    if grad_y is None:
        return (*[None] * 8, *rest)
    try:
        saved = ctx.saved_tensors  # to be read once: a checkpoint unpacks it
    except Exception as error:  # what one rank has written into meanwhile
        tell(error, BlockOptions.of(ctx.options[0]).whole)
        raise
    grads = metp_attention_backward(grad_y, *saved, ctx.number, *ctx.options)
    return (*(None if x is None else grad for x, grad in zip(saved, grads, strict=False)), *rest)


differentiable(metp_attention, _autograd, _setup_context)
differentiable(metp_attention_backward, no_second_derivative("METP's attention"), lambda *_: None)
