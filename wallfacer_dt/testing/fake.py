"""This process as one rank of a world that does not exist."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

# Private: a process group that sends nothing. Run on torch 2.13.0.
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def fake_world(size: int, rank: int = 0) -> Iterator[None]:
    """A default process group of so many ranks, of which only this one exists."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()
