"""Packed documents dealt out head-tail one by one, rows of a batch differing: attention equals that of one process."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import wallfacer_dt
from tests.cases import mesh_of
from tests.pairwise import few
from tests.strategies import examples, meshes, schedules
from wallfacer_dt.algorithms.masks import Mask
from wallfacer_dt.algorithms.schedule import make_schedule
from wallfacer_dt.algorithms.sequences import Sequences
from wallfacer_dt.layout import deal_documents, length_of
from wallfacer_dt.mesh import Coordinate
from wallfacer_dt.testing import RankPool, attention_oracle, worst_error

Ranks = Callable[[int], RankPool]
ORDER = "document_head_tail"


@dataclass(frozen=True)
class Packed:
    """A batch of packed rows, and how it is attended."""

    ring: int
    team: int
    ulysses: int
    rows: tuple[tuple[int, ...], ...]  # lengths of documents, by row
    heads: int
    kv_heads: int
    is_causal: bool
    window: tuple[int, int] | None
    schedule: str
    rotate: str
    rotate_forward: str

    @property
    def length(self) -> int:
        return sum(self.rows[0])

    @property
    def ids(self) -> Tensor:
        return torch.stack([torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in self.rows])


def draw_tensors(case: Packed) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    heads = (case.heads, case.kv_heads, case.kv_heads, case.heads)
    shape = len(case.rows), case.length
    return [torch.randn(shape[0], n, shape[1], 16, generator=generator, dtype=torch.float64) for n in heads]


def on_mesh(case: Packed) -> list[Tensor]:
    """[out, dq, dk, dv] of the whole sequence, put together again; and positions that arrive where they belong."""
    mesh = mesh_of(case.ring, case.team, ulysses=case.ulysses)
    ids = case.ids
    order = wallfacer_dt.TokenOrder(ORDER, mesh)
    deal = {"order": order, "dim": 2, "document_ids": ids}
    q, k, v, grad_out = (wallfacer_dt.shard_sequence(x, **deal) for x in draw_tensors(case))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = wallfacer_dt.context_parallel_attention(
        *leaves, mesh, document_ids=ids, order=order, length=case.length, is_causal=case.is_causal,
        window_size=case.window, schedule=case.schedule, rotate=case.rotate,
        rotate_forward=case.rotate_forward,
    )  # fmt: skip
    grads = torch.autograd.grad(out, leaves, grad_out)
    positions = wallfacer_dt.sequence_positions(case.length, order, document_ids=ids)
    whole = wallfacer_dt.unshard_sequence(positions, order, dim=1, document_ids=ids)
    assert torch.equal(whole, torch.arange(case.length).expand_as(whole))
    return [wallfacer_dt.unshard_sequence(x.detach(), **deal) for x in (out, *grads)]


@st.composite
def packed(draw: st.DrawFn, size: int) -> Packed:
    ulysses = draw(st.sampled_from([u for u in range(1, size + 1) if size % u == 0]))
    ring, team = draw(st.sampled_from(meshes(size // ulysses)))
    length = draw(st.integers(1, 60))
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        cuts = sorted(draw(st.sets(st.integers(1, length - 1), max_size=5))) if length > 1 else []
        rows.append(tuple(b - a for a, b in zip([0, *cuts], [*cuts, length], strict=True)))
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    least = -(-ulysses // kv_heads)
    is_causal = draw(st.booleans())
    schedule = draw(st.sampled_from(schedules(ring, team)))
    return Packed(
        ring, team, ulysses, tuple(rows), kv_heads * draw(st.integers(least, least + 2)), kv_heads, is_causal,
        draw(st.sampled_from([None, (3, 0), (5, -1) if is_causal else (2, 4)])), schedule,
        draw(st.sampled_from(["q", "auto"] if schedule == "published" else ["kv", "q", "auto"])),
        draw(st.sampled_from(["kv", "auto"] if schedule == "published" else ["kv", "q", "auto"])),
    )  # fmt: skip


@pytest.mark.ranks
@pytest.mark.parametrize("size", few([1, 2, 3, 4, 6, 8], {1, 2, 3, 4, 8}))
@examples(25, today=15)
@given(data=st.data())
def test_equals_one_process(threads: Ranks, size: int, data: st.DataObject) -> None:
    case = data.draw(packed(size))
    expected = attention_oracle(
        *draw_tensors(case), is_causal=case.is_causal, window_size=case.window, document_ids=case.ids
    )
    for results in threads(size).run(on_mesh, case):
        pairs = zip(results, expected, strict=True)
        assert worst_error(dict(zip(("out", "dq", "dk", "dv"), pairs, strict=True))) <= 1e-10


@given(
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=8),
    axes=st.tuples(*[st.integers(1, 4)] * 3),
)
def test_every_rank_has_its_part_of_every_document(lengths: list[int], axes: tuple[int, int, int]) -> None:
    bounds = tuple(sum(lengths[:n]) for n in range(len(lengths) + 1))
    shards = deal_documents(bounds, axes)
    positions = [p for spans in shards for span in spans for p in range(*span)]
    assert sorted(positions) == list(range(bounds[-1]))
    sizes = [length_of(spans) for spans in shards]
    assert max(sizes) - min(sizes) <= 1
    for start, stop in pairwise(bounds):
        held = [sum(max(0, min(b, stop) - max(a, start)) for a, b in spans) for spans in shards]
        assert max(held) - min(held) <= 2, "a head and a tail may each have one more"


@pytest.mark.parametrize("ring", [2, 4, 8])
def test_causal_work_is_balanced_where_the_other_orders_are_not(ring: int) -> None:
    bounds = (0, 4096, 4608, 9728, 10240, 16384)

    def heaviest(order: str) -> float:
        sequences = Sequences(16384, 16384, order, Mask(right=0, documents=(bounds,)))
        schedules = [
            make_schedule(Coordinate(ring, 1, r, 0), sequences, schedule="2d", resident="q", backward=False)
            for r in range(ring)
        ]
        work = [sum(t.area for step in s.steps for t in getattr(step, "work", ())) for s in schedules]
        return max(work) * ring / sum(work)

    assert heaviest(ORDER) < 1.01
    assert min(heaviest("contiguous"), heaviest("head_tail")) > 1.2 or ring == 2
