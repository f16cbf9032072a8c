"""Whether runs that should be the same run are: pure functions of their records."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Literal

from recipes.training.record import Run
from wallfacer_dt.testing import IncomparableError, worst_error

TOLERANCE = 1e-4
NORM_TOLERANCE = 1e-2  # of itself; in float32 roundings stay below 1e-4


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """How far runs are apart.

    Attributes:
        loss_differences: of each step, the largest loss of any run less the smallest.
        grad_norm_differences: of each step, the same of the gradient norms, over the smallest.
        tolerance: how large a loss difference may be.
        failures: a line for each thing that is wrong; none if all is well.
    """

    loss_differences: tuple[float, ...]
    grad_norm_differences: tuple[float, ...]
    tolerance: float
    failures: tuple[str, ...]

    @property
    def largest_loss_difference(self) -> float:
        """The largest over the steps; infinite if any loss was not finite."""
        return max(self.loss_differences)

    @property
    def largest_grad_norm_difference(self) -> float:
        """The largest over the steps, relative; infinite if any norm was not finite, or 0 in one run alone."""
        return max(self.grad_norm_differences)


def compare(runs: Sequence[Run], *, tolerance: float = TOLERANCE) -> Comparison:
    """Compare every step of runs that saw the same data from the same start.

    Bytes are compared too: each run's counted bytes against its formula's.

    Args:
        runs: two or more, of the same number of steps.
        tolerance: largest loss difference between any two runs at any step.

    Raises:
        ValueError: fewer than two runs, no steps, or runs of different lengths.
    """
    steps = {len(run.losses) for run in runs} | {len(run.grad_norms) for run in runs}
    if len(runs) < 2 or len(steps) != 1 or steps == {0}:
        raise ValueError(f"expected two or more runs of the same length, got {len(runs)} of {steps}")
    losses = _by_step(runs, lambda run: run.losses)
    norms = _by_step(runs, lambda run: run.grad_norms)
    differences = tuple(map(_spread, losses))
    norm_differences = tuple(_spread(step, relative_to="each") for step in norms)
    return Comparison(
        loss_differences=differences,
        grad_norm_differences=norm_differences,
        tolerance=tolerance,
        failures=(*_loss_failures(differences, tolerance), *_norm_failures(norm_differences), *_byte_failures(runs)),
    )


def _by_step(runs: Sequence[Run], values: Callable[[Run], tuple[float, ...]]) -> list[tuple[float, ...]]:
    return list(zip(*map(values, runs), strict=True))


def _spread(values: tuple[float, ...], relative_to: Literal["nothing", "each"] = "nothing") -> float:
    """The largest difference between any two; infinite if one is not finite."""
    found, expected = zip(*permutations(values, 2), strict=True)
    try:
        return worst_error([(found, expected)], relative_to=relative_to)
    except IncomparableError:
        return math.inf


def _loss_failures(differences: Sequence[float], tolerance: float) -> list[str]:
    worst = max(range(len(differences)), key=differences.__getitem__)
    if differences[worst] <= tolerance:
        return []
    return [f"losses differ by {differences[worst]:.2e} at step {worst + 1}; at most {tolerance:.0e} is right"]


def _norm_failures(differences: Sequence[float]) -> list[str]:
    """Of gradients that are scaled wrongly losses say little: AdamW takes them alike, and clipping hides the rest."""
    steps = [step for step, difference in enumerate(differences, 1) if not difference <= NORM_TOLERANCE]
    if not steps:
        return []
    first = steps[0]
    if differences[first - 1] == math.inf:
        return [f"a gradient norm at step {first} is not finite, or 0 in one run alone"]
    return [f"gradient norms differ by {differences[first - 1]:.1e} of themselves at step {first}"]


def _byte_failures(runs: Sequence[Run]) -> list[str]:
    failures = []
    for run in runs:
        for direction, traffic in (("forward", run.forward), ("backward", run.backward)):
            if traffic is not None and not traffic.as_formula:
                failures.append(
                    f"{run.name}, {direction}: the ranks received {traffic.received} bytes in"
                    f" {traffic.calls} calls; the formula says {traffic.formula} a layer,"
                    f" of {traffic.layers}, in {traffic.expected_calls} calls each"
                )
    return failures
