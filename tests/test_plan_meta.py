"""What ops make on the meta device, told by the planner, against torch's own."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tests.strategies import examples
from wallfacer_dt.planning.meta import call

aten = torch.ops.aten
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64]


@st.composite
def tensors(draw: st.DrawFn, size: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
    """Of a size, its dims in any order in memory, perhaps cut out of a larger one or expanded."""
    order = draw(st.permutations(range(len(size))))
    is_expanded = [draw(st.integers(0, 9)) == 0 for _ in size]
    whole = [1 if wide else n + draw(st.sampled_from([0, 0, 3])) for n, wide in zip(size, is_expanded, strict=True)]
    x = torch.empty_permuted(whole, order, dtype=dtype or draw(st.sampled_from(DTYPES)), device="meta")
    for dim, (n, wide) in enumerate(zip(size, is_expanded, strict=True)):
        x = x.expand(*[n if i == dim else -1 for i in range(len(size))]) if wide else x.narrow(dim, 0, n)
    return x


@st.composite
def ops(draw: st.DrawFn) -> tuple[Any, tuple, dict[str, Any]]:
    """Elementwise ones of tensors that are broadcast, a reduction, and joining, into new tensors or what is there."""
    size = tuple(draw(st.lists(st.integers(1, 4), max_size=5)))
    x = draw(tensors(size))
    name = draw(
        st.sampled_from(["unary", "binary", "ternary", "comparison", "in place", "out", "cat", "cat.out", "norm"])
    )
    if name == "unary":
        finite = aten.nan_to_num.default, (x, torch.nan, torch.inf, 0.0), {}
        layouts = [torch.contiguous_format, torch.preserve_format] + [torch.channels_last] * (len(size) == 4)
        copied = aten.clone.default, (x,), {"memory_format": draw(st.sampled_from(layouts))}
        others = [(aten.sigmoid.default, (x,), {}), (aten.clamp_min.default, (x, 1.5), {}), copied]
        return draw(st.sampled_from([finite, *others]))
    if name in ("cat", "cat.out", "norm"):
        size = size or (2,)
        dim = draw(st.integers(-len(size), len(size) - 1))
        if name == "norm":
            keepdim = draw(st.booleans())
            return aten.linalg_vector_norm.default, (draw(tensors(size, torch.float32)), 2, [dim], keepdim), {}
        parts = []
        for n in draw(st.lists(st.integers(0, 3), min_size=1, max_size=3)):
            parts.append(draw(tensors(tuple(n if i == dim % len(size) else m for i, m in enumerate(size)))))
        if name == "cat":
            return aten.cat.default, (parts, dim), {}
        out = torch.empty(draw(st.sampled_from([aten.cat.default(parts, dim).shape, (0,)])), device="meta")
        return aten.cat.out, ([part.float() for part in parts], dim), {"out": out}
    smaller = [1 if draw(st.booleans()) else n for n in size][draw(st.integers(0, len(size))) :]
    y = draw(tensors(tuple(smaller)))
    if name == "binary":
        return draw(st.sampled_from([(aten.sub.Tensor, (x, y), {"alpha": 2}), (aten.mul.Tensor, (y, x), {}),
                                     (aten.maximum.default, (x, y), {}), (aten.div.Tensor, (x, y), {})]))  # fmt: skip
    if name == "ternary":
        return aten.where.self, (draw(tensors(size, torch.bool)), x, y), {}
    if name == "comparison":
        return aten.lt.Tensor, (x, y), {}
    x, y = x.float(), y.float()
    if name == "in place":
        return draw(st.sampled_from([(aten.add_.Tensor, (x, y), {}), (aten.copy_.default, (x, y), {}),
                                     (aten.lerp_.Tensor, (x, x, y), {})]))  # fmt: skip
    out = torch.empty(draw(st.sampled_from([size, (0,)])), device="meta")
    return aten.logaddexp.out, (x, y), {"out": out}


def shown(made: Any) -> list[tuple]:
    """All of tensors that there is; the stride of a dim of one element may be any."""
    return [
        (x.shape, [step for n, step in zip(x.shape, x.stride(), strict=True) if n > 1] if x.numel() else (), x.dtype,
         x.device, x.untyped_storage().nbytes())
        for x in tree_leaves(made)
    ]  # fmt: skip


@examples(1000, today=500)
@given(ops())
def test_what_is_told_of_an_op_is_what_torch_makes(op: tuple[Any, tuple, dict[str, Any]]) -> None:
    func, args, kwargs = op
    others = {name: torch.empty_like(x) if name == "out" else x for name, x in kwargs.items()}
    assert shown(call(func, args, kwargs)) == shown(func(*args, **others))


def test_what_is_rare_is_asked_of_torch() -> None:
    x = torch.empty(3, device="meta")
    assert call(aten.linalg_vector_norm.default, (x.cfloat(), 2, [0], False), {}).dtype == torch.float32
    assert call(aten.add.Tensor, (x.to(torch.float8_e4m3fn), x.to(torch.float8_e4m3fn)), {}).shape == (3,)
    assert call(aten._foreach_add_.Scalar, ([x, x], 1), {}) is None
    copied = call(aten.clone.default, (x.expand(2, 3).T,), {"memory_format": torch.contiguous_format})
    assert copied.stride() == (2, 1)
    with pytest.raises((RuntimeError, ValueError)):
        call(aten.linalg_vector_norm.default, (x.int(), 2, [0], False), {})


def test_a_plan_does_not_import_torchs_compiler() -> None:
    code = (
        "import sys; from wallfacer_dt.command.__main__ import main; "
        "status = main('plan --cluster h100x2 --model llama3-8b --seq 8k --causal'.split()); "
        "assert 'torch._dynamo' not in sys.modules; sys.exit(status)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


@pytest.mark.parametrize("length", [3, 4])
def test_what_is_known_of_an_op_on_the_meta_device_is_what_torch_makes(length: int) -> None:
    """The second time as the first, of other sizes and scalars another."""
    x, rows = torch.empty(2, length, 5, device="meta").transpose(1, 2), torch.empty(2, 5, 1, device="meta")
    counts = torch.empty(length, device="meta", dtype=torch.int64)
    column, planes = counts.new_empty(7, 1), torch.empty(4, 1, 5, 1, device="meta")
    calls = [
        (aten.sub.Tensor, (counts, column), {}), (aten.sub.Tensor, (column, counts), {}),
        (aten.mul.Tensor, (column, torch.empty(6, 1, length, device="meta")), {}),
        (aten.add.Tensor, (planes, x), {}), (aten.add.Tensor, (rows, planes), {}),
        (aten.ge.Tensor, (counts, column), {}),
        (aten.__and__.Tensor, (counts, column), {}),
        (aten.any.dim, (x > 0, -1), {}), (aten.any.dim, (column > 0, 0, True), {}),
        (aten.sub.Tensor, (x, rows), {}), (aten.sub.Tensor, (rows, rows), {}), (aten.cat.default, ([x, x], 2), {}),
        (aten.mul.Scalar, (counts, 2), {}), (aten.mul.Scalar, (counts, 2.0), {}), (aten.unbind.int, (x,), {}),
        (aten.empty_like.default, (x,), {"dtype": torch.float64}), (aten.empty.memory_format, ([2],), {}),
        (aten.aminmax.default, (x,), {"dim": 1}), (aten.expand_copy.default, (rows, [2, 5, 7]), {}),
    ]  # fmt: skip
    for func, args, kwargs in calls * 2:
        made, right = (tree_leaves(some) for some in (call(func, args, kwargs), func(*args, **kwargs)))
        for one, other in zip(made, right, strict=True):
            assert (one.shape, one.stride(), one.dtype, one.device, one.untyped_storage().nbytes()) == (
                other.shape, other.stride(), other.dtype, other.device, other.untyped_storage().nbytes()
            )  # fmt: skip


def test_a_view_that_does_not_say_so_is_one_on_the_meta_device() -> None:
    x = torch.empty(2, 6, device="meta")
    for _ in range(2):
        seen = call(aten._unsafe_view.default, (x, [3, 4]), {})
        assert seen.untyped_storage()._cdata == x.untyped_storage()._cdata


def test_the_default_dtype_is_that_of_now_on_the_meta_device() -> None:
    n = torch.ones(3, dtype=torch.int64, device="meta")
    assert call(aten.div.Tensor, (n, n), {}).dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert call(aten.div.Tensor, (n, n), {}).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_what_an_op_on_the_meta_device_writes_to_is_the_callers() -> None:
    x = torch.empty(3, device="meta")
    assert call(aten.add_.Tensor, (x, x), {}) is x
    small = torch.empty(0, device="meta")
    for _ in range(2):
        assert call(aten.logaddexp.out, (x, x), {"out": x}) is x
    assert call(aten.logaddexp.out, (x, x), {"out": small}) is small
    assert small.shape == (3,), "torch gives it the size of the result"
    assert call(aten.view.default, (x, [1, 3]), {}).untyped_storage()._cdata == x.untyped_storage()._cdata
    with pytest.raises(RuntimeError):
        call(aten.add_.Tensor, (x, torch.empty(2, device="meta")), {})


def test_what_is_on_the_cpu_is_computed() -> None:
    x = torch.ones(3)
    call(aten.add_.Tensor, (x, x), {})
    assert x.equal(call(aten.mul.Scalar, (torch.ones(3), 2), {}))
