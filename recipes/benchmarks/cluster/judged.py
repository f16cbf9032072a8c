"""Who is how much slower than whom, and what of it counts."""

import statistics
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch

from recipes.benchmarks.cluster.cases import Case
from recipes.benchmarks.cluster.contenders import FLOOR, HEAD_TAIL_RING, PLANNED, PREDICTED, RING, Contender
from recipes.benchmarks.cluster.record import Entry
from wallfacer_dt.algorithms.volume import resolve_rotations

Measured = Mapping[str, Entry]
"""The contenders of one case by name."""

# The bounds that the choice is held to: above the best; times one process where links have no limit; and how much
# faster than a ring it is where heads are fewer than ranks.
REGRET, OVER_FLOOR, OVER_RING = 0.10, 1.2, 1.5
# Slower beyond noise: of at least so many rounds in this part, and in the median by more than this.
ROUNDS, OFTEN, NOISE = 3, 0.8, 0.03


def best_of(measured: Measured) -> str:
    """The fastest contender on ranks."""
    return min((name for name in measured if name != FLOOR), key=lambda name: measured[name].seconds)


def known_as(measured: Measured, name: str) -> str:
    """The name, or that of what was planned or predicted where it is the same plan."""
    return next((one for one in (PLANNED, PREDICTED) if is_same(measured, one, name)), name)


def regret(measured: Measured) -> float:
    """How much slower the planned contender is than the best other one, as a part of that."""
    return behind_best(measured, PLANNED)


def regret_by_round(measured: Measured) -> float | None:
    """The same without the luck of who is best of many: in every round against who was best in the others.

    Returns:
        The median of how much slower planned is, below 0 where it is faster; None where there is one round.
    """
    others = [entry for name, entry in measured.items() if name != FLOOR and not is_same(measured, name)]
    ours = measured[PLANNED].sums
    if len(ours) < 2 or not others:
        return None

    def but(turn: int, entry: Entry) -> float:
        return statistics.median(seconds for i, seconds in enumerate(entry.sums) if i != turn)

    bests = [min(others, key=partial(but, turn)) for turn in range(len(ours))]
    return statistics.median(
        mine / best.sums[turn] - 1 for turn, (mine, best) in enumerate(zip(ours, bests, strict=True))
    )


def noise(cases: Mapping[Case, Measured]) -> list[float]:
    """How much slower the slower one is where another contender is the plan that was planned: it was measured twice."""
    twice = [
        times(measured, other, PLANNED)
        for measured in cases.values()
        for other in measured
        if other != PLANNED and is_same(measured, other)
    ]
    return [max(ratio, 1 / ratio) - 1 for ratio in twice]


def is_slower(measured: Measured, other: str) -> bool:
    """Whether the planned contender is slower than another in most rounds, in which both took turns, beyond noise."""
    pairs = list(zip(measured[PLANNED].sums, measured[other].sums, strict=True))
    often = sum(ours > theirs for ours, theirs in pairs) >= OFTEN * len(pairs)
    return often and times(measured, PLANNED, other) > 1 + NOISE


def over_rings(measured: Measured, other: str = PLANNED) -> float:
    """How many times as long as planned, or another, the faster ring takes, in contiguous order or head-tail."""
    rings = [measured[name].seconds for name in (RING, HEAD_TAIL_RING) if name in measured]
    return min(rings) / measured[other].seconds


def behind_best(measured: Measured, name: str) -> float:
    others = [other for other in measured if other != FLOOR and not is_same(measured, other, name)]
    return max([0.0, *(times(measured, name, other) - 1 for other in others)]) if name in measured else 0.0


def is_same(measured: Measured, one: str, other: str = PLANNED) -> bool:
    """Whether two contenders are one but for their names."""
    if not {one, other} <= measured.keys():
        return False
    first, second = (_plain(measured[name].contender, measured[name].case) for name in (one, other))
    return first == second


def _plain(it: Contender, case: Case) -> Contender:
    """Without its name, and what makes no difference to its mesh; with what rotates in this case."""
    if it.ulysses * it.ring * it.team in (it.ulysses, it.ring, it.team):
        it = replace(it, placement="team_in_node")
    if it.ring * it.team == 1:
        it = replace(it, schedule="2d", rotate="auto", rotate_forward="auto")
    elif it.kind == "context":
        forward, backward = resolve_rotations(
            it.rotate, it.rotate_forward, it.schedule, it.ring, it.team, ulysses=it.ulysses, heads=case.heads,
            kv_heads=case.kv_heads, head_dim=case.head_dim, value_dim=case.head_dim, shared_dim=0,
            lengths=(case.length, case.length), dtype=torch.float32,
        )  # fmt: skip
        it = replace(it, rotate=backward, rotate_forward=forward)
    return replace(it, name="")


def fastest(measured: Measured, family: str) -> str:
    """The fastest contender of this name, or of those whose names begin with it where none has it; or nothing."""
    names = [family] if family in measured else [name for name in measured if name.startswith(f"{family},")]
    return min(names, key=lambda name: measured[name].seconds, default="")


def times(measured: Measured, name: str, other: str) -> float:
    return measured[name].seconds / measured[other].seconds
