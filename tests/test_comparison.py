"""What must never pass for equal: nothing at all, other shapes and dtypes, and numbers that are none."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wallfacer_dt.comparison import bytes_of
from wallfacer_dt.testing import IncomparableError, worst_error

FINITE = st.floats(-1e6, 1e6)
ONE = torch.ones(1, dtype=torch.float64)


@given(st.lists(st.tuples(FINITE, FINITE), min_size=1), st.integers(1, 4))
def test_it_is_the_largest_difference_however_the_numbers_are_grouped(numbers: list, size: int) -> None:
    groups = [numbers[i : i + size] for i in range(0, len(numbers), size)]
    pairs = [([a for a, _ in group], [b for _, b in group]) for group in groups]
    expected = np.abs(np.subtract(*np.array(numbers).T)).max()  # no comparison: what is expected of one
    assert worst_error(pairs) == expected
    assert worst_error([(torch.tensor(a), torch.tensor(b)) for a, b in pairs]) == pytest.approx(
        expected, rel=1e-5, abs=1
    )
    assert worst_error([(np.array(a), np.array(b)) for a, b in pairs]) == expected


@given(st.lists(FINITE, min_size=1), st.sampled_from([math.nan, math.inf, -math.inf]), st.data())
@pytest.mark.parametrize("side", [0, 1])
def test_what_is_not_finite_is_refused_wherever_it_stands(side: int, numbers: list, bad: float, data) -> None:
    spoilt = [*numbers]
    spoilt[data.draw(st.integers(0, len(numbers) - 1))] = bad
    pair = (spoilt, numbers) if side == 0 else (numbers, spoilt)
    before, after = (data.draw(st.integers(0, 3)) for _ in range(2))
    with pytest.raises(IncomparableError, match="not finite"):
        worst_error([([0.0], [0.0])] * before + [pair] + [([0.0], [0.0])] * after)


@pytest.mark.parametrize(
    ("pairs", "why"),
    [
        ([], "nothing to compare"),
        ({}, "nothing to compare"),
        ([(ONE, ONE), ([], [])], "pair 1: there are no numbers"),
        ({"out": (torch.empty(2, 0), torch.empty(2, 0))}, r"out: there are no numbers in shape \(2, 0\)"),
        ([(ONE, ONE.expand(2))], r"pair 0 has shape \(1,\) found, \(2,\) expected"),
        ([(ONE, ONE.squeeze())], "shape"),
        ([([1.0], [1.0, 2.0])], "shape"),
        ([(ONE, ONE.float())], "float64 found, torch.float32 expected"),
        ([(np.ones(1), np.ones(1, np.float32))], "float64 found, torch.float32 expected"),
        ([([1, 2**53 + 1], [1, 2**53])], "from 2"),
        ([(torch.tensor([2**53 + 1]), torch.tensor([2**53]))], "from 2"),
        ([(np.array([-(2**62) - 1]), np.array([-(2**62)]))], "from 2"),
    ],
)
def test_what_cannot_be_compared_is_refused(pairs, why: str) -> None:
    with pytest.raises(IncomparableError, match=why):
        worst_error(pairs)


@pytest.mark.parametrize(
    ("relative_to", "found", "expected", "error"),
    [
        ("nothing", [4.0, 1.0], [2.0, 1.5], 2.0),
        ("largest", [4.0, 1.0], [8.0, 1.0], 0.5),
        ("each", [4.0, 1.0], [8.0, 0.25], 3.0),
        ("each", [0.0, 1.0], [0.0, 2.0], 0.5),
        ("each", [1e-9, 1.0], [0.0, 1.0], math.inf),
        ("largest", [0.0], [0.0], 0.0),
        ("largest", [1e-9], [0.0], math.inf),
    ],
)
def test_what_the_difference_is_relative_to(relative_to, found: list, expected: list, error: float) -> None:
    assert worst_error([(found, expected)], relative_to=relative_to) == error


def test_an_unknown_relation_is_refused() -> None:
    with pytest.raises(TypeError, match="relative_to"):
        worst_error([(ONE, ONE)], relative_to="most")


def test_bytes_are_those_of_elements_in_order_whatever_the_strides() -> None:
    for x in (torch.tensor(3.0), torch.tensor(3.0).expand(1), torch.arange(6).view(2, 3).t(), torch.ones(1, 4)[:, ::2]):
        assert bytes_of(x).numpy().tobytes() == x.numpy().tobytes()
    assert bytes_of(torch.empty(0, 3)).shape == (0,)
    assert bytes_of(torch.ones(2, dtype=torch.bfloat16, requires_grad=True)).tolist() == [128, 63] * 2
