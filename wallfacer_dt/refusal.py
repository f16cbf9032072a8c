"""What tensors attention accepts; and refusals in a graph, see Note [Refusing together] in ``agreement``."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual
from torch.distributed.tensor import DTensor

from wallfacer_dt import lowering, sharding
from wallfacer_dt.agreement import refusing_together
from wallfacer_dt.compiler import sizes
from wallfacer_dt.documents import check_documents
from wallfacer_dt.kernels import Need, select_kernel
from wallfacer_dt.layout import BY_DOCUMENT, shard_sizes
from wallfacer_dt.order import check_order_is_told
from wallfacer_dt.transforms import check_transforms


class Extras(NamedTuple):
    """What attention may be given besides q, k and v.

    Attributes:
        document_ids: (B, N) or (N,), int, on the CPU: the document of every token of the whole sequence.
        cu_seqlens: (documents + 1,), int, on the CPU: the documents' cumulative lengths, for all rows of the batch.
        sinks: (N,): a logit more for every head.
        k_shared: (B, 1, L, Hs): the end of every head's key.
    """

    document_ids: Tensor | None = None
    cu_seqlens: Tensor | None = None
    sinks: Tensor | None = None
    k_shared: Tensor | None = None


NO_EXTRAS = Extras()


class Expected(NamedTuple):
    """What a call's tensors are checked against.

    Attributes:
        mesh: its name, by which ranks compare their calls.
        ulysses: name of the process group of axis ``cp_ulysses``, or empty.
        ring: name of the ring's process group, or empty.
        team: name of the team's process group, or empty.
        device_type: of the mesh.
        axes: sizes of ulysses, ring and team.
        index: this rank's sequence index.
        lengths: of the whole sequence, queries and keys; empty where shards are equal.
        replicated: tokens before the shards that every rank holds.
        square: whether there is a mask for which queries and keys are the same tokens.
        masked: whether there is a mask_mod.
        documents: whether documents go with the other masks.
        order: name of the token order; empty where there is none.
        softcap: of the scores.
        kernel: of the blocks.
    """

    mesh: str
    ulysses: str
    ring: str
    team: str
    device_type: str
    axes: Sequence[int]
    index: int
    lengths: Sequence[int]
    replicated: int
    square: bool
    masked: bool
    documents: bool
    order: str
    softcap: float
    kernel: str


def refused_in_graph(q: Tensor, k: Tensor, v: Tensor, extras: Extras, error: str, expected: Expected) -> Tensor:
    """Put a refusal into the graph that is being traced; see Note [Refusing together].

    Args:
        q: as the call was given it.
        k: as the call was given it.
        v: as the call was given it.
        extras: as the call was given them.
        error: why; empty where plain tensors themselves are refused, which then say so when the operator runs.
        expected: what they were checked against.

    Returns:
        Something of q's shape, in the graph.
    """
    if isinstance(q, DTensor):
        return refuse_in_graph(q, q.shape[-1], error, expected.mesh)
    given = (x.detach() if isinstance(x, Tensor) else None for x in extras)
    return torch.ops.wallfacer_dt.refuse(q.detach(), k.detach(), v.detach(), *given, error, *expected)


def refuse_in_graph(x: Tensor, out_dim: int, error: str, mesh: str) -> Tensor:
    """Put the refusal of a block into the graph that is being traced; see Note [Refusing together].

    Args:
        x: as the block was given it.
        out_dim: of what the block would give.
        error: why.
        mesh: name of its mesh.

    Returns:
        Something of the result's shape, in the graph.
    """
    if isinstance(x, DTensor):
        return _like(x, refuse_in_graph(x.to_local(), out_dim, error, mesh))
    return torch.ops.wallfacer_dt.refuse_block(x.detach(), out_dim, error, mesh)


def _like(x: DTensor, local: Tensor) -> DTensor:
    """A shard as a DTensor placed as x; of a refusal no more is needed."""
    return DTensor.from_local(local, x.device_mesh, x.placements, run_check=False)


def check_call(q: Tensor, k: Tensor, v: Tensor, extras: Extras, expected: Expected) -> None:
    """Refuse (TypeError, ValueError, NotImplementedError) tensors that attention cannot be given."""
    _check_each(q, k, v, extras.k_shared)
    _check_together(q, k, v, extras.k_shared, expected)
    _check_lengths(q, k, expected)
    _check_documents(q, k, extras, expected)
    _check_sinks(q, extras.sinks)
    # A compiler asks the operator's rule, which checks the same, and kernels are chosen when the operator runs.
    if not torch.compiler.is_compiling():
        axes = sharding.Axes(expected.ulysses, expected.ring, expected.team)
        sharding.check(q, k, v, axes, extras.k_shared, extras.sinks)
        select_kernel(expected.kernel, Need.of(q, v, masked=expected.masked, softcap=expected.softcap))


def _check_each(q: Tensor, k: Tensor, v: Tensor, k_shared: Tensor | None) -> None:
    for name, x in (("q", q), ("k", k), ("v", v), ("k_shared", k_shared)):
        if x is None and name == "k_shared":
            continue
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
        if isinstance(x, DTensor) != isinstance(q, DTensor):
            raise TypeError(f"q, k and v must all be DTensors or all plain tensors, but q and {name} differ")
        if not torch.compiler.is_compiling():
            check_transforms(name, x)
            if unpack_dual(x).tangent is not None:
                raise NotImplementedError(
                    f"context-parallel attention has no forward-mode derivative, but {name} has a tangent"
                )
        # A rank may hold no token of a short sequence.
        if x.ndim != 4 or 0 in (*x.shape[:2], *x.shape[3:]):
            raise ValueError(f"{name} must have shape (B, N, L, H) without empty dims, got {sizes(x)}")


def _check_together(q: Tensor, k: Tensor, v: Tensor, k_shared: Tensor | None, expected: Expected) -> None:
    others = [k, v] if k_shared is None else [k, v, k_shared]

    def shapes() -> str:
        return ", ".join(
            f"{name} {sizes(x)}" for name, x in zip(("q", "k", "v", "k_shared"), [q, *others], strict=False)
        )

    if any(x.dtype != q.dtype for x in others):
        raise TypeError(f"q, k and v must have one dtype, got {q.dtype}, {k.dtype}, {v.dtype}; cast them")
    if q.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"q, k and v must be floating point, got {q.dtype}; cast them")
    if any(x.device != q.device for x in others):
        raise ValueError(f"q, k and v must be on one device, got {q.device}, {k.device}, {v.device}")
    if q.device.type != expected.device_type:
        raise ValueError(f"q, k and v must be on the mesh's device type {expected.device_type!r}, got {q.device}")
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(f"k and v must agree in all but the head dim (B, N, L, H), got {shapes()}")
    if k_shared is not None and (k_shared.shape[0], *k_shared.shape[1:3]) != (k.shape[0], 1, k.shape[2]):
        raise ValueError(f"k_shared must have shape (B, 1, L, Hs), one head for all, got {sizes(k_shared)}")
    head_dim = k.shape[3] + (0 if k_shared is None else k_shared.shape[3])
    if q.shape[0] != k.shape[0] or q.shape[3] != head_dim:
        raise ValueError(
            f"q and k must agree in batch and head dim (B, N, L, H), to which k_shared belongs, got {shapes()}"
        )
    if expected.square and q.shape[2] != k.shape[2]:
        raise ValueError(f"under a mask q, k and v must agree in length, got {shapes()}; cross attention has no mask")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"query heads must be a multiple of key and value heads, got {shapes()}")
    if q.shape[1] < expected.axes[0]:
        raise ValueError(f"cp_ulysses of {expected.axes[0]} splits query heads, of which there are only {sizes(q)[1]}")


def _check_lengths(q: Tensor, k: Tensor, expected: Expected) -> None:
    if isinstance(q, DTensor):
        if expected.replicated:
            raise ValueError("replicated tokens and a shard are no DTensor: pass local tensors, q.to_local()")
        if expected.lengths and tuple(expected.lengths) != (q.shape[2], k.shape[2]):
            raise ValueError(
                f"DTensors know their length: leave length={expected.lengths[0]} out, got q {sizes(q)} and k "
                f"{sizes(k)} (B, N, L, H)"
            )
        return
    lengths = expected.lengths or (None, None)
    for name, x, length in (("q", q, lengths[0]), ("k", k, lengths[1])):
        own = x.shape[2] - expected.replicated
        if length is None:
            if own < 1:
                replicated = f" after {expected.replicated} replicated ones" if expected.replicated else ""
                raise ValueError(
                    f"{name} must have tokens of this rank{replicated}, got {sizes(x)} (B, N, L, H); of a "
                    "sequence that does not divide pass the length"
                )
            continue
        holds = shard_sizes(length, tuple(expected.axes), expected.order)[expected.index]
        if own != holds:
            raise ValueError(
                f"of {length} tokens this rank holds {holds} in {expected.order or 'contiguous'} order, got {name} "
                f"{sizes(x)} (B, N, L, H) with {expected.replicated} replicated; deal them out by shard_sequence"
            )


def _check_documents(q: Tensor, k: Tensor, extras: Extras, expected: Expected) -> None:
    kinds = {"ids": extras.document_ids, "cu_seqlens": extras.cu_seqlens}
    given = {kind: documents for kind, documents in kinds.items() if documents is not None}
    if not given:
        if expected.order == BY_DOCUMENT:
            raise ValueError(f"order={BY_DOCUMENT!r} needs document_ids or cu_seqlens at every call")
        return
    if len(given) > 1:
        raise ValueError("documents are given twice: pass document_ids or cu_seqlens")
    check_order_is_told(expected.order, math.prod(expected.axes))
    if not expected.documents or q.shape[2] != k.shape[2]:
        raise ValueError("documents go with causal and window masks, not with a prefix, mask_mod, replicated tokens "
                         "or keys of another length")  # fmt: skip
    length = expected.lengths[0] if expected.lengths else q.shape[2] * math.prod(expected.axes)
    if isinstance(q, DTensor):
        length = q.shape[2]
        if expected.order == BY_DOCUMENT and length % math.prod(expected.axes):
            raise ValueError(
                f"in order={BY_DOCUMENT!r} the shards of {length} tokens are none of a DTensor's: pad it to a multiple "
                f"of {math.prod(expected.axes)}, or pass local tensors and length"
            )
    for kind, documents in given.items():
        check_documents(documents, kind, q.shape[0], length)


def _check_sinks(q: Tensor, sinks: Tensor | None) -> None:
    if sinks is None:
        return
    if not isinstance(sinks, Tensor):
        raise TypeError(f"sinks must be a tensor, got {type(sinks).__name__}")
    if isinstance(sinks, DTensor) != isinstance(q, DTensor):
        raise TypeError("sinks must be a DTensor where q is, and a plain tensor where q is")
    if sinks.device != q.device:
        raise ValueError(f"sinks must be on q's device {q.device}, got {sinks.device}")
    if tuple(sinks.shape) != (q.shape[1],) or not sinks.is_floating_point():
        raise ValueError(
            f"sinks must be a floating point tensor of one logit per query head ({sizes(q)[1]},), got "
            f"{sizes(sinks)} {sinks.dtype}"
        )


@torch.library.custom_op(
    "wallfacer_dt::refuse",
    mutates_args=(),
    schema=(
        "(Tensor q, Tensor k, Tensor v, Tensor? document_ids, Tensor? cu_seqlens, Tensor? sinks, Tensor? k_shared, "
        "str error, str mesh, str ulysses, str ring, str team, str device_type, int[] axes, int index, int[] lengths, "
        "int replicated, bool square, bool masked, bool documents, str order, float softcap, str kernel) -> Tensor"
    ),
)
def _refuse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    document_ids: Tensor | None,
    cu_seqlens: Tensor | None,
    sinks: Tensor | None,
    k_shared: Tensor | None,
    error: str,
    *rest: object,
) -> Tensor:
    expected = Expected(*rest)  # pyrefly: ignore[bad-argument-type]
    with refusing_together(expected.mesh):
        if error:
            raise ValueError(error)
        check_call(q, k, v, Extras(document_ids, cu_seqlens, sinks, k_shared), expected)
    raise AssertionError("what a compiler refused, these tensors do not show")


@_refuse.register_fake
def _refuse_fake(q: Tensor, *rest: object) -> Tensor:
    return torch.empty_like(q)


@torch.library.custom_op(
    "wallfacer_dt::refuse_block",
    mutates_args=(),
    schema="(Tensor x, int out_dim, str error, str mesh) -> Tensor",
)
def _refuse_block(x: Tensor, out_dim: int, error: str, mesh: str) -> Tensor:
    with refusing_together(mesh):
        raise ValueError(error)


@_refuse_block.register_fake
def _refuse_block_fake(x: Tensor, out_dim: int, error: str, mesh: str) -> Tensor:
    return x.new_empty((*x.shape[:-1], out_dim))


lowering.keep_order(torch.ops.wallfacer_dt.refuse.default)
lowering.keep_order(torch.ops.wallfacer_dt.refuse_block.default)
