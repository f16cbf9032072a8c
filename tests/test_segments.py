"""What is computed covers what a mask leaves, once, with few kernel calls, and evenly."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from tests import flash_standins
from tests.cases import Case, held, shard_sizes
from tests.strategies import examples, mask_options, meshes, ulysses_meshes
from wallfacer_dt.algorithms import segments
from wallfacer_dt.algorithms.arithmetic import Backward, Forward, Operand, Scores
from wallfacer_dt.algorithms.cumulative import cumulative
from wallfacer_dt.algorithms.masks import Mask
from wallfacer_dt.algorithms.schedule import make_schedule
from wallfacer_dt.algorithms.segments import Sees, Segments, Stored, Work, plan_work, split_work
from wallfacer_dt.algorithms.sequences import Sequences
from wallfacer_dt.algorithms.steps import Attend, Schedule
from wallfacer_dt.algorithms.tiles import Tile
from wallfacer_dt.kernels import reference
from wallfacer_dt.kernels.block import Band, BlockKernel
from wallfacer_dt.layout import Spans, length_of, merged, positions
from wallfacer_dt.mesh import Coordinate
from wallfacer_dt.testing import worst_error
from wallfacer_dt.testing.oracle import visibility

SEES_ALL, IS_CAUSAL = Mask(), Mask(right=0)
CHUNK = 3


def planned(case: Case) -> Mask:
    """What a case asks for, as a mask of the package."""
    if case.mask:
        return Mask(asked=True)
    left, right = (None if reach in (None, -1) else reach for reach in case.window_size or (None, None))
    documents = tuple(tuple(int(x) for x in np.cumsum((0, *row))) for row in case.documents)
    return Mask(left, 0 if case.is_causal else right, case.prefix_length, documents)


def seen(case: Case) -> np.ndarray:
    """The same by the oracle, pair by pair: (rows, heads, queries, keys), a row for every one that differs."""
    asked = replace(case, packed="document_ids", batch=max(case.batch, len(case.documents)))
    return visibility(asked.batch, case.heads, case.total, case.kv_total, **asked.masks).numpy()


def area_of(tile: Tile) -> np.ndarray:
    """Which pairs of a tile its band leaves."""
    t, s = np.ogrid[: tile.q[1] - tile.q[0], : tile.k[1] - tile.k[0]]
    low, high = tile.band
    inside = np.ones((t.size, s.size), bool)
    inside &= (s - t >= low) if low is not None else inside
    return inside & (s - t <= high) if high is not None else inside


def add_covered(
    count: np.ndarray, tile: Tile, queries: list[np.ndarray], keys: list[np.ndarray], visible: np.ndarray
) -> None:
    """Add to ``count`` (rows, heads, positions of queries, of keys) the pairs that a tile computes.

    ``queries`` and ``keys`` are the positions that are stored, by row of the batch or one for all; ``visible`` is what
    a mask that is asked would say.
    """
    inside = area_of(tile)
    for row in range(len(count)) if tile.batch is None else [tile.batch]:
        q, k = queries[row % len(queries)][slice(*tile.q)], keys[row % len(keys)][slice(*tile.k)]
        pairs = np.ix_(q, k)
        if tile.asked is None:
            count[row][:, *pairs] += inside
            continue
        for asked, stored in zip(tile.asked, (q, k), strict=True):
            assert np.array_equal(positions(asked), stored), "the mask is asked about other positions"
        assert inside.all()
        count[row][:, *pairs] += visible[row % len(visible)][:, *pairs]


def ragged_area(call: Segments, batch: int, rows: int, columns: int) -> np.ndarray:
    """(batch, rows, columns): which pairs a kernel computes that is given a call's cumulative lengths."""
    q, k = (torch.empty(batch, 1, stop - start, 1) for start, stop in call.extents)
    ragged = cumulative(call, q, k)
    assert ragged.max_seqlen_q == max(2, ragged.cu_seqlens_q.diff().max())  # of 1 kernels take sequences for queries
    assert ragged.max_seqlen_k == ragged.cu_seqlens_k.diff().max()
    whole = torch.zeros(batch * q.shape[2], batch * k.shape[2], dtype=torch.bool)
    for (a, b), (c, d) in zip(
        pairwise(ragged.cu_seqlens_q.tolist()), pairwise(ragged.cu_seqlens_k.tolist()), strict=True
    ):
        t, s = torch.arange(b - a).unsqueeze(-1), torch.arange(d - c)
        offset = s - t - (d - c) + (b - a)
        some = torch.ones_like(offset, dtype=torch.bool)
        some &= (offset >= -ragged.left) if ragged.left >= 0 else some
        whole[a:b, c:d] = some & (offset <= ragged.right) if ragged.right >= 0 else some
    blind, unseen = ~whole.any(1), ~whole.any(0)
    for told, found in ((ragged.masked_rows, blind), (ragged.masked_keys, unseen)):
        assert found.equal(torch.zeros_like(found) if told is None else told.reshape(-1))
    counted = np.zeros((batch, rows, columns), bool)
    by_row = whole.view(batch, q.shape[2], batch, k.shape[2])
    for row in range(batch):
        counted[row, *(slice(*extent) for extent in call.extents)] = by_row[row, :, row].numpy()
    assert whole.sum() == counted.sum(), "rows of the batch see each other"
    return counted


@st.composite
def ascending_spans(draw: st.DrawFn, length: int) -> Spans:
    """One to four spans that do not overlap, some of which may touch."""
    ends = sorted(draw(st.sets(st.integers(0, length), min_size=2, max_size=8)))
    chosen = np.array(list(pairwise(ends)))
    return chosen[draw(st.sampled_from([slice(None), slice(None, None, 2), slice(1), slice(-1, None)]))]


@st.composite
def masked(draw: st.DrawFn, longest: int = 420) -> Case:
    """Any mask on a sequence that may have several blocks of 128."""
    length = draw(st.one_of(st.integers(1, 20), st.integers(100, longest)))
    batch = draw(st.integers(1, 3))
    options: dict[str, Any] = draw(mask_options(batch, length))
    return Case(1, 1, batch=batch, length=length, **options)


@st.composite
def stored(draw: st.DrawFn, case: Case) -> list[Spans]:
    """Spans for every row of the batch, or the same for all."""
    rows = draw(st.sampled_from([1, max(1, len(case.documents))]))
    return [draw(ascending_spans(case.total)) for _ in range(rows)]


def sees(case: Case) -> Sees:
    """What a mask that is asked answers."""
    visible = seen(case).any((0, 1))
    return lambda q, k: bool(visible[np.ix_(positions(q), positions(k))].any())


@st.composite
def planned_work(draw: st.DrawFn) -> tuple[Case, list[np.ndarray], list[np.ndarray], Work]:
    """A case, the positions of some queries and keys by row of the batch, and what is computed of them."""
    case = draw(masked())
    queries, keys = draw(stored(case)), draw(stored(case))
    if draw(st.booleans()):
        keys = queries
    work = plan_work(queries, keys, planned(case), sees(case))
    return case, list(map(positions, queries)), list(map(positions, keys)), work


@examples(200)
@given(st.data())
def test_blocks_whose_spans_are_seen_as_a_whole_are_no_more_calls_than_others(data: st.DataObject) -> None:
    """In a row of the batch; where rows differ, other windows may make a call more of both."""
    case = data.draw(masked())
    mask = replace(planned(case), asked=False)
    row = data.draw(st.integers(0, mask.rows - 1))
    q, k = (Stored(data.draw(ascending_spans(case.total)), mask, row) for _ in range(2))
    assume(len(q.spans) and len(k.spans))
    whole = segments._whole(q, k)
    assume(whole is not None)
    if mask.left is None:
        others = [segments._stairs(q, k, between) for between in (True, False)]
    else:
        paired = segments._windows(q, k)
        others = [paired, segments._triangles(*paired)]
    assert segments._count(whole) <= min(segments._count(segments._calls(*other)) for other in others)


@examples(400)
@given(planned_work())
def test_segments_cover_the_visible_pairs_once(chosen: tuple) -> None:
    case, queries, keys, work = chosen
    visible = seen(case)
    asked = np.zeros((len(visible), 1, *visible.shape[2:]), bool)
    for row in range(len(asked)):
        asked[row, 0][np.ix_(*(some[row % len(some)] for some in (queries, keys)))] = True
    for form in ("bands", "tiles"):
        count = np.zeros(visible.shape, int)
        for call in work:
            tiles: tuple[Tile, ...] = getattr(call, form)
            for tile in tiles:
                inside = area_of(tile)
                assert inside.any(1).all(), "a row of a tile sees nothing"
                assert tile.area == inside.sum()
                assert tile.q[0] < tile.q[1]
                assert tile.k[0] < tile.k[1]
                add_covered(count, tile, queries, keys, visible)
            assert call.area == sum(tile.area for tile in tiles)
        assert np.array_equal(count, visible & asked)


_A_SEGMENT = st.tuples(st.integers(0, 30), st.integers(1, 5), st.integers(0, 30), st.integers(1, 5))


@examples(300)
@given(st.lists(_A_SEGMENT, min_size=1, max_size=12))
def test_each_segment_is_in_the_first_call_where_it_follows_all_others(drawn: list[tuple[int, ...]]) -> None:
    some = [(q, q + n, k, k + m) for q, n, k, m in sorted(drawn)]
    calls: list[list[tuple[int, ...]]] = []
    for q, q_stop, k, k_stop in some:
        free = [call for call in calls if q >= call[-1][1] and k >= call[-1][3]]
        if not free:
            free.append([])
            calls += free
        free[0].append((q, q_stop, k, k_stop))
    assert [call.tolist() for call in segments._apart(np.array(some))] == [[*map(list, call)] for call in calls]


@examples(300)
@given(
    length=st.integers(1, 60), left=st.integers(0, 30), right=st.none() | st.integers(0, 9), data=st.data(),
)  # fmt: skip
def test_triangles_and_what_all_see_are_the_window(
    length: int, left: int, right: int | None, data: st.DataObject
) -> None:
    q, k = (merged(data.draw(ascending_spans(length))) for _ in range(2))
    paired = segments._windows(*(Stored(spans, Mask(left, right), 0) for spans in (q, k)))
    counts = []
    for some in (paired, segments._triangles(*paired)):
        counts.append(np.zeros((length_of(q), length_of(k)), int))
        for window, rows in segments._calls(*some):
            for tile in Segments(*window, (rows,)).bands:
                counts[-1][slice(*tile.q), slice(*tile.k)] += area_of(tile)
    assert np.array_equal(*counts)
    i, j = positions(q)[:, None], positions(k)
    assert np.array_equal(counts[0], (j >= i - left) & ((right is None) | (j <= i + (right or 0))))


@examples(300)
@given(planned_work())
def test_cumulative_lengths_say_the_same(chosen: tuple) -> None:
    case, queries, keys, work = chosen
    rows, columns = len(queries[0]), len(keys[0])
    for call in work:
        if call.asked or any(len(some) != n for stored, n in ((queries, rows), (keys, columns)) for some in stored):
            continue  # rows of a batch are as long as one another
        batch = len(call.rows) if len(call.rows) > 1 else case.batch
        expected = np.zeros((batch, rows, columns), bool)
        for tile in call.bands:
            for row in range(batch) if tile.batch is None else [tile.batch]:
                expected[row, slice(*tile.q), slice(*tile.k)] |= area_of(tile)
        assert np.array_equal(ragged_area(call, batch, rows, columns), expected)
        for some in call.rows:
            assert (some[1:, ::2] >= some[:-1, 1::2]).all(), "segments share queries or keys"
        assert_flash_sees_it(call)


def assert_flash_sees_it(call: Segments) -> None:
    """Of many segments in one call, by how each version bounds them: see kernels/windows.py."""
    if not call.is_ragged:
        return
    batch, (rows, columns) = len(call.rows), (stop - start for start, stop in call.extents)
    ragged = cumulative(call, torch.empty(batch, 1, rows, 1), torch.empty(batch, 1, columns, 1))
    is_causal, bounds = (call.left, call.right) == (-1, 0), (call.left, call.right)
    sizes = torch.stack([ragged.cu_seqlens_q.diff(), ragged.cu_seqlens_k.diff()], 1).tolist()
    for n, m in {(n, m) for n, m in sizes if n and m}:
        some = flash_standins.Lengths(n, m, ragged.max_seqlen_q, ragged.max_seqlen_k)
        unbounded = [None if bound < 0 else bound for bound in bounds]
        expected = flash_standins.visible_4(some, is_causal, *unbounded)
        for visible in (flash_standins.visible_2, flash_standins.visible_3):
            assert visible(some, is_causal, *bounds).equal(expected), f"{n} queries, {m} keys of {call}"


@examples(200)
@given(
    rows=st.integers(1, 8), columns=st.integers(1, 5), gap=st.integers(-5, 5), left=st.none() | st.integers(0, 12),
    right=st.none() | st.integers(0, 5), batch=st.integers(1, 3),
)  # fmt: skip
def test_flash_sees_windows_of_rows_whose_documents_differ(
    rows: int, columns: int, gap: int, left: int | None, right: int | None, batch: int
) -> None:
    """Of so many queries that are so far behind as few keys; at most two calls without a bound ahead.

    Where keys lie in the middle of queries: three, of those before, beside and behind them.
    """
    q, k = (np.array([[start, start + n]]) for start, n in ((10 + columns + gap, rows), (10, columns)))
    mask = Mask(left, right, documents=tuple((0, 1 + row, 40) for row in range(batch)))
    work = plan_work([q], [k], mask)
    for call in work:
        assert_flash_sees_it(call)
    counted = np.zeros((batch, 40, 40), int)
    for call in work:
        for tile in call.bands:
            add_covered(counted[:, None], tile, [positions(q)], [positions(k)], np.zeros((1, 1, 40, 40)))
    i, j = positions(q)[:, None], positions(k)
    seen = (j >= i - (40 if left is None else left)) & (j <= i + (40 if right is None else right))
    assert all(np.array_equal(some[np.ix_(positions(q), positions(k))], seen) for some in counted)
    is_inside = columns + gap < 0 < rows + gap
    assert right or sum(call.calls for call in work) <= 2 + is_inside


@pytest.mark.parametrize("name", [*flash_standins.PACKAGES, "flash of CUDA on the CPU"])
@examples(60)
@given(chosen=planned_work(), heads=st.sampled_from([(1, 1), (4, 2)]), dims=st.sampled_from([(8, 8), (5, 12)]))
def test_kernels_compute_many_segments_in_one_call(
    name: str, chosen: tuple, heads: tuple[int, int], dims: tuple[int, int]
) -> None:
    """As the reference does one by one: out and lse, and the gradients; each call of theirs is counted."""
    case, queries, keys, work = chosen
    batch, (q, k) = max(case.batch, len(case.documents)), (max(map(len, some)) for some in (queries, keys))
    assume(work and not case.mask and all(len(some) == n for stored, n in ((queries, q), (keys, k)) for some in stored))
    generator = torch.Generator().manual_seed(0)
    shapes = [(heads[0], q, dims[0]), (heads[1], k, dims[0]), (heads[1], k, dims[1]), (heads[0], q, dims[1])]
    tensors = [torch.randn(batch, *shape, generator=generator, dtype=torch.float64) for shape in shapes]
    calls: list[Any] = []
    kernels = counted(flash_standins.KERNELS[name], calls), reference.KERNEL
    results = [attended(some, work, *tensors) for some in kernels]
    assert worst_error(list(zip(*results, strict=True))) <= 1e-10
    assert len(calls) == 2 * sum(call.calls for call in work)


def counted(kernel: BlockKernel, calls: list[Any]) -> BlockKernel:
    """The kernel, which notes its calls."""

    def noting(function: Any) -> Any:
        return lambda *args: (calls.append(args[-1]), function(*args))[1]

    assert kernel.takes_segments
    return kernel._replace(forward=noting(kernel.forward), backward=noting(kernel.backward))


def attended(kernel: BlockKernel, work: Work, q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor) -> list[Tensor]:
    """out, exp(lse), dq, dk, dv of what is to be computed."""
    scores, query = Scores(kernel, 0.3), Operand((q,))
    Forward(scores, v.shape[-1]).attend(query, Operand((k, v)), work)
    out, lse = query.partial
    query, keys = Operand((q, grad_out, lse), out=out), Operand((k, v))
    Backward(scores).attend(query, keys, work)
    return [out, lse.exp(), *query.partial, *keys.partial]


@examples(200)
@given(planned_work())
def test_split_loses_and_repeats_nothing(chosen: tuple) -> None:
    case, queries, keys, work = chosen
    visible, parts = seen(case), split_work(work)
    counts = []
    for some in (work, parts[0] + parts[1]):
        counts.append(np.zeros(visible.shape, int))
        for tile in (tile for call in some for tile in call.bands):
            add_covered(counts[-1], tile, queries, keys, visible)
    assert np.array_equal(*counts)
    areas = [sum(call.area for call in part) for part in parts]
    # Cut is a row of queries in every row of the batch, or of what is not cut a whole segment.
    coarse = [call for call in work if call.asked or not ((call.left, call.right) == (-1, -1) or call.right == 0)]
    largest = max((int(some.max(initial=0)) for call in coarse for some in call.areas), default=0)
    rows = sum(len(call.rows) for call in work)
    assert abs(areas[0] - areas[1]) <= 2 * (largest + rows * case.total)  # no comparison: of pairs of tokens


@pytest.mark.parametrize("is_causal", [False, True])
def test_split_halves_a_single_segment(is_causal: bool) -> None:
    whole = plan_work([np.array([[0, 8]])], [np.array([[0, 8]])], IS_CAUSAL if is_causal else SEES_ALL)
    areas = [sum(call.area for call in part) for part in split_work(whole)]
    assert areas == ([15, 21] if is_causal else [32, 32])


@examples(300)
@given(
    rows=st.integers(1, 9), columns=st.integers(1, 9),
    low=st.none() | st.integers(-9, 9), high=st.none() | st.integers(-9, 9),
)  # fmt: skip
def test_area_of_any_band(rows: int, columns: int, low: int | None, high: int | None) -> None:
    tile = Tile((2, 2 + rows), (5, 5 + columns), Band(low, high))
    assert tile.area == area_of(tile).sum()


@examples(100)
@given(
    st.lists(st.tuples(*[st.integers(1, 20)] * 2), min_size=1, max_size=4), st.integers(-1, 9), st.integers(-1, 9),
    st.integers(1, 6),
)  # fmt: skip
def test_squares_are_those_with_a_pair(sizes: list[tuple[int, int]], left: int, right: int, size: int) -> None:
    stops = np.cumsum(sizes, 0)
    rows = np.stack([*(stops - sizes).T, *stops.T])[[0, 2, 1, 3]].T
    expected = []
    for n, m in sizes:
        s, t = np.meshgrid(np.arange(m), np.arange(n))
        is_seen = (left < 0) | (t + m - n - left <= s)
        is_seen &= (right < 0) | (s <= t + m - n + right)
        expected.append(len({*zip((t[is_seen] // size).tolist(), (s[is_seen] // size).tolist(), strict=True)}))
    found = Segments(left, right, (rows,)).squares(size)
    # Of bands that begin behind the last key, or end before the first.
    assert [*found] == expected


@examples(300)
@given(case=masked().filter(lambda case: not case.mask), data=st.data())
def test_reach_is_all_that_is_seen_and_no_more(case: Case, data: st.DataObject) -> None:
    queries = data.draw(ascending_spans(case.total))
    mask, visible = planned(case), seen(case)[:, 0]
    for row in range(mask.rows):
        for (start, stop), reach in zip(queries.tolist(), mask.reach(row, queries).tolist(), strict=True):
            found = np.flatnonzero(visible[row, start:stop].any(0))
            assert found.tolist() == list(range(max(0, reach[0]), min(case.total, reach[1])))


def test_rows_of_the_batch_are_one_call() -> None:
    span = [np.array([[0, 8]])]
    (call,) = plan_work(span, span, Mask(right=0, documents=((0, 8), (0, 8), (0, 3, 8))))
    assert [some.tolist() for some in call.rows] == [[[0, 8, 0, 8]], [[0, 8, 0, 8]], [[0, 3, 0, 3], [3, 8, 3, 8]]]
    assert call.calls == 1
    assert str(call) == "batch 0: 0:8 x 0:8, batch 1: 0:8 x 0:8, batch 2: 0:3 x 0:3 | 3:8 x 3:8 causal"


def test_where_documents_begin_is_not_to_be_written() -> None:
    """It is kept with a mask, by which schedules are known again."""
    for mask in (IS_CAUSAL, Mask(documents=((0, 3, 8),))):
        with pytest.raises(ValueError, match="read-only"):
            mask.bounds(0)[0] = 1


def test_a_window_is_one_call_or_few_tiles() -> None:
    """A narrow window over many blocks: nearly every pair computed is seen, in a call for every block."""
    span = [np.array([[0, 4096]])]
    (call,) = plan_work(span, span, Mask(left=64, right=0))
    assert (call.calls, len(call.bands)) == (1, 1)
    rectangles = sum((tile.q[1] - tile.q[0]) * (tile.k[1] - tile.k[0]) for tile in call.tiles)
    assert call.area == 65 * 4096 - 64 * 65 / 2
    assert len(call.tiles) <= 4096 / 128 + 2
    assert rectangles <= 3 * call.area


def schedule_of(
    mesh: tuple[int, ...],
    index: int,
    length: int,
    *,
    order: str = "head_tail",
    mask: Mask = IS_CAUSAL,
    schedule: str = "2d",
    resident: str = "q",
    backward: bool = False,
) -> Schedule:
    ring, team, *more = mesh
    ulysses_rank, inner = divmod(index, ring * team)
    place = Coordinate(ring, team, *divmod(inner, team), *(more or (1,)), ulysses_rank)
    sequences = Sequences(length, length, order, mask)
    return make_schedule(place, sequences, schedule=schedule, resident=resident, backward=backward)


def area(schedule: Schedule) -> int:
    """Pairs that are computed; in rows of the batch that differ, of all of them."""
    return sum(call.area for step in schedule.steps if isinstance(step, Attend) for call in step.work)


def causal_area(rows: list[int]) -> int:
    return sum(row + 1 for row in rows)


@pytest.mark.parametrize(
    "size", [pytest.param(size, marks=() if size <= 16 or size == 24 else pytest.mark.whole) for size in range(1, 65)]
)
def test_head_tail_is_the_same_work_on_every_rank(size: int) -> None:
    length = 4 * size
    for mesh in meshes(size):
        for backward, resident in [(False, "q"), (True, "q"), (True, "kv")]:
            work = {area(schedule_of(mesh, i, length, backward=backward, resident=resident)) for i in range(size)}
            assert len(work) == 1
            assert work.pop() * size == causal_area(range(length))


@pytest.mark.parametrize("size", [2, 4, 6, 8, 12, 16])
def test_head_tail_is_the_same_work_under_ulysses(size: int) -> None:
    """For every head of it, so that equal heads make equal work."""
    length = 2 * size
    for *mesh, ulysses in ulysses_meshes(size):
        for backward, resident in [(False, "q"), (True, "q"), (True, "kv")]:
            inner = size // ulysses
            some = [*range(inner), size - 1]
            work = {area(schedule_of((*mesh, ulysses), i, length, backward=backward, resident=resident)) for i in some}
            assert len(work) == 1
            assert work.pop() * inner == causal_area(range(length))


@examples(200)
@given(size=st.integers(1, 32), length=st.integers(1, 300), data=st.data())
def test_head_tail_of_any_length_is_nearly_the_same_work(size: int, length: int, data: st.DataObject) -> None:
    """At most N (s + u) / 2 pairs on any rank, s being the most tokens that one attends: on equal shards N s / 2.

    And as many more as a team has ranks, of which some share another's work where the last shards are shorter.
    """
    *mesh, ulysses = data.draw(st.sampled_from(ulysses_meshes(size)))
    inner = size // ulysses
    sizes = shard_sizes(length, (ulysses, *mesh))
    most = max(sum(sizes[i::inner]) for i in range(inner))
    work = [area(schedule_of((*mesh, ulysses), i, length)) for i in range(inner)]
    assert sum(work) == causal_area(range(length))
    assert max(work) <= length * (most + ulysses) / 2 + mesh[1] * (mesh[1] > 1)


def test_contiguous_is_not() -> None:
    """The counter-example: without it the tests above could not fail."""
    work = {area(schedule_of((4, 1), i, 16, order="contiguous")) for i in range(4)}
    assert len(work) == 4
    assert sum(causal_area(held(i, 4, "contiguous", 16)) for i in range(4)) == 16 * 17 / 2


def packed(seed: int, length: int) -> Mask:
    """Causal documents of random lengths, eight on average, a few of them long."""
    generator = np.random.default_rng(seed)
    sizes = np.maximum(1, generator.lognormal(np.log(length / 8), 1, 200).astype(int))
    ends = [int(end) for end in np.cumsum(sizes) if end < length]
    return Mask(right=0, documents=((0, *ends, length),))


def heaviest(mesh: tuple[int, ...], length: int, order: str, mask: Mask) -> float:
    """The work of the rank that has most, in units of the mean."""
    work = [area(schedule_of(mesh, i, length, order=order, mask=mask)) for i in range(mesh[0] * mesh[1])]
    return max(work) / float(np.mean(work))


@pytest.mark.parametrize(
    ("order", "largest", "mean"),
    [("contiguous", 3.5, 2.6), ("head_tail", 2.8, 2.1), ("document_head_tail", 1.02, 1.01)],
)
@pytest.mark.parametrize("mesh", [(16, 1), (4, 4), (8, 1, 2)])
def test_documents_of_random_lengths(mesh: tuple[int, ...], order: str, largest: float, mean: float) -> None:
    """What the orders are worth for packed sequences; the first two know nothing of documents."""
    ratios = [heaviest(mesh, 4096, order, packed(seed, 4096)) for seed in range(6)]
    assert max(ratios) <= largest
    assert np.mean(ratios) <= mean
    if order != "document_head_tail":
        assert np.mean(ratios) >= 1.1, "it is balanced now: say so"


@examples(150)
@given(size=st.integers(1, 12), length=st.integers(1, 200), is_causal=st.booleans(), data=st.data())
def test_documents_dealt_out_by_document_are_nearly_the_same_work(
    size: int, length: int, is_causal: bool, data: st.DataObject
) -> None:
    """No rank has more than a row of pairs (u rows, with Ulysses) above the mean; none at all if documents divide."""
    *mesh, ulysses = data.draw(st.sampled_from(ulysses_meshes(size)))
    ends = data.draw(st.sets(st.integers(1, length), max_size=5))
    bounds = (0, *sorted(ends - {length}), length)
    for unit in (1, 2 * size):
        mask = Mask(right=0 if is_causal else None, documents=(tuple(unit * bound for bound in bounds),))
        work = [
            area(schedule_of((*mesh, ulysses), i, unit * length, order="document_head_tail", mask=mask))
            for i in range(mesh[0] * mesh[1])
        ]
        if unit == 1:
            assert max(work) <= float(np.mean(work)) + length * ulysses
        else:
            assert len(set(work)) == 1


@pytest.mark.parametrize("order", ["contiguous", "head_tail"])
@pytest.mark.parametrize(("window", "most"), [(8, 1.005), (64, 1.04), (128, 1.07), (256, 1.15)])
def test_a_window_is_nearly_the_same_work(order: str, window: int, most: float) -> None:
    """But for the sequence's first tokens, which see less than a window."""
    assert heaviest((8, 1), 1024, order, Mask(left=window, right=0)) <= most


def calls_of(schedule: Schedule) -> list[int]:
    """Of every part of a block, how often a kernel is called that takes cumulative lengths."""
    return [sum(call.calls for call in step.work) for step in schedule.steps if isinstance(step, Attend)]


@st.composite
def few_calls(draw: st.DrawFn) -> tuple[tuple[int, ...], int, str, Mask]:
    """A mesh, a length, an order and a mask: causal, a window, packed documents, or a window in documents."""
    *mesh, ulysses = draw(st.sampled_from(ulysses_meshes(draw(st.integers(1, 16)))))
    size = mesh[0] * mesh[1] * ulysses
    length = draw(st.integers(1, 40)) * size
    ends = draw(st.sets(st.integers(1, length), max_size=12)) - {length}
    left = draw(st.none() | st.integers(0, length))
    documents = draw(st.sampled_from([(), ((0, *sorted(ends), length),)]))
    order = draw(st.sampled_from(["contiguous", "head_tail"] + ["document_head_tail"] * bool(documents)))
    return (*mesh, ulysses), length, order, Mask(left, 0, 0, documents)


@examples(200)
@given(chosen=few_calls(), data=st.data())
def test_a_block_is_at_most_two_calls(chosen: tuple, data: st.DataObject) -> None:
    mesh, length, order, mask = chosen
    index = data.draw(st.integers(0, mesh[0] * mesh[1] - 1))
    resident = data.draw(st.sampled_from(["q", "kv"]))
    name = data.draw(st.sampled_from(["2d", "rings"] + ["published"] * (mesh[0] % mesh[1] == 0)))
    for backward in (False, True):
        schedule = schedule_of(
            mesh, index, length, order=order, mask=mask, resident=resident, backward=backward, schedule=name
        )
        # What ranks of Ulysses put together lies apart in contiguous order; and under a window every member of a team,
        # and every document that is dealt out by itself, has rows at a distance of its own. Of the published schedule
        # both sides are a team's rows.
        most = mesh[2] if order == "contiguous" else 1
        if mask.left is not None and order == "document_head_tail":
            most = 8 if name == "published" and mesh[1] > 1 else 6
        elif name == "published":
            most *= 2 * mesh[1]
        elif mask.left is not None:
            most *= mesh[1]
        assert max(calls_of(schedule)) <= max(2, most)


@pytest.mark.parametrize("mesh", [(8, 1), (4, 2), (1, 1, 8)])
def test_four_thousand_documents_are_a_few_calls(mesh: tuple[int, ...]) -> None:
    generator = np.random.default_rng(0)
    ends = np.sort(generator.choice(np.arange(1, 1 << 20), 3999, replace=False))
    mask = Mask(right=0, documents=((0, *ends.tolist(), 1 << 20),))
    for order in ("contiguous", "head_tail", "document_head_tail"):
        calls = calls_of(schedule_of(mesh, 0, 1 << 20, order=order, mask=mask))
        assert max(calls) <= 2
        assert sum(calls) <= 1.5 * mesh[0] * mesh[1]


def test_own_tokens_are_one_call() -> None:
    """Head and tail are stored side by side, and each sees all that is stored before it."""
    (first, *_) = schedule_of((4, 1), 1, 32).steps[1].work  # type: ignore[union-attr]
    assert str(first) == "0:8 x 0:8 causal"
