"""Change one token on one rank: exactly the outputs that may see it change."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import Case, draw, held, index_of, mesh_of, whole
from tests.pairwise import few
from tests.strategies import any_case, examples
from wallfacer_dt import context_parallel_attention
from wallfacer_dt.testing import RankPool
from wallfacer_dt.testing.oracle import visibility

pytestmark = pytest.mark.ranks


def outputs_before_and_after(case: Case, changed: int) -> list[tuple[int, list[np.ndarray]]]:
    """This rank's output, with the key and value at one global position as they are, then altered."""
    mesh = mesh_of(case.ring, case.team, case.placement, case.ulysses)
    index = index_of(case)
    rows, kv_rows = (held(index, case.axes, case.order, length) for length in (case.total, case.kv_total))
    answers = []
    for alter in (False, True):
        q, k, v, _ = draw(case)
        q, k, v = q[:, :, rows], k[:, :, kv_rows], v[:, :, kv_rows]
        if alter and changed in kv_rows:
            k[:, :, kv_rows.index(changed)] += 1
            v[:, :, kv_rows.index(changed)] -= 1
        out = context_parallel_attention(q, k, v, mesh, **case.options_on(mesh))
        answers.append((index, [out.numpy()]))
    return answers


@pytest.mark.parametrize("size", few([1, 2, 4, 6, 8], {1, 2, 4, 6}))
@examples(25)
@given(data=st.data())
def test_exactly_the_outputs_that_may_see_a_token_change(
    threads: Callable[[int], RankPool], size: int, data: st.DataObject
) -> None:
    """In each row of the batch and head by itself."""
    fixed = {"inputs": "normal", "sinks": False, "shared_dim": 0, "replicated": 0, "softcap": None, "kernel": "auto"}
    case = data.draw(any_case(size, **fixed))
    changed = data.draw(st.integers(0, case.kv_total - 1))
    answers = threads(size).run(outputs_before_and_after, case, changed)
    before, after = (whole(case, [answer[i] for answer in answers]).out for i in range(2))
    assert torch.stack([before, after]).isfinite().all()
    different = (before != after).any(-1)
    seen = visibility(case.batch, case.heads, case.total, case.kv_total, **case.masks)[..., changed]
    assert different.equal(seen.expand_as(different))
