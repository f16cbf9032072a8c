"""What is received, counted from the collectives that run, equals the closed formulas to the byte."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.cases import Case, fake_world, run
from tests.strategies import cases, meshes
from wallfacer_dt import AttentionVolume, attention_volume, context_mesh, context_parallel_attention
from wallfacer_dt.testing import RankPool, Traffic, count_collectives

GIB = 2**30


def formula(case: Case, index: int) -> AttentionVolume:
    return attention_volume(
        case.ring,
        case.team,
        batch=case.batch,
        length=case.shard * case.size,
        heads=case.heads,
        kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        dtype=getattr(torch, case.dtype),
        schedule=case.schedule,
        rotate=case.rotate,
        index=index,
    )


@pytest.mark.ranks
@pytest.mark.parametrize("size", range(1, 9))
@settings(max_examples=12)
@given(data=st.data())
def test_counted_on_real_ranks(ranks: Callable[[int], RankPool], size: int, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(["float64", "float32", "bfloat16"]))
    case = data.draw(cases(range(size, size + 1), dtype=dtype))
    for index, _, counted in ranks(size).run(run, case):
        volume = formula(case, index)
        assert counted == {"forward": volume.forward.bytes, "backward": volume.backward.bytes}


def count_on_fake_ranks(case: Case, rank: int, *, backward: bool = True) -> Traffic:
    """One rank of a world that does not exist, on tensors without contents."""
    with fake_world(case.size, rank):
        mesh = context_mesh("cpu", case.ring, case.team, placement=case.placement)
        q_shape = (case.batch, case.heads, case.shard, case.head_dim)
        kv_shape = (case.batch, case.kv_heads, case.shard, case.head_dim)
        dtype = getattr(torch, case.dtype)
        with FakeTensorMode(), count_collectives(mesh) as traffic:
            q, k, v = (torch.empty(s, dtype=dtype, requires_grad=True) for s in (q_shape, kv_shape, kv_shape))
            out = context_parallel_attention(q, k, v, mesh, **case.options)
            if backward:
                out.backward(torch.empty_like(out))
        return traffic


@pytest.mark.slow
@settings(max_examples=30)
@given(data=st.data())
def test_counted_on_up_to_64_fake_ranks(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(["float64", "float32", "bfloat16"]))
    case = data.draw(cases(range(1, 65), dtype=dtype, placement="team_in_node", kernel="auto"))
    rank = data.draw(st.integers(0, case.size - 1))
    traffic, volume = count_on_fake_ranks(case, rank), formula(case, rank)
    assert traffic.forward.received_bytes == volume.forward.bytes
    assert traffic.backward.received_bytes == volume.backward.bytes
    assert traffic.forward.calls == traffic.backward.calls == 1


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
    volume = formula(case, index=1).forward
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
    ("ring", "team", "schedule"), [(1024, 1, "2d"), (128, 8, "2d"), (128, 8, "published"), (32, 32, "2d")]
)
def test_1024_ranks(ring: int, team: int, schedule: str) -> None:
    case = Case(ring, team, shard=64, heads=8, kv_heads=1, head_dim=128, dtype="bfloat16", schedule=schedule)
    traffic, volume = count_on_fake_ranks(case, rank=1023, backward=team > 1), formula(case, 1023)
    assert traffic.forward.received_bytes == volume.forward.bytes
    if schedule == "2d":
        assert volume.forward.payload == (16 * (team - 1) + 2 * (ring - 1)) * 64 * 128
    if team > 1:  # a thousand hops of fake tensors take long enough one way
        assert traffic.backward.received_bytes == volume.backward.bytes


@given(size=st.integers(1, 64), data=st.data())
def test_formulas_of_the_design(size: int, data: st.DataObject) -> None:
    """In units of U, g = kv heads / heads: 2d forward 2(C-1) + 2g(R-1), and the backward's two ways."""
    ring, team = data.draw(st.sampled_from(meshes(size)))
    kv_heads, group = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 8))
    shape = {"batch": 1, "length": 2 * size, "heads": kv_heads * group, "kv_heads": kv_heads, "head_dim": 4}
    per_kv = 2 * kv_heads * 4  # g * U
    kv, q = (attention_volume(ring, team, dtype=torch.float32, rotate=rotate, **shape) for rotate in ("kv", "q"))
    assert kv.forward.payload == (2 * group * (team - 1) + 2 * (ring - 1)) * per_kv
    assert kv.backward.payload == (3 * group * (team - 1) + 4 * (ring - 1)) * per_kv
    assert q.backward.payload == (4 * (team - 1) + 3 * group * (ring - 1)) * per_kv
    auto = attention_volume(ring, team, dtype=torch.float32, rotate="auto", **shape)
    assert auto.backward.bytes == min(kv.backward.bytes, q.backward.bytes)
    if ring % team == 0 and team > 1:
        paper = attention_volume(ring, team, dtype=torch.float32, schedule="published", **shape)
        assert paper.forward.payload == (2 * group + 2) * (team - 1) * per_kv + 2 * (size // team) * per_kv
        assert paper.backward.payload == ((3 * group + 4) * (team - 1) + 3 * group * (size // team)) * per_kv


def test_grouped_heads_prefer_rotating_keys_and_values() -> None:
    shape = {"batch": 1, "length": 64, "heads": 16, "head_dim": 64, "dtype": torch.bfloat16}
    assert attention_volume(8, 1, kv_heads=2, **shape).rotate == "kv"
    assert attention_volume(8, 1, kv_heads=16, **shape).rotate == "q"
