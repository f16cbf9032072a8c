"""The tile plan covers what a mask leaves, once, with few kernel calls, and evenly."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import BLOCK_MASKS, MASK_MODS, Case, held, shard_sizes
from tests.strategies import examples, mask_options, meshes, ulysses_meshes
from wallfacer_dt.algorithms.blocks import blocks_of
from wallfacer_dt.algorithms.masks import Mask
from wallfacer_dt.algorithms.schedule import make_schedule
from wallfacer_dt.algorithms.sequences import Sequences
from wallfacer_dt.algorithms.steps import Attend, Schedule
from wallfacer_dt.algorithms.tiles import Tile, plan_tiles, split_tiles
from wallfacer_dt.kernels import CAUSAL, FULL, Band
from wallfacer_dt.layout import Span
from wallfacer_dt.mesh import Coordinate
from wallfacer_dt.testing.oracle import visibility

SEES_ALL, IS_CAUSAL = Mask(), Mask(right=0)
CHUNK = 3


def planned(case: Case) -> Mask:
    """What a case asks for, as a mask of the package."""
    if case.mask:
        function = (MASK_MODS | BLOCK_MASKS)[case.mask]
        table = blocks_of(function, case.batch, case.heads, case.total, case.total, torch.device("cpu"))
        return Mask(blocks=table)
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
    for row in range(*(tile.batch or (0, len(count)))):
        q, k = queries[row % len(queries)][slice(*tile.q)], keys[row % len(keys)][slice(*tile.k)]
        pairs = np.ix_(q, k)
        if tile.at is None:
            count[row][:, *pairs] += inside
            continue
        assert tile.at == (q[0], k[0]), "the mask is asked about other positions"
        assert (np.diff(q) == 1).all()
        assert (np.diff(k) == 1).all()
        assert inside.all()
        count[row][:, *pairs] += visible[row % len(visible)][:, *pairs]


@st.composite
def ascending_spans(draw: st.DrawFn, length: int) -> list[Span]:
    """One to four spans that do not overlap, some of which may touch."""
    ends = sorted(draw(st.sets(st.integers(0, length), min_size=2, max_size=8)))
    chosen = [Span(*ends) for ends in pairwise(ends)]
    return draw(st.sampled_from([chosen, chosen[::2], chosen[:1], chosen[-1:]]))


@st.composite
def masked(draw: st.DrawFn, longest: int = 420) -> Case:
    """Any mask on a sequence that may have several blocks of 128."""
    length = draw(st.one_of(st.integers(1, 20), st.integers(100, longest)))
    batch = draw(st.integers(1, 3))
    options: dict[str, Any] = draw(mask_options(batch, length))
    return Case(1, 1, batch=batch, length=length, **options)


@st.composite
def stored(draw: st.DrawFn, case: Case) -> list[list[Span]]:
    """Spans for every row of the batch, or the same for all."""
    rows = draw(st.sampled_from([1, max(1, len(case.documents))]))
    return [draw(ascending_spans(case.total)) for _ in range(rows)]


def positions(some: list[list[Span]]) -> list[np.ndarray]:
    return [np.concatenate([np.arange(*span) for span in spans]) for spans in some]


@examples(300)
@given(case=masked(), data=st.data())
def test_tiles_cover_the_visible_pairs_once(case: Case, data: st.DataObject) -> None:
    queries, keys = (data.draw(stored(case)) for _ in range(2))
    visible, mask = seen(case), planned(case)
    asked = np.zeros((len(visible), 1, *visible.shape[2:]), bool)
    for row in range(len(asked)):
        asked[row, 0][np.ix_(*(some[row % len(some)] for some in (positions(queries), positions(keys))))] = True
    count = np.zeros(visible.shape, int)
    for tile in plan_tiles(queries, keys, mask):
        inside = area_of(tile)
        assert inside.any(1).all(), "a row of a tile sees nothing"
        assert tile.area == inside.sum()
        assert tile.q[0] < tile.q[1]
        assert tile.k[0] < tile.k[1]
        add_covered(count, tile, positions(queries), positions(keys), visible)
    assert np.array_equal(count, visible & asked)


@examples(200)
@given(case=masked(), data=st.data())
def test_split_loses_and_repeats_nothing(case: Case, data: st.DataObject) -> None:
    queries, keys = (data.draw(stored(case)) for _ in range(2))
    tiles, visible = plan_tiles(queries, keys, planned(case)), seen(case)
    parts = split_tiles(tiles)
    counts = []
    for some in (tiles, parts[0] + parts[1]):
        counts.append(np.zeros(visible.shape, int))
        for tile in some:
            add_covered(counts[-1], tile, positions(queries), positions(keys), visible)
    assert np.array_equal(*counts)
    areas = [sum(tile.area for tile in part) for part in parts]
    # The lighter part takes the next tile, and the smallest come last.
    if len(tiles) > 1:
        assert abs(areas[0] - areas[1]) <= max(tile.area for tile in tiles)  # no comparison: of pairs of tokens


@pytest.mark.parametrize("is_causal", [False, True])
def test_split_halves_a_single_tile(is_causal: bool) -> None:
    first, second = split_tiles([Tile((0, 8), (0, 8), CAUSAL if is_causal else FULL)])
    areas = [sum(tile.area for tile in part) for part in (first, second)]
    assert areas == ([16, 20] if is_causal else [32, 32])


@examples(300)
@given(
    rows=st.integers(1, 9), columns=st.integers(1, 9),
    low=st.none() | st.integers(-9, 9), high=st.none() | st.integers(-9, 9),
)  # fmt: skip
def test_area_of_any_band(rows: int, columns: int, low: int | None, high: int | None) -> None:
    tile = Tile((2, 2 + rows), (5, 5 + columns), Band(low, high))
    assert tile.area == area_of(tile).sum()


@examples(300)
@given(case=masked().filter(lambda case: not case.mask), data=st.data())
def test_reach_is_all_that_is_seen_and_no_more(case: Case, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, case.total - 1))
    stop = data.draw(st.integers(start + 1, case.total))
    mask, visible = planned(case), seen(case)[:, 0]
    for row in range(mask.rows):
        found = np.flatnonzero(visible[row, start:stop].any(0))
        reach = mask.reach(row, Span(start, stop))
        assert found.tolist() == list(range(max(0, reach.start), min(case.total, reach.stop)))
        some = data.draw(ascending_spans(case.total))[0]
        sees = visible[row, start:stop, slice(*some)].any()
        assert mask.sees(row, Span(start, stop), some) == sees


def test_rows_that_need_the_same_share_tiles() -> None:
    span = [[Span(0, 8)]]
    tiles = plan_tiles(span, span, Mask(documents=((0, 8), (0, 8), (0, 3, 8))))
    assert [(tile.q, tile.k, tile.batch) for tile in tiles] == [
        ((0, 8), (0, 8), (0, 2)),
        ((0, 3), (0, 3), (2, 3)),
        ((3, 8), (3, 8), (2, 3)),
    ]


def test_a_window_is_few_tiles() -> None:
    """A narrow window over many blocks: nearly every pair computed is seen, in a call for every block."""
    span = [[Span(0, 4096)]]
    tiles = plan_tiles(span, span, Mask(left=64, right=0))
    rectangles = sum((tile.q[1] - tile.q[0]) * (tile.k[1] - tile.k[0]) for tile in tiles)
    seen = sum(tile.area for tile in tiles)
    assert seen == 65 * 4096 - 64 * 65 / 2
    assert len(tiles) <= 4096 / 128 + 2
    assert rectangles <= 3 * seen


def schedule_of(
    mesh: tuple[int, ...],
    index: int,
    length: int,
    *,
    order: str = "head_tail",
    mask: Mask = IS_CAUSAL,
    published: bool = False,
    stationary: str = "q",
    backward: bool = False,
) -> Schedule:
    ring, team, *more = mesh
    ulysses_rank, inner = divmod(index, ring * team)
    place = Coordinate(ring, team, *divmod(inner, team), *(more or (1,)), ulysses_rank)
    sequences = Sequences(length, length, order, mask)
    return make_schedule(place, sequences, published=published, stationary=stationary, backward=backward)


def area(schedule: Schedule) -> int:
    """Pairs that are computed; in rows of the batch that differ, of all of them."""
    return sum(
        tile.area * (tile.batch[1] - tile.batch[0] if tile.batch else 1)
        for step in schedule.steps
        if isinstance(step, Attend)
        for tile in step.tiles
    )


def causal_area(rows: list[int]) -> int:
    return sum(row + 1 for row in rows)


@pytest.mark.parametrize(
    "size", [pytest.param(size, marks=() if size <= 24 or size == 64 else pytest.mark.whole) for size in range(1, 65)]
)
def test_head_tail_is_the_same_work_on_every_rank(size: int) -> None:
    length = 4 * size
    for mesh in meshes(size):
        for backward, stationary in [(False, "q"), (True, "q"), (True, "kv")]:
            work = {area(schedule_of(mesh, i, length, backward=backward, stationary=stationary)) for i in range(size)}
            assert len(work) == 1
            assert work.pop() * size == causal_area(range(length))


@pytest.mark.parametrize("size", [2, 4, 6, 8, 12, 16])
def test_head_tail_is_the_same_work_under_ulysses(size: int) -> None:
    """For every head of it, so that equal heads make equal work."""
    length = 2 * size
    for *mesh, ulysses in ulysses_meshes(size):
        for backward, stationary in [(False, "q"), (True, "q"), (True, "kv")]:
            inner = size // ulysses
            some = [*range(inner), size - 1]
            work = {
                area(schedule_of((*mesh, ulysses), i, length, backward=backward, stationary=stationary)) for i in some
            }
            assert len(work) == 1
            assert work.pop() * inner == causal_area(range(length))


@examples(200)
@given(size=st.integers(1, 32), length=st.integers(1, 300), data=st.data())
def test_head_tail_of_any_length_is_nearly_the_same_work(size: int, length: int, data: st.DataObject) -> None:
    """At most N (s + u) / 2 pairs on any rank, s being the most tokens that one attends: on equal shards N s / 2."""
    *mesh, ulysses = data.draw(st.sampled_from(ulysses_meshes(size)))
    inner = size // ulysses
    sizes = shard_sizes(length, (ulysses, *mesh))
    most = max(sum(sizes[i::inner]) for i in range(inner))
    work = [area(schedule_of((*mesh, ulysses), i, length)) for i in range(inner)]
    assert sum(work) == causal_area(range(length))
    assert max(work) <= length * (most + ulysses) / 2


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


@examples(200)
@given(size=st.integers(1, 64), data=st.data())
def test_off_the_diagonal_a_step_is_at_most_two_kernel_calls(size: int, data: st.DataObject) -> None:
    mesh = data.draw(st.sampled_from(meshes(size)))
    stationary = data.draw(st.sampled_from(["q", "kv"]))
    index = data.draw(st.integers(0, size - 1))
    calls: dict[int, int] = {}
    for step in schedule_of(mesh, index, 4 * size, stationary=stationary, backward=True).steps:
        if isinstance(step, Attend):
            calls[step.block] = calls.get(step.block, 0) + len(step.tiles)
    assert all(count <= 2 for block, count in calls.items() if block > 0)
    assert calls[0] <= 7
