"""Schedules of all ranks together, simulated: everyone's transfers fit, and every pair is computed once."""

from collections import Counter

from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases import held
from tests.strategies import meshes
from wallfacer_dt.algorithms.schedule import (
    CONTEXT,
    HOME,
    Attend,
    Carry,
    Gather,
    Move,
    Schedule,
    Start,
    Wait,
    make_schedule,
)
from wallfacer_dt.mesh import Coordinate

SHARD = 2


def all_schedules(ring: int, team: int, **options: object) -> dict[int, Schedule]:
    places = [Coordinate(ring, team, r, m) for r in range(ring) for m in range(team)]
    return {place.index: make_schedule(place, SHARD, **options) for place in places}


@st.composite
def options(draw: st.DrawFn) -> dict:
    size = draw(st.integers(1, 36))
    ring, team = draw(st.sampled_from(meshes(size)))
    published = ring % team == 0 and draw(st.booleans())
    backward = draw(st.booleans())
    stationary = "q" if not backward else "kv" if published else draw(st.sampled_from(["q", "kv"]))
    return {
        "ring": ring,
        "team": team,
        "order": draw(st.sampled_from(["contiguous", "head_tail"])),
        "is_causal": draw(st.booleans()),
        "published": published,
        "stationary": stationary,
        "backward": backward,
    }


def peer(index: int, transfer: Move | Carry, number: int, team: int) -> int:
    """Sequence index of a position that a transfer names on its axis."""
    return number if transfer.axis == CONTEXT else number * team + index % team


@settings(max_examples=150)
@given(options())
def test_what_is_sent_is_expected_and_every_pair_is_computed_once(chosen: dict) -> None:
    """Follow the positions each block holds through the transfers; nothing here knows the formulas."""
    team, size = chosen["team"], chosen["ring"] * chosen["team"]
    length = SHARD * size
    shard = {i: held(i, size, chosen["order"], length) for i in range(size)}
    schedules = all_schedules(**chosen)
    mates = {i: [i // team * team + m for m in range(team)] for i in range(size)}
    own, others = dict(shard), {i: [] for i in range(size)}
    blocks = {i: {0: shard[i]} for i in range(size)}
    computed: Counter = Counter()
    for step in range(len(schedules[0].steps)):
        now = {i: schedules[i].steps[step] for i in range(size)}
        kinds = {(type(s), type(getattr(s, "transfer", None)), getattr(s, "part", None)) for s in now.values()}
        assert len(kinds) == 1, "ranks run different programs"
        for i, s in now.items():
            if isinstance(s, Wait):
                match s.transfer:
                    case Gather(side) if side == chosen["stationary"]:
                        others[i] = sorted(p for m in mates[i] if m != i for p in shard[m])
                    case Gather():
                        blocks[i][0] = sorted(p for m in mates[i] for p in shard[m])
            if isinstance(s, Attend):
                stationary = own[i] if s.part == "own" else others[i]
                for tile in s.tiles:
                    rows, columns = (stationary, blocks[i][s.block])
                    if chosen["stationary"] == "kv":
                        rows, columns = columns, rows
                    for a in range(*tile.q):
                        for b in range(*tile.k):
                            if not tile.is_causal or b - tile.k[0] <= a - tile.q[0]:
                                computed[rows[a], columns[b]] += 1
        before = {i: dict(blocks[i]) for i in range(size)}
        for i, s in now.items():
            if isinstance(s, Start) and isinstance(s.transfer, Move | Carry):
                target = peer(i, s.transfer, s.transfer.to, team)
                answer = now[target].transfer
                assert peer(target, answer, answer.source, team) == i, "a receiver expects another sender"
            if isinstance(s, Wait) and isinstance(s.transfer, Move):
                source = peer(i, s.transfer, s.transfer.source, team)
                blocks[i][s.transfer.block] = before[source][max(s.transfer.block - 1, 0)]
            if isinstance(s, Wait) and isinstance(s.transfer, Carry) and s.transfer.into != HOME:
                source = peer(i, s.transfer, s.transfer.source, team)
                assert before[source][s.transfer.block] == before[i][s.transfer.into], "a gradient of other rows"
            if isinstance(s, Wait) and isinstance(s.transfer, Carry) and s.transfer.into == HOME:
                source = peer(i, s.transfer, s.transfer.source, team)
                assert before[source][s.transfer.block] == sorted(p for m in mates[i] for p in shard[m])
    expected = {(a, b) for a in range(length) for b in range(length) if a >= b or not chosen["is_causal"]}
    assert computed == Counter(expected)


@settings(max_examples=100)
@given(options())
def test_transfers_are_waited_for_once_and_hide_behind_work(chosen: dict) -> None:
    for schedule in all_schedules(**chosen).values():
        in_flight: dict = {}
        exposed = []
        for position, step in enumerate(schedule.steps):
            if isinstance(step, Start):
                assert step.transfer not in in_flight
                in_flight[step.transfer] = position
            elif isinstance(step, Wait):
                started = in_flight.pop(step.transfer)
                if not any(isinstance(s, Attend) and s.tiles for s in schedule.steps[started:position]):
                    exposed.append(step.transfer)
        assert not in_flight
        published = chosen["published"] and chosen["team"] > 1
        # Contiguous causal shards leave some ranks without anything visible to compute meanwhile.
        balanced = chosen["order"] == "head_tail" or not chosen["is_causal"]
        if balanced and not published:
            assert not exposed, "every transfer of the 2D schedule has work to hide behind"


def golden(ring: int, team: int, rank: tuple[int, int] = (0, 0), **chosen: object) -> str:
    defaults = {"order": "contiguous", "is_causal": False, "published": False, "stationary": "q", "backward": False}
    return str(make_schedule(Coordinate(ring, team, *rank), SHARD, **(defaults | chosen)))


def test_golden_ring_forward() -> None:
    assert_expected_inline(
        golden(3, 1),
        """\
start permute cp_ring kv[1] to 1 from 2
      attend own q x kv[0]: 0:2 x 0:2
wait  permute cp_ring kv[1] to 1 from 2
start permute cp_ring kv[2] to 1 from 2
      attend own q x kv[1]: 0:2 x 0:2
wait  permute cp_ring kv[2] to 1 from 2
      attend own q x kv[2]: 0:2 x 0:2""",
    )


def test_golden_ring_backward() -> None:
    assert_expected_inline(
        golden(3, 1, backward=True),
        """\
start permute cp_ring kv[1] to 1 from 2
      attend own q x kv[0]: 0:1 x 0:2
wait  permute cp_ring kv[1] to 1 from 2
start permute cp_ring kv[2] to 1 from 2
      attend own q x kv[1]: 0:2 x 0:2
start permute cp_ring dkv[1] into dkv[2] to 1 from 2
wait  permute cp_ring kv[2] to 1 from 2
      attend own q x kv[2]: 0:2 x 0:2
wait  permute cp_ring dkv[1] into dkv[2] to 1 from 2
start permute cp_ring dkv[2] into dkv[0] to 1 from 2
      attend own q x kv[0]: 1:2 x 0:2
wait  permute cp_ring dkv[2] into dkv[0] to 1 from 2""",
    )


def test_golden_2d_forward_causal() -> None:
    assert_expected_inline(
        golden(2, 2, (1, 0), order="head_tail", is_causal=True),
        """\
start all_gather cp_team q
start permute cp_ring kv[1] to 0 from 0
      attend own q x kv[0]: 1:2 x 0:1, 0:1 x 0:1 causal, 1:2 x 1:2 causal
wait  all_gather cp_team q
      attend others q x kv[0]: 0:2 x 0:1
wait  permute cp_ring kv[1] to 0 from 0
      attend others q x kv[1]: 0:2 x 0:1
start all_to_all cp_team partial q
      attend own q x kv[1]: 0:2 x 0:1
wait  all_to_all cp_team partial q""",
    )


def test_golden_2d_backward_rotating_kv() -> None:
    assert_expected_inline(
        golden(2, 2, backward=True),
        """\
start all_gather cp_team q
start permute cp_ring kv[1] to 1 from 1
      attend own q x kv[0]: 0:1 x 0:2
wait  all_gather cp_team q
      attend others q x kv[0]: 0:2 x 0:2
wait  permute cp_ring kv[1] to 1 from 1
      attend others q x kv[1]: 0:2 x 0:2
start all_to_all cp_team partial q
      attend own q x kv[1]: 0:2 x 0:2
start permute cp_ring dkv[1] into dkv[0] to 1 from 1
      attend own q x kv[0]: 1:2 x 0:2
wait  all_to_all cp_team partial q
wait  permute cp_ring dkv[1] into dkv[0] to 1 from 1""",
    )


def test_golden_2d_backward_rotating_q() -> None:
    assert_expected_inline(
        golden(2, 2, backward=True, stationary="kv"),
        """\
start all_gather cp_team kv
start permute cp_ring q[1] to 1 from 1
      attend own kv x q[0]: 0:1 x 0:2
wait  all_gather cp_team kv
      attend others kv x q[0]: 0:2 x 0:2
wait  permute cp_ring q[1] to 1 from 1
      attend others kv x q[1]: 0:2 x 0:2
start all_to_all cp_team partial kv
      attend own kv x q[1]: 0:2 x 0:2
start permute cp_ring dq[1] into dq[0] to 1 from 1
      attend own kv x q[0]: 1:2 x 0:2
wait  all_to_all cp_team partial kv
wait  permute cp_ring dq[1] into dq[0] to 1 from 1""",
    )


def test_golden_gather_only() -> None:
    assert_expected_inline(
        golden(1, 3),
        """\
start all_gather cp_team q
      attend own q x kv[0]: 0:1 x 0:2
wait  all_gather cp_team q
      attend others q x kv[0]: 0:4 x 0:2
start all_to_all cp_team partial q
      attend own q x kv[0]: 1:2 x 0:2
wait  all_to_all cp_team partial q""",
    )


def test_golden_published_forward() -> None:
    assert_expected_inline(
        golden(4, 2, (1, 0), published=True),
        """\
start all_gather cp_team kv
start all_gather cp_team q
wait  all_gather cp_team kv
start permute cp kv[0] to 1 from 4
wait  all_gather cp_team q
wait  permute cp kv[0] to 1 from 4
start permute cp_ring kv[1] to 0 from 0
      attend others q x kv[0]: 0:2 x 0:4
      attend own q x kv[0]: 0:2 x 0:4
wait  permute cp_ring kv[1] to 0 from 0
      attend others q x kv[1]: 0:2 x 0:4
start all_to_all cp_team partial q
      attend own q x kv[1]: 0:2 x 0:4
wait  all_to_all cp_team partial q""",
    )


def test_golden_published_backward() -> None:
    assert_expected_inline(
        golden(4, 2, (1, 0), published=True, stationary="kv", backward=True),
        """\
start all_gather cp_team q
start all_gather cp_team kv
wait  all_gather cp_team q
start permute cp q[0] to 1 from 4
wait  all_gather cp_team kv
wait  permute cp q[0] to 1 from 4
start permute cp_ring q[1] to 0 from 0
      attend others kv x q[0]: 0:4 x 0:2
      attend own kv x q[0]: 0:4 x 0:2
start permute cp_ring dq[0] into dq[1] to 0 from 0
wait  permute cp_ring q[1] to 0 from 0
      attend others kv x q[1]: 0:4 x 0:2
start all_to_all cp_team partial kv
      attend own kv x q[1]: 0:4 x 0:2
wait  permute cp_ring dq[0] into dq[1] to 0 from 0
start permute cp dq[1] home to 0 from 3
wait  all_to_all cp_team partial kv
wait  permute cp dq[1] home to 0 from 3
start all_to_all cp_team partial q
wait  all_to_all cp_team partial q""",
    )
