"""A cover of a matrix has every pair of it, in few rows; what it leaves out is marked."""

from collections import Counter
from itertools import combinations, product

import pytest

from tests.pairwise import cover, tiers

MATRICES = {
    "one factor": list(product("abc")),
    "two factors": list(product("abc", range(2))),
    "many factors": list(product("abc", range(5), (True, False), ({}, {"x": 1}), "pqrs")),
    "not all combinations": [row for row in product("abc", range(4), "pqr") if (row[0], row[2]) != ("a", "q")],
}


def shown(rows: list[tuple], strength: int) -> set:
    return {part for row in rows for part in combinations([(i, str(x)) for i, x in enumerate(row)], strength)}


@pytest.mark.parametrize("strength", [1, 2])
@pytest.mark.parametrize("name", MATRICES)
def test_whatever_stands_together_stands_together_in_the_cover(name: str, strength: int) -> None:
    rows = MATRICES[name]
    chosen = [rows[i] for i in cover(rows, strength)]
    strength = min(strength, len(rows[0]))
    assert shown(chosen, strength) == shown(rows, strength)
    assert len(chosen) == len(set(map(str, chosen)))


def test_a_cover_is_small() -> None:
    """The two largest of five factors have 20 pairs, and a few rows more have those of all."""
    many = MATRICES["many factors"]
    assert 5 * 4 <= len(cover(many)) <= 5 * 4 + 3 < len(many) // 10


def test_a_short_column_takes_turns_beside_a_long_one() -> None:
    rows = [(n, letter) for n in range(9) for letter in "abc"]
    chosen = [rows[i] for i in cover(rows, 1)]
    assert len(chosen) == 9
    assert Counter(letter for _, letter in chosen) == dict.fromkeys("abc", 3)


def test_the_rest_is_marked() -> None:
    rows = MATRICES["many factors"]
    made = tiers(rows)
    assert [part.values for part in made] == rows
    fast = [i for i, part in enumerate(made) if not part.marks]
    assert fast == sorted(cover(rows))
    assert {mark.name for part in made for mark in part.marks} == {"whole"}
