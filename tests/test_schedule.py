"""Schedules of all ranks together, simulated: everyone's transfers fit, and every pair is computed once."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from math import ceil
from types import SimpleNamespace
from typing import Any, Literal, get_args

import numpy as np
import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import Case, held
from tests.strategies import examples, mask_options, meshes, schedules, ulysses_meshes
from tests.test_segments import add_covered, planned, seen, sees
from wallfacer_dt.algorithms.masks import Mask
from wallfacer_dt.algorithms.schedule import (
    SCHEDULES,
    ScheduleName,
    make_asked_schedule,
    make_schedule,
    needed_offsets,
)
from wallfacer_dt.algorithms.sequences import Sequences
from wallfacer_dt.algorithms.steps import (
    CONTEXT,
    TEAM,
    Attend,
    Exchange,
    Gather,
    Hop,
    Schedule,
    Start,
    Wait,
)
from wallfacer_dt.layout import ORDERS, deal_documents, positions
from wallfacer_dt.mesh import TEAM_AXIS, Coordinate

SHARD = 2


@dataclass(frozen=True)
class Drawn:
    """A case and the schedule of it that is asked for."""

    case: Case
    resident: str
    backward: bool

    @property
    def published(self) -> bool:
        return self.case.schedule == "published"

    @property
    def inner(self) -> int:
        return self.case.ring * self.case.team

    @property
    def mates(self) -> dict[int, list[int]]:
        """By inner index, its team."""
        team = self.case.team
        return {i: [i // team * team + m for m in range(team)] for i in range(self.inner)}

    def schedules(self, ulysses_rank: int = 0) -> dict[int, Schedule]:
        """By inner index."""
        case = self.case
        sequences = Sequences(case.total, case.kv_total, case.order, planned(case), case.replicated)
        places = [
            Coordinate(case.ring, case.team, r, m, case.ulysses, ulysses_rank)
            for r in range(case.ring)
            for m in range(case.team)
        ]
        chosen = {"schedule": self.case.schedule, "resident": self.resident, "backward": self.backward}
        if not case.mask:
            return {place.inner_index: make_schedule(place, sequences, **chosen) for place in places}
        answers: Any = SimpleNamespace(sees=sees(case), kept={})

        def asked(place: Coordinate, offsets: tuple[int, ...]) -> Schedule:
            return make_asked_schedule(place, sequences, answers, offsets, **chosen)

        offsets = tuple(range(1, case.ring))
        if not (self.published and case.team > 1):
            offsets = tuple(sorted({n for place in places for n in needed_offsets(asked(place, offsets))}))
        return {place.inner_index: asked(place, offsets) for place in places}

    @property
    def rows(self) -> int:
        """Rows of the batch that differ in who holds what."""
        return len(self.case.documents) if self.case.order == "document_head_tail" else 1

    def shards(self, side: str) -> list[dict[int, list[int]]]:
        """By row and inner index, the positions in the order in which they are stored."""
        case = self.case
        length = case.total if side == "q" else case.kv_total
        rows = []
        for row in range(self.rows):
            by_index = [self._held(index, row, length) for index in range(case.size)]
            together = ([p for part in by_index[i :: self.inner] for p in part] for i in range(self.inner))
            rows.append({i: self.ordered(held) for i, held in enumerate(together)})
        return rows

    def ordered(self, held: list[int]) -> list[int]:
        """What several ranks hold is put in order of position."""
        return sorted(held)

    def _held(self, index: int, row: int, length: int) -> list[int]:
        case = self.case
        if case.order == "document_head_tail":
            bounds = tuple(int(x) for x in np.cumsum((0, *case.documents[row])))
            return positions(deal_documents(bounds, case.axes)[index]).tolist()
        replicated = held(index, case.axes, "contiguous", case.replicated) if case.replicated else []
        return [*replicated, *(case.replicated + p for p in held(index, case.axes, case.order, length))]


@st.composite
def drawn(draw: st.DrawFn, largest: int = 36, most: int = 3) -> Drawn:
    """Any schedule; of several blocks of 128 on few ranks, of a few tokens each on many."""
    size = draw(st.integers(1, largest))
    ring, team, ulysses = draw(st.sampled_from(ulysses_meshes(size)))
    schedule = draw(st.sampled_from(schedules(ring, team)))
    published = schedule == "published"
    backward = draw(st.booleans())
    # As published, queries stay in the forward and keys in the backward.
    resident = ("kv" if backward else "q") if published else draw(st.sampled_from(["q", "kv"]))
    batch = draw(st.integers(1, 2))
    longest = 420 if size <= 6 and draw(st.booleans()) else most * size
    length = draw(st.integers(1, longest))
    masks = draw(mask_options(batch, length))
    if draw(st.booleans()):  # somewhat longer than a shard at most, so that there are hops to leave out
        near = st.integers(0, length // size + 1)
        masks = draw(
            st.sampled_from(
                [{"window_size": (draw(near), 0), "is_causal": True}, {"window_size": (draw(near), draw(near))}]
                + [{"mask": "per_row"}] * (longest > most * size)
            )
        )
    orders = ORDERS if masks.get("documents") else ORDERS[:2]
    options: dict[str, Any] = {"length": length} | masks | {"order": draw(st.sampled_from(orders))}
    if not any(masks.values()):
        options |= {"kv_length": draw(st.integers(1, longest)), "replicated": draw(st.sampled_from([0, 0, 1, 5]))}
    case = Case(ring, team, ulysses=ulysses, batch=batch, schedule=schedule, **options)
    return Drawn(case, resident, backward)


@dataclass
class Rank:
    """What one rank has, by side and number of a block: whose rows these are, and which steps computed for them."""

    blocks: dict[tuple[str, int], tuple[int, ...]]
    partial: defaultdict[tuple[str, int], Counter] = field(default_factory=lambda: defaultdict(Counter))
    under_way: dict[Any, Any] = field(default_factory=dict)


def peer(index: int, transfer: Hop, number: int, team: int) -> int:
    """Inner index of a position that a transfer names on its axis."""
    if transfer.axis == TEAM_AXIS:
        return index // team * team + number
    return number if transfer.axis == CONTEXT else number * team + index % team


class Simulation:
    """All ranks of one head group, step by step; nothing here knows the formulas."""

    def __init__(self, chosen: Drawn) -> None:
        self.chosen = chosen
        self.schedules = chosen.schedules()
        self.rotating = "kv" if chosen.resident == "q" else "q"
        self.held = {side: chosen.shards(side) for side in ("q", "kv")}
        # TEAM: what comes home for rows that the team has placed elsewhere.
        self.ranks = {
            i: Rank({("q", 0): (i,), ("kv", 0): (i,), (self.rotating, TEAM): self.mates(i)})
            for i in range(chosen.inner)
        }
        self.visible = seen(chosen.case)
        if chosen.case.replicated:
            extent = [n + chosen.case.replicated for n in self.visible.shape[2:]]
            self.visible = np.ones((1, 1, *extent), bool)
        self.computed = np.zeros(self.visible.shape, int)
        self.labels: dict[int, list[tuple[tuple[int, ...], int, tuple[int, ...]]]] = {i: [] for i in self.ranks}

    def run(self) -> None:
        programs = {i: self._segments(i) for i in self.ranks}
        assert len({len(program) for program in programs.values()}) == 1, "ranks run different programs"
        assert len({parts_of(schedule) for schedule in self.schedules.values()}) == 1, (
            "parts end elsewhere on some rank"
        )
        for segments in zip(*programs.values(), strict=True):
            now = {i: transfers for i, (_, transfers) in zip(self.ranks, segments, strict=True)}
            assert len({kind_of(step) for step in now.values()}) == 1, "ranks run different programs"
            for i, (attends, step) in zip(self.ranks, segments, strict=True):
                for number, attend in attends:
                    self._attend(i, number, attend)
                if isinstance(step, Start):
                    self._start(i, step.transfer)
            for i, step in now.items():
                if isinstance(step, Start) and isinstance(step.transfer, Hop):
                    self._check_peers(i, now, step.transfer)
                if isinstance(step, Wait):
                    self._wait(i, step.transfer)

    def _segments(self, i: int) -> list[tuple[list[tuple[int, Attend]], Start | Wait | None]]:
        """A rank's starts and waits, each with what is computed before it; at last what is computed after them."""
        segments: list[tuple[list[tuple[int, Attend]], Start | Wait | None]] = []
        attends: list[tuple[int, Attend]] = []
        for number, step in enumerate(self.schedules[i].steps):
            if isinstance(step, Attend):
                attends.append((number, step))
            else:
                segments.append((attends, step))
                attends = []
        return [*segments, (attends, None)]

    def positions(self, side: str, owners: tuple[int, ...]) -> list[np.ndarray]:
        rows = ([p for owner in owners for p in held[owner]] for held in self.held[side])
        return [np.array(self.chosen.ordered(row), int) for row in rows]

    def mates(self, i: int) -> tuple[int, ...]:
        return tuple(self.chosen.mates[i])

    def _attend(self, i: int, number: int, step: Attend) -> None:
        rank = self.ranks[i]
        stays, moves = (self.chosen.resident, step.rows), (self.rotating, step.block)
        assert (sorted(step.stays), sorted(step.moves)) == (sorted(rank.blocks[stays]), sorted(rank.blocks[moves]))
        staying, travelling = (self.positions(block[0], rank.blocks[block]) for block in (stays, moves))
        queries, keys = (staying, travelling) if self.chosen.resident == "q" else (travelling, staying)
        for tile in (tile for call in step.work for tile in call.bands):
            add_covered(self.computed, tile, queries, keys, self.visible)
        rank.partial[stays][i, number] += 1
        rank.partial[moves][i, number] += 1
        self.labels[i].append((rank.blocks[stays], number, rank.blocks[moves]))
        if step.frees:
            del rank.blocks[moves]

    def _start(self, i: int, transfer: Any) -> None:
        """What is sent is what is there at the start."""
        rank = self.ranks[i]
        assert transfer not in rank.under_way
        match transfer:
            case Hop(side, block, partial=False):
                rank.under_way[transfer] = rank.blocks[side, block]
            case Hop(side, block):
                rank.under_way[transfer] = rank.partial.pop((side, block), Counter()), rank.blocks.pop((side, block))
            case Exchange(side):
                rank.under_way[transfer] = rank.partial[side, TEAM].copy()
            case Gather():
                rank.under_way[transfer] = None

    def _check_peers(self, i: int, now: dict[int, Any], transfer: Hop) -> None:
        team = self.chosen.case.team
        target = peer(i, transfer, transfer.to, team)
        answer = now[target].transfer
        assert peer(target, answer, answer.source, team) == i, "a receiver expects another sender"

    def _sent(self, i: int, transfer: Hop) -> Any:
        """What the sender had at the start of the transfer that ends here."""
        rank = self.ranks[peer(i, transfer, transfer.source, self.chosen.case.team)]
        (sent,) = [what for started, what in rank.under_way.items() if is_same_step(started, transfer)]
        return sent

    def _wait(self, i: int, transfer: Any) -> None:
        rank = self.ranks[i]
        assert transfer in rank.under_way, "waited for before it is started"
        match transfer:
            case Gather(side) if side == self.rotating:
                rank.blocks[side, 0] = self.mates(i)
            case Gather(side):
                rank.blocks[side, TEAM] = tuple(mate for mate in self.mates(i) if mate != i)
            case Hop(side, _, into, partial=False):
                rank.blocks[side, into] = self._sent(i, transfer)
            case Hop(side, _, into):
                sent, owners = self._sent(i, transfer)
                assert owners == rank.blocks[side, into], "a result of other rows"
                rank.partial[side, into].update(sent)
            case Exchange(side):
                for mate in set(self.mates(i)) - {i}:
                    own = 0 if side == self.chosen.resident else TEAM
                    rank.partial[side, own].update(self.ranks[mate].under_way[transfer])

    def results_of_rotating(self, i: int) -> Counter:
        """The steps whose results for this rank's rotating rows have come home."""
        return self.ranks[i].partial[self.rotating, TEAM if self.schedules[i].gathered else 0]


def parts_of(schedule: Schedule) -> tuple[tuple[Any, ...], ...]:
    """What is sent and waited for in every part, which is what the part says."""
    begins, comes, computes, ends = schedule.parts
    assert all(isinstance(step, Start) and not step.transfer.partial for step in begins)
    assert not any(isinstance(step, Wait) and not step.transfer.partial for step in (*computes, *ends))
    assert all(isinstance(step, Wait) for step in ends)
    assert isinstance((*comes, *computes)[-1], Attend | Start)
    return tuple(tuple(kind_of(step) for step in part if not isinstance(step, Attend)) for part in schedule.parts)


def kind_of(step: Start | Wait | None) -> tuple[Any, ...]:
    """What must be the same on all ranks, whose collectives are called in one order."""
    transfer = getattr(step, "transfer", None)
    parts = (getattr(transfer, name, None) for name in ("side", "axis", "block", "into", "partial"))
    return (type(step), type(transfer), *parts)


def is_same_step(theirs: Any, mine: Hop) -> bool:
    """Whether two ranks' transfers are the two ends of one."""
    names = ("side", "block", "into", "partial")
    alike = [getattr(theirs, name, None) == getattr(mine, name, None) for name in names]
    return type(theirs) is type(mine) and all(alike)


def test_names_are_those_of_the_schedules() -> None:
    assert list(get_args(ScheduleName)) == list(SCHEDULES)


@examples(250, today=150)
@given(drawn())
def test_what_is_sent_is_expected_and_every_pair_is_computed_once(chosen: Drawn) -> None:
    assert_complete(chosen)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(("ring", "team"), [(r, c) for c in range(2, 7) for r in range(c, 36 // c + 1, c)])
def test_published_on_every_mesh(ring: int, team: int, backward: bool) -> None:
    """Its ways differ only where a ring has three blocks or more, from 12 ranks on: seldom drawn."""
    case = Case(ring, team, shard=SHARD, is_causal=True, order="head_tail", schedule="published")
    assert_complete(Drawn(case, "kv" if backward else "q", backward))


def assert_complete(chosen: Drawn) -> None:
    """Follow whose rows each block holds, and where each step's results go, through the transfers."""
    simulation = Simulation(chosen)
    simulation.run()
    assert np.array_equal(simulation.computed, np.broadcast_to(simulation.visible, simulation.computed.shape))
    for i, rank in simulation.ranks.items():
        # A forward computes something for queries only.
        if chosen.backward or chosen.resident == "q":
            mates = chosen.mates[i]
            mine = [(j, number) for j in mates for owners, number, _ in simulation.labels[j] if i in owners]
            assert rank.partial[chosen.resident, 0] == Counter(mine), "a partial result is lost, or comes twice"
        if chosen.backward or chosen.resident == "kv":
            labels = simulation.labels.items()
            theirs = [(j, number) for j, steps in labels for _, number, owners in steps if i in owners]
            assert simulation.results_of_rotating(i) == Counter(theirs), "a result is lost, or comes twice"


@given(drawn(largest=16))
def test_ranks_that_exchange_heads_have_one_schedule(chosen: Drawn) -> None:
    first, last = (chosen.schedules(rank) for rank in (0, chosen.case.ulysses - 1))
    assert [*map(str, first.values())] == [*map(str, last.values())]


@examples(150, today=75)
@given(drawn())
def test_what_is_put_together_is_in_order_and_comes_apart_again(chosen: Drawn) -> None:
    """The rows of a team, against the positions that segments count by."""
    for i, schedule in chosen.schedules().items():
        for side, members in schedule.members.items():
            left_out = i if side == chosen.resident else None
            shards, padded_length = chosen.shards(side), schedule.padded_lengths[0 if side == "q" else 1]
            assert max(len(held) for row in shards for held in row.values()) == padded_length
            # (rows, heads, positions): what each member sends, behind its own rows what nobody may touch
            sent = [torch.full((len(shards), 2, padded_length), -1) for _ in chosen.mates[i]]
            for member, mate in zip(sent, chosen.mates[i], strict=True):
                for row, stored in zip(member, shards, strict=True):
                    row[:, : len(stored[mate])] = torch.tensor(stored[mate], dtype=torch.int64)
            together = members.together(sent, 2)
            mates = [mate for mate in chosen.mates[i] if mate != left_out]
            expected = [chosen.ordered([p for mate in mates for p in row[mate]]) for row in shards]
            assert together.equal(torch.tensor(expected, dtype=torch.int64)[:, None].expand_as(together))
            for member, mate in enumerate(chosen.mates[i]):
                apart = members.rows[member].of(together, 2)
                theirs = [row[mate] if mate != left_out else [] for row in shards]
                assert apart.equal(torch.tensor(theirs, dtype=torch.int64)[:, None].expand_as(apart))
        most = max(sum(len(shards[0][m]) for m in mates) for mates in chosen.mates.values())
        assert schedule.gathered == (most if chosen.published and chosen.case.team > 1 else None)


def distances(schedules: dict[int, Schedule], team: int) -> list[int]:
    """How far round the ring the block of each hop has come, by its steps' peers."""
    come = {0: 0}
    ring = len(schedules) // team
    for step in schedules[0].steps:
        if isinstance(step, Start) and step.transfer.kind == "move":
            hop = step.transfer
            # What comes from rank ``source`` has been ``block`` there.
            come[hop.into] = (come[hop.block] - hop.source) % ring
    return [come[block] for block in sorted(come)][1:]


@examples(250, today=150)
@given(drawn(largest=24).filter(lambda chosen: not (chosen.published and chosen.case.team > 1)))
def test_hops_are_those_that_somebody_needs(chosen: Drawn) -> None:
    case, mask = chosen.case, planned(chosen.case)
    hops = distances(chosen.schedules(), case.team)
    assert len(set(hops)) == len(hops)
    # Outwards from oneself, one way round and then the other; all the way round where all are needed.
    near = [hop for hop in hops if 2 * hop <= case.ring or len(hops) == case.ring - 1]
    assert hops == [*sorted(near), *sorted(set(hops) - set(near), reverse=True)]
    if not (mask.spares_hops or mask.asked):
        assert sorted(hops) == list(range(1, case.ring))
        return
    visible = seen(case).any(1)
    shards = {side: chosen.shards(side) for side in ("q", "kv")}
    needed = set()
    for row in range(len(visible)):
        q, k = (shards[side][row % chosen.rows] for side in ("q", "kv"))
        for i in q:
            for j in k:
                if visible[row][np.ix_(q[i], k[j])].any():
                    needed.add((i // case.team - j // case.team) * (1 if chosen.resident == "q" else -1) % case.ring)
    assert sorted(hops) == sorted(needed - {0})


@pytest.mark.parametrize(("order", "expected"), [("contiguous", [1, 7]), ("head_tail", [1, 7])])
def test_a_mask_mod_that_is_a_window_is_a_halo(order: str, expected: list[int]) -> None:
    """Found out by asking: only neighbours see something of each other."""
    case = Case(8, 1, shard=256, mask="per_row", order=order)
    assert distances(Drawn(case, "q", False).schedules(), 1) == expected


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("resident", ["q", "kv"])
@pytest.mark.parametrize("mesh", [(5, 1, 1), (8, 1, 1), (4, 2, 1), (4, 1, 2), (3, 2, 2)])
def test_a_window_is_a_halo(mesh: tuple[int, int, int], resident: str, backward: bool) -> None:
    """Of a window shorter than a shard (or half of one, head_tail) only neighbours' blocks hop."""
    ring, team, ulysses = mesh
    case = Case(ring, team, ulysses=ulysses, shard=8, window_size=(3, 0), is_causal=True)
    behind, ahead = (1, ring - 1) if resident == "q" else (ring - 1, 1)
    for changed, expected in [
        ({}, [behind]),
        ({"window_size": (3, 3), "is_causal": False}, [1, ring - 1]),
        ({"window_size": (0, 3), "is_causal": False}, [ahead]),
        ({"window_size": (0, 0)}, []),
        ({"window_size": (2, 0), "order": "head_tail"}, [1, ring - 1]),
        ({"window_size": (0, 0), "order": "head_tail"}, []),
    ]:
        schedules = Drawn(replace(case, **changed), resident, backward).schedules()
        assert distances(schedules, team) == expected
        for i, schedule in schedules.items():
            # Each goes one rank on, or one back.
            hops = [s.transfer for s in schedule.steps if isinstance(s, Start) and s.transfer.kind == "move"]
            all_needed = len(expected) == ring - 1  # then a block goes on from rank to rank
            assert [(hop.to - i // team) % ring for hop in hops] == ([1] * (ring - 1) if all_needed else expected)


@examples(100)
@given(
    ring=st.integers(1, 9), team=st.integers(1, 4), shard=st.integers(1, 9), left=st.integers(0, 90),
    ulysses=st.integers(1, 2),
)  # fmt: skip
def test_hops_of_a_causal_window(ring: int, team: int, shard: int, left: int, ulysses: int) -> None:
    """A query reaches ``left`` back, which is so many teams' shards."""
    masks = {"window_size": (left, 0), "is_causal": True}
    chosen = Drawn(Case(ring, team, ulysses=ulysses, shard=shard, **masks), "q", False)
    hops = min(ring - 1, ceil(left / (team * shard)))
    near = [hop for hop in range(1, hops + 1) if 2 * hop <= ring or hops == ring - 1]
    assert distances(chosen.schedules(), team) == [*near, *range(hops, len(near), -1)]


EVENLY = {"shard": SHARD}


@st.composite
def balanced(draw: st.DrawFn) -> Drawn:
    """On shards of equal length, without a mask or causal."""
    masks = {"is_causal": draw(st.booleans())}
    size = draw(st.integers(1, 36))
    ring, team = draw(st.sampled_from(meshes(size)))
    schedule = draw(st.sampled_from(schedules(ring, team)))
    published = schedule == "published"
    backward = draw(st.booleans())
    # As published, queries stay in the forward and keys in the backward.
    resident = ("kv" if backward else "q") if published else draw(st.sampled_from(["q", "kv"]))
    order = draw(st.sampled_from(ORDERS[:2]))
    case = Case(ring, team, shard=SHARD, order=order, schedule=schedule, **masks)
    return Drawn(case, resident, backward)


@examples(250, today=125)
@given(st.one_of(drawn(), balanced()))
def test_transfers_are_waited_for_once_and_hide_behind_work(chosen: Drawn) -> None:
    case = chosen.case
    for schedule in chosen.schedules().values():
        in_flight: dict = {}
        exposed = []
        for position, step in enumerate(schedule.steps):
            if isinstance(step, Start):
                assert step.transfer not in in_flight
                in_flight[step.transfer] = position
            elif isinstance(step, Wait):
                started = in_flight.pop(step.transfer)
                if not any(isinstance(s, Attend) and s.work for s in schedule.steps[started:position]):
                    exposed.append(step.transfer)
        assert not in_flight
        # Contiguous causal shards leave some ranks without anything visible to compute meanwhile.
        balanced = case.length is None and (case.order == "head_tail" or not case.is_causal)
        if balanced and not (chosen.published and case.team > 1):
            assert not exposed, "every transfer of the 2D schedule has work to hide behind"


def golden(
    ring: int,
    team: int,
    rank: tuple[int, int] = (0, 0),
    *,
    order: str = "contiguous",
    mask: Mask = Mask(),  # noqa: B008
    shard: int = SHARD,
    schedule: str = "2d",
    resident: str = "q",
    backward: bool = False,
) -> str:
    length = shard * ring * team
    sequences = Sequences(length, length, order, mask)
    place = Coordinate(ring, team, *rank)
    return str(make_schedule(place, sequences, schedule=schedule, resident=resident, backward=backward))


@pytest.mark.parametrize("schedule", ["2d", "rings"])
def test_a_backward_has_what_its_forward_planned(schedule: str) -> None:
    """Of the same side that stays; of the other one other rows meet."""
    mask = Mask(left=3, right=0, documents=((0, 5, 17, 24),))
    sequences, place = Sequences(24, 24, "document_head_tail", mask), Coordinate(3, 2, 1, 0)

    def works(resident: Literal["q", "kv"], *, backward: bool) -> dict[tuple, int]:
        made = make_schedule(place, sequences, schedule=schedule, resident=resident, backward=backward)
        return {(x.stays, x.moves): id(x.work) for x in made.steps if isinstance(x, Attend) and (x.rows or x.block)}

    forward, backward = (works("q", backward=way) for way in (False, True))
    assert forward == backward
    assert set(works("kv", backward=True).values()).isdisjoint(forward.values())


def test_golden_ring_forward() -> None:
    assert_expected_inline(
        golden(3, 1),
        """\
start permute cp_ring kv[1] to 1 from 2
      attend local q x kv[0]: 0:2 x 0:2
wait  permute cp_ring kv[1] to 1 from 2
start permute cp_ring kv[2] to 1 from 2
      attend local q x kv[1]: 0:2 x 0:2
wait  permute cp_ring kv[2] to 1 from 2
      attend local q x kv[2]: 0:2 x 0:2""",
    )


def test_golden_ring_backward() -> None:
    assert_expected_inline(
        golden(3, 1, backward=True),
        """\
start permute cp_ring kv[1] to 1 from 2
      attend local q x kv[0]: 0:1 x 0:2
wait  permute cp_ring kv[1] to 1 from 2
start permute cp_ring kv[2] to 1 from 2
      attend local q x kv[1]: 0:2 x 0:2
start permute cp_ring partial kv[1] into kv[2] to 1 from 2
wait  permute cp_ring kv[2] to 1 from 2
      attend local q x kv[2]: 0:2 x 0:2
wait  permute cp_ring partial kv[1] into kv[2] to 1 from 2
start permute cp_ring partial kv[2] into kv[0] to 1 from 2
      attend local q x kv[0]: 1:2 x 0:2
wait  permute cp_ring partial kv[2] into kv[0] to 1 from 2""",
    )


def test_golden_2d_forward_causal() -> None:
    assert_expected_inline(
        golden(2, 2, (1, 0), order="head_tail", mask=Mask(right=0)),
        """\
start all_gather cp_team q
start permute cp_ring kv[1] to 0 from 0
      attend local q x kv[0]: 0:2 x 0:2 causal
wait  all_gather cp_team q
      attend peer q x kv[0]: 0:2 x 0:1
wait  permute cp_ring kv[1] to 0 from 0
      attend peer q x kv[1]: 0:2 x 0:1
start all_to_all cp_team partial q
      attend local q x kv[1]: 0:2 x 0:1
wait  all_to_all cp_team partial q""",
    )


def test_golden_2d_backward_rotating_kv() -> None:
    assert_expected_inline(
        golden(2, 2, backward=True),
        """\
start all_gather cp_team q
start permute cp_ring kv[1] to 1 from 1
      attend local q x kv[0]: 0:1 x 0:2
wait  all_gather cp_team q
      attend peer q x kv[0]: 0:2 x 0:2
wait  permute cp_ring kv[1] to 1 from 1
      attend peer q x kv[1]: 0:2 x 0:2
start all_to_all cp_team partial q
      attend local q x kv[1]: 0:2 x 0:2
start permute cp_ring partial kv[1] into kv[0] to 1 from 1
      attend local q x kv[0]: 1:2 x 0:2
wait  all_to_all cp_team partial q
wait  permute cp_ring partial kv[1] into kv[0] to 1 from 1""",
    )


def test_golden_2d_backward_rotating_q() -> None:
    assert_expected_inline(
        golden(2, 2, backward=True, resident="kv"),
        """\
start all_gather cp_team kv
start permute cp_ring q[1] to 1 from 1
      attend local kv x q[0]: 0:1 x 0:2
wait  all_gather cp_team kv
      attend peer kv x q[0]: 0:2 x 0:2
wait  permute cp_ring q[1] to 1 from 1
      attend peer kv x q[1]: 0:2 x 0:2
start all_to_all cp_team partial kv
      attend local kv x q[1]: 0:2 x 0:2
start permute cp_ring partial q[1] into q[0] to 1 from 1
      attend local kv x q[0]: 1:2 x 0:2
wait  all_to_all cp_team partial kv
wait  permute cp_ring partial q[1] into q[0] to 1 from 1""",
    )


def test_golden_gather_only() -> None:
    assert_expected_inline(
        golden(1, 3),
        """\
start all_gather cp_team q
      attend local q x kv[0]: 0:1 x 0:2
wait  all_gather cp_team q
      attend peer q x kv[0]: 0:4 x 0:2
start all_to_all cp_team partial q
      attend local q x kv[0]: 1:2 x 0:2
wait  all_to_all cp_team partial q""",
    )


def test_golden_rings_forward() -> None:
    assert_expected_inline(
        golden(3, 3, (0, 1), schedule="rings"),
        """\
start permute cp_team q[1] to 2 from 0
      attend local q x kv[0]: 0:2 x 0:2
wait  permute cp_team q[1] to 2 from 0
start permute cp_ring kv[1] to 1 from 2
      attend peer q[1] x kv[0]: 0:2 x 0:2
wait  permute cp_ring kv[1] to 1 from 2
start permute cp_team q[2] to 2 from 0
      attend peer q[1] x kv[1]: 0:2 x 0:2
wait  permute cp_team q[2] to 2 from 0
start permute cp_ring kv[2] to 1 from 2
      attend peer q[2] x kv[0]: 0:2 x 0:2
      attend peer q[2] x kv[1]: 0:2 x 0:2
wait  permute cp_ring kv[2] to 1 from 2
      attend peer q[1] x kv[2]: 0:2 x 0:2
start permute cp_team partial q[1] into q[0] to 0 from 2
      attend peer q[2] x kv[2]: 0:2 x 0:2
start permute cp_team partial q[2] into q[0] to 2 from 0
      attend local q x kv[1]: 0:2 x 0:2
      attend local q x kv[2]: 0:2 x 0:2
wait  permute cp_team partial q[1] into q[0] to 0 from 2
wait  permute cp_team partial q[2] into q[0] to 2 from 0""",
    )


def test_golden_rings_backward_rotating_q() -> None:
    assert_expected_inline(
        golden(2, 3, (0, 1), schedule="rings", resident="kv", backward=True),
        """\
start permute cp_team kv[1] to 2 from 0
      attend local kv x q[0]: 0:1 x 0:2
wait  permute cp_team kv[1] to 2 from 0
start permute cp_team kv[2] to 2 from 0
      attend peer kv[1] x q[0]: 0:2 x 0:2
wait  permute cp_team kv[2] to 2 from 0
start permute cp_ring q[1] to 1 from 1
      attend peer kv[2] x q[0]: 0:2 x 0:2
wait  permute cp_ring q[1] to 1 from 1
      attend peer kv[1] x q[1]: 0:2 x 0:2
start permute cp_team partial kv[1] into kv[0] to 0 from 2
      attend peer kv[2] x q[1]: 0:2 x 0:2
start permute cp_team partial kv[2] into kv[0] to 2 from 0
      attend local kv x q[1]: 0:2 x 0:2
start permute cp_ring partial q[1] into q[0] to 1 from 1
      attend local kv x q[0]: 1:2 x 0:2
wait  permute cp_team partial kv[1] into kv[0] to 0 from 2
wait  permute cp_team partial kv[2] into kv[0] to 2 from 0
wait  permute cp_ring partial q[1] into q[0] to 1 from 1""",
    )


def test_golden_rings_without_a_ring() -> None:
    assert_expected_inline(
        golden(1, 3, schedule="rings"),
        """\
start permute cp_team q[1] to 1 from 2
      attend local q x kv[0]: 0:1 x 0:2
wait  permute cp_team q[1] to 1 from 2
start permute cp_team q[2] to 1 from 2
      attend peer q[1] x kv[0]: 0:2 x 0:2
start permute cp_team partial q[1] into q[0] to 2 from 1
wait  permute cp_team q[2] to 1 from 2
      attend peer q[2] x kv[0]: 0:2 x 0:2
start permute cp_team partial q[2] into q[0] to 1 from 2
      attend local q x kv[0]: 1:2 x 0:2
wait  permute cp_team partial q[1] into q[0] to 2 from 1
wait  permute cp_team partial q[2] into q[0] to 1 from 2""",
    )


def test_golden_published_forward() -> None:
    assert_expected_inline(
        golden(4, 2, (1, 0), schedule="published"),
        """\
start all_gather cp_team kv
start all_gather cp_team q
wait  all_gather cp_team kv
start permute cp kv[0] to 1 from 4
wait  all_gather cp_team q
wait  permute cp kv[0] to 1 from 4
start permute cp_ring kv[1] to 0 from 0
      attend peer q x kv[0]: 0:2 x 0:4
      attend local q x kv[0]: 0:2 x 0:4
wait  permute cp_ring kv[1] to 0 from 0
      attend peer q x kv[1]: 0:2 x 0:4
start all_to_all cp_team partial q
      attend local q x kv[1]: 0:2 x 0:4
wait  all_to_all cp_team partial q""",
    )


def test_golden_published_backward() -> None:
    assert_expected_inline(
        golden(4, 2, (1, 0), schedule="published", resident="kv", backward=True),
        """\
start all_gather cp_team q
start all_gather cp_team kv
wait  all_gather cp_team q
start permute cp q[0] to 1 from 4
wait  all_gather cp_team kv
wait  permute cp q[0] to 1 from 4
start permute cp_ring q[1] to 0 from 0
      attend peer kv x q[0]: 0:4 x 0:2
      attend local kv x q[0]: 0:4 x 0:2
start permute cp_ring partial q[0] into q[1] to 0 from 0
wait  permute cp_ring q[1] to 0 from 0
      attend peer kv x q[1]: 0:4 x 0:2
start all_to_all cp_team partial kv
      attend local kv x q[1]: 0:4 x 0:2
wait  permute cp_ring partial q[0] into q[1] to 0 from 0
start permute cp partial q[1] home to 0 from 3
wait  all_to_all cp_team partial kv
wait  permute cp partial q[1] home to 0 from 3
start all_to_all cp_team partial q
wait  all_to_all cp_team partial q""",
    )
