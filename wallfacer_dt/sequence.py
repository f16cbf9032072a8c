"""The loader's side: deal a sequence out to the ranks of a token order, and put it together again."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from wallfacer_dt.agreement.agree import agree, refusing_together
from wallfacer_dt.calls import groups_here
from wallfacer_dt.collectives.over_axes import gathered, gathered_rows, summed_rows
from wallfacer_dt.dealing import notice_dealt
from wallfacer_dt.documents import boundaries, check_documents, digest
from wallfacer_dt.kernels.merge import accumulation_dtype
from wallfacer_dt.layout import BY_DOCUMENT, Shards, check_length, deal, deal_documents, in_order, shard_sizes
from wallfacer_dt.order import TokenOrder, check_token_order
from wallfacer_dt.rows import Members, Rows

# What gloo and NCCL know; others are sent as bytes.
_SENT = (
    *(torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
)


def shard_sequence(
    x: Tensor, order: TokenOrder, *, dim: int, document_ids: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> Tensor:
    """This rank's shard of a tensor that every rank holds whole. Differentiable; nothing is sent.

    Args:
        x: tensor with N positions along ``dim`` (tokens, labels, embeddings, ...).
        order: in which they are dealt out, and to which ranks.
        dim: the sequence dim.
        document_ids: for ``document_head_tail``, (N,) or (B, N) with the batch as dim 0 of x, int, on the CPU.
        cu_seqlens: instead of them, cumulative lengths (documents + 1,), int, on the CPU.

    Returns:
        A contiguous tensor with this rank's positions along ``dim``: N / P, or where that does not divide as many as
        DTensor's ``Shard`` would give it (by document: one more or less), which may be none.

    Raises:
        TypeError: x is no plain tensor, or order no token order.
        ValueError: the sequence is empty, the documents are missing or none, or the plan that was applied on the
            order's mesh matched nothing.
    """
    with refusing_together(check_token_order(order).mesh_name):
        notice_dealt(order.dealt)
    return local_shard(x, order, dim=dim, document_ids=document_ids, cu_seqlens=cu_seqlens)


def local_shard(
    x: Tensor, order: TokenOrder, *, dim: int, document_ids: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> Tensor:
    """What :func:`shard_sequence` gives, to compare with: it is not noticed as dealing out (Note [Noticing])."""
    place = check_token_order(order).groups.coordinate
    dim = checked_dim(x, dim)
    check_length(x.shape[dim])
    dealt = _dealt(x, dim, x.shape[dim], order, *_given(order, document_ids, cu_seqlens))
    by_row = [shards[place.index] for shards in dealt]
    return Rows.at(by_row).of(x, dim).clone(memory_format=torch.contiguous_format)


def unshard_sequence(
    x: Tensor,
    order: TokenOrder,
    *,
    dim: int,
    document_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    grad: bool = False,
) -> Tensor:
    """The whole tensor, on every rank, from the shards: the inverse of :func:`shard_sequence`.

    Gathers along one axis after the other; every rank of the mesh must call it, with shards that differ along ``dim``
    only. A gradient through it depends on what each rank does with its copy, so it is to be asked for.

    Args:
        x: this rank's shard.
        order: the one in which the sequence was dealt out.
        dim: the sequence dim.
        document_ids: as :func:`shard_sequence` was given them.
        cu_seqlens: likewise.
        grad: let gradients through. The loss is then the sum of what ranks compute, so of a loss that all of them
            compute alike each takes a P-th; the gradient of x is the sum of what ranks say of its rows in their copies.

    Returns:
        A contiguous tensor with N positions along ``dim``.

    Raises:
        TypeError: x is no plain tensor, or order no token order.
        ValueError: the shards cannot be of this order, one needs a gradient that was not asked for, or ranks disagree.
        IndexError: ``dim`` is out of range.
    """
    with refusing_together(check_token_order(order).mesh_name):
        # Of a pickled order the groups may be called otherwise here.
        groups = groups_here(order.mesh_name, order.groups).names
        dim = checked_dim(x, dim)
        needs_gradient = x.requires_grad and torch.is_grad_enabled()
        if needs_gradient and not grad:
            raise ValueError(
                "unshard_sequence gives no gradient unless it is told grad=True (of a loss that all ranks compute "
                "alike each then takes a P-th): tell it, or call it under torch.no_grad() or on x.detach()"
            )
        if x.device.type != order.device_type:
            raise ValueError(f"x must be on the mesh's device type {order.device_type!r}, got {x.device}")
        documents, kind = _given(order, document_ids, cu_seqlens)
        if documents is not None:
            _check_rows(documents, kind, x, dim, None)
        signature = {
            "dim": dim,
            "order": order,
            "the shape of x, dim aside": tuple(n for d, n in enumerate(x.shape) if d != dim),
            "the dtype of x": x.dtype,
            "what says where documents are": kind or "nothing",
            "the documents": digest(documents),
            "whether x needs a gradient": needs_gradient,
        }
        number = agree("unshard_sequence", signature.items(), order.mesh_name)
    if needs_gradient and documents is not None:
        documents = documents.clone()  # the backward reads them again, and a loader may have written into them by then
    how = _Unsharding(dim, order, groups, documents, kind, number)
    return _Unshard.apply(x, how) if needs_gradient else _whole(x, how)


class _Unsharding(NamedTuple):
    """How shards become whole: what :func:`unshard_sequence` was told, and the call's number."""

    dim: int
    order: TokenOrder
    groups: tuple[str, str, str]
    documents: Tensor | None
    kind: str
    number: int


class _Unshard(torch.autograd.Function):
    """The gather, whose gradient is the sum of what ranks say of a shard's rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, how: _Unsharding) -> Tensor:
        """Gather."""
        ctx.how, ctx.held = how, x.shape[how.dim]
        return _whole(x, how)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyrefly: ignore[bad-override]
        """Send every rank what is said of its rows, and add up."""
        how, dim = ctx.how, ctx.how.dim
        agree("the backward of unshard_sequence", (), how.order.mesh_name, forward=how.number)
        wide = torch.promote_types(grad.dtype, torch.complex64) if grad.is_complex() else accumulation_dtype(grad.dtype)
        dealt = _dealt(grad, dim, grad.shape[dim], how.order, how.documents, how.kind)
        parts = [Rows.at([shards[i] for shards in dealt]).of(grad, dim) for i in range(len(dealt[0]))]
        return summed_rows(parts, dim, ctx.held, how.groups, "a sequence's gradients", wide).to(grad.dtype), None


def _whole(x: Tensor, how: _Unsharding) -> Tensor:
    if x.dtype not in _SENT:
        return _whole(x.unsqueeze(-1).contiguous().view(torch.uint8), how).view(x.dtype).squeeze(-1)
    dim, order, groups = how.dim, how.order, how.groups
    sizes = gathered(torch.tensor([x.shape[dim]], device=x.device), groups, "lengths of shards").tolist()
    length = sum(sizes)
    if tuple(sizes) != shard_sizes(length, order.axes, order.name):
        raise ValueError(
            f"shards of {sizes} positions are none of shard_sequence's, which for {length} positions in "
            f"order={order.name!r} are {list(shard_sizes(length, order.axes, order.name))}"
        )
    shards = gathered_rows(x, dim, sizes, groups, "a sequence")
    by_row = [in_order(enumerate(row)) for row in _dealt(x, dim, length, order, how.documents, how.kind)]
    whole = Members.made(by_row, len(sizes)).together(shards, dim)
    # Of one rank's shard it may be a view, and whoever writes to the whole would write to the shard.
    return whole.clone(memory_format=torch.contiguous_format) if len(sizes) == 1 else whole.contiguous()


def sequence_positions(
    length: int, order: TokenOrder, *, document_ids: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> Tensor:
    """Positions, in the whole sequence, of this rank's tokens, for RoPE and for position embeddings.

    Args:
        length: N, of the whole sequence.
        order: in which it is dealt out, and to which ranks.
        document_ids: as :func:`shard_sequence` was given them.
        cu_seqlens: likewise.

    Returns:
        int64 tensor of this rank's shape, (N / P,) where that divides, on the device type of the order's mesh.
        (B, N / P) for ``document_ids`` (B, N) in ``document_head_tail``.

    Raises:
        TypeError: the length is no int, or order no token order.
        ValueError: the length is below 1, or the documents are missing or none.
    """
    check_length(length)
    whole = torch.arange(length, device=check_token_order(order).device_type)
    dim = 0
    if order.name == BY_DOCUMENT and isinstance(document_ids, Tensor) and document_ids.ndim == 2:
        whole, dim = whole.expand(document_ids.shape[0], -1), 1
    return shard_sequence(whole, order, dim=dim, document_ids=document_ids, cu_seqlens=cu_seqlens)


def _dealt(x: Tensor, dim: int, length: int, order: TokenOrder, documents: Tensor | None, kind: str) -> list[Shards]:
    """By row of the batch, or for all, what each rank holds."""
    if documents is None:
        return [deal(length, order.axes, order.name)]
    _check_rows(documents, kind, x, dim, length)
    return [deal_documents(bounds, order.axes) for bounds in boundaries(documents, kind, length)]


def _check_rows(documents: Tensor, kind: str, x: Tensor, dim: int, length: int | None) -> None:
    """Refuse (TypeError, ValueError) what says no documents, or not those of a tensor with this dim as its sequence."""
    is_by_row = isinstance(documents, Tensor) and documents.ndim == 2 and documents.shape[0] > 1
    if is_by_row and dim == 0:
        raise ValueError("document_ids (B, N) go with a tensor whose dim 0 is the batch, got dim=0 as its sequence")
    check_documents(documents, kind, x.shape[0], length)


def _given(order: TokenOrder, document_ids: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor | None, str]:
    """The documents, and what they are; nothing where the order does not ask."""
    if order.name != BY_DOCUMENT:
        return None, ""
    given = [(x, kind) for x, kind in ((document_ids, "ids"), (cu_seqlens, "cu_seqlens")) if x is not None]
    if len(given) != 1:
        raise ValueError(f"order={order.name!r} needs document_ids or cu_seqlens, got {len(given)} of them")
    return given[0]


def checked_dim(x: Tensor, dim: int) -> int:
    """A dim of a plain tensor, from 0 on; refuses (TypeError, IndexError) what is none."""
    if not isinstance(x, Tensor):
        raise TypeError(f"expected a tensor, got {type(x).__name__}")
    if isinstance(x, DTensor):
        raise TypeError("expected a plain tensor, got a DTensor; pass x.to_local() or x.full_tensor()")
    if not isinstance(dim, int):
        raise TypeError(f"dim must be an int, got {dim!r}")
    if not -x.ndim <= dim < x.ndim:
        raise IndexError(f"dim must be in [{-x.ndim}, {x.ndim}), got {dim}")
    return dim % x.ndim
