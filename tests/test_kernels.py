"""The fused kernel against the reference, the reference against autograd, and the merging of partial results."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from wallfacer_dt.kernels import merge_, output_with_delta, reference, select_kernel
from wallfacer_dt.kernels.block import BlockKernel
from wallfacer_dt.testing import attention_oracle

FLASH = select_kernel("flash", "cpu", torch.float64, 16)


@st.composite
def blocks(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, Tensor, bool]:
    """q, k, v, grad_out, is_causal."""
    torch.manual_seed(draw(st.integers(0, 1000)))
    is_causal = draw(st.booleans())
    batch, kv_heads = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    heads, head_dim = kv_heads * draw(st.sampled_from([1, 2, 3, 8])), draw(st.sampled_from([1, 7, 16, 33, 128]))
    rows = draw(st.integers(1, 9))
    columns = rows if is_causal else draw(st.integers(1, 9))
    q, grad_out = (torch.randn(batch, heads, rows, head_dim, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(batch, kv_heads, columns, head_dim, dtype=torch.float64) for _ in range(2))
    return q, k, v, grad_out, is_causal


@pytest.mark.parametrize("kernel", [reference.KERNEL, FLASH], ids=lambda kernel: kernel.name)
@given(block=blocks())
def test_a_kernel_is_attention_of_its_block(kernel: BlockKernel, block: tuple) -> None:
    q, k, v, grad_out, is_causal = block
    expected = attention_oracle(q, k, v, grad_out, is_causal=is_causal, scale=0.3)
    out, lse = kernel.forward(q, k, v, is_causal=is_causal, scale=0.3)
    grads = kernel.backward(grad_out, q, k, v, out, lse, is_causal=is_causal, scale=0.3)
    for got, want in zip((out, *grads), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    scores = 0.3 * q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=0, atol=1e-12)


@given(block=blocks(), cut=st.integers(1, 8))
def test_merging_blocks_is_attention_over_all_keys(block: tuple, cut: int) -> None:
    q, k, v, _, _ = block
    whole, whole_lse = reference.forward(q, k, v, is_causal=False, scale=0.3)
    out, lse = torch.zeros_like(q), torch.full(q.shape[:-1], -torch.inf, dtype=q.dtype)
    for start in range(0, k.shape[2], cut):
        part = slice(start, start + cut)
        merge_(out, lse, *reference.forward(q, k[:, :, part], v[:, :, part], is_causal=False, scale=0.3))
    torch.testing.assert_close(out, whole, rtol=0, atol=1e-12)
    torch.testing.assert_close(lse, whole_lse, rtol=0, atol=1e-12)


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


@given(exponent=st.integers(-37, 30), dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
def test_output_with_delta_has_that_delta(exponent: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    grad_out = (torch.randn(2, 3, 5, 16, dtype=torch.float64) * 10.0**exponent).to(dtype)
    grad_out[0, 0, 0] = 0
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    delta = (grad_out.double() * torch.randn(2, 3, 5, 16, dtype=torch.float64)).sum(-1).to(wide)
    stand_in = output_with_delta(grad_out, delta)
    assert stand_in.dtype == dtype
    assert stand_in.isfinite().all()
    assert stand_in[0, 0, 0].eq(0).all()
    got = (grad_out.double() * stand_in.double()).sum(-1)
    unit = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 8e-3}[dtype]
    # float32's denormals have fewer bits.
    torch.testing.assert_close(got, delta.double(), rtol=unit, atol=1e-43)


def test_selecting_a_kernel() -> None:
    assert select_kernel("auto", "cpu", torch.float32, 17).name == "flash"
    assert select_kernel("auto", "cuda", torch.bfloat16, 128).name == "flash"
    assert select_kernel("reference", "cuda", torch.float64, 999).name == "reference"
    for refused in [("cuda", torch.float32, 64), ("cuda", torch.bfloat16, 512), ("mps", torch.bfloat16, 64)]:
        with pytest.raises(ValueError, match="pass kernel='reference'"):
            select_kernel("auto", *refused)
    with pytest.raises(ValueError, match="kernel must be one of"):
        select_kernel("fast", "cpu", torch.float32, 64)
