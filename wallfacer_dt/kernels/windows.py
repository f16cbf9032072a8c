"""Bands as flash attention's CUDA kernels take them: windows that are aligned at the bottom right corner.

Traps of FlashAttention-2's, torch's copy of it included (csrc/flash_attn/flash_api.cpp, 2.8.3): a bound at or beyond
the number of keys counts as none, and beside a bound on the left none on the right is the number of keys; both are
wrong for the first rows where there are more rows than keys (Dao-AILab/flash-attention issue 895). Rows are loaded 16
bytes at a time, from wherever they start. A row that sees no key has lse +inf, as has one whose scores are NaN; in
FlashAttention-3 and -4 both have -inf.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wallfacer_dt.kernels.block import Band, Gradients, How, Ragged, refuse
from wallfacer_dt.kernels.merge import accumulation_dtype
from wallfacer_dt.kernels.visible import finite
from wallfacer_dt.rows import padded

_ALIGNMENT = 16  # bytes


class Window(NamedTuple):
    """Rows of a block, each of which sees a key, and which they see."""

    start: int  # the first query
    stop: int  # the one after the last
    columns: int  # the keys to give; those after them are seen by no query
    left: int  # query t sees key s only if s >= t + columns - stop - left. -1: no bound.
    right: int  # query t sees key s only if s <= t + columns - stop + right. -1: no bound.


def flash_windows(band: Band, rows: int, columns: int) -> tuple[Window, ...]:
    """The windows of a band over ``rows`` queries and ``columns`` keys: mostly one; none where nothing is seen.

    >>> flash_windows(Band(-2, 0), 8, 8)
    (Window(start=0, stop=8, columns=8, left=2, right=0),)
    >>> flash_windows(Band(3, None), 8, 8)
    (Window(start=0, stop=5, columns=8, left=0, right=-1),)
    """
    low, high = band
    start = 0 if high is None else max(0, -high)
    stop = rows if low is None else min(rows, columns - low)
    if start >= stop or (low is not None and high is not None and low > high):
        return ()
    cuts = {start, stop}
    if stop - start > columns + 1:
        # Where a bound comes to hide something, and where it ceases to: then no window has more rows than keys and a
        # bound that these kernels would take for none.
        if low is not None:
            cuts.add(min(max(start, -low), stop))
        if high is not None:
            cuts.add(min(max(start, columns - 1 - high), stop))
    return tuple(_window(band, *piece, columns) for piece in pairwise(sorted(cuts)))


def _window(band: Band, start: int, stop: int, columns: int) -> Window:
    low, high = band
    if high is not None:
        columns = min(columns, stop + high)
    corner = columns - stop
    left = -1 if low is None or stop - 1 + low <= 0 else corner - low
    right = -1 if high is None or start + high >= columns - 1 else high - corner
    return Window(start, stop, columns, left, right)


class Launch(NamedTuple):
    """One launch of a kernel: how keys are bounded, and what becomes of scores."""

    left: int  # see `Window`
    right: int
    scale: float
    softcap: float  # 0.0 for none
    # Of segments cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k, see `Ragged`.
    lengths: tuple[Tensor, Tensor, int, int] | None = None

    @property
    def is_causal(self) -> bool:
        """Whether it is causal attention, of queries at the end of the keys."""
        return (self.left, self.right) == (-1, 0)


Widths = Callable[[Tensor, Tensor, Tensor], tuple[int, int]]
"""From q, k and v the head dims that a kernel is given, of q and k, and of v."""


def one_width(q: Tensor, _: Tensor, v: Tensor) -> tuple[int, int]:
    """The larger of the two head dims, in a multiple of 8."""
    widest = rounded(max(q.shape[-1], v.shape[-1]))
    return widest, widest


@dataclass(frozen=True)
class Windowed:
    """A kernel of windows and segments: what it computes of blocks."""

    name: str
    functions: Callable[[], Any]  # the module that has them, when it is called
    # From them, q, k, v (B, L, N, H) and a launch to out (B, L, N, Hv) and lse (B, N, L); of segments from
    # (B * L, N, H) to (B * L, N, Hv) and (N, B * L).
    run_forward: Callable[..., tuple[Tensor, Tensor]]
    # From them, grad_out, q, k, v, the whole rows' out and lse, contiguous, and a launch to dq, dk, dv.
    run_backward: Callable[..., Gradients]
    widths: Widths = one_width
    has_softcap: bool = True

    def forward(self, q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, Tensor]:
        """See :class:`wallfacer_dt.kernels.block.Forward`."""
        refuse(self.name, how, mask=True, softcap=not self.has_softcap)
        if isinstance(how.seen, Ragged):
            return self._launched(how.seen, how, q, k, v)
        windows = flash_windows(how.seen, q.shape[2], k.shape[2])
        parts = [self._launched(window, how, *_cut(window, q, k, v)) for window in windows]
        if [(w.start, w.stop) for w in windows] == [(0, q.shape[2])]:
            return parts[0]
        out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
        lse = q.new_full(q.shape[:-1], -torch.inf, dtype=accumulation_dtype(q.dtype))
        for window, (part_out, part_lse) in zip(windows, parts, strict=True):
            out[:, :, window.start : window.stop] = part_out
            lse[:, :, window.start : window.stop] = part_lse
        return out, lse

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, how: How
    ) -> Gradients:
        """See :class:`wallfacer_dt.kernels.block.Backward`."""
        refuse(self.name, how, mask=True, softcap=not self.has_softcap)
        if isinstance(how.seen, Ragged):
            return self._launched_back(how.seen, how, (q, k, v), grad_out, out, lse)
        windows = flash_windows(how.seen, q.shape[2], k.shape[2])
        parts = []
        for window in windows:
            rows = [x[:, :, window.start : window.stop] for x in (grad_out, out, lse)]
            parts.append(self._launched_back(window, how, _cut(window, q, k, v), *rows))
        if [(w.start, w.stop, w.columns) for w in windows] == [(0, q.shape[2], k.shape[2])]:
            return parts[0]
        wide = accumulation_dtype(q.dtype) if len(windows) > 1 else q.dtype  # several are added up
        dq, dk, dv = (x.new_zeros(x.shape, dtype=wide) for x in (q, k, v))
        for window, grads in zip(windows, parts, strict=True):
            dq[:, :, window.start : window.stop] += grads[0]
            dk[:, :, : window.columns] += grads[1]
            dv[:, :, : window.columns] += grads[2]
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)

    def _launched(self, seen: Window | Ragged, how: How, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """out and lse of one launch."""
        out, lse = self.run_forward(self.functions(), *self._loaded(seen, q, k, v), _launch(seen, how))
        if isinstance(seen, Ragged):
            lse = lse.unflatten(1, (q.shape[0], -1)).transpose(0, 1)
        # Rows see a key, but masked ones; an infinite sum is one of scores that are not numbers.
        out, lse = _by_heads(out, v), lse.masked_fill(lse.isinf(), torch.nan)
        if isinstance(seen, Ragged) and seen.masked_rows is not None:
            out = out.masked_fill(seen.masked_rows.unsqueeze(-1), 0)
            lse = lse.masked_fill(seen.masked_rows, -torch.inf)
        return out, lse

    def _launched_back(self, seen: Window | Ragged, how: How, qkv: tuple[Tensor, ...], *rows: Tensor) -> Gradients:
        """Gradients of one launch; ``rows``: grad_out, out and lse."""
        *known, lse = rows
        lse, masked = finite(lse), (None, None, None)
        if isinstance(seen, Ragged):
            lse, masked = lse.transpose(0, 1).flatten(1), (seen.masked_rows, seen.masked_keys, seen.masked_keys)
        *operands, grad_out, out = self._loaded(seen, *qkv, *known)
        grads = self.run_backward(self.functions(), grad_out, *operands, out, lse.contiguous(), _launch(seen, how))
        parts = []
        for x, like, nothing in zip(grads, qkv, masked, strict=True):
            grad = _by_heads(x, like)
            parts.append(grad if nothing is None else grad.masked_fill(nothing.unsqueeze(-1), 0))
        return parts[0], parts[1], parts[2]

    def _loaded(self, seen: Window | Ragged, q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> list[Tensor]:
        """As the kernel takes and loads them: by tokens, of segments flat, and others like v in its head dim."""
        width, value_width = self.widths(q, k, v)
        tensors, widths = (q, k, v, *others), (width, width, value_width, *[value_width for _ in others])
        if isinstance(seen, Ragged):
            return loadable([x.transpose(1, 2).flatten(0, 1) for x in tensors], widths)
        return [x.transpose(1, 2) for x in loadable(tensors, widths)]


def _cut(window: Window, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(B, N, L, H) cut to a window."""
    return q[:, :, window.start : window.stop], k[:, :, : window.columns], v[:, :, : window.columns]


def _by_heads(x: Tensor, like: Tensor) -> Tensor:
    """What a kernel gave, (B, L, N, H) or (B * L, N, H), as (B, N, L, H) like another tensor."""
    return cropped((x if x.ndim == 4 else x.unflatten(0, (like.shape[0], -1))).transpose(1, 2), like)


def _launch(seen: Window | Ragged, how: How) -> Launch:
    lengths = seen[:4] if isinstance(seen, Ragged) else None
    return Launch(seen.left, seen.right, how.scale, how.softcap, lengths)


def loadable(tensors: Sequence[Tensor], widths: Sequence[int] = ()) -> list[Tensor]:
    """Tensors in these head dims, or their own in multiples of 8, in memory where kernels can load them.

    Each of their rows starts at a multiple of 16 bytes and is contiguous.
    """
    found = []
    for x, width in zip(tensors, widths or [rounded(x.shape[-1]) for x in tensors], strict=True):
        x = padded(x, x.ndim - 1, width)
        starts = [x.storage_offset(), *(step for step, n in zip(x.stride()[:-1], x.shape, strict=False) if n > 1)]
        is_loadable = x.stride(-1) == 1 and all(start * x.itemsize % _ALIGNMENT == 0 for start in starts)
        # Not contiguous(), which keeps what is so already, wherever it starts.
        found.append(x if is_loadable else x.clone(memory_format=torch.contiguous_format))
    return found


def rounded(width: int, multiple: int = 8) -> int:
    """A head dim rounded up to a multiple."""
    return width + -width % multiple


def cropped(x: Tensor, like: Tensor) -> Tensor:
    """x with the head dim of another tensor, which is not larger."""
    return x if x.shape[-1] == like.shape[-1] else x[..., : like.shape[-1]]
