"""What the planner chooses for a case: the contender "planned"."""

from collections.abc import Callable

import torch
from torch.distributed.device_mesh import DeviceMesh

from recipes.benchmarks.cluster.cases import Case, Nodes
from recipes.benchmarks.cluster.contenders import PLANNED, Contender
from wallfacer_dt import ModelShape, Plan, SequenceShape, profile
from wallfacer_dt.planning.probe import Probe
from wallfacer_dt.planning.profiling import attention_step


def choose(case: Case, cluster: Nodes, probe: Probe, mesh_of: Callable[[Contender], DeviceMesh]) -> Contender:
    """Choose a contender for a case: links and kernels are measured, and the best few plans run.

    Args:
        case: what is to be computed. Its rate is how the links are limited, which the planner finds out by itself.
        cluster: how ranks are spread over nodes.
        probe: of the ranks, made once.
        mesh_of: the mesh of a contender, made once.

    Returns:
        The contender, the same on every rank.
    """
    model = ModelShape(case.heads * case.head_dim, case.heads, case.kv_heads)
    sequence = SequenceShape(case.length, is_causal=case.is_causal, dtype=torch.float32)
    top, iterations = (4, 1) if case.length > 4096 else (6, 4)

    def build(given: Plan) -> Callable[[], object]:
        return attention_step(given, mesh_of(_contender(given)))

    plan, _ = profile(
        model, sequence, "cpu", ranks_per_node=cluster.per_node, top=top, iterations=iterations, build=build,
        take_turns=True, cluster=probe.cluster(model, sequence, memory=None),
    )  # fmt: skip
    return _contender(plan)


def _contender(given: Plan) -> Contender:
    it = given.chosen
    return Contender(PLANNED, it.ulysses, it.ring, it.team, it.placement, it.schedule, it.rotate, it.order)
