"""Attention on real ranks equals attention of one process: output and all three gradients."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import SDPBackend

from tests.cases import Case, draw, oracle, run_uncounted, whole
from tests.strategies import cases
from wallfacer_dt.testing import AttentionResult, RankPool

pytestmark = pytest.mark.ranks
Ranks = Callable[[int], RankPool]


def on_ranks(ranks: Ranks, case: Case) -> AttentionResult:
    return whole(case, ranks(case.size).run(run_uncounted, case))


def assert_close(got: AttentionResult, case: Case, tolerance: float) -> None:
    """Absolute error, for inputs of order one; gradients are sums of products with q and k, so of their order."""
    order = max(1.0, *(float(x.abs().max()) for x in draw(case)[:2])) if case.inputs == "huge" else 1.0
    for name, mine, theirs in zip(AttentionResult._fields, got, oracle(case), strict=True):
        error = float((mine - theirs).abs().max())
        assert error <= tolerance * order, f"{name}: {error:.3e}"


@pytest.mark.parametrize("size", range(1, 9))
@settings(max_examples=150)
@given(data=st.data())
def test_float64_is_exact_to_rounding(ranks: Ranks, size: int, data: st.DataObject) -> None:
    case = data.draw(cases(range(size, size + 1)))
    assert_close(on_ranks(ranks, case), case, 1e-10)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("size", range(1, 9))
@settings(max_examples=25)
@given(data=st.data())
def test_low_precision_is_as_good_as_one_process(ranks: Ranks, size: int, dtype: str, data: st.DataObject) -> None:
    """Error against float64 at most twice that of torch's kernel in the same dtype."""
    # Enough rows for a root mean square to mean something: rounding errors of one row's entries are alike.
    shard = 2 * data.draw(st.integers(12, 24))
    fixed = {"dtype": dtype, "kernel": "auto", "inputs": "normal", "batch": 2, "shard": shard}
    assert_error_ratio(ranks, data.draw(cases(range(size, size + 1), **fixed)))


def assert_error_ratio(ranks: Ranks, case: Case, most: float = 2.0) -> None:
    exact = oracle(case)
    single = oracle(case, dtype=None, backend=SDPBackend.FLASH_ATTENTION)
    ours = on_ranks(ranks, case)
    unit = torch.finfo(getattr(torch, case.dtype)).eps
    # exp() turns the rounding of a large score into a relative error of that size, in whichever order it is summed.
    largest_score = 1e4 if case.inputs == "huge" else 1
    for name, got, one, expected in zip(AttentionResult._fields, ours, single, exact, strict=True):
        # Where one process is right by luck (a single key, say), one rounding of a typical entry is still allowed.
        allowed = most * max(rms(one.double() - expected), unit / 4 * largest_score * rms(expected))
        assert rms(got - expected) <= allowed, f"{name}: {rms(got - expected):.3e} > {allowed:.3e}"


def rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())


@pytest.mark.parametrize("rotate", ["kv", "q"])
@pytest.mark.parametrize("mesh", [(2, 1), (4, 1), (8, 1), (4, 2), (1, 8)])
def test_bfloat16_error_does_not_grow_with_the_ring(ranks: Ranks, mesh: tuple[int, int], rotate: str) -> None:
    ring, team = mesh
    case = Case(ring=ring, team=team, shard=512 // (ring * team), heads=4, kv_heads=2, head_dim=32, rotate=rotate)
    assert_error_ratio(ranks, replace(case, dtype="bfloat16"), most=1.5)


@pytest.mark.parametrize("inputs", ["huge", "equal", "zero_grad", "tiny_grad"])
@pytest.mark.parametrize("rotate", ["kv", "q"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("mesh", [(4, 1), (2, 2), (1, 4)])
def test_numbers_that_hurt(ranks: Ranks, mesh: tuple[int, int], dtype: str, rotate: str, inputs: str) -> None:
    case = Case(*mesh, dtype=dtype, rotate=rotate, inputs=inputs, is_causal=True, order="head_tail", heads=4)
    got = on_ranks(ranks, case)
    assert all(x.isfinite().all() for x in got)
    if dtype == "float64":
        assert_close(got, case, 1e-10)
    else:
        assert_error_ratio(ranks, case)
    if inputs == "tiny_grad":  # right to relative, not only to absolute precision
        for mine, theirs in zip(got[1:], oracle(case)[1:], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5 * float(theirs.abs().max()))


@pytest.mark.parametrize("mesh", [(8, 1), (4, 2), (2, 4), (1, 8)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_one_token_per_rank(ranks: Ranks, mesh: tuple[int, int], is_causal: bool) -> None:
    case = Case(*mesh, shard=1, is_causal=is_causal)
    assert_close(on_ranks(ranks, case), case, 1e-10)
