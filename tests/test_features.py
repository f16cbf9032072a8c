"""docs/features.md is what ranks do today; what it calls refused, all of them refuse before anything is sent."""

from collections.abc import Iterator
from difflib import unified_diff
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.features import (
    COLUMNS,
    COMPILED,
    FEATURES,
    RANKS,
    STYLES,
    BrokenError,
    Key,
    Outcome,
    cells,
    document,
    entries,
    recorded,
    try_all,
    try_out,
    verdict,
    verdicts,
)
from tests.pairwise import cover
from wallfacer_dt import styles
from wallfacer_dt.testing import RankPool

pytestmark = pytest.mark.ranks

DOCUMENT = Path(__file__).parent.parent / "docs" / "features.md"
WRITTEN = entries(DOCUMENT.read_text())
CELLS = [key for keys in cells().values() for key in keys]


def written(key: Key) -> str:
    """What the document says of a cell; of a row that kernels and compilers leave out, of the style on their mesh."""
    if key in WRITTEN:
        return WRITTEN[key]
    assert WRITTEN[*key[:2], STYLES[-1].name], "only rows that all refuse are left out"
    return WRITTEN[*key[:2], STYLES[-1].name]


def few() -> set[Key]:
    """Of every feature whatever the document says of it, in every section every column; columns take turns.

    Under a compiler, where a cell takes a second, only what is refused: ``test_compile.py`` has the features.
    """
    some = [key for key in CELLS if key[2] != COMPILED.name or WRITTEN.get(key)]
    turns = sorted(some, key=lambda key: (list(COLUMNS).index(key[2]) - list(FEATURES).index(key[:2])) % len(COLUMNS))
    rows = [
        ((key[:2], WRITTEN[key]) if key in WRITTEN else "", ("" if key[2] == COMPILED.name else key[0], key[2]))
        for key in turns
    ]
    return {turns[i] for i in cover(rows, strength=1)}


DROPOUT: Key = ("Scores", "dropout (`dropout_p=0.1`)", "RingParallel")
CHOSEN = few() | {DROPOUT}


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Of its own, since compilers may take longer than other tests' ranks wait."""
    started = RankPool(RANKS, timeout=300)
    yield started
    started.close()


@pytest.fixture(scope="module")
def seen(pool: RankPool, request: pytest.FixtureRequest) -> dict[Key, list[Outcome]]:
    return try_all(pool, CELLS if request.config.getoption("whole") else CHOSEN)


@pytest.mark.parametrize(
    "key", [pytest.param(key, marks=() if key in CHOSEN else pytest.mark.whole) for key in CELLS], ids=" / ".join
)
def test_works_or_is_refused_on_all_ranks_before_anything_is_sent(seen: dict[Key, list[Outcome]], key: Key) -> None:
    """As the document says."""
    found = verdict(FEATURES[key[:2]], COLUMNS[key[2]], seen[key])
    assert found == written(key), "write it anew: python -m tests.features > docs/features.md"


def test_the_document_is_what_it_says_of_cells() -> None:
    assert document(WRITTEN) == DOCUMENT.read_text()
    assert {key[:2] for key in WRITTEN} == {*FEATURES}


@pytest.mark.whole
def test_the_document_is_up_to_date(seen: dict[Key, list[Outcome]]) -> None:
    written, today = DOCUMENT.read_text(), document(verdicts(seen))
    changes = "\n".join(unified_diff(written.splitlines(), today.splitlines(), "written", "today", lineterm="", n=0))
    assert written == today, f"write it anew: python -m tests.features > docs/features.md\n{changes}"


def test_names_are_of_one_row_each() -> None:
    assert len(CELLS) == len(set(CELLS))


@pytest.mark.whole
def test_a_cell_that_changes_changes_the_document() -> None:
    for before, now in (("", "refused by now"), ("refused", "")):
        found = dict.fromkeys(CELLS, before)
        written = document(found)
        for key in CELLS:
            assert document(found | {key: now}) != written


def tolerant() -> list[Outcome]:
    """What a rank does once dropout is ignored."""
    with mock.patch.dict(styles._NEUTRAL, dropout_p=(None, 0, 0.1)):
        return try_out([DROPOUT])


def test_a_refusal_that_stops_being_one_is_seen(seen: dict[Key, list[Outcome]], pool: RankPool) -> None:
    """As a cell that works, which the document does not say."""
    outcomes = [outcome for (outcome,) in pool.run(tolerant)]
    assert not verdict(FEATURES[DROPOUT[:2]], COLUMNS[DROPOUT[2]], outcomes)
    assert verdict(FEATURES[DROPOUT[:2]], COLUMNS[DROPOUT[2]], seen[DROPOUT])


WORKS = Outcome(1e-12, "", "", ("all_to_all_single",))
REFUSED = Outcome(float("nan"), "ValueError", "called with dropout_p=0.1", ())


@pytest.mark.parametrize(
    ("outcomes", "why"),
    [
        ([WORKS, WORKS._replace(error=1e-9)], "wrong"),
        ([WORKS, WORKS._replace(error=float("nan"))], "wrong"),
        ([WORKS._replace(sent=())] * 2, "nothing was sent"),
        ([REFUSED, WORKS], "not refused on every rank"),
        ([REFUSED, REFUSED._replace(raised="RuntimeError")], "not refused on every rank"),
        ([REFUSED, REFUSED._replace(raised="TypeError")], "different errors"),
        ([REFUSED, REFUSED._replace(sent=("all_to_all_single",))], "sent before it was refused"),
        ([REFUSED, REFUSED._replace(message="no")], "without naming"),
    ],
)
def test_what_is_neither_is_broken(outcomes: list[Outcome], why: str) -> None:
    with pytest.raises(BrokenError, match=why):
        verdict(FEATURES[DROPOUT[:2]], STYLES[0], outcomes)


def test_what_one_rank_alone_asks_for_must_be_refused() -> None:
    feature = next(f for f in FEATURES.values() if f.alone is not None)
    with pytest.raises(BrokenError, match="one rank alone"):
        verdict(feature, STYLES[0], [WORKS] * 4)


def one_collective() -> list[str]:
    with recorded() as sent:
        torch.ops._c10d_functional.wait_tensor(
            torch.ops._c10d_functional.all_reduce(torch.ones(1), "sum", torch.distributed.group.WORLD.group_name)
        )
    return sent


def test_collectives_are_recorded(pool: RankPool) -> None:
    assert pool.run(one_collective) == [["all_reduce"]] * 4
