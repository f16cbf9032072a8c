"""METP's feed-forward, O = f(A B) C: what a ring of weights computes on tokens that stay (METP, algorithms 1 and 2).

It is attention without a softmax. Tokens (A) are the queries and stay; hidden units are the keys: unit j of a gated
feed-forward has a row of W_up and one of W_gate (B's columns) and a row of W_down^T (C's rows), and

    out = sum over j of f(x . gate_j + b) (x . up_j + b) down_j        without a gate: f(x . up_j + b) down_j

So the schedules and the loop of attention serve, with a rank's hidden units as the block that moves. f(A B) is
computed anew in the backward and never sent or kept.

Operands are (1, 1, rows, ...), as attention's are (B, N, L, H).
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from wallfacer_dt.algorithms.arithmetic import Operand, Sums
from wallfacer_dt.algorithms.masks import Mask
from wallfacer_dt.algorithms.segments import Work
from wallfacer_dt.algorithms.steps import Side
from wallfacer_dt.kernels.merge import accumulation_dtype
from wallfacer_dt.layout import Shards, consecutive


class Activation(NamedTuple):
    """An elementwise f: ``forward(t)``, the same in place, and ``backward(grad, t)``, the gradient times f'(t)."""

    forward: Callable[[Tensor], Tensor]
    forward_: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]


_aten = torch.ops.aten
ACTIVATIONS = {
    "gelu": Activation(_aten.gelu, _aten.gelu_, _aten.gelu_backward),
    "gelu_tanh": Activation(
        partial(_aten.gelu, approximate="tanh"),
        partial(_aten.gelu_, approximate="tanh"),
        partial(_aten.gelu_backward, approximate="tanh"),
    ),
    "relu": Activation(_aten.relu, _aten.relu_, lambda grad, t: _aten.threshold_backward(grad, t, 0)),
    "silu": Activation(_aten.silu, _aten.silu_, _aten.silu_backward),
}


@dataclass(frozen=True, slots=True)
class RingOfWeights:
    """Who holds which hidden units, as a schedule asks: tokens are its queries, hidden units its keys."""

    tokens: int  # of this rank; others may have as many as they like: they stay where they are
    units: tuple[int, ...]  # by rank of the ring
    mask: ClassVar[Mask] = Mask()  # all tokens see all units, which every tile has therefore

    def inner_sizes(self, side: Side, axes: tuple[int, int, int]) -> tuple[int, ...]:
        """By rank, how many it holds on a side."""
        return (self.tokens,) * axes[1] if side == "q" else self.units

    def inner(self, side: Side, axes: tuple[int, int, int]) -> Sequence[Shards]:
        """The same as positions, in all rows of a batch."""
        return [consecutive(self.inner_sizes(side, axes))]


class Units(NamedTuple):
    """The weights of some hidden units: rows of (F, D), (F, D) or None, (F, Do), and biases (F,) or None."""

    up: Tensor
    gate: Tensor | None
    down: Tensor
    up_bias: Tensor | None
    gate_bias: Tensor | None

    def operand(self) -> Operand:
        """As a block that moves; what is absent is not sent."""
        return Operand(tuple(x.unsqueeze(0).unsqueeze(0) for x in self if x is not None))

    def like(self, tensors: Sequence[Tensor]) -> "Units":
        """Tensors of an operand, by the names of those that are not absent here."""
        rest = iter(tensors)
        return Units(*(None if x is None else next(rest)[0, 0] for x in self))  # pyrefly: ignore[bad-argument-type]


@dataclass(frozen=True, slots=True)
class FeedForward(Sums):
    """The output of tokens (Algorithm 1)."""

    activation: Activation
    own: Units
    gives_to_keys: ClassVar[bool] = False

    def attend(self, query: Operand, keys: Operand, work: Work, completed: Collection[Side] = ()) -> None:  # noqa: ARG002
        """Add the units to the tokens' output, in place."""
        units = self.own.like(keys.data)
        if not query.partial:
            query.partial = self.nothing(query)
        x, out = query.data[0][0, 0], query.partial[0][0, 0]
        for tile in (tile for segments in work for tile in segments.tiles):
            rows = slice(*tile.q)
            add_product_(out[rows], self._hidden(x[rows], units), units.down)

    def _hidden(self, x: Tensor, units: Units) -> Tensor:
        """Nothing else of the size of the hidden is alive afterwards, nor twice as much meanwhile."""
        up = linear(x, units.up, units.up_bias)
        if units.gate is None:
            return self.activation.forward_(up)
        return self.activation.forward_(linear(x, units.gate, units.gate_bias)).mul_(up)

    def nothing(self, operand: Operand) -> tuple[Tensor, ...]:
        """The output that no unit has added to."""
        x = operand.data[0]
        return (x.new_zeros((*x.shape[:-1], self.own.down.shape[-1]), dtype=accumulation_dtype(x.dtype)),)


@dataclass(frozen=True, slots=True)
class FeedForwardBackward(Sums):
    """The gradients of tokens and of units, both from the hidden recomputed once (Algorithm 2)."""

    activation: Activation
    own: Units
    grad_out: Tensor
    gives_to_keys: ClassVar[bool] = True

    def attend(self, query: Operand, keys: Operand, work: Work, completed: Collection[Side] = ()) -> None:  # noqa: ARG002
        """Add the gradients of tokens and units to both operands' partial results, in place."""
        for operand in (query, keys):
            if not operand.partial:
                operand.partial = self.nothing(operand)
        x, dx = query.data[0][0, 0], query.partial[0][0, 0]
        units, grads = self.own.like(keys.data), self.own.like(keys.partial)
        for tile in (tile for segments in work for tile in segments.tiles):
            rows = slice(*tile.q)
            self._add(x[rows], self.grad_out[rows], dx[rows], units, grads)

    def _add(self, x: Tensor, grad_out: Tensor, dx: Tensor, units: Units, grads: Units) -> None:
        """Add what some units give to some tokens, whose gradient is dx, and these to the units' gradients."""
        up = linear(x, units.up, units.up_bias)
        if units.gate is None or grads.gate is None:
            add_product_(grads.down, self.activation.forward(up).t(), grad_out)
            d_up = self.activation.backward(torch.mm(grad_out, units.down.t()), up)
        else:
            gate = linear(x, units.gate, units.gate_bias)
            active = self.activation.forward(gate)
            add_product_(grads.down, (active * up).t(), grad_out)
            d_hidden = torch.mm(grad_out, units.down.t())
            d_gate = self.activation.backward(d_hidden * up, gate)
            _add_linear_(x, units.gate, d_gate, dx, grads.gate, grads.gate_bias)
            d_up = d_hidden.mul_(active)
        _add_linear_(x, units.up, d_up, dx, grads.up, grads.up_bias)


def _add_linear_(x: Tensor, weight: Tensor, d: Tensor, dx: Tensor, grad: Tensor, bias_grad: Tensor | None) -> None:
    """Add the gradients of x, weight and bias from that of what :func:`linear` made of them."""
    add_product_(dx, d, weight)
    add_product_(grad, d.t(), x)
    if bias_grad is not None:
        bias_grad.add_(d.sum(0, dtype=bias_grad.dtype))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b, of (T, D), (rows, D) and (rows,) or None."""
    product = torch.mm(x, weight.t())
    return product if bias is None else product.add_(bias)


def add_product_(into: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a matrix product to an accumulator, which may be of a wider dtype."""
    if into.dtype == a.dtype:
        into.addmm_(a, b)
    else:
        into.add_(torch.mm(a, b))
