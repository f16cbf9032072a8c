"""What is received, counted from the collectives that run, is what is told, and what closed formulas say."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from math import ceil
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.cases import Case, held, run, shard_sizes
from tests.closed_volumes import Closed
from tests.pairwise import few, tiers
from tests.strategies import any_case, cases, examples, meshes, ulysses_meshes
from tests.test_segments import planned
from tests.test_segments import seen as pairs_seen
from wallfacer_dt import AttentionVolume, attention_volume, context_mesh, context_parallel_attention
from wallfacer_dt.algorithms.flows import Flows, Shape, everyone
from wallfacer_dt.algorithms.masks import Mask
from wallfacer_dt.algorithms.sequences import Sequences
from wallfacer_dt.algorithms.steps import CONTEXT
from wallfacer_dt.layout import ORDERS
from wallfacer_dt.mesh import ULYSSES_AXIS, Coordinate
from wallfacer_dt.testing import RankPool, Traffic, count_collectives
from wallfacer_dt.testing.fake import fake_world

GIB = 2**30
SAME = [
    "ring", "team", "ulysses", "batch", "heads", "kv_heads", "shared_dim", "schedule", "rotate", "rotate_forward",
    "replicated",
]  # fmt: skip


def told(case: Case, index: int) -> AttentionVolume:
    """As the package tells it, and the closed formulas with it."""
    call: dict[str, Any] = {name: getattr(case, name) for name in SAME} | {
        "length": case.total,
        "kv_length": case.kv_total,
        "head_dim": case.head_dim + case.shared_dim,
        "value_dim": case.value_dim or case.head_dim,
        "dtype": getattr(torch, case.dtype),
        "hops": hops_of(case),
        "index": index,
    }
    return told_of(call)


def told_of(call: dict[str, Any]) -> AttentionVolume:
    volume = attention_volume(**call)
    assert volume == Closed(**call).volume()
    return volume


def hops_of(case: Case) -> set[int] | None:
    """From the geometry: at which distances round the ring somebody sees something, if there may be others."""
    left, right = (None if reach == -1 else reach for reach in case.window_size or (None, None))
    right = 0 if case.is_causal else right
    if not (case.mask or case.documents) and left is None and right in (None, 0):
        return None
    i, j = np.ogrid[: case.total, : case.total]
    seen = pairs_seen(case).any((0, 1)) if case.mask else np.ones((case.total, case.total), bool)
    seen &= (j >= i - left) if left is not None else seen
    seen &= (j <= i + right) if right is not None and not case.mask else seen
    ids = [np.repeat(np.arange(len(row)), row) for row in case.documents]
    if ids:
        seen &= np.any([row[:, None] == row for row in ids], 0)
    rank = np.empty(case.total, int)
    for index in range(case.size):
        rank[held(index, case.axes, case.order, case.total)] = index % (case.ring * case.team) // case.team
    distances = (rank[:, None] - rank) % case.ring
    return set(distances[seen].tolist()) - {0}


ANY = st.sampled_from(["float64", "float32", "bfloat16"])


@pytest.mark.ranks
@pytest.mark.parametrize("size", range(1, 9))
@examples(12)
@given(data=st.data())
def test_counted_on_threads(threads: Callable[[int], RankPool], size: int, data: st.DataObject) -> None:
    assert_counted(threads, data.draw(cases(range(size, size + 1), dtype=data.draw(ANY))))


@pytest.mark.ranks
@pytest.mark.parametrize("size", few(range(2, 9), {2, 3, 4, 6, 8}))
@examples(20, today=12)
@given(data=st.data())
def test_any_case_counted_on_threads(threads: Callable[[int], RankPool], size: int, data: st.DataObject) -> None:
    """With Ulysses, heads and lengths that do not divide, other head dims, cross attention, windows, documents."""
    case = data.draw(any_case(size, dtype=data.draw(ANY), kernel="auto", inputs="normal", softcap=None, replicated=0))
    assert_counted(threads, case)


@pytest.mark.ranks
@pytest.mark.parametrize("ring", [4, 5])
@pytest.mark.parametrize("rotate", ["kv", "q"])
def test_a_window_that_looks_both_ways_has_two_results_come_home(
    threads: Callable[[int], RankPool], ring: int, rotate: str
) -> None:
    """Each in the inputs' dtype: of blocks that come one way round the ring, and of those that come the other."""
    case = Case(ring, 1, shard=8, window_size=(1, 1), dtype="bfloat16", rotate=rotate, rotate_forward=rotate)
    assert hops_of(case) == {1, ring - 1}
    assert_counted(threads, case)


@pytest.mark.ranks
@pytest.mark.parametrize("size", [3, 4])
@examples(10)
@given(data=st.data())
def test_any_case_counted_on_processes(ranks: Callable[[int], RankPool], size: int, data: st.DataObject) -> None:
    assert_counted(ranks, data.draw(any_case(size, replicated=0)))


def assert_counted(ranks: Callable[[int], RankPool], case: Case) -> None:
    for index, _, counted in ranks(case.size).run(run, case):
        volume = told(case, index)
        assert counted == {"forward": volume.forward.bytes, "backward": volume.backward.bytes}


def count_on_fake_ranks(case: Case, rank: int, *, backward: bool = True) -> Traffic:
    """One rank of a world that does not exist, on tensors without contents; the rank is its sequence index."""
    sizes = [shard_sizes(length, case.axes)[rank] for length in (case.total, case.kv_total)]
    with fake_world(case.size, rank):
        mesh = context_mesh("cpu", case.ring, case.team, ulysses=case.ulysses, placement=case.placement)
        q_shape = (case.batch, case.heads, sizes[0], case.head_dim + case.shared_dim)
        k_shape = (case.batch, case.kv_heads, sizes[1], case.head_dim)
        v_shape = (*k_shape[:3], case.value_dim or case.head_dim)
        options = case.options_on(mesh)
        dtype = getattr(torch, case.dtype)
        with FakeTensorMode(), count_collectives(mesh) as traffic:
            q, k, v = (torch.empty(s, dtype=dtype, requires_grad=True) for s in (q_shape, k_shape, v_shape))
            if case.shared_dim:
                options["k_shared"] = torch.empty(case.batch, 1, sizes[1], case.shared_dim, dtype=dtype)
                options["k_shared"].requires_grad_()
            out = context_parallel_attention(q, k, v, mesh, **options)
            if backward:
                out.backward(torch.empty_like(out))
        return traffic


@st.composite
def many_ranks(draw: st.DrawFn) -> Case:
    """Up to 64 ranks, with heads that need not divide among those that split them."""
    ring, team, ulysses = draw(st.sampled_from(ulysses_meshes(draw(st.integers(1, 64)))))
    kv_heads = draw(st.integers(1, 9))
    group = draw(st.integers(ceil(ulysses / kv_heads), ceil(ulysses / kv_heads) + 3))
    published = ring % team == 0 and draw(st.booleans())
    case = Case(
        ring, team, ulysses=ulysses, batch=draw(st.integers(1, 2)), heads=kv_heads * group, kv_heads=kv_heads,
        head_dim=draw(st.integers(1, 5)) * 8, dtype=draw(ANY), schedule="published" if published else "2d",
        rotate=draw(st.sampled_from(["q", "auto"] if published else ["kv", "q", "auto"])),
        rotate_forward=draw(st.sampled_from(["kv", "auto"] if published else ["kv", "q", "auto"])),
        order=draw(st.sampled_from(["contiguous", "head_tail"])),
    )  # fmt: skip
    length = draw(st.integers(1, 4 * case.size))
    options: dict[str, Any] = draw(
        st.sampled_from(
            [
                {"kv_length": draw(st.integers(1, 4 * case.size))},
                {"is_causal": True},
                {"is_causal": True, "window_size": (draw(st.integers(0, length)), 0)},
                {"window_size": (draw(st.integers(0, 8)), draw(st.integers(0, 8)))},
            ]
        )
    )
    further = draw(st.sampled_from([{}, {"value_dim": 8}, {"value_dim": 16, "shared_dim": 8}, {"shared_dim": 4}]))
    return replace(case, length=length, **options, **further)


@pytest.mark.slow
@examples(12, today=8)
@given(data=st.data())
def test_counted_on_up_to_64_fake_ranks(data: st.DataObject) -> None:
    dtype = data.draw(ANY)
    case = data.draw(cases(range(1, 65), dtype=dtype, placement="team_in_node", kernel="auto"))
    assert_counted_on_fake_ranks(case, data.draw(st.integers(0, case.size - 1)))


@pytest.mark.slow
@examples(12, today=8)
@given(data=st.data())
def test_any_case_counted_on_up_to_64_fake_ranks(data: st.DataObject) -> None:
    case = data.draw(many_ranks())
    assert_counted_on_fake_ranks(case, data.draw(st.integers(0, case.size - 1)))


def assert_counted_on_fake_ranks(case: Case, rank: int) -> None:
    traffic, volume = count_on_fake_ranks(case, rank), told(case, rank)
    assert traffic.forward.received_bytes == volume.forward.bytes
    assert traffic.backward.received_bytes == volume.backward.bytes
    assert traffic.forward.calls == traffic.backward.calls == 1


@examples(400)
@given(case=many_ranks(), data=st.data())
def test_told_is_what_closed_formulas_say(case: Case, data: st.DataObject) -> None:
    """On up to 64 ranks, at any of them, with hops of any distances, replicated tokens, and shards cut by document."""
    call: dict[str, Any] = {name: getattr(case, name) for name in SAME} | {
        "length": case.length,
        "kv_length": data.draw(st.none() | st.integers(1, 4 * case.size)),
        "head_dim": case.head_dim + case.shared_dim,
        "value_dim": case.value_dim or None,
        "dtype": getattr(torch, case.dtype),
        "hops": data.draw(st.none() | st.sets(st.sampled_from(range(1, case.ring)) if case.ring > 1 else st.nothing())),
        "index": data.draw(st.integers(0, case.size - 1)),
        "order": data.draw(st.sampled_from(ORDERS)),
        "replicated": data.draw(st.sampled_from([0, 1, 5, 70])),
    }
    told_of(call)


@example(case=Case(2, 2, ulysses=4, heads=10, kv_heads=2), backward=True)  # whose ranks have one group of heads, or two
@examples(60)
@given(case=many_ranks(), backward=st.booleans())
def test_flows_of_all_ranks_are_those_of_each(case: Case, backward: bool) -> None:
    """From whom, how often and how much; once with arrays of ranks and once with numbers."""
    shape = Shape(case.batch, case.heads, case.kv_heads, case.head_dim + case.shared_dim, 8, case.shared_dim)
    replicated = 0 if case.is_causal or case.window_size else 3
    sequences = Sequences(case.total, case.kv_total, case.order, planned(case), replicated)
    rotate = ("q" if backward else "kv") if case.schedule == "published" else "q" if case.batch == 1 else "kv"
    how = shape, sequences, case.schedule, rotate, backward

    def received(place: Coordinate) -> Counter[tuple[Any, ...]]:
        found = Counter()
        for flow in Flows(place, *how):
            content = flow.content
            arrays = (flow.receiver, flow.sources, content.sent, content.carried, content.statistics, flow.comes)
            for *one, comes in zip(*(x.flatten().tolist() for x in np.broadcast_arrays(*arrays)), strict=True):
                if comes:
                    assert flow.axis == ULYSSES_AXIS or any(one[2:]), "what comes is something"
                    for group in flow.groups:
                        found[flow.kind, flow.side, flow.axis, group, *one] += flow.times
        return found

    inner = case.ring * case.team
    each = Counter()
    for index in range(case.size):
        place = Coordinate(case.ring, case.team, *divmod(index % inner, case.team), case.ulysses, index // inner)
        each += received(place)
    assert received(everyone(case.ulysses, case.ring, case.team)) == each


@examples(100)
@given(
    ring=st.integers(1, 12), team=st.integers(1, 4), ulysses=st.integers(1, 3), shard=st.integers(1, 6),
    left=st.integers(0, 80),
)  # fmt: skip
def test_hops_of_a_causal_window(ring: int, team: int, ulysses: int, shard: int, left: int) -> None:
    """A team's shards are one hop: a query's window of ``left`` tokens before it begins so many teams back."""
    case = Case(ring, team, ulysses=ulysses, shard=shard, is_causal=True, window_size=(left, 0))
    assert hops_of(case) == set(range(1, 1 + min(ring - 1, ceil(left / (team * shard)))))


# WallFacer section 3.2.2: P=64, B=1, N=65536, H=6656 (52 heads of 128), bfloat16, so that U is 13 MiB.
PAPER = {"shard": 1024, "heads": 52, "kv_heads": 52, "head_dim": 128, "dtype": "bfloat16"}
UNIT = 1024 * 6656


@pytest.mark.parametrize(
    ("team", "schedule", "units", "gib"),
    [(1, "2d", 126, 1.600), (4, "published", 44, 0.559), (4, "2d", 36, 0.457), (8, "2d", 28, 0.355)],
)
def test_the_papers_example(team: int, schedule: str, units: int, gib: float) -> None:
    """Payload in units of one rank's query shard; the paper's 1.625 GiB for the ring counts P hops instead of P-1."""
    case = Case(64 // team, team, schedule=schedule, **PAPER)
    volume = told(case, index=1).forward
    assert volume.payload == units * UNIT
    assert volume.payload * 2 / GIB == pytest.approx(gib, abs=1e-3)
    traffic = count_on_fake_ranks(case, rank=1)
    assert traffic.forward.received_bytes == volume.bytes
    assert volume.bytes == 2 * volume.payload + 4 * volume.statistics


def test_the_papers_example_by_kind() -> None:
    """Equations 3 and 4: 0.152 GiB collective and 0.406 GiB point to point."""
    received = count_on_fake_ranks(Case(16, 4, schedule="published", **PAPER), rank=1).forward.received
    point_to_point = received["all_to_all_single", "cp_ring"] + received["all_to_all_single", "cp"]
    statistics = 3 * 1024 * 52 * 4
    collective = received["all_gather_into_tensor", "cp_team"] + received["all_to_all_single", "cp_team"] - statistics
    assert point_to_point == 32 * UNIT * 2
    assert collective == 12 * UNIT * 2
    assert point_to_point / GIB == pytest.approx(0.406, abs=1e-3)
    assert collective / GIB == pytest.approx(0.152, abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ring", "team", "schedule"),
    few([(1024, 1, "2d"), (128, 8, "2d"), (128, 8, "published"), (32, 32, "2d")], {(128, 8, "published")}),
)
def test_1024_ranks(ring: int, team: int, schedule: str) -> None:
    case = Case(ring, team, shard=64, heads=8, kv_heads=1, head_dim=128, dtype="bfloat16", schedule=schedule)
    traffic, volume = count_on_fake_ranks(case, rank=1023, backward=team > 1), told(case, 1023)
    assert traffic.forward.received_bytes == volume.forward.bytes
    if schedule == "2d":
        assert volume.forward.payload == (16 * (team - 1) + 2 * (ring - 1)) * 64 * 128
    if team > 1:  # a thousand hops of fake tensors take long enough one way
        assert traffic.backward.received_bytes == volume.backward.bytes


@pytest.mark.parametrize("team", [2, 3, 4])
def test_rank_1_is_never_its_own_target_in_a_published_placement(team: int) -> None:
    """Nor on the way back from it: so it is the rank that volumes are of where none is told."""
    for ring in range(team, 6 * team + 1, team):
        whole = Sequences(ring * team, ring * team, "contiguous", Mask())
        flows = Flows(everyone(1, ring, team), Shape(1, 1, 1, 1, 1), whole, "published", "q", True)
        placed = [flow.comes.all((0, 1)) for flow in flows.inner() if flow.axis == CONTEXT]
        assert len(placed) == 2
        assert all(comes[1] for comes in placed)


@given(size=st.integers(1, 64), data=st.data())
def test_formulas_of_the_design(size: int, data: st.DataObject) -> None:
    """In units of U, g = kv heads / heads: two ways of the forward, and two of the backward."""
    ring, team = data.draw(st.sampled_from(meshes(size)))
    kv_heads, group = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 8))
    shape = {"batch": 1, "length": 2 * size, "heads": kv_heads * group, "kv_heads": kv_heads, "head_dim": 4}
    per_kv = 2 * kv_heads * 4  # g * U
    kv, q = (
        attention_volume(ring, team, dtype=torch.float32, rotate=rotate, rotate_forward=rotate, **shape)
        for rotate in ("kv", "q")
    )
    assert kv.forward.payload == (2 * group * (team - 1) + 2 * (ring - 1)) * per_kv
    assert q.forward.payload == (2 * (team - 1) + 2 * group * (ring - 1)) * per_kv
    assert kv.backward.payload == (3 * group * (team - 1) + 4 * (ring - 1)) * per_kv
    assert q.backward.payload == (4 * (team - 1) + 3 * group * (ring - 1)) * per_kv
    auto = attention_volume(ring, team, dtype=torch.float32, **shape)
    assert auto.forward.payload == min(kv.forward.payload, q.forward.payload)
    assert auto.backward.payload == min(kv.backward.payload, q.backward.payload)
    if ring % team == 0 and team > 1:
        paper = attention_volume(ring, team, dtype=torch.float32, schedule="published", **shape)
        assert paper.forward.payload == (2 * group + 2) * (team - 1) * per_kv + 2 * (size // team) * per_kv
        assert paper.backward.payload == ((3 * group + 4) * (team - 1) + 3 * group * (size // team)) * per_kv


def test_grouped_heads_prefer_rotating_keys_and_values() -> None:
    shape = {"batch": 1, "length": 64, "heads": 16, "head_dim": 64, "dtype": torch.bfloat16}
    assert attention_volume(8, 1, kv_heads=2, **shape).rotate == "kv"
    assert attention_volume(8, 1, kv_heads=16, **shape).rotate == "q"


SHAPE = {"batch": 2, "length": 240, "head_dim": 8, "dtype": torch.bfloat16}


@pytest.mark.parametrize("ulysses", [2, 3, 4, 6])
@pytest.mark.parametrize("kv_heads", [12, 24])
def test_ulysses_alone_by_hand(ulysses: int, kv_heads: int) -> None:
    """In units of U, (u-1)/u of q, k and v come and of out go; then of four queries, k and v, and three gradients."""
    volume = attention_volume(1, 1, ulysses=ulysses, heads=24, kv_heads=kv_heads, **SHAPE)
    g = Fraction(kv_heads, 24)
    shard = 2 * 240 // ulysses * 24 * 8
    share = Fraction(ulysses - 1, ulysses)
    assert volume.forward.payload == share * (2 + 2 * g) * shard
    assert volume.backward.payload == share * (3 + 4 * g) * shard
    assert volume.forward.statistics == share * shard // 8
    assert volume.backward.statistics == share * 2 * shard // 8
    for one in (volume.forward, volume.backward):
        assert one.bytes == 2 * one.payload + 4 * one.statistics


def test_one_key_head_for_all_by_hand() -> None:
    """Each of 4 ranks needs the one key head of all 3 x 60 others' tokens, and gives as much of its gradient back."""
    volume = attention_volume(1, 1, ulysses=4, heads=8, kv_heads=1, **SHAPE)
    token = 2 * 8  # batch x head dim
    assert volume.forward.payload == 180 * token * (2 + 2) + 60 * token * 6
    assert volume.backward.payload == 180 * token * (2 * 2 + 2) + 60 * token * 6 + 60 * token * 2 * 3
    assert volume.backward.statistics == 180 * 2 * 2 * 2


def test_ulysses_round_a_ring_by_hand() -> None:
    """Behind the exchange the ring works on u times the tokens and a u-th of the heads."""
    both = attention_volume(3, 2, ulysses=4, heads=8, kv_heads=4, rotate="kv", **SHAPE)
    alone = attention_volume(1, 1, ulysses=4, heads=8, kv_heads=4, **(SHAPE | {"length": 40}))
    inner = attention_volume(3, 2, heads=2, kv_heads=1, rotate="kv", **SHAPE)
    for way in ("forward", "backward"):
        got, first, second = (getattr(volume, way) for volume in (both, alone, inner))
        assert got.payload == first.payload + second.payload
        assert got.statistics == first.statistics + second.statistics
        assert got.bytes == first.bytes + second.bytes


def test_hops_that_are_left_out_by_hand() -> None:
    shape = SHAPE | {"heads": 4, "kv_heads": 2}
    for hops in range(4):
        volume = attention_volume(12, 1, hops=range(1, hops + 1), rotate="kv", **shape)
        assert volume.forward.payload == hops * 2 * (2 * 20 * 2 * 8)
        assert volume.backward.payload == hops * 4 * (2 * 20 * 2 * 8)


@pytest.mark.parametrize("rotate", ["kv", "q"])
def test_results_come_home_one_way_or_both(rotate: str) -> None:
    """Half way round a ring counts as ahead, and what is ahead for keys is behind for queries."""
    shape = SHAPE | {"heads": 4, "kv_heads": 4}
    one, both = ([1, 2], [2, 3]) if rotate == "kv" else ([2, 3], [1, 2])
    once, twice = (attention_volume(4, 1, hops=hops, rotate=rotate, **shape).backward for hops in (one, both))
    assert once.payload == twice.payload
    # Of each result, 4 heads of 60 tokens of 8 elements, half the bytes on its last hop.
    assert once.bytes - twice.bytes == (2 if rotate == "kv" else 1) * (2 * 4 * 60 * 8) * 2


def test_hops_that_there_are_not() -> None:
    for hops in ([0], [4], [1, -1]):
        with pytest.raises(ValueError, match=r"hops must be distances from 1 to 3, got"):
            attention_volume(4, 1, hops=hops, **SHAPE, heads=4, kv_heads=2)


@pytest.mark.parametrize(
    ("changes", "kind", "said"),
    [
        ({"heads": 6, "kv_heads": 4}, ValueError, "heads must be a multiple of kv_heads, got 6 and 4"),
        ({"heads": 2, "kv_heads": 4}, ValueError, "heads must be a multiple of kv_heads, got 2 and 4"),
        ({"ulysses": 8}, ValueError, "ulysses must be at most heads, which it splits, got 8 and 4"),
        ({"ring": 0}, ValueError, "ring must be at least 1, got 0"),
        ({"length": 0}, ValueError, "length must be at least 1, got 0"),
        ({"kv_length": 0}, ValueError, "kv_length must be at least 1, got 0"),
        ({"value_dim": -3}, ValueError, "value_dim must be at least 1, got -3"),
        ({"shared_dim": 99}, ValueError, "shared_dim must be a part of head_dim, got 99 and"),
        ({"shared_dim": 8, "head_dim": 8}, ValueError, "shared_dim must be a part of head_dim, got 8 and 8"),
        ({"replicated": -9}, ValueError, "replicated must be at least 0, got -9"),
        ({"kv_heads": 2.0}, TypeError, r"kv_heads must be an int, got 2\.0"),
        ({"order": "zigzag"}, ValueError, "order must be one of"),
    ],
)
def test_calls_that_there_are_not(changes: dict, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        attention_volume(**({"ring": 2, "team": 1, "heads": 4, "kv_heads": 2} | SHAPE | changes))


@pytest.mark.parametrize("index", [-1, 8])
def test_a_rank_that_there_is_not(index: int) -> None:
    """It would count itself among those it receives from."""
    shape = SHAPE | {"heads": 4, "kv_heads": 2}
    with pytest.raises(ValueError, match=f"index must be from 0 to 7, a rank of these axes, got {index}"):
        attention_volume(2, 2, ulysses=2, index=index, **shape)


def test_uneven_shards_are_sent_as_long_as_the_longest() -> None:
    shape = SHAPE | {"heads": 4, "kv_heads": 2}
    uneven, even = (attention_volume(4, 2, **(shape | {"length": n})) for n in (237, 240))
    assert (uneven.forward, uneven.backward) == (even.forward, even.backward)


@pytest.mark.parametrize(
    ("ring", "team", "length", "ulysses"),
    tiers([(*one, n) for one in [(2, 2, 9), (4, 4, 33), (4, 2, 61), (6, 3, 101)] for n in (1, 2)], strength=1),
)
def test_published_hops_are_as_long_as_the_longest_teams_rows(ring: int, team: int, length: int, ulysses: int) -> None:
    """Of 9 tokens on 2 x 2 ranks a team holds 3 + 2 or 2 + 2, which is fewer than twice the longest shard."""
    case = Case(ring, team, ulysses=ulysses, shard=0, length=length, schedule="published", heads=4, kv_heads=2)
    for rank in (0, 1, case.size - 1):
        assert_counted_on_fake_ranks(case, rank)


def test_a_shared_key_counts_once() -> None:
    """Latent attention: of a key of 24 dims 8 are one head's, so 4 heads have 4 * (16 + 16) + 8 elements."""
    volume = attention_volume(2, 1, heads=4, kv_heads=4, value_dim=16, shared_dim=8, **(SHAPE | {"head_dim": 24}))
    assert volume.forward.payload == 2 * 120 * (4 * (16 + 16) + 8)


def test_cross_attention_moves_the_shorter_side() -> None:
    shape = {"batch": 1, "heads": 4, "kv_heads": 4, "head_dim": 16, "dtype": torch.float32}
    assert attention_volume(8, 1, length=800, kv_length=80, **shape).rotate == "kv"
    assert attention_volume(8, 1, length=80, kv_length=800, **shape).rotate == "q"
