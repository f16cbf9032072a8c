"""What the host takes for an operation of attention, in calls so short that a device waits for it."""

from functools import partial

import torch

from recipes.benchmarks.gpu.stages import Cases, Place, Record
from wallfacer_dt import ModelShape, SequenceShape, TokenOrder, context_mesh, context_parallel_attention
from wallfacer_dt.planning import Candidate, Cluster, Kernels, Link
from wallfacer_dt.planning.predict import attention_cost
from wallfacer_dt.testing.fake import fake_world

MESHES = (1, 4, 1), (1, 8, 1), (1, 4, 2), (1, 2, 4), (8, 1, 1), (4, 2, 1), (2, 4, 1)
"""Ulysses, ring and team."""


def host(place: Place) -> Cases:
    """Forward and backward of one rank with few tokens, and by the operations that the planner has it launch."""
    for mesh in MESHES if place.is_gpu else MESHES[-1:]:
        for tokens in (512, 2048) if place.is_gpu else (16,):
            ulysses, ring, team = mesh
            way = Candidate(ring, team, ulysses, order="head_tail", rotate="kv", rotate_forward="kv")
            yield f"{way}, {tokens} tokens", partial(_call, place, way, tokens)


def _call(place: Place, way: Candidate, tokens: int) -> Record:
    q, k, v = (place.drawn(n, tokens, 128) for n in (32, 8, 8))
    grad_out = torch.randn_like(q)
    with fake_world(way.size, 1):
        mesh = context_mesh(place.device, way.ring, way.team, ulysses=way.ulysses)
        order = TokenOrder(way.order, mesh)
        told = {"order": order, "rotate": way.rotate, "rotate_forward": way.rotate_forward}

        def both() -> None:
            context_parallel_attention(q, k, v, mesh, is_causal=True, **told).backward(grad_out)

        taken = place.milliseconds(both)
    # A host that takes a second for each.
    where = Cluster(way.size, way.size, Link(1e9), Link(1e9), kernels=Kernels(launch=1.0))
    shape, sequence = ModelShape(32 * 128, 32, 8), SequenceShape(tokens * way.size, is_causal=True)
    operations = sum(one.line.host for one in attention_cost(way, shape, sequence, where).ways)
    return {"ms": round(taken, 3), "operations": round(operations), "us each": round(1e3 * taken / operations, 1)}
