"""What a pool says of a rank that fails, on processes and on threads; what CI keeps of one that crashes."""

import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from wallfacer_dt.testing import RankPool

pytestmark = pytest.mark.ranks


def _raise_on_one() -> None:
    if dist.get_rank() == 1:
        raise KeyError("only here")


def _end_one(how: int) -> None:
    if dist.get_rank() == 1:
        if how < 0:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # nobody is to look for what it crashed of
            os.kill(os.getpid(), -how)
        os._exit(how)
    dist.all_reduce(torch.ones(1))  # as the others do: they wait for it


def _is_forked_from_cuda() -> bool:
    return torch.cuda._is_in_bad_fork()


def test_ranks_may_use_cuda() -> None:
    """Which processes may not that are forked from one that has asked for devices, as some imports do."""
    started = RankPool(1)
    assert started.run(_is_forked_from_cuda) == [False]
    started.close()


@pytest.fixture(params=[False, True], ids=["processes", "threads"])
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    started = RankPool(3, timeout=300, threads=request.param)
    yield started
    started.close()


def test_a_rank_that_raises_is_named_and_the_pool_goes_on(pool: RankPool) -> None:
    with pytest.raises(RuntimeError, match=r"rank 1 of 3:(.|\n)*KeyError: 'only here'"):
        pool.run(_raise_on_one)
    assert pool.run(dist.get_rank) == [0, 1, 2]


def _with_a_graph() -> torch.Tensor:
    return 2 * torch.ones(1, requires_grad=True)


def _known_here_alone() -> None:
    pass


def test_what_cannot_be_sent_is_told_and_the_pool_goes_on(pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match=r"rank 0 of 3:(.|\n)*non-leaf tensor which requires_grad"):
        pool.run(_with_a_graph)
    assert pool.run(dist.get_rank) == [0, 1, 2]
    monkeypatch.setattr(_known_here_alone, "__qualname__", "_known")  # as a function of a notebook
    monkeypatch.setattr(sys.modules[__name__], "_known", _known_here_alone, raising=False)
    with pytest.raises(RuntimeError, match=r"rank 0 of 3:(.|\n)*AttributeError: .*_known"):
        pool.run(_known_here_alone)
    assert pool.run(dist.get_rank) == [0, 1, 2]


class _OfTwoError(Exception):
    def __init__(self, one: str, other: str) -> None:
        super().__init__(one + other)


def _what_cannot_be_read() -> _OfTwoError:
    return _OfTwoError("", "")


def test_a_call_of_which_answers_are_left_unread_closes_the_pool(pool: RankPool) -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        pool.run(_what_cannot_be_read)
    with pytest.raises(RuntimeError, match="closed"):
        pool.run(dist.get_rank)


def _unlike_numbers() -> list[float]:
    torch.manual_seed(dist.get_rank())
    first = torch.rand(1)
    dist.all_reduce(torch.ones(1))
    return [float(first), float(torch.rand(1))]


def test_each_rank_draws_its_own_numbers(pool: RankPool) -> None:
    expected = []
    for rank in range(3):
        generator = torch.Generator().manual_seed(rank)
        expected.append([float(torch.rand(1, generator=generator)) for _ in range(2)])
    assert pool.run(_unlike_numbers) == expected


def _a_world_of_its_own() -> tuple[int, int, list[object]]:
    everyone: list[object] = [None] * 3
    dist.all_gather_object(everyone, f"rank {dist.get_rank()}")
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("cp_ring",))
    x = DTensor.from_local(torch.full((2,), float(dist.get_rank())), mesh, [Shard(0)])
    return (
        dist.get_world_size(),
        mesh.get_local_rank(),
        [everyone, x.full_tensor().tolist(), float(x.sum().full_tensor())],
    )


def test_ranks_are_ranks_of_one_world(pool: RankPool) -> None:
    everyone = [[f"rank {rank}" for rank in range(3)], [0.0, 0.0, 1.0, 1.0, 2.0, 2.0], 6.0]
    assert pool.run(_a_world_of_its_own) == [(3, rank, everyone) for rank in range(3)]


def _look_before_it_arrives() -> tuple[bool, list[float]]:
    pending = torch.ops._c10d_functional.all_gather_into_tensor(torch.ones(1), 2, dist.group.WORLD.group_name)
    early = bool(pending.isnan().all())
    return early, torch.ops._c10d_functional.wait_tensor(pending).tolist()


def _miss_each_other() -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))


def _call_unlike() -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))
    else:
        dist.barrier()


def _send_unlike_sizes() -> None:
    dist.all_gather([torch.ones(2), torch.ones(2)], torch.ones(1 + dist.get_rank()))


def _write_over_what_is_sent() -> None:
    x = torch.ones(2)
    pending = torch.ops._c10d_functional.all_gather_into_tensor(x, 2, dist.group.WORLD.group_name)
    x.zero_()
    torch.ops._c10d_functional.wait_tensor(pending)


def test_threads_show_what_processes_hide() -> None:
    """What is used before it is waited for, and ranks that would wait for ever or take one message for another."""
    pool = RankPool(2, timeout=300, threads=True)
    try:
        assert pool.run(_look_before_it_arrives) == [(True, [1.0, 1.0])] * 2
        for function, said in (
            (_write_over_what_is_sent, r"rank [01] wrote over 2 of torch.float32 before they had been sent"),
            (_miss_each_other, r"rank 0 waits in vain for ranks \[1\] in all_reduce"),
            (_call_unlike, "rank 1 calls barrier on group .*, where another rank calls all_reduce"),
            (_send_unlike_sizes, "all_gather: rank 0 expects 2 of torch.float32, and is sent 1 of torch.float32"),
        ):
            with pytest.raises(RuntimeError, match=said):
                pool.run(function)
            assert pool.run(dist.get_rank) == [0, 1]
    finally:
        pool.close()


@pytest.mark.parametrize(("how", "said"), [(-signal.SIGABRT, r"of SIGABRT( \(.*\))?"), (3, "with exit status 3")])
def test_a_rank_that_dies_says_of_what(how: int, said: str) -> None:
    pool = RankPool(2, timeout=300)
    with pytest.raises(TimeoutError, match=f"rank 1 of 2 died {said}; the pool is closed"):
        pool.run(_end_one, how)
    assert pool.closed
    with pytest.raises(RuntimeError, match="closed"):
        pool.run(dist.get_rank)


ROOT = Path(__file__).parents[1]
CRASH = """
import os, resource
most = resource.getrlimit(resource.RLIMIT_CORE)[1]
resource.setrlimit(resource.RLIMIT_CORE, (most, most))
from wallfacer_dt.testing import RankPool
if __name__ == "__main__":
    RankPool(1, timeout=300).run(os.abort)
"""


def _why_there_are_no_cores() -> str:
    pattern = Path("/proc/sys/kernel/core_pattern")
    if not pattern.exists():
        return "no /proc/sys/kernel/core_pattern: not Linux"
    if pattern.read_text().startswith(("|", "/")):
        return f"core files go elsewhere: {pattern.read_text().strip()}"
    return "ulimit -H -c is 0" if resource.getrlimit(resource.RLIMIT_CORE)[1] == 0 else ""


@pytest.mark.whole
@pytest.mark.skipif(bool(_why_there_are_no_cores()), reason=_why_there_are_no_cores())
def test_a_crash_leaves_a_core_file_of_which_ci_prints_the_stacks(tmp_path: Path) -> None:
    (tmp_path / "crash.py").write_text(CRASH)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "crash.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    (core,) = tmp_path.glob("core*")
    assert f"rank 0 of 1 died of SIGABRT (its core file is {core}); the pool is closed" in done.stderr
    said = subprocess.run([ROOT / ".ci/stacks", tmp_path], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert f"==== {core}" in said
    if shutil.which("gdb"):
        assert "Thread 1 " in said
        assert "abort" in said
    else:
        assert "gdb is not installed" in said
