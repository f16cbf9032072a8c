"""METP of attention on real ranks equals the plain module: output and all gradients."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import Case
from tests.metp_cases import AttentionBlock, assert_exact, assert_mean, assert_ratio, check, expected, run, whole
from tests.pairwise import few, tiers
from tests.strategies import PLACEMENTS, examples, mask_options, meshes, schedules
from wallfacer_dt.testing import RankPool

pytestmark = pytest.mark.ranks
Ranks = Callable[[int], RankPool]
SEPARATE, FUSED = ["query", "key", "value", "output"], ["qkv", "output"]


@st.composite
def blocks(draw: st.DrawFn, size: int, **fixed: Any) -> AttentionBlock:
    """Any attention on so many ranks: key heads fewer than ranks, or that ranks do not divide, windows, documents."""
    ring, team = draw(st.sampled_from(meshes(size)))
    rotary = draw(st.sampled_from([None, "half", "interleaved"]))
    one_axis = team == 1 and draw(st.booleans())
    case = draw(cases(ring, team, paired=rotary is not None, ring_alone=one_axis))
    fused = draw(st.booleans())
    options = {
        "case": case,
        "dim": draw(st.integers(1, 9)),
        "out": draw(st.integers(1, 9)),
        "biases": tuple(draw(st.sets(st.sampled_from(FUSED if fused else SEPARATE)))),
        "axis": "rows" if one_axis else "",
        "fused": fused,
        "rotary": rotary,
        "angles": draw(st.sampled_from(["L", "1L", "BL"] + (["complex"] if rotary == "interleaved" else []))),
    }
    return AttentionBlock(**(options | fixed))


@st.composite
def cases(draw: st.DrawFn, ring: int, team: int, *, paired: bool, ring_alone: bool) -> Case:
    """What it says of the mesh, tokens, heads and masks; ``paired``: head dims are even."""
    size, batch = ring * team, draw(st.integers(1, 2))
    total = draw(st.one_of(st.integers(1, size), st.integers(size, 6 * size)))
    masks = draw(mask_options(batch, total).filter(lambda masks: not {"mask", "prefix_length"} & masks.keys()))
    schedule = draw(st.sampled_from(["2d"] if ring_alone else schedules(ring, team)))
    kv_heads = draw(st.integers(1, size + 2))
    options = {
        "ring": ring,
        "team": team,
        "placement": draw(st.sampled_from(PLACEMENTS)),
        "batch": batch,
        "heads": kv_heads * draw(st.sampled_from([1, 1, 2, 3])),
        "kv_heads": kv_heads,
        "head_dim": draw(st.sampled_from([2, 4, 8] if paired else [3, 4, 8])),
        "length": total,
        "order": draw(st.sampled_from(["contiguous", "head_tail"])),
        "schedule": schedule,
        "rotate": draw(st.sampled_from(["q", "auto"] if schedule == "published" else ["kv", "q", "auto"])),
        "kernel": draw(st.sampled_from(["auto", "auto", "reference"])),
        "scale": draw(st.sampled_from([None, 0.3])),
    }
    return Case(**(options | masks))


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
    ("axes", "heads", "fused"),
    tiers(product([(4, 1), (2, 2)], [(1, 1), (2, 2), (6, 3), (5, 5), (8, 4), (12, 6)], [False, True])),
    ids=str,
)
def test_heads_that_ranks_do_not_divide(
    threads: Ranks, axes: tuple[int, int], heads: tuple[int, int], fused: bool
) -> None:
    case = Case(*axes, length=11, heads=heads[0], kv_heads=heads[1], head_dim=3, is_causal=True, order="head_tail")
    check(threads, AttentionBlock(case, biases=tuple(FUSED if fused else SEPARATE), fused=fused))


MASKS = {
    "causal": {"is_causal": True, "order": "head_tail"},
    "window": {"is_causal": True, "window_size": (6, 0)},
    "all": {"rotate": "q"},
}


@pytest.mark.parametrize(
    ("fused", "mask", "rotary"), tiers(product([False, True], MASKS, [None, "half", "interleaved"]))
)
def test_modules_that_the_style_tries_out(ranks: Ranks, fused: bool, mask: str, rotary: str | None) -> None:
    """With its own comparison of the module with the formula."""
    case = Case(2, 1, length=13, heads=4, head_dim=4, **MASKS[mask])
    block = AttentionBlock(case, fused=fused, rotary=rotary, biases=("output",))
    assert_exact(whole(block, ranks(2).run(checked, block)), expected(block))


def checked(block: AttentionBlock) -> Any:
    return run(block, check=True)


@pytest.mark.parametrize("kernel", ["auto", "reference"])
@pytest.mark.parametrize("axes", [(2, 1), (2, 2)])
def test_float32_within_the_papers_bar(ranks: Ranks, axes: tuple[int, int], kernel: str) -> None:
    case = Case(*axes, length=37, batch=2, heads=6, kv_heads=3, dtype="float32", kernel=kernel, is_causal=True)
    block = AttentionBlock(case, dim=33, out=29, rotary="half", biases=tuple(SEPARATE))
    assert_mean(whole(block, ranks(case.size).run(run, block)), expected(block))


@pytest.mark.parametrize("rotary", [None, "half"])
@pytest.mark.parametrize("axes", [(1, 1), (4, 1), (2, 2), (8, 1)])
def test_bfloat16_is_as_good_as_one_process(ranks: Ranks, axes: tuple[int, int], rotary: str | None) -> None:
    case = Case(*axes, length=96, batch=2, heads=8, kv_heads=4, dtype="bfloat16", is_causal=True)
    block = AttentionBlock(case, dim=32, out=32, rotary=rotary, biases=tuple(SEPARATE))
    found = whole(block, ranks(case.size).run(run, block))
    assert_ratio(found, expected(block, None), expected(block), torch.finfo(torch.bfloat16).eps)
