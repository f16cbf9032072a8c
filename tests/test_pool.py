"""What a pool of ranks says of a rank that fails."""

import os
import signal
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from wallfacer_dt.testing import RankPool

pytestmark = pytest.mark.ranks


def _raise_on_one() -> None:
    if dist.get_rank() == 1:
        raise KeyError("only here")


def _end_one(how: int) -> None:
    if dist.get_rank() == 1:
        if how < 0:
            os.kill(os.getpid(), -how)
        os._exit(how)
    dist.all_reduce(torch.ones(1))  # as the others do: they wait for it


def test_a_rank_that_raises_is_named_and_the_pool_goes_on() -> None:
    pool = RankPool(2, timeout=30)
    try:
        with pytest.raises(RuntimeError, match=r"rank 1 of 2:(.|\n)*KeyError: 'only here'"):
            pool.run(_raise_on_one)
        assert pool.run(dist.get_rank) == [0, 1]
    finally:
        pool.close()


@pytest.mark.parametrize(("how", "said"), [(-signal.SIGABRT, "of SIGABRT"), (3, "with exit status 3")])
def test_a_rank_that_dies_says_of_what(how: int, said: str) -> None:
    pool = RankPool(2, timeout=30)
    with pytest.raises(TimeoutError, match=f"rank 1 of 2 died {said}; the pool is closed"):
        pool.run(_end_one, how)
    assert pool.closed
    with pytest.raises(RuntimeError, match="closed"):
        pool.run(dist.get_rank)


@pytest.mark.skipif(sys.platform != "linux", reason="torch prints native stacks on Linux")
@pytest.mark.parametrize("how", ["SIGABRT", "SIGINT"])
def test_a_crash_says_where_native_threads_were_and_an_interrupt_does_not(how: str) -> None:
    program = f"""
import os, signal, tempfile
import torch.distributed as dist
from wallfacer_dt.testing.crash import say_where_it_crashes
say_where_it_crashes()
with tempfile.TemporaryDirectory() as folder:
    dist.init_process_group("gloo", init_method=f"file://{{folder}}/store", rank=0, world_size=1)
    os.kill(os.getpid(), signal.{how})
"""
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    crashed = how == "SIGABRT"
    assert said.returncode == -getattr(signal, how)
    assert ("gloo::transport::tcp::Loop::run" in said.stderr) is crashed
    assert ("Fatal Python error: Aborted" in said.stderr) is crashed
    assert ("KeyboardInterrupt" in said.stderr) is not crashed
