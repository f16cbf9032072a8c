"""Ops on the meta device, whose tensors have a size and no contents: what one makes depends on sizes alone.

torch works most of them out in Python, and slowly (``logaddexp`` takes 3 ms). Here that is done once for some sizes.
For some it even imports its compiler, which takes longer than to plan; what these make is said here, where it is plain.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

_aten = torch.ops.aten
_ELEMENTWISE = frozenset(
    (_aten.sub.Tensor, _aten.mul.Tensor, _aten.div.Tensor, _aten.maximum.default, _aten.neg.default, _aten.eq.Scalar)
)


class _Like(tuple[torch.Size, tuple[int, ...], torch.dtype]):
    """Size, strides and dtype: all that there is of a tensor with a storage of its own, no larger than it has to be."""

    __slots__ = ()

    def make(self) -> Tensor:
        """Another one."""
        size, stride, dtype = self
        return torch.empty_strided(size, stride, dtype=dtype, device="meta")


def call(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """``func(*args, **kwargs)`` of an op."""
    made = None
    if _depends_on_sizes(func) and _are_meta(args, kwargs):
        given = {name: _like(x) for name, x in kwargs.items()}
        made = _made(torch.get_default_dtype(), func, *map(_like, args), **given)
    if made is None:
        return func(*args, **kwargs)
    if func._schema.is_mutable:
        written = kwargs.get("out", args[0])
        # Of the size that it had, it is as it was, having no contents.
        return written if made == _like(written) else func(*args, **kwargs)
    return made.make() if isinstance(made, _Like) else tree_map_only(_Like, _Like.make, made)


@lru_cache(maxsize=4096)
def _depends_on_sizes(func: Any) -> bool:
    """Not views, which are of somebody's storage, nor what may change a tensor's size."""
    if func._schema.is_mutable:
        return func is _aten.cat.out or (torch.Tag.pointwise in func.tags and len(func._schema.returns) == 1)
    return func.namespace == "aten" and not any(one.alias_info for one in func._schema.returns)


def _are_meta(args: tuple, kwargs: dict[str, Any]) -> bool:
    is_any = False
    for given in (*args, *kwargs.values()):
        for x in given if isinstance(given, list) else (given,):
            if isinstance(x, Tensor):
                if type(x) is not Tensor or not x.is_meta:
                    return False
                is_any = True
    return is_any


def _like(x: Any) -> Any:
    """An argument as it may be a key."""
    if isinstance(x, Tensor):
        return _Like((x.shape, x.stride(), x.dtype))
    return tuple(map(_like, x)) if isinstance(x, list | tuple) else x


@lru_cache(maxsize=4096, typed=True)  # by type, since 1, 1.0 and True are equal
def _made(_default: torch.dtype, func: Any, *args: Any, **kwargs: Any) -> Any:
    """What an op makes of tensors like these; None if that does not say all."""
    args, kwargs = (tree_map_only(_Like, _Like.make, some) for some in (args, kwargs))
    result = _kernel(func)(*args, **kwargs)
    made = tree_map_only(Tensor, _like, result)
    own, given = ({some._cdata for some in _all_storages(tensors)} for tensors in (result, (args, kwargs)))
    if own & given and not func._schema.is_mutable:  # a view, whatever its schema says
        return None
    return made if _storages(result) == _storages(tree_map_only(_Like, _Like.make, made)) else None


def _storages(made: Any) -> list[tuple[int, torch.device, int]]:
    """Of which number each tensor's storage is, where, and how large."""
    storages = _all_storages(made)
    keys = [some._cdata for some in storages]
    return [(keys.index(key), some.device, some.nbytes()) for key, some in zip(keys, storages, strict=True)]


def _all_storages(made: Any) -> list[torch.UntypedStorage]:
    return [x.untyped_storage() for x in tree_leaves(made) if isinstance(x, Tensor)]


def _kernel(func: Any) -> Callable[..., Any]:
    """An op, or what makes as much without torch's compiler."""
    known = {_aten.cat.default: _cat, _aten.cat.out: _cat, _aten.linalg_vector_norm.default: _norm}
    is_elementwise = func in _ELEMENTWISE or func._schema.is_mutable
    return known.get(func, partial(_elementwise, func) if is_elementwise else func)


def _elementwise(func: Any, *args: Any, **kwargs: Any) -> Tensor:
    out = kwargs.get("out")
    first, *others = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x is not out]
    shape = torch.broadcast_shapes(first.shape, *[x.shape for x in others])
    if func._schema.is_mutable:
        written = first if out is None else out
        return written if written.shape == shape else func(*args, **kwargs)
    # The first decides, and others only between dims of equal strides.
    are_unlike = any((x.shape, x.stride()) != (shape, first.stride()) for x in others)
    is_decided = not are_unlike or (first.shape == shape and len(set(first.stride())) == first.dim())
    if not (is_decided and _is_plain(first)):
        return func(*args, **kwargs)
    args, kwargs = (tree_map_only(Tensor, _one_element, some) for some in (args, kwargs))
    return torch.empty_strided(shape, first.stride(), dtype=func(*args, **kwargs).dtype, device="meta")


def _one_element(x: Tensor) -> Tensor:
    return torch.ones((1,) * x.dim(), dtype=x.dtype)


def _cat(tensors: Sequence[Tensor], dim: int = 0, *, out: Tensor | None = None) -> Tensor:
    first, shape = tensors[0], list(tensors[0].shape)
    shape[dim] = sum([x.shape[dim] for x in tensors])
    if out is not None and list(out.shape) == shape:
        return out
    # Its channels may be last, which is dim 1.
    is_in_doubt = first.dim() > 3 and first.stride(-1) >= first.stride(1)
    if is_in_doubt or out is not None or len({(x.dim(), x.dtype) for x in tensors}) > 1:
        return torch.cat(list(tensors), dim, out=out)
    return first.new_empty(shape)


def _norm(x: Tensor, order: float, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Tensor:
    if not _is_plain(x):
        return _aten.linalg_vector_norm.default(x, order, dim, keepdim, **kwargs)
    return _aten.sum.dim_IntList(x, dim, keepdim, **kwargs)


def _is_plain(x: Tensor) -> bool:
    """Whether a tensor is laid out by heads or by tokens, without a doubt which, as there may be of single ones."""
    y = x if x.is_contiguous() or x.dim() < 3 else x.transpose(1, 2)
    is_either = y is x or x.stride(1) > 1
    return is_either and x.numel() > 0 and y.stride() == torch.empty(y.shape, device="meta").stride()
