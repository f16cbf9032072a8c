"""How long a sequence, and of how many heads, is tried: short, and long enough to show what a style is told."""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.nn.attention.flex_attention import BlockMask

from wallfacer_dt.options import AttentionOptions

# Windows of 1024 tokens and less are seen in sequences of this length; of what a style is told, up to the longest.
_LENGTH, _LONGEST = 1152, 4352


class Sizes(NamedTuple):
    """Of the tensors that are tried; keys are as many as queries but in cross attention.

    Attributes:
        length: queries.
        kv_length: keys.
        heads: of the queries.
        kv_heads: of the keys.
        head_dim: H.
        dtype: in which they are given.
        computed: in which, under the caller's autocast, they are computed.
    """

    length: int
    kv_length: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    computed: torch.dtype


def shortened(told: AttentionOptions, length: int | None, size: int) -> tuple[AttentionOptions, tuple[int, int]]:
    """A style's options for a short sequence of its kind on ``size`` ranks, and how many queries and keys that has.

    Whoever asks for a ``length`` gets it.
    """
    tried = kv_tried = length or _short(told.length, told, size)
    if told.kv_length not in (None, told.length):
        kv_tried = _short(told.kv_length, told, size)
    even = told.length is None and tried % (2 * size) == 0
    kv_stated = None if told.kv_length is None else kv_tried
    return replace(told, length=None if even else tried, kv_length=kv_stated), (tried, kv_tried)


def _short(length: int | None, told: AttentionOptions, size: int) -> int:
    """How long a sequence to try: longer than the style's windows, and as uneven on ``size`` ranks as ``length``."""
    if isinstance(told.mask_mod, BlockMask):
        of_mask = told.mask_mod.shape[-2]
        if of_mask > 4 * _LONGEST:
            raise ValueError(
                f"a BlockMask is of one length, and {of_mask} tokens are too many to try a module out on: give the "
                "style check=False, and check_equivalence a style with a shorter mask"
            )
        return of_mask
    reach = sum(side for side in told.window_size or () if side is not None and side > 0)
    long = min(max(_LENGTH, told.prefix_length + 128, reach + 128), _LONGEST)
    long = -(-long // (2 * size)) * 2 * size
    return long if length is None else min(length, long + length % (2 * size))


def heads_to_try(asked: tuple[int, int] | None, told: AttentionOptions, ulysses: int) -> tuple[tuple[int, int], ...]:
    """Heads of q and of k and v, in the order in which they are tried; a rank of ``cp_ulysses`` has one at least."""
    if asked is not None:
        return (asked,)
    _, heads = mask_shape(told.mask_mod)
    if heads > 1:
        return ((heads, heads),)
    heads = max(4, ulysses + ulysses % 2)
    return ((heads, heads // 2), (heads, heads))


def mask_shape(mask: Any) -> tuple[int, int]:
    """Batch and heads that a mask is of."""
    return (mask.shape[0], mask.shape[1]) if isinstance(mask, BlockMask) else (1, 1)
