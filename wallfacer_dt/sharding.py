"""How DTensors enter and leave attention: which placements it takes, and the operators' sharding rule.

Axes of a DTensor's mesh are told apart by their ranks: on those of the context mesh the sequence must be sharded, on
any other axis the batch or the heads may be, or nothing. torch's public ``register_sharding`` cannot tell axes apart
and would take a sequence that is replicated on one of them: silently wrong. Not by their process groups: torch gives
what it computes the first of all meshes that are equal, whose groups are others (torch 2.13.0).

Private APIs of DTensor are called here only; run on torch 2.11.0, 2.13.0, 2.14.1 and 2.15.0.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy, RuntimeSchemaInfo
from torch.distributed.tensor._ops.utils import generate_redistribute_costs, register_op_strategy

from wallfacer_dt.collectives.groups import group_ranks
from wallfacer_dt.compiler import constant
from wallfacer_dt.inputs import INPUTS, AttentionInputs
from wallfacer_dt.mesh import CONTEXT_AXES, ContextGroups, axis_ranks
from wallfacer_dt.options import Options

BATCH, HEADS, SEQUENCE = 0, 1, 2


def check(inputs: AttentionInputs, groups: ContextGroups) -> None:
    """Refuse (ValueError) DTensors that attention cannot be given."""
    known = {name: x._spec for name, x in zip(INPUTS, inputs, strict=True) if isinstance(x, DTensor)}
    if known.keys() >= {"q", "k", "v"}:
        placements_for(known, groups)


def placements_for(inputs: Mapping[str, DTensorSpec], groups: ContextGroups) -> tuple[Placement, ...]:
    """The placements in which attention takes q, k and v and leaves its output: those of q, where they can be.

    An axis besides the context mesh's that shards the sequence too (torch's sequence parallelism) shards the heads
    instead, or where they do not divide, nothing. k and v follow q. A placement that attention cannot be given is
    refused (ValueError) by its tensor, axis and placement.
    """
    q, k, mesh, ulysses = inputs["q"], inputs["k"], inputs["q"].mesh, groups.coordinate.ulysses
    for name, x in inputs.items():
        if x.mesh != mesh:
            raise ValueError(f"q and {name} must be DTensors on one mesh, got {mesh} and {x.mesh}")
    context = _context_axes(mesh, groups)
    # An axis of one rank shards nothing, whatever is said of it.
    as_they_are = {*context.values(), *(axis for axis in range(mesh.ndim) if mesh.size(axis) == 1)}
    for name in ("q", "k", "v", "k_shared"):
        for axis, placement in enumerate(inputs[name].placements if name in inputs else ()):
            _check_placement(name, placement, _name(mesh, axis), on_context=axis in context.values())
    heads = math.gcd(q.shape[HEADS], k.shape[HEADS])
    wanted = list(q.placements)
    split = math.prod(mesh.size(axis) for axis, placement in enumerate(wanted) if _is_shard(placement, HEADS))
    for axis, placement in enumerate(wanted):
        if axis in as_they_are or not _is_shard(placement, SEQUENCE):
            continue
        parts = split * mesh.size(axis)
        divides = heads % parts == 0 and q.shape[HEADS] // parts >= ulysses
        split, wanted[axis] = (parts, Shard(HEADS)) if divides else (split, Replicate())
    for dim, what, length in ((BATCH, "batch", q.shape[BATCH]), (HEADS, "heads of q, k and v", heads)):
        sharding = [axis for axis, placement in enumerate(wanted) if _is_shard(placement, dim)]
        parts = math.prod(mesh.size(axis) for axis in sharding)
        if dim == HEADS and q.shape[HEADS] // parts < ulysses:
            raise ValueError(
                f"cp_ulysses of {ulysses} splits the query heads that are left to a rank, of which there are only "
                f"{q.shape[HEADS] // parts}: q {tuple(q.shape)} (B, N, L, H) is sharded by heads over {parts} ranks"
            )
        if length % parts:
            named = ", ".join(f"{_name(mesh, axis)} of {mesh.size(axis)}" for axis in sharding)
            raise ValueError(
                f"{what} must divide evenly over axis {named}, where q has placement Shard({dim}); got q "
                f"{tuple(q.shape)}, k {tuple(k.shape)} (B, N, L, H)"
            )
    return tuple(wanted)


def divided(inputs: AttentionInputs, groups: ContextGroups) -> list[int]:
    """The dims of q of which attention is given a part; of a plain tensor none.

    A compiler cannot ask :func:`placements_for`: there heads are among them where an axis beside the context mesh's
    shards the sequence, whatever becomes of it.
    """
    q = inputs.q
    if not isinstance(q, DTensor):
        return []
    mesh, placements = q.device_mesh, q.placements
    if not torch.compiler.is_compiling():
        known = {name: x._spec for name, x in zip(INPUTS, inputs, strict=True) if isinstance(x, DTensor)}
        placements = placements_for(known, groups)
    dims = [p.dim for axis, p in enumerate(placements) if isinstance(p, Shard) and mesh.size(axis) > 1]
    return dims + [HEADS] * (dims.count(SEQUENCE) > sum(n > 1 for n in groups.coordinate.axes))


def replicate(x: Tensor, like: Tensor) -> Tensor:
    """A plain tensor that all ranks have alike as a DTensor on another's mesh, where that is one, on its own device."""
    if not isinstance(like, DTensor):
        return x
    if torch.compiler.is_compiling():
        _show_as_one()
    return _replicated(x, like)


def placed_like(grad: DTensor, tensor: DTensor, *, sums: bool) -> DTensor:
    """A gradient in the placements of its tensor.

    With ``sums`` sums that are still to be made are left so, as those of a parameter's gradient are.
    """
    wanted = tuple(
        mine if sums and isinstance(mine, Partial) else its
        for mine, its in zip(grad.placements, tensor.placements, strict=True)
    )
    return grad if grad.placements == wanted else grad.redistribute(placements=wanted)


def register(op: OpOverload, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """Register the rule of an operator whose tensors come first, then what :class:`Options` told.

    Of the inputs, which are named as in :class:`AttentionInputs`, ``k_shared`` is sharded as q, k and v are but has one
    head for all, ``sinks`` are by heads, documents are about the whole sequence, ids with a row for each of the batch
    or one for all; ``said`` is what ranks compare. All ranks have alike what a mask captures. What is not named in the
    rule, and other outputs, are sharded as q is.
    """

    def strategy(schema: OpSchema) -> OpStrategy:
        by_input = dict(zip(inputs, schema.args_schema, strict=False))
        tensors = {name: x for name, x in by_input.items() if isinstance(x, OpStrategy)}
        plain = [name for name, x in by_input.items() if x is not None and name not in tensors]
        if plain:
            raise ValueError(f"{op}: all tensors must be DTensors, but {', '.join(plain)} is not")
        told: Any = schema.args_schema[len(inputs) : -1]
        specs = {name: x.strategies[0].output_spec for name, x in tensors.items()}
        q = specs["q"]
        placements = placements_for(specs, Options.of_text(told[-1]).setting.groups)
        alike = (Replicate(),) * len(placements)
        by_heads = tuple(Shard(0) if _is_shard(p, HEADS) else Replicate() for p in placements)
        by_name = {
            "k_shared": tuple(Replicate() if _is_shard(p, HEADS) else p for p in placements),
            # Every head has its part in the gradient of what heads share.
            "grad_k_shared": tuple(Partial() if _is_shard(p, HEADS) else p for p in placements),
            "document_ids": tuple(p if _is_shard(p, BATCH) else Replicate() for p in placements),
            "cu_seqlens": alike,
            "said": alike,
            "sinks": by_heads,
            "grad_sinks": tuple(
                Partial() if _is_shard(p, BATCH, SEQUENCE) else own for p, own in zip(placements, by_heads, strict=True)
            ),
        }
        if "document_ids" in specs and specs["document_ids"].shape[0] == 1:
            by_name["document_ids"] = alike
        wanted = [
            DTensorSpec(q.mesh, by_name.get(name, placements), tensor_meta=spec.tensor_meta)
            for name, spec in specs.items()
        ]
        read = list(getattr(schema.args_schema[-1], "children", ()))
        metas = [x.strategies[0].output_spec.tensor_meta for x in read]
        wanted += [DTensorSpec(q.mesh, alike, tensor_meta=meta) for meta in metas]
        sources = [*tensors.values(), *read]
        costs = [generate_redistribute_costs(x, spec) for x, spec in zip(sources, wanted, strict=True)]
        for absent in {"k_shared", "sinks"} - specs.keys():  # then its gradient is an empty tensor
            by_name[f"grad_{absent}"] = alike
        results = tuple(DTensorSpec(q.mesh, by_name.get(name, placements)) for name in outputs)
        return OpStrategy([OpSpec(output_specs=results, input_specs=wanted, redistribute_cost=costs)])

    # Everything after the tensors is part of what a cached decision depends on.
    register_op_strategy(op, schema_info=RuntimeSchemaInfo(static_argnum=len(inputs), needs_pytree=True))(strategy)


def _replicated(x: Tensor, like: DTensor) -> DTensor:
    # DTensor.from_local would move it to the mesh's device.
    mesh = like.device_mesh
    spec = DTensorSpec(mesh, (Replicate(),) * mesh.ndim, tensor_meta=TensorMeta(x.shape, x.stride(), x.dtype))
    return DTensor(x, spec, requires_grad=False)


@constant
def _show_as_one() -> None:
    """Show a compiler the replication as one operation: it could look neither at a mesh nor at the constructor."""
    torch.compiler.allow_in_graph(_replicated)


def _context_axes(mesh: DeviceMesh, groups: ContextGroups) -> dict[str, int]:
    """Of a mesh the number of every axis of the context mesh that has several ranks, by the name that it has there."""
    lines = axis_ranks(mesh)
    wanted = {axis: group_ranks(name) for axis, name in zip(CONTEXT_AXES, groups.names, strict=True) if name}
    wanted = {axis: ranks for axis, ranks in wanted.items() if len(ranks) > 1}
    missing = [axis for axis, ranks in wanted.items() if ranks not in lines]
    if missing:
        raise ValueError(
            f"q, k and v are DTensors on a mesh {mesh.mesh_dim_names} that does not hold {missing[0]} of the context "
            f"mesh; slice it from theirs, mesh[{', '.join(map(repr, wanted))}], or pass local shards: q.to_local()"
        )
    axes = {axis: lines.index(ranks) for axis, ranks in wanted.items()}
    if [*axes.values()] != sorted(axes.values()):
        raise ValueError(
            f"axis {' must come before '.join(map(repr, wanted))} in the mesh of DTensors, which is the order of their "
            f"shards; got {mesh.mesh_dim_names}"
        )
    return axes


def _is_shard(placement: Placement, *dims: int) -> bool:
    # Strided shards may be a subclass, and in some versions compare equal.
    return type(placement) is Shard and placement.dim in dims


def _check_placement(tensor: str, placement: Placement, axis: str, *, on_context: bool) -> None:
    if on_context and not _is_shard(placement, SEQUENCE):
        raise ValueError(
            f"{tensor} must have its sequence sharded on axis {axis}, Shard({SEQUENCE}) of (B, N, L, H), got "
            f"{placement!r}; shard the tokens with shard_sequence, or distribute_tensor, before the projections"
        )
    if isinstance(placement, Partial):
        raise ValueError(f"{tensor} is a sum still to be made, {placement!r} on axis {axis}; redistribute it first")
    if not isinstance(placement, Replicate) and not _is_shard(placement, BATCH, HEADS, SEQUENCE):
        raise ValueError(
            f"{tensor} must be replicated on axis {axis}, or sharded by batch or heads, Shard({BATCH}) or "
            f"Shard({HEADS}) of (B, N, L, H), got {placement!r}"
        )


def _name(mesh: DeviceMesh, axis: int) -> str:
    names = mesh.mesh_dim_names
    return repr(names[axis]) if names else str(axis)
