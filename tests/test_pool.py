"""What a pool of ranks says of a rank that fails."""

import os
import signal

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
