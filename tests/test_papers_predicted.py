"""Figures 7, 9 and 10: what is predicted, of whom, and which of the paper's numbers stand beside it."""

from dataclasses import replace

import pytest

from recipes.benchmarks.papers.__main__ import table
from recipes.benchmarks.papers.clusters import (
    CHECKPOINT,
    DIT_1B,
    GPT_7B,
    Setting,
    a100,
    h100,
    predicted,
    printed,
    scalings,
    throughputs,
)
from recipes.benchmarks.report import GIB, K
from tests.papers.models import per_layer
from wallfacer_dt.planning.candidates import attentions
from wallfacer_dt.planning.predict import attention_cost, predict
from wallfacer_dt.planning.stack import stack_memory

SMALL = Setting(DIT_1B, 16 * K, a100(2, 4))


def every(setting: Setting) -> dict:
    """All ways in layers as the paper has them, with what is predicted of each."""
    model, sequence, cluster = setting.model, setting.sequence, setting.cluster
    ways = [replace(one, checkpoint=CHECKPOINT) for one in attentions(model, sequence, cluster)]
    return {it: predict(it, model, sequence, cluster, attention_cost(it, model, sequence, cluster)) for it in ways}


@pytest.mark.parametrize("setting", [SMALL, Setting(GPT_7B, 32 * K, h100(8))])
def test_the_fastest_of_each_kind(setting: Setting) -> None:
    ways, found = predicted(setting), every(setting)
    ranks = setting.cluster.ranks
    rings = [p.seconds for it, p in found.items() if it.ring == ranks and it.rotate == it.rotate_forward == "kv"]
    assert [ways.ring.prediction.seconds] == rings
    for team in (2, 4):
        walls = [p.seconds for it, p in found.items() if (it.schedule, it.team, it.ulysses) == ("published", team, 1)]
        way = ways.walls[team]
        assert (way is None) == (ranks % team**2 != 0) == (not walls)
        assert way is None or way.prediction.seconds == min(walls)
    assert ways.best.prediction.seconds == pytest.approx(min(p.seconds for p in found.values()))
    assert ways.considered == len(found)


def test_what_does_not_fit_is_not_best() -> None:
    narrow = replace(SMALL.model, ffn=1536)  # so that it is attention that needs the most
    given = replace(SMALL, model=narrow, tokens=128 * K, cluster=a100(2, 4))
    fastest = predicted(given)
    memory = stack_memory(fastest.best.candidate, given.model, given.sequence).peak - 1
    tight = replace(given, cluster=replace(given.cluster, memory=memory))
    ways, found = predicted(tight), every(tight)
    by_time = sorted(found, key=lambda it: found[it].seconds)
    fitting = next(it for it in by_time if stack_memory(it, tight.model, tight.sequence).peak <= memory)
    assert by_time[0] != fitting
    assert ways.best.prediction.seconds == pytest.approx(found[fitting].seconds)
    assert ways.best.throughput < fastest.best.throughput
    # What is compared with is shown all the same.
    assert ways.ring.throughput == fastest.ring.throughput
    assert stack_memory(ways.ring.candidate, tight.model, tight.sequence).peak > memory


def test_throughput_and_gain() -> None:
    ways = predicted(SMALL)
    seconds = ways.ring.prediction.seconds
    assert ways.ring.throughput == SMALL.tokens / seconds
    assert ways.best.gain(ways.ring) == pytest.approx(seconds / ways.best.prediction.seconds - 1)
    assert ways.best.gain(ways.ring, attention=True) == pytest.approx(ways.ring.attention / ways.best.attention - 1)
    assert ways.best_wall.gain(ways.ring) == max(way.gain(ways.ring) for way in ways.walls.values() if way)


def test_tables_2_and_3() -> None:
    assert [(c.ranks, c.ranks_per_node, c.nodes) for c in (a100(2, 16), a100(4, 8), h100(64))] == [
        (32, 16, 2), (32, 8, 4), (64, 8, 8),
    ]  # fmt: skip
    assert [c.memory for c in (a100(2, 16), h100(64))] == [40 * GIB, 80 * GIB]
    assert a100(2, 16).inter.bandwidth == 100e9 / 8
    assert SMALL.model.ffn_weights + SMALL.model.attention_weights == per_layer(DIT_1B)
    assert (SMALL.model.heads, SMALL.model.hidden, SMALL.model.layers) == (24, 1536, 24)


def test_figures_have_the_papers_sizes() -> None:
    for is_weak, ends in ((False, {(128, 128)}), (True, {(64, 512), (128, 512)})):
        curves = scalings(weak=is_weak)
        assert {(curve[0].tokens // K, curve[-1].tokens // K) for curve in curves.values()} == ends
        for curve in curves.values():
            is_gpt = curve[0].model == GPT_7B
            assert [setting.cluster.ranks for setting in curve] == [8, 16, 32, 64][: 4 if is_gpt else 3]
            assert all(setting.sequence.is_causal is is_gpt for setting in curve)
            assert is_gpt or all(setting.cluster.nodes > 1 for setting in curve)
    strong = [[printed(setting) for setting in curve] for curve in scalings(weak=False).values()]
    assert strong == [[None, None, 114.33]] * 2 + [[None] * 3 + [60.71]] * 3
    assert not any(printed(setting) for curve in scalings(weak=True).values() for setting in curve)
    assert [setting.tokens for curve in throughputs().values() for setting in curve] == [128 * K, 256 * K, 512 * K] * 6


@pytest.mark.slow
@pytest.mark.whole
def test_the_tables() -> None:
    """The paper's numbers stand where its text has them, and nowhere else; the better C is what it says."""
    for curves, known in ((throughputs(), 2), (scalings(weak=False), 5), (scalings(weak=True), 0)):
        made = table("", curves)
        assert all(len(row) == len(made.head) for row in made.rows)
        assert sum(row[1] != "not in the text" for row in made.rows) == known
        assert all(f"{K // 8}K" in row[0] for row in made.rows if "%" in row[1])
        assert made.head[-1] == "how ours was got"
    for nodes, per_node, team in ((2, 16, 2), (4, 8, 4)):
        assert predicted(Setting(DIT_1B, 128 * K, a100(nodes, per_node))).best_wall.candidate.team == team
