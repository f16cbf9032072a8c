"""Merging as one Triton kernel: out and lse are read once, and written once, where they were or wider elsewhere.

Imported where they are on CUDA. Run on an H200 (Triton 3.6.0) and under Triton's interpreter on the CPU (3.7.1).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_ELEMENTS = 4096  # of a program


@triton.jit
def merge_rows(
    out, lse, more_out, more_lse, to_out, to_lse, heads, length, width, rows,
    out_b, out_n, out_l, lse_b, lse_n, lse_l, more_b, more_n, more_l, more_lse_b, more_lse_n, more_lse_l,
    to_b, to_n, to_l, to_lse_b, to_lse_n, to_lse_l,
    WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Merge ``rows`` rows of (B, N, L); of a row ``width`` elements lie side by side."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    l, n, b = row % length, row // length % heads, row // length // heads
    is_row = row < rows
    mine = tl.load(lse + b * lse_b + n * lse_n + l * lse_l, is_row, other=0.0).to(to_lse.dtype.element_ty)
    theirs = tl.load(more_lse + b * more_lse_b + n * more_lse_n + l * more_lse_l, is_row, other=0.0).to(mine.dtype)
    largest = tl.where(mine > theirs, mine, theirs)
    largest = tl.where(largest == float("-inf"), 0.0, largest)  # of rows that have seen no key
    weight_mine, weight_theirs = tl.exp(mine - largest), tl.exp(theirs - largest)
    total = weight_mine + weight_theirs  # not a number if one of them is none
    tl.store(to_lse + b * to_lse_b + n * to_lse_n + l * to_lse_l, largest + tl.log(total), is_row)
    share = weight_theirs / tl.where(total == 0.0, 1.0, total)
    column = tl.arange(0, WIDTH)
    is_element = is_row[:, None] & (column < width)[None, :]
    at_out = out + (b * out_b + n * out_n + l * out_l)[:, None] + column[None, :]
    at_more = more_out + (b * more_b + n * more_n + l * more_l)[:, None] + column[None, :]
    at_to = to_out + (b * to_b + n * to_n + l * to_l)[:, None] + column[None, :]
    x = tl.load(at_out, is_element, other=0.0).to(to_out.dtype.element_ty)
    y = tl.load(at_more, is_element, other=0.0).to(x.dtype)
    tl.store(at_to, x + (y - x) * share[:, None], is_element)


Partial = tuple[Tensor, Tensor]
"""out (B, N, L, H) and lse (B, N, L)."""


def merge_into(partial: Partial, more: Partial, into: Partial) -> None:
    """See :func:`wallfacer_dt.kernels.merge.merge_`; ``into`` may be the first itself."""
    tensors = [x if x.ndim == 3 or x.stride(-1) == 1 else x.contiguous() for x in (*partial, *more)] + [*into]
    assert into[0].stride(-1) == 1, "partial results are this package's own"
    strides = [stride for x in tensors for stride in x.stride()[:3]]
    batch, heads, length, width = into[0].shape
    rows, padded = batch * heads * length, triton.next_power_of_2(width)
    per_program = max(1, _ELEMENTS // padded)
    kernel: Any = merge_rows
    with torch.accelerator.device_index(into[0].device.index):  # Triton runs on the current device
        kernel[(triton.cdiv(rows, per_program),)](
            *tensors, heads, length, width, rows, *strides, WIDTH=padded, ROWS=per_program
        )
