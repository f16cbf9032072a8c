"""What is tried, drawn alike on every rank, and what comes of it.

Note [Probabilities from one backward]
Where the gradient of the output is 1 in channel c of query i and 0 elsewhere, the gradient of the values has in its
channel c the probabilities with which i sees each key. With another query in every channel one backward gives as many
rows of the probabilities, whatever the module is made of; they are 0 exactly where a query does not see a key.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from wallfacer_dt.equivalence.sizes import Sizes, mask_shape
from wallfacer_dt.options import AttentionOptions

_SEED = 0
_CONSTANT = 4.0  # every key's first channel, exact in all dtypes


class Inputs(NamedTuple):
    """The whole sequence in (B, N, L, H), on every rank.

    Attributes:
        q: queries.
        k: keys.
        v: values.
        grad_out: gradient of the output.
        probe: another one, that shows probabilities.
        queries: whose probabilities, by channel; channel c is of head c // (channels / heads).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    probe: Tensor
    queries: tuple[int, ...]


class Results(NamedTuple):
    """On the CPU, in (B, N, L, H); without gradients an output alone.

    Attributes:
        out: output.
        dq: gradient of the queries.
        dk: gradient of the keys.
        dv: gradient of the values.
        seen: the probe's gradient of the values, see Note [Probabilities from one backward].
    """

    out: Tensor
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    seen: Tensor | None = None


def draw(told: AttentionOptions, sizes: Sizes, device_type: str, shared: Tensor | None) -> Inputs:
    """The same tensors on every rank, whatever its device."""
    generator = torch.Generator().manual_seed(_SEED)
    key_dim = sizes.head_dim + (0 if shared is None else shared.shape[-1])
    length, kv_length = sizes.length + told.replicated, sizes.kv_length + told.replicated
    batch, _ = mask_shape(told.mask_mod)

    def normal(heads: int, length: int, dim: int) -> Tensor:
        return torch.randn(batch, heads, length, dim, generator=generator, dtype=torch.float32)

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
    q[..., 0] = (torch.arange(q.shape[2]) % 3 - 1) * (level / _CONSTANT / scale)
    k[..., 0] = _CONSTANT


def _spread(length: int, count: int) -> tuple[int, ...]:
    """Distinct queries from the first to the last where there are so many, neighbours far apart."""
    step = 7 if count % 7 else 5
    return tuple((c * step % count) * (length - 1) // max(1, count - 1) for c in range(count))
