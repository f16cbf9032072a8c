"""The tile plan covers what a mask leaves, once, with few kernel calls, and evenly."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases import held
from tests.strategies import meshes
from wallfacer_dt.algorithms.schedule import Attend, Schedule, make_schedule
from wallfacer_dt.algorithms.tiles import Tile, plan_tiles, split_tiles
from wallfacer_dt.layout import Span
from wallfacer_dt.mesh import Coordinate

CHUNK = 3


@st.composite
def spans(draw: st.DrawFn) -> list[Span]:
    chosen = draw(st.sets(st.integers(0, 9), min_size=1, max_size=6))
    return [Span(c * CHUNK, (c + 1) * CHUNK) for c in sorted(chosen)]


def positions(some: list[Span]) -> np.ndarray:
    return np.concatenate([np.arange(*span) for span in some])


def covered(tiles: tuple[Tile, ...], shape: tuple[int, int]) -> np.ndarray:
    """How often each (query row, key row) is computed."""
    count = np.zeros(shape, int)
    for tile in tiles:
        block = count[slice(*tile.q), slice(*tile.k)]
        block += np.tri(*block.shape, dtype=int) if tile.is_causal else 1
    return count


@given(queries=spans(), keys=spans(), is_causal=st.booleans())
def test_tiles_cover_the_visible_pairs_once(queries: list[Span], keys: list[Span], is_causal: bool) -> None:
    visible = positions(queries)[:, None] >= positions(keys)[None, :] if is_causal else None
    expected = np.ones((len(positions(queries)), len(positions(keys))), int) if visible is None else visible
    tiles = plan_tiles(queries, keys, is_causal)
    assert np.array_equal(covered(tiles, expected.shape), expected)
    assert sum(tile.area for tile in tiles) == expected.sum()
    assert all(tile.q[0] < tile.q[1] and tile.k[0] < tile.k[1] for tile in tiles)


@given(queries=spans(), keys=spans(), is_causal=st.booleans())
def test_split_loses_and_repeats_nothing(queries: list[Span], keys: list[Span], is_causal: bool) -> None:
    tiles = plan_tiles(queries, keys, is_causal)
    shape = (len(positions(queries)), len(positions(keys)))
    first, second = split_tiles(tiles) if tiles else ((), ())
    assert np.array_equal(covered(first + second, shape), covered(tiles, shape))


@pytest.mark.parametrize("is_causal", [False, True])
def test_split_halves_a_single_tile(is_causal: bool) -> None:
    first, second = split_tiles([Tile((0, 8), (0, 8), is_causal)])
    areas = [sum(tile.area for tile in part) for part in (first, second)]
    assert areas == ([16, 20] if is_causal else [32, 32])


def schedule_of(mesh: tuple[int, int], index: int, shard: int, **options: object) -> Schedule:
    ring, team = mesh
    defaults = {"order": "head_tail", "is_causal": True, "published": False, "stationary": "q", "backward": False}
    return make_schedule(Coordinate(ring, team, *divmod(index, team)), shard, **(defaults | options))


def area(schedule: Schedule) -> int:
    return sum(tile.area for step in schedule.steps if isinstance(step, Attend) for tile in step.tiles)


def causal_area(rows: list[int]) -> int:
    return sum(row + 1 for row in rows)


@pytest.mark.parametrize("size", range(1, 65))
def test_head_tail_is_the_same_work_on_every_rank(size: int) -> None:
    shard = 4
    for mesh in meshes(size):
        for backward, stationary in [(False, "q"), (True, "q"), (True, "kv")]:
            work = {area(schedule_of(mesh, i, shard, backward=backward, stationary=stationary)) for i in range(size)}
            total = causal_area(range(shard * size))
            assert len(work) == 1
            assert work.pop() * size == total


def test_contiguous_is_not() -> None:
    """The counter-example: without it the test above could not fail."""
    work = {area(schedule_of((4, 1), i, 4, order="contiguous")) for i in range(4)}
    assert len(work) == 4
    assert sum(causal_area(held(i, 4, "contiguous", 16)) for i in range(4)) == 16 * 17 / 2


@settings(max_examples=200)
@given(size=st.integers(1, 64), data=st.data())
def test_off_the_diagonal_a_step_is_at_most_two_kernel_calls(size: int, data: st.DataObject) -> None:
    mesh = data.draw(st.sampled_from(meshes(size)))
    stationary = data.draw(st.sampled_from(["q", "kv"]))
    index = data.draw(st.integers(0, size - 1))
    calls: dict[int, int] = {}
    for step in schedule_of(mesh, index, 4, stationary=stationary, backward=True).steps:
        if isinstance(step, Attend):
            calls[step.block] = calls.get(step.block, 0) + len(step.tiles)
    assert all(count <= 2 for block, count in calls.items() if block > 0)
    assert calls[0] <= 7
