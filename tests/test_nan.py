"""NaN in, NaN out: whatever depends on a NaN of q, k, v or grad_out is NaN, in every kernel and on every mesh."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.cases import Case, Nans, draw, run_uncounted, whole, with_nans
from tests.pairwise import few, tiers
from tests.strategies import any_case, examples
from tests.test_kernels import FLASH, Block, Expected, blocks, oracle, run, visible_in
from wallfacer_dt.kernels import reference
from wallfacer_dt.kernels.block import CAUSAL, FULL, BlockKernel
from wallfacer_dt.testing import RankPool
from wallfacer_dt.testing.oracle import visibility

Ranks = Callable[[int], RankPool]
NANS = st.lists(
    st.tuples(st.sampled_from(["q", "k", "v", "grad_out"]), st.integers(0, 10**6)), min_size=1, max_size=4
).map(tuple)


class Reached(NamedTuple):
    """Where a NaN comes: lse (B, N, L), and all else."""

    lse: Tensor
    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def reached(tensors: tuple[Tensor, ...], visible: Tensor) -> Reached:
    """What depends on a NaN in q, k, v and grad_out where rows see (B, N, L, S), each score and product by itself."""
    q, k, v, grad_out = (x.isnan() for x in tensors)
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    score = (q.any(-1).unsqueeze(-1) | k.any(-1).unsqueeze(-2)) & visible
    row = score.any(-1, keepdim=True)
    p = row & visible
    out = row | seen_by(visible, v)
    ds = visible & (row | (out | grad_out).any(-1, keepdim=True) | v.any(-1).unsqueeze(-2))
    dv = seen_by(visible.mT, grad_out) | p.any(-2).unsqueeze(-1)
    dq, dk = ds.any(-1).unsqueeze(-1).expand_as(q), ds.any(-2).unsqueeze(-1).expand_as(k)
    dk, dv = (x.unflatten(1, (-1, groups)).any(2) for x in (dk, dv))
    return Reached(row.squeeze(-1), out, dq, dk, dv)


def seen_by(visible: Tensor, x: Tensor) -> Tensor:
    return (visible.unsqueeze(-1) & x.unsqueeze(-3)).any(-2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernel", [reference.KERNEL, FLASH], ids=lambda kernel: kernel.name)
@examples(50, today=30)
@given(block=blocks(longest=20), nans=NANS)
def test_a_kernel_loses_no_nan(kernel: BlockKernel, dtype: torch.dtype, block: Block, nans: Nans) -> None:
    """Whatever depends on a NaN is NaN, and what no pair of a batch row and head connects with one is as without."""
    clean = block.to(dtype)
    names = ("q", "k", "v", "grad_out")
    block = clean._replace(**with_nans({name: getattr(clean, name) for name in names}, nans))
    expected = oracle(clean)
    visible = visible_in(block)
    must, may = (reached(block[:4], seen) for seen in (visible, torch.ones_like(visible)))
    if block.mask is None and block.band in (FULL, CAUSAL):  # no mask is added to scores, which spreads a NaN of k
        may = may._replace(lse=must.lse)
    out, lse = kernel.forward(*block[:3], block.how)
    # The whole rows' results, into which the block's have been merged.
    whole, whole_lse = (
        torch.where(nan, torch.nan, x.to(like.dtype))
        for nan, x, like in ((must.out, expected.whole_out, out), (must.lse, expected.whole_lse, lse))
    )
    got = Reached(lse, out, *kernel.backward(block.grad_out, *block[:3], whole, whole_lse, block.how))
    for name, x, hit, near, want in zip(Reached._fields, got, must, may, run_all(kernel, clean, expected), strict=True):
        assert x[hit].isnan().all(), name
        assert x[~near].equal(want[~near]), name


def run_all(kernel: BlockKernel, block: Block, expected: Expected) -> Reached:
    out, lse, *grads = run(kernel, block, expected)
    return Reached(lse, out, *grads)


@pytest.mark.parametrize("size", few([1, 2, 4, 6], {1, 2, 6}))
@examples(40, today=25)
@given(data=st.data())
def test_ranks_lose_no_nan(threads: Ranks, size: int, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(["float64", "float32", "bfloat16", "float16"]))
    case = data.draw(any_case(size, dtype=dtype, inputs="normal"))
    assert_kept(threads, case, data.draw(NANS))


def assert_kept(ranks: Ranks, case: Case, nans: Nans) -> None:
    """As of a kernel, by what the whole sequence sees."""
    with_them = replace(case, nans=nans)
    found, clean = (whole(each, ranks(case.size).run(run_uncounted, each)) for each in (with_them, case))
    q, k, *_ = tensors = draw(with_them)
    visible = visibility(*q.shape[:2], q.shape[2], k.shape[2], **case.masks)
    must, may = (reached(tensors, seen) for seen in (visible, torch.ones_like(visible)))
    for name in ("out", "dq", "dk", "dv"):
        x, hit, near = getattr(found, name), getattr(must, name), getattr(may, name)
        assert x[hit].isnan().all(), name
        assert x[~near].equal(getattr(clean, name)[~near]), name


SMALL = {
    "ring": Case(4, 1),
    "team": Case(1, 4),
    "carried outputs": Case(2, 2, rotate_forward="q", rotate="q"),
    "ulysses": Case(2, 1, ulysses=2),
    "published": Case(4, 2, schedule="published", shard=2),
    "causal": Case(2, 2, is_causal=True, order="head_tail"),
    "a window": Case(4, 1, window_size=(3, 2)),
    "documents": Case(2, 2, documents=((5, 11),), is_causal=True),
    "a mask": Case(2, 2, mask="blind"),
    "sinks": Case(2, 2, sinks=True),
    "reference": Case(2, 2, kernel="reference"),
}


@pytest.mark.parametrize(("small", "name"), tiers(product(SMALL, ["q", "k", "v", "grad_out"]), strength=1))
def test_blocks_of_few_keys_lose_no_nan(threads: Ranks, small: str, name: str) -> None:
    for dtype in ("float32", "bfloat16"):
        for place in (0, 37, 229):
            assert_kept(threads, replace(SMALL[small], dtype=dtype), ((name, place),))
