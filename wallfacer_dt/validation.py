"""What tensors attention accepts; and refusals in a graph, see Note [Refusing together] in ``agreement``."""

from collections.abc import Hashable
from operator import index
from typing import NoReturn

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from wallfacer_dt import sharding
from wallfacer_dt.agreement.agree import refusing_together
from wallfacer_dt.compiler import is_exporting, sizes
from wallfacer_dt.documents import check_documents
from wallfacer_dt.inputs import INPUTS, AttentionInputs
from wallfacer_dt.kernels.block import Need
from wallfacer_dt.kernels.registry import select_kernel
from wallfacer_dt.layout import BY_DOCUMENT
from wallfacer_dt.options import Setting
from wallfacer_dt.order import check_order_is_told
from wallfacer_dt.transforms import check_transforms, has_tangent, is_transformed, operator


def refuse_in_graph(x: Tensor, out_dim: int, error: str, mesh: str) -> Tensor:
    """Put a refusal into the graph that is being traced, of which it comes out as x but for the last dim.

    See Note [Refusing together]. It is said as it was when it was traced: as long as a compiler takes what it says of
    shapes (:func:`wallfacer_dt.compiler.sizes`) for constants, other shapes are another graph.
    """
    if isinstance(x, DTensor):
        local = refuse_in_graph(x.to_local(), out_dim, error, mesh)
        return DTensor.from_local(local, x.device_mesh, x.placements, run_check=False)
    return _operator(x.detach(), out_dim, error, mesh)


def _refuse(_x: Tensor, _out_dim: int, error: str, mesh: str) -> NoReturn:
    with refusing_together(mesh):
        raise ValueError(error)


def _refuse_fake(x: Tensor, out_dim: int, *_: str) -> Tensor:
    return x.new_empty((*x.shape[:-1], out_dim))


_operator = operator("refuse", _refuse, "(Tensor x, int out_dim, str error, str mesh) -> Tensor", _refuse_fake)


def check_call(inputs: AttentionInputs, setting: Setting) -> None:
    """Refuse (TypeError, ValueError, NotImplementedError) tensors that attention cannot be given."""
    _check_each(inputs)
    _check_together(inputs, setting)
    _check_lengths(inputs.q, inputs.k, setting)
    _check_documents(inputs, setting)
    _check_sinks(inputs.q, inputs.sinks)
    # A compiler asks the operator's rule, which checks the same, and kernels are chosen when the operator runs.
    if not torch.compiler.is_compiling():
        sharding.check(inputs, setting.groups)
        masked, softcap = bool(setting.mask_key), setting.options.softcap or 0.0
        select_kernel(setting.options.kernel, Need.of(inputs.q, inputs.v, masked=masked, softcap=softcap))


def kind_of(inputs: AttentionInputs) -> Hashable:
    """All that :func:`check_call` sees of plain tensors, but for what kernels say, whom the operator asks every time.

    None where it looks at more: documents' contents, placements, transforms of torch.func, tangents.
    """
    if inputs.document_ids is not None or inputs.cu_seqlens is not None:
        return None
    kind = []
    for x in inputs[:5]:
        if x is None:
            kind.append(None)
        elif type(x) not in (Tensor, Parameter) or is_transformed(x) or has_tangent(x):
            return None
        else:
            kind += (x.shape, x.dtype, x.device)
    return tuple(kind)


def _check_each(inputs: AttentionInputs) -> None:
    q = inputs.q
    for name, x in zip(INPUTS[:4], inputs, strict=False):
        if x is None and name == "k_shared":
            continue
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
        if isinstance(x, DTensor) != isinstance(q, DTensor):
            raise TypeError(f"q, k and v must all be DTensors or all plain tensors, but q and {name} differ")
        _check_differentiation(name, x)
        # A rank may hold no token of a short sequence.
        if x.ndim != 4 or 0 in (*x.shape[:2], *x.shape[3:]):
            raise ValueError(f"{name} must have shape (B, N, L, H) without empty dims, got {sizes(x)}")


def _check_differentiation(name: str, x: Tensor) -> None:
    """Refuse transforms and tangents that the operator does not have; a compiler would not get this far."""
    if torch.compiler.is_compiling():
        return
    check_transforms(name, x)
    if has_tangent(x):
        raise NotImplementedError(
            f"context-parallel attention has no forward-mode derivative, but {name} has a tangent"
        )


def _check_together(inputs: AttentionInputs, setting: Setting) -> None:
    q, k, v, k_shared = inputs[:4]
    others = inputs.keys

    def shapes() -> str:
        return ", ".join(f"{name} {sizes(x)}" for name, x in zip(INPUTS, (q, *others), strict=False))

    names = "q, k and v" if k_shared is None else "q, k, v and k_shared"
    if any(x.dtype != q.dtype for x in others):
        raise TypeError(f"{names} must have one dtype, got {', '.join(str(x.dtype) for x in (q, *others))}; cast them")
    if q.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"q, k and v must be floating point, got {q.dtype}; cast them")
    if any(x.device != q.device for x in others):
        raise ValueError(f"{names} must be on one device, got {', '.join(str(x.device) for x in (q, *others))}")
    if q.device.type != setting.device_type:
        raise ValueError(f"q, k and v must be on the mesh's device type {setting.device_type!r}, got {q.device}")
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(f"k and v must agree in all but the head dim (B, N, L, H), got {shapes()}")
    if k_shared is not None and tuple(k_shared.shape[:3]) != (k.shape[0], 1, k.shape[2]):
        raise ValueError(f"k_shared must have shape (B, 1, L, Hs), one head for all, got {sizes(k_shared)}")
    head_dim = k.shape[3] + (0 if k_shared is None else k_shared.shape[3])
    if q.shape[0] != k.shape[0] or q.shape[3] != head_dim:
        raise ValueError(
            f"q and k must agree in batch and head dim (B, N, L, H), to which k_shared belongs, got {shapes()}"
        )
    if setting.has_mask and q.shape[2] != k.shape[2]:
        raise ValueError(f"under a mask q, k and v must agree in length, got {shapes()}; cross attention has no mask")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"query heads must be a multiple of key and value heads, got {shapes()}")
    ulysses = setting.place.ulysses
    if q.shape[1] < ulysses:
        raise ValueError(f"cp_ulysses of {ulysses} splits query heads, of which there are only {sizes(q)[1]}")


def _check_lengths(q: Tensor, k: Tensor, setting: Setting) -> None:
    replicated = setting.options.replicated
    if isinstance(q, DTensor):
        if replicated:
            raise ValueError("replicated tokens and a shard are no DTensor: pass local tensors, q.to_local()")
        if setting.lengths and setting.lengths != (q.shape[2], k.shape[2]):
            raise ValueError(
                f"DTensors know their length: leave length={index(setting.lengths[0])} out, got q {sizes(q)} and k "
                f"{sizes(k)} (B, N, L, H)"
            )
        return
    if setting.lengths:
        # A compiler makes symbols of them, with which the operator compares; but a program is exported by each rank.
        if is_exporting() or not torch.compiler.is_compiling():
            setting.check_shards(q.shape, k.shape)
        return
    for name, x in (("q", q), ("k", k)):
        if x.shape[2] - replicated < 1:
            after = f" after {replicated} replicated ones" if replicated else ""
            raise ValueError(
                f"{name} must have tokens of this rank{after}, got {sizes(x)} (B, N, L, H); of a "
                "sequence that does not divide pass the length"
            )


def _check_documents(inputs: AttentionInputs, setting: Setting) -> None:
    q, (kind, documents) = inputs.q, inputs.documents
    if documents is None:
        if setting.order == BY_DOCUMENT:
            raise ValueError(f"order={BY_DOCUMENT!r} needs document_ids or cu_seqlens at every call")
        return
    if inputs.cu_seqlens is not None and kind == "ids":
        raise ValueError("documents are given twice: pass document_ids or cu_seqlens")
    check_order_is_told(setting.order, setting.place.size)
    told = setting.options
    other = setting.mask_key or told.prefix_length or told.replicated or told.kv_length not in (None, told.length)
    if other or q.shape[2] != inputs.k.shape[2]:
        raise ValueError("documents go with causal and window masks, not with a prefix, mask_mod, replicated tokens "
                         "or keys of another length")  # fmt: skip
    length = setting.lengths[0] if setting.lengths else q.shape[2] * setting.place.size
    if isinstance(q, DTensor):
        length = q.shape[2]
        if setting.order == BY_DOCUMENT and length % setting.place.size:
            raise ValueError(
                f"in order={BY_DOCUMENT!r} the shards of {index(length)} tokens are none of a DTensor's: pad it to a "
                f"multiple of {setting.place.size}, or pass local tensors and length"
            )
    check_documents(documents, kind, q.shape[0], length)


def _check_sinks(q: Tensor, sinks: Tensor | None) -> None:
    if sinks is None:
        return
    if not isinstance(sinks, Tensor):
        raise TypeError(f"sinks must be a tensor, got {type(sinks).__name__}")
    if isinstance(sinks, DTensor) != isinstance(q, DTensor):
        raise TypeError("sinks must be a DTensor where q is, and a plain tensor where q is")
    _check_differentiation("sinks", sinks)
    if sinks.device != q.device:
        raise ValueError(f"sinks must be on q's device {q.device}, got {sinks.device}")
    if tuple(sinks.shape) != (q.shape[1],) or not sinks.is_floating_point():
        raise ValueError(
            f"sinks must be a floating point tensor of one logit per query head ({sizes(q)[1]},), got "
            f"{sizes(sinks)} {sinks.dtype}"
        )
