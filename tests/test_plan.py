"""The planner: what is enumerated, how long a schedule takes by hand, what is dropped, how the rest is ranked."""

import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise, product
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

from tests.strategies import examples
from tests.test_plan_bytes import planned
from wallfacer_dt import (
    Cluster,
    Kernels,
    Link,
    METPAttentionParallel,
    METPParallel,
    ModelShape,
    Profile,
    SequenceShape,
    WallFacerParallel,
    plan,
)
from wallfacer_dt.algorithms.masks import Mask
from wallfacer_dt.algorithms.schedule import make_schedule
from wallfacer_dt.algorithms.sequences import Sequences
from wallfacer_dt.algorithms.steps import SIDES, Attend
from wallfacer_dt.algorithms.tiles import Tile
from wallfacer_dt.kernels.block import CAUSAL, FULL, Band
from wallfacer_dt.planning import Candidate, Measured, Prediction, Ranked
from wallfacer_dt.planning.attention import attention_events, flops_of_pair, head_patterns, programs_of
from wallfacer_dt.planning.candidates import attentions, node_of, with_layers
from wallfacer_dt.planning.division import Division
from wallfacer_dt.planning.flops import model_flops
from wallfacer_dt.planning.gpus import GPUS
from wallfacer_dt.planning.known_models import MODELS
from wallfacer_dt.planning.predict import attention_cost, attention_costs, least_attention, predict
from wallfacer_dt.planning.profiling import _RANKED, shortlist
from wallfacer_dt.planning.programs import area_of, calls_of, program_of
from wallfacer_dt.planning.search import _because, _by_mesh, _order, _Search
from wallfacer_dt.planning.stack import stack_memory
from wallfacer_dt.planning.timeline import Begin, Compute, End, Event, Settle, last_of, run
from wallfacer_dt.planning.traffic import Arrivals, Key, Wire, arrivals, into_ranks, wires
from wallfacer_dt.planning.units import MOST_TOKENS, format_size
from wallfacer_dt.testing.fake import fake_world

FAST = Link(1e40)
FREE = Kernels(1e30, 1e30, 1e30, 0.0, 1e40, launch=0.0)
MODEL = ModelShape(hidden=1024, heads=16)
EXPERTS = ModelShape(64, 8, ffn=8, layers=2, experts=2, experts_per_token=1)
SEQUENCE = SequenceShape(4096, dtype=torch.float32)


def cluster(ranks: int = 16, per_node: int = 4, **changes: object) -> Cluster:
    given = {
        "intra": Link(1e9, 1e-5),
        "inter": Link(1e8, 1e-4),
        "kernels": Kernels(1e11, 1e11, 1e11, 1e-5, 1e10, launch=0.0),
    }
    return Cluster(ranks, per_node, **(given | changes))


def wire(intra: int = 0, inter: int = 0, node: int | None = None, sources: int = 1) -> Wire:
    return Wire(intra + inter, sources, intra, sources, inter, inter if node is None else node)


ONE = Cluster(4, 2, Link(1.0), Link(1.0))  # a byte a second


def test_a_transfer_hides_behind_what_is_computed_before_its_end() -> None:
    line = run([Begin("a", wire(3)), Compute(2), End("a"), Compute(4)], ONE)
    assert (line.seconds, line.compute, line.exposed, line.transfer, line.overlapped) == (7, 6, 1, 3, 2)


def test_a_link_is_shared_evenly_and_levels_do_not_disturb_each_other() -> None:
    assert run([Begin("a", wire(3)), Begin("b", wire(3)), End("b"), End("a")], ONE).seconds == 6
    # Three seconds alone, two for one of a, then four for two of each; and what is left of the other.
    events = [Begin("a", wire(6)), Compute(3), Begin("b", wire(2)), End("b"), Compute(0), End("a")]
    line = run(events, ONE)
    assert [(bar.what, bar.start, bar.stop) for bar in line.bars if bar.lane == "intra"] == [("b", 3, 7), ("a", 0, 8)]
    assert (line.seconds, line.transfer, line.waiting) == (8, 8, 5)
    events = [Begin("a", wire(2)), Begin("b", wire(9)), End("a"), Compute(9), End("b")]
    assert [(bar.what, bar.stop) for bar in run(events, ONE).bars if bar.lane == "intra"] == [("a", 4), ("b", 11)]
    assert run([Begin("a", wire(3)), Begin("b", wire(0, 3)), End("b"), End("a")], ONE).seconds == 3
    # One that takes both is there when both have brought their part.
    assert run([Begin("a", wire(2, 5)), End("a")], ONE).seconds == 5


def test_a_nodes_link_is_shared_and_one_rank_gets_one_interface() -> None:
    events = [Begin("a", wire(0, 4, node=8)), End("a")]
    assert run(events, ONE).seconds == 8
    assert run(events, replace(ONE, inter=Link(4.0))).seconds == 2
    assert run(events, replace(ONE, inter=Link(4.0), nics=4)).seconds == 4


def test_latency_is_paid_for_every_source() -> None:
    slow = replace(ONE, intra=Link(1.0, latency=10))
    assert run([Begin("a", wire(3, sources=3)), End("a")], slow).seconds == 33


def test_latency_is_not_shared() -> None:
    """Of messages under way together each waits for its own, while the link is another's; then they share it."""
    slow = replace(ONE, intra=Link(1.0, latency=10))
    line = run([Begin("a", wire(3)), Begin("b", wire(3)), End("b"), End("a")], slow)
    assert (line.seconds, line.transfer, line.busy) == (16, 16, (6, 0))
    # Four seconds alone, then four for what is left of a and for all of b.
    line = run([Begin("a", wire(6)), Compute(4), Begin("b", wire(2)), End("a"), End("b")], slow)
    assert [(bar.what, bar.start, bar.stop) for bar in line.bars if bar.lane == "intra"] == [("a", 0, 18), ("b", 4, 18)]
    assert (line.seconds, line.waiting, line.transfer, line.busy) == (18, 14, 18, (8, 0))
    # One has come before the bytes of the other begin to, after a break of the link.
    line = run([Begin("a", wire(2)), Compute(20), Begin("b", wire(2)), End("b"), End("a")], slow)
    assert (line.seconds, line.waiting, line.transfer, line.busy) == (32, 12, 24, (4, 0))


def test_ranks_that_run_together_wait_for_those_who_send() -> None:
    """Each has much to compute before one hop and little before the other; alone none would wait for that."""

    def rank(first: float, then: float, last: float, source: int) -> list[Event]:
        hops = [Begin(name, wire(3), (source,)) for name in "ab"]
        return [Compute(first), hops[0], End("a"), Compute(then), hops[1], End("b"), Compute(last)]

    ranks = [rank(10, 0, 1, 1), rank(0, 8, 2, 0)]
    assert [run(events, ONE).seconds for events in ranks] == [17, 16]
    # The second is sent to when the first has computed, and the first when the second has, which is 8 later.
    last, events = last_of(ranks, ONE)
    line = run(events, ONE)
    assert (last, line.seconds, line.compute, line.waiting) == (1, 26, 10, 16)
    assert [event.late for event in events if isinstance(event, Begin)] == [10, 0]
    # What is sent first has the link until the other is.
    line = run([Begin("a", wire(9), late=5), Begin("b", wire(6)), End("b"), End("a")], ONE)
    assert [(bar.what, bar.start, bar.stop) for bar in line.bars] == [("b", 0, 7), ("a", 5, 15)]
    # Those who are late do not hold up what starts meanwhile.
    late = [Begin(name, wire(5), late=seconds) for name, seconds in (("a", 10), ("d", 12))]
    events = [*late, Begin("b", wire(3)), End("b"), Begin("c", wire(9)), End("c"), Compute(1), End("a"), End("d")]
    line = run(events, ONE)
    assert {bar.what: bar.stop for bar in line.bars if bar.lane == "intra"} == {"b": 3, "c": 15, "a": 21, "d": 22}
    assert (line.seconds, line.intra, line.busy) == (22, 22, (22, 0))


def test_what_only_others_of_a_node_receive_has_its_link_and_is_waited_for_last() -> None:
    of_others = Begin("a", Wire(1, 1, 1, 0, 0, 6))
    line = run([of_others, End("a"), Settle()], ONE)
    assert [tuple(bar) for bar in line.bars] == [("intra", "a", 0, 1), ("inter", "a", 0, 6)]
    assert (line.seconds, line.waiting) == (6, 6)
    # Five are left of it when three begin to come that this rank waits for, and two when these have.
    events = [of_others, End("a"), Begin("b", wire(0, 3)), End("b"), Compute(1), Settle(), Compute(1), Settle()]
    line = run(events, ONE)
    assert [(bar.what, bar.stop) for bar in line.bars if bar.lane == "inter"] == [("b", 7), ("a", 9)]
    assert (line.seconds, line.waiting, line.busy) == (10, 8, (1, 9))
    # Another of the same name is waited for again.
    assert run([*events, Begin("a", wire(0, 3)), End("a")], ONE).seconds == 13
    # Who waits for others at last may be through last.
    assert (
        last_of([[of_others, End("a"), Settle()], [Begin("a", wire(1)), End("a"), Compute(4), Settle()]], ONE)[0] == 0
    )


@example(
    (Candidate(4, 2, rotate="q"), ModelShape(64, 8, 2, 8), SequenceShape(12), 8),
    (7, 0),
    1e11,
    (1e5, 1e5),
    (0.0, 0.0),
    1,
    1,
    None,
)  # the sequence that stands for it hops further
@example(
    (
        Candidate(4, 1, 3, "ulysses_in_node", rotate_forward="q"),
        ModelShape(8, 8, 2, 8),
        SequenceShape(216, 2),
        6,
    ),
    (None, 26),
    1e9,
    (1e9, 1e8),
    (0.0, 0.0),
    1,
    1,
    None,
)  # ranks with other heads have other groups
@example(
    (Candidate(6, rotate="q", rotate_forward="q"), ModelShape(8, 4, 1, 8), SequenceShape(36, is_causal=True), 3),
    (20, 0),
    1e8,
    (1e6, 1e4),
    (0.0, 0.0),
    2,
    1,
    1,
)  # not every rank receives from its own node what one does
@examples(60)
@given(
    planned(12), st.tuples(st.integers(0, 40), st.integers(0, 40)), st.sampled_from([1e5, 1e8, 1e11]),
    st.tuples(*2 * [st.sampled_from([1e4, 1e6, 1e9])]), st.tuples(*2 * [st.sampled_from([0.0, 1e-6, 1e-3, 0.1])]),
    st.sampled_from([1, 2, 4]), st.sampled_from([1, 3]), st.sampled_from([None, 0, 1]),
)  # fmt: skip
def test_ranks_that_run_together_take_no_less_than_they_need(
    drawn, window: tuple[int | None, int], rate: float, rates: tuple[float, float], latencies: tuple[float, float],
    nics: int, siblings: int, windowed: int | None,
) -> None:  # fmt: skip
    """Than any computes, or receives from its node, or its node from others; the search goes by it, of layers too."""
    candidate, model, sequence, per_node = drawn
    model = replace(model, ffn=4096, layers=2, windowed_layers=windowed)
    sequence = replace(sequence, window_size=(window[0], 0 if sequence.is_causal else window[1]))
    links, kernels = map(Link, rates, latencies), Kernels(rate, rate, 1e12, 0.0, 1e12)
    where = Cluster(candidate.size, per_node, *links, nics, kernels=kernels, striped_gathers=siblings == 1)
    alone, together = (
        attention_cost(candidate, model, sequence, where, siblings=siblings, together=way) for way in (False, True)
    )
    for one, all_of_them in zip(alone.ways, together.ways, strict=True):
        assert run(all_of_them.events, where).seconds == all_of_them.line.seconds
        assert (one.rank_bytes, one.node_bytes) == (all_of_them.rank_bytes, all_of_them.node_bytes)
        needed = [one.line.compute, one.node_bytes / where.inter.bandwidth]
        if per_node == candidate.size:
            needed.append(one.rank_bytes / where.intra.bandwidth)
        assert all(all_of_them.line.seconds >= some * (1 - 1e-9) for some in needed)
    if siblings > 1:
        return  # which the search has none of
    least = least_attention(candidate, model, sequence, where)
    assert all(
        one.seconds <= way.line.seconds * (1 + 1e-9) for one, way in zip(least.spent, together.ways, strict=True)
    )
    assert (least.rank_bytes, least.node_bytes) == (together.rank_bytes, together.node_bytes)
    search = _Search(model, sequence, where, None, 0.0)
    for choice in search._choices(candidate):
        assert choice.ranked.prediction.seconds <= search._predicted(choice).prediction.seconds


LAYERS = ModelShape(192, 3, 1, 64, ffn=1024, layers=2)
DOCUMENTS = st.just(()) | st.lists(st.integers(1, 200), min_size=1, max_size=4).map(tuple)


@example(ModelShape(192, 3, 1, 64), SequenceShape(780, is_causal=True), (12, 4), 64, 1e-3, 64.0, 0.0, 2)
@example(ModelShape(192, 3, 1, 64), SequenceShape(780, is_causal=True), (12, 4), 64, 0.0, 0.0, 1.0, 2)
@example(
    LAYERS, SequenceShape(400, is_causal=True, window_size=(30, 0)), (8, 8), 2,
    1e-3, 64.0, 0.0, 8,
)  # fmt: skip
@examples(15)
@given(
    st.sampled_from([MODEL, LAYERS, replace(LAYERS, windowed_layers=1), replace(LAYERS, windowed_layers=0)]),
    st.builds(
        SequenceShape, st.integers(64, 700), is_causal=st.booleans(),
        window_size=st.none() | st.tuples(st.integers(0, 200), st.just(0)), documents=DOCUMENTS,
    ),
    st.sampled_from([(4, 2), (6, 3), (8, 8), (12, 4)]), st.sampled_from([2, 64]), st.sampled_from([0.0, 1e-3]),
    st.sampled_from([0.0, 64.0]), st.sampled_from([0.0, 1.0]), st.integers(0, 10**6),
)  # fmt: skip
def test_no_plan_is_before_its_mesh(
    model: ModelShape, sequence: SequenceShape, ranks: tuple[int, int], together: int, overhead: float,
    half_rows: float, launch: float, which: int,
) -> None:  # fmt: skip
    """What is said of meshes that differ in their placement, of any way over them, whatever a tile and a host cost."""
    told = {"overhead": overhead, "half_rows": half_rows, "launch": launch, "takes_segments": bool(which % 2)}
    where = cluster(*ranks, inter=Link(1e8), kernels=Kernels(1e8, 1e8, **told))
    kinds: dict[tuple, list[Candidate]] = {}
    for one in attentions(model, sequence, where):
        kinds.setdefault((one.axes, one.schedule, one.order), []).append(one)
    some = [*kinds.values()][which % len(kinds)]
    with mock.patch("wallfacer_dt.planning.attention._MOST_TOGETHER", together):
        search = _Search(model, sequence, where, None, 0.03)
        least = search._least({0: some}), search._least_node_bytes({0: some})
        for choice in search._choices(some[which % len(some)]):
            predicted = _order(search._predicted(choice))
            assert _order(choice.ranked) <= predicted
            assert (True, 0.0, *least) <= predicted


@example(6, 24, 6.67e7, 9e-4)
@examples(8)
@given(st.sampled_from([4, 6]), st.integers(0, 700), st.floats(1e6, 1e8), st.floats(1e-5, 1e-3))
def test_plans_under_a_window_are_in_their_order(ranks: int, window: int, bandwidth: float, latency: float) -> None:
    """Although of a rank alone only what it takes at least is known to be no more."""
    model, kernels = ModelShape(256, 4, 2, 64), Kernels(1e9, 1e9, 1e12, 0, 1e12)
    sequence = SequenceShape(128 * ranks, is_causal=True, window_size=(window, 0))
    link = Link(bandwidth, latency)
    with mock.patch("wallfacer_dt.planning.search.stack_memory", return_value=mock.Mock(peak=0)):
        where = Cluster(ranks, 1, link, link, kernels=kernels)
        ranked = plan(model, sequence, where, keep=None).ranked
    assert len(ranked) > 4
    for one in ranked:
        cost = attention_cost(one.candidate, model, sequence, where)
        of_attention = cost.forward.seconds + cost.backward.seconds
        assert one.handicap == pytest.approx(0.03 * of_attention if one.candidate.team > 1 else 0)
    seconds = [one.prediction.seconds + one.handicap for one in ranked]
    assert all(one <= other * (1 + 1e-3) for one, other in pairwise(seconds))


def test_a_gather_goes_round_and_an_exchange_is_sent_at_once() -> None:
    node = np.array([0, 0, 1, 1, 1])
    ends = [0, 0, 0, 0], [1, 2, 3, 4]
    sent, gathered = (
        Arrivals(*(np.array(x) for x in (*ends, via, [5, 5, 5, 5], [1, 1, 1, 1]))) for via in (ends[1], [4, 4, 4, 4])
    )
    keys = [Key(False, kind, "", 0) for kind in ("exchange", "to_heads", "to_tokens")]
    assert set(wires(dict.fromkeys(keys, sent), node)[0].values()) == {Wire(20, 1, 5, 1, 15, 15)}
    # Both of the node's ranks take half of what enters it, where there are interfaces for both.
    assert list(wires({Key(False, "gather", "", 0): gathered}, node)[0].values()) == [Wire(20, 0, 0, 4, 12, 20)]
    (through_one,) = wires({Key(False, "gather", "", 0): gathered}, node, striped_gathers=False)
    assert list(through_one.values()) == [Wire(20, 0, 0, 4, 20, 20)]


def test_copying_is_neither_hidden_nor_computing() -> None:
    line = run([Begin("a", wire(4)), Compute(10), End("a")], replace(ONE, kernels=Kernels(copy=0.25)))
    assert (line.seconds, line.compute, line.exposed) == (12, 10, 2)


@examples(40)
@given(planned(12), st.sampled_from(["intra", "inter"]), st.floats(1, 100))
def test_bounds_of_every_plan(drawn, level: str, factor: float) -> None:
    """No faster than computing, or than any link's work; no slower than one after the other, or than on worse links.

    The last but one of one rank alone: where ranks wait for each other, they wait for what others compute, too.
    """
    candidate, model, sequence, per_node = drawn
    where = cluster(candidate.size, per_node)
    better = replace(where, **{level: Link(getattr(where, level).bandwidth * factor)})
    for together in (True, False):
        cost, faster = (attention_cost(candidate, model, sequence, c, together=together) for c in (where, better))
        for line, improved in ((cost.forward, faster.forward), (cost.backward, faster.backward)):
            assert line.seconds == pytest.approx(line.compute + line.exposed)
            assert 2 * line.seconds >= line.transfer * (1 - 1e-9)
            assert (together and sequence.mask.spares_hops) or line.seconds <= (line.compute + line.transfer) * (
                1 + 1e-9
            )
            assert improved.seconds <= line.seconds * (1 + 1e-9)


@examples(60)
@given(planned(12))
def test_what_a_timeline_moves_is_what_is_received(drawn) -> None:
    """On one node, where ranks have equal shards and heads: its transfers bring the bytes that are predicted."""
    candidate, model, sequence, _ = drawn
    candidate = replace(candidate, placement="team_in_node")
    sequence = replace(sequence, length=candidate.size * -(-sequence.length // candidate.size))
    arrived = arrivals(candidate, model, sequence)
    (on_wires,) = wires(arrived, node_of(candidate, candidate.size))
    for backward in (False, True):
        received = into_ranks((some for key, some in arrived.items() if key.backward is backward), candidate.size)
        moved = []
        program = [*programs_of(candidate, sequence, together=False, backward=backward).values()][-1]
        for heads in head_patterns(candidate, model):
            events = list(
                attention_events(program, candidate, model, sequence, FREE, on_wires, heads, backward=backward)
            )
            begun = [event.name for event in events if isinstance(event, Begin)]
            assert sorted(begun) == sorted(event.name for event in events if isinstance(event, End))
            assert len(begun) == len(set(begun))
            moved.append(sum(event.wire.nbytes for event in events if isinstance(event, Begin)))
        if len(moved) == 1:
            placed = sum(
                on_wires[key].nbytes for key in on_wires if key.backward is backward and key.kind in ("place", "home")
            )
            # A rank that is its own target receives less.
            assert received.max() <= moved[0] <= received.max() + placed
            if candidate.schedule == "2d":
                assert moved[0] == received.max()


@given(
    st.integers(1, 200), st.booleans(), st.one_of(st.none(), st.tuples(st.integers(-1, 40), st.integers(-1, 40))),
    DOCUMENTS,
)  # fmt: skip
def test_pairs_that_are_seen(
    length: int, is_causal: bool, window: tuple[int, int] | None, documents: tuple[int, ...]
) -> None:
    of = [document for document, tokens in enumerate(200 * (documents or (200,))) for _ in range(tokens)]
    window = window and (window[0], min(window[1], 0)) if is_causal else window
    left, right = (None if n == -1 else n for n in window or (-1, -1))
    seen = sum(
        (left is None or j >= i - left)
        and (is_causal or right is None or j <= i + right)
        and not (is_causal and j > i)
        and of[i] == of[j]
        for i in range(length)
        for j in range(length)
    )
    assert SequenceShape(length, is_causal=is_causal, window_size=window, documents=documents).pairs() == seen


@given(planned(8))
def test_all_tiles_of_all_ranks_are_the_pairs(drawn) -> None:
    """Free links and kernels without overhead: the slowest rank computes no less than its share of what is seen."""
    candidate, model, sequence, _ = drawn
    kernels = Kernels(4.0, 10.0, 1.0, 0.0, 1e30)
    where = Cluster(candidate.size, 1, FAST, FAST, kernels=kernels)
    cost = attention_cost(candidate, model, sequence, where, together=False)
    share = sequence.pairs() * sequence.batch * model.heads * model.dim / candidate.size
    assert cost.forward.compute >= share * (1 - 1e-9)
    assert cost.backward.compute >= share * (1 - 1e-9)


@pytest.mark.parametrize("dims", [(64, 64), (192, 128), (48, 96)])
def test_products_of_a_pair(dims: tuple[int, int]) -> None:
    """As torch counts them, of a backward that computes scores again."""
    dim, value_dim = dims
    q, k, v = (2, 3, 5, dim), (2, 3, 7, dim), (2, 3, 7, value_dim)
    pairs = 2 * 3 * 5 * 7
    assert pairs * flops_of_pair(*dims, backward=False) == sdpa_flop_count(q, k, v)
    counted = sdpa_backward_flop_count((2, 3, 5, value_dim), q, k, v)
    assert pairs * flops_of_pair(*dims, backward=True) == counted


def test_blocks_of_few_queries_take_longer() -> None:
    """A ring works on a shard's queries at a time, a team that gathers them on more, Ulysses on all."""
    kernels = Kernels(4.0, 10.0, 1.0, 0.0, 1e30, half_rows=64)
    where = Cluster(4, 1, FAST, FAST, kernels=kernels)
    ring, team, ulysses = (
        attention_cost(replace(one, rotate_forward="kv", rotate="kv"), MODEL, SEQUENCE, where)
        for one in (Candidate(4, 1), Candidate(1, 4), Candidate(1, 1, 4))
    )
    share = SEQUENCE.pairs() * MODEL.hidden / 4
    assert ring.forward.compute == pytest.approx(share * (1 + 64 / 1024))
    assert ulysses.forward.compute == ulysses.backward.compute == pytest.approx(share * (1 + 64 / 4096))
    assert ulysses.forward.compute < team.forward.compute < ring.forward.compute
    assert ulysses.backward.compute < team.backward.compute < ring.backward.compute


def test_what_goes_back_round_a_team_crosses_nodes_by_its_distance() -> None:
    """Of a team of four on two nodes: to a neighbour one of a node's ranks from the other node, farther both."""
    links = {"intra": Link(1e9), "inter": Link(1e8)}
    line = attention_cost(Candidate(1, 4, schedule="rings"), MODEL, SEQUENCE, cluster(4, 2, **links)).forward
    rows = SEQUENCE.length // 4 * 4  # bytes of a float of each
    passed, returned = rows * MODEL.hidden, rows * (MODEL.hidden + MODEL.heads)
    # A neighbour's, the next one's, and that of the neighbour on the other side.
    entering = 3 * passed + (1 + 2 + 1) * returned
    within = 3 * passed + 2 * returned
    assert line.transfer == pytest.approx(entering / 1e8 + within / 1e9)


@examples(60)
@given(st.data())
def test_a_program_is_its_schedule(data: st.DataObject) -> None:
    """With the same transfers and tiles, although what lies as other things do was planned once."""
    ulysses, ring, team = (data.draw(st.integers(1, n)) for n in (3, 6, 3))
    length, ends = data.draw(st.integers(2, 90)), [(None, 0, 9), (None, 0, 4)]
    documents = data.draw(st.sampled_from([(), ((0, length),), ((0, 1, length),), ((0, length // 2, length),)]))
    masks = [Mask(*some, documents=documents) for some in product(*ends)]
    orders = ["contiguous", "head_tail"] + ["document_head_tail"] * bool(documents)
    sequences = Sequences(length, length, *(data.draw(st.sampled_from(some)) for some in (orders, masks)))
    names = ["2d", "rings"] + ["published"] * (ring % team == 0)
    schedule, resident = data.draw(st.sampled_from(names)), data.draw(st.sampled_from(SIDES))
    place = Candidate(ring, team, ulysses).place(data.draw(st.integers(0, ring * team * ulysses - 1)))
    backward = data.draw(st.booleans())
    program = program_of(place, sequences, schedule, resident, backward)
    parts = make_schedule(place, sequences, schedule=schedule, resident=resident, backward=backward).parts
    for written, steps in zip(program, parts, strict=True):
        for one, step in zip(written, steps, strict=True):
            if isinstance(step, Attend):
                tiles = [tile for segments in step.work for tile in segments.tiles]
                sizes = [(x.area, x.q[1] - x.q[0], x.k[1] - x.k[0]) for x in tiles]
                assert [call[:3] for call in calls_of(one.work, takes_segments=False)] == sizes  # type: ignore[union-attr]
                calls = calls_of(one.work, takes_segments=True)  # type: ignore[union-attr]
                rows = sum(np.diff(some[:, :2]).sum() for segments in step.work for some in segments.rows)
                number = sum(segments.calls for segments in step.work)
                assert (len(calls), sum(call.rows for call in calls)) == (number, rows)
                assert all(call.pairs % 128**2 == 0 for call in calls)
                assert sum(call.pairs for call in calls) >= sum(area for area, *_ in sizes)
            else:
                assert one.name == str(step.transfer)


def test_what_is_enumerated() -> None:
    some = list(attentions(MODEL, SEQUENCE, cluster()))
    assert len(set(some)) == len(some)
    assert all(one.size == 16 for one in some)
    assert {one.axes for one in some} == {
        (u, 16 // u // c, c) for u in (1, 2, 4, 8, 16) for c in (1, 2, 4, 8, 16) if u * c <= 16
    }
    assert {one.schedule for one in some if one.axes == (1, 4, 4)} == {"2d", "rings", "published"}
    # Two rings only for teams on several nodes.
    spread = {(one.team, one.placement) for one in some if one.schedule == "rings" and one.ulysses == 1}
    assert spread == {(team, place) for team in (2, 4) for place in ("ring_in_node",)} | {
        (team, "team_in_node") for team in (8, 16)
    } | {(8, "ring_in_node")}
    # Ring and team fill a node, whichever comes first.
    assert {one.placement for one in some if one.axes == (4, 2, 2)} == {"team_in_node", "ulysses_in_node"}
    assert {one.placement for one in some if one.axes == (2, 4, 2)} == {
        "team_in_node", "ring_in_node", "ulysses_in_node",
    }  # fmt: skip
    assert {one.order for one in some} == {"contiguous"}
    few = ModelShape(hidden=384, heads=6, kv_heads=2, head_dim=64)
    assert max(one.ulysses for one in attentions(few, SEQUENCE, cluster())) == 4
    causal = replace(SEQUENCE, is_causal=True)
    assert {one.order for one in attentions(MODEL, causal, cluster())} == {"head_tail"}
    windowed = replace(causal, window_size=(100, 0))
    assert {one.order for one in attentions(MODEL, windowed, cluster())} == {"head_tail", "contiguous"}
    narrow, latent = replace(LAYERS, value_dim=32), replace(LAYERS, kv_heads=LAYERS.heads, kv_rank=16)
    for model, projections in ((LAYERS, {"plain", "metp"}), (narrow, {"plain"}), (latent, {"plain"})):
        assert {one.projections for one in with_layers(Candidate(4), model)} == projections
    packed = replace(SEQUENCE, documents=(100,))
    for is_causal, orders in ((True, {"head_tail", "contiguous"}), (False, {"contiguous"})):
        some = attentions(MODEL, replace(packed, is_causal=is_causal), cluster())
        assert {one.order for one in some} == orders | {"document_head_tail"}
    assert [one.placement for one in attentions(MODEL, SEQUENCE, cluster(16, 16)) if one.axes == (4, 2, 2)] == [
        "team_in_node"
    ] * 5


@given(st.sampled_from([2, 4, 8, 12, 16, 24]), st.sampled_from([1, 2, 3, 4, 8]), st.integers(1, 24))
def test_placements_that_are_left_out_are_others_again(ranks: int, per_node: int, heads: int) -> None:
    """Every placement puts the same indices on the same nodes as one that is enumerated; those all differ."""
    if ranks % per_node:
        return
    some = list(attentions(ModelShape(hidden=8 * heads, heads=heads), SEQUENCE, cluster(ranks, per_node)))
    for axes in {one.axes for one in some}:
        ulysses, ring, team = axes
        of_axes = [
            one
            for one in some
            if one.axes == axes and one.rotate == one.rotate_forward == "kv" and one.schedule == "2d"
        ]
        nodes = [tuple(node_of(one, per_node)) for one in of_axes]
        assert len(set(nodes)) == len(nodes)
        for placement in ("team_in_node", "ring_in_node", "ulysses_in_node"):
            assert tuple(node_of(Candidate(ring, team, ulysses, placement), per_node)) in nodes


def test_the_best_is_first_and_every_line_says_why() -> None:
    made = plan(MODEL, SEQUENCE, cluster(), keep=None)
    seconds = [one.seconds + one.handicap for one in made.ranked]
    assert all(before <= after * 1.01 for before, after in pairwise(seconds))
    assert made.chosen == made.ranked[0].candidate
    assert made.ranked[0].why.startswith("best: ")
    assert all(one.why and "\n" not in one.why for one in made.ranked)
    assert made.ranked[-1].why.startswith("+")


def test_of_equally_fast_plans_the_one_that_sends_less_is_first() -> None:
    made = plan(MODEL, SEQUENCE, cluster(intra=FAST, inter=FAST, kernels=FREE), keep=None)
    least = min(one.prediction.node_bytes for one in made.ranked)
    assert made.prediction.node_bytes == least


def test_slow_links_between_nodes_choose_ulysses_across_them() -> None:
    """Bytes into a node are fewest where heads cross nodes; a single node needs none of that."""
    assert plan(MODEL, SEQUENCE, cluster(inter=Link(1e7))).chosen.ulysses >= 4
    few = ModelShape(hidden=64, heads=1)
    assert plan(few, SEQUENCE, cluster()).chosen.ulysses == 1


def test_what_does_not_fit_is_dropped_and_says_so() -> None:
    everything = plan(MODEL, SEQUENCE, cluster(), keep=None)
    by_memory = sorted(one.prediction.memory for one in everything.ranked)
    limit = by_memory[len(by_memory) // 2]
    made = plan(MODEL, SEQUENCE, cluster(memory=limit), keep=None)
    assert all(one.prediction.memory <= limit for one in made.ranked)
    assert all(one.prediction.memory > limit for one in made.dropped)
    assert len(made.ranked) + len(made.dropped) == len(everything.ranked)
    assert all(one.why.startswith("needs ") for one in made.dropped)
    with pytest.raises(ValueError, match=r"nothing fits: memory is .* a rank, and the least that any plan needs is"):
        plan(MODEL, SEQUENCE, cluster(memory=1000))


def test_memory_is_asked_of_few_where_it_binds() -> None:
    """What holds too much by formula is not run; of what fits nowhere the least is said all the same."""
    layers, where = replace(MODEL, ffn=4096, layers=8), cluster(4, 2)
    choices = [one for attention in attentions(layers, SEQUENCE, where) for one in with_layers(attention, layers)]
    sizes = {one: stack_memory(one, layers, SEQUENCE).peak for one in choices}
    limit = 2 * min(sizes.values())
    too_large = sum(size > limit for size in sizes.values())
    with mock.patch.object(_Search, "_memory", autospec=True, side_effect=_Search._memory) as asked:
        made = plan(layers, SEQUENCE, replace(where, memory=limit), keep=3)
    assert all(sizes[one.candidate] == one.prediction.memory <= limit for one in made.ranked)
    assert made.ranked
    assert asked.call_count <= 12 < too_large
    with pytest.raises(ValueError, match=f"least that any plan needs is {format_size(min(sizes.values()))}"):
        plan(layers, SEQUENCE, replace(where, memory=1000))


def test_where_nothing_fits_memory_is_not_asked_of_every_mesh() -> None:
    """Here it is the loss that holds most, whatever the mesh."""
    large, where = replace(MODEL, ffn=4096, layers=8, vocab=2**16), cluster(4, 2)
    some = list(attentions(large, SEQUENCE, where))
    least = min(stack_memory(one, large, SEQUENCE).peak for it in some for one in with_layers(it, large))
    with (
        mock.patch.object(_Search, "_memory", autospec=True, side_effect=_Search._memory) as asked,
        pytest.raises(ValueError, match=f"least that any plan needs is {format_size(least)}"),
    ):
        plan(large, SEQUENCE, replace(where, memory=1000))
    assert asked.call_count < len(_by_mesh(some))


@pytest.mark.parametrize("window", [None, (100, 0)])
def test_of_what_is_as_fast_few_are_predicted(window: tuple[int, int] | None) -> None:
    """Where a step waits for FSDP it is bytes that say what goes first, which are known before."""
    layers = replace(MODEL, ffn=2**14, layers=4)
    where = cluster(
        intra=Link(1e12, 1e-6), inter=Link(1e12, 1e-2), kernels=Kernels(1e12, 1e12, 1e15, 0, 1e15, launch=0.0)
    )
    sequence = SequenceShape(2**9, is_causal=True, window_size=window)
    with (
        mock.patch.object(_Search, "_predicted", autospec=True, side_effect=_Search._predicted) as predicted,
        mock.patch.object(_Search, "_open", autospec=True, side_effect=_Search._open) as opened,
        mock.patch.object(_Search, "_memory", return_value=0),
    ):
        made = plan(layers, sequence, where, keep=3)
    assert len({_order(one)[2] for one in made.ranked}) == 1
    assert predicted.call_count < 10
    assert opened.call_count < len({(it.axes, it.schedule, it.order) for it in attentions(layers, sequence, where)}) / 3


def test_some_layers_have_a_window() -> None:
    """Each takes what it would take among its like; of memory the most is said that there is where all are alike."""
    windowed, where = SequenceShape(256, is_causal=True, window_size=(40, 0)), cluster(4, 2)
    full, layers = replace(windowed, window_size=None), ModelShape(64, 4, layers=6)
    ways = {"rotate": "q", "order": "head_tail"}
    for model in (layers, replace(layers, ffn=256, vocab=1000)):
        with mock.patch("wallfacer_dt.planning.search.stack_memory", return_value=mock.Mock(peak=0)):
            made = {
                n: plan(replace(model, windowed_layers=n), windowed, where, only=ways, keep=None).ranked
                for n in (None, 0, 2)
            }
            assert made[0] == plan(model, full, where, only=ways, keep=None).ranked
        has, has_not = ({one.candidate: one.prediction for one in made[n]} for n in (None, 0))
        compared = [one for one in made[2] if one.candidate in has and one.candidate in has_not]
        assert len(compared) > 3
        for one in compared:
            mine, all_have, none_has = (
                [getattr(p, name) for name in _SUMMED]
                for p in (one.prediction, has[one.candidate], has_not[one.candidate])
            )
            assert mine == pytest.approx(
                [x / 3 + y * 2 / 3 for x, y in zip(all_have, none_has, strict=True)], abs=1e-12
            )
            assert one.prediction.hops == max(has[one.candidate].hops, has_not[one.candidate].hops)
        some = compared[0].candidate
        peaks = [stack_memory(some, model, sequence).peak for sequence in (windowed, full)]
        assert stack_memory(some, replace(model, windowed_layers=2), windowed).peak == max(peaks)
        seconds = [one.prediction.seconds + one.handicap for one in made[2]]
        assert all(before <= after * (1 + 1e-3) for before, after in pairwise(seconds))
    costs = attention_costs(some, replace(layers, windowed_layers=2), windowed, where)
    assert [cost.seconds for cost in costs] == [
        attention_cost(some, layers, it, where).seconds for it in (full, windowed)
    ]
    flops = [model_flops(replace(layers, windowed_layers=n), windowed) for n in range(7)]
    assert {after - before for before, after in pairwise(flops)} == {
        12 * layers.hidden * (windowed.pairs() - full.pairs())
    }


_SUMMED = ("seconds", "compute", "exposed", "overlapped", "host", "rank_bytes", "node_bytes")


def test_styles_of_layers_with_and_without_a_window() -> None:
    sequence = replace(SEQUENCE, window_size=(100, 0), is_causal=True)
    made = plan(ModelShape(64, 8, layers=4, windowed_layers=1), sequence, cluster(device_type="cpu"), keep=1)
    with fake_world(16):
        order = made.order(made.mesh("cpu"))
    for is_windowed, window in ((True, (100, 0)), (False, None)):
        (style,) = made.styles(order, windowed=is_windowed).values()
        assert (style.options.window_size, style.options.is_causal) == (window, True)
    for some, asked in ((1, None), (0, True), (None, False)):
        other = replace(made, model=replace(made.model, windowed_layers=some))
        with pytest.raises(ValueError, match=f"windowed must be said where .* got {asked} of {some} of 4 layers"):
            other.styles(order, windowed=asked)
    (style,) = replace(made, model=replace(made.model, windowed_layers=0)).styles(order).values()
    assert style.options.window_size is None


def test_layers_are_chosen_for_every_attention() -> None:
    layers = replace(MODEL, ffn=4096, layers=4)
    assert len(list(with_layers(Candidate(16), layers))) == 12
    assert len(list(with_layers(Candidate(16), MODEL))) == 3
    made = plan(layers, SEQUENCE, cluster(inter=FAST), keep=1)
    assert made.chosen.checkpoint == "none"
    tight = plan(layers, SEQUENCE, cluster(inter=FAST, memory=made.prediction.memory - 1))
    assert tight.prediction.memory < made.prediction.memory
    uses_metp = "metp" in (tight.chosen.feed_forward, tight.chosen.projections)
    assert {one.candidate.checkpoint for one in tight.ranked} > {"none"} or uses_metp


def test_a_full_checkpoint_runs_attention_once_more() -> None:
    layers = replace(MODEL, ffn=4096)
    ring = Candidate(16)
    cost = attention_cost(ring, layers, SEQUENCE, cluster())
    none, attention, full = (
        predict(replace(ring, checkpoint=checkpoint), layers, SEQUENCE, cluster(), cost)
        for checkpoint in ("none", "attention", "full")
    )
    assert none.rank_bytes == attention.rank_bytes
    assert full.rank_bytes - none.rank_bytes == cost.rank_bytes[0]
    assert none.compute < attention.compute
    assert full.compute == pytest.approx(attention.compute + cost.forward.compute)


def test_one_rank_has_one_plan() -> None:
    made = plan(MODEL, SEQUENCE, Cluster(1, 1, FAST, FAST, kernels=Kernels(launch=0.0)))
    assert [one.candidate.axes for one in made.ranked] == [(1, 1, 1)]
    assert (made.prediction.rank_bytes, made.prediction.node_bytes, made.prediction.exposed) == (0, 0, 0)
    assert math.isclose(made.prediction.seconds, made.prediction.compute)


def test_a_plan_makes_its_mesh_and_styles() -> None:
    layers = replace(MODEL, ffn=4096)
    made = plan(layers, replace(SEQUENCE, is_causal=True), cluster(8, 4), keep=1)
    with fake_world(8):
        mesh = made.mesh("cpu")
        sizes = dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))
        it, order = made.chosen, made.order(mesh)
        assert (sizes["cp_ring"], sizes["cp_team"], sizes.get("cp_ulysses", 1)) == (it.ring, it.team, it.ulysses)
    no_ulysses = replace(it, ring=8 // it.team, ulysses=1, placement="team_in_node", feed_forward="metp")
    metp, both = (
        replace(made, ranked=(replace(made.ranked[0], candidate=replace(no_ulysses, projections=name)),))
        for name in ("plain", "metp")
    )
    styles = metp.styles(order)
    style = styles["layers.*.attention.inner_attention"]
    assert isinstance(style, WallFacerParallel)
    assert style.options.is_causal
    told = style.options
    assert (told.order, order.name, told.schedule) == (order, "head_tail", it.schedule)
    assert (told.rotate, told.rotate_forward) == (it.rotate, it.rotate_forward)
    assert (style.options.length, told.kernel) == (None, "auto")
    told = replace(metp, cluster=replace(made.cluster, kernels=Kernels(attention="reference")))
    for asked, kernel in ({}, "reference"), ({"kernel": "flash"}, "flash"):
        assert next(iter(told.styles(order, **asked).values())).options.kernel == kernel
    assert isinstance(styles["layers.*.feed_forward"], METPParallel)
    projected = both.styles(order, projections="layers.*.attn", query="q_proj")
    assert list(projected) == ["layers.*.attn", "layers.*.feed_forward"]
    outer = projected["layers.*.attn"]
    assert isinstance(outer, METPAttentionParallel)
    assert (outer.projections, outer.output) == (["q_proj", "wk", "wv"], "wo")
    assert (outer.head_dim, outer.rotary.pairs) == (64, "interleaved")
    assert outer.attention.options == style.options
    uneven = replace(metp, sequence=replace(made.sequence, length=4099))
    assert next(iter(uneven.styles(order).values())).options.length == 4099


def test_only_what_the_package_has_and_the_cluster_can_take() -> None:
    for wrong in (
        {"rotate": "auto"},
        {"rotate_forward": "auto"},
        {"schedule": "3d"},
        {"order": "zigzag"},
        {"placement": "here"},
        {"ring": 0},
    ):
        with pytest.raises(ValueError, match="must be"):
            Candidate(**({"ring": 4, "team": 2} | wrong))
    with pytest.raises(ValueError, match="needs team \\* team to divide"):
        Candidate(2, 4, schedule="published", rotate="q")
    with pytest.raises(ValueError, match="keep must be at least 1"):
        plan(MODEL, SEQUENCE, cluster(), keep=0)
    with pytest.raises(ValueError, match="the profile is of 16 ranks, 4 a node, the cluster has 16, 8 a node"):
        plan(MODEL, SEQUENCE, cluster(16, 8), profile=Profile(cluster()))
    with pytest.raises(ValueError, match="the profile is of device_type='cpu', this is of device_type='cuda'"):
        plan(MODEL, SEQUENCE, cluster(), profile=Profile(cluster(device_type="cpu")))


def test_a_ring_across_nodes_copies_what_one_rank_receives() -> None:
    """Not what one receives from its node and another from elsewhere."""
    (on,) = wires(arrivals(Candidate(16), MODEL, SEQUENCE), node_of(Candidate(16), 4))
    hops = [one for key, one in on.items() if key.kind == "move" and not key.backward]
    shard = 2 * 4096 // 16 * 1024 * 4
    assert hops == [Wire(shard, 1, shard, 1, shard, shard)]


def test_ranks_that_run_together_have_wires_of_their_own() -> None:
    """Of a ring across nodes every rank receives from its node or from another, and none from both."""
    ring, windowed = Candidate(16, order="contiguous"), replace(SEQUENCE, is_causal=True, window_size=(600, 0))
    by_rank = wires(arrivals(ring, MODEL, windowed), node_of(ring, 4), 16)
    shard = 2 * 4096 // 16 * 1024 * 4
    for rank, mine in enumerate(by_rank):
        hops = {one for key, one in mine.items() if key.kind == "move" and not key.backward and key.shift == 1}
        assert hops == {Wire(shard, 1, shard, 0, 0, shard) if rank % 4 else Wire(shard, 0, 0, 1, shard, shard)}
    for way in attention_cost(ring, MODEL, windowed, cluster(16, 4)).ways:
        begun = [event.wire for event in way.events if isinstance(event, Begin)]
        assert begun
        assert all((one.intra == 0) != (one.inter == 0) for one in begun)
        assert way.events[-1] == Settle()  # the slowest host is told first


def test_a_sequence_that_is_too_short_to_hop() -> None:
    """One token on four ranks, of which each would have a hop if there were four."""
    windowed = SequenceShape(1, is_causal=True, window_size=(1, 0), dtype=torch.float32)
    for order in ("contiguous", "head_tail"):
        cost = attention_cost(Candidate(4, order=order), MODEL, windowed, cluster(4))
        assert (cost.hops, cost.rank_bytes) == (0, (0, 0))


def test_hops_of_a_window_are_counted_and_sent_once() -> None:
    """Both neighbours' keys forward; in the backward they come again, and go home."""
    windowed = SequenceShape(1024, window_size=(100, 100))
    ring = Candidate(8)
    cost = attention_cost(ring, MODEL, windowed, Cluster(8, 8, Link(1.0), FAST, kernels=FREE))
    assert cost.hops == 4
    for line, nbytes in ((cost.forward, cost.rank_bytes[0]), (cost.backward, cost.rank_bytes[1])):
        assert line.transfer == pytest.approx(nbytes)


def test_what_was_measured_goes_before_what_is_predicted(tmp_path) -> None:
    first = plan(MODEL, SEQUENCE, cluster(), keep=None)
    last = first.ranked[-1].candidate
    measured = tuple(Measured(MODEL, SEQUENCE, one, s) for one, s in ((first.chosen, 2.0), (last, 1.0)))
    profile = Profile(cluster(), measured)
    profile.save(tmp_path / "folder" / "profile.json")
    assert Profile.load(tmp_path / "folder" / "profile.json") == profile
    made = plan(MODEL, SEQUENCE, profile.cluster, profile=profile, keep=3)
    assert [one.candidate for one in made.ranked[:2]] == [last, first.chosen]
    assert [one.measured for one in made.ranked[:3]] == [1.0, 2.0, None]
    assert made.ranked[0].why.startswith("measured fastest")
    assert made.ranked[2].why == "not measured"
    # Of another sequence it says nothing.
    assert plan(MODEL, replace(SEQUENCE, batch=2), profile.cluster, profile=profile, keep=1).ranked[0].measured is None


def test_as_fast_is_what_is_ranked_by_bytes() -> None:
    """Times are equal to four digits, or else the slower one says what it does longer."""

    def ranked(seconds: float, node_bytes: int) -> Ranked:
        return Ranked(Candidate(4), Prediction(seconds, 1.0, seconds - 1.0, 0.0, 100, node_bytes, 3, 0), "")

    def why(one: Ranked, first: Ranked) -> str:
        return _because(one, first, lambda candidate: pytest.fail(f"{candidate} does not compute longer")).why

    first = ranked(9.990, 100)
    assert why(ranked(9.9904, 200), first) == "as fast, but more bytes cross nodes"
    assert why(ranked(9.9904, 100), first) == "as fast, and receives as much"
    assert why(ranked(9.993, 50), first) == "+0%: waits 3 ms longer, less of it hidden"
    team = replace(ranked(9.9904, 50), handicap=0.3)
    assert why(team, first) == "as fast: a team goes first where it saves 300 ms"
    faster = replace(team, prediction=replace(team.prediction, seconds=9.8))
    assert why(faster, first) == "-1.9%: a team goes first where it saves 300 ms"
    other = replace(faster, prediction=replace(faster.prediction, seconds=9.7), handicap=0.5)
    assert why(other, faster) == "-1.0%: a team goes first where it saves 200 ms"
    alike = replace(faster, prediction=replace(faster.prediction, seconds=9.8002, node_bytes=400), handicap=0.3001)
    assert why(alike, faster) == "as fast, but more bytes cross nodes"
    assert why(replace(alike, prediction=replace(alike.prediction, seconds=9.7998)), faster).startswith("as fast, but")


def test_the_same_sizes_are_equal_however_they_are_said() -> None:
    assert ModelShape(64, 4) == ModelShape(64, 4, 4, 16)
    assert ModelShape(64, 4, gated=False) == ModelShape(64, 4)
    assert ModelShape(64, 4, ffn=1, gated=False) != ModelShape(64, 4, ffn=1)
    assert ModelShape(64, 4, ffn=1, gated=False).attention_alone == ModelShape(64, 4)
    assert SequenceShape(8, window_size=(None, -1)) == SequenceShape(8)
    assert SequenceShape(8, is_causal=True, window_size=(-1, 0)) == SequenceShape(8, is_causal=True)
    assert SequenceShape(8, is_causal=True, window_size=(3, 0)).window_size == (3, 0)
    assert SequenceShape(8, window_size=[3, 0]) == SequenceShape(8, window_size=(3, 0))
    assert SequenceShape(8, documents=(9, 2)) == SequenceShape(8, documents=[8]) == SequenceShape(8)
    assert SequenceShape(8, documents=[3, 4, 2, 7]) == SequenceShape(8, documents=(3, 4, 1))
    assert SequenceShape(16, documents=(4, 4)) == SequenceShape(16, documents=(4,))
    assert SequenceShape(2**14, documents=(3, 1)).documents == (3, 1)
    assert replace(ModelShape(64, 4), head_dim=8) == ModelShape(64, 4, head_dim=8, value_dim=8)
    assert SequenceShape(8, documents=(3, 2)).mask.documents == ((0, 3, 5, 8),)
    assert SequenceShape(9, documents=(3, 2)).mask.documents == ((0, 3, 5, 8, 9),)
    assert SequenceShape(8, is_causal=True, window_size=(7, 0), documents=(3,)).window_size == (7, 0)
    assert SequenceShape(8, window_size=(-1, None), documents=(3,)) == SequenceShape(8, documents=(3,))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 0}', '{"version": 1, "cluster": {"ranks": 4}}'])
def test_a_file_that_is_no_profile_is_refused(tmp_path, text: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    refused = r"profile\.json (is no profile: its version is|is empty|is JSON, but no object)"
    with pytest.raises(ValueError, match=refused):
        Profile.load(path)


@examples(10)
@given(
    ranks=st.sampled_from([(8, 4), (8, 2), (6, 6)]),
    heads=st.sampled_from([(4, 2), (3, 1)]),
    length=st.sampled_from([96, 4096, 4099]),
    window=st.sampled_from([None, 300]),
    documents=st.sampled_from([(), (400, 7, 90)]),
    link=st.sampled_from([1e7, 1e9, 1e11]),
    latency=st.sampled_from([1e-5, 1e-2]),
    keep=st.integers(1, 9),
    ffn=st.sampled_from([0, 1024]),
    launch=st.sampled_from([0.0, 1e-5, 1e-3]),
)
def test_what_is_looked_at_late_is_not_overlooked(
    ranks: tuple[int, int], heads: tuple[int, int], length: int, window: int | None, documents: tuple[int, ...],
    link: float, latency: float, keep: int, ffn: int, launch: float,
) -> None:  # fmt: skip
    """The first few are those of all, of which none is left out, and which are in order."""
    model = ModelShape(hidden=256, heads=heads[0], kv_heads=heads[1], head_dim=64, ffn=ffn)
    bounds = None if window is None else (window, 0)
    sequence = SequenceShape(length, is_causal=True, window_size=bounds, documents=documents)
    kernels = Kernels(1e11, 1e11, 1e11, 1e-5, 1e10, launch=launch)
    where = cluster(*ranks, intra=Link(100 * link, 1e-6), inter=Link(link, latency), kernels=kernels)
    # What memory they need does not matter here, and takes longest.
    with mock.patch.object(_Search, "_memory", return_value=0):
        every, few = (plan(model, sequence, where, keep=some) for some in (None, keep))
    assert few.ranked == every.ranked[:keep]
    assert [*every.ranked] == sorted(every.ranked, key=_order)


@pytest.mark.parametrize(
    ("length", "bandwidth", "saved"),
    [(2**12, 1e8, 0.547), (2**12, 3e8, 0.027), (2**12, 1e9, 0.045), (2**14, 3e9, 0.023), (2**16, 1e8, 0.002)],
)
def test_a_team_goes_first_where_it_saves_3_percent_of_attention(length: int, bandwidth: float, saved: float) -> None:
    """Which no layer but attention is part of."""
    link, sequence = Link(bandwidth, 1e-6), SequenceShape(length)
    where = cluster(16, 1, intra=link, inter=link)
    model = ModelShape(hidden=64, heads=1, head_dim=64)
    for layers in (1, 3):
        ranked = plan(replace(model, layers=layers), sequence, where, keep=None).ranked
        for one in ranked:
            cost = attention_cost(one.candidate, model, sequence, where)
            of_attention = layers * (cost.forward.seconds + cost.backward.seconds)
            assert one.handicap == pytest.approx(0.03 * of_attention if one.candidate.team > 1 else 0)
        alone = min(one.seconds for one in ranked if one.candidate.team == 1)
        fastest = min(one.seconds for one in ranked)
        assert 1 - fastest / alone == pytest.approx(saved, abs=5e-4)
        assert (ranked[0].candidate.team > 1) == (saved > 0.03)
        behind = [one.why for one in ranked if one.seconds < 0.9999 * ranked[0].seconds]
        assert all("%: a team goes first where it saves " in why for why in behind)
        assert bool(behind) == (saved < 0.03)


@examples(20)
@given(
    st.sampled_from([(8, 1, 1), (1, 8, 1), (4, 2, 1), (2, 2, 2), (2, 1, 4)]),
    st.lists(st.integers(1024, 4096), min_size=1, max_size=9).map(tuple), st.booleans(),
)  # fmt: skip
def test_of_documents_dealt_out_one_by_one_a_rank_stands_for_all(
    axes: tuple[int, int, int], documents: tuple[int, ...], is_causal: bool
) -> None:
    """As if all were run together, where documents are long; of others one with much to do, where they are too many."""
    sequence = SequenceShape(8192, is_causal=is_causal, documents=documents)
    assume(sequence.documents)
    where = Cluster(8, 4, Link(1e10, 1e-6), Link(1e9, 1e-5), kernels=Kernels(1e12, 1e12, launch=0.0))
    one = Candidate(*axes, order="document_head_tail", rotate="kv", rotate_forward="kv")
    alone = attention_cost(one, MODEL, sequence, where)
    with mock.patch("wallfacer_dt.planning.attention.BY_DOCUMENT", ""):
        together = attention_cost(one, MODEL, sequence, where)
    assert alone.seconds == pytest.approx(together.seconds, rel=0.05)
    for order, rotate in product(("contiguous", "head_tail"), ("kv", "q")):
        some = replace(one, order=order, rotate_forward=rotate)
        (busiest,), every = (
            programs_of(some, sequence, together=together, backward=False).values() for together in (False, True)
        )
        assert area_of(busiest) >= max(map(area_of, every)) * (1 if one.team == 1 else 0.5)


@pytest.mark.parametrize(
    ("axes", "order"),
    [((4, 4, 8), "head_tail"), ((16, 8, 1), "contiguous"),
     pytest.param((128, 1, 1), "head_tail", marks=pytest.mark.whole)],
)  # fmt: skip
def test_of_documents_on_many_ranks_one_stands_for_all(axes: tuple[int, int, int], order: str) -> None:
    """With up to a tenth less time than all of them have (docs/planner.md)."""
    sequence = SequenceShape(2**17, is_causal=True, documents=(30720, 2048, 500, 61440))
    model, where = MODELS["llama3-8b"].shape, GPUS["h100"].cluster(128)
    one = Candidate(*axes, order=order, rotate="kv", rotate_forward="kv")
    alone = attention_cost(one, model, sequence, where)
    with mock.patch("wallfacer_dt.planning.attention._MOST_TOGETHER", 128):
        together = attention_cost(one, model, sequence, where)
    assert 0.9 * together.seconds <= alone.seconds <= together.seconds * (1 + 1e-9)


def test_plans_of_documents_whatever_device_is_the_default() -> None:
    some = SequenceShape(4096, is_causal=True, documents=(3000, 1096))
    with torch.device("meta"):
        found = plan(MODEL, some, cluster(2, 2))
    assert found.chosen == plan(MODEL, some, cluster(2, 2)).chosen


def test_a_margin_is_a_number() -> None:
    for margin in (-0.1, math.nan, math.inf):
        with pytest.raises(ValueError, match=f"margin must be at least 0, and a number, got {margin}"):
            plan(MODEL, SEQUENCE, cluster(), margin=margin)


def test_what_is_run_is_the_choice_and_the_fastest() -> None:
    link, sequence, model = Link(3e8, 1e-6), SequenceShape(2**12), ModelShape(hidden=64, heads=1, head_dim=64)
    where = cluster(16, 1, intra=link, inter=link)
    choice, fastest = (plan(model, sequence, where, margin=margin) for margin in (0.03, 0))
    assert (choice.chosen.team, fastest.chosen.team > 1) == (1, True)
    some = shortlist(fastest, 3, choice.ranked[:1])
    assert some[:2] == [choice.ranked[0], fastest.ranked[0]]
    assert len(some) == 3
    assert [one.seconds for one in some[1:]] == sorted(one.seconds for one in some[1:])


def test_what_is_run_is_of_different_meshes_or_schedules() -> None:
    for keep in (None, _RANKED * 5):
        some = shortlist(plan(MODEL, SEQUENCE, cluster(), keep=keep), 5)
        assert len({(one.candidate.axes, one.candidate.schedule) for one in some}) == 5
    every = plan(MODEL, SEQUENCE, cluster(), keep=None).ranked
    alike = Counter((it.axes, it.schedule) for it in (one.candidate for one in every))
    assert max(alike.values()) == _RANKED


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ModelShape(hidden=64, heads=6), "heads must divide hidden unless head_dim is given, got 6 and 64"),
        (lambda: ModelShape(hidden=64, heads=8, kv_heads=3), "kv_heads must divide heads, got 3 and 8"),
        (
            lambda: ModelShape(64, 8, ffn=8, experts=2),
            "experts_per_token must be from 1 to experts, or both 0, got 0 and",
        ),
        (lambda: ModelShape(64, 8, experts=2, experts_per_token=1), "experts must be 0 where ffn is, got 2"),
        (lambda: ModelShape(hidden=64, heads=0), "heads must be at least 1, got 0"),
        (lambda: ModelShape(64, 8, value_dim=0), "value_dim must be at least 1, got 0"),
        (lambda: ModelShape(64, 8, ffn=8, shared_ffn=8), "shared_ffn must be 0 where experts are, got 8"),
        (lambda: ModelShape(64, 8, ffn=8, dense_layers=1), "dense_layers must be 0 where experts are, got 1"),
        (lambda: replace(EXPERTS, dense_layers=2, dense_ffn=8), "dense_layers must be below layers, got 2 and 2"),
        (lambda: replace(EXPERTS, dense_layers=1), "dense_ffn must be above 0 where dense_layers are, .*, got 0 and 1"),
        (lambda: replace(EXPERTS, dense_ffn=8), "dense_ffn must be above 0 where dense_layers are, .*, got 8 and 0"),
        (lambda: replace(EXPERTS, dense_layers=-1), "dense_layers must be at least 0, got -1"),
        (lambda: ModelShape(64, 8, rotary_dim=4), "q_rank and rotary_dim must be 0 where kv_rank is, got 0, 4"),
        (lambda: ModelShape(64, 8, 4, kv_rank=4), "kv_heads must equal heads where keys come of a latent, got 4 and 8"),
        (
            lambda: ModelShape(64, 8, kv_rank=4, rotary_dim=8),
            "rotary_dim must be below head_dim, got 8 and 8",
        ),
        (
            lambda: Division(Candidate(2), tensor=2).heads_of(ModelShape(64, 8, kv_rank=4)),
            "tensor must be 1 where kv_rank is not 0, got 2: latents are not divided",
        ),
        (lambda: ModelShape(hidden=64, heads=10**9, head_dim=1), "heads must be at most 65536, got 1000000000"),
        (lambda: ModelShape(hidden=64, heads=8, ffn=-1), "ffn must be at least 0, got -1"),
        (lambda: SequenceShape(0), "length must be at least 1, got 0"),
        (lambda: SequenceShape(8, batch=0), "batch must be at least 1, got 0"),
        (lambda: Link(0.0), "a link's bandwidth must be above 0 and finite, got 0"),
        (lambda: Cluster(6, 4, FAST, FAST), "ranks_per_node must divide ranks, got 4 and 6"),
        (lambda: Cluster(4, 4, FAST, FAST, nics=0), "nics must be at least 1, got 0"),
        (lambda: SequenceShape(MOST_TOKENS + 1), r"length must be at most 2\^31, got 2147483649"),
        (lambda: SequenceShape(8, window_size=(-5, 0)), "window_size must be at least 0, or -1 for no bound"),
        (lambda: SequenceShape(8, is_causal=True, window_size=(5, 5)), "is_causal=True sees no later keys"),
        (lambda: SequenceShape(8, documents=4), "documents must be a tuple of lengths, got int"),
        (lambda: SequenceShape(8, documents=(4, 0)), "documents must be at least 1, got 0"),
        (lambda: SequenceShape(8, documents=(9, 4.0)), "documents must be an int, got 4.0"),
        (lambda: SequenceShape(2**14 + 1, documents=(3, 1)), "documents must be at most 8192 in a sequence, got 8193"),
        (lambda: SequenceShape(9999, documents=(1,) * 9999), "documents must be at most 8192 in a sequence, got 9999"),
        *(
            (lambda make=make, bad=bad: make(bad), f"{what} must be an int, got {bad}")
            for bad in (math.nan, 4.0, True)
            for what, make in {
                "ffn": lambda n: ModelShape(64, 4, ffn=n),
                "kv_heads": lambda n: ModelShape(64, 4, n),
                "batch": lambda n: SequenceShape(8, n),
                "ranks_per_node": lambda n: Cluster(4, n, FAST, FAST),
                "team": lambda n: Candidate(4, n),
                "shards": lambda n: Division(Candidate(4), shards=n),
                "keep": lambda n: plan(MODEL, SEQUENCE, ONE, keep=n),
            }.items()
        ),
        *(
            (lambda make=make: make(math.nan), f"{what} must be .* and finite, got nan")
            for what, make in {
                "a link's bandwidth": Link,
                "memory": lambda n: Cluster(4, 4, FAST, FAST, memory=n),
                "seconds": lambda n: Measured(MODEL, SEQUENCE, Candidate(4), n),
            }.items()
        ),
        (lambda: Link(True), "a link's bandwidth must be a number, got True"),
        *(
            (lambda make=make, bad=bad: make(bad), f"{what} must be a {kind}, got {bad!r}")
            for what, (kind, bad, make) in {
                "gated": ("bool", "no", lambda it: ModelShape(64, 4, gated=it)),
                "is_causal": ("bool", "False", lambda it: SequenceShape(8, is_causal=it)),
                "dtype": ("dtype", "bfloat16", lambda it: SequenceShape(8, dtype=it)),
                "intra": ("Link", 1e11, lambda it: Cluster(4, 4, it, FAST)),
                "inter": ("Link", None, lambda it: Cluster(4, 4, FAST, it)),
                "kernels": ("Kernels", None, lambda it: Cluster(4, 4, FAST, FAST, kernels=it)),
                "striped_gathers": ("bool", 1, lambda it: Cluster(4, 4, FAST, FAST, striped_gathers=it)),
                "kernels: takes_segments": ("bool", 1, lambda it: Kernels(takes_segments=it)),
                "device_type": ("str", 7, lambda it: Cluster(4, 4, FAST, FAST, device_type=it)),
            }.items()
        ),
        *(
            (lambda dtype=dtype: SequenceShape(8, dtype=dtype), f"dtype must be one of bfloat16, .*, got {dtype}")
            for dtype in (torch.int8, torch.float8_e4m3fn, torch.complex64)
        ),
    ],
)
def test_sizes_that_are_none_are_refused(make, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make()


def test_memory_is_bytes_however_it_is_said(tmp_path) -> None:
    """So that a file of it can be read again."""
    profile = Profile(replace(ONE, memory=80e9))
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == profile


@pytest.mark.parametrize("band", [FULL, CAUSAL])
def test_pairs_of_the_longest_sequence_are_counted(band: Band) -> None:
    rows, sequence = (0, MOST_TOKENS), SequenceShape(MOST_TOKENS, is_causal=band == CAUSAL)
    assert Tile(rows, rows, band).area == sequence.pairs()
