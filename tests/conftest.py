"""Pools of real gloo ranks, started when first needed and kept for a module; hypothesis profiles."""

from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from wallfacer_dt.testing import RankPool

torch.set_num_threads(1)
# A first example on a size starts its pool, which is no flaw of the property.
settings.register_profile(
    "ranks", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.load_profile("ranks")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """``ranks(size)``: the pool of that size; those of a module are closed with it, for their memory."""
    pools: dict[int, RankPool] = {}

    def pool(size: int) -> RankPool:
        if size not in pools or pools[size].closed:
            pools[size] = RankPool(size, timeout=60)
        return pools[size]

    yield pool
    for started in pools.values():
        started.close()
