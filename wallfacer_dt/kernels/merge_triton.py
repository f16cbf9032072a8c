"""Merging partial results, and adding them up, as one Triton kernel: read once, and written once as they are wanted.

Imported where they are on CUDA. Run under Triton's interpreter on the CPU (3.7.1), and on an H100 and an H200 (3.6.0).
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_ELEMENTS = 4096  # of a program


@triton.jit
def combine_rows(
    out, lse, more_out, more_lse, to_out, to_lse, heads, length, width, rows,
    out_b, out_n, out_l, out_h, lse_b, lse_n, lse_l, more_b, more_n, more_l, more_h, more_lse_b, more_lse_n, more_lse_l,
    to_b, to_n, to_l, to_h, to_lse_b, to_lse_n, to_lse_l,
    DTYPE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Merge ``rows`` rows of (B, N, L), or without lse add them, each of ``width`` elements."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    l, n, b = row % length, row // length % heads, row // length // heads
    is_row = row < rows
    column = tl.program_id(1).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    is_element = is_row[:, None] & (column < width)[None, :]
    at_out = out + (b * out_b + n * out_n + l * out_l)[:, None] + (column * out_h)[None, :]
    at_more = more_out + (b * more_b + n * more_n + l * more_l)[:, None] + (column * more_h)[None, :]
    at_to = to_out + (b * to_b + n * to_n + l * to_l)[:, None] + (column * to_h)[None, :]
    x = tl.load(at_out, is_element, other=0.0).to(DTYPE)
    y = tl.load(at_more, is_element, other=0.0).to(DTYPE)
    if lse is None:
        tl.store(at_to, x + y, is_element)
    else:
        mine = tl.load(lse + b * lse_b + n * lse_n + l * lse_l, is_row, other=0.0).to(DTYPE)
        theirs = tl.load(more_lse + b * more_lse_b + n * more_lse_n + l * more_lse_l, is_row, other=0.0).to(DTYPE)
        largest = tl.where(mine > theirs, mine, theirs)
        largest = tl.where(largest == float("-inf"), 0.0, largest)  # of rows that have seen no key
        weight_mine, weight_theirs = tl.exp(mine - largest), tl.exp(theirs - largest)
        total = weight_mine + weight_theirs  # not a number if one of them is none
        # Warps load an lse anew for the rows that they weigh, and it may be where it is written.
        tl.debug_barrier()
        tl.store(to_lse + b * to_lse_b + n * to_lse_n + l * to_lse_l, largest + tl.log(total), is_row)
        share = weight_theirs / tl.where(total == 0.0, 1.0, total)
        tl.store(at_to, x + (y - x) * share[:, None], is_element)


Partial = Sequence[Tensor]
"""out (B, N, L, H) and lse (B, N, L), or one tensor of a sum, (B, N, L, H) or (B, N, L)."""


def combine_into(partial: Partial, more: Partial, into: Partial) -> None:
    """Merge a partial result with another one, or add them up; ``into`` may be the first itself.

    Computed in the accumulation dtype, whatever theirs are, and rounded as it is written.
    """
    tensors: list[Tensor | None] = []
    strides: list[int] = []
    for x, *lse in (partial, more, into):
        some = [x if x.ndim == 4 else x.unsqueeze(-1), *lse]
        tensors += [*some, None][:2]
        strides += [n for each in some for n in each.stride()] + [0, 0, 0] * (not lse)
    batch, heads, length, *widths = into[0].shape
    width, rows = math.prod(widths), batch * heads * length
    padded = triton.next_power_of_2(max(1, width))
    # Who merges a row writes its lse; a sum's rows are perhaps a layer's weights.
    columns = padded if len(into) == 2 else min(padded, _ELEMENTS)
    per_program = max(1, _ELEMENTS // columns)
    wide = tl.float64 if into[0].dtype == torch.float64 else tl.float32
    kernel: Any = combine_rows
    with torch.accelerator.device_index(into[0].device.index):  # Triton runs on the current device
        kernel[(triton.cdiv(rows, per_program), triton.cdiv(max(1, width), columns))](
            *tensors, heads, length, width, rows, *strides, DTYPE=wide, WIDTH=columns, ROWS=per_program
        )
