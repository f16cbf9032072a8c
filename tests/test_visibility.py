"""Change one token on one rank: exactly the outputs that may see it change."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases import Case, draw, held, index_of, mesh_of, whole
from tests.strategies import cases
from wallfacer_dt import context_parallel_attention
from wallfacer_dt.testing import RankPool

pytestmark = pytest.mark.ranks


def outputs_before_and_after(case: Case, changed: int) -> list[tuple[int, list[np.ndarray]]]:
    """This rank's output, with the key and value at one global position as they are, then altered."""
    mesh = mesh_of(case.ring, case.team, case.placement)
    index = index_of(case)
    rows = held(index, case.size, case.order, case.shard * case.size)
    answers = []
    for alter in (False, True):
        q, k, v, _ = (x[:, :, rows] for x in draw(case))
        if alter and changed in rows:
            k[:, :, rows.index(changed)] += 1
            v[:, :, rows.index(changed)] -= 1
        out = context_parallel_attention(q, k, v, mesh, **case.options)
        answers.append((index, [out.numpy()]))
    return answers


@pytest.mark.parametrize("size", [2, 3, 4, 6, 8])
@settings(max_examples=20)
@given(data=st.data())
def test_exactly_the_outputs_that_may_see_a_token_change(
    ranks: Callable[[int], RankPool], size: int, data: st.DataObject
) -> None:
    case = data.draw(cases(range(size, size + 1), inputs="normal"))
    changed = data.draw(st.integers(0, case.shard * size - 1))
    answers = ranks(size).run(outputs_before_and_after, case, changed)
    before, after = (whole(case, [answer[i] for answer in answers]).out for i in range(2))
    different = (before != after).any(-1).any(1).any(0)
    positions = torch.arange(len(different))
    assert different.equal(positions >= changed if case.is_causal else torch.ones_like(different))
