"""Bands as flash attention's CUDA kernels take them: windows that are aligned at the bottom right corner.

Traps of FlashAttention-2's, torch's copy of it included (csrc/flash_attn/flash_api.cpp, 2.8.3): a bound at or beyond
the number of keys counts as none, and beside a bound on the left none on the right is the number of keys; both are
wrong for the first rows where there are more rows than keys (Dao-AILab/flash-attention issue 895). Rows are loaded 16
bytes at a time, from wherever they start. A row that sees no key has lse +inf, as has one whose scores are NaN; in
FlashAttention-3 and -4 both have -inf.
"""

from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from wallfacer_dt.kernels.block import Band, Ragged
from wallfacer_dt.kernels.merge import accumulation_dtype
from wallfacer_dt.kernels.visible import finite

_ALIGNMENT = 16  # bytes


class Window(NamedTuple):
    """Rows of a block, each of which sees a key, and which they see.

    Attributes:
        start: the first query.
        stop: the one after the last.
        columns: the keys to give; those after them are seen by no query.
        left: query t sees key s only if s >= t + columns - stop - left. -1: no bound.
        right: query t sees key s only if s <= t + columns - stop + right. -1: no bound.
    """

    start: int
    stop: int
    columns: int
    left: int
    right: int

    @property
    def is_causal(self) -> bool:
        """Whether it is causal attention, of a block of queries at the end of the keys."""
        return (self.left, self.right) == (-1, 0)


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


class Forward(Protocol):
    """A kernel's forward on (B, L, N, H), or on segments (B * L, N, H)."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, window: Window | Ragged) -> tuple[Tensor, Tensor]:
        """Return out (B, L, N, Hv) and lse (B, N, L); of segments (B * L, N, Hv) and (N, B * L)."""
        ...


class Backward(Protocol):
    """A kernel's backward, with the whole rows' out and lse, contiguous."""

    def __call__(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, window: Window | Ragged
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq, dk and dv."""
        ...


def forward_in_windows(
    run: Forward, q: Tensor, k: Tensor, v: Tensor, band: Band, *, one_width: bool = True
) -> tuple[Tensor, Tensor]:
    """A block's forward by a kernel that takes windows, and head dims in multiples of 8.

    Args:
        run: the kernel.
        q: queries (B, N, Lq, H).
        k: keys (B, Nkv, Lk, H).
        v: values (B, Nkv, Lk, Hv).
        band: which keys a row sees.
        one_width: v must have the head dim of q.

    Returns:
        As :class:`wallfacer_dt.kernels.block.Forward`.
    """
    windows = flash_windows(band, q.shape[2], k.shape[2])
    parts = []
    for window in windows:
        q_BLNH, k_BLNH, v_BLNH = _operands(window, one_width, rows=(q,), columns=(k, v))
        out_BLNH, lse = run(q_BLNH, k_BLNH, v_BLNH, window)
        # Every row sees a key; an infinite sum is one of scores that are not numbers.
        parts.append((cropped(out_BLNH.transpose(1, 2), v), lse.masked_fill(lse.isinf(), torch.nan)))
    if [(w.start, w.stop) for w in windows] == [(0, q.shape[2])]:
        return parts[0]
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
    lse = q.new_full(q.shape[:-1], -torch.inf, dtype=accumulation_dtype(q.dtype))
    for window, (part_out, part_lse) in zip(windows, parts, strict=True):
        out[:, :, window.start : window.stop] = part_out
        lse[:, :, window.start : window.stop] = part_lse
    return out, lse


def backward_in_windows(
    run: Backward,
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    band: Band,
    *,
    one_width: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """A block's backward by a kernel that takes windows.

    Args:
        run: the kernel.
        grad_out: gradient of the rows' output (B, N, Lq, Hv).
        q: queries (B, N, Lq, H).
        k: keys (B, Nkv, Lk, H).
        v: values (B, Nkv, Lk, Hv).
        out: of the whole rows (B, N, Lq, Hv).
        lse: of the whole rows (B, N, Lq).
        band: which keys a row sees.
        one_width: v must have the head dim of q.

    Returns:
        As :class:`wallfacer_dt.kernels.block.Backward`.
    """
    windows = flash_windows(band, q.shape[2], k.shape[2])
    parts = []
    for window in windows:
        operands = _operands(window, one_width, rows=(grad_out, q, out), columns=(k, v))
        go_BLNH, q_BLNH, out_BLNH, k_BLNH, v_BLNH = operands
        known = finite(lse[:, :, window.start : window.stop]).contiguous()
        grads = run(go_BLNH, q_BLNH, k_BLNH, v_BLNH, out_BLNH, known, window)
        parts.append([cropped(x.transpose(1, 2), like) for x, like in zip(grads, (q, k, v), strict=True)])
    if [(w.start, w.stop, w.columns) for w in windows] == [(0, q.shape[2], k.shape[2])]:
        dq, dk, dv = parts[0]
        return dq, dk, dv
    wide = accumulation_dtype(q.dtype) if len(windows) > 1 else q.dtype  # several are added up
    dq, dk, dv = (x.new_zeros(x.shape, dtype=wide) for x in (q, k, v))
    for window, grads in zip(windows, parts, strict=True):
        dq[:, :, window.start : window.stop] += grads[0]
        dk[:, :, : window.columns] += grads[1]
        dv[:, :, : window.columns] += grads[2]
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def forward_of_segments(
    run: Forward, q: Tensor, k: Tensor, v: Tensor, ragged: Ragged, *, one_width: bool = True
) -> tuple[Tensor, Tensor]:
    """The forward of many segments by a kernel that takes them.

    Args:
        run: the kernel.
        q: queries (B, N, Lq, H).
        k: keys (B, Nkv, Lk, H).
        v: values (B, Nkv, Lk, Hv).
        ragged: the segments.
        one_width: v must have the head dim of q.

    Returns:
        As :class:`wallfacer_dt.kernels.block.RaggedForward`.
    """
    batch = q.shape[0]
    q_TNH, k_TNH, v_TNH = _flat([q, k, v], one_width)
    out_TNH, lse_NT = run(q_TNH, k_TNH, v_TNH, ragged)
    out = cropped(out_TNH.unflatten(0, (batch, -1)).transpose(1, 2), v)
    lse = lse_NT.unflatten(1, (batch, -1)).transpose(0, 1)
    lse = lse.masked_fill(lse.isinf(), torch.nan)
    if ragged.blind is not None:
        out, lse = out.masked_fill(ragged.blind.unsqueeze(-1), 0), lse.masked_fill(ragged.blind, -torch.inf)
    return out, lse


def backward_of_segments(
    run: Backward,
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    ragged: Ragged,
    *,
    one_width: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """The backward of many segments by a kernel that takes them.

    Args:
        run: the kernel.
        grad_out: gradient of the rows' output (B, N, Lq, Hv).
        q: queries (B, N, Lq, H).
        k: keys (B, Nkv, Lk, H).
        v: values (B, Nkv, Lk, Hv).
        out: of the whole rows (B, N, Lq, Hv).
        lse: of the whole rows (B, N, Lq).
        ragged: the segments.
        one_width: v must have the head dim of q.

    Returns:
        As :class:`wallfacer_dt.kernels.block.RaggedBackward`.
    """
    known = finite(lse).transpose(0, 1).flatten(1).contiguous()
    go_TNH, q_TNH, k_TNH, v_TNH, out_TNH = _flat([grad_out, q, k, v, out], one_width)
    grads = run(go_TNH, q_TNH, k_TNH, v_TNH, out_TNH, known, ragged)
    parts = []
    for x, like, nothing in zip(grads, (q, k, v), (ragged.blind, ragged.unseen, ragged.unseen), strict=True):
        grad = cropped(x.unflatten(0, (q.shape[0], -1)).transpose(1, 2), like)
        parts.append(grad if nothing is None else grad.masked_fill(nothing.unsqueeze(-1), 0))
    return parts[0], parts[1], parts[2]


def _flat(tensors: list[Tensor], one_width: bool) -> list[Tensor]:
    """The tensors (B, N, L, H) as (B * L, N, H), otherwise as :func:`_operands` makes them."""
    widths = _widths(tensors, one_width)
    return [_loadable(x.transpose(1, 2).flatten(0, 1), width) for x, width in zip(tensors, widths, strict=True)]


def _widths(tensors: list[Tensor], one_width: bool) -> list[int]:
    """Head dims that kernels take: multiples of 8, perhaps one for all."""
    widest = max(x.shape[-1] for x in tensors)
    widths = [widest if one_width else x.shape[-1] for x in tensors]
    return [width + -width % 8 for width in widths]


def _operands(window: Window, one_width: bool, rows: tuple[Tensor, ...], columns: tuple[Tensor, ...]) -> list[Tensor]:
    """The tensors (B, N, L, H) cut to a window, as (B, L, N, H) with H a multiple of 8, perhaps one for all."""
    cut = [x[:, :, window.start : window.stop] for x in rows] + [x[:, :, : window.columns] for x in columns]
    return [_loadable(x, width).transpose(1, 2) for x, width in zip(cut, _widths(cut, one_width), strict=True)]


def _loadable(x: Tensor, width: int) -> Tensor:
    """x with a head dim of ``width``, in memory where every row starts at a multiple of 16 bytes and is contiguous."""
    missing = width - x.shape[-1]
    x = F.pad(x, (0, missing)) if missing else x
    starts = [x.storage_offset(), *(step for step, n in zip(x.stride()[:-1], x.shape, strict=False) if n > 1)]
    is_loadable = x.stride(-1) == 1 and all(start * x.itemsize % _ALIGNMENT == 0 for start in starts)
    # Not contiguous(), which keeps what is so already, wherever it starts.
    return x if is_loadable else x.clone(memory_format=torch.contiguous_format)


def cropped(x: Tensor, like: Tensor) -> Tensor:
    """x with the head dim of another tensor, which is not larger."""
    return x if x.shape[-1] == like.shape[-1] else x[..., : like.shape[-1]]
