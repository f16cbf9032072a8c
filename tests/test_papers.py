"""The papers' numbers: formulas against what is printed, and what runs against the formulas."""

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.benchmarks.papers.clusters import GPT_7B
from recipes.benchmarks.report import GIB, K, Table
from tests.pairwise import few
from tests.papers import assert_shown, communication, mapping, memory
from tests.papers.communication import HOSTS, intensity, ring_p2p, saved, smallest, team_collective, team_hops, team_p2p
from tests.papers.executed import held, received
from tests.papers.memory import FSDP, ZERO_2, activations, ours_before, power_of_two
from tests.papers.metp import longest
from tests.papers.models import EXAMPLE, LLAMA_7B, Call, parameters
from wallfacer_dt import ModelShape

PAGE = (Path(__file__).parents[1] / "docs" / "benchmarks" / "papers.md").read_text()
SMALL = Call(ModelShape(32, 4), 1536, 1)
NUMBER = 16  # bytes of a call's number and that of its contents, which its backward is told
MESHES = [(4, 2), (8, 2), (12, 2), (16, 4), (32, 4), (48, 4), (64, 8)]


def example(team: int) -> Call:
    return Call(EXAMPLE, 64 * K, 64, team, "published" if team > 1 else "2d")


def test_equations_2_to_4_as_printed() -> None:
    """1.625, 0.152 and 0.406 of section 3.2.2 are GiB of two-byte elements."""
    ring, wall = example(1), example(4)
    assert 2 * ring_p2p(ring) / GIB == 1.625
    assert round(float(2 * team_collective(wall) / GIB), 3) == 0.152
    assert round(float(2 * team_p2p(wall) / GIB), 3) == 0.406
    assert round(float(2 * ring_p2p(ring) / 10**9), 3) != 1.625
    assert team_hops(wall) == 4
    assert 2 * ring.activation == 13 * 2**20


def test_equations_6_and_7_as_printed() -> None:
    ring, wall = (activations(EXAMPLE.layers, team) for team in (1, 4))
    assert (ring, wall) == (68, 77)
    assert 0.132 < wall / ring - 1 < 0.1325


@pytest.mark.parametrize(("ranks", "team"), MESHES)
def test_counted_is_the_formula(ranks: int, team: int) -> None:
    """Published: equations 3 and 4 to the byte. 2d: 2(C - 1) A, 2(P / C - 1) A. Ring: one hop less than equation 2."""
    published, flat, ring = SMALL.on(ranks, team, "published"), SMALL.on(ranks, team), SMALL.on(ranks, 1)
    a = published.activation
    seen = received(published)
    assert (seen.point_to_point, seen.collective) == (2 * team_p2p(published), 2 * team_collective(published))
    assert seen.hops == team_hops(published)
    seen = received(flat)
    assert (seen.point_to_point, seen.collective) == (4 * (ranks // team - 1) * a, 4 * (team - 1) * a)
    assert seen.statistics == 4 * (team - 1) * a / SMALL.model.dim
    seen = received(ring)
    assert seen.point_to_point == 2 * ring_p2p(ring) * Fraction(ranks - 1, ranks)
    assert (seen.hops, seen.collective, seen.statistics) == (ranks - 1, 0, 0)


@pytest.mark.parametrize(("ranks", "team"), [*MESHES, (4, 1), (16, 1)])
def test_held_before_the_first_block(ranks: int, team: int) -> None:
    for schedule in ("published", "2d") if team > 1 else ("2d",):
        call = SMALL.on(ranks, team, schedule)
        assert held(call).before == 2 * ours_before(call) * call.activation


def test_held_afterwards() -> None:
    """q, k, v, the output, and lse in float32."""
    for call in (SMALL.on(8, 1), SMALL.on(8, 2, "published"), SMALL.on(8, 2)):
        seen = held(call)
        assert seen.kept == 2 * 4 * call.activation + 4 * call.activation / SMALL.model.dim + NUMBER
        assert seen.before < seen.peak < seen.step_peak


@pytest.mark.parametrize("tokens", few([16 * K, 64 * K], {16 * K}))
def test_figure_1(tokens: int) -> None:
    """At every length the same."""
    for team in (2, 4):
        published, flat = (Call(EXAMPLE, tokens, 64, team, schedule) for schedule in ("published", "2d"))
        assert received(published).point_to_point == 2 * team_p2p(published)
        assert saved(published) == pytest.approx(1 - 64 / 63 / team)
        assert saved(flat) == pytest.approx(1 - (64 / team - 1) / 63)
        for call in (published, flat):
            assert saved(call, "payload") < saved(call)


def test_algorithms_2_and_3_by_hand() -> None:
    """8 ranks, teams of 2, as section 3.3 has them."""
    ranks = [(rank // 2, rank % 2, 4, 2) for rank in range(8)]
    assert [mapping.init_send(*rank) for rank in ranks] == [0, 4, 1, 5, 2, 6, 3, 7]
    assert [mapping.ring_next(*rank) for rank in ranks] == [2, 3, 0, 1, 6, 7, 4, 5]


def test_figure_5() -> None:
    held_ = mapping.holdings()
    assert mapping.sub_rings(held_) == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert [one.keys for one in held_] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert all(mapping.facts(held_).values())


@pytest.mark.parametrize(("ranks", "team"), MESHES)
def test_algorithms_as_printed_are_the_schedules(ranks: int, team: int) -> None:
    for one in mapping.holdings(ranks, team):
        assert (one.to, one.following) == one.printed


def test_figure_6() -> None:
    assert mapping.chunks("contiguous") == [(2 * d, 2 * d + 1) for d in range(8)]
    assert mapping.chunks("head_tail") == [(d, 15 - d) for d in range(8)]
    for schedule in ("published", "2d"):
        # But for the diagonal itself, of which not every rank has a part.
        assert mapping.causal_work("head_tail", schedule=schedule) == pytest.approx([1] * 8, abs=1e-3)
    assert mapping.causal_work("contiguous", 8, 1) == pytest.approx([(2 * d + 1) / 8 for d in range(8)], abs=2e-3)


@given(st.integers(1, 10**6), st.integers(0, 10**6), st.integers(0, 10**9))
def test_longest_fits_and_no_longer_one_does(slope: int, states: int, budget: int) -> None:
    def needed(tokens: int) -> Fraction:
        return Fraction(states + slope * tokens)

    tokens = longest(needed, budget)
    assert tokens == 0 or needed(tokens) <= budget
    assert needed(tokens + 1) > budget


def test_powers_of_two() -> None:
    assert [power_of_two(n) for n in (0, K - 1, K, 2 * K - 1, 2 * K, 5 * K)] == [0, 0, 1, 1, 2, 4]


def test_table_4_by_hand() -> None:
    """2 layers of 4 * 10 * 10 + 2 * 10 * 40 = 1200 weights, no vocabulary; 8 tokens on 2 GPUs: A is 40 elements."""
    model = ModelShape(10, 2, ffn=40, gated=False, layers=2)
    assert parameters(model) == 2400
    assert ZERO_2.of(model, 2) == 2400 * (2 + 14 / 2)
    assert memory.equation_bytes(model, 8, 2, 1) == 21600 + 2 * 40 * (2 + 4)
    assert memory.equation_bytes(model, 8, 2, 2) == 21600 + 2 * 40 * (2 + 1 + 6)


def test_table_4_measures_attention_in_proportion() -> None:
    """What is held is as many bytes a token, however many there are."""
    short, long = (held(Call(GPT_7B, n * K, 8, 2, "published")).step_peak for n in (64, 128))
    assert long - NUMBER == 2 * (short - NUMBER)
    model = GPT_7B
    attention = memory.measured_bytes(model, 128 * K, 8, 2) - ZERO_2.of(model, 8)
    assert attention == long + 33 * 2 * 16 * K * 4096


def test_ring_table_1() -> None:
    layer, tokens = memory.LAYER, memory.TOKENS
    assert memory.formula("vanilla", layer, tokens) == 2 * 32 * tokens**2
    assert memory.formula("attention", layer, tokens) == 8 * tokens * 4096
    assert memory.formula("blockwise", layer, tokens) == 2 * tokens * 4096
    assert memory.formula("ring", layer, tokens) == 6 * tokens * 4096
    flash = memory.attention_peak("attention")
    assert flash.forward - flash.given == 2 * tokens * 4096 + 4 * tokens * 32
    assert memory.attention_peak("ring", 4) == memory.attention_peak("ring", 16)
    whole, blockwise = (memory.feed_forward_peak(way) for way in ("attention", "blockwise"))
    assert whole.forward - whole.given == 18 * tokens * 4096
    assert blockwise.forward - blockwise.given == 4 * tokens * 4096


def test_ring_table_2() -> None:
    """All that is printed but InfiniBand's, which does not agree with itself."""
    for host in HOSTS:
        if host.name == "A100 InfiniBand":
            assert smallest(host) == pytest.approx(24960)
            assert round(6 * host.block, 1) != host.sequence
        else:
            assert round(smallest(host) / 1000, 1) == host.block
            assert round(6 * smallest(host) / 1000, 1) == host.sequence


@pytest.mark.parametrize("schedule", ["2d", "published"])
def test_a_teams_hop_serves_as_many_queries_as_it_has_members(schedule: str) -> None:
    for team in (1, 2, 4):
        assert intensity(SMALL.on(32, team, schedule)) == team


def test_ring_table_3_by_hand() -> None:
    """One layer's model of 1200 weights on 2 devices, 100 tokens."""
    model = ModelShape(10, 2, ffn=40, gated=False)
    cluster = memory.Devices("", 2, 0)
    states = Fraction(16 * 1200, 2) + 4 * 1200
    assert FSDP.of(model, 2) == states
    for architecture, layer, tokens in (
        ("vanilla", 2 * 2 * 2 * 100**2, 100), ("attention", 2 * 8 * 100 * 10, 100),
        ("blockwise", 2 * 2 * 100 * 10, 100), ("ring", 2 * 6 * 50 * 10, 50),
    ):  # fmt: skip
        assert memory.needed(cluster, model, architecture, 100) == states + 2 * tokens * 10 * 4 + layer


def test_ring_table_3_goes_with_the_devices() -> None:
    """Twice the devices, twice the length and somewhat more: states shrink too."""
    lengths = [
        longest(lambda n: memory.needed(cluster, LLAMA_7B, "ring", n), cluster.memory)  # noqa: B023
        for cluster in (memory.A100_8, memory.A100_32)
    ]
    assert 4 < lengths[1] / lengths[0] < 5
    assert [len(printed) for _, _, printed in memory.CONTEXTS] == [4] * 13


TABLES = [
    communication.ring_table, communication.team_table, communication.hosts_table, memory.peak_table,
    memory.lengths_table, memory.activations_table, memory.contexts_table, mapping.figure_5, mapping.figure_6,
    mapping.figure_6_by_ranks,
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.whole
@pytest.mark.parametrize("make", TABLES, ids=lambda make: make.__name__)
def test_the_page_has_this_table(make: Callable[[], Table]) -> None:
    table = make()
    assert all(len(row) == len(table.head) for row in table.rows)
    assert table.head[-1] == "how ours was got"
    assert_shown(table, PAGE)
