"""Ops on the meta device, whose tensors have a size and no contents: what one makes depends on sizes alone.

torch works most of them out in Python, and slowly (``logaddexp`` takes 3 ms); the first that is elementwise, or joins
tensors, imports torch's compiler, which takes as long as a plan. Here what these make is told by what they are given,
if that lies in memory as it mostly does, and what others make is asked once for some sizes.
"""

import math
from functools import lru_cache
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

_CAT, _CAT_OUT, _COPY = torch.ops.aten.cat.default, torch.ops.aten.cat.out, torch.ops.aten.copy_.default
_ANY = torch.ops.aten.any.dim
_UNTAGGED = _COPY, torch.ops.aten.__and__.Tensor  # elementwise, though torch does not say so
_NORM, _SUM = torch.ops.aten.linalg_vector_norm.default, torch.ops.aten.sum.dim_IntList


class _Like(tuple[torch.Size, tuple[int, ...], torch.dtype]):
    """Size, strides and dtype: all that there is of a tensor with a storage of its own, no larger than it has to be."""

    __slots__ = ()

    def make(self) -> Tensor:
        """Another one."""
        size, stride, dtype = self
        return torch.empty_strided(size, stride, dtype=dtype, device="meta")


def call(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """``func(*args, **kwargs)`` of an op."""
    tensors = _all_meta(args, kwargs)
    if not tensors:
        return func(*args, **kwargs)
    if func._schema.is_mutable:
        written = kwargs.get("out", args[0])
        # Having no contents it is as it was, unless it is given another size.
        size = None
        if _is_elementwise(func):
            operands = tensors[:-1] if "out" in kwargs else tensors
            size = _broadcast(*[x.shape for x in operands])
        elif func is _CAT_OUT:
            size = _sum_of_sizes(tuple(x.shape for x in args[0]), *args[1:])
        return written if size is not None and written.shape == size else func(*args, **kwargs)
    made = None
    if _depends_on_sizes(func):
        made = _made(torch.get_default_dtype(), func, *map(_like, args), **{n: _like(x) for n, x in kwargs.items()})
    if made is None:
        return func(*args, **kwargs)
    return made.make() if isinstance(made, _Like) else tree_map_only(_Like, _Like.make, made)


@lru_cache(maxsize=4096)
def _is_elementwise(func: Any) -> bool:
    returns = [str(one.type) for one in func._schema.returns]
    return func in _UNTAGGED or (torch.Tag.pointwise in func.tags and returns == ["Tensor"])


@lru_cache(maxsize=4096)
def _depends_on_sizes(func: Any) -> bool:
    """Not views, which are of somebody's storage."""
    return func.namespace == "aten" and not any(one.alias_info for one in func._schema.returns)


def _all_meta(args: tuple, kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that are given; none if one of them is no meta tensor."""
    tensors = []
    for given in (*args, *kwargs.values()):
        for x in given if isinstance(given, list) else (given,):
            if isinstance(x, Tensor):
                if type(x) is not Tensor or not x.is_meta:
                    return []
                tensors.append(x)
    return tensors


def _like(x: Any) -> Any:
    """An argument as it may be a key."""
    if isinstance(x, Tensor):
        return _Like((x.shape, x.stride(), x.dtype))
    if isinstance(x, float) and math.isnan(x):
        return math.nan  # always the same one: equal to itself, as a key
    return tuple(map(_like, x)) if isinstance(x, list | tuple) else x


@lru_cache(maxsize=4096, typed=True)  # by type, since 1, 1.0 and True are equal
def _made(_default: torch.dtype, func: Any, *args: Any, **kwargs: Any) -> Any:
    """What an op makes of tensors like these; None if that does not say all."""
    told = _elementwise(func, args, kwargs) if _is_elementwise(func) else _joined(*args) if func is _CAT else None
    if told is not None:
        return told
    args, kwargs = (tree_map_only(_Like, _Like.make, some) for some in (args, kwargs))
    if func is _NORM and len(args) > 2 and args[1] == 2 and args[0].is_floating_point():
        func, args = _SUM, (args[0], *args[2:])  # over the same dims
    if func is _ANY:
        func, args, kwargs = _SUM, (args[0], [args[1]], *args[2:]), {**kwargs, "dtype": torch.bool}
    result = func(*args, **kwargs)
    made = tree_map_only(Tensor, _like, result)
    own, given = ({some._cdata for some in _all_storages(tensors)} for tensors in (result, (args, kwargs)))
    if own & given:  # a view, whatever its schema says
        return None
    return made if _storages(result) == _storages(tree_map_only(_Like, _Like.make, made)) else None


def _elementwise(func: Any, args: tuple, kwargs: dict[str, Any]) -> _Like | None:
    """Of the first tensor's size, into which the others are broadcast, and in its order without gaps; or contiguous."""
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, _Like)]
    size, stride, _ = tensors[0]
    whole = _broadcast(*[x[0] for x in tensors])
    if whole is not None and whole != size and all(x[1] == _contiguous(x[0]) for x in tensors):
        size, stride = whole, _contiguous(whole)
    is_expanded = any(step == 0 and n != 1 for n, step in zip(size, stride, strict=True))
    is_laid_out_otherwise = kwargs.get("memory_format") not in (None, torch.preserve_format)
    if is_expanded or is_laid_out_otherwise or whole != size:
        return None
    args, kwargs = tree_map_only(_Like, lambda x: torch.ones((1,) * len(x[0]), dtype=x[2]), (args, kwargs))
    try:
        dtype = func(*args, **kwargs).dtype
    except RuntimeError:  # what the CPU does not have
        return None
    order = sorted(range(len(size)), key=stride.__getitem__, reverse=True)
    return _Like((size, torch.empty_permuted(size, order, device="meta").stride(), dtype))


def _joined(tensors: tuple[_Like, ...], dim: int = 0) -> _Like | None:
    """Contiguous, as torch joins tensors of which the first does not have channels last."""
    size, stride, dtype = tensors[0]
    has_channels_last = len(size) in (4, 5) and (size[-1] == 1 or stride[-1] != 1)
    whole = _sum_of_sizes(tuple(x[0] for x in tensors), dim)
    if whole is None or has_channels_last or any(x[2] != dtype for x in tensors):
        return None
    return _Like((whole, _contiguous(whole), dtype))


@lru_cache(maxsize=4096)
def _contiguous(size: torch.Size) -> tuple[int, ...]:
    return torch.empty(size, device="meta").stride()


@lru_cache(maxsize=4096)
def _sum_of_sizes(sizes: tuple[torch.Size, ...], dim: int = 0) -> torch.Size | None:
    """In one dim, if others are equal."""
    others, where = {size[:dim] + size[dim:][1:] for size in sizes}, range(len(sizes[0]))
    if len(others) > 1 or len({len(size) for size in sizes}) > 1 or dim not in where:
        return None
    return torch.Size(sum(size[i] for size in sizes) if i == dim else sizes[0][i] for i in where)


@lru_cache(maxsize=4096)
def _broadcast(*sizes: torch.Size) -> torch.Size | None:
    """The size of all together, if they have one."""
    whole = []
    for some in zip_longest(*map(reversed, sizes), fillvalue=1):
        larger = {n for n in some if n != 1}
        if len(larger) > 1:
            return None
        whole.append(larger.pop() if larger else 1)
    return torch.Size(reversed(whole))


def _storages(made: Any) -> list[tuple[int, torch.device, int]]:
    """Of which number each tensor's storage is, where, and how large."""
    storages = _all_storages(made)
    keys = [some._cdata for some in storages]
    return [(keys.index(key), some.device, some.nbytes()) for key, some in zip(keys, storages, strict=True)]


def _all_storages(made: Any) -> list[torch.UntypedStorage]:
    return [x.untyped_storage() for x in tree_leaves(made) if isinstance(x, Tensor)]
