"""A wait in vain says what it was for, and where the other ranks were last."""

import os
import re
import subprocess
import sys
import textwrap
import time
import weakref
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module

from tests.pairwise import few
from wallfacer_dt import (
    RingParallel,
    TokenOrder,
    context_mesh,
    context_parallel_attention,
    note_progress,
    register_kernel,
)
from wallfacer_dt.agreement import whereabouts
from wallfacer_dt.agreement.progress import Waiting, places
from wallfacer_dt.agreement.whereabouts import Whereabouts
from wallfacer_dt.agreement.worlds import World, this_world
from wallfacer_dt.testing import RankPool

pytestmark = pytest.mark.ranks
SECONDS = 4


@pytest.fixture
def hasty() -> Iterator[RankPool]:
    """Ranks that do not wait for long, and are left unfit for others."""
    pool = RankPool(3, timeout=SECONDS)
    yield pool
    pool.close()


def late_in(way: str, folder: Path) -> str:
    """What is said on a rank while rank 2 takes its time over a block, in the second layer or its backward."""

    def sleep(here: str) -> None:
        if dist.get_rank() == 2 and layer == [1] and way == here:
            layer[0] = 2
            end = time.monotonic() + 60
            while len([*folder.iterdir()]) < 2 and time.monotonic() < end:
                time.sleep(0.05)

    def forward(q, k, v, how):
        sleep("forward")
        return q[..., : v.shape[-1]].clone(), q.new_zeros(q.shape[:-1])

    def backward(grad_out, q, k, v, out, lse, how):
        sleep("backward")
        return q.clone(), k.clone(), v.clone()

    register_kernel("sleepy", forward, backward, lambda need: True)
    mesh, layer = context_mesh("cpu", 3), [0]
    model = nn.ModuleDict({"layers": nn.ModuleList(Inner() for _ in range(2))})
    style = RingParallel(order=TokenOrder("contiguous", mesh), kernel="sleepy", rotate="kv", layout="BNLH", check=False)
    parallelize_module(model, mesh, {"layers.*": style})
    x = torch.randn(1, 2, 4, 8, requires_grad=True)
    note_progress("step 7")
    try:
        for layer[0], attention in enumerate(model["layers"]):
            x = attention(x, x, x)
        x.sum().backward()
    except RuntimeError as error:
        (folder / str(dist.get_rank())).touch()
        return str(error)
    return ""


class Inner(nn.Module):
    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)


@pytest.mark.slow
@pytest.mark.parametrize("way", few(["forward", "backward"], {"backward"}))
def test_a_rank_that_is_late_is_told_of(hasty: RankPool, tmp_path: Path, way: str) -> None:
    said = hasty.run(late_in, way, tmp_path)
    what = {"forward": "attention", "backward": "the backward of attention"}[way]
    mesh = "the cpu mesh cp_ring 3 x cp_team 1 of ranks 0, 1, 2"
    place = rf"at step 7, had come to call \d+ on {mesh}, {what}, in layers.1"
    # Rank 0 waits for what rank 2 has, rank 1 for what rank 0 has from it.
    waits = rf"this rank \(0\) {place} and waited for permute cp_ring \w+\[\d\].* from 2, rank 2 in vain: "
    assert re.match(waits, said[0]), said[0]
    assert re.search(rf"; rank 2 {place}, told [0-4] s ago", said[0]), said[0]


def where_ranks_are() -> str:
    """What is said to an error of somebody else's, once all have told."""
    mesh = context_mesh("cpu", 3)
    note_progress(f"step {dist.get_rank()}")
    x = torch.randn(1, 2, 4, 8)
    context_parallel_attention(x, x, x, mesh)
    this_world().whereabouts.say()
    dist.barrier()
    return places()


def test_errors_of_others_are_told_where_ranks_are(hasty: RankPool) -> None:
    call = r"had come to call \d+ on the cpu mesh cp_ring 3 x cp_team 1 of ranks 0, 1, 2, attention"
    for rank, said in enumerate(hasty.run(where_ranks_are)):
        told = [rf"rank {other} at step {other}, {call}, told 0 s ago" for other in range(3) if other != rank]
        assert re.fullmatch("; ".join([f"at step {rank}, {call}", *told]), said), said


def broken_kernel() -> list[str]:
    """What the error of a kernel becomes in the second block, and what is waited for meanwhile."""

    def forward(q, k, v, how):
        heard.append(str(this_world().whereabouts))
        if len(heard) == 2:
            raise RuntimeError("no such kernel image")
        return q.clone(), q.new_zeros(q.shape[:-1])

    register_kernel("broken", forward, forward, lambda need: True)
    heard: list[str] = []
    x = torch.randn(1, 2, 4, 8)
    try:
        context_parallel_attention(x, x, x, context_mesh("cpu", 3), kernel="broken")
    except RuntimeError as error:
        heard.append(f"{type(error).__name__}: {error}")
    return heard


def test_an_error_between_waits_is_not_taken_for_one_of_a_wait(hasty: RankPool) -> None:
    for own, other, error in hasty.run(broken_kernel):
        assert "waited" not in own + other
        assert error == "RuntimeError: no such kernel image"


def test_without_a_process_group_nothing_is_said_of_ranks() -> None:
    assert places() == ""


def test_who_is_gone_tells_nothing_more() -> None:
    """Or the thread would keep a world's store, which is in the way of the next world's."""
    here = Whereabouts()
    here.tell(dist.HashStore(), 0, timedelta(seconds=0.4))
    gone, (thread,) = weakref.ref(here), [x for x in whereabouts._threads if x.is_alive()]
    time.sleep(0.2)
    del here
    thread.join(5)
    assert gone() is None
    assert not thread.is_alive()


class Changing:
    """What is waited for, of which the first reading comes to nothing, as where it changes meanwhile."""

    read = 0

    def __str__(self) -> str:
        self.read += 1
        if self.read == 1:
            raise IndexError
        return "rows"


def test_a_text_that_cannot_be_read_is_read_again_later() -> None:
    here, store = Whereabouts(), dist.HashStore()
    here.waits_for = what = Changing()
    here.tell(store, 0, timedelta(seconds=0.4))
    told = dist.PrefixStore("wallfacer_dt whereabouts", store)
    told.wait(["0"], timedelta(seconds=10))
    assert what.read > 1
    assert "had come to no call and waited for rows" in told.get("0").decode()


def test_a_wait_within_another_leaves_that_as_it_was(hasty: RankPool) -> None:
    assert hasty.run(waits_within) == ["rows"] * 3


def waits_within() -> str:
    with Waiting("rows"):
        with Waiting("a sum"):
            pass
        return str(this_world().whereabouts.waits_for)


class Silent:
    """A store whose host has stopped."""

    def set(self, key: str, value: str) -> None:
        time.sleep(60)


def test_a_store_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Whereabouts()
    here.tell(dist.HashStore(), 0, timedelta(seconds=300))
    monkeypatch.setattr(here, "_store", Silent())
    monkeypatch.setattr(whereabouts, "_PATIENCE", 0.1)
    assert here.of([0, 1]) == ""


ENDING = """
    from datetime import timedelta

    import torch.distributed as dist

    from wallfacer_dt.agreement import whereabouts

    whereabouts._PATIENCE = 0.2
    here = whereabouts.Whereabouts()
    here.tell(dist.TCPStore("localhost", 0, is_master=True), 0, timedelta(seconds=300))
    here.of(range(100_000))
"""


def test_a_process_that_ends_while_it_still_asks_is_not_crashed() -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(ENDING)], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_where_nobody_tells_nothing_is_said() -> None:
    assert World().whereabouts.of([0, 1]) == ""
    assert this_world() is None


def test_who_waits_for_nobody_is_told_first() -> None:
    """Of a long ring all the others wait, each for its neighbour, and not all of them are told."""

    def ask(_: Any, ranks: Any, heard: dict[int, tuple[str, int]]) -> None:
        for rank in ranks:
            waits = "" if rank == 40 else f" and waited for permute cp_ring kv[2] to {rank + 1}"
            heard[rank] = f"had come to call {35 if rank == 40 else 36}{waits}", 0

    here = Whereabouts()
    with mock.patch.object(Whereabouts, "_ask", ask), mock.patch.multiple(here, _store=1, _process=os.getpid()):
        said = here.of(range(64))
    assert said.startswith("; rank 40 had come to call 35, told 0 s ago; rank 0 had come to call 36 and waited for ")
    assert said.endswith("; ...")
