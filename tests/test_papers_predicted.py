"""Figures 7, 9 and 10: what is predicted, of whom, and which of the paper's numbers stand beside it."""

from dataclasses import replace

import pytest

from recipes.benchmarks.papers import figure7, scaling_figures
from recipes.benchmarks.papers.clusters import CHECKPOINT, Setting, a100, h100, predicted
from recipes.benchmarks.papers.models import DIT_1B, GIB, GPT_7B, K
from wallfacer_dt.planning.candidates import attentions
from wallfacer_dt.planning.predict import attention_cost, predict
from wallfacer_dt.planning.stack import stack_memory

SMALL = Setting("", DIT_1B, 16 * K, a100(2, 4), False)


def every(setting: Setting) -> dict:
    """All ways in layers as the paper has them, with what is predicted of each."""
    model, sequence, cluster = setting.shape, setting.sequence, setting.cluster
    ways = [replace(one, checkpoint=CHECKPOINT) for one in attentions(model, sequence, cluster)]
    return {it: predict(it, model, sequence, cluster, attention_cost(it, model, sequence, cluster)) for it in ways}


@pytest.mark.parametrize("setting", [SMALL, Setting("", GPT_7B, 32 * K, h100(16), True)])
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
    given = replace(SMALL, tokens=64 * K, cluster=a100(2, 8))
    fastest = predicted(given)
    memory = fastest.best.prediction.memory - 1
    tight = replace(given, cluster=replace(given.cluster, memory=memory))
    ways, found = predicted(tight), every(tight)
    by_time = sorted(found, key=lambda it: found[it].seconds)
    fitting = next(it for it in by_time if stack_memory(it, tight.shape, tight.sequence).peak <= memory)
    assert by_time[0] != fitting
    assert ways.best.fits
    assert ways.best.prediction.seconds == pytest.approx(found[fitting].seconds)
    assert ways.best.throughput < fastest.best.throughput
    # What is compared with is shown all the same, and whether it fits.
    assert ways.ring.throughput == fastest.ring.throughput
    assert ways.ring.fits is (ways.ring.prediction.memory <= memory)


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
    assert SMALL.shape.ffn_weights + SMALL.shape.attention_weights == DIT_1B.per_layer
    assert (SMALL.shape.heads, SMALL.shape.hidden, SMALL.shape.layers) == (24, 1536, 24)


def test_figures_9_and_10_have_the_papers_sizes() -> None:
    strong, weak = (scaling_figures.curves(weak=is_weak) for is_weak in (False, True))
    for curve in (*strong, *weak):
        is_gpt = curve.name.startswith("GPT")
        ranks = [setting.cluster.ranks for setting in curve.settings]
        assert ranks == [8, 16, 32, 64][: 4 if is_gpt else 3]
        assert all(setting.is_causal is is_gpt for setting in curve.settings)
        assert is_gpt or all(setting.cluster.nodes > 1 for setting in curve.settings)
    assert {setting.tokens for curve in strong for setting in curve.settings} == {128 * K}
    ends = {(c.settings[0].tokens, c.settings[-1].tokens) for c in weak}
    assert ends == {(64 * K, 512 * K), (128 * K, 512 * K)}
    assert [curve.printed for curve in strong] == [114.33] * 2 + [60.71] * 3
    assert not any(curve.printed for curve in weak)


@pytest.mark.slow
@pytest.mark.whole
def test_the_tables() -> None:
    """The paper's numbers stand where its text has them, and nowhere else."""
    tables = [figure7.table(), scaling_figures.table(weak=False), scaling_figures.table(weak=True)]
    for table, known in zip(tables, (2, 5, 0), strict=True):
        assert all(len(row) == len(table.head) for row in table.rows)
        assert sum(row[1] != "not in the text" for row in table.rows) == known
        assert table.head[-1] == "how ours was got"
    for table in tables[:2]:
        assert all(f"{K // 8}K" in row[0] for row in table.rows if "%" in row[1])
    assert "the better C is 2 on nodes of 16 and 4 on nodes of 8" in tables[0].note.replace("\n", " ")
