"""Token orders: every position is held once, as many by each rank as DTensor would give it."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from tests.cases import head_tail_turns, held
from tests.strategies import examples, ulysses_meshes
from wallfacer_dt.layout import (
    ORDERS,
    Spans,
    check_length,
    check_order,
    consecutive,
    deal,
    deal_documents,
    in_order,
    length_of,
    merged,
    positions,
    shard_sizes,
)
from wallfacer_dt.testing.fake import fake_world


@st.composite
def axes(draw: st.DrawFn, largest: int = 24) -> tuple[int, int, int]:
    """(ulysses, ring, team)."""
    ring, team, ulysses = draw(st.sampled_from(ulysses_meshes(draw(st.integers(1, largest)))))
    return ulysses, ring, team


def held_by(spans: Spans) -> list[int]:
    """Positions, by Python's own ranges."""
    found = [p for span in spans.tolist() for p in range(*span)]
    assert found == positions(spans).tolist()
    return found


def are_apart(spans: Spans) -> bool:
    return all(stop < start for (_, stop), (start, _) in pairwise(spans.tolist()))


@examples(300)
@given(length=st.integers(1, 200), mesh=axes(), order=st.sampled_from(ORDERS[:2]))
def test_every_position_is_held_once(length: int, mesh: tuple[int, int, int], order: str) -> None:
    shards, sizes = deal(length, mesh, order), shard_sizes(length, mesh)
    assert sorted(p for spans in shards for p in held_by(spans)) == list(range(length))
    assert [length_of(spans) for spans in shards] == list(sizes)
    assert [held_by(spans) for spans in shards] == [held(i, mesh, order, length) for i in range(len(shards))]
    assert all(start < stop for spans in shards for start, stop in spans.tolist())


@examples(100)
@given(length=st.integers(1, 100), mesh=axes(largest=12), dim=st.integers(0, 1))
def test_shards_are_as_long_as_those_of_a_dtensor(length: int, mesh: tuple[int, int, int], dim: int) -> None:
    shape = torch.Size((length, 3) if dim == 0 else (3, length))
    sizes, spans = shard_sizes(length, mesh), deal(length, mesh, "contiguous")
    for index in {0, len(sizes) // 2, len(sizes) - 1}:
        with fake_world(len(sizes), rank=index):
            device_mesh = DeviceMesh("cpu", torch.arange(len(sizes)).view(mesh))
            local, offset = compute_local_shape_and_global_offset(shape, device_mesh, [Shard(dim)] * 3)
        assert local[dim] == sizes[index]
        if sizes[index]:
            assert spans[index].tolist() == [[offset[dim], offset[dim] + local[dim]]]


@given(length=st.integers(1, 200), mesh=axes())
def test_shards_differ_by_a_chunk_at_most(length: int, mesh: tuple[int, int, int]) -> None:
    sizes = shard_sizes(length, mesh)
    largest = length
    for axis in mesh:
        largest = -(-largest // axis)
    assert max(sizes) == largest
    if length % len(sizes) == 0:
        assert set(sizes) == {length // len(sizes)}


@given(length=st.integers(1, 200), mesh=axes())
def test_head_and_tail_are_halves_from_both_ends(length: int, mesh: tuple[int, int, int]) -> None:
    """In turns: the ranks that exchange heads come one after the other."""
    shards = deal(length, mesh, "head_tail")
    heads, tails = [], []
    for spans in (shards[index] for index in head_tail_turns(mesh)):
        count = length_of(spans)
        heads += held_by(spans)[: count - count // 2]
        tails = held_by(spans)[count - count // 2 :] + tails
    assert heads + tails == list(range(length))


@given(mesh=axes(), length=st.integers(1, 400))
def test_ranks_that_exchange_heads_hold_one_head_and_one_tail(mesh: tuple[int, int, int], length: int) -> None:
    inner = mesh[1] * mesh[2]
    by_document = deal_documents((0, length // 3, length), mesh) if length > 2 else ()
    for shards, parts in ((deal(length, mesh, "head_tail"), 1), (by_document, 2)):
        for index in range(inner):
            together = merged(in_order(enumerate(shards[index::inner])).span)
            assert len(together) <= 2 * parts


@st.composite
def documents(draw: st.DrawFn) -> tuple[int, ...]:
    length = draw(st.integers(1, 200))
    return (0, *sorted(draw(st.sets(st.integers(1, length), max_size=6)) - {length}), length)


@examples(300)
@given(bounds=documents(), mesh=axes())
def test_documents_are_dealt_out_once_and_evenly(bounds: tuple[int, ...], mesh: tuple[int, int, int]) -> None:
    shards = deal_documents(bounds, mesh)
    assert sorted(p for spans in shards for p in held_by(spans)) == list(range(bounds[-1]))
    sizes = [length_of(spans) for spans in shards]
    assert sizes == list(shard_sizes(bounds[-1], mesh, "document_head_tail"))
    assert max(sizes) - min(sizes) <= 1
    assert all(map(are_apart, shards))
    for start, stop in pairwise(bounds):
        counts = [sum(start <= p < stop for p in held_by(spans)) for spans in shards]
        assert max(counts) - min(counts) <= 2, "a document is on some ranks more than on others"
        assert sum(counts) == stop - start


@given(length=st.integers(1, 200), mesh=axes())
def test_one_document_that_divides_is_dealt_out_head_tail(length: int, mesh: tuple[int, int, int]) -> None:
    length *= 2 * mesh[0] * mesh[1] * mesh[2]
    expected = [merged(spans).tolist() for spans in deal(length, mesh, "head_tail")]
    assert [spans.tolist() for spans in deal_documents((0, length), mesh)] == expected


@st.composite
def touching(draw: st.DrawFn) -> Spans:
    ends = sorted(draw(st.sets(st.integers(0, 30), min_size=2)))
    return np.array([pair for pair in pairwise(ends) if draw(st.booleans())], int).reshape(-1, 2)


@given(touching())
def test_merged_spans_are_as_few_as_can_be(some: Spans) -> None:
    result = merged(some)
    assert held_by(result) == held_by(some)
    assert are_apart(result)


@given(length=st.integers(1, 100), mesh=axes(largest=12), order=st.sampled_from(ORDERS[:2]), data=st.data())
def test_slices_in_order_find_every_position_in_its_shard(
    length: int, mesh: tuple[int, int, int], order: str, data: st.DataObject
) -> None:
    shards = deal(length, mesh, order)
    members = data.draw(st.sets(st.sampled_from(range(len(shards))), min_size=1))
    pieces = in_order((m, shards[m]) for m in members)
    assert held_by(pieces.span) == sorted(p for m in members for p in held_by(shards[m]))
    for member, row, (start, stop) in zip(*(some.tolist() for some in pieces), strict=True):
        assert held_by(shards[member])[row:][: stop - start] == list(range(start, stop))


@given(bounds=documents(), size=st.integers(1, 8))
def test_sizes_of_consecutive_shards(bounds: tuple[int, ...], size: int) -> None:
    sizes = shard_sizes(bounds[-1], (size,))
    assert [held_by(spans) for spans in consecutive(sizes)] == [
        held_by(spans) for spans in deal(bounds[-1], (size,), "contiguous")
    ]
    assert [length_of(spans) for spans in consecutive(sizes)] == list(sizes)


def test_what_is_no_order_and_no_length_is_refused() -> None:
    with pytest.raises(ValueError, match=r"order must be one of .*got 'zigzag'"):
        check_order("zigzag")
    for wrong in (0, -3):
        with pytest.raises(ValueError, match=f"sequence length must be at least 1, got {wrong}"):
            check_length(wrong)
    for wrong in (8.0, True, None):
        with pytest.raises(TypeError, match="kv_length must be an int"):
            check_length(wrong, "kv_length")
