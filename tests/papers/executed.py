"""Attention on one rank of a world that does not exist, on tensors without contents: what it receives and holds."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh

from tests.papers.models import Call
from wallfacer_dt import (
    ModelShape,
    SequenceShape,
    TokenOrder,
    attention_volume,
    context_mesh,
    context_parallel_attention,
)
from wallfacer_dt.layout import shard_sizes
from wallfacer_dt.mesh import placed_ranks
from wallfacer_dt.planning import Candidate
from wallfacer_dt.planning.alive import Alive
from wallfacer_dt.testing import Traffic, count_collectives
from wallfacer_dt.testing.fake import fake_world

RANK = 1
"""Whose numbers these are: one that Algorithm 2 never names as its own target."""


@contextmanager
def attention_on(
    way: Candidate, model: ModelShape, sequence: SequenceShape, rank: int
) -> Iterator[tuple[DeviceMesh, tuple[Tensor, ...], Callable[[], Tensor]]]:
    """The mesh, a rank's shards of q, k and v, which lie by tokens, and the call that attends them."""
    with fake_world(way.size, rank):
        mesh = context_mesh("cpu", way.ring, way.team, ulysses=way.ulysses, placement=way.placement)
        rows = shard_sizes(sequence.length, way.axes)[int((ranks_of(way) == rank).nonzero())]
        shapes = [(sequence.batch, rows, heads, model.dim) for heads in (model.heads, model.keys, model.keys)]
        with FakeTensorMode():
            by_tokens = (torch.empty(shape, dtype=sequence.dtype) for shape in shapes)
            inputs = tuple(x.transpose(1, 2).requires_grad_() for x in by_tokens)
            attend = partial(
                context_parallel_attention, *inputs, mesh, is_causal=sequence.is_causal,
                order=TokenOrder(way.order, mesh), schedule=way.schedule, rotate=way.rotate,
                rotate_forward=way.rotate_forward, length=sequence.length,
            )  # fmt: skip
            yield mesh, inputs, attend


def traffic_of(
    way: Candidate, model: ModelShape, sequence: SequenceShape, rank: int, *, backward: bool = False
) -> Traffic:
    """What a rank receives in the forward, and where it is run in the backward: counted, not predicted."""
    with attention_on(way, model, sequence, rank) as (mesh, _, attend), count_collectives(mesh) as traffic:
        out = attend()
        if backward:
            out.backward(torch.empty_like(out))
    return traffic


def ranks_of(way: Candidate) -> Tensor:
    """The rank of every sequence index."""
    return placed_ranks(way.ring, way.team, ulysses=way.ulysses, placement=way.placement).flatten()


class Received(NamedTuple):
    """Of the forward: messages and their bytes from one other rank, other bytes, and log-sum-exps beside these."""

    hops: int
    point_to_point: int
    collective: int
    statistics: int

    @property
    def payload(self) -> int:
        """Bytes, log-sum-exps left out."""
        return self.point_to_point + self.collective


@cache
def received(call: Call) -> Received:
    """Count the forward's collectives on rank 1, or rank 0 where there is no other."""
    way, model, rank = call.way, call.model, RANK % call.ranks
    forward = traffic_of(way, model, call.sequence, rank).forward
    # A permutation is an all-to-all of which all parts but one are empty; the team's exchange is a true one.
    hops = [key for key in forward.received if key[0] == "all_to_all_single" and key[1] != "cp_team"]
    point_to_point = sum(forward.received[key] for key in hops)
    volume = attention_volume(
        way.ring, way.team, batch=1, length=call.tokens, heads=model.heads, kv_heads=model.keys, head_dim=model.dim,
        dtype=call.sequence.dtype, schedule=call.schedule, index=rank,
    )  # fmt: skip
    statistics = 4 * volume.forward.statistics
    collective = forward.received_bytes - point_to_point - statistics
    return Received(sum(forward.collectives[key] for key in hops), point_to_point, collective, statistics)


class Held(NamedTuple):
    """Bytes at the first block, the most in the forward, after it, and the most in both; the inputs are among them."""

    before: int
    peak: int
    kept: int
    step_peak: int


@cache
def held(call: Call) -> Held:
    """Follow the tensors of forward and backward on rank 1, or rank 0 where there is no other."""
    rank = RANK % call.ranks
    with (
        attention_on(call.way, call.model, call.sequence, rank) as (_, inputs, attend),
        _AtFirstBlock(*inputs) as alive,
    ):
        out = attend()
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
