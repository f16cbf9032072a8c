"""Cases worth having by name: who sees whom, lengths and variants of attention, each on meshes of every kind.

Ranks of this module cut masks in blocks of a few positions, so that short sequences have many of each kind.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.cases import Case, draw, prepare, rows_of, run_uncounted, told, whole
from tests.pairwise import few, tiers
from tests.strategies import any_case, examples
from tests.test_equivalence import assert_close
from wallfacer_dt import context_parallel_attention
from wallfacer_dt.algorithms import blocks, tiles
from wallfacer_dt.testing import RankPool, attention_oracle, worst_error

pytestmark = pytest.mark.ranks
MESHES = {
    "ulysses 2": {"ring": 1, "team": 1, "ulysses": 2},
    "ring 2 x team 2": {"ring": 2, "team": 2},
    "ulysses 2 x ring 2": {"ring": 2, "team": 1, "ulysses": 2},
    "ulysses 2 x ring 2 x team 2": {"ring": 2, "team": 2, "ulysses": 2},
}
HEAD_TAIL = {"order": "head_tail"}
CAUSAL = {"is_causal": True}
REFERENCE = {"kernel": "reference"}
# Of 32 tokens, so that shards are of 4 to 16, or of another number, dealt out as evenly as may be.
NAMED: dict[str, dict[str, Any]] = {
    "window smaller than a shard": CAUSAL | {"window_size": (2, 0)},
    "window smaller than a shard, head_tail": CAUSAL | HEAD_TAIL | {"window_size": (2, 0)},
    "window of the token alone": {"window_size": (0, 0)},
    "window that ends in the next shard": HEAD_TAIL | {"window_size": (5, 3)},
    "window on the left alone": {"window_size": (3, None)},
    "window on the right alone": {"window_size": (-1, 3)},
    "window without bounds": {"window_size": (-1, -1)},
    "causal window told by its left alone": CAUSAL | {"window_size": (3, None)},
    "window longer than the sequence": CAUSAL | {"window_size": (100, 0)},
    "window longer than any, on both sides": {"window_size": (sys.maxsize, sys.maxsize)},
    "window longer than any on the right": {"window_size": (3, sys.maxsize)},
    "documents that differ by row": {"batch": 2, "documents": ((3, 20, 9), (31, 1))},
    "documents that differ by row, causal, head_tail": CAUSAL
    | HEAD_TAIL
    | {"batch": 3, "documents": ((32,), (16, 16), (5, 5, 5, 17))},
    "one row of documents for all": CAUSAL | {"batch": 2, "documents": ((7, 20, 5),)},
    "cumulative lengths": {"batch": 2, "documents": ((7, 20, 5),), "packed": "cu_seqlens"},
    "a document per token": CAUSAL | {"documents": ((1,) * 32,)},
    "a document per shard": CAUSAL | {"documents": ((8,) * 4,)},
    "documents with a window": CAUSAL | {"documents": ((11, 21),), "window_size": (4, 0)},
    "documents of no token": {"documents": ((0, 11, 0, 21, 0),), "packed": "cu_seqlens"},
    "prefix shorter than a shard": CAUSAL | {"prefix_length": 3},
    "prefix over several shards, head_tail": CAUSAL | HEAD_TAIL | {"prefix_length": 13},
    "prefix longer than everything": CAUSAL | {"prefix_length": 100},
    "uneven": CAUSAL | {"length": 29},
    "uneven, head_tail": CAUSAL | HEAD_TAIL | {"length": 29},
    "uneven without a mask": {"length": 29},
    "uneven with documents": CAUSAL | {"length": 29, "documents": ((10, 19),)},
    "trailing shards are empty": CAUSAL | {"length": 9},
    "one token": CAUSAL | HEAD_TAIL | {"length": 1},
    "two tokens, head_tail": CAUSAL | HEAD_TAIL | {"length": 2},
    "three tokens that all see all": {"length": 3},
    "odd shards of equal length, head_tail": CAUSAL | HEAD_TAIL | {"shard": 3},
    "cross attention to more keys": {"kv_length": 64},
    "cross attention to fewer keys, uneven": {"length": 29, "kv_length": 7},
    "cross attention to one key": {"kv_length": 1},
    "rotary part shared by heads (MLA)": CAUSAL | HEAD_TAIL | {"shared_dim": 8, "value_dim": 24},
    "shared part and grouped heads": {"shared_dim": 4, "heads": 6, "kv_heads": 3},
    "values wider than keys": {"value_dim": 24},
    "values narrower than keys": CAUSAL | {"value_dim": 8},
    "sinks": {"sinks": True},
    "sinks, causal with a window (gpt-oss)": CAUSAL | HEAD_TAIL | {"sinks": True, "window_size": (6, 0), "heads": 4},
    "softcap": REFERENCE | {"softcap": 2.0},
    "softcap of huge scores": CAUSAL | REFERENCE | {"softcap": 20.0, "inputs": "huge"},
    "softcap, window and sinks": CAUSAL | REFERENCE | {"softcap": 2.0, "window_size": (9, 0), "sinks": True},
    "rows that see nothing": {"mask": "blind"},
    "rows that see nothing, with sinks": {"mask": "blind", "sinks": True},
    "block sparse": {"mask": "checker"},
    "a mask for each head": {"mask": "per_head", "heads": 4},
    "a mask for each row": {"mask": "per_row", "batch": 3},
    "a mask that captures a tensor": {"mask": "captured"},
    "a BlockMask": {"mask": "blockmask"},
    "a BlockMask for each head, head_tail": HEAD_TAIL | {"mask": "blockmask_per_head", "heads": 4},
    "a BlockMask by its blocks alone": {"mask": "blocks_alone"},
    "a mask on an uneven sequence": {"mask": "per_head", "length": 29},
    "a mask on fewer tokens than ranks": {"mask": "blind", "length": 3},
    "text on all ranks": {"replicated": 3},
    "text on all ranks, uneven": {"replicated": 3, "length": 29},
    "text on all ranks, fewer tokens than ranks": {"replicated": 2, "length": 1},
    "text on all ranks with shared keys": {"replicated": 3, "shared_dim": 4},
    "three heads on two ranks": {"heads": 3, "kv_heads": 3},
    "five heads on one of keys": CAUSAL | {"heads": 5, "kv_heads": 1},
    "six heads on three of keys": CAUSAL | {"heads": 6, "kv_heads": 3},
}


def run_in_small_blocks(case: Case) -> tuple[int, list[np.ndarray]]:
    # What is kept of a mask depends on these, so a process has them from its first call to its last.
    blocks.SIZE, tiles._SQUARE = 8, 3
    return run_uncounted(case)


def check(ranks: Callable[[int], RankPool], case: Case) -> None:
    assert_close(whole(case, ranks(case.size).run(run_in_small_blocks, case)), case, 1e-10)


@pytest.mark.parametrize("size", few([2, 4, 6, 8], {2, 4, 8}))
@examples(40)
@given(data=st.data())
def test_any_case_in_small_blocks(threads: Callable[[int], RankPool], size: int, data: st.DataObject) -> None:
    check(threads, data.draw(any_case(size)))


# In `make test` each on one mesh with a ring, which take turns, and every eighth without one, too.
TURNS = [
    pytest.param(name, mesh, marks=() if (i % 3 == j - 1 if j else i % 8 == 0) else pytest.mark.whole)
    for i, name in enumerate(NAMED)
    for j, mesh in enumerate(MESHES)
]


@pytest.mark.parametrize(("name", "mesh"), TURNS)
def test_named(threads: Callable[[int], RankPool], name: str, mesh: str) -> None:
    case = Case(**MESHES[mesh])
    case = replace(case, **({"shard": 32 // case.size} | NAMED[name]))
    check(threads, case)


@pytest.mark.parametrize(
    ("name", "schedule", "kernel"),
    tiers(
        product(
            [name for name in NAMED if "uneven" in name or "tokens" in name], ["2d", "published"], ["auto", "reference"]
        )
    ),
)
def test_both_schedules_and_kernels(threads: Callable[[int], RankPool], name: str, schedule: str, kernel: str) -> None:
    case = replace(Case(4, 2, shard=4, schedule=schedule, kernel=kernel), **NAMED[name])
    check(threads, case)


def two_batches_before_a_backward() -> list[float]:
    """Errors of dq, where the mask has moved on to another batch between forward and backward."""
    case, errors = Case(2, 1, shard=8), []
    index, mesh, (q, k, v), grad_out = prepare(case)
    outs, expected, documents = [], [], torch.arange(16)

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return documents[q] == documents[kv]

    for packed in (torch.arange(16) // 4, torch.arange(16) // 9):
        documents = packed
        outs.append(context_parallel_attention(q, k, v, mesh, **told(mesh, mask_mod=mask)))
        expected.append(attention_oracle(*draw(case), mask_mod=mask))
    for out, want in zip(outs, expected, strict=True):
        (dq,) = torch.autograd.grad(out, q, grad_out)
        errors.append(worst_error([(dq, want.dq[:, :, rows_of(case, index, case.total)])]))
    return errors


def test_a_backward_has_the_mask_of_its_forward(ranks: Callable[[int], RankPool]) -> None:
    for errors in ranks(2).run(two_batches_before_a_backward):
        assert max(errors) < 1e-10
