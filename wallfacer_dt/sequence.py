"""The loader's side: deal a sequence out to the ranks of a context mesh, and put it together again."""

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from wallfacer_dt.collectives import agree, all_gather, wait
from wallfacer_dt.layout import check_length, chunks_per_rank, rank_spans
from wallfacer_dt.mesh import bind_order, context_groups


def shard_sequence(x: Tensor, mesh: DeviceMesh, *, dim: int, order: str) -> Tensor:
    """This rank's shard of a tensor that every rank holds whole. Differentiable; nothing is sent.

    Args:
        x: tensor with N positions along ``dim`` (tokens, labels, embeddings, ...).
        mesh: context mesh, or any mesh of one axis.
        dim: the sequence dim.
        order: ``"contiguous"`` or ``"head_tail"``; binds the mesh to it.

    Returns:
        A contiguous tensor with N / P positions along ``dim``.

    Raises:
        ValueError: N does not divide (by P, for ``head_tail`` by 2P), or the mesh is bound to another order.
        IndexError: ``dim`` is out of range.
    """
    place = context_groups(mesh, any_axis=True).coordinate
    dim = _checked_dim(x, dim)
    check_length(x.shape[dim], place.size, order)
    bind_order(mesh, order, "shard_sequence")
    spans = rank_spans(place.index, place.size, order, x.shape[dim] // place.size)
    return torch.cat([x.narrow(dim, span.start, span.length) for span in spans], dim)


def unshard_sequence(x: Tensor, mesh: DeviceMesh, *, dim: int, order: str) -> Tensor:
    """The whole tensor, on every rank, from the shards: the inverse of :func:`shard_sequence`.

    Gathers in the team, then round the ring; every rank of the mesh must call it with equal shapes. Meant for
    looking at results: a gradient through it would depend on what each rank does with its copy, so a tensor that
    needs one is refused.

    Args:
        x: this rank's shard, N / P positions along ``dim``.
        mesh: context mesh, or any mesh of one axis.
        dim: the sequence dim.
        order: the order in which the sequence was dealt out.

    Returns:
        A contiguous tensor with N positions along ``dim``.

    Raises:
        ValueError: the shard cannot be of this order, it needs a gradient, or the mesh is bound to another order.
        IndexError: ``dim`` is out of range.
    """
    groups = context_groups(mesh, any_axis=True)
    place = groups.coordinate
    dim = _checked_dim(x, dim)
    check_length(x.shape[dim] * place.size, place.size, order)
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "unshard_sequence has no gradient: call it under torch.no_grad() or on x.detach(), "
            "and compute the loss on the shards"
        )
    bind_order(mesh, order, "unshard_sequence")
    signature = (("the shape of x", tuple(x.shape)), ("the dtype of x", x.dtype), ("dim", dim))
    agree(signature, groups.team_name, groups.ring.group_name, every_call=x.device.type == "cpu")
    whole = x.contiguous().view(-1)
    if place.team > 1:
        whole = wait(all_gather(whole, groups.team_name))
    if place.ring > 1:
        whole = wait(all_gather(whole, groups.ring.group_name))
    shards = whole.view(place.size, *x.shape).unbind(0)
    pieces = [
        (span, piece)
        for index, shard in enumerate(shards)
        for span, piece in zip(
            rank_spans(index, place.size, order, x.shape[dim]),
            shard.chunk(chunks_per_rank(order), dim),
            strict=True,
        )
    ]
    return torch.cat([piece for _, piece in sorted(pieces, key=lambda pair: pair[0])], dim)


def sequence_positions(length: int, mesh: DeviceMesh, *, order: str) -> Tensor:
    """Global positions of this rank's tokens, for RoPE and for position embeddings.

    Args:
        length: N, of the whole sequence.
        mesh: context mesh, or any mesh of one axis.
        order: ``"contiguous"`` or ``"head_tail"``; binds the mesh to it.

    Returns:
        int64 tensor of shape (N / P,) on the mesh's device type.

    Raises:
        ValueError: N does not divide, or the mesh is bound to another order.
    """
    place = context_groups(mesh, any_axis=True).coordinate
    check_length(length, place.size, order)
    bind_order(mesh, order, "sequence_positions")
    spans = rank_spans(place.index, place.size, order, length // place.size)
    return torch.cat([torch.arange(*span, device=mesh.device_type) for span in spans])


def _checked_dim(x: Tensor, dim: int) -> int:
    if not isinstance(x, Tensor):
        raise TypeError(f"expected a tensor, got {type(x).__name__}")
    if isinstance(x, DTensor):
        raise TypeError("expected a plain tensor, got a DTensor; pass x.to_local() or x.full_tensor()")
    if not isinstance(dim, int):
        raise TypeError(f"dim must be an int, got {dim!r}")
    if not -x.ndim <= dim < x.ndim:
        raise IndexError(f"dim must be in [{-x.ndim}, {x.ndim}), got {dim}")
    return dim % x.ndim
