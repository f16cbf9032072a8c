"""What the planner chooses for a case: the contenders "predicted" and "planned"."""

import time
from dataclasses import dataclass

import torch

from recipes.benchmarks.cluster.cases import Case
from recipes.benchmarks.cluster.contenders import PLANNED, PREDICTED, Contender
from wallfacer_dt import ModelShape, SequenceShape, profile
from wallfacer_dt.planning.candidates import Candidate
from wallfacer_dt.planning.probe import Probe


@dataclass(frozen=True, slots=True)
class Choice:
    """What the planner chose.

    Attributes:
        predicted: the best by prediction.
        planned: the fastest of the best few, which were run.
        ran: how many these were.
        seconds: from measuring links and kernels to the choice.
    """

    predicted: Contender
    planned: Contender
    ran: int
    seconds: float


def choose(case: Case, probe: Probe) -> Choice:
    """Choose contenders for a case: links and kernels are measured, and the best few plans run.

    Args:
        case: what is to be computed. Its rate is how the links are limited, which the planner finds out by itself.
        probe: of the ranks, made once.

    Returns:
        What was chosen, the same on every rank.
    """
    begun = time.perf_counter()
    model = ModelShape(case.heads * case.head_dim, case.heads, case.kv_heads)
    sequence = SequenceShape(case.length, is_causal=case.is_causal, dtype=torch.float32)
    top, iterations, turns = (4, 1, 1) if case.is_long else (8, 2, 3)
    chosen, measured = profile(
        model, sequence, "cpu", top=top, iterations=iterations, turns=turns,
        cluster=probe.cluster(model, sequence, memory=None),
    )  # fmt: skip
    # They were run in the order of what was predicted.
    first = measured.measured[0].candidate
    return Choice(
        _contender(first, PREDICTED), _contender(chosen.chosen, PLANNED), len(measured.measured),
        time.perf_counter() - begun,
    )  # fmt: skip


def _contender(it: Candidate, name: str) -> Contender:
    return Contender(
        name, it.ulysses, it.ring, it.team, it.placement, it.schedule, it.rotate, it.rotate_forward, it.order
    )
