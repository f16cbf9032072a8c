"""The check: a planned call of attention on ranks of a world that does not exist, with what it receives counted."""

from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from recipes.benchmarks.memory.run import fake_world
from recipes.benchmarks.scaling.cases import PER_NODE, Case
from wallfacer_dt import TokenOrder, context_mesh, context_parallel_attention
from wallfacer_dt.layout import shard_sizes
from wallfacer_dt.mesh import placed_ranks
from wallfacer_dt.planning import Candidate
from wallfacer_dt.planning.traffic import arrivals
from wallfacer_dt.testing import Traffic, count_collectives


@dataclass(frozen=True, slots=True)
class Bytes:
    """What some ranks receive together.

    Attributes:
        all: from any rank.
        crossing: of these from ranks of other nodes.
    """

    all: int
    crossing: int


def counted(case: Case, candidate: Candidate, ranks: range, *, backward: bool) -> Bytes:
    """Run the schedule on some ranks, one after the other, on tensors without contents.

    Args:
        case: what is attended.
        candidate: how.
        ranks: of one node.
        backward: run it, too.

    Returns:
        What they receive.
    """
    total = crossing = 0
    for rank in ranks:
        traffic = _run(case, candidate, rank, backward=backward)
        for way in (traffic.forward, traffic.backward):
            total += way.received_bytes
            crossing += sum(n for other, n in way.via.items() if other // PER_NODE != rank // PER_NODE)
    return Bytes(total, crossing)


def _run(case: Case, candidate: Candidate, rank: int, *, backward: bool) -> Traffic:
    it, model, sequence = candidate, case.model, case.sequence
    with fake_world(it.size, rank):
        mesh = context_mesh("cpu", it.ring, it.team, ulysses=it.ulysses, placement=it.placement)
        rows = shard_sizes(sequence.length, it.axes)[_index(candidate, rank)]
        shapes = [(1, heads, rows, model.dim) for heads in (model.heads, model.keys, model.keys)]
        with FakeTensorMode(), count_collectives(mesh) as traffic:
            q, k, v = (torch.empty(shape, dtype=sequence.dtype, requires_grad=True) for shape in shapes)
            out = context_parallel_attention(
                q, k, v, mesh, is_causal=sequence.is_causal, order=TokenOrder(it.order, mesh), schedule=it.schedule,
                rotate=it.rotate, rotate_forward=it.rotate_forward, length=sequence.length,
            )  # fmt: skip
            if backward:
                out.backward(torch.empty_like(out))
    return traffic


def predicted(case: Case, candidate: Candidate, ranks: range, *, backward: bool) -> Bytes:
    """What the planner says that these ranks receive.

    Args:
        case: what is attended.
        candidate: how.
        ranks: of one node.
        backward: count it, too.

    Returns:
        What they receive.
    """
    rank_of = _ranks(candidate)
    total = crossing = 0
    for key, some in arrivals(candidate, case.model, case.sequence).items():
        receivers, senders = (torch.from_numpy(ends) for ends in (some.receiver, some.via))
        mine = (rank_of[receivers] >= ranks.start) & (rank_of[receivers] < ranks.stop)
        if backward or not key.backward:
            nbytes = torch.from_numpy(some.total)
            total += int(nbytes[mine].sum())
            outside = rank_of[senders] // PER_NODE != rank_of[receivers] // PER_NODE
            crossing += int(nbytes[mine & outside].sum())
    return Bytes(total, crossing)


def _ranks(candidate: Candidate) -> torch.Tensor:
    """The rank of every sequence index."""
    it = candidate
    return placed_ranks(it.ring, it.team, ulysses=it.ulysses, placement=it.placement).flatten()


def _index(candidate: Candidate, rank: int) -> int:
    return int((_ranks(candidate) == rank).nonzero())
