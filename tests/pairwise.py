"""Tiers of a matrix of test parameters: `make test` runs a cover of it, `make test-all` (``--whole``) all of it."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any

import pytest

Row = Sequence[Any]


def cover(rows: Sequence[Row], strength: int = 2) -> list[int]:
    """Few of the rows, so that whatever values stand together in a row stand together in one of these.

    Greedy: next is the row with most combinations not yet seen; of equals the one whose values were chosen least often,
    so that a short column takes turns beside a long one, and of these the first.

    Args:
        rows: of one length; values are told apart by their repr.
        strength: how many values are looked at together: 2 for pairs, 1 for every value once; of shorter rows all.

    Returns:
        Numbers of rows, in the order in which they were chosen.
    """
    values = [[*enumerate(map(repr, row))] for row in rows]
    parts = [{*combinations(row, min(strength, len(row)))} for row in values]
    missing, chosen, times = set().union(*parts), list[int](), Counter[tuple[int, str]]()
    while missing:
        best = max(range(len(rows)), key=lambda i: (len(parts[i] & missing), -sum(times[x] for x in values[i])))
        chosen.append(best)
        missing -= parts[best]
        times.update(values[best])
    return chosen


def few(every: Iterable[Any], today: Iterable[Any]) -> list[Any]:
    """Parameters for pytest, tuples as rows: those that are not among ``today``'s marked ``whole``."""
    every = list(every)
    assert all(one in every for one in today)
    return [
        pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=() if one in today else pytest.mark.whole)
        for one in every
    ]


def tiers(rows: Iterable[Row], strength: int = 2) -> list[Any]:
    """Parameters for pytest: all rows in their order, those outside of :func:`cover` marked ``whole``."""
    rows = list(rows)
    chosen = {*cover(rows, strength)}
    return [pytest.param(*row, marks=() if i in chosen else pytest.mark.whole) for i, row in enumerate(rows)]
