"""Partial results merged, and added up, by Triton's kernel as on CUDA: here under its interpreter, on the CPU."""

import importlib
import math
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest
import torch
import triton
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.cases import Case, run_uncounted
from tests.metp_cases import FeedForwardBlock, assert_ratio, expected, run, whole
from tests.strategies import any_case, examples
from tests.test_equivalence import assert_error_ratio
from wallfacer_dt import calls
from wallfacer_dt.algorithms import arithmetic
from wallfacer_dt.algorithms.arithmetic import Arithmetic, Backward, Forward, Operand, Scores
from wallfacer_dt.kernels import merge, reference
from wallfacer_dt.kernels.merge import merge_, with_sinks
from wallfacer_dt.testing import RankPool, worst_error

Ranks = Callable[[int], RankPool]
SHAPES = [(1, 1, 1, 1), (2, 3, 70, 33), (1, 2, 5, 128)]


@pytest.fixture
def combining(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """The module with the kernel, interpreted or not: Triton reads this when a kernel is made."""

    def module(interpret: str) -> Any:
        monkeypatch.setenv("TRITON_INTERPRET", interpret)
        monkeypatch.delitem(sys.modules, "wallfacer_dt.kernels.merge_triton", raising=False)
        return importlib.import_module("wallfacer_dt.kernels.merge_triton")

    return module


@pytest.mark.filterwarnings("ignore:divide by zero encountered in log:RuntimeWarning")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_merging(dtype: torch.dtype, shape: tuple[int, ...], combining: Callable[[str], Any]) -> None:
    """Parts of larger tensors, laid out by tokens; rows that see nothing on either side, or both, and NaN."""
    torch.manual_seed(0)
    batch, heads, length, width = shape
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    out = torch.randn(batch, heads, length + 9, width, dtype=wide)
    more_out = torch.randn(batch, length + 9, heads, width).to(dtype).transpose(1, 2)
    lse, more_lse = (torch.randn(batch, heads, length + 9, dtype=wide) for _ in range(2))
    for x, its, rows in ((out, lse, slice(0, 4)), (more_out, more_lse, slice(2, 5))):
        x[:, :, rows], its[:, :, rows] = 0, -torch.inf
    out[..., 6, :] = more_out[..., 7, :] = lse[..., 7] = more_lse[..., 0] = torch.nan
    got = out.clone(), lse.clone()
    part = slice(0, length + 8)
    merge_(out[:, :, part], lse[:, :, part], more_out[:, :, part], more_lse[:, :, part])
    mine, more = ([x[:, :, part] for x in some] for some in (got, (more_out, more_lse)))
    combining("1").combine_into(mine, more, mine)
    for mine, want in zip(got, (out, lse), strict=True):
        unseen = want == -torch.inf
        assert unseen.equal(mine == -torch.inf)
        assert want.isnan().equal(mine.isnan())
        hidden = unseen | want.isnan()
        assert worst_error([(mine.masked_fill(hidden, 0), want.masked_fill(hidden, 0))]) <= 8 * torch.finfo(wide).eps


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("shape", [*SHAPES, (1, 1, 2, 4100)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("last", [False, True])
def test_adding(dtype: torch.dtype, shape: tuple[int, ...], last: bool) -> None:
    """Every layout, NaN too: the second widens the first, the third is added in place unless it is the last."""
    torch.manual_seed(0)
    batch, heads, length, width = shape
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    first = torch.randn(batch, length, heads, width).to(dtype).transpose(1, 2)
    second = torch.randn(batch, heads, length, width + 3).to(dtype)[..., :width]
    third = torch.randn(batch, heads, width, length).to(wide).mT
    first[..., 0, 0] = torch.nan
    parts = [(x, x + 1) for x in (first, second, third)]
    want = [torch.stack([x.to(wide) for x in some]).sum(0) for some in zip(*parts, strict=True)]
    keys, sums = Operand((first, first)), Backward(Scores(reference.KERNEL, 1.0))
    sums.combine(keys, parts[0])
    assert keys.partial is parts[0]
    sums.combine(keys, parts[1])
    two = keys.partial
    assert [x.dtype for x in two] == [wide] * 2
    sums.combine(keys, parts[2], last=last)
    assert all((x is before) == (not last or dtype == wide) for x, before in zip(keys.partial, two, strict=True))
    for x, right in zip(keys.partial, want, strict=True):
        unit = torch.finfo(dtype if last else wide).eps
        assert x.dtype == (dtype if last else wide)
        assert x.isnan().equal(right.isnan())
        assert worst_error([(x.nan_to_num(0).to(wide), right.nan_to_num(0))]) <= 8 * unit


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch, combining: Callable[[str], Any]) -> None:
    """Partial results are combined by the kernel wherever they are."""
    combining("1")
    for module in (arithmetic, merge):
        monkeypatch.setattr(module, "is_fused", lambda x: True)


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("stays_wide", [False, True])
def test_the_second_partial_result_widens_the_first(stays_wide: bool) -> None:
    """By the same kernel, whatever the layouts; the third is merged in place, and the last into the inputs' dtype."""
    torch.manual_seed(0)
    outs = [torch.randn(2, 5, 3, 12).bfloat16().transpose(1, 2)[..., :10] for _ in range(4)]
    some = [(out, torch.randn(2, 3, 5)) for out in outs]
    want = [(out.clone(), lse.clone()) for out, lse in some]
    operand, forward = Operand((outs[0],)), Forward(Scores(reference.KERNEL, 1.0), 10, stays_wide)
    forward.combine(operand, some[0])
    assert operand.partial is some[0]
    forward.combine(operand, some[1])
    wide = operand.partial
    forward.combine(operand, some[2])
    assert operand.partial == wide
    assert [x.dtype for x in wide] == [torch.float32] * 2
    assert_merged(wide, want[:3], 1e-6)
    forward.combine(operand, some[3], last=True)
    assert [x.dtype for x in operand.partial] == [torch.float32 if stays_wide else torch.bfloat16, torch.float32]
    assert_merged(operand.partial, want, 1e-6 if stays_wide else 2**-7)
    operand.partial = want[0][0], want[0][1].clone()
    forward.combine(operand, want[1], last=True)
    assert_merged(operand.partial, want[:2], 1e-6 if stays_wide else 2**-7)


def assert_merged(got: tuple[Tensor, ...], some: list[tuple[Tensor, Tensor]], tolerance: float) -> None:
    """These partial results are in it."""
    lses = torch.stack([lse for _, lse in some]).double()
    want = sum(out.double() * w.unsqueeze(-1) for out, w in zip((x for x, _ in some), lses.softmax(0), strict=True))
    assert worst_error([(got[0].double(), want)]) <= tolerance
    assert worst_error([(got[1].double(), lses.logsumexp(0))]) <= 1e-6


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_merging_in_place_is_in_place(dtype: torch.dtype) -> None:
    out, lse = torch.ones(1, 1, 2, 4, dtype=dtype), torch.zeros(1, 1, 2)
    merge_(out, lse, 3 * out, lse.clone())
    assert out.equal(torch.full_like(out, 2))
    assert worst_error([(lse, torch.full_like(lse, math.log(2)))]) <= 1e-6


@pytest.mark.usefixtures("fused")
def test_what_has_no_width_is_left_alone() -> None:
    lse = torch.zeros(1, 1, 4)
    some = [(torch.randn(1, 1, 4, 3)[..., :0], lse.clone()) for _ in range(2)]
    into = merge.combined(*some, torch.float32)
    assert worst_error([(into[1], lse + math.log(2))]) <= 1e-6
    assert merge.combined(some[0][:1], some[1][:1], torch.float32)[0].shape == (1, 1, 4, 0)


@pytest.mark.parametrize("merges", [True, False])
def test_the_kernel_compiles_for_a_gpu(merges: bool, combining: Callable[[str], Any]) -> None:
    """Without one: what the interpreter lets pass, a compiler may refuse."""
    kernel = combining("0").combine_rows
    statistics = ("lse", "more_lse", "to_lse")
    constants = {"DTYPE": triton.language.float32, "WIDTH": 128, "ROWS": 32}
    constants |= {} if merges else dict.fromkeys(statistics)
    pointers = dict.fromkeys((*statistics, "to_out"), "*fp32") | dict.fromkeys(("out", "more_out"), "*bf16")
    types = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in kernel.arg_names}
    source = ASTSource(kernel, types, constexprs=constants)
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    told = [what for what, _ in groupby(re.findall(r"ld\.global|bar\.sync|st\.global", ptx))]
    # What a warp writes in place no other has yet to read.
    assert told == ["ld.global", *["bar.sync"] * merges, "st.global"]


HERE = threading.local()
OUTGOING = Arithmetic.outgoing


def combine_by_the_kernel() -> None:
    """On these ranks from now on, where the dtypes of results are noted before they are made what is wanted."""
    os.environ["TRITON_INTERPRET"] = "1"
    arithmetic.is_fused = merge.is_fused = lambda x: True
    Arithmetic.outgoing = noted
    calls.with_sinks = noted_with_sinks


def noted(self: Arithmetic, partial: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """``outgoing``."""
    names = ("out", "lse") if isinstance(self, Forward) else ("dq", "dk", "dv")
    HERE.found = vars(HERE).get("found", {}) | {name: x.dtype for name, x in zip(names, partial, strict=False)}
    return OUTGOING(self, partial, dtype)


def noted_with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """``with_sinks``."""
    HERE.found = vars(HERE).get("found", {}) | {"out without sinks": out.dtype}
    return with_sinks(out, lse, sinks)


@pytest.fixture(scope="module")
def combined() -> Iterator[Ranks]:
    """Ranks whose partial results are combined by the kernel."""
    pool = RankPool(4, threads=True)
    pool.run(combine_by_the_kernel)
    yield lambda size: pool
    pool.close()


@pytest.mark.parametrize("axes", [(4, 1), (2, 2)])
def test_a_feed_forward_is_as_good_as_one_process(combined: Ranks, axes: tuple[int, int]) -> None:
    """Whose sums are of weights and biases."""
    case = Case(*axes, length=64, dtype="bfloat16")
    block = FeedForwardBlock(case, dim=32, out=32, hidden=97, activation="silu", gated=True, biases=("up", "down"))
    found = whole(block, combined(4).run(run, block))
    assert_ratio(found, expected(block, None), expected(block), torch.finfo(torch.bfloat16).eps)


@examples(20)
@given(data=st.data())
def test_any_case_is_as_good_as_one_process(combined: Ranks, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(["float32", "bfloat16", "float16"]))
    fixed = {"dtype": dtype, "softcap": None, "kernel": "auto", "inputs": "normal"}
    assert_error_ratio(combined, data.draw(any_case(4, shortest=24, longest=48, **fixed)), most=4.0)


def run_watched(case: Case) -> dict[str, torch.dtype]:
    """Of what dtypes results are, before they are made what is wanted."""
    HERE.found = {}
    run_uncounted(case)
    return HERE.found


WHOLE = Case(dtype="bfloat16", shard=16)


@pytest.mark.parametrize(
    ("rotate", "case", "part"), [
        ("q", {"ring": 4, "team": 1}, False), ("kv", {"ring": 1, "team": 4}, False),
        ("kv", {}, False), ("q", {}, False), ("kv", {"schedule": "rings"}, False), ("q", {"schedule": "rings"}, False),
        ("auto", {"ring": 4, "team": 1, "schedule": "published"}, False), ("auto", {"schedule": "published"}, False),
        ("kv", {"ring": 1, "ulysses": 2}, False), ("q", {"is_causal": True, "order": "head_tail"}, False),
        ("kv", {"ring": 4, "team": 1}, True), ("q", {"ring": 1, "team": 4}, True),
        ("kv", {"ring": 4, "team": 1, "is_causal": True}, True),
    ], ids=str,
)  # fmt: skip
def test_the_last_partial_result_is_written_as_it_is_wanted(
    combined: Ranks, rotate: str, case: dict[str, Any], part: bool
) -> None:
    """Unless it is a ``part`` of own queries, kept to hide a transfer of what is computed for the keys."""
    case = replace(WHOLE, rotate=rotate, rotate_forward=rotate, **case)
    for found in combined(4).run(run_watched, case):
        assert found.pop("lse") == torch.float32
        assert found.pop("dq") == (torch.float32 if part else torch.bfloat16)
        assert found == dict.fromkeys(("out", "dk", "dv"), torch.bfloat16)


def test_with_sinks_it_stays_wide(combined: Ranks) -> None:
    """They are added before the output is rounded."""
    for found in combined(4).run(run_watched, replace(WHOLE, sinks=True)):
        assert found["out without sinks"] == torch.float32
