"""Attention on real ranks equals attention of one process: output and all gradients."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend

from tests import flash_standins
from tests.cases import Case, attend, draw, draw_extras, oracle, prepare, rms, run_uncounted, whole
from tests.pairwise import few, tiers
from tests.strategies import any_case, cases, examples
from wallfacer_dt.testing import AttentionResult, RankPool, worst_error

pytestmark = pytest.mark.ranks
Ranks = Callable[[int], RankPool]


def on_ranks(ranks: Ranks, case: Case) -> AttentionResult:
    return whole(case, ranks(case.size).run(run_uncounted, case))


def paired(got: AttentionResult, expected: AttentionResult) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(name, mine, theirs) of all that the call has."""
    mine, theirs = got.by_name(), expected.by_name()
    assert mine.keys() == theirs.keys()
    return ((name, mine[name], theirs[name]) for name in mine)


def assert_close(got: AttentionResult, case: Case, tolerance: float) -> None:
    """Absolute error, for inputs of order one; gradients are sums of products with q and k, so of their order."""
    q, k = draw(case)[:2]
    order = float(torch.stack([q.abs().max(), k.abs().max()]).max().clamp_min(1)) if case.inputs == "huge" else 1.0
    for name, mine, theirs in paired(got, oracle(case)):
        error = worst_error({name: (mine, theirs)})
        assert error <= tolerance * order, f"{name}: {error:.3e}"


@pytest.mark.parametrize("size", few(range(1, 9), {1, 2, 3, 4, 6, 8}))
@examples(80, today=35)
@given(data=st.data())
def test_float64_is_exact_to_rounding(threads: Ranks, size: int, data: st.DataObject) -> None:
    case = data.draw(cases(range(size, size + 1)))
    assert_close(on_ranks(threads, case), case, 1e-10)


@pytest.mark.parametrize("size", few(range(1, 9), {1, 2, 4, 5, 6, 8}))
@examples(60, today=28)
@given(data=st.data())
def test_any_case_is_exact_to_rounding(threads: Ranks, size: int, data: st.DataObject) -> None:
    case = data.draw(any_case(size))
    assert_close(on_ranks(threads, case), case, 1e-10)


@pytest.mark.parametrize("size", few([4, 6, 8], {4, 8}))
@examples(40, today=18)
@given(data=st.data())
def test_groups_of_heads_that_take_turns_are_exact_to_rounding(threads: Ranks, size: int, data: st.DataObject) -> None:
    case = data.draw(any_case(size, in_turn=True))
    assert_close(on_ranks(threads, case), case, 1e-10)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@examples(12)
@given(data=st.data())
def test_any_case_on_processes(ranks: Ranks, size: int, data: st.DataObject) -> None:
    case = data.draw(any_case(size))
    assert_close(on_ranks(ranks, case), case, 1e-10)


def run_with_standins(case: Case) -> Any:
    """Of this module, which registers them wherever ranks are."""
    assert case.kernel in flash_standins.KERNELS
    return run_uncounted(case)


@pytest.mark.parametrize("kernel", flash_standins.KERNELS)
@examples(40, today=18)
@given(data=st.data())
def test_any_case_through_the_adapters_of_kernels_on_cuda(threads: Ranks, kernel: str, data: st.DataObject) -> None:
    size = data.draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    softcap = data.draw(st.sampled_from([None, 2.0] if kernel in flash_standins.PACKAGES else [None]))
    takes_masks = kernel == "efficient on the CPU"
    case = data.draw(any_case(size, kernel=kernel, softcap=softcap).filter(lambda case: takes_masks or not case.mask))
    assert_close(whole(case, threads(size).run(run_with_standins, case)), case, 1e-10)


@pytest.mark.parametrize("kernel", flash_standins.KERNELS)
def test_windows_of_rows_whose_documents_differ_through_the_adapters(threads: Ranks, kernel: str) -> None:
    """The last rank has twice as many queries as it is sent keys, of which a window hides some."""
    documents = (12,), (1, 11)
    case = Case(3, 1, batch=2, shard=4, is_causal=True, window_size=(4, 0), documents=documents, packed="document_ids",
                order="head_tail", kernel=kernel)  # fmt: skip
    assert_close(whole(case, threads(3).run(run_with_standins, case)), case, 1e-10)


@pytest.mark.parametrize("size", few(range(1, 9), {1, 2, 4, 8}))
@examples(20)
@given(data=st.data())
def test_any_case_in_low_precision_is_as_good_as_one_process(threads: Ranks, size: int, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(["float32", "bfloat16", "float16"]))
    case = data.draw(any_case(size, shortest=24, longest=48, dtype=dtype, softcap=None, kernel="auto", inputs="normal"))
    assert_error_ratio(threads, case, most=4.0)


def test_sinks_that_take_little_keep_their_gradient(threads: Ranks) -> None:
    """1 - sigmoid would lose it: among many keys a sink has a millionth of the weight."""
    case = Case(2, 2, shard=16, heads=4, dtype="float32", sinks=True, inputs="faint_sinks")
    dsinks, expected = on_ranks(threads, case).dsinks, oracle(case).dsinks
    assert dsinks is not None
    assert worst_error([(dsinks, expected)], relative_to="largest") <= 1e-5


@pytest.mark.parametrize(("size", "dtype"), tiers(product(range(1, 9), ["float32", "bfloat16", "float16"]), strength=1))
@examples(15)
@given(data=st.data())
def test_low_precision_is_as_good_as_one_process(threads: Ranks, size: int, dtype: str, data: st.DataObject) -> None:
    """Error against float64 at most twice that of torch's kernel in the same dtype."""
    # Enough rows for a root mean square to mean something: rounding errors of one row's entries are alike.
    shard = 2 * data.draw(st.integers(12, 24))
    fixed = {"dtype": dtype, "kernel": "auto", "inputs": "normal", "batch": 2, "shard": shard}
    assert_error_ratio(threads, data.draw(cases(range(size, size + 1), **fixed)))


def assert_error_ratio(ranks: Ranks, case: Case, most: float = 2.0) -> None:
    exact = oracle(case)
    single = oracle(case, dtype=None, backend=SDPBackend.FLASH_ATTENTION)
    ours = on_ranks(ranks, case)
    ones = single.by_name()
    unit = torch.finfo(getattr(torch, case.dtype)).eps
    # exp() turns the rounding of a large score into a relative error of that size, in whichever order it is summed. The
    # backward's is not the forward's where tiles differ, in shape or only in how memory is aligned: two errors.
    largest_score = 1e4 if case.inputs == "huge" else 2
    for name, got, expected in paired(ours, exact):
        # Where one process is right by luck (a single key, say), one rounding of a typical entry is still allowed.
        allowed = most * max(rms(ones[name].double(), expected), unit / 4 * largest_score * rms(expected))
        if name == "dsinks":  # few numbers, which one process may have right by luck
            allowed = max(2 * allowed, most * rms(rounding_of_sinks(case, exact, unit / 4)))
        if case.inputs == "normal" and rms(expected) < 1e-9:
            # No gradient, but for rounding: every row sees one key. A key adds that of all its queries, a random walk.
            allowed = 4 * unit * max(64, case.total * case.heads // case.kv_heads) ** 0.5
        error = rms(got, expected)
        assert error <= allowed, f"{name}: {error:.3e} > {allowed:.3e}"


def rounding_of_sinks(case: Case, exact: AttentionResult, unit: float) -> Tensor:
    """By head, what rounding does to the sink's gradient, to which tokens add -p delta, p = exp(sink - lse).

    An lse of float32 is rounded whenever two ranks' are merged, and p changes by as much of itself as lse by. An output
    is rounded by ``unit`` of itself whenever it is sent, and with it the products whose sum is delta. A sink leaves
    (1 - p) of out.
    """
    without = oracle(case, sinks=None).out
    norm = without.square().sum(-1)
    p = torch.where(norm > 0, 1 - (exact.out * without).sum(-1) / norm, 0)
    products = draw(case)[3].double() * exact.out
    added = -p * products.sum(-1)
    assert worst_error([(added.sum((0, 2)), exact.dsinks)], relative_to="largest") <= 1e-7
    lse = draw_extras(case)["sinks"].double().unsqueeze(-1) - p.log()
    of_lse = torch.finfo(torch.float32).eps / 4 * (added * lse.abs().clamp_min(1)).nan_to_num(0)
    of_out = unit * p * products.square().sum(-1).sqrt()
    return (case.size * (of_lse.square() + of_out.square()).sum((0, 2))).sqrt()


@pytest.mark.parametrize(
    ("mesh", "rotate", "rotate_forward"),
    tiers(product([(2, 1), (4, 1), (8, 1), (4, 2), (1, 8)], ["kv", "q"], ["kv", "q"])),
)
def test_bfloat16_error_does_not_grow_with_the_ring(
    threads: Ranks, mesh: tuple[int, int], rotate: str, rotate_forward: str
) -> None:
    ring, team = mesh
    case = Case(
        ring=ring,
        team=team,
        shard=512 // (ring * team),
        heads=4,
        kv_heads=2,
        head_dim=32,
        rotate=rotate,
        rotate_forward=rotate_forward,
    )
    assert_error_ratio(threads, replace(case, dtype="bfloat16"), most=1.5)


@pytest.mark.parametrize(
    ("mesh", "dtype", "rotate", "rotate_forward", "inputs"),
    tiers(
        product(
            [(4, 1), (2, 2), (1, 4)],
            ["float64", "float32"],
            ["kv", "q"],
            ["kv", "q"],
            ["huge", "equal", "zero_grad", "tiny_grad"],
        )
    ),
)
def test_numbers_that_hurt(
    threads: Ranks, mesh: tuple[int, int], dtype: str, rotate: str, rotate_forward: str, inputs: str
) -> None:
    rotations = {"rotate": rotate, "rotate_forward": rotate_forward}
    case = Case(*mesh, dtype=dtype, **rotations, inputs=inputs, is_causal=True, order="head_tail", heads=4)
    got = on_ranks(threads, case)
    assert all(x.isfinite().all() for x in got)
    if dtype == "float64":
        assert_close(got, case, 1e-10)
    else:
        # The backward's tiles are not the forward's. Of another shape they round a score another way, and such a
        # rounding is an error of p: it counts twice.
        assert_error_ratio(threads, case, most=2 * 2**0.5 if inputs == "huge" else 2)
    if inputs == "tiny_grad":  # right to relative, not only to absolute precision
        for mine, theirs in zip(got[1:], oracle(case)[1:], strict=True):
            assert worst_error([(mine, theirs)], relative_to="largest") <= 1e-5


@pytest.mark.parametrize("mesh", [(8, 1), (4, 2), (2, 4), (1, 8)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_one_token_per_rank(threads: Ranks, mesh: tuple[int, int], is_causal: bool) -> None:
    case = Case(*mesh, shard=1, is_causal=is_causal)
    assert_close(on_ranks(threads, case), case, 1e-10)


MESHES = [{"ring": 4, "team": 1}, {"ring": 2, "team": 2, "ulysses": 2}]
MASKS: list[dict[str, Any]] = [
    {"is_causal": True, "window_size": (20, 0)},
    {"window_size": (300, 170)},
    {"is_causal": True, "documents": ((1, 250, 149, 319),), "window_size": (140, 0)},
    {"is_causal": True, "prefix_length": 200},
    {"mask": "coarse"},
    {"mask": "blind"},
]


@pytest.mark.parametrize(
    ("masks", "mesh", "order"), tiers(product(MASKS, MESHES, ["contiguous", "head_tail"])), ids=str
)
def test_longer_sequences(threads: Ranks, masks: dict[str, Any], mesh: dict[str, int], order: str) -> None:
    """Of several blocks of 128, in which masks are cut."""
    case = Case(**mesh, **masks, order=order, length=719)
    assert_close(on_ranks(threads, case), case, 1e-10)


AXES = {"cp_ulysses": "ulysses", "cp_ring": "ring", "cp_team": "team"}


def run_on(axes: tuple[str, ...], shape: tuple[int, ...], case: Case) -> tuple[int, list[np.ndarray]]:
    index, _, leaves, grad_out = prepare(case)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=axes)
    return index, attend(case, mesh, leaves, grad_out)


@pytest.mark.parametrize(
    ("axes", "shape"),
    [
        (("cp_ring",), (4,)),
        (("cp_ulysses",), (4,)),
        (("cp_ulysses", "cp_ring"), (2, 2)),
        (("cp_ring", "cp_team"), (2, 2)),
        (("cp_ulysses", "cp_ring", "cp_team"), (2, 1, 2)),
    ],
    ids=str,
)
def test_meshes_of_some_of_the_axes(ranks: Ranks, axes: tuple[str, ...], shape: tuple[int, ...]) -> None:
    sizes = dict.fromkeys(AXES.values(), 1) | {AXES[axis]: n for axis, n in zip(axes, shape, strict=True)}
    case = Case(**sizes, heads=4, length=13, is_causal=True, order="head_tail")
    assert_close(whole(case, ranks(4).run(run_on, axes, shape, case)), case, 1e-10)
