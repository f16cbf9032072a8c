"""How DTensors enter and leave attention: which placements it takes, and the operators' sharding rule.

Axes of a DTensor's mesh are told apart by their process groups: on the two of the context mesh the sequence must be
sharded, on any other axis the batch or the heads may be, or nothing. torch's public ``register_sharding`` cannot tell
axes apart and would take a sequence that is replicated on one of the two: silently wrong.

Private APIs of DTensor are called here only; run on torch 2.11.0, 2.13.0 and 2.14.1.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy, RuntimeSchemaInfo
from torch.distributed.tensor._ops.utils import generate_redistribute_costs, register_op_strategy

from wallfacer_dt.mesh import RING_AXIS, TEAM_AXIS

BATCH, HEADS, SEQUENCE = 0, 1, 2


class Sharded(NamedTuple):
    """A distributed tensor: its mesh, its placements and its whole shape (B, N, L, H)."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: Sequence[int]


def check(q: Tensor, k: Tensor, v: Tensor, ring: str, team: str) -> None:
    """Refuse (ValueError) DTensors that attention cannot be given; see :func:`placements_for`."""
    if isinstance(q, DTensor) and isinstance(k, DTensor) and isinstance(v, DTensor):
        placements_for(_of(q), _of(k), _of(v), ring, team)


def placements_for(q: Sharded, k: Sharded, v: Sharded, ring: str, team: str) -> tuple[Placement, ...]:
    """The placements in which attention takes q, k and v and leaves its output: those of q, where they can be.

    An axis besides the two that shards the sequence too (torch's sequence parallelism) shards the heads instead, or
    where they do not divide, nothing. k and v follow q.

    Args:
        q: queries.
        k: keys.
        v: values.
        ring: name of the ring's process group.
        team: name of the team's process group, or empty.

    Returns:
        One placement for every axis of the mesh.

    Raises:
        ValueError: a placement that attention cannot be given, naming tensor, axis and placement.
    """
    mesh = q.mesh
    if not mesh == k.mesh == v.mesh:
        raise ValueError(f"q, k and v must be DTensors on one mesh, got {q.mesh}, {k.mesh}, {v.mesh}")
    context = _context_axes(mesh, ring, team)
    for name, x in (("q", q), ("k", k), ("v", v)):
        for axis, placement in enumerate(x.placements):
            _check_placement(name, placement, _name(mesh, axis), on_context=axis in context)
    heads = math.gcd(q.shape[HEADS], k.shape[HEADS])
    wanted = [_instead(p, heads, mesh.size(axis), axis in context) for axis, p in enumerate(q.placements)]
    for dim, what, length in ((BATCH, "batch", q.shape[BATCH]), (HEADS, "heads of q, k and v", heads)):
        axes = [axis for axis, placement in enumerate(wanted) if _is_shard(placement, dim)]
        parts = math.prod(mesh.size(axis) for axis in axes)
        if length % parts:
            named = ", ".join(f"{_name(mesh, axis)} of {mesh.size(axis)}" for axis in axes)
            raise ValueError(
                f"{what} must divide evenly over axis {named}, where q has placement Shard({dim}); got q "
                f"{tuple(q.shape)}, k {tuple(k.shape)} (B, N, L, H)"
            )
    return tuple(wanted)


def placed_like(grad: Tensor, tensor: Tensor) -> Tensor:
    """A gradient in the placements of its tensor; plain tensors as they are."""
    if isinstance(tensor, DTensor) and isinstance(grad, DTensor) and grad.placements != tensor.placements:
        return grad.redistribute(placements=tensor.placements)
    return grad


def register(op: OpOverload, *, inputs: str, outputs: int) -> None:
    """Register the rule of an operator whose tensors come first and then its place, ring and team.

    Args:
        op: the operator.
        inputs: a letter for each tensor argument; q, k and v are among them.
        outputs: number of outputs.
    """

    def strategy(schema: OpSchema) -> OpStrategy:
        given = schema.args_schema[: len(inputs)]
        tensors = {name: x for name, x in zip(inputs, given, strict=True) if isinstance(x, OpStrategy)}
        if len(tensors) < len(inputs):
            raise ValueError(f"{op}: all tensors must be DTensors, got only {', '.join(tensors)}")
        _, ring, team = schema.args_schema[len(inputs) : len(inputs) + 3]
        specs = {name: x.strategies[0].output_spec for name, x in tensors.items()}
        q, k, v = (Sharded(specs[name].mesh, specs[name].placements, specs[name].shape) for name in "qkv")
        placements = placements_for(q, k, v, str(ring), str(team))
        wanted = [DTensorSpec(q.mesh, placements, tensor_meta=spec.tensor_meta) for spec in specs.values()]
        costs = [generate_redistribute_costs(x, spec) for x, spec in zip(tensors.values(), wanted, strict=True)]
        results = tuple(DTensorSpec(q.mesh, placements) for _ in range(outputs))
        return OpStrategy([OpSpec(output_specs=results, input_specs=wanted, redistribute_cost=costs)])

    # Everything after the tensors is part of what a cached decision depends on.
    register_op_strategy(op, schema_info=RuntimeSchemaInfo(static_argnum=len(inputs)))(strategy)


def _of(x: DTensor) -> Sharded:
    """What a DTensor says of itself."""
    return Sharded(x.device_mesh, tuple(x.placements), x.shape)


def _context_axes(mesh: DeviceMesh, ring: str, team: str) -> set[int]:
    groups = [str(mesh.get_group(axis).group_name) for axis in range(mesh.ndim)]
    wanted = {name: axis for name, axis in ((ring, RING_AXIS), (team, TEAM_AXIS)) if name}
    missing = [axis for name, axis in wanted.items() if name not in groups]
    if missing:
        raise ValueError(
            f"q, k and v are DTensors on a mesh {mesh.mesh_dim_names} that does not hold {missing[0]} of the context "
            f"mesh; slice it from theirs, mesh[{RING_AXIS!r}, {TEAM_AXIS!r}], or pass local shards: q.to_local()"
        )
    axes = [groups.index(name) for name in wanted]
    if axes != sorted(axes):
        raise ValueError(
            f"axis {RING_AXIS!r} must come before {TEAM_AXIS!r} in the mesh of DTensors, which is the order of their "
            f"shards; got {mesh.mesh_dim_names}"
        )
    return set(axes)


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


def _instead(placement: Placement, heads: int, size: int, on_context: bool) -> Placement:
    if on_context or not _is_shard(placement, SEQUENCE):
        return placement
    return Shard(HEADS) if heads % size == 0 else Replicate()


def _name(mesh: DeviceMesh, axis: int) -> str:
    names = mesh.mesh_dim_names
    return repr(names[axis]) if names else str(axis)
