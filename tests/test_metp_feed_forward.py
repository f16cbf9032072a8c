"""METP of a feed-forward on real ranks equals the plain module: output and all gradients."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor.parallel import parallelize_module

from tests.cases import Case, mesh_of
from tests.metp_cases import (
    ACTIVATIONS,
    FeedForwardBlock,
    OnRank,
    assert_exact,
    assert_mean,
    assert_ratio,
    check,
    expected,
    run,
    whole,
)
from tests.pairwise import few, tiers
from tests.strategies import PLACEMENTS, examples, ulysses_meshes
from wallfacer_dt.testing import RankPool, worst_error

pytestmark = pytest.mark.ranks
Ranks = Callable[[int], RankPool]


@st.composite
def blocks(draw: st.DrawFn, size: int, **fixed: Any) -> FeedForwardBlock:
    """Any feed-forward on so many ranks; not seldom fewer hidden units, or fewer tokens, than ranks."""
    ring, team, ulysses = draw(st.sampled_from(ulysses_meshes(size)))
    case = Case(
        ring=ring,
        team=team,
        ulysses=ulysses,
        placement=draw(st.sampled_from(PLACEMENTS)),
        batch=draw(st.integers(1, 3)),
        length=draw(st.one_of(st.integers(1, size), st.integers(size, 6 * size))),
        order=draw(st.sampled_from(["contiguous", "head_tail"])),
    )
    gated = draw(st.booleans())
    names = ["up", "gate", "down"] if gated else ["up", "down"]
    options = {
        "case": case,
        "dim": draw(st.integers(1, 9)),
        "out": draw(st.integers(1, 9)),
        "hidden": draw(st.one_of(st.integers(1, size), st.integers(1, 5 * size))),
        "activation": draw(st.sampled_from(list(ACTIVATIONS))),
        "gated": gated,
        "biases": tuple(draw(st.sets(st.sampled_from(names)))),
        "axis": "rows" if (team, ulysses) == (1, 1) and draw(st.booleans()) else "",
    }
    return FeedForwardBlock(**(options | fixed))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@examples(30, today=20)
@given(data=st.data())
def test_float64_is_exact_to_rounding(threads: Ranks, size: int, data: st.DataObject) -> None:
    check(threads, data.draw(blocks(size)))


@pytest.mark.parametrize("size", few([5, 6, 7, 8], {6}))
@examples(8)
@given(data=st.data())
def test_float64_on_many_ranks(threads: Ranks, size: int, data: st.DataObject) -> None:
    check(threads, data.draw(blocks(size)))


@pytest.mark.parametrize("size", [2, 4])
@examples(8)
@given(data=st.data())
def test_float64_on_processes(ranks: Ranks, size: int, data: st.DataObject) -> None:
    check(ranks, data.draw(blocks(size)))


@pytest.mark.parametrize(
    ("hidden", "axes"),
    tiers(
        product([1, 3, 5, 6, 9, 16], [{"ring": 4}, {"ring": 2, "team": 2}, {"ring": 1, "team": 2, "ulysses": 2}]),
        strength=1,
    ),
    ids=str,
)
def test_hidden_units_that_ranks_do_not_divide(threads: Ranks, hidden: int, axes: dict[str, int]) -> None:
    case = Case(**({"team": 1} | axes), length=11, batch=2)
    check(threads, FeedForwardBlock(case, hidden=hidden, gated=True, biases=("up", "gate", "down")))


@pytest.mark.parametrize(
    ("activation", "gated", "biases"),
    tiers(product(ACTIVATIONS, [False, True], [(), ("up",), ("gate",), ("down",), ("up", "gate", "down")])),
    ids=str,
)
def test_activations_and_biases(ranks: Ranks, activation: str, gated: bool, biases: tuple[str, ...]) -> None:
    """With the style's own comparison of the module with the formula."""
    block = FeedForwardBlock(Case(2, 1, length=7), hidden=5, activation=activation, gated=gated, biases=biases)
    assert_exact(whole(block, ranks(2).run(checked, block)), expected(block))


def checked(block: FeedForwardBlock) -> Any:
    return run(block, check=True)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("size", [2, 4])
def test_float32_within_the_papers_bar(ranks: Ranks, size: int, activation: str) -> None:
    case = Case(size, 1, length=37, batch=2, dtype="float32")
    names = ("up", "gate", "down")
    block = FeedForwardBlock(case, dim=33, out=29, hidden=101, activation=activation, gated=True, biases=names)
    assert_mean(whole(block, ranks(size).run(run, block)), expected(block))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("axes", [(1, 1), (4, 1), (2, 2), (8, 1)])
def test_bfloat16_is_as_good_as_one_process(ranks: Ranks, axes: tuple[int, int], gated: bool) -> None:
    """Errors do not grow with the ring, whose hops sum what is on its way."""
    case = Case(*axes, length=64, batch=2, dtype="bfloat16")
    block = FeedForwardBlock(case, dim=32, out=32, hidden=97, activation="silu", gated=gated, biases=("up", "down"))
    found = whole(block, ranks(case.size).run(run, block))
    assert_ratio(found, expected(block, None), expected(block), torch.finfo(torch.bfloat16).eps)


def of_any_shape(block: FeedForwardBlock, shape: tuple[int, ...]) -> float:
    """Tokens in several dims, or in one; with a weight that is not trained and an x that needs no gradient."""
    module, plain = block.module(), block.module()
    module.down.weight.requires_grad_(False)
    module = parallelize_module(module, block.mesh(), block.style(block.mesh()))
    x = torch.randn(*shape, block.dim, dtype=torch.float64)
    out = module(x)
    out.sum().backward()
    assert module.down.weight.grad is None
    assert module.up.weight.grad is not None
    assert out.shape == (*shape, block.out)
    return worst_error([(out, plain(x))])


@pytest.mark.parametrize("shape", [(5,), (2, 5), (2, 3, 5)], ids=str)
def test_tokens_may_have_any_dims(ranks: Ranks, shape: tuple[int, ...]) -> None:
    assert max(ranks(2).run(of_any_shape, FeedForwardBlock(Case(2, 1)), shape)) < 1e-10


def autocast(block: FeedForwardBlock) -> OnRank:
    with torch.autocast("cpu", torch.bfloat16):
        return run(block)


def test_autocast_is_as_good_as_one_process(ranks: Ranks) -> None:
    block = FeedForwardBlock(Case(4, 1, length=64, dtype="float32"), dim=32, out=32, hidden=97, biases=("up", "down"))
    found, exact = whole(block, ranks(4).run(autocast, block)), expected(block)
    with torch.autocast("cpu", torch.bfloat16):
        single = expected(block, None)
    assert_ratio(found, single, exact, torch.finfo(torch.bfloat16).eps)
    assert worst_error([(found["out"], exact["out"])]) > 1e-4, "it computes in bfloat16"


def over_one_axis(axis: str) -> dict[str, float]:
    """Weights shared by the ranks of one axis of two; over the other their gradients are summed by whoever trains."""
    mesh = mesh_of(2, 2)
    other = "cp_team" if axis == "cp_ring" else "cp_ring"
    block = FeedForwardBlock(Case(2, 2, length=10), hidden=5, gated=True, biases=("up", "gate", "down"))
    module, plain = parallelize_module(block.module(), mesh[axis], block.style(mesh[axis])), block.module()
    x, grad = block.inputs()
    shards = [x.tensor_split(4, 1)[dist.get_rank()], grad.tensor_split(4, 1)[dist.get_rank()]]
    module(shards[0]).backward(shards[1])
    plain(x).backward(grad)
    errors = {}
    for (name, mine), its in zip(module.named_parameters(), plain.parameters(), strict=True):
        found = mine.grad.full_tensor()
        dist.all_reduce(found, group=mesh.get_group(other))
        errors[name] = worst_error([(found, its.grad)])
    return errors


@pytest.mark.parametrize("axis", ["cp_ring", "cp_team"])
def test_weights_may_be_shared_over_one_axis_of_two(ranks: Ranks, axis: str) -> None:
    for errors in ranks(4).run(over_one_axis, axis):
        assert max(errors.values()) < 1e-10, errors
