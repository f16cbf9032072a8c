"""Whether a module computes what METP would compute in its place, tried out in this process alone.

METP takes a module's forward away, so what that does is tried first: with small random weights in place of its own
(of which there may be billions, or none yet), against METP's operators on one rank. That ranks together compute what
one does is not the module's affair, and is what the package's tests are about.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from wallfacer_dt.equivalence import EquivalenceError, in_mode

Inputs = dict[str, Tensor]
"""Parameters by their names in the module, and x by the name ``""``."""


class CouldNotRunError(EquivalenceError):
    """The module takes none of the calls, whatever it computes."""


_TOLERANCE = 1e-4  # relative, in float64: a module may turn or norm in float32


def compare(
    module: nn.Module,
    who: str,
    inputs: Inputs,
    calls: Iterable[tuple[Sequence[Any], Mapping[str, Any]]],
    formula: Callable[[Inputs, Sequence[Any], Mapping[str, Any]], Tensor],
) -> int:
    """Compare a module's output and gradients with a formula's.

    Args:
        module: of any size, on any device; it is tried in training mode, with its buffers as they are, and stays as it
            is.
        who: the style.
        inputs: small, float64, on the CPU.
        calls: what the module may be called with after x; one that it takes and in which both agree is enough.
        formula: what METP computes of the same.

    Returns:
        The number of the call in which they agree.

    Raises:
        EquivalenceError: they differ, naming the first difference, or the module could not be run.
    """
    problems, has_run = [], False
    with (
        in_mode(module, training=True),  # dropout must show, whatever mode the module is in
        torch.device("cpu"),
        torch.random.fork_rng([]),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
    ):
        for number, (args, kwargs) in enumerate(calls):
            try:
                theirs = _results(lambda x, a=args, k=kwargs: _run(module, x, a, k), inputs)
            except EquivalenceError:
                raise
            except Exception as error:  # whatever a module may raise
                shape = tuple(inputs[""].shape)
                what = f"could not be run on x {shape} and small weights: {type(error).__name__}: {error}"
                problems.append(f"{what}; or give check=False")
                continue
            has_run = True
            ours = _results(lambda x, a=args, k=kwargs: formula(x, a, k), inputs)
            if (problem := _difference(ours, theirs)) is None:
                return number
            problems.append(f"is not what {who} computes: {problem}")
    raise (EquivalenceError if has_run else CouldNotRunError)(f"{type(module).__name__} {problems[-1]}")


def _run(module: nn.Module, inputs: Inputs, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    weights = {name: x for name, x in inputs.items() if name}
    weights |= {name: buffer.cpu() for name, buffer in module.named_buffers() if not buffer.is_meta}
    out = functional_call(module, weights, (inputs[""], *args), dict(kwargs), tie_weights=False)
    if not isinstance(out, Tensor):
        raise EquivalenceError(
            f"{type(module).__name__} returns a {type(out).__name__}, under METP it returns a tensor"
        )
    return out


def _results(function: Callable[[Inputs], Tensor], inputs: Inputs) -> dict[str, Tensor]:
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
    out = function(leaves)
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape).cos()
    grads = torch.autograd.grad((out * weight).sum(), list(leaves.values()), allow_unused=True)
    named = zip(leaves, grads, strict=True)
    return {"the output": out.detach()} | {
        f"the gradient of {name or 'x'}": torch.zeros_like(leaves[name]) if grad is None else grad
        for name, grad in named
    }


def _difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> str | None:
    # Some gradients are 0 but for rounding, as that of a bias of keys is.
    least = 1e-6 * max(float(x.abs().max()) for x in theirs.values())
    for name, mine in ours.items():
        its = theirs[name]
        if mine.shape != its.shape:
            return f"{name} has shape {tuple(its.shape)} in the module, {tuple(mine.shape)} under METP"
        size = max(float(mine.abs().max()), float(its.abs().max()), least)
        largest = float((mine - its.to(mine.dtype)).abs().nan_to_num(torch.inf).max()) / size
        if not largest <= _TOLERANCE:
            return f"{name} differs (largest relative difference {largest:.1g})"
    return None


def small_inputs(module: nn.Module, shapes: Mapping[str, tuple[int, int]], x: tuple[int, ...]) -> Inputs:
    """Random weights of these shapes by projection, with biases where the module has them, and x."""
    with torch.random.fork_rng([]), torch.device("cpu"):
        torch.manual_seed(0)
        inputs = {"": torch.randn(x, dtype=torch.float64)}
        for name, shape in shapes.items():
            inputs[f"{name}.weight"] = torch.randn(shape, dtype=torch.float64) / shape[1] ** 0.5
            if getattr(module.get_submodule(name), "bias", None) is not None:
                inputs[f"{name}.bias"] = torch.randn(shape[0], dtype=torch.float64)
    return inputs
