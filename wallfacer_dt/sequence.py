"""The loader's side: deal a sequence out to the ranks of a context mesh, and put it together again."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from wallfacer_dt.collectives import agree, all_gather, group_size, wait
from wallfacer_dt.documents import boundaries, check_documents
from wallfacer_dt.layout import (
    BY_DOCUMENT,
    Shards,
    Spans,
    check_length,
    check_order,
    deal,
    deal_documents,
    in_order,
    length_of,
    shard_sizes,
)
from wallfacer_dt.mesh import RING_AXIS, ContextGroups, bind_order, context_groups

Row = TypeVar("Row")


def shard_sequence(
    x: Tensor,
    mesh: DeviceMesh,
    *,
    dim: int,
    order: str,
    document_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """This rank's shard of a tensor that every rank holds whole. Differentiable; nothing is sent.

    Args:
        x: tensor with N positions along ``dim`` (tokens, labels, embeddings, ...).
        mesh: context mesh, or any mesh of one axis.
        dim: the sequence dim.
        order: ``"contiguous"``, ``"head_tail"`` or ``"document_head_tail"``; binds the mesh to it.
        document_ids: for ``document_head_tail``, (N,) or (B, N) with the batch as dim 0 of x, int, on the CPU.
        cu_seqlens: instead of them, cumulative lengths (documents + 1,), int, on the CPU.

    Returns:
        A contiguous tensor with this rank's positions along ``dim``: N / P, or where that does not divide as many as
        DTensor's ``Shard`` would give it (by document: one more or less), which may be none.

    Raises:
        ValueError: the sequence is empty, the documents are missing or none, or the mesh is bound to another order.
    """
    place = context_groups(mesh, any_axis=RING_AXIS).coordinate
    dim = _checked_dim(x, dim)
    check_length(x.shape[dim])
    rows = _rows(x, dim, order, document_ids, cu_seqlens)
    bind_order(mesh, order, "shard_sequence")
    return _by_row(x, dim, [_dealt(x.shape[dim], place.axes, order, row)[place.index] for row in rows], _taken)


def unshard_sequence(
    x: Tensor,
    mesh: DeviceMesh,
    *,
    dim: int,
    order: str,
    document_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """The whole tensor, on every rank, from the shards: the inverse of :func:`shard_sequence`.

    Gathers along one axis after the other; every rank of the mesh must call it, with shards that differ along ``dim``
    only. Meant for looking at results: a gradient through it would depend on what each rank does with its copy, so a
    tensor that needs one is refused.

    Args:
        x: this rank's shard.
        mesh: context mesh, or any mesh of one axis.
        dim: the sequence dim.
        order: the order in which the sequence was dealt out.
        document_ids: as :func:`shard_sequence` was given them.
        cu_seqlens: likewise.

    Returns:
        A contiguous tensor with N positions along ``dim``.

    Raises:
        ValueError: the shards cannot be of this order, one needs a gradient, or the mesh is bound to another order.
        IndexError: ``dim`` is out of range.
    """
    groups = context_groups(mesh, any_axis=RING_AXIS)
    place = groups.coordinate
    dim = _checked_dim(x, dim)
    check_order(order)
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "unshard_sequence has no gradient: call it under torch.no_grad() or on x.detach(), "
            "and compute the loss on the shards"
        )
    bind_order(mesh, order, "unshard_sequence")
    other_dims = tuple(n for d, n in enumerate(x.shape) if d != dim)
    signature = (("the shape of x, dim aside", other_dims), ("the dtype of x", x.dtype), ("dim", dim))
    agree(signature, *groups.names, every_call=x.device.type == "cpu")
    sizes = _gathered(torch.tensor([x.shape[dim]], device=x.device), groups).tolist()
    length, slot = sum(sizes), max(sizes)
    if tuple(sizes) != shard_sizes(length, place.axes, order):
        raise ValueError(
            f"shards of {sizes} positions are none of shard_sequence's, which for {length} positions in "
            f"order={order!r} are {list(shard_sizes(length, place.axes, order))}"
        )
    padded = torch.cat([x, x.new_zeros((*x.shape[:dim], slot - x.shape[dim], *x.shape[dim + 1 :]))], dim)
    shards = _gathered(padded.contiguous().view(-1), groups).view(place.size, *padded.shape).unbind(0)
    stored = torch.cat([shard.narrow(dim, 0, n) for shard, n in zip(shards, sizes, strict=True)], dim)
    rows = _rows(stored, dim, order, document_ids, cu_seqlens)
    return _by_row(stored, dim, [_dealt(length, place.axes, order, row) for row in rows], _put_back)


def sequence_positions(
    length: int,
    mesh: DeviceMesh,
    *,
    order: str,
    document_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Positions, in the whole sequence, of this rank's tokens, for RoPE and for position embeddings.

    Args:
        length: N, of the whole sequence.
        mesh: context mesh, or any mesh of one axis.
        order: as in :func:`shard_sequence`; binds the mesh to it.
        document_ids: as :func:`shard_sequence` was given them.
        cu_seqlens: likewise.

    Returns:
        int64 tensor of this rank's shape, (N / P,) where that divides, on the mesh's device type. (B, N / P) for
        ``document_ids`` (B, N) in ``document_head_tail``.

    Raises:
        ValueError: the length is below 1, the documents are missing or none, or the mesh is bound to another order.
    """
    check_length(length)
    whole = torch.arange(length, device=mesh.device_type)
    dim = 0
    if order == BY_DOCUMENT and document_ids is not None and document_ids.ndim == 2:
        whole, dim = whole.expand(document_ids.shape[0], -1), 1
    return shard_sequence(whole, mesh, dim=dim, order=order, document_ids=document_ids, cu_seqlens=cu_seqlens)


def _rows(
    x: Tensor, dim: int, order: str, document_ids: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[tuple[int, ...], ...]:
    """Where documents begin, by row of the batch, or one for all; empty where the order does not ask."""
    check_order(order)
    given = [(x, kind) for x, kind in ((document_ids, "ids"), (cu_seqlens, "cu_seqlens")) if x is not None]
    if order != BY_DOCUMENT:
        return ((),)
    if len(given) != 1:
        raise ValueError(f"order={order!r} needs document_ids or cu_seqlens, got {len(given)} of them")
    ((documents, kind),) = given
    check_documents(documents, kind, x.shape[0], x.shape[dim])
    rows = boundaries(documents, kind, x.shape[dim])
    if len(rows) > 1 and dim == 0:
        raise ValueError("document_ids (B, N) go with a tensor whose dim 0 is the batch, got dim=0 as its sequence")
    return rows


def _dealt(length: int, axes: tuple[int, ...], order: str, bounds: tuple[int, ...]) -> Shards:
    return deal_documents(bounds, axes) if bounds else deal(length, axes, order)


def _by_row(x: Tensor, dim: int, rows: Sequence[Row], function: Callable[[Tensor, int, Row], Tensor]) -> Tensor:
    """Apply a function to every row of the batch with what is its own, or to all rows at once."""
    if len(rows) == 1:
        return function(x, dim, rows[0])
    return torch.stack([function(part, dim - 1, row) for part, row in zip(x.unbind(0), rows, strict=True)])


def _taken(x: Tensor, dim: int, spans: Spans) -> Tensor:
    return torch.cat([x.narrow(dim, 0, 0), *(x.narrow(dim, span.start, span.length) for span in spans)], dim)


def _put_back(stored: Tensor, dim: int, shards: Shards) -> Tensor:
    starts = list(accumulate(map(length_of, shards), initial=0))
    return torch.cat(
        [stored.narrow(dim, starts[s.member] + s.start, s.span.length) for s in in_order(enumerate(shards))], dim
    )


def _gathered(flat: Tensor, groups: ContextGroups) -> Tensor:
    """All ranks' flat tensors, by sequence index."""
    for name in filter(None, groups.names):
        if group_size(name) > 1:
            flat = wait(all_gather(flat, name))
    return flat


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
