"""Running a call on one rank of a world that does not exist: what is received, and what is held."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh

from recipes.benchmarks.memory.run import fake_world
from recipes.benchmarks.papers.models import Call
from wallfacer_dt import attention_volume, context_mesh, context_parallel_attention
from wallfacer_dt.planning.alive import Alive
from wallfacer_dt.testing import count_collectives

RANK = 1
"""Whose numbers these are: one that Algorithm 2 never names as its own target."""


@dataclass(frozen=True, slots=True)
class Received:
    """What a rank receives in the forward of a call.

    Attributes:
        hops: messages that it gets from one other rank.
        point_to_point: bytes of those.
        collective: bytes of all others, statistics left out.
        statistics: bytes of log-sum-exps that travel with partial outputs.
    """

    hops: int
    point_to_point: int
    collective: int
    statistics: int

    @property
    def payload(self) -> int:
        """Bytes, statistics left out."""
        return self.point_to_point + self.collective


@dataclass(frozen=True, slots=True)
class Held:
    """What a rank holds in a call, in bytes, its shards of q, k and v among it.

    Attributes:
        before: when the first block is computed.
        peak: the most during the forward.
        kept: after the forward, for the backward, the output among it.
        step_peak: the most during forward and backward, gradients among it.
    """

    before: int
    peak: int
    kept: int
    step_peak: int


@cache
def received(call: Call) -> Received:
    """Count the forward's collectives.

    Args:
        call: to run.

    Returns:
        What rank 1 receives, or rank 0 where there is no other.
    """
    with _inputs(call) as (mesh, (q, k, v)), count_collectives(mesh) as traffic:
        context_parallel_attention(q, k, v, mesh, schedule=call.schedule)
    seen, calls = traffic.forward.received, traffic.forward.collectives
    # A permutation is an all-to-all of which all parts but one are empty; the team's exchange is a true one.
    hops = [key for key in seen if key[0] == "all_to_all_single" and key[1] != "cp_team"]
    point_to_point = sum(seen[key] for key in hops)
    statistics = 4 * _statistics(call)
    collective = seen.total() - point_to_point - statistics
    return Received(sum(calls[key] for key in hops), point_to_point, collective, statistics)


def _statistics(call: Call) -> int:
    volume = attention_volume(
        call.ring, call.team, batch=1, length=call.tokens, heads=call.heads, kv_heads=call.heads,
        head_dim=call.head_dim, dtype=getattr(torch, call.dtype), schedule=call.schedule, index=RANK % call.ranks,
    )  # fmt: skip
    return volume.forward.statistics


@cache
def held(call: Call) -> Held:
    """Follow the tensors of forward and backward.

    Args:
        call: to run.

    Returns:
        What rank 1 holds, or rank 0 where there is no other.
    """
    with _inputs(call) as (mesh, (q, k, v)), _AtFirstBlock(q, k, v) as alive:
        out = context_parallel_attention(q, k, v, mesh, schedule=call.schedule)
        peak, kept = alive.peak, alive.now
        out.backward(torch.empty_like(out))
        return Held(alive.before, peak, kept, alive.peak)


class _AtFirstBlock(Alive):
    """``before`` is what is alive when an attention kernel runs for the first time."""

    before = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if not self.before and "_flash_attention" in func._schema.name:
            self.before = self.now
        return super().__torch_dispatch__(func, types, args, kwargs)


@contextmanager
def _inputs(call: Call) -> Iterator[tuple[DeviceMesh, list[Tensor]]]:
    """A mesh, and one rank's shards of q, k and v, which have no contents."""
    with fake_world(call.ranks, RANK % call.ranks):
        mesh = context_mesh("cpu", call.ring, call.team)
        shape = (1, call.heads, call.tokens // call.ranks, call.head_dim)
        with FakeTensorMode():
            yield mesh, [torch.empty(shape, dtype=getattr(torch, call.dtype), requires_grad=True) for _ in range(3)]
