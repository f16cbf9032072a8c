"""Ranks that differ find out, all of them, by name: at the call, or on a device before its result is used."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor.debug import CommDebugMode

from tests.disagreements import (
    DIFFERENCES,
    ODD,
    Late,
    documents_of_other_integers,
    in_a_forked_process,
    in_a_new_world,
    one_does_not_come,
    outcome,
    some_know_their_layer,
)
from wallfacer_dt import context_mesh
from wallfacer_dt.agreement import worlds
from wallfacer_dt.agreement.agree import _listing, _naming_call, agree, hear_all
from wallfacer_dt.agreement.meeting import Meeting, Pending, kept
from wallfacer_dt.agreement.whereabouts import Whereabouts
from wallfacer_dt.agreement.worlds import this_world
from wallfacer_dt.mesh import name_of
from wallfacer_dt.testing import RankPool

Ranks = Callable[[int], RankPool]
pytestmark = pytest.mark.ranks

SAME = "must be the same on every rank of the mesh, got rank 0: "
BACKWARDS = f"the call that this is the backward of {SAME}"
MESSAGES = {
    "is_causal, on a device, each seen before": f"is_causal {SAME}False, rank 1: False, rank 2: True, rank 3: False",
    "a refusal on a device": "q, k and v must be floating point, got torch.int64; cast them",
    "a kernel that one rank does not know": "kernel must be one of ('auto', 'flash', ",
    "a kernel that refuses a backward on one rank": "kernel='tired' does not support this call",
    "another version of the package": (
        f"the version of torch, and of wallfacer_dt's sources, {SAME}2.13.0, new, rank 1: 2.13.0, new, "
        "rank 2: 2.13.0, old, rank 3: 2.13.0, new"
    ),
    "another version of a kernel": f"the kernel that runs {SAME}theirs, 1, rank 1: theirs, 1, rank 2: theirs, 2",
    "a sampler's seed, each seen before": f"seed {SAME}0, rank 1: 0, rank 2: 1",
    "a sampler's state, each seen before": f"consumed samples {SAME}2, rank 1: 2, rank 2: 4",
    "a sampler's state that one rank refuses": "the saved sampler had seed=1, this one has 0",
    "a stream that is cut off on one rank": "8 tokens and their labels needs 9 tokens, the stream has 4",
    "too few samples on one rank": "1 data-parallel groups need as many samples, the dataset has 0",
    "unsharding in another order": f"order {SAME}TokenOrder('contiguous', ranks 0, 1, 2, 3 in turn), rank 1: ",
    "unsharding other documents": f"the documents {SAME}",
    "unsharding what one rank wants a gradient of": "unshard_sequence gives no gradient",
    "unsharding along a dim that is none on one rank": "dim must be in [-4, 4), got 7",
    "unsharding what is elsewhere on one rank": "x must be on the mesh's device type 'cpu', got meta",
    "a sampler's seed along data_parallel": "seed must be the same on every rank of the mesh, got rank ",
    "a refusal under grad": "scale must be finite and above 0, got -1.0",
    "a mask that one rank refuses": "mask_mod takes a value out of a tensor of positions",
    "METP's token order beside tp": f"order {SAME}TokenOrder('contiguous', ranks 0, 2 in turn), rank 2: ",
    "METP's projections": f"its projections {SAME}('up', 'gate', 'down'), rank 1",
    "METP's x along tp, one rank in eager code": "the shape of x must be the same on every rank",
    "METP's x along tp, one rank in half precision": "the shape of x must be the same on every rank",
    "METP's x along tp, on a device": "the shape of x must be the same on every rank",
    "METP's x along tp, on a device, each seen before": "the shape of x must be the same on every rank",
    "a pair of ranks, while all hear each other": "the length must be the same on every rank of the mesh, got rank 0",
    "METP on one rank": f"it {SAME}WallFacerParallel applied, rank 1: WallFacerParallel applied, rank 2: METP, ",
    "a factor that METP does not see": "factor was 1.0 when METPParallel was applied, and now the module has f",
    "dropout that comes later": "drop.p was 0.0 when METPParallel was applied, and now the module has p=0.5",
    "a code of attention that changes": "hidden was '' when METPAttentionParallel was applied, and now the module ",
    "METP's weight, changed on one rank": "up.weight under METP was changed between forward and backward",
    "METP's x, changed on one rank": "modified by an inplace operation",
    "METP's attention's x, changed on one rank": "modified by an inplace operation",
    "METP's x, a DTensor, changed on one rank": "x under METP was changed between forward and backward",
    "METP's attention's x, a DTensor, changed on one rank": "x under METP was changed between forward and backward",
    "an error between METP's forward and backward": "rank 1: the backward of METP's bias, rank 2: METP's feed-forward",
    "an error between METP's attention's forward and backward": "rank 1: the backward of METP's bias, rank 2: METP's a",
    "an error between METP's forward and backward, beside tp": "rank 1: the backward of what METP gave, rank 2: METP ",
    "an error between METP's forward and backward, beside tp, compiled": (
        "rank 1: the backward of what METP gave, rank 2: METP entered"
    ),
    "unsharding along another dim": f"dim {SAME}1, rank 1: 1, rank 2: 2",
    "a mesh of another placement": f"mesh {SAME}cpu mesh cp_ring 2 x cp_team 2 of ranks 0, 1, 2, 3, rank 1",
    "a mesh of other axes": "rank 2: cpu mesh cp_ring 4 x cp_team 1 of ranks 0, 1, 2, 3",
    "another mesh that is alike": "of its kind), rank 3: ",
    "a mesh that one rank refuses": "mesh must have axes ('cp_ulysses', 'cp_ring', 'cp_team')",
    "context_mesh of other sizes": f"ring {SAME}2, rank 1: 2, rank 2: 4",
    "split_context_axis of other sizes": f"ring {SAME}2, rank 1: 2, rank 2: 4",
    "split_context_axis of other sizes on another slice": f"ring {SAME}1, rank 1: 1, rank 2: 2",
    "split_context_axis along another axis": f"axis {SAME}('cp',), rank 1: ('cp',), rank 2: ('dp',)",
    "what one rank cannot tell": "cannot pickle 'generator' object",
    "a style's window": f"window_size {SAME}",
    "a style's schedule": f"schedule {SAME}2d, rank 1: 2d, rank 2: published",
    "another style": f"it {SAME}RingParallel applied, rank 1: RingParallel applied, rank 2: UlyssesParallel applied",
    "a module that one rank refuses": "name the module inside it in the plan",
    "a call of another kind": f"it {SAME}attention, rank 1: attention, rank 2: unshard_sequence",
    "a backward where others are at a forward": f"it {SAME}attention, rank 1: attention, rank 2: the backward of",
    "schedule": f"schedule {SAME}2d, rank 1: 2d, rank 2: published",
    "length": f"length {SAME}None, rank 1: None, rank 2: 16",
    "layers of others": f"the layer {SAME}0, rank 1: 0, rank 2: 1, rank 3: 0",
    "layers of others, on a device, each seen before": f"the layer {SAME}0, rank 1: 0, rank 2: 1, rank 3: 0",
}  # fmt: skip


@pytest.mark.parametrize("name", DIFFERENCES)
def test_found_on_every_rank_by_name(ranks: Ranks, name: str) -> None:
    text = MESSAGES.get(name, BACKWARDS)
    for kind, message in ranks(4).run(outcome, name):
        assert kind in ("ValueError", "TypeError", "UnrecordedError", "IndexError", "RuntimeError"), message
        assert text in message
        if SAME in text:
            assert message.startswith("call ")


def test_a_rank_may_not_know_in_which_layer_it_is(ranks: Ranks) -> None:
    (first, *others) = ranks(4).run(some_know_their_layer)
    numbers, exchanges = first
    assert numbers == [numbers[0] + n for n in range(4)]
    assert exchanges == 1  # which is remembered
    assert others == [first] * 3


def test_equal_documents_are_equal_whatever_holds_them(ranks: Ranks) -> None:
    assert max(ranks(4).run(documents_of_other_integers)) < 1e-6


@pytest.fixture
def own_ranks() -> Iterator[RankPool]:
    """Ranks of a test that leaves them unfit for others."""
    pool = RankPool(3, timeout=60)
    yield pool
    pool.close()


def test_who_does_not_come_is_named(own_ranks: RankPool) -> None:
    late = Late(first=False)
    said = own_ranks.run(one_does_not_come, late)
    assert said.pop(ODD) == ""
    for message in said:
        assert message.startswith(
            "call 2 on the cpu mesh cp_ring 3 of ranks 0, 1, 2, attention: rank 2 did not come within "
            f"0:00:0{late.seconds}, or was lost; "
        )
        assert "; rank 2 had come to call 1 on the cpu mesh cp_ring 3 of ranks 0, 1, 2, attention, told " in message


def test_a_first_call_that_not_all_come_to(own_ranks: RankPool) -> None:
    said = own_ranks.run(one_does_not_come, Late(first=True))
    assert said.pop(ODD) == ""
    for message in said:
        assert message.startswith("not all ranks came to the first call on the cpu mesh cp_ring 3 of ranks 0, 1, 2: ")
        assert message.endswith("; this rank came to: attention")


def test_a_wait_in_vain_names_the_call_of_the_ranks_that_waited() -> None:
    """And not the last of all, which another mesh has made since, while this one's was open."""
    whereabouts = Whereabouts()
    whereabouts.call = "call 2 on another mesh"
    meeting = SimpleNamespace(ranks=(0, 1), call="call 1", whereabouts=whereabouts)
    with pytest.raises(RuntimeError, match=r"^call 1: late$"), _naming_call(meeting):
        raise RuntimeError("late")


@pytest.mark.parametrize(
    ("heard", "who"),
    [((1, 0, 1, 1), "rank 5"), ((1, 0, 0, 0), "rank 5, 6 or 7"), ((1, 1, 1, 1), "a rank")],
)
def test_one_of_those_who_were_not_heard_is_lost(heard: tuple[int, ...], who: str) -> None:
    def wait() -> None:
        raise RuntimeError("Connection closed by peer")

    meeting = SimpleNamespace(ranks=(4, 5, 6, 7), timeout=timedelta(seconds=10))
    with pytest.raises(RuntimeError, match=f"^{who} did not come within 0:00:10, or was lost$"):
        Meeting.wait(meeting, Pending(SimpleNamespace(wait=wait), torch.tensor(heard), torch.tensor(0)))


def test_what_was_made_in_another_world_is_refused(own_ranks: RankPool, tmp_path: Path) -> None:
    for styled, mesh, order, fresh in own_ranks.run(in_a_new_world, str(tmp_path)):
        assert "is of a process group that has been destroyed since; make a new mesh, and apply styles on" in styled
        assert "is of a process group that has been destroyed since; make a new mesh" in mesh
        assert "is of a process group that has been destroyed since; make a new mesh" in order
        assert fresh == "nothing"


def test_a_process_forked_from_a_rank_is_refused(own_ranks: RankPool) -> None:
    """It would wait for ever, on its parent's connections."""
    for said in own_ranks.run(in_a_forked_process):
        assert "ranks cannot meet in a process forked from theirs" in said


def forked_twice() -> bool:
    """Whether the parents' connections are kept where a process is forked from one that is itself."""
    on = context_mesh("cpu", dist.get_world_size())
    agree("before", (), name_of(on))
    world = this_world()
    with mock.patch.multiple(world, parents=None, meetings=world.meetings):
        worlds._forked()
        worlds._forked()
        return bool(world.parents) and not world.meetings


def test_a_fork_of_a_fork_leaves_the_connections_too(ranks: Ranks) -> None:
    assert all(ranks(2).run(forked_twice))


IMPORTED_IN_A_MODE = """
import torch
with torch.inference_mode(), torch.autocast("cpu"):
    from wallfacer_dt.agreement.meeting import outside_dispatch
x = torch.ones(2, 2, requires_grad=True)
with torch.no_grad(), outside_dispatch(), torch.enable_grad():
    y = x @ x
print(y.requires_grad, y.dtype)
"""


def test_what_a_user_has_does_not_depend_on_where_this_is_imported() -> None:
    said = subprocess.run([sys.executable, "-c", IMPORTED_IN_A_MODE], check=True, capture_output=True, text=True)
    assert said.stdout.split() == ["True", "torch.float32"]


def in_modes() -> list[int]:
    """The numbers of calls that are made wherever a caller may be."""
    name, numbers = name_of(context_mesh("cpu", dist.get_world_size())), []

    def meet() -> None:
        numbers.append(agree("anywhere", [("dtype", torch.get_default_dtype())], name))
        numbers.append(len(hear_all("anything", dist.get_rank(), name)))

    meet()
    thread = Thread(target=meet)
    thread.start()
    thread.join()
    for mode in (torch.inference_mode(), torch.device("meta"), FakeTensorMode(), CommDebugMode()):
        with mode:
            meet()
    torch.func.vmap(lambda x: [x, meet()][0])(torch.ones(2))
    return numbers


def test_ranks_meet_in_any_mode(own_ranks: RankPool) -> None:
    assert own_ranks.run(in_modes) == [[n for call in range(7) for n in (2 + 2 * call, 3)]] * 3


def test_not_everything_is_remembered() -> None:
    """Every packing of documents is a call like no other."""
    meeting = Meeting.__new__(Meeting)
    meeting.seen = {}
    for likeness in range(5000):
        meeting.remember(likeness)
    assert list(meeting.seen) == list(range(5000 - 1024, 5000))


def test_what_is_kept_is_given_while_other_threads_remove_some() -> None:
    class Busy(dict[str, int]):
        times = 0

        def __iter__(self) -> Iterator[str]:
            self.times += 1
            if self.times == 1:
                raise RuntimeError("dictionary changed size during iteration")
            return iter(list(self.keys()))

    store = Busy(old=1)
    assert kept(store, "new", 1, lambda: 2) == 2
    assert store.pop("new") == 2
    assert not store
    assert kept(store, "none", 1, lambda: None) is None
    assert kept(store, "none", 1, lambda: 3) is None


def test_of_many_ranks_those_that_differ_are_told_first() -> None:
    assert _listing({0: "a", 1: "b"}) == "rank 0: a, rank 1: b"
    values = dict.fromkeys(range(1024), "2.13.0") | {700: "2.11.0", 3: "2.11.0"}
    said = _listing(values)
    assert said.startswith("rank 3, 700: 2.11.0; rank 0, 1, 2, 4, ")
    assert said.endswith(", 16, ...: 2.13.0")
    assert _listing({rank: str(rank) for rank in range(1024)}).endswith("; rank 15: 15; ...")
