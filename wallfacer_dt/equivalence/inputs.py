"""What is tried, drawn alike on every rank: short, and long enough to show what a style is told; and its results.

Note [Probabilities from one backward]
Where the gradient of the output is 1 in channel c of query i and 0 elsewhere, the gradient of the values has in its
channel c the probabilities with which i sees each key. With another query in every channel one backward gives as many
rows of the probabilities, whatever the module is made of; they are 0 exactly where a query does not see a key.
"""

import itertools
import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from wallfacer_dt.comparison import comparable
from wallfacer_dt.options import AttentionOptions

# Windows of 1024 tokens and less are seen in sequences of this length; of what a style is told, up to the longest.
_LENGTH, _LONGEST = 1152, 4352
_SEED = 0
_CONSTANT = 4.0  # every key's first channel, exact in all dtypes
# What is drawn is of size 1. Channels that are smaller everywhere are what rounding has left of 0, as the gradient of
# the queries is where each sees one key.
_SMALLEST = 1e-2


class Sizes(NamedTuple):
    """Of the tensors that are tried; keys are as many as queries but in cross attention."""

    length: int
    kv_length: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype  # in which they are given
    computed: torch.dtype  # in which, under the caller's autocast, they are computed
    batch: int = 1


class Inputs(NamedTuple):
    """The whole sequence in (B, N, L, H), on every rank."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    probe: Tensor  # another gradient of the output, that shows probabilities
    queries: tuple[int, ...]  # whose, by channel; channel c is of head c // (channels / heads)


class Results(NamedTuple):
    """On the CPU, in (B, N, L, H); without gradients an output alone."""

    out: Tensor
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    seen: Tensor | None = None  # the probe's gradient of the values, see Note [Probabilities from one backward]


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
        of_mask = told.mask_mod.shape[-2] - told.replicated
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


def draw(told: AttentionOptions, sizes: Sizes, device_type: str, shared: Tensor | None) -> Inputs:
    """The same tensors on every rank, whatever its device."""
    generator = torch.Generator().manual_seed(_SEED)
    key_dim = sizes.head_dim + (0 if shared is None else shared.shape[-1])
    length, kv_length = sizes.length + told.replicated, sizes.kv_length + told.replicated

    def normal(heads: int, length: int, dim: int) -> Tensor:
        # Where the generator is, whatever the default device.
        return torch.randn(sizes.batch, heads, length, dim, generator=generator, dtype=torch.float32, device="cpu")

    q, k = normal(sizes.heads, length, key_dim), normal(sizes.kv_heads, kv_length, sizes.head_dim)
    v, grad_out = normal(sizes.kv_heads, kv_length, sizes.head_dim), normal(sizes.heads, length, sizes.head_dim)
    _spread_scores_(q, k, told.scale or key_dim**-0.5, sizes.computed)
    queries = _spread(length, sizes.head_dim)
    probe = torch.zeros_like(grad_out)
    for channel, query in enumerate(queries):
        probe[0, head_of(channel, sizes), query, channel] = 1
    q, k, v, grad_out, probe = (x.to(device_type, sizes.dtype) for x in (q, k, v, grad_out, probe))
    return Inputs(q, k, v, grad_out, probe, queries)


def head_of(channel: int, sizes: Sizes) -> int:
    """The query head whose probabilities a channel of the probe shows."""
    return channel * sizes.heads // sizes.head_dim if sizes.heads <= sizes.head_dim else channel


def laid_out(x: Tensor, layout: str) -> Tensor:
    """(B, N, L, H) in a layout, or back."""
    return x.transpose(1, 2) if layout == "BLNH" else x


def _spread_scores_(q: Tensor, k: Tensor, scale: float, dtype: torch.dtype) -> None:
    """Make the level of scores differ from query to query: sinks show where all are low, a soft cap where high."""
    spread, level = (2.0, 16.0) if dtype in (torch.float32, torch.float64) else (1.5, 6.0)
    q *= spread / scale / (q.shape[-1] - 1) ** 0.5
    q[..., 0] = (torch.arange(q.shape[2], device=q.device) % 3 - 1) * (level / _CONSTANT / scale)
    k[..., 0] = _CONSTANT


def _spread(length: int, count: int) -> tuple[int, ...]:
    """Distinct queries from the first to the last where there are so many, neighbours far apart."""
    step = next(step for step in itertools.count(7) if math.gcd(step, count) == 1)
    return tuple((c * step % count) * (length - 1) // max(1, count - 1) for c in range(count))


def difference(
    name: str, ours: Tensor, theirs: Tensor, rtol: float, who: tuple[str, str] = ("in the module", "under the style")
) -> str:
    """In words, by position the first entry of (B, N, L, H) that differs; empty if none does. All must be finite."""
    ours, theirs = comparable(name, ours, theirs, who)
    size = torch.maximum(ours.abs(), theirs.abs()).amax((0, 1, 2))
    size = size.clamp_min(size.median()).clamp_min(_SMALLEST)
    relative = (ours - theirs).abs() / size  # no comparison: of what is comparable, by channel
    wrong = relative > rtol
    if not wrong.any():
        return ""
    position = int(wrong.any(3).any(1).any(0).int().argmax())
    batch, head, channel = wrong[:, :, position].nonzero()[0].tolist()
    there = (batch, head, position, channel)
    return (
        f"batch {batch}, head {head}, position {position}: {float(ours[there]):.3g} {who[0]}, "
        f"{float(theirs[there]):.3g} {who[1]} (largest relative difference {float(relative.max()):.1g})"
    )


def tolerance(dtype: torch.dtype, device_type: str) -> float:
    """By how much two results may differ, relative to the largest entry of each channel."""
    if dtype == torch.float64:
        return 1e-5
    if dtype == torch.float32:
        return 1e-3 if device_type == "cpu" else 2e-2
    return 8e-2
