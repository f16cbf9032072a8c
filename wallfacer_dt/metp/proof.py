"""Whether a module computes what METP would compute in its place, tried out in this process alone.

METP takes a module's forward away, so what that does is tried first: with small random weights in place of its own
(of which there may be billions, or none yet), against METP's operators on one rank. That ranks together compute what
one does is not the module's affair, and is what the package's tests are about.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ParallelStyle
from torch.func import functional_call
from torch.utils._pytree import tree_map_only

from wallfacer_dt.autocast import computed_dtype, is_autocast_on
from wallfacer_dt.comparison import IncomparableError, comparable, worst_error
from wallfacer_dt.equivalence.likeness import likeness
from wallfacer_dt.equivalence.trial import EquivalenceError, check_leaves, in_mode

Found = TypeVar("Found")
Inputs = dict[str, Tensor]
"""Parameters by their names in the module, and x by the name ``""``."""

SMALL, LARGEST = 6, 2048  # model dim of what modules are tried with; of one that is tried as it is, the largest
_FEW = 16  # tokens of two rows with large numbers, which are tried apart
LARGE = 64.0  # by what results of projections are large where a clamp would show

Formula = Callable[[Inputs, Sequence[Any], Mapping[str, Any]], Tensor]


class Returned:
    """What a module returns: a tensor, or one with Nones behind it, for what it has not computed.

    Attributes:
        nones: how many; None for a tensor alone, as long as nothing has been returned.
    """

    nones: int | None = None

    def tensor(self, out: Any) -> Any:
        """The tensor of what was returned, if it is one of these."""
        is_one = type(out) is tuple and len(out) > 1 and all(x is None for x in out[1:])
        self.nones = len(out) - 1 if is_one else None
        return out[0] if is_one else out

    def like(self, y: Tensor) -> Any:
        """A tensor as the module returns one."""
        return y if self.nones is None else (y, *(None,) * self.nones)


class CouldNotRunError(EquivalenceError):
    """The module takes none of the calls, whatever it computes."""


class _Tolerance(NamedTuple):
    """By how much results may differ, relative to the largest entry of each, which counts as ``least`` of all at least.

    In float64 a module may turn or norm in float32; float32 is tried under autocast alone, which makes half of it.
    Some gradients are 0 but for rounding, as that of a bias of keys is.
    """

    relative: float
    least: float


_TOLERANCES = {torch.float64: _Tolerance(1e-4, 1e-6), torch.float32: _Tolerance(8e-2, 1e-2)}
_NARROWER = {torch.float64: torch.float32, torch.complex128: torch.complex64}


_passed: WeakKeyDictionary[ParallelStyle, dict[Hashable, Any]] = WeakKeyDictionary()


def once(style: ParallelStyle, module: nn.Module, told: Any, device_type: str, trial: Callable[[], Found]) -> Found:
    """What a trial finds of a module, or has found under this style, and this autocast, of one that is like it.

    Args:
        style: that the module is tried for.
        module: of which weights are not looked at, but for their shapes.
        told: what else the trial depends on, all of the style as it is now.
        device_type: whose autocast counts.
        trial: raises what refuses the module.

    Returns:
        What it gives.
    """
    this = likeness(module, (told, computed_dtype(torch.float32, device_type)), without_parameters=True)
    if this is None:
        return trial()
    passed = _passed.setdefault(style, {})
    if this not in passed:
        passed[this] = trial()
    return passed[this]


def first_that_agrees(trials: Iterable[Callable[[], int]]) -> int:
    """What the first of some trials gives that goes well.

    Args:
        trials: each of other sizes, of which a module may have some by heart.

    Returns:
        The number.

    Raises:
        EquivalenceError: none does; what is said is of the last in which the module could be run, or else of the first.
    """
    refusals: list[EquivalenceError] = []
    for trial in trials:
        try:
            return trial()
        except EquivalenceError as why:
            refusals.append(why)
    raise next((why for why in reversed(refusals) if not isinstance(why, CouldNotRunError)), refusals[0])


def compare(
    module: nn.Module,
    who: str,
    inputs: Inputs,
    calls: Iterable[tuple[Sequence[Any], Mapping[str, Any]]],
    formula: Formula,
    device_type: str = "cpu",
    remedy: str = "or give check=False",
    returned: Returned | None = None,
    *,
    are_large: bool = False,
) -> int:
    """Compare a module's output and gradients with a formula's: in float64, and in float32 where autocast is on.

    Args:
        module: of any size, on any device; it is tried in training mode, with its buffers as they are, and stays as it
            is.
        who: the style.
        inputs: small, float64, on the CPU.
        calls: what the module may be called with after x; one that it takes and in which both agree is enough.
        formula: what METP computes of the same.
        device_type: whose autocast counts, which is then on in this trial on the CPU.
        remedy: what to do about a module that could not be run.
        returned: where Nones behind the output are allowed, what takes note of them.
        are_large: numbers are, so that they may not be computed in 16 bits.

    Returns:
        The number of the call in which they agree.

    Raises:
        EquivalenceError: they differ, naming the first difference, or the module could not be run.
    """
    differences, failures = [], []
    is_on = is_autocast_on(device_type)
    autocast = torch.autocast("cpu", torch.get_autocast_dtype(device_type) if is_on else None, enabled=is_on)
    with (
        in_mode(module, training=True),  # dropout must show, whatever mode the module is in
        torch.device("cpu"),
        torch.random.fork_rng([]),
        torch.inference_mode(False),
        torch.enable_grad(),
        autocast,
    ):
        for number, call in enumerate(calls):
            try:
                dtypes = list(_TOLERANCES)[: 1 + (is_on and not are_large)]
                found = (_tried(module, formula, inputs, call, dtype, returned) for dtype in dtypes)
                problem = next(filter(None, found), "")
            except CouldNotRunError as error:
                failures.append(str(error))
                continue
            if not problem:
                return number
            differences.append(problem)
    kind = type(module).__name__
    if differences:
        under = " under autocast" if is_on else ""
        raise EquivalenceError(f"{kind} is not what {who} computes{under}: {differences[0]}")
    raise CouldNotRunError(f"{kind} {failures[0]}; {remedy}")


def _tried(
    module: nn.Module,
    formula: Formula,
    inputs: Inputs,
    call: tuple[Sequence[Any], Mapping[str, Any]],
    dtype: torch.dtype,
    returned: Returned | None,
) -> str:
    """How the module differs from the formula in a call, or empty; CouldNotRunError where it does not take the call."""
    inputs = {name: x.to(dtype) for name, x in inputs.items()}
    if dtype != torch.float64:
        call = tree_map_only(Tensor, lambda x: x.to(_NARROWER.get(x.dtype, x.dtype)), call)
    args, kwargs = call
    try:
        theirs = _results(lambda x: _run(module, x, args, kwargs, returned), inputs)
    except EquivalenceError:
        raise
    except Exception as error:  # whatever a module may raise
        shape = tuple(inputs[""].shape)
        what = f"could not be run on x {shape} and small weights: {type(error).__name__}: {error}"
        raise CouldNotRunError(what) from error
    ours, tolerance = _results(lambda x: formula(x, args, kwargs), inputs), _TOLERANCES[dtype]
    problem = _difference(ours, theirs, tolerance)
    if problem:
        return problem
    in_evaluation = None if returned is None else Returned()
    with in_mode(module, training=False), torch.no_grad():
        try:
            evaluated = _run(module, inputs, args, kwargs, in_evaluation)
        except EquivalenceError:
            raise
        except Exception:  # what a module does not take in evaluation, it is not called with there
            return ""
    if in_evaluation is not None and returned is not None and in_evaluation.nones != returned.nones:
        return "it returns a tuple in one mode, and in the other something else"
    name = "the output in evaluation mode"
    return _difference({name: ours["the output"]}, {name: evaluated}, tolerance)


def _run(
    module: nn.Module, inputs: Inputs, args: Sequence[Any], kwargs: Mapping[str, Any], returned: Returned | None
) -> Tensor:
    weights = {name: x for name, x in inputs.items() if name}
    weights |= {name: buffer.cpu() for name, buffer in module.named_buffers() if not buffer.is_meta}
    out = functional_call(module, weights, (inputs[""], *args), dict(kwargs), tie_weights=False)
    out = out if returned is None else returned.tensor(out)
    if not isinstance(out, Tensor):
        raise EquivalenceError(
            f"{type(module).__name__} returns a {type(out).__name__}, under METP it returns a tensor"
        )
    if out.requires_grad:
        check_leaves(out, (inputs, args, kwargs), "x and its weights")
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


def _difference(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: _Tolerance) -> str:
    who = "in the module", "under METP"
    try:
        pairs = {name: comparable(name, theirs[name], mine, who) for name, mine in ours.items()}
    except IncomparableError as why:
        return str(why)
    least = tolerance.least * torch.stack([its.abs().max() for its, _ in pairs.values()]).max()
    for name, pair in pairs.items():
        size = torch.maximum(torch.stack(pair).abs().max(), least)
        largest = worst_error([pair]) / float(size)
        if largest > tolerance.relative:
            return f"{name} differs (largest relative difference {largest:.1g})"
    return ""


def where_it_runs(trial: Callable[[int], int], length: int) -> None:
    """Make a trial with few tokens, or else with as many as a module of one length has; or not, if it takes neither."""
    for tokens in (_FEW, length):
        with suppress(CouldNotRunError):
            trial(tokens)
            return


def small_inputs(
    module: nn.Module,
    shapes: Mapping[str, tuple[int, int]],
    x: tuple[int, ...],
    large: Mapping[str, Tensor] | None = None,
) -> Inputs:
    """Random weights of these shapes by projection, with biases where the module has them, and x.

    Args:
        module: which has biases or not.
        shapes: of weights, by projection.
        x: its shape.
        large: by projection, factors of its rows, of the weight and the bias: a clamp of what it gives shows there.

    Returns:
        Them, by name.
    """
    with torch.random.fork_rng([]), torch.device("cpu"):
        torch.manual_seed(0)
        inputs = {"": torch.randn(x, dtype=torch.float64)}
        for name, shape in shapes.items():
            inputs[f"{name}.weight"] = torch.randn(shape, dtype=torch.float64) / shape[1] ** 0.5
            if getattr(module.get_submodule(name), "bias", None) is not None:
                inputs[f"{name}.bias"] = torch.randn(shape[0], dtype=torch.float64)
    for name, factors in (large or {}).items():
        inputs[f"{name}.weight"] *= factors[:, None]
        if f"{name}.bias" in inputs:
            inputs[f"{name}.bias"] *= factors
    return inputs
