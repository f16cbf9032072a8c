"""Every kernel against attention in float64 and autograd, and the merging of partial results."""

import gc
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import metadata
from itertools import product
from math import inf
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock
from weakref import ref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from tests import flash_standins
from tests.cases import rms
from tests.strategies import examples
from wallfacer_dt.agreement.meeting import below_views
from wallfacer_dt.algorithms.blocks import Answers, Captured, recorded_mask
from wallfacer_dt.kernels import aten, flash_attn, flex, reference, registry, visible
from wallfacer_dt.kernels.block import CAUSAL, FULL, Band, BlockKernel, How, Need, Ragged
from wallfacer_dt.kernels.merge import merge_, output_factor, output_from, sinks_gradient, with_sinks
from wallfacer_dt.kernels.registry import register_kernel, select_kernel
from wallfacer_dt.kernels.windows import flash_windows
from wallfacer_dt.testing import worst_error

FLASH = select_kernel("flash", Need("cpu", torch.float64, 16, 16))
SCALE = 0.3
ANTI_CAUSAL = Band(0, None)


class Block(NamedTuple):
    """One block, and more keys that its rows see besides."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    more_k: Tensor
    more_v: Tensor
    more_mask: Tensor
    band: Band = FULL
    mask: Tensor | None = None
    softcap: float = 0.0

    @property
    def how(self) -> How:
        return How(self.band, SCALE, None if self.mask is None else listed(self.mask), self.softcap)

    def to(self, dtype: torch.dtype) -> "Block":
        return self._replace(
            **{
                name: x.to(dtype)
                for name, x in self._asdict().items()
                if isinstance(x, Tensor) and x.is_floating_point()
            }
        )


def listed(mask: Tensor) -> BlockMask:
    """Booleans (B or 1, N or 1, Lq, Lk) as kernels are given them."""

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return mask[b % mask.shape[0], h % mask.shape[1], q, k]

    return create_block_mask(mask_mod, *mask.shape, device="cpu")


BOUNDS = st.none() | st.integers(-10, 10)


@st.composite
def blocks(draw: st.DrawFn, *, softcap: bool = False, masks: bool = True, longest: int = 9) -> Block:
    torch.manual_seed(draw(st.integers(0, 1000)))
    kv_heads, groups = draw(st.integers(1, 2)), draw(st.sampled_from([1, 2, 3, 8]))
    batch, heads = draw(st.integers(1, 2)), kv_heads * groups
    dims = st.sampled_from([1, 7, 16, 33, 128])
    q_dim = draw(dims)
    v_dim = draw(st.just(q_dim) | dims)
    band = draw(st.sampled_from([FULL, CAUSAL, ANTI_CAUSAL]) | st.builds(Band, BOUNDS, BOUNDS))
    rows, more = draw(st.integers(1, longest)), draw(st.integers(1, 4))
    columns = draw(st.just(rows) | st.integers(1, longest))
    mask = None
    if masks and draw(st.booleans()):
        shape = (draw(st.sampled_from([1, batch])), draw(st.sampled_from([1, heads])), rows, columns)
        mask = torch.rand(shape) < draw(st.sampled_from([0.0, 0.2, 0.5, 0.9]))
    return Block(
        q=_normal(batch, heads, rows, q_dim),
        k=_normal(batch, kv_heads, columns, q_dim),
        v=_normal(batch, kv_heads, columns, v_dim),
        grad_out=_normal(batch, heads, rows, v_dim),
        more_k=_normal(batch, kv_heads, more, q_dim),
        more_v=_normal(batch, kv_heads, more, v_dim),
        # Some rows see nothing here either.
        more_mask=torch.rand(batch, heads, rows, more) < draw(st.sampled_from([0.0, 0.2, 1.0])),
        band=band,
        mask=mask,
        softcap=draw(st.sampled_from([0.0, 0.5, 3.0])) if softcap else 0.0,
    )


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def dense(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, softcap: float = 0.0) -> tuple[Tensor, Tensor]:
    """out and lse, differentiable; out 0 and lse -inf where nothing is visible."""
    return _softmax(_scores(q, k, softcap), v, visible)


def _scores(q: Tensor, k: Tensor, softcap: float) -> Tensor:
    scores = SCALE * q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT
    return softcap * (scores / softcap).tanh() if softcap else scores


def _softmax(scores: Tensor, v: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    largest = scores.detach().amax(-1, keepdim=True)
    p = (scores - largest).exp() * visible
    total = p.sum(-1, keepdim=True)
    some = total > 0
    out = p / torch.where(some, total, 1) @ v.repeat_interleave(p.shape[1] // v.shape[1], 1)
    return out, torch.where(some, torch.where(some, total, 1).log() + largest, -torch.inf).squeeze(-1)


def visible_in(block: Block) -> Tensor:
    """(B, N, Lq, Lk), entry by entry."""
    low = -inf if block.band.low is None else block.band.low
    high = inf if block.band.high is None else block.band.high
    rows, columns = block.q.shape[2], block.k.shape[2]
    band = torch.tensor([[low <= s - t <= high for s in range(columns)] for t in range(rows)])
    mask = band if block.mask is None else band & block.mask
    return mask.expand(*block.q.shape[:2], -1, -1)


class Expected(NamedTuple):
    """Of a block alone: out, lse. Of the rows over all keys: out, lse. Of the block's part in these: gradients."""

    out: Tensor
    lse: Tensor
    whole_out: Tensor
    whole_lse: Tensor
    grads: tuple[Tensor, ...]


def oracle(block: Block) -> Expected:
    """By autograd in float64. The block has its own copy of q, so that its part of dq can be told from the rest."""
    block = block.to(torch.float64)
    visible = visible_in(block)
    q, k, v = (x.clone().requires_grad_() for x in block[:3])
    scores = torch.cat([_scores(q, k, block.softcap), _scores(block.q, block.more_k, block.softcap)], -1)
    whole = _softmax(scores, torch.cat([v, block.more_v], 2), torch.cat([visible, block.more_mask], -1))
    grads = torch.autograd.grad(whole[0], (q, k, v), block.grad_out)
    alone = dense(block.q, block.k, block.v, visible, block.softcap)
    return Expected(*alone, *(x.detach() for x in whole), grads)


def run(kernel: BlockKernel, block: Block, expected: Expected) -> tuple[Tensor, ...]:
    """out, lse, dq, dk, dv."""
    q, k, v, grad_out, *_ = block
    out, lse = kernel.forward(q, k, v, block.how)
    whole = expected.whole_out.to(q.dtype), expected.whole_lse.to(lse.dtype)
    return out, lse, *kernel.backward(grad_out, q, k, v, *whole, block.how)


def assert_right(kernel: BlockKernel, block: Block) -> None:
    expected = oracle(block)
    got = run(kernel, block, expected)
    assert worst(got, (*expected[:2], *expected.grads)) <= 1e-12


def worst(got: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest difference, of out, lse and whatever else; both must have the lse of a row that sees nothing."""
    pairs = list(zip(got, expected, strict=True))
    assert all(torch.equal(x == -inf, want == -inf) for x, want in pairs)
    return worst_error((x.masked_fill(x == -inf, 0), want.masked_fill(want == -inf, 0)) for x, want in pairs)


@given(block=blocks(softcap=True))
def test_the_reference_is_attention_of_its_block(block: Block) -> None:
    assert_right(reference.KERNEL, block)


@given(block=blocks())
def test_flash_is_attention_of_its_block(block: Block) -> None:
    assert_right(FLASH, block)


@pytest.mark.parametrize("seen", [FULL, CAUSAL, Band(-3, 0)], ids=str)
@pytest.mark.parametrize("length", [3, 20])
@pytest.mark.parametrize("head_dim", [4, 8])
def test_a_row_whose_scores_all_overflow_has_seen_nothing(seen: Band, length: int, head_dim: int) -> None:
    """In float32 a score of -1e40 is -inf, as one that is hidden; a log-sum-exp of 0 alone does not say so."""
    q, k = torch.ones(1, 2, length, head_dim), -torch.ones(1, 2, length, head_dim)
    v = torch.randn(1, 2, length, 4)
    q[:, 0], k[:, 0] = 1e-20, -1e20
    q[:, 0, 1] = 1e20
    q[:, 1, 0], v[:, 1, 0] = 0, 0  # the first row of a causal block: lse 0 and out 0
    how = How(seen, 0.5)
    out, lse = FLASH.forward(q, k, v, how)
    want_out, want_lse = reference.KERNEL.forward(q, k, v, how)
    assert want_lse[0, 0, 1] == -inf
    assert seen == FULL or want_lse[0, 1, 0] == 0
    assert worst((out, lse), (want_out, want_lse)) <= 1e-5
    grad_out = torch.randn_like(out)
    found, want = (kernel.backward(grad_out, q, k, v, want_out, want_lse, how) for kernel in (FLASH, reference.KERNEL))
    assert all(x.isfinite().all() for x in found)  # keys of 1e20 leave of q's and k's no digit
    assert found[0][0, 0, 1].eq(0).all()
    assert worst_error([(found[2], want[2])]) <= 1e-5


BANDS = [
    *(FULL, CAUSAL, ANTI_CAUSAL, Band(-3, 2), Band(2, None), Band(3, 4), Band(None, -2), Band(-4, -3)),
    *(Band(None, -30), Band(5, 2)),  # which see nothing
]


@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("kernel", [reference.KERNEL, FLASH], ids=lambda kernel: kernel.name)
def test_bands_of_every_kind(kernel: BlockKernel, band: Band) -> None:
    for rows, columns in [(8, 8), (1, 1), (5, 8), (8, 5)]:
        assert_right(kernel, ordinary(rows, columns)._replace(band=band))


def ordinary(rows: int, columns: int, *, head_dim: int = 16) -> Block:
    torch.manual_seed(0)
    q, grad_out = (_normal(2, 4, rows, head_dim) for _ in range(2))
    k, v = (_normal(2, 2, columns, head_dim) for _ in range(2))
    more_k, more_v = (_normal(2, 2, 3, head_dim) for _ in range(2))
    return Block(q, k, v, grad_out, more_k, more_v, torch.rand(2, 4, rows, 3) < 0.3)


def test_masks_longer_than_the_fused_kernel_takes_at_a_time() -> None:
    """Rows whose first keys, or all, are hidden: in some of its chunks such a row sees nothing."""
    block = ordinary(700, 1100)
    mask = torch.rand(1, 4, 700, 1100) < 0.5
    mask[..., 3, :] = False
    mask[..., 5, :1024] = False
    mask[..., 600:, :600] = False
    assert_right(FLASH, block._replace(mask=mask))
    for band in (Band(-40, 60), ANTI_CAUSAL):
        assert_right(FLASH, ordinary(700, 700)._replace(band=band))


@pytest.mark.parametrize("kernel", [reference.KERNEL, FLASH], ids=lambda kernel: kernel.name)
def test_rows_that_see_no_key_of_any_block(kernel: BlockKernel) -> None:
    block = ordinary(4, 4)._replace(band=Band(2, None))
    block = block._replace(more_mask=torch.zeros_like(block.more_mask))
    expected = oracle(block)
    out, lse, dq, dk, dv = run(kernel, block, expected)
    assert expected.whole_lse[:, :, 2:].eq(-torch.inf).all()
    assert lse[:, :, 2:].eq(-torch.inf).all()
    assert lse[:, :, :2].isfinite().all()
    assert out[:, :, 2:].eq(0).all()
    assert dq[:, :, 2:].eq(0).all()
    assert all(x.isfinite().all() for x in (dk, dv))


def test_a_band_without_the_bounds_that_hide_nothing() -> None:
    for rows, columns in [(1, 1), (3, 5), (5, 3)]:
        for low in (None, *range(-6, 7)):
            for high in (None, *range(-6, 7)):
                block = ordinary(rows, columns)._replace(band=Band(low, high))
                within = block.band.within(rows, columns)
                assert visible_in(block).equal(visible_in(block._replace(band=within)))
                for kept in (Band(within.low, None), Band(None, within.high)):
                    assert kept == FULL or not visible_in(block._replace(band=kept)).all()


@given(block=blocks(masks=False), cut=st.integers(1, 8))
@pytest.mark.parametrize("kernel", [reference.KERNEL, FLASH], ids=lambda kernel: kernel.name)
def test_merging_blocks_is_attention_over_all_keys(kernel: BlockKernel, block: Block, cut: int) -> None:
    q, k, v, grad_out, *_ = block
    whole, whole_lse = dense(q, k, v, visible_in(block))
    out, lse = torch.zeros_like(whole), torch.full(q.shape[:-1], -torch.inf, dtype=q.dtype)
    grads = [torch.zeros_like(x) for x in (q, k, v)]
    for start in range(0, k.shape[2], cut):
        part = slice(start, start + cut)
        bounds = (None if bound is None else bound - start for bound in block.band)
        how = block.how._replace(seen=Band(*bounds))
        merge_(out, lse, *kernel.forward(q, k[:, :, part], v[:, :, part], how))
        dq, dk, dv = kernel.backward(grad_out, q, k[:, :, part], v[:, :, part], whole, whole_lse, how)
        grads[0] += dq
        grads[1][:, :, part] = dk
        grads[2][:, :, part] = dv
    alone = oracle(block._replace(more_mask=torch.zeros_like(block.more_mask)))
    assert worst((out, lse, *grads), (whole, whole_lse, *alone.grads)) <= 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@given(block=blocks(longest=24))
def test_flash_in_low_precision_is_as_good_as_the_reference(dtype: torch.dtype, block: Block) -> None:
    """The reference computes in float32 and rounds once; see tests/test_equivalence.py for what is allowed."""
    block = block.to(dtype)
    expected = oracle(block)
    wide = torch.float32
    ours, best = run(FLASH, block, expected), run(reference.KERNEL, block, expected)
    assert [x.dtype for x in ours] == [dtype, wide, dtype, dtype, dtype] == [x.dtype for x in best]
    unseen = expected.lse == -torch.inf
    assert ours[1][unseen].eq(-torch.inf).all()
    exact = (expected.out, expected.lse.masked_fill(unseen, 0), *expected.grads)
    for i, (x, theirs, want) in enumerate(zip(ours, best, exact, strict=True)):
        x, theirs = (y.masked_fill(unseen, 0) if i == 1 else y for y in (x, theirs))
        # Of a single key dq and dk are 0, by luck exactly: what cancels in them is of the order of SCALE at least.
        allowed = 4 * max(rms(theirs.double(), want), torch.finfo(dtype).eps * max(rms(want), SCALE))
        assert rms(x.double(), want) <= allowed


@pytest.mark.parametrize("kernel", [reference.KERNEL, FLASH, flex.KERNEL], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("band", [FULL, CAUSAL, ANTI_CAUSAL, Band(-2, 1)])
def test_a_kernel_can_be_traced(kernel: BlockKernel, band: Band) -> None:
    """On fake tensors, with the shapes and dtypes of real ones."""
    block = ordinary(6, 6).to(torch.bfloat16)._replace(band=band)
    block = block._replace(v=block.v[..., :8], grad_out=block.grad_out[..., :8])

    def both(q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor) -> tuple[Tensor, ...]:
        out, lse = kernel.forward(q, k, v, block.how)
        return out, lse, *kernel.backward(grad_out, q, k, v, out, lse, block.how)

    graph = make_fx(both, tracing_mode="fake")(*block[:4])
    if kernel.name == "flex":
        shapes = [node.meta["val"].shape for node in graph.graph.find_nodes(op="output")[0].args[0]]
        assert shapes == [x.shape for x in (block.grad_out, block.q[..., 0], *block[:3])]
        return
    for traced, eager in zip(graph(*block[:4]), both(*block[:4]), strict=True):
        assert traced.dtype == eager.dtype
        assert traced.equal(eager)


def calls(band: Band, length: int = 16) -> list[str]:
    """The operations of both directions of flash on a square block."""
    block = ordinary(length, length)

    def both(q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor) -> tuple[Tensor, ...]:
        out, lse = FLASH.forward(q, k, v, block.how._replace(seen=band))
        return FLASH.backward(grad_out, q, k, v, out, lse, block.how._replace(seen=band))

    graph = make_fx(both, tracing_mode="fake")(*block[:4]).graph
    return [str(node.target) for node in graph.nodes if node.op == "call_function" and "getitem" not in str(node)]


def test_no_mask_is_made_where_the_fused_kernel_needs_none() -> None:
    plain = calls(FULL)
    assert plain == calls(CAUSAL) == calls(Band(-15, 15))
    # Fake tensors of torch 2.11 have lse of another dtype than real ones, from which it is cast.
    casts = ["aten._to_copy.default"] if torch.__version__.startswith("2.11.") else []
    assert plain[1:-1] == [*casts, "aten.nan_to_num.default"]
    assert set(calls(ANTI_CAUSAL)) - set(plain) == {"aten.flip.default"}
    assert "aten.arange.default" in calls(Band(-4, 5))
    assert set(plain) < set(calls(FULL, 15))


PACKAGES = pytest.mark.parametrize("name", flash_standins.PACKAGES)
ON_CUDA = pytest.mark.parametrize("name", flash_standins.KERNELS)


@PACKAGES
@given(block=blocks(softcap=True, masks=False), offset=st.sampled_from([0, 1, 2, 8]))
def test_a_package_is_attention_of_its_block(name: str, block: Block, offset: int) -> None:
    """Wherever its operands start in memory, and with more rows than keys, where bounds are clipped."""
    shifted = [_shifted(x, offset) for x in block[:4]]
    assert_right(flash_standins.KERNELS[name], Block(*shifted, *block[4:]))


@pytest.mark.parametrize("is_asked", [False, True])
@PACKAGES
def test_a_package_is_deterministic_where_torch_is_to_be(name: str, is_asked: bool) -> None:
    """In blocks and in segments; what has no deterministic backward is refused, see `REFUSED`."""
    block, calls = ordinary(6, 6), flash_standins.deterministic_calls
    calls.clear()
    torch.use_deterministic_algorithms(is_asked)
    try:
        assert_right(flash_standins.KERNELS[name], block)
        kernel, cu = flash_standins.KERNELS[name], torch.tensor([0, 2, 6], dtype=torch.int32)
        how = block.how._replace(seen=Ragged(cu, cu, 4, 4, -1, 0, None, None))
        q, k, v, grad_out = (x[:1] for x in (block.q, block.k, block.v, block.grad_out))
        kernel.backward(grad_out, q, k, v, *kernel.forward(q, k, v, how), how)
    finally:
        torch.use_deterministic_algorithms(False)
    assert calls == [(name.removesuffix(" on the CPU"), is_asked)] * 2


@PACKAGES
def test_heads_of_latent_attention(name: str) -> None:
    """In blocks and in segments: one of the packages takes such heads as they are, with as many keys as queries."""
    kernel, block = flash_standins.KERNELS[name], ordinary(6, 6, head_dim=192)
    q, k = block.q[:, :2], block.k
    v, grad_out, more_v = (x[:, :2, :, :128] for x in (block.v, block.grad_out, block.more_v))
    block = Block(q, k, v, grad_out, block.more_k, more_v, block.more_mask[:, :2])
    assert_right(kernel, block)
    cu = torch.tensor([0, 2, 6], dtype=torch.int32)
    how = block.how._replace(seen=Ragged(cu, cu, 4, 4, -1, 0, None, None))
    one, by_segments = [x[:1] for x in (q, k, v, grad_out)], []
    for start, stop in ((0, 2), (2, 6)):
        some = [x[:, :, start:stop] for x in one]
        out, lse = reference.forward(*some[:3], block.how._replace(seen=CAUSAL))
        by_segments.append(
            (out, lse, *reference.backward(some[3], *some[:3], out, lse, block.how._replace(seen=CAUSAL)))
        )
    out, lse = kernel.forward(*one[:3], how)
    got = out, lse, *kernel.backward(one[3], *one[:3], out, lse, how)
    assert worst(got, [torch.cat(parts, 2) for parts in zip(*by_segments, strict=True)]) <= 1e-12


def _shifted(x: Tensor, offset: int) -> Tensor:
    """The same at another place in memory."""
    room = x.new_zeros(x.numel() + offset)
    return room[offset:].view(x.shape).copy_(x)


@given(block=blocks(masks=False), offset=st.sampled_from([0, 1, 8]))
def test_flash_on_cuda_is_attention_of_its_block(block: Block, offset: int) -> None:
    """Not on CUDA: how bands, lengths and head dims are handed over, and what is done with what comes back."""
    operators = flash_standins.Aten()
    shifted = [_shifted(x, offset) for x in block[:4]]
    assert_right(flash_standins.flash_of_torch(operators), Block(*shifted, *block[4:]))
    rows, columns = block.q.shape[2], block.k.shape[2]
    if block.band == FULL:
        assert operators.bounds == [(-1, -1)]
    elif block.band == CAUSAL and rows == columns:
        assert operators.bounds == [(-1, 0 if rows > 1 else -1)]


@given(block=blocks(), offset=st.sampled_from([0, 1, 8]))
def test_efficient_is_attention_of_its_block(block: Block, offset: int) -> None:
    shifted = [_shifted(x, offset) for x in block[:4]]
    assert_right(flash_standins.KERNELS["efficient on the CPU"], Block(*shifted, *block[4:]))


@given(block=blocks(masks=False), offset=st.sampled_from([0, 1, 8]))
def test_cudnn_is_attention_of_its_block(block: Block, offset: int) -> None:
    shifted = [_shifted(x, offset) for x in block[:4]]
    assert_right(flash_standins.KERNELS["cudnn on the CPU"], Block(*shifted, *block[4:]))


LAID: dict[str, Callable[[Tensor], Tensor]] = {
    "heads": Tensor.contiguous,
    "tokens": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "rows apart": lambda x: torch.cat([x, x], 2)[:, :, : x.shape[2]],
    "beside others": lambda x: LAID["tokens"](torch.cat([x, x], 1))[:, : x.shape[1]],
}
"""How (B, N, L, H) may lie in memory."""


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("lengths", [(6, 6), (2, 5)], ids=str)
def test_cudnn_is_right_however_its_operands_lie(lengths: tuple[int, int], heads: int) -> None:
    """The stand-in sees that plans, which cuDNN keeps by the strides of q, k and v, fit out and its gradient."""
    kernel, block = flash_standins.KERNELS["cudnn on the CPU"], ordinary(*lengths)
    block = Block(*(x[:, :heads] for x in block[:4]), *block[4:])
    out, lse = reference.forward(*block[:3], block.how)
    want = reference.backward(block.grad_out, *block[:3], out, lse, block.how)
    for q, k, grad_out, mine in product(LAID.values(), repeat=4):
        qkv = q(block.q), k(block.k), k(block.v)
        assert worst(kernel.forward(*qkv, block.how), (out, lse)) <= 1e-12
        assert worst(kernel.backward(grad_out(block.grad_out), *qkv, mine(out), lse, block.how), want) <= 1e-12


@pytest.mark.parametrize("name", ["cudnn on the CPU", "flash of CUDA on the CPU", "efficient on the CPU"])
@pytest.mark.parametrize("lengths", [(40, 64), (64, 64), (70, 192), (192, 192), (1, 128), (1, 64)], ids=str)
def test_rows_whose_scores_are_very_negative(name: str, lengths: tuple[int, int]) -> None:
    """Of which exp(-lse) is no float32: the stand-in of cuDNN gives NaN where some of its versions do."""
    block, far = ordinary(*lengths), 120 / SCALE
    block.q[..., 0], block.k[..., 0], block.more_k[..., 0] = 1.0, -far, -far
    for band in (FULL, CAUSAL) if lengths[0] == lengths[1] else (FULL,):
        expected = oracle(some := block._replace(band=band))
        assert expected.whole_lse.max() < -100
        got = run(flash_standins.KERNELS[name], some, expected)
        assert worst(got, (*expected[:2], *expected.grads)) <= 1e-12 * far


@pytest.mark.parametrize(("name", "band", "lengths", "called"), [
    ("efficient", FULL, (40, 70), True), ("efficient", CAUSAL, (40, 70), True),
    ("efficient", Band(-3, 2), (40, 40), True),
    ("cudnn", FULL, (40, 70), True), ("cudnn", CAUSAL, (40, 40), True), ("cudnn", ANTI_CAUSAL, (40, 40), True),
    ("cudnn", Band(-40, 40), (40, 40), True), ("cudnn", CAUSAL, (40, 70), False), ("cudnn", FULL, (40, 1), False),
    ("cudnn", FULL, (1, 40), False),
    ("cudnn", Band(-3, 2), (40, 40), False),
])  # fmt: skip
def test_what_torchs_operators_are_called_for(name: str, band: Band, lengths: tuple[int, int], called: bool) -> None:
    """What cuDNN is not told the reference computes."""
    operators = flash_standins.Aten()
    run_by = replace(getattr(aten, name.upper()), operators=lambda: operators)
    kernel = BlockKernel(name, run_by.forward, run_by.backward, lambda need: True)
    assert_right(kernel, ordinary(*lengths)._replace(band=band))
    op = f"_scaled_dot_product_{name}_attention"
    assert operators.called == ([op, f"{op}_backward"] if called else [])


@pytest.mark.parametrize("band", BANDS)
@ON_CUDA
def test_bands_of_every_kind_as_windows(name: str, band: Band) -> None:
    for rows, columns in [(8, 8), (1, 1), (5, 8), (8, 5), (9, 2)]:
        assert_right(flash_standins.KERNELS[name], ordinary(rows, columns)._replace(band=band))


@examples(300)
@given(band=st.builds(Band, BOUNDS, BOUNDS), rows=st.integers(1, 12), columns=st.integers(1, 9))
def test_windows_see_what_the_band_does(band: Band, rows: int, columns: int) -> None:
    """To kernels that clip bounds, too; most often in one call."""
    want = visible_in(ordinary(rows, columns)._replace(band=band))[0, 0]
    got = torch.zeros_like(want)
    windows = flash_windows(band, rows, columns)
    for start, stop, seen, left, right in windows:
        lengths = flash_standins.Lengths(stop - start, seen, stop - start, seen)
        is_causal = (left, right) == (-1, 0)
        visible = flash_standins.visible_2(lengths, is_causal, left, right)
        assert visible.equal(flash_standins.visible_3(lengths, is_causal, left, right))
        bounds = (None if bound < 0 else bound for bound in (left, right))
        assert visible.equal(flash_standins.visible_4(lengths, is_causal, *bounds))
        assert visible.any(1).all(), "each row sees a key"
        assert not got[start:stop].any(), "windows share no row"
        got[start:stop, :seen] = visible
        assert left >= -1
        assert right >= -1
    assert got.equal(want)
    assert len(windows) == bool(want.any()) or rows > columns + 1


def test_what_takes_no_mask_says_so() -> None:
    block = ordinary(4, 4)
    how = block.how._replace(mask=listed(torch.ones(1, 1, 4, 4, dtype=torch.bool)))
    for kernel in (aten.CUDA, aten.KERNELS[2], *flash_attn.KERNELS):
        with pytest.raises(ValueError, match=f"kernel='{kernel.name}' takes no mask here: pass kernel='flex'"):
            kernel.forward(*block[:3], how)
        with pytest.raises(ValueError, match=f"kernel='{kernel.name}' takes no mask here: pass kernel='flex'"):
            kernel.backward(block.grad_out, *block[:3], block.grad_out, block.q[..., 0], how)


@pytest.mark.parametrize(("heads", "times"), [(1, 1), (9, 2)])
def test_what_a_small_mask_says_is_kept_with_it(heads: int, times: int) -> None:
    """Of 96 x 96 pairs, in one head or nine; of other sizes, and after another mask, it is asked again."""
    seen = torch.rand(1, heads, 96, 96) < 0.5
    q, mask = torch.empty(1, heads, 96, 8), listed(seen)
    how = How(FULL, SCALE, mask)
    with mock.patch.object(visible, "create_mask", wraps=visible.create_mask) as create:
        for inference in (True, False):
            with torch.inference_mode(inference):
                shown = visible.visible_keys(how, q, q)
                assert shown.equal(seen)
                shown.logical_not_()  # as a kernel of one's own may
            assert not any(kept.is_inference() for kept in visible._known.values())
        assert create.call_count == times
        assert visible.visible_keys(how, q[:, :, :7], q).equal(seen[:, :, :7])
        assert visible.visible_keys(how._replace(mask=listed(~seen)), q, q).equal(~seen)
        assert create.call_count == times + 2
    kept = ref(visible._known[mask])
    del how, mask
    gc.collect()
    assert kept() is None


def stand_in(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | None, scale: float) -> tuple[Tensor, Tensor]:
    """What flex_attention gives, with gradients on CPU."""
    assert scale == SCALE
    seen = visible.visible_keys(How(FULL, SCALE, mask), q, k)
    out, lse = dense(q, k, v, torch.tensor(True) if seen is None else seen)
    return out.to(q.dtype), lse


@given(block=blocks())
def test_flex_takes_its_gradients_from_autograd(block: Block) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex, "attend", stand_in)
        assert_right(flex.KERNEL, block)


def test_flex_records_gradients_below_autograd_and_within_it() -> None:
    """As the attention operator calls it: from another operator, and in a backward."""
    block = ordinary(5, 6)._replace(mask=torch.rand(2, 1, 5, 6) < 0.5)
    expected = oracle(block)
    whole = expected.whole_out, expected.whole_lse

    class Outer(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q: Tensor) -> Tensor:
            return q.clone()

        @staticmethod
        def backward(ctx, grad_out: Tensor) -> Tensor:
            with below_views():
                return flex.KERNEL.backward(grad_out, *block[:3], *whole, block.how)[0]

    q = torch.zeros_like(block.q, requires_grad=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex, "attend", stand_in)
        Outer.apply(q).backward(block.grad_out)
    assert worst_error([(q.grad, expected.grads[0])]) <= 1e-12


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 4), (2, 4)])
def test_flex_attention_looks_the_mask_up(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Not fused: torch refuses its gradients on CPU, although without a fused kernel it has them."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *tensors: None)
    block = ordinary(130, 150, head_dim=8).to(torch.float32)
    mask = torch.rand(*shape, 130, 150) < 0.3
    mask[..., 7, :] = False
    for given_mask, band in [(mask, FULL), (mask, Band(-20, 30)), (None, FULL)]:
        masked = block._replace(mask=given_mask, band=band)
        expected = oracle(masked)
        with below_views():  # as in the attention operator
            got = run(flex.KERNEL, masked, expected)
        assert worst([x.double() for x in got], (*expected[:2], *expected.grads)) <= 1e-5
    compiled = torch.compile(lambda *qkv: flex.KERNEL.forward(*qkv, block.how), backend="aot_eager")
    assert worst(compiled(*block[:3]), flex.KERNEL.forward(*block[:3], block.how)) <= 1e-5


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> CompileCounter:
    """Of flex_attention, compiled on the CPU as it is on CUDA, but not fused."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *tensors: None)
    torch._dynamo.reset()
    counter = CompileCounter()
    monkeypatch.setattr(flex, "flex_attention", torch.compile(flex_attention, backend=counter, fullgraph=True))
    return counter


def asked(mask: Callable[..., Tensor], rows: int, columns: int, first: int) -> BlockMask:
    """A mask_mod as kernels are given it, of the first rows and of columns from another one."""
    name, captured = recorded_mask(mask, (3000, 3000), "cpu")
    answers = Answers.of(name, Captured(captured), 1, [range(4)], torch.device("cpu"))
    return answers.block(range(4), np.array([[0, rows]]), np.array([[first, first + columns]]))


def test_flex_is_compiled_once_for_masks_of_a_kind(programs: CompileCounter) -> None:
    """Whatever block of whatever packing."""
    tags = torch.arange(3000) // 700
    for number, packed in enumerate((tags, tags // 2, tags.flip(0))):

        def documents(b: Tensor, h: Tensor, q: Tensor, k: Tensor, ids: Tensor = packed) -> Tensor:
            return (ids[q] == ids[k]) & (q >= k)

        for rows, columns in ((300, 200), (150, 260), (400, 130), (256, 256)):
            block = ordinary(rows, columns, head_dim=8).to(torch.float32)
            mask = asked(documents, rows, columns, number)
            out, lse = flex.attend(*block[:3], mask, SCALE)
            want = reference.forward(*block[:3], How(FULL, SCALE, mask))
            assert worst_error([(out, want[0])]) <= 1e-5
            assert lse.shape == want[1].shape
    assert programs.frame_count <= 3


MASK_MODS: list[Callable[..., Tensor]] = [
    lambda b, h, q, k: (q >= k) & (q // 90 == k // 90),
    lambda b, h, q, k: (q >= k) | (k < 50),
    lambda b, h, q, k: (q - k).abs() < 40 * (h + 1),  # no comparison: a mask
]


def test_flex_takes_many_masks(programs: CompileCounter) -> None:
    """In both directions, with and without bands, of two head dims: Dynamo by itself gives up after eight programs."""
    for mask_mod, (head_dim, rows, columns) in zip(
        MASK_MODS, ((8, 256, 256), (16, 130, 200), (8, 256, 256)), strict=True
    ):
        block = ordinary(rows, columns, head_dim=head_dim).to(torch.float32)
        for band in (FULL, CAUSAL):
            how = How(band, SCALE, asked(mask_mod, rows, columns, 7))
            whole = reference.forward(*block[:3], how)
            want = *whole, *reference.backward(block.grad_out, *block[:3], *whole, how)
            with below_views():  # as in the attention operator
                got = *flex.forward(*block[:3], how), *flex.backward(block.grad_out, *block[:3], *whole, how)
            assert worst(got, want) <= 1e-5
    assert programs.frame_count > 10


@pytest.mark.usefixtures("programs")
def test_a_mask_in_a_band_is_made_once() -> None:
    """For an evaluation and training, as long as the mask lives."""
    block = ordinary(64, 64, head_dim=8).to(torch.float32)
    mask = listed(torch.rand(1, 1, 64, 64) < 0.5)
    with torch.inference_mode():
        masks = [None, mask, asked(MASK_MODS[0], 64, 64, 1)]
    bands = CAUSAL, Band(-9, 3)
    flex._bands.clear()
    with mock.patch.object(flex, "create_block_mask", wraps=create_block_mask) as create:
        for how in (How(band, SCALE, each) for each in masks for band in bands):
            with torch.inference_mode():
                flex.forward(*block[:3], how)
            whole = reference.forward(*block[:3], how)
            flex.backward(block.grad_out, *block[:3], *whole, how)
    assert create.call_count == len(masks) * len(bands)
    made = ref(flex._blocks(How(CAUSAL, SCALE, mask), block.q, block.k))
    del how, mask, masks
    create.reset_mock()
    gc.collect()
    assert made() is None


def test_a_stand_in_for_an_output_in_float64_of_gradients_whose_squares_underflow() -> None:
    torch.manual_seed(0)
    grad_out = _normal(1, 2, 3, 16) * 1e-200
    delta = (grad_out * _normal(1, 2, 3, 16)).sum(-1)
    got = (grad_out * output_from(grad_out, output_factor(grad_out, delta))).sum(-1)
    assert worst_error([(got * 1e200, delta * 1e200)], relative_to="each") <= 1e-14


def test_merging_nothing_changes_nothing() -> None:
    nothing = torch.zeros(1, 1, 2, 3), torch.full((1, 1, 2), -torch.inf)
    out, lse = torch.zeros(1, 1, 2, 3), torch.full((1, 1, 2), -torch.inf)
    merge_(out, lse, *nothing)
    assert out.eq(0).all()
    assert lse.eq(-torch.inf).all()
    some = torch.randn(1, 1, 2, 3), torch.randn(1, 1, 2)
    merge_(out, lse, *some)
    assert out.equal(some[0])
    merge_(out, lse, *nothing)
    assert out.equal(some[0])
    assert lse.equal(some[1])


def test_merging_far_apart_keeps_the_larger() -> None:
    out, lse = torch.ones(1, 1, 1, 2), torch.full((1, 1, 1), 1e4)
    merge_(out, lse, torch.full((1, 1, 1, 2), 7.0), torch.full((1, 1, 1), -1e4))
    assert out.eq(1).all()
    assert lse.eq(1e4).all()


def test_not_a_number_stays_visible() -> None:
    out, lse = torch.ones(1, 1, 1, 2), torch.zeros(1, 1, 1)
    merge_(out, lse, torch.full((1, 1, 1, 2), torch.nan), torch.full((1, 1, 1), torch.nan))
    assert out.isnan().all()
    assert lse.isnan().all()


def test_a_sink_that_is_not_a_number_stays_visible() -> None:
    """In rows that see nothing, too; and of a sink of no weight a row that is NaN."""
    out, lse = torch.ones(1, 2, 2, 3), torch.tensor([[[0.0, -torch.inf]] * 2])
    whole, whole_lse = with_sinks(out, lse, torch.tensor([torch.nan, -torch.inf]))
    assert whole[0, 0].isnan().all()
    assert whole_lse[0, 0].isnan().all()
    assert whole[0, 1].equal(torch.tensor([[1.0] * 3, [0.0] * 3]))
    assert whole_lse[0, 1].equal(lse[0, 1])
    lse[0, 1, 0] = torch.nan
    assert sinks_gradient(lse, lse, torch.tensor([torch.nan, -torch.inf])).isnan().all()


@given(exponent=st.integers(-37, 30), dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
def test_a_stand_in_for_an_output_has_its_delta(exponent: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    grad_out = (torch.randn(2, 3, 5, 16, dtype=torch.float64) * 10.0**exponent).to(dtype)
    grad_out[0, 0, 0] = 0
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    delta = (grad_out.double() * torch.randn(2, 3, 5, 16, dtype=torch.float64)).sum(-1).to(wide)
    factor = output_factor(grad_out, delta)
    stand_in = output_from(grad_out, factor)
    assert (factor.dtype, stand_in.dtype) == (wide, dtype)
    assert stand_in.isfinite().all()
    assert stand_in[0, 0, 0].eq(0).all()
    got = (grad_out.double() * stand_in.double()).sum(-1)
    unit = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 8e-3}[dtype]
    # float32's denormals have fewer bits.
    assert worst_error([(got, delta.double())], relative_to="each") <= unit


def test_a_stand_in_for_an_output_of_next_to_no_gradient_is_finite() -> None:
    """The factor would be more than there is; what is no number stays none."""
    grad_out = torch.tensor([1e-44, 1e-38, 0.0, 1.0, torch.nan, torch.inf, 1.0]).reshape(1, 1, 7, 1)
    delta = torch.tensor([1e-38, 1e-30, 0.0, 2.0, 1.0, 1.0, torch.nan]).reshape(1, 1, 7)
    stand_in = output_from(grad_out, output_factor(grad_out, delta)).flatten()
    assert stand_in[:4].isfinite().all()
    assert stand_in[2:4].tolist() == [0, 2]
    assert stand_in[4:].isnan().all()


CPU = Need("cpu", torch.float32, 64, 64)
CUDA = Need("cuda", torch.bfloat16, 128, 128)
HOPPER = CUDA._replace(capability=(9, 0))


def test_selecting_a_kernel() -> None:
    for need, name in [
        (CPU._replace(head_dim=17), "flash"),
        (CPU._replace(dtype=torch.float64, masked=True), "flash"),
        (CUDA, "flash"),
        (CUDA._replace(masked=True), "flex"),
        (HOPPER, "flash"),
    ]:
        assert select_kernel("auto", need).name == name
    assert select_kernel("flex", CUDA._replace(dtype=torch.float32)).name == "flex"
    wide = Need("cuda", torch.float64, 999, 999, masked=True, softcap=3.0)
    assert select_kernel("reference", wide).name == "reference"
    for change in [{"dtype": torch.float32}, {"head_dim": 512}, {"value_dim": 512}, {"device_type": "mps"}]:
        with pytest.raises(ValueError, match="pass kernel='reference'"):
            select_kernel("auto", CUDA._replace(**change))
    with pytest.raises(ValueError, match=r"kernel must be one of \('auto', 'flash', .*, got 'fast'; register_kernel"):
        select_kernel("fast", CPU)


def test_what_auto_is_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    registry._say.cache_clear()
    with caplog.at_level("INFO"):
        for _ in range(3):
            select_kernel("auto", CUDA)
            select_kernel("flash", CUDA)
            select_kernel("auto", HOPPER)
    first, on_hopper = (record.message for record in caplog.records)
    assert first == "kernel='auto' is 'flash' on cuda"
    assert on_hopper == first + ", where an H200 took half as long with 'flash_attn_3' or 'flash_attn_4'"


@pytest.mark.parametrize("kernel", ["flash", "flex"])
@pytest.mark.parametrize("need", [CPU, CUDA], ids=["cpu", "cuda"])
def test_kernels_without_a_soft_cap(kernel: str, need: Need) -> None:
    with pytest.raises(ValueError, match=f"kernel='{kernel}' has no soft cap .*: pass kernel='reference'"):
        select_kernel(kernel, need._replace(softcap=30.0))
    block = ordinary(2, 2)._replace(softcap=30.0)
    for each in (*aten.KERNELS, aten.CUDA, flex.KERNEL):
        with pytest.raises(ValueError, match=f"kernel='{each.name}' has no soft cap"):
            each.forward(*block[:3], block.how)
        with pytest.raises(ValueError, match=f"kernel='{each.name}' has no soft cap"):
            each.backward(block.grad_out, *block[:3], block.grad_out, block.q[..., 0], block.how)


def test_soft_caps_take_what_has_one() -> None:
    with pytest.raises(ValueError, match="kernel='auto' is 'flash' on cpu, which has no soft cap"):
        select_kernel("auto", CPU._replace(softcap=30.0))
    with pytest.raises(
        ValueError, match="kernel='auto' is 'flash_attn' for soft caps on cuda, which needs the package"
    ):
        select_kernel("auto", CUDA._replace(softcap=30.0))


def test_masks_on_cuda_take_flex() -> None:
    with pytest.raises(ValueError, match="kernel='flash' takes no mask here: pass kernel='flex'"):
        select_kernel("flash", CUDA._replace(masked=True))
    with pytest.raises(ValueError, match="not in float64"):
        select_kernel("auto", CUDA._replace(dtype=torch.float64, masked=True))
    with pytest.raises(ValueError, match=r"kernel='flex' .* runs on cuda.*; got cpu"):
        select_kernel("flex", CPU._replace(masked=True))


REFUSED = [
    ("efficient", {"device_type": "cpu"}, "runs on cuda, in float32, bfloat16 or float16; got cpu, torch.bfloat16"),
    ("efficient", {"dtype": torch.float64}, "runs on cuda, in float32, bfloat16 or float16; got cuda, torch.float64"),
    ("efficient", {"capability": (7, 5)}, "runs in bfloat16 on compute capability 8.0 and later; got 7.5"),
    ("efficient", {"softcap": 2.0}, "has no soft cap"),
    ("cudnn", {"softcap": 2.0}, "has no soft cap"),
    ("cudnn", {"masked": True}, "takes no mask here: pass kernel='flex'"),
    ("cudnn", {"dtype": torch.float32}, "runs on cuda, in bfloat16 or float16, .* got cuda, torch.float32"),
    ("cudnn", {"device_type": "cpu"}, "runs on cuda, in bfloat16 or float16, .* got cpu"),
    ("cudnn", {"value_dim": 192}, "runs on cuda, .* with head dims of at most 128; got .* head dim 192"),
    ("cudnn", {"deterministic": True}, "has no deterministic backward"),
    ("cudnn", {"capability": (7, 5)}, "runs on compute capability 8.0 and later; got 7.5"),
    ("cudnn", {"capability": (11, 0)}, "is known to be wrong on the family of compute capability 10.x; got 11.0"),
    ("cudnn", {"capability": (10, 3)}, "is known to be wrong on the family of compute capability 10.x; got 10.3"),
    ("flash", {"capability": (7, 5)}, "runs on compute capability 8.0 and later; got 7.5"),
    (
        "flash",
        {"capability": (8, 9), "head_dim": 200},
        "has no backward for head dims of 193 to 224 on compute capabil",
    ),
    ("flash_attn", {"capability": (11, 0)}, r"runs on compute capability 8.x, 9.x, 10.x, 12.x; got 11.0"),
    (
        "flash_attn_3",
        {"value_dim": 200, "deterministic": True},
        "has no deterministic backward for head dims above 192",
    ),
    ("flash_attn_4", {"head_dim": 256, "capability": (10, 0)}, "has head dims of at most 128"),
    ("flash_attn", {"masked": True}, "takes no mask here: pass kernel='flex'"),
    ("flash_attn", {"device_type": "cpu"}, "runs on cuda, in bfloat16 or float16; got cpu, torch.bfloat16"),
    ("flash_attn_3", {"dtype": torch.float32}, "runs on cuda, in bfloat16 or float16; got cuda, torch.float32"),
    ("flash_attn", {"capability": (7, 5)}, r"runs on compute capability 8.x, 9.x, 10.x, 12.x; got 7.5"),
    ("flash_attn_3", {"capability": (10, 0)}, r"runs on compute capability 8.x, 9.x; got 10.0"),
    ("flash_attn_4", {"capability": (8, 0)}, r"runs on compute capability 9.x, .*; got 8.0"),
    ("flash_attn", {"value_dim": 264}, "has head dims of at most 256; got 264"),
    ("flash_attn_4", {"head_dim": 192, "value_dim": 192, "capability": (10, 0)}, "has head dims of at most 128"),
    ("flash_attn_4", {"capability": (12, 0), "softcap": 2.0}, "has no soft cap on compute capability 12.x"),
    ("flash_attn_4", {"capability": (12, 0), "deterministic": True}, "has no deterministic backward"),
    ("flash_attn", {}, "needs the package flash-attn, which is not installed"),
    ("flash_attn_3", {"capability": (9, 0)}, "needs the package flash_attn_3, which is not installed"),
    ("flash_attn_4", {"head_dim": 250, "capability": (9, 0)}, "needs the package flash-attn-4, which is not installed"),
]


@pytest.mark.parametrize(("kernel", "change", "message"), REFUSED)
def test_a_package_says_what_it_cannot_run(kernel: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"kernel='{kernel}' {message}"):
        select_kernel(kernel, CUDA._replace(**change))


def test_a_package_that_is_installed_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "2.8.3")
    package = ModuleType("flash_attn")
    package.__path__ = []
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", flash_standins.FlashAttention2)
    flash_attn._version.cache_clear()
    flash_attn._missing.cache_clear()
    try:
        assert select_kernel("auto", CUDA._replace(softcap=2.0)).name == "flash_attn"
        assert_right(select_kernel("flash_attn", CUDA), ordinary(5, 7)._replace(band=Band(-3, 1)))
        with pytest.raises(ValueError, match=r"flash-attn-4, which cannot be imported: ModuleNotFoundError"):
            select_kernel("flash_attn_4", CUDA)
        # As it was in 2.6, and in FlashAttention-3 of that time.
        old = SimpleNamespace(_flash_attn_forward=lambda q, window_size: None, _flash_attn_backward=None)
        monkeypatch.setitem(sys.modules, "flash_attn_interface", old)
        with pytest.raises(ValueError, match=r"needs another version of flash_attn_3 than flash_attn_3 2\.8\.3"):
            select_kernel("flash_attn_3", CUDA)
    finally:
        flash_attn._version.cache_clear()
        flash_attn._missing.cache_clear()


@pytest.fixture
def registering(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone after it."""
    monkeypatch.setattr(registry, "_kernels", dict(registry._kernels))


@pytest.mark.usefixtures("registering")
def test_the_kernel_of_the_docs() -> None:
    text = (Path(__file__).parent.parent / "docs" / "kernels.md").read_text()
    exec(text.partition("```python\n")[2].partition("```")[0], {})
    found = select_kernel("mine", CPU)
    for block in (ordinary(5, 7), ordinary(6, 6)._replace(band=CAUSAL), ordinary(7, 3)._replace(band=Band(1, 2))):
        assert_right(found, block)
        assert_right(found, block._replace(mask=torch.rand(2, 1, *block.q.shape[2:3], *block.k.shape[2:3]) < 0.5))
    out, lse = found.forward(*ordinary(4, 4).to(torch.bfloat16)[:3], ordinary(4, 4).how)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    with pytest.raises(ValueError, match="kernel='mine' has no soft cap"):
        select_kernel("mine", CPU._replace(softcap=2.0))


@pytest.mark.usefixtures("registering")
def test_a_kernel_of_ones_own() -> None:
    seen: list[Need] = []

    def supports(need: Need) -> bool | str:
        seen.append(need)
        return need.device_type == "cpu" or "is for the CPU"

    for _ in range(2):
        register_kernel("own", reference.forward, reference.backward, supports, "2")
    found = select_kernel("own", CPU)
    assert (found.name, found.version) == ("own", "2")
    with pytest.raises(ValueError, match="kernel='own' is for the CPU"):
        select_kernel("own", CUDA)
    assert seen == [CPU, CUDA]
    for name in ("", "auto", "flash", "reference", "flash_attn_4"):
        with pytest.raises(ValueError, match="register another name"):
            register_kernel(name, reference.forward, reference.backward, supports)
    # Between a forward and its backward, say.
    with pytest.raises(ValueError, match="there is another kernel 'own'"):
        register_kernel("own", reference.forward, flex.backward, supports, "2")
    for wrong in [(3, reference.forward), ("fine", None)]:
        with pytest.raises(TypeError, match="a name, three functions and perhaps a version"):
            register_kernel(*wrong, reference.backward, supports)


@pytest.mark.parametrize(("answer", "kind", "message"), [
    (False, ValueError, "does not support this call"), ("", ValueError, "does not support this call"),
    (None, TypeError, "must return True or why not, got None"), (1, TypeError, "must return True or why not, got 1"),
])  # fmt: skip
@pytest.mark.usefixtures("registering")
def test_what_a_kernel_says_that_it_supports(answer: Any, kind: type[Exception], message: str) -> None:
    register_kernel(f"says {answer!r}", reference.forward, reference.backward, lambda need: answer)
    with pytest.raises(kind, match=message):
        select_kernel(f"says {answer!r}", CPU)


@pytest.mark.parametrize(("activated", "name"), [("FA3", "flash_attn_3"), ("FA4", "flash_attn_4")])
@pytest.mark.parametrize("asked", ["auto", "flash"])
def test_flash_is_the_package_that_torch_was_told_to_call(
    asked: str, activated: str, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: activated)
    registry._say.cache_clear()
    why = f"kernel='{asked}' is '{name}' since activate_flash_attention_impl('{activated}') was called"
    with pytest.raises(ValueError, match=re.escape(f"{why}, which needs the package ")):
        select_kernel(asked, CUDA)
    with pytest.raises(ValueError, match=re.escape(f"{why}, which runs on compute capability ")):
        select_kernel(asked, CUDA._replace(capability=(7, 5)))
    monkeypatch.setattr(flash_attn, "_missing", lambda package: "")
    with caplog.at_level("INFO"):
        found = [select_kernel(asked, need) for need in (CUDA, HOPPER, CUDA)]
    assert {kernel.name for kernel in found} == {name}
    assert [record.message for record in caplog.records] == [why]
    # Elsewhere nothing is activated.
    assert select_kernel(asked, CPU) == aten.CPU
    assert select_kernel("cudnn", CUDA).name == "cudnn"


def test_an_unknown_implementation_of_torchs_is_not_called_flash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA5")
    with pytest.raises(ValueError, match=r"'flash' on cuda, which is torch's own, .*impl\('FA5'\) has put another"):
        select_kernel("auto", CUDA)
    assert select_kernel("auto", CPU).name == "flash"


def test_cudnn_is_of_nvidia_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(ValueError, match="kernel='cudnn' needs cuDNN, which this torch has been built without"):
        select_kernel("cudnn", HOPPER)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 3004000)  # MIOpen's
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with pytest.raises(ValueError, match="kernel='cudnn' runs on NVIDIA's GPUs"):
        select_kernel("cudnn", HOPPER)


def test_an_old_cudnn_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for version, works in [(91500, False), (91501, True)]:
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda version=version: version)
        if works:
            assert select_kernel("cudnn", HOPPER).name == "cudnn"
        else:
            with pytest.raises(ValueError, match=r"kernel='cudnn' needs cuDNN 9\.15\.1 or later; got 91500"):
                select_kernel("cudnn", HOPPER)


@ON_CUDA
def test_not_a_number_reaches_all_that_depends_on_it(name: str) -> None:
    """These kernels give such rows a sum that is infinite."""
    block = ordinary(6, 6)._replace(band=CAUSAL)
    block.k[0, 0, 3] = torch.nan
    kernel = flash_standins.KERNELS[name]
    results = []
    for each in (kernel, reference.KERNEL):
        out, lse = each.forward(*block[:3], block.how)
        results.append((out, lse, *each.backward(block.grad_out, *block[:3], out, lse, block.how)))
    for mine, want in zip(*results, strict=True):
        assert want.isnan().any()
        assert mine.isnan().equal(want.isnan())
        assert worst_error([(mine.nan_to_num(0), want.nan_to_num(0))]) <= 1e-12


@pytest.mark.parametrize(("capability", "heads", "dims", "given"), [
    ((9, 0), (4, 2), (80, 80), (96, 96)), ((9, 0), (4, 2), (24, 20), (24, 24)),
    ((9, 0), (4, 4), (104, 104), (128, 128)), ((9, 0), (4, 4), (136, 136), (136, 136)),
    ((9, 0), (4, 4), (64, 128), (128, 128)), ((9, 0), (2, 1), (40, 8), (64, 64)),
    ((9, 0), (3, 3), (192, 128), (192, 128)), ((9, 0), (4, 2), (192, 128), (192, 192)),
    ((9, 0), (3, 3), (192, 112), (192, 128)), (None, (4, 2), (80, 80), (96, 96)),
    ((10, 0), (4, 2), (192, 128), (192, 128)), ((10, 0), (4, 2), (80, 36), (80, 40)),
    ((12, 0), (4, 4), (64, 40), (64, 64)), ((12, 0), (4, 4), (80, 128), (96, 128)),
])  # fmt: skip
def test_head_dims_that_flash_attention_4_is_given(
    capability: tuple[int, int] | None, heads: tuple[int, int], dims: tuple[int, int], given: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(flash_attn, "capability_of", lambda _: capability)
    q, k, v = (torch.empty(1, n, 5, dim) for n, dim in zip((heads[0], *heads[1:] * 2), (dims[0], *dims), strict=True))
    assert flash_attn._widths_4(q, k, v) == given


@pytest.mark.parametrize(("dims", "said"), [((16, 16), True), ((8, 64), "takes head dims from 16 on, got 8 and 64")])
def test_flex_says_which_head_dims_it_takes(dims: tuple[int, int], said: str | bool) -> None:
    """Others Inductor refuses once it compiles, when hops are on their way."""
    found = flex.KERNEL.supports(Need("cuda", torch.bfloat16, *dims, masked=True))
    assert found is True if said is True else str(found).startswith(str(said))
