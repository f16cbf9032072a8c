"""Ops on the meta device, whose tensors have a size and no contents: what one makes depends on sizes alone.

torch works most of them out in Python, and slowly (``logaddexp`` takes 3 ms). Here that is done once for some sizes.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only


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
        return torch.Tag.pointwise in func.tags and len(func._schema.returns) == 1
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
    result = func(*args, **kwargs)
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
