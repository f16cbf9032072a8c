"""Pools of ranks, started when first needed and kept for a module; hypothesis profiles; options of the tiers.

Profiles: `fast` tries the same examples every time, `whole` twelve times as many, `random` others at every run. See
docs/testing.md.
"""

import gc
import importlib.util
import os
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

from tests.tally import Tally
from wallfacer_dt.testing import RankPool
from wallfacer_dt.testing.pool import fork_server

torch.set_num_threads(1)
# Inductor's compile one kernel after the other, without processes of its own for every rank, each of which would import
# torch; and take the instructions that the processor says it has without a process that tries them.
for _name in ("TORCHINDUCTOR_COMPILE_THREADS", "TORCHINDUCTOR_VEC_ISA_OK"):
    os.environ.setdefault(_name, "1")
# torchtitan changes settings of torch where it is imported, which is in pools of ranks; examples of others need their
# extra.
collect_ignore_glob = [
    f"wallfacer_dt/integrations/{name}/*"
    for name in ("diffusers", "torchtitan", "transformers")
    if name == "torchtitan" or importlib.util.find_spec(name) is None
]
if importlib.util.find_spec("accelerate") is None:
    collect_ignore_glob.append("wallfacer_dt/integrations/transformers/trainer.py")
# A first example on a size starts its pool, which is no flaw of the property.
_SLOW = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
settings.register_profile("fast", derandomize=True, max_examples=40, **_SLOW)
settings.register_profile("whole", derandomize=True, max_examples=500, **_SLOW)
# What breaks under a mutant need not be made small.
settings.register_profile(
    "mutants", settings.get_profile("fast"), max_examples=100, phases=(Phase.explicit, Phase.generate)
)
# Where CI is set, hypothesis has defaults of its own, among them that of the same examples every time.
settings.register_profile("random", derandomize=False, print_blob=True, max_examples=100, **_SLOW)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--whole", action="store_true", help="run what is marked `whole` too, with twelve times the examples"
    )
    parser.addoption(
        "--processes", action="store_true", help="run what runs on threads, and only that, on gloo processes instead"
    )
    parser.addini(
        "budget_minutes", "where the variable CI is set: a run beyond the first is told so, beyond the second fails"
    )


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("whole" if config.getoption("whole") else "fast")
    config.pluginmanager.register(Tally(config))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if {"ranks", "threads"} & {*getattr(item, "fixturenames", ())}:
            item.add_marker("ranks")

    def is_left_out(item: pytest.Item) -> bool:
        if config.getoption("processes") and "threads" not in getattr(item, "fixturenames", ()):
            return True
        return not config.getoption("whole") and item.get_closest_marker("whole") is not None

    config.hook.pytest_deselected(items=[item for item in items if is_left_out(item)])
    items[:] = [item for item in items if not is_left_out(item)]
    # Files that take long come first: at the end of a run each worker has one, and waits for the other's.
    long = {item.path for item in items if item.get_closest_marker("slow") or item.get_closest_marker("ranks")}
    items.sort(key=lambda item: item.path not in long)


def pytest_collection_finish() -> None:
    gc.freeze()  # modules and tests, at which the collections of garbage to come need not look


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Has the fork server, before the first pool, import more than a pool's, and its processes keep freed memory.

    Else the system takes what is large, and clears every page of it when it is had again.
    """
    if item.get_closest_marker("ranks"):
        fork_server().set_forkserver_preload(["tests.preloaded"])
        with mock.patch.dict(os.environ, MALLOC_MMAP_THRESHOLD_=str(2**30), MALLOC_TRIM_THRESHOLD_=str(2**31)):
            forkserver.ensure_running()


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """``ranks(size)``: the pool of that many gloo processes, for transport, refusals, timeouts and compilation."""
    yield from _pools(threads=False)


@pytest.fixture(scope="module")
def threads(request: pytest.FixtureRequest) -> Iterator[Callable[[int], RankPool]]:
    """``threads(size)``: the pool of that many threads that take turns, for properties of what ranks compute."""
    yield from _pools(threads=not request.config.getoption("processes"))


def _pools(*, threads: bool) -> Iterator[Callable[[int], RankPool]]:
    """Those of a module are closed with it, for their memory."""
    pools: dict[int, RankPool] = {}

    def pool(size: int) -> RankPool:
        if size not in pools or pools[size].closed:
            pools[size] = RankPool(size, timeout=120, threads=threads)
        return pools[size]

    yield pool
    for started in pools.values():
        started.close()
