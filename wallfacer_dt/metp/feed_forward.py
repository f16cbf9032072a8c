"""The operators ``wallfacer_dt::feed_forward`` and ``wallfacer_dt::feed_forward_backward``.

Opaque to autograd and torch.compile as attention's are (``ops``), so what is saved is x and this rank's weights, and
no partitioner sees, or keeps, the weights of a hop.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from wallfacer_dt.agreement.agree import agree, tell
from wallfacer_dt.algorithms.arithmetic import Operand
from wallfacer_dt.algorithms.execute import execute
from wallfacer_dt.algorithms.feed_forward import ACTIVATIONS, FeedForward, FeedForwardBackward, RingOfWeights, Units
from wallfacer_dt.algorithms.schedule import make_schedule
from wallfacer_dt.algorithms.steps import Schedule
from wallfacer_dt.algorithms.turns import completed
from wallfacer_dt.autocast import operator_body
from wallfacer_dt.calls import said
from wallfacer_dt.compiler import SOURCES
from wallfacer_dt.mesh import ContextGroups, Coordinate
from wallfacer_dt.transforms import differentiable, no_second_derivative, operator


class FeedForwardOptions(NamedTuple):
    """What both operators take after their tensors, in order.

    Attributes:
        group: name of the process group that weights go round.
        rank: this rank's in that group.
        hidden: units of all ranks together, also of those along ``tp``.
        units: hidden units by rank of the group.
        activation: a name in :data:`ACTIVATIONS`.
        whole: name of the mesh on which ranks compare their calls, ``tp`` and all.
        code: :data:`wallfacer_dt.compiler.SOURCES`, see Note [What a compiled graph bakes in].
        gradients: names of what needs a gradient, or empty; see :func:`wallfacer_dt.metp.modules.needing_gradients`.
    """

    group: str
    rank: int
    hidden: int
    units: tuple[int, ...]
    activation: str
    whole: str
    code: str = SOURCES
    gradients: str = ""


_NAME = "METP's feed-forward"
_TENSORS = "Tensor x, Tensor up, Tensor? gate, Tensor down, Tensor? up_bias, Tensor? gate_bias"
_OPTIONS = "str group, int rank, int hidden, int[] units, str activation, str whole, str code, str gradients"


@operator_body
def feed_forward_body(
    x: Tensor,
    up: Tensor,
    gate: Tensor | None,
    down: Tensor,
    up_bias: Tensor | None,
    gate_bias: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, Tensor]:
    """What ``wallfacer_dt::feed_forward`` does on one rank (METP, Algorithm 1).

    Args:
        x: tokens (T, D), as many as this rank has.
        up: this rank's units (F, D).
        gate: those of the gate (F, D), or None.
        down: (Do, F).
        up_bias: (F,) or None.
        gate_bias: (F,) or None.
        *rest: the fields of :class:`FeedForwardOptions`.

    Returns:
        out (T, Do), without the last projection's bias.

    Raises:
        ValueError: on every rank: ranks disagree in shapes, dtype or options. See Note [Comparing calls] for when.
    """
    options = _options(rest)
    signature = {
        "the model dims of a feed-forward": (up.shape[1], down.shape[0]),
        "whether it has a gate and biases": (gate is not None, up_bias is not None, gate_bias is not None),
        "the dtypes of x and weights": (x.dtype, up.dtype, down.dtype),
        "what needs a gradient": options.gradients or "nothing",
        "the hidden units of a feed-forward": options.hidden,
        "activation": options.activation,
        "code": options.code,
    }
    number = said(agree(_NAME, signature.items(), options.whole, x=x), 0)
    units = Units(up, gate, down.t(), up_bias, gate_bias)
    arithmetic = FeedForward(ACTIVATIONS[options.activation], units)
    schedule = _schedule(options, x, backward=False)
    (out,), _ = completed(execute(schedule, arithmetic, _groups(options), _tokens(x), units.operand()))
    return out[0, 0].to(x.dtype), number


@operator_body
def feed_forward_backward_body(
    grad_out: Tensor,
    x: Tensor,
    up: Tensor,
    gate: Tensor | None,
    down: Tensor,
    up_bias: Tensor | None,
    gate_bias: Tensor | None,
    number: Tensor,
    *rest: Any,
) -> tuple[Tensor, ...]:
    """What ``wallfacer_dt::feed_forward_backward`` does on one rank (METP, Algorithm 2).

    Args:
        grad_out: gradient of the output (T, Do).
        x: as the forward was given it, as is all that follows.
        up: (F, D).
        gate: (F, D) or None.
        down: (Do, F).
        up_bias: (F,) or None.
        gate_bias: (F,) or None.
        number: what the forward gave second: in it is the number of its call.
        *rest: the fields of :class:`FeedForwardOptions`.

    Returns:
        The gradients of x and of this rank's weights, from all ranks' tokens; that of an absent one is empty.
    """
    options = _options(rest)
    agree(f"the backward of {_NAME}", (), options.whole, x=x, forward=number)
    units = Units(up, gate, down.t(), up_bias, gate_bias)
    arithmetic = FeedForwardBackward(ACTIVATIONS[options.activation], units, grad_out.contiguous())
    schedule = _schedule(options, x, backward=True)
    (dx,), dunits = completed(execute(schedule, arithmetic, _groups(options), _tokens(x), units.operand()))
    grads = units.like(dunits)
    grads = grads._replace(down=grads.down.t())
    given = (up, gate, down, up_bias, gate_bias)
    return dx[0, 0].to(x.dtype), *(
        x.new_empty(0) if grad is None or own is None else torch.empty_like(own).copy_(grad)
        for grad, own in zip(grads, given, strict=True)
    )


def _options(rest: tuple[Any, ...]) -> FeedForwardOptions:
    group, rank, hidden, units, *others = rest
    return FeedForwardOptions(group, rank, hidden, tuple(units), *others)


def _groups(options: FeedForwardOptions) -> ContextGroups:
    return ContextGroups(_place(options), ("", options.group, ""))


def _place(options: FeedForwardOptions) -> Coordinate:
    return Coordinate(len(options.units), 1, options.rank, 0)


def _schedule(options: FeedForwardOptions, x: Tensor, *, backward: bool) -> Schedule:
    ring = RingOfWeights(x.shape[0], options.units)
    return make_schedule(_place(options), ring, schedule="2d", resident="q", backward=backward)


def _tokens(x: Tensor) -> Operand:
    return Operand((x.unsqueeze(0).unsqueeze(0),))


def _feed_forward_fake(*args: Any) -> tuple[Tensor, Tensor]:
    x, down = args[0], args[3]
    return x.new_empty((x.shape[0], down.shape[0])), said(0, 0)


def _feed_forward_backward_fake(*args: Any) -> tuple[Tensor, ...]:
    x, *weights = args[1:7]
    return x.new_empty(x.shape), *(x.new_empty(0) if w is None else torch.empty_like(w) for w in weights)


feed_forward = operator(
    "feed_forward", feed_forward_body, f"({_TENSORS}, {_OPTIONS}) -> (Tensor, Tensor)", _feed_forward_fake
)
feed_forward_backward = operator(
    "feed_forward_backward",
    feed_forward_backward_body,
    f"(Tensor grad_out, {_TENSORS}, Tensor number, {_OPTIONS}) -> ({', '.join(['Tensor'] * 6)})",
    _feed_forward_backward_fake,
)

BODIES = {feed_forward: feed_forward_body, feed_forward_backward: feed_forward_backward_body}


def _setup_context(ctx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:6])
    ctx.number = output[1]  # which a checkpoint must not replace
    ctx.mark_non_differentiable(output[1])
    ctx.options = inputs[6:]


def _autograd(ctx, grad_out: Tensor, _: None) -> tuple[Tensor | None, ...]:
    try:
        saved = ctx.saved_tensors  # to be read once: a checkpoint unpacks it
    except Exception as error:  # what one rank has written into meanwhile
        tell(error, _options(ctx.options).whole)
        raise
    grads = feed_forward_backward(grad_out, *saved, ctx.number, *ctx.options)
    given = [None if x is None else grad for x, grad in zip(saved, grads, strict=True)]
    return *given, *[None] * len(ctx.options)


differentiable(feed_forward, _autograd, _setup_context)
differentiable(feed_forward_backward, no_second_derivative(_NAME), lambda *_: None)
