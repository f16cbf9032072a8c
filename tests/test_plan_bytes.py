"""What a plan says is received, by whom and from whom, is what is counted when it runs; and what crosses nodes."""

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.cases import mesh_of
from tests.plan_cases import rows_of
from tests.strategies import examples
from wallfacer_dt import Cluster, Link, ModelShape, SequenceShape, TokenOrder, context_mesh, context_parallel_attention
from wallfacer_dt.planning import Candidate
from wallfacer_dt.planning.candidates import attentions, node_of
from wallfacer_dt.planning.predict import attention_cost
from wallfacer_dt.planning.traffic import arrivals, into_nodes, into_ranks
from wallfacer_dt.testing import RankPool, Traffic, count_collectives
from wallfacer_dt.testing.fake import fake_world

LINK = Link(1e9)


def run(candidate: Candidate, model: ModelShape, sequence: SequenceShape, *, fake: bool = False) -> Traffic:
    """One call of what is planned, on this rank, with what is received counted."""
    it = candidate
    make = partial(context_mesh, "cpu") if fake else mesh_of
    mesh = make(it.ring, it.team, ulysses=it.ulysses, placement=it.placement)
    u, r, c = mesh.get_coordinate() if it.ulysses > 1 else (0, *mesh.get_coordinate())
    rows = rows_of(it, sequence.length, (u * it.ring + r) * it.team + c)
    documents = {"cu_seqlens": torch.tensor(sequence.mask.documents[0])} if sequence.documents else {}
    sizes = (model.heads, model.dim), (model.keys, model.dim), (model.keys, model.dim_of_values)
    shapes = [(sequence.batch, heads, rows, dim) for heads, dim in sizes]
    is_fake = fake and not documents  # whose contents are read
    with FakeTensorMode() if is_fake else nullcontext(), count_collectives(mesh) as traffic:
        q, k, v = (torch.ones(shape, dtype=sequence.dtype, requires_grad=True) for shape in shapes)
        out = context_parallel_attention(
            q, k, v, mesh, is_causal=sequence.is_causal, window_size=sequence.window_size, length=sequence.length,
            order=TokenOrder(it.order, mesh), schedule=it.schedule, rotate=it.rotate, rotate_forward=it.rotate_forward,
            **documents,
        )  # fmt: skip
        out.backward(torch.ones_like(out))
    return traffic


def predicted(
    candidate: Candidate, model: ModelShape, sequence: SequenceShape, rank: int, by: str = "sender"
) -> dict[bool, Counter[int]]:
    """Bytes that a rank receives from every other, forward (False) and backward."""
    ranks = context_ranks(candidate)
    index = ranks.index(rank)
    sources = {False: Counter(), True: Counter()}
    for key, some in arrivals(candidate, model, sequence).items():
        for receiver, sender, nbytes in zip(some.receiver, getattr(some, by), some.total, strict=True):
            if receiver == index and nbytes:
                sources[key.backward][ranks[sender]] += int(nbytes)
    return sources


def context_ranks(candidate: Candidate) -> list[int]:
    """The rank of every sequence index, written out from what placements mean."""
    places = np.arange(candidate.size).reshape(candidate.axes)
    last = {"team_in_node": (0, 1, 2), "ring_in_node": (0, 2, 1), "ulysses_in_node": (1, 2, 0)}[candidate.placement]
    return np.argsort(places.transpose(last).flatten()).tolist()


@st.composite
def planned(draw: st.DrawFn, largest: int) -> tuple[Candidate, ModelShape, SequenceShape, int]:
    ranks = draw(st.integers(1, largest))
    kv_heads = draw(st.integers(1, 5))
    dims = {"head_dim": 8, "value_dim": draw(st.sampled_from([None, 4, 16]))}
    model = ModelShape(hidden=8, heads=kv_heads * draw(st.integers(1, 4)), kv_heads=kv_heads, **dims)
    is_causal = draw(st.booleans())
    windows = [None, None, (draw(st.integers(0, 4 * ranks)), 0 if is_causal else draw(st.integers(0, 4)))]
    documents = draw(st.just(()) | st.lists(st.integers(1, 4 * ranks), min_size=1, max_size=4).map(tuple))
    sequence = SequenceShape(
        draw(st.one_of(st.integers(1, 6).map(lambda n: n * ranks), st.integers(1, 6 * ranks))),
        draw(st.integers(1, 2)), is_causal, draw(st.sampled_from(windows)),
        draw(st.sampled_from([torch.float32, torch.bfloat16])), documents,
    )  # fmt: skip
    per_node = draw(st.sampled_from([n for n in range(1, ranks + 1) if ranks % n == 0]))
    candidates = list(attentions(model, sequence, Cluster(ranks, per_node, LINK, LINK)))
    return draw(st.sampled_from(candidates)), model, sequence, per_node


@examples(60, today=35)
@given(planned(32), st.data())
def test_predicted_is_counted_on_fake_ranks(
    drawn: tuple[Candidate, ModelShape, SequenceShape, int], data: st.DataObject
) -> None:
    candidate, model, sequence, _ = drawn
    # Of tensors with contents a fake process group refuses to receive some from others where nothing is sent to them.
    assume(not sequence.documents or model.heads % candidate.ulysses == model.keys % candidate.ulysses == 0)
    rank = data.draw(st.integers(0, candidate.size - 1))
    with fake_world(candidate.size, rank):
        traffic = run(candidate, model, sequence, fake=True)
    for by, counted in (("sender", "sources"), ("via", "via")):
        expected = predicted(candidate, model, sequence, rank, by)
        assert getattr(traffic.forward, counted) == expected[False]
        assert getattr(traffic.backward, counted) == expected[True]


@pytest.mark.ranks
@pytest.mark.parametrize("size", [4, 8])
@examples(15)
@given(data=st.data())
def test_predicted_is_counted_on_real_ranks(threads, size: int, data: st.DataObject) -> None:
    """All ranks and nodes of a plan: the most that one receives is what the plan says."""
    candidate, model, sequence, per_node = data.draw(planned(size).filter(lambda drawn: drawn[0].size == size))
    pool: RankPool = threads(size)
    counted = pool.run(run, candidate, model, sequence)
    cost = attention_cost(candidate, model, sequence, Cluster(size, per_node, LINK, LINK))
    for way, rank_bytes, node_bytes in zip(("forward", "backward"), cost.rank_bytes, cost.node_bytes, strict=True):
        senders = [getattr(traffic, way).via for traffic in counted]
        assert max(some.total() for some in senders) == rank_bytes
        nodes = Counter()
        for rank, some in enumerate(senders):
            nodes[rank // per_node] += sum(n for other, n in some.items() if other // per_node != rank // per_node)
        assert max(nodes.values()) == node_bytes


@examples(40)
@given(planned(24))
def test_ranks_that_are_alike_are_counted_once(drawn: tuple[Candidate, ModelShape, SequenceShape, int]) -> None:
    """Of equal shards a part of the ranks stands for all: as if each had been asked."""
    candidate, model, sequence, per_node = drawn
    even = replace(sequence, length=candidate.size * -(-sequence.length // candidate.size))
    some = arrivals(candidate, model, even)
    sums = into_ranks(some.values(), candidate.size)
    for index in {0, candidate.size // 2, candidate.size - 1}:
        rank = context_ranks(candidate)[index]
        assert sums[index] == sum(map(Counter.total, predicted(candidate, model, even, rank).values()))
    node = node_of(candidate, per_node)
    assert [rank // per_node for rank in context_ranks(candidate)] == node.tolist()
    assert into_nodes(some.values(), node).sum() <= sums.sum()


# 4 nodes x 4 ranks, as many key heads, forward; in units of a rank's query shard. Ulysses' outputs, a fourth of what it
# exchanges, bring an lse in float32 for every 8 elements.
@pytest.mark.parametrize(
    ("candidate", "units"),
    [
        (Candidate(16), 30), (Candidate(4, 4), 24), (Candidate(1, 1, 16), 12 + 3 / 8), (Candidate(4, 1, 4), 12 + 3 / 8),
        # Queries go round and enter a node once; each of its ranks is sent what was computed for it: out, and lse.
        (Candidate(1, 16, rotate_forward="kv"), 15 + 48 * (1 + 1 / 8)),
        (Candidate(4, 4, placement="ring_in_node", rotate_forward="kv"), 4 * (3 + 3 * (1 + 1 / 8))),
    ],
)  # fmt: skip
def test_bytes_into_a_node_by_hand(candidate: Candidate, units: float) -> None:
    model, sequence = ModelShape(hidden=128, heads=16), SequenceShape(256, dtype=torch.float32)
    forward = [some for key, some in arrivals(candidate, model, sequence).items() if not key.backward]
    shard = 16 * 128 * 4
    assert into_nodes(forward, node_of(candidate, 4)).max() == units * shard
