"""Block kernels on one device: every one against float64, by itself and on many segments, and the merge of results."""

import math
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from recipes.benchmarks.gpu.stages import Cases, Place, Record
from tests.cases import rms
from wallfacer_dt.algorithms.arithmetic import Backward, Forward, Operand, Scores
from wallfacer_dt.algorithms.masks import Mask
from wallfacer_dt.algorithms.segments import Work, plan_work
from wallfacer_dt.kernels import reference
from wallfacer_dt.kernels.block import CAUSAL, FULL, HALF, Band, BlockKernel, How, Need
from wallfacer_dt.kernels.merge import accumulation_dtype
from wallfacer_dt.kernels.registry import names, select_kernel
from wallfacer_dt.layout import length_of
from wallfacer_dt.testing import worst_error

WORST = 2.0
"""Times the error of one call of the reference kernel, or one rounding of a typical entry where that is more.

The reference computes in float32 and rounds once, with 0.3 of that: no fused kernel, which rounds probabilities too,
stays within twice as much (torch's on the CPU, in bfloat16: 1.3 times for out, 3.7 for dv; 0.9 roundings at most).
"""
Attend = Callable[..., tuple[Tensor, ...]]
"""out, lse, dq, dk and dv from a kernel, q, k, v, the output's gradient, and the output and lse of whole rows."""

SHAPES = [
    (256, 256, 4, 4, 128, 128), (200, 200, 8, 2, 64, 64), (333, 777, 6, 2, 80, 80), (129, 129, 4, 1, 20, 24),
    (1, 77, 8, 2, 64, 64), (300, 100, 4, 4, 64, 64), (128, 128, 3, 3, 192, 128), (65, 65, 2, 1, 256, 256),
]  # fmt: skip
"""Rows, columns, heads, key heads, head dim and that of values."""
FAR = [(192, 192), (70, 64), (1, 128), (2, 128), (70, 128), (333, 200)]
"""Rows and columns with scores so low that exp(-lse) is no float32: some of cuDNN's backwards give NaN there."""
BANDS = [FULL, CAUSAL, Band(0, None), Band(-40, 7), Band(-40, 0), Band(5, None), Band(None, -9), Band(0, 99)]


def kernels(place: Place) -> Cases:
    """Every kernel that runs here, forward and backward, against float64; operands that are not aligned among them."""
    bands = BANDS if place.is_gpu else BANDS[1:4]
    for name in sorted(names(), key="flex".__eq__):  # which takes seconds to compile for every one of them: the last
        for dtype in place.dtypes:
            for shape in SHAPES if place.is_gpu else SHAPES[1:6:3]:
                seen = torch.rand(shape[:2], device=place.device) < 0.7
                for band in bands:
                    for mask, softcap in ((None, 0.0), (None, 5.0), (_listed(seen), 0.0)):
                        kinds = " mask" * (mask is not None) + " softcap" * bool(softcap)
                        case = f"{name} {dtype} {shape} {tuple(band)}{kinds}"
                        attend = partial(_one_block, How(band, 0.1, mask, softcap))
                        yield (
                            case,
                            partial(_against_float64, place, name, dtype, shape, attend, mask is not None, softcap),
                        )
            for lengths in FAR if place.is_gpu else FAR[:1]:
                shape, attend = (*lengths, 4, 2, 64, 64), partial(_one_block, How(FULL, 0.1))
                case = f"{name} {dtype} {shape} scores of about -100"
                yield case, partial(_against_float64, place, name, dtype, shape, attend, about=-100.0)


def segments(place: Place) -> Cases:
    """Many segments in one call, of kernels that take them: documents, windows, rows of the batch that differ."""
    for name in names():
        for dtype in place.dtypes:
            for case, work, rows, columns in _works(900 if place.is_gpu else 60):
                for dim in (64, 128) if place.is_gpu else (8,):
                    shape, attend = (rows, columns, 4, 2, dim, dim), partial(_segments, work)
                    yield f"{name} {dtype} {case} {dim}", partial(_against_float64, place, name, dtype, shape, attend)


def _listed(seen: Tensor) -> BlockMask:
    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return seen[i, j]

    return create_block_mask(mask_mod, None, None, *seen.shape, device=seen.device)


def _works(n: int) -> Iterator[tuple[str, Work, int, int]]:
    """What is computed, and of how many queries and keys."""
    short = (0, n // 9, n // 9 + 1, n // 2, n)
    whole, middle, around = np.array([[0, n]]), np.array([[n // 3, n // 2]]), np.array([[0, n // 3], [n // 2, n]])
    differing = ((0, n // 5, n), (0, n // 2, n // 2 + 3, n))
    full = Mask(documents=((0, n // 3 + 4, n // 2 + 4, n),))
    for name, rows, columns, mask in (
        ("documents", whole, whole, Mask(right=0, documents=(short,))),
        ("rows that differ", whole, whole, Mask(right=0, documents=differing)),
        ("windows in documents", whole, whole, Mask(left=n // 20, right=0, documents=(short,))),
        ("two sides", whole, whole, Mask(n // 20, n // 30, 0, (short,))),
        ("others than these", around, middle, full),
        ("these of others", middle, around, full),
    ):
        yield name, plan_work([rows], [columns], mask), length_of(rows), length_of(columns)


def _one_block(
    how: How, kernel: BlockKernel, q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, ...]:
    return *kernel.forward(q, k, v, how), *kernel.backward(grad_out, q, k, v, out, lse, how)


def _segments(
    work: Work, kernel: BlockKernel, q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, ...]:
    scores, query, keys = Scores(kernel, 0.1), Operand((q,)), Operand((k, v))
    Forward(scores, v.shape[-1]).attend(query, Operand((k, v)), work)
    behind = Operand((q, grad_out, lse), out=out)
    Backward(scores).attend(behind, keys, work)
    return *query.partial, *behind.partial, *keys.partial


def _against_float64(
    place: Place, name: str, dtype: torch.dtype, shape: tuple[int, ...], attend: Attend, masked: bool = False,
    softcap: float = 0.0, about: float = 0.0,
) -> Record:  # fmt: skip
    rows, columns, heads, kv_heads, dim, value_dim = shape
    torch.manual_seed(0)
    sizes = ((heads, rows, dim), (kv_heads, columns, dim), (kv_heads, columns, value_dim), (heads, rows, value_dim))
    wide = [torch.randn(2 * math.prod(size) + 1, dtype=torch.float64).to(place.device, dtype) for size in sizes]
    given = [x[1:].view(2, *size) for x, size in zip(wide, sizes, strict=True)]  # at no multiple of 16 bytes
    if about:
        given[0][..., 0], given[1][..., 0] = 1, about / 0.1
    try:
        kernel = select_kernel(name, Need.of(given[0], given[2], masked=masked, softcap=softcap))
    except ValueError as refusal:
        return {"refused": str(refusal)}
    exact = [x.double() for x in given]
    # Of the whole rows, which see more than this block.
    out = torch.randn_like(exact[3]).to(dtype)
    _, lse, *_ = attend(reference.KERNEL, *exact, out.double(), torch.zeros_like(exact[3][..., 0]))
    lse = torch.logaddexp(lse, about + torch.randn_like(lse)).to(accumulation_dtype(dtype))
    want = attend(reference.KERNEL, *exact, out.double(), lse.double())
    found = [attend(each, *given, out, lse) for each in (kernel, reference.KERNEL)]
    ratios = {}
    for part, *three in zip(("out", "lse", "dq", "dk", "dv"), *found, want, strict=True):
        unseen = three[2] == -torch.inf
        if not unseen.equal(three[0] == -torch.inf):
            raise AssertionError(f"{part}: other rows see nothing")
        mine, its, right = (x.double().masked_fill(unseen, 0) for x in three)
        allowed = max(rms(its, right), torch.finfo(dtype).eps * max(rms(right), 0.1))
        ratios[part] = round(rms(mine, right) / allowed, 2)
    if max(ratios.values()) > WORST:
        raise AssertionError(f"errors of {ratios} times what is one call's")
    return {"worst": max(ratios.values())}


def merging(place: Place) -> Cases:
    """Partial results merged and added up: the second of them, one in between, and the last."""
    rows = 8192 if place.is_gpu else 64
    for dtype in place.dtypes:
        wide = accumulation_dtype(dtype)
        for step, before, after in (("second", dtype, wide), ("third", wide, wide), ("last", wide, dtype)):
            for what in (_merging, _adding):
                case = f"{what.__name__[1:]} the {step}, {dtype} (1, 32, {rows}, 128)"
                yield case, partial(what, place, rows, before, dtype, after)


def _partials(place: Place, rows: int, *dtypes: torch.dtype) -> list[Tensor]:
    """One by heads, one by tokens."""
    torch.manual_seed(0)
    mine, more = (torch.randn(1, *dims, 128, device=place.device) for dims in ((32, rows), (rows, 32)))
    return [x.to(dtype) for x, dtype in zip((mine, more.transpose(1, 2)), dtypes, strict=True)]


def _merging(place: Place, rows: int, before: torch.dtype, more: torch.dtype, after: torch.dtype) -> Record:
    out, more_out = _partials(place, rows, before, more)
    lse, more_lse = torch.randn(2, 1, 32, rows, device=place.device, dtype=accumulation_dtype(more))
    more_lse[..., :7] = -torch.inf
    want_lse = torch.logaddexp(lse.double(), more_lse.double())
    parts = ((out, lse), (more_out, more_lse))
    want = sum((x.double() * (its.double() - want_lse).exp().unsqueeze(-1) for x, its in parts), torch.zeros(()))
    found = _merged(parts, last=after == more)
    for _ in range(200 if place.is_gpu else 2):
        again = _merged(parts, last=after == more)
        if not all(torch.equal(x, y) for x, y in zip(found, again, strict=True)):
            raise AssertionError("it gives other bits when it is made again")
    return _rounded(found, (want, want_lse), after)


def _merged(parts: tuple[tuple[Tensor, Tensor], ...], *, last: bool) -> tuple[Tensor, ...]:
    """Of copies, as it may be done in place."""
    mine, more = (tuple(x.clone() for x in some) for some in parts)
    operand = Operand((more[0],), mine)
    Forward(Scores(reference.KERNEL, 1.0), 128).combine(operand, more, last=last)
    return operand.partial


def _adding(place: Place, rows: int, before: torch.dtype, more: torch.dtype, after: torch.dtype) -> Record:
    x, y = _partials(place, rows, before, more)
    want = x.double() + y.double()
    operand = Operand((y,), (x,))
    Backward(Scores(reference.KERNEL, 1.0)).combine(operand, (y,), last=after == more)
    return _rounded(operand.partial, (want,), after)


def _rounded(found: tuple[Tensor, ...], want: tuple[Tensor, ...], dtype: torch.dtype) -> Record:
    """Each computed in the accumulation dtype, and the first rounded to this one."""
    if found[0].dtype != dtype:
        raise AssertionError(f"{found[0].dtype} where {dtype} is wanted")
    errors = [
        worst_error([(x.double(), right)]) / torch.finfo(x.dtype).eps for x, right in zip(found, want, strict=True)
    ]
    if not max(errors) <= (4 if dtype in HALF else 64):
        raise AssertionError(f"errors of {errors} roundings")
    return {"worst": max(errors)}
