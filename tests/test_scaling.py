"""Scaling on paper: the lower bound, what is compared with it, and the check by simulation."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.benchmarks.scaling import __main__ as tables
from recipes.benchmarks.scaling.bound import least_received
from recipes.benchmarks.scaling.cases import FAST, LARGEST_RING, LINKS, Case, is_considered, predicted
from recipes.benchmarks.ways import BEST, NAMES, RING, names_of
from tests.papers import assert_shown, simulated, teams
from tests.papers.teams import least_of_teams
from tests.strategies import examples
from wallfacer_dt import Cluster, Link, ModelShape, SequenceShape
from wallfacer_dt.planning import Candidate
from wallfacer_dt.planning.candidates import attentions
from wallfacer_dt.planning.predict import attention_cost

LINK = Link(1e9)
SMALL = Case(16, 8, 2, weak=True)
PAGE = (Path(__file__).parents[1] / "docs" / "benchmarks" / "scaling.md").read_text()
HEADS = st.sampled_from([(1, 1), (4, 4), (8, 2), (8, 1), (3, 3), (16, 4), (16, 1)])


@examples(25)
@given(HEADS, st.sampled_from([(2, 1), (4, 2), (8, 4), (16, 4), (12, 6)]), st.booleans())
def test_nothing_is_below_the_bound(heads: tuple[int, int], size: tuple[int, int], is_causal: bool) -> None:
    """Whatever the package can do, into a rank and into a node."""
    ranks, per_node = size
    model, sequence = ModelShape(heads[0] * 8, *heads), SequenceShape(96 * ranks, is_causal=is_causal)
    cluster = Cluster(ranks, per_node, LINK, LINK)
    for candidate in attentions(model, sequence, cluster):
        cost = attention_cost(candidate, model, sequence, cluster)
        for received, parts in ((cost.rank_bytes, ranks), (cost.node_bytes, ranks // per_node)):
            for backward, nbytes in ((False, received[0]), (True, sum(received))):
                assert nbytes >= least_received(model, sequence, parts, backward=backward)


@examples(40)
@given(st.integers(1, 4), st.integers(1, 2), st.sampled_from([2, 3, 4, 6]), st.booleans())
def test_the_bound_is_the_least_of_rows_and_columns(shared: int, keys: int, parts: int, is_causal: bool) -> None:
    """Every number of rows and columns tried; they are whole, which costs at most one of each more."""
    length = 12
    own = length // parts
    model = ModelShape(shared * keys, shared * keys, keys, 1)
    sequence = SequenceShape(length, is_causal=is_causal)
    pairs = length * (length + 1) / 2 if is_causal else length**2
    hidden = own * (own - 1) / 2 if is_causal else 0
    area = shared * keys * (pairs / parts + hidden)
    for weights, backward in (((2, 2), False), ((5, 6), True)):
        shapes = list(product(range(shared * own, shared * length + 1), range(own, length + 1)))
        # By area, the least that one key head costs, and then all of them.
        cheapest: dict[int, int] = {}
        for rows, columns in shapes:
            cost = weights[0] * (rows - shared * own) + weights[1] * (columns - own)
            cheapest[rows * columns] = min(cost, cheapest.get(rows * columns, cost))
        least = min(sum(cheapest[a] for a in some) for some in product(cheapest, repeat=keys) if sum(some) >= area)
        bound = least_received(model, sequence, parts, backward=backward) / 2
        assert bound <= least + 1e-9
        if not backward:
            assert bound >= least - keys * sum(weights)


@pytest.mark.parametrize("ranks", [4, 16, 64])
def test_one_head_by_hand(ranks: int) -> None:
    """design: 4 sqrt(P) U, without the local 4 U."""
    model, sequence = ModelShape(16, 1), SequenceShape(64 * ranks)
    shard = 64 * 16 * 2
    expected = (4 * ranks**0.5 - 4) * shard
    assert least_received(model, sequence, ranks, backward=False) == pytest.approx(expected)
    assert least_of_teams(model, sequence, ranks) == pytest.approx(expected)


def test_the_papers_example_by_teams() -> None:
    """64 ranks, C = 8: 28 units of a rank's query shard; of 8 key heads for 64, C = sqrt(8): less."""
    sequence = SequenceShape(65536)
    unit = 1024 * 6656 * 2
    assert least_of_teams(ModelShape(6656, 52), sequence, 64) == pytest.approx(28 * unit)
    grouped = ModelShape(8192, 64, 8)
    assert least_of_teams(grouped, sequence, 64) / (1024 * 8192 * 2) == pytest.approx(4 * 8**0.5 - 2.25)


def considered(case: Case) -> list[Candidate]:
    return [it for it in attentions(case.model, case.sequence, case.cluster(FAST)) if is_considered(it)]


def test_what_is_considered() -> None:
    rings = [it for it in considered(replace(SMALL, ranks=1024)) if it.ring > LARGEST_RING]
    assert [(it.ring, it.team, it.ulysses, it.rotate) for it in rings] == [(1024, 1, 1, "kv")]
    assert len(considered(SMALL)) == len(list(attentions(SMALL.model, SMALL.sequence, SMALL.cluster(FAST))))
    named = {name for it in considered(replace(SMALL, ranks=8)) for name in names_of(it)}
    assert named == set(NAMES)
    assert names_of(Candidate(8, 2, 2, schedule="published")) == [BEST]
    assert names_of(Candidate(8, rotate="q")) == names_of(Candidate(8, rotate_forward="q")) == [BEST]


def test_the_best_is_the_fastest() -> None:
    for link in LINKS:
        found = {it: attention_cost(it, SMALL.model, SMALL.sequence, SMALL.cluster(link)) for it in considered(SMALL)}
        seconds = {it: sum(max(way.line.seconds, way.line.host) for way in cost.ways) for it, cost in found.items()}
        ways = predicted(SMALL, link)
        assert {way.candidate: way.seconds for way in ways} == seconds
        for name in NAMES:
            kind = [seconds[it] for it in found if name in names_of(it)]
            way = tables.first(ways, name)
            assert (way is not None) == bool(kind)
            assert way is None or way.seconds == min(kind)
        ring, cost = tables.first(ways, RING), found[next(it for it in found if RING in names_of(it))]
        assert ring is not None
        assert ring.exposed == pytest.approx(seconds[ring.candidate] - cost.forward.compute - cost.backward.compute)
        assert (ring.node_bytes, ring.rank_bytes) == (sum(cost.node_bytes), cost.rank_bytes)


CHECKS = (
    (SMALL, Candidate(4, 2, 2, "ring_in_node", "published", "q", order="head_tail"), range(8, 16), True),
    (SMALL, Candidate(2, 2, 4, "ulysses_in_node", order="head_tail"), range(3, 4), True),
    (SMALL, Candidate(16, order="head_tail"), range(8), False),
    (SMALL, Candidate(4, 4, rotate="q", rotate_forward="q", order="head_tail"), range(4), True),
    (Case(64, 52, 52, weak=False), Candidate(8, 8, order="head_tail"), range(63, 64), True),
)


@pytest.mark.parametrize("check", [*CHECKS[:2], pytest.param(CHECKS[2], marks=pytest.mark.whole), *CHECKS[3:]])
def test_counted_is_predicted(check: tuple) -> None:
    seen = simulated.counted(*check)
    assert seen == simulated.planned(*check)
    assert 0 < seen[1] < seen[0]


def test_what_is_counted_stands_beside_it() -> None:
    assert [row[-1] for row in simulated.check_table(CHECKS[:2]).rows] == ["yes", "yes"]


@pytest.mark.slow
@pytest.mark.whole
def test_the_page_has_what_was_counted() -> None:
    """On up to 1024 ranks, as many bytes as are predicted."""
    table = simulated.check_table()
    assert {row[-1] for row in table.rows} == {"yes"}
    assert_shown(table, PAGE)


@pytest.mark.slow
@pytest.mark.whole
def test_the_page_has_what_a_rank_receives() -> None:
    assert_shown(teams.forward_table(), PAGE)


def test_a_whole_node_is_what_the_planner_says_comes_into_one() -> None:
    case, candidate, ranks, _ = CHECKS[0]
    cost = attention_cost(candidate, case.model, case.sequence, case.cluster(FAST))
    nodes = [simulated.counted(case, candidate, some, backward=True)[1] for some in (range(8), ranks)]
    assert max(nodes) == sum(cost.node_bytes)


def test_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "STRONG_RANKS", (8, 16))
    monkeypatch.setattr(teams, "HEADS", ((8, 8),))
    for table in (tables.ways_table((8, 8), weak=False), teams.forward_table()):
        assert all(len(row) == len(table.head) for row in table.rows)
    rows = tables.ways_table((8, 8), weak=False).rows
    assert len(rows) == 4
    assert rows[0][-3:-1] == ["-", "-"]
    # More than 8 ranks do not go into 8 heads.
    assert [row[4] == "-" for row in rows] == [False, False, True, True]
