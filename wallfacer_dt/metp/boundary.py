"""What goes into a module under METP and comes out: this rank's tokens, as a plain tensor or as a DTensor.

Inside are plain tensors. On the axes of the sequence tokens must be sharded. On ``tp`` every rank needs all tokens of
its context rank, and what comes out is a sum still to be made (METP, section 6.2; torch's own styles do the same).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from wallfacer_dt import lowering
from wallfacer_dt.agreement.agree import agree, refusing_together
from wallfacer_dt.autocast import as_computed, computed_dtype
from wallfacer_dt.compiler import is_exporting, opaque, sizes
from wallfacer_dt.layout import shard_sizes
from wallfacer_dt.mesh import axis_ranks
from wallfacer_dt.metp.holding import TENSOR_AXIS, Shards, WeightMesh
from wallfacer_dt.transforms import has_tangent, is_transforming
from wallfacer_dt.validation import refuse_in_graph


@dataclass(frozen=True, slots=True)
class Boundary:
    """How tokens enter and leave.

    Attributes:
        weights: the mesh of the weights.
        input_layout: of a plain tensor that enters, on axis ``tp``.
        output_layout: of what leaves, on axis ``tp``.
        shards: what the parameters are that they meet.
    """

    weights: WeightMesh
    input_layout: Placement
    output_layout: Placement
    shards: Shards

    def enter(self, x: Tensor) -> tuple[Tensor, Callable[[Tensor, Tensor], Tensor]]:
        """This rank's tokens as a plain tensor, and what makes of the result what leaves.

        Args:
            x: (..., D): a plain tensor of this rank's tokens, or a DTensor.

        Returns:
            The tensor, and a function, which takes the number of the call, too.
        """
        (x,) = as_computed(x)
        tp = self.weights.tp_mesh
        if tp is not None:
            x = self._compared(x)
        if isinstance(x, DTensor):
            return self._enter_distributed(x)
        if tp is None:
            return x, lambda y, _: y
        whole = DTensor.from_local(x, tp, [self.input_layout], run_check=False)
        inside = whole.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])

        def leave(y: Tensor, number: Tensor) -> Tensor:
            summed = DTensor.from_local(y, tp, [Partial()], run_check=False)
            gathered = summed.redistribute(placements=[self.output_layout]).to_local()
            return _met(gathered, number, _LEFT, self.weights.name)

        return inside, leave

    def _compared(self, x: Tensor) -> Tensor:
        """x, once all ranks have come with one that is alike along tp, over which it may be gathered."""
        told = (
            str((x.dtype, x.placements) if isinstance(x, DTensor) else x.dtype),
            self.weights.name,
            self.weights.tp_name,
        )
        if not torch.compiler.is_compiling():
            _compare_along_tp(x, x.shape, *told)
            return x
        if not isinstance(x, DTensor):
            return torch.ops.wallfacer_dt.metp_entered(x, x.shape, *told)
        local = torch.ops.wallfacer_dt.metp_entered(x.to_local(), x.shape, *told)
        return DTensor.from_local(local, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride())

    def _enter_distributed(self, x: DTensor) -> tuple[Tensor, Callable[[Tensor, Tensor], Tensor]]:
        mesh, placements = x.device_mesh, x.placements
        names = mesh.mesh_dim_names or ()
        on_tp = [axis == TENSOR_AXIS and self.weights.tp_mesh is not None for axis in names]
        inside = tuple(Replicate() if tp else p for tp, p in zip(on_tp, placements, strict=True))
        sums = tuple(Partial() if tp else p for tp, p in zip(on_tp, inside, strict=True))
        outside = tuple(self.output_layout if tp else p for tp, p in zip(on_tp, inside, strict=True))
        local = x.redistribute(placements=inside).to_local(grad_placements=sums)

        def leave(y: Tensor, number: Tensor) -> Tensor:
            shape = torch.Size((*x.shape[:-1], y.shape[-1]))
            strides = torch.empty(shape, device="meta").stride()
            summed = DTensor.from_local(y, mesh, sums, run_check=False, shape=shape, stride=strides)
            result = summed.redistribute(placements=outside)
            if self.weights.tp_mesh is None:
                return result
            if not torch.compiler.is_compiling():
                return _met(result, number, _LEFT, self.weights.name)
            met = _met(result.to_local(), number, _LEFT, self.weights.name)
            return DTensor.from_local(met, mesh, outside, run_check=False, shape=shape, stride=strides)

        return local, leave

    def refusal(self, x: Any, out_dim: int, check: Callable[[], None]) -> Tensor | None:
        """Refuse on every rank what ``check`` refuses on one; see Note [Refusing together].

        Args:
            x: what is to enter.
            out_dim: of what would leave.
            check: raises TypeError, ValueError or NotImplementedError.

        Returns:
            None; while a compiler traces, instead of raising, what refuses when it runs.
        """
        if is_exporting():
            raise NotImplementedError(
                "METP cannot be exported: its weights are DTensors, its process groups those of this world; save the "
                "module's state_dict()"
            )
        if not torch.compiler.is_compiling():
            with refusing_together(self.weights.name):
                check()
                if self.shards.nested:
                    self.weights.check_gathered(self.shards.nested)
            return None
        try:
            check()
        except (TypeError, ValueError, NotImplementedError) as error:
            if not isinstance(x, Tensor):  # of which no graph can be made
                raise
            return refuse_in_graph(x, out_dim, str(error), self.weights.name)
        return None

    def check(self, x: Any, weight: Tensor, parts: Mapping[str, Tensor], *, sequence: bool = False) -> None:
        """Refuse (TypeError, ValueError, NotImplementedError) what cannot enter.

        Args:
            x: what is to enter.
            weight: that it is to be multiplied by (rows, D).
            parts: all weights and biases, by name.
            sequence: tokens are positions of a sequence, dim 1, which no axis may shard but those of the mesh.
        """
        device_type = self.weights.mesh.device_type
        if not isinstance(x, Tensor):
            raise TypeError(f"x must be a tensor, got {type(x).__name__}")
        if not torch.compiler.is_compiling():
            if is_transforming():
                raise NotImplementedError(
                    "METP is not implemented under transforms of torch.func, which do not know its weights, DTensors: "
                    "differentiate with torch.autograd.grad"
                )
            if has_tangent(x):
                raise NotImplementedError("METP has no forward-mode derivative, but x has a tangent")
        if x.ndim < 2 or x.shape[-1] != weight.shape[1]:
            raise ValueError(f"x must have shape (..., tokens, {weight.shape[1]}), got {sizes(x)}")
        if x.device.type != device_type:
            raise ValueError(f"x must be on the mesh's device type {device_type!r}, got {x.device}")
        if self.weights.tp_mesh is not None:
            self._check_layouts(x)
        self.weights.check_shards(self.shards, parts)
        for name, part in parts.items():
            if part.device.type != device_type:
                raise ValueError(
                    f"{name} must be on the mesh's device type {device_type!r}, got {part.device}: load or move the "
                    "module's weights"
                )
            if computed_dtype(part.dtype, device_type) != computed_dtype(x.dtype, device_type):
                raise TypeError(f"x and the weights must have one dtype, got {x.dtype} and {part.dtype} of {name}")
        if isinstance(x, DTensor):
            self._check_placements(x, sequence)

    def _check_layouts(self, x: Tensor) -> None:
        """A plain x is whole in its last dim, which is multiplied; and there are no other dims than its."""
        layouts = [("output_layouts", self.output_layout, x.ndim)]
        if not isinstance(x, DTensor):
            layouts.append(("input_layouts", self.input_layout, x.ndim - 1))
        for name, layout, dims in layouts:
            if isinstance(layout, Shard) and not 0 <= layout.dim + x.ndim * (layout.dim < 0) < dims:
                raise ValueError(
                    f"{name} must be Replicate() or a Shard of one of x's first {dims} dims, got {layout!r} for x of "
                    f"shape {sizes(x)}"
                )

    def _check_placements(self, x: DTensor, sequence: bool) -> None:
        mesh, names = self.weights.mesh, x.device_mesh.mesh_dim_names or ()
        wanted = mesh.mesh_dim_names or ()
        if not wanted:
            raise ValueError(
                f"x is a DTensor, but METP's mesh {mesh} has no names of axes to look for in x's: name them"
            )
        # By ranks: see ``sharding``.
        there, here = (
            dict(zip(one.mesh_dim_names or (), axis_ranks(one), strict=False)) for one in (x.device_mesh, mesh)
        )
        if any(there.get(axis) != here[axis] for axis in wanted):
            raise ValueError(f"x is a DTensor on {x.device_mesh}, which does not hold the axes of METP's mesh {mesh}")
        context = [axis for axis in wanted if axis != TENSOR_AXIS]
        if sequence and [axis for axis in names if axis in context] != context:
            raise ValueError(
                f"x must be on a mesh that has the axes {context} in this order, of its shards, got {names}"
            )
        for axis, placement in zip(names, x.placements, strict=True):
            if not isinstance(placement, Replicate) and type(placement) is not Shard:
                raise ValueError(f"x must be sharded or replicated on axis {axis!r}, got {placement!r}")
            if isinstance(placement, Shard) and placement.dim % x.ndim == x.ndim - 1:
                raise ValueError(f"x must not be sharded by its last dim, got {placement!r} on axis {axis!r}")
            if axis in context and isinstance(placement, Replicate):
                raise ValueError(
                    f"x must have its tokens sharded on axis {axis!r}, over which METP shards weights, got "
                    f"{placement!r}: its ranks would all compute the same"
                )
            is_own_tp = axis == TENSOR_AXIS and axis in wanted
            if sequence and not is_own_tp and (axis in context) != (placement == Shard(1)):
                raise ValueError(
                    f"x must have its sequence sharded, Shard(1), on the axes {self.weights.mesh.mesh_dim_names} of "
                    f"METP's mesh and on no other, got {placement!r} on axis {axis!r}"
                )

    def with_bias(self, y: Tensor, bias: Tensor | None, number: Tensor) -> Tensor:
        """What is inside, with a bias that is sharded over the mesh; of ranks whose results are summed, one adds it.

        Its gradient is summed outside of the operators, and may be the first that a backward sends, or all of it.
        """
        if bias is None:
            return y
        whole = _met(self.weights.whole(bias), number, "the backward of METP's bias", self.weights.name).to(y.dtype)
        if self.weights.tp > 1:
            # Not left out: all ranks' backward takes part in that of making it whole. And by all of them alike: a
            # checkpoint computes anew where a backward first asks for what was saved, and other ranks would be there
            # at another time.
            leave_out = torch.full_like(whole, bool(self.weights.tp_rank), dtype=torch.bool)
            whole = whole.masked_fill(leave_out, 0)
        return y + whole

    def inside_shape(self, x: Tensor) -> tuple[int, ...]:
        """The shape that a tensor will have inside, without asking other ranks."""
        shape = list(x.to_local().shape if isinstance(x, DTensor) else x.shape)
        if self.weights.tp_mesh is None:
            return tuple(shape)
        if not isinstance(x, DTensor):
            if isinstance(self.input_layout, Shard):
                shape[self.input_layout.dim] *= self.weights.tp
            return tuple(shape)
        mesh, names = x.device_mesh, x.device_mesh.mesh_dim_names or ()
        on_tp = x.placements[names.index(TENSOR_AXIS)]
        if isinstance(on_tp, Shard):
            others = [i for i, p in enumerate(x.placements) if p == on_tp and names[i] != TENSOR_AXIS]
            index = 0
            for axis in others:
                index = index * mesh.size(axis) + mesh.get_local_rank(axis)
            shape[on_tp.dim] = shard_sizes(x.shape[on_tp.dim], tuple(mesh.size(axis) for axis in others))[index]
        return tuple(shape)


def check_layouts(into: Placement | None, out: Placement | None) -> tuple[Placement, Placement]:
    """The layouts of a style's options, ``Replicate()`` by default; refuses (ValueError) what is none."""
    layouts = (into or Replicate(), out or Replicate())
    for name, layout in zip(("input_layouts", "output_layouts"), layouts, strict=True):
        if not isinstance(layout, Replicate) and type(layout) is not Shard:
            raise ValueError(f"{name} must be Replicate() or a Shard, got {layout!r}")
    return layouts


def _compare_along_tp(x: Tensor, shape: Sequence[int], kind: str, name: str, tp_name: str) -> None:
    """Refuse on every rank an x that is another along tp, before anything is gathered.

    Args:
        x: the tensor.
        shape: of x, of a DTensor the whole one.
        kind: what else must be the same.
        name: of the mesh.
        tp_name: of the mesh of axis tp.
    """
    agree("METP entered", (), name, x=x)
    with refusing_together(name):
        agree("METP entered", [("the shape of x", tuple(shape)), ("the kind of x", kind)], tp_name, x=x)
        agree("METP entered alike", (), name, x=x)


_TAGS = (torch.Tag.cudagraph_unsafe,)  # ranks compare calls, which the replay of a CUDA graph would leave out


@torch.library.custom_op(
    "wallfacer_dt::metp_entered",
    mutates_args=(),
    tags=_TAGS,
    schema="(Tensor x, SymInt[] shape, str kind, str name, str tp_name) -> Tensor",
)
def _entered(x: Tensor, shape: Sequence[int], kind: str, name: str, tp_name: str) -> Tensor:
    """x as a graph hands it on, once ranks have compared it."""
    _compare_along_tp(x, shape, kind, name, tp_name)
    return x.clone()


@_entered.register_fake
def _entered_fake(x: Tensor, *_: Any) -> Tensor:
    return x.clone()


_entered.register_autograd(lambda _, grad: (grad, None, None, None, None))


_LEFT = "the backward of what METP gave"


def _met(x: Tensor, number: Tensor, what: str, name: str) -> Tensor:
    """x, of whose gradient ranks compare of which call it is, before anything of it is sent.

    Args:
        x: the tensor, in a graph a plain one.
        number: of the call.
        what: they come to.
        name: of the mesh.

    Returns:
        x.
    """
    if torch.compiler.is_compiling():
        return torch.ops.wallfacer_dt.metp_met(x, number, what, name)
    if x.requires_grad:

        @opaque
        def compare(grad: Tensor) -> None:
            agree(what, (), name, x=grad, forward=number)

        x.register_hook(compare)
    return x


@torch.library.custom_op(
    "wallfacer_dt::metp_met", mutates_args=(), schema="(Tensor x, Tensor number, str what, str name) -> Tensor"
)
def _met_in_graph(x: Tensor, *_: Any) -> Tensor:
    """x as a graph hands it on."""
    return x.clone()


@torch.library.custom_op(
    "wallfacer_dt::metp_met_backward",
    mutates_args=(),
    tags=_TAGS,
    schema="(Tensor grad, Tensor number, str what, str name) -> Tensor",
)
def _met_backward(grad: Tensor, number: Tensor, what: str, name: str) -> Tensor:
    agree(what, (), name, x=grad, forward=number)
    return grad.clone()


def _set_up(ctx, inputs: tuple[Tensor, Tensor, str, str], output: Tensor) -> None:
    del output
    ctx.told = inputs[1:]  # not saved: a checkpoint must not replace the number


def _autograd(ctx, grad: Tensor) -> tuple[Tensor, None, None, None]:
    return torch.ops.wallfacer_dt.metp_met_backward(grad, *ctx.told), None, None, None


for _op in (_met_in_graph, _met_backward):
    _op.register_fake(lambda x, *_: x.clone())
_met_in_graph.register_autograd(_autograd, setup_context=_set_up)
for _name in ("metp_entered", "metp_met_backward"):
    lowering.keep_order(getattr(torch.ops.wallfacer_dt, _name).default)
