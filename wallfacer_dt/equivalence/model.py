"""A whole model, of any kind, on one process and on a mesh: loss, gradients, and which module differs first.

Where a style is compared with the module that it replaces, this compares what a training step gives, whatever made the
model parallel: also what no style sees, as positions, labels, and keywords that somebody swallowed.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from wallfacer_dt.agreement.agree import agree, hear_all, refusing_together
from wallfacer_dt.comparison import IncomparableError, worst_error
from wallfacer_dt.equivalence.together import random_state_kept, run_together
from wallfacer_dt.equivalence.trial import EquivalenceError
from wallfacer_dt.layout import BY_DOCUMENT
from wallfacer_dt.mesh import name_of
from wallfacer_dt.order import TokenOrder, check_token_order
from wallfacer_dt.sequence import local_shard

Loss = Callable[[nn.Module], Tensor]
_CHECK = "check_model"


class _Tolerance(NamedTuple):
    """By how much numbers may differ, relative to the largest of each.

    A bias's gradient counts as ``least`` of that of its weight at least: a key's, which moves all scores of a row
    alike, is 0 but for rounding.
    """

    relative: float
    least: float


# Norms and losses of a float64 model may be in float32.
_TOLERANCES = {torch.float64: _Tolerance(1e-5, 1e-7), torch.float32: _Tolerance(1e-3, 3e-3)}
_NARROW = _Tolerance(8e-2, 1e-1)
_NOTHING = 1e-10  # of the largest gradient of all
_POSITIONS = re.compile(r"embed|rotary|rope|position|wpe", re.IGNORECASE)


def check_model(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    whole: Loss,
    sharded: Loss,
    order: TokenOrder | None = None,
    document_ids: Tensor | None = None,
    tolerance: float | None = None,
) -> None:
    """Compare a model's loss and gradients on a mesh with those of one process that runs the whole sequence.

    Every rank runs both, forward and backward, on the same short batch; all ranks of the mesh call it together. Losses
    and gradients of the sharded run are summed over the mesh, as in training (docs/composition.md), and must be those
    of the whole run. Gradients, buffers, attributes and the random state are left as they are; parameters are whole
    tensors, so it is called before ``fully_shard``, and makes memory for two more sets of gradients.

    Args:
        model: any module, in the mode it is trained in, without dropout.
        mesh: of the ranks that share a sequence.
        whole: ``whole(model)`` is the loss of the whole batch on this rank alone, without the mesh.
        sharded: ``sharded(model)`` is this rank's part of that loss, on this rank's part of the batch.
        order: in which the batch was dealt out, dim 1 of what modules give. With it the first module whose output
            differs is named.
        document_ids: as :func:`shard_sequence` was given them, for ``document_head_tail``.
        tolerance: of the loss, and of gradients relative to their largest elements; by default 1e-5 for a model in
            float64, 1e-3 in float32, and 8e-2 where a parameter, or what a module gives, is in 16 bits or fewer. A
            bias's gradient counts as 1e-7, 3e-3 or 0.1 of that of its weight at least, as some are 0 but for rounding.

    Raises:
        EquivalenceError: on every rank, naming what differs, where first, and what may have caused it.
        TypeError: a model or loss of the wrong type, or parameters that are DTensors.
        ValueError: parameters that differ between ranks, a tolerance that is no number above 0, or what a run refuses.
    """
    name = name_of(mesh)
    with refusing_together(name):
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
        is_number = isinstance(tolerance, Real) and not isinstance(tolerance, bool)
        if tolerance is not None and not (is_number and 0 < tolerance < math.inf):
            raise ValueError(f"tolerance must be a finite number above 0, got {tolerance!r}")
        if order is not None:
            check_token_order(order)
        parameters = {path: p for path, p in model.named_parameters() if p.requires_grad}
        if not parameters:
            raise ValueError("the model has no parameter that requires a gradient")
        if any(isinstance(p, DTensor) for p in parameters.values()):
            raise TypeError("the model's parameters are DTensors: check it before fully_shard and tensor parallelism")
        told = [(f"the parameter {path}", f"{tuple(p.shape)} {p.dtype}") for path, p in parameters.items()]
        agree(_CHECK, [*told, ("order", order), ("tolerance", tolerance)], name)
    trial = _Trial(model, mesh, parameters, order, document_ids, tolerance)
    with _left_as_it_is(model, parameters), random_state_kept(mesh), torch.enable_grad():
        expected = run_together(_CHECK, name, trial.run, whole)
        run_together(_CHECK, name, _check_comparable, expected)
        run_together(_CHECK, name, trial.check_again, whole, expected)
        trial.check_alike(expected)
        found = run_together(_CHECK, name, trial.run, sharded)
    firsts = hear_all("check_model's outputs", run_together(_CHECK, name, trial.first, expected, found), name).values()
    attended = sum(hear_all("check_model's calls", found.attended, name).values())
    for x in (found.loss, *found.gradients.values()):  # of which each rank has a part
        for group in mesh.get_all_groups():
            dist.all_reduce(x, group=group)
    differences = run_together(_CHECK, name, trial.differences, expected, found)
    if differences:
        first = min((told for told in firsts if told is not None), default=None)
        raise EquivalenceError("; ".join([*differences, *trial.hints(expected, found, first, attended)]))


class _First(NamedTuple):
    """The first module whose output differs: as which it was done, its name, and how."""

    done: int
    name: str
    how: str


@dataclass(slots=True)
class _Run:
    """What one run gave: loss, gradients, the first tensor that every module gave, and calls of the package's ops."""

    loss: Tensor
    gradients: dict[str, Tensor]
    outputs: dict[str, Tensor]
    attended: int


@dataclass(frozen=True, slots=True)
class _Trial:
    """A model, its parameters that are trained, and how its runs are compared."""

    model: nn.Module
    mesh: DeviceMesh
    parameters: dict[str, nn.Parameter]
    order: TokenOrder | None
    document_ids: Tensor | None
    tolerance: float | None

    def run(self, function: Loss) -> _Run:
        """Forward and backward."""
        for p in self.parameters.values():
            p.grad = None
        outputs: dict[str, Tensor] = {}
        counts = _Counts()
        with ExitStack() as stack:
            for path, module in self.model.named_modules():
                stack.callback(module.register_forward_hook(_keeping(outputs, path)).remove)
            with counts:
                loss = _loss(function(self.model))
        loss.backward()
        gradients = {
            path: torch.zeros_like(p) if p.grad is None else p.grad.detach() for path, p in self.parameters.items()
        }
        return _Run(loss.detach().double(), gradients, outputs, counts.calls)

    def check_again(self, whole: Loss, expected: _Run) -> None:
        """Refuse a model that gives another loss the second time."""
        with torch.no_grad():
            again, once = _loss(whole(self.model)).item(), expected.loss.item()
        if _differ(again, once, self._tolerance(expected).relative):
            raise EquivalenceError(
                f"run whole a second time the model has the loss {again:.6g}, not {once:.6g}: is there dropout?"
            )

    def check_alike(self, expected: _Run) -> None:
        """Refuse, on every rank, ranks whose whole runs have different losses."""
        told = hear_all("check_model's losses", expected.loss.item(), name_of(self.mesh))
        most = self._tolerance(expected).relative
        if any(_differ(loss, told[min(told)], most) for loss in told.values()):
            by_rank = ", ".join(f"rank {rank}: {loss:.6g}" for rank, loss in sorted(told.items()))
            raise EquivalenceError(
                f"ranks hold other parameters, or were given other batches: whole losses are {by_rank}"
            )

    def first(self, expected: _Run, found: _Run) -> _First | None:
        """The first module whose output here is not this rank's part of what it gave in the whole run."""
        if self.order is None:
            return None
        most = self._tolerance(expected).relative
        for done, (path, mine) in enumerate(found.outputs.items()):
            its = expected.outputs.get(path)
            part = None if its is None else self._part(its, mine)
            if part is None:
                continue
            try:
                error = worst_error([(mine, part)], relative_to="largest")
            except IncomparableError as why:
                return _First(done, path, str(why))
            if not error <= most:
                return _First(done, path, f"by {error:.2g} of its largest element")
        return None

    def differences(self, expected: _Run, found: _Run) -> list[str]:
        """What differs of loss and gradients, in words."""
        said, (most, least) = [], self._tolerance(expected)
        loss, whole = found.loss.item(), expected.loss.item()
        if _differ(loss, whole, most):
            said.append(f"the loss is {loss:.6g} on the mesh, {whole:.6g} whole")
        sizes = {path: float(torch.linalg.vector_norm(its, torch.inf)) for path, its in expected.gradients.items()}
        wrong, counts = {}, self._counting_as(sizes, least)
        for path, its in expected.gradients.items():
            try:
                error = worst_error([(found.gradients[path], its)]) / counts[path]
            except IncomparableError as why:
                return [*said, f"the gradient of {path}: {why}"]
            if not error <= most:
                wrong[path] = error
        if wrong:
            worst = max(wrong, key=lambda path: wrong[path])
            said.append(
                f"the gradients of {len(wrong)} of {len(expected.gradients)} parameters differ, of {worst} by "
                f"{wrong[worst]:.2g} of its largest element"
            )
        return said

    def _counting_as(self, sizes: Mapping[str, float], least: float) -> dict[str, float]:
        """What each gradient's difference is relative to; above 0, as gradients that are all 0 have been refused."""
        largest, modules = max(sizes.values()), {path: path.rpartition(".")[0] for path in sizes}
        beside: dict[str, list[tuple[int, float]]] = {}
        for path, module in modules.items():
            beside.setdefault(module, []).append((self.parameters[path].ndim, sizes[path]))

        def counts_as(path: str) -> float:
            if sizes[path] <= _NOTHING * largest:
                return largest
            weights = [size for ndim, size in beside[modules[path]] if ndim > self.parameters[path].ndim]
            return max(sizes[path], least * max(weights, default=0.0))

        return {path: counts_as(path) for path in sizes}

    def hints(self, expected: _Run, found: _Run, first: _First | None, attended: int) -> Iterator[str]:
        """Where it began, and what may have caused it."""
        if first is not None:
            yield f"the first output that differs is that of {first.name or 'the model'}, {first.how}"
        ranks = self.mesh.size()
        ratio = float(found.loss / expected.loss)  # no comparison: how the loss was divided
        if not attended and ranks > 1:
            yield "no attention was called on the mesh at all: every rank attended to its own tokens"
        elif first is not None and _POSITIONS.search(first.name.rpartition(".")[2]):
            yield "are positions given, and this rank's own (sequence_positions)?"
        elif first is not None:
            yield (
                "was attention told all that the model asks for (window, sinks, soft cap, scale, documents), or a "
                "keyword swallowed?"
            )
        elif self.order is not None and 0.8 * ranks < ratio < 1.2 * ranks and ranks > 1:
            yield "every rank's loss is a mean of its own: divide by the counted tokens of all ranks"
        elif self.order is not None:
            yield (
                "all outputs are right: are labels shifted before they are cut, and losses divided by the counted "
                "tokens of all ranks?"
            )

    def _part(self, whole: Tensor, mine: Tensor) -> Tensor | None:
        """This rank's part of a module's whole output, if it is of the sequence."""
        order, documents = self.order, self.document_ids
        if order is None or whole.ndim < 2 or whole.ndim != mine.ndim or 0 in mine.shape:
            return None
        if order.name == BY_DOCUMENT and not _is_packed_so(whole, documents):
            return None
        part = local_shard(whole, order, dim=1, document_ids=documents)
        return part if part.shape == mine.shape and part.shape != whole.shape else None

    def _tolerance(self, expected: _Run) -> _Tolerance:
        """By which numbers may differ."""
        dtypes = {p.dtype for p in self.model.parameters() if p.requires_grad or p.is_floating_point()}
        # Under autocast of less than weights have; what a float64 model has in float32 are angles and the like.
        dtypes |= {x.dtype for x in expected.outputs.values() if x.itemsize < torch.float32.itemsize}
        usual = max(_TOLERANCES.get(dtype, _NARROW) for dtype in dtypes)
        return usual if self.tolerance is None else usual._replace(relative=self.tolerance)


def _differ(one: float, other: float, most: float) -> bool:
    try:
        return not worst_error([([one], [other])], relative_to="each") <= most
    except IncomparableError:
        return True


def _is_packed_so(x: Tensor, documents: Tensor | None) -> bool:
    if documents is None:
        return False
    rows = documents.shape[0] if documents.ndim == 2 else 1
    return x.shape[1] == documents.shape[-1] and rows in (1, x.shape[0])


class _Counts(TorchDispatchMode):
    """How often the package's operators are called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.calls += func.namespace == "wallfacer_dt"
        return func(*args, **(kwargs or {}))


@contextmanager
def _left_as_it_is(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Afterwards gradients, buffers, as running statistics, and modules' own attributes are as before, and so is what
    lists, dicts and sets among them have.

    All of them: RoPE may keep in a buffer what it makes for a length that it keeps in an attribute.
    """
    usual = vars(nn.Module()).keys()
    grads = {path: p.grad for path, p in parameters.items()}
    own = [(m, {name: x for name, x in vars(m).items() if name not in usual}) for m in model.modules()]
    # As a router's losses, which a forward adds to a list.
    contents = [(x, x.copy()) for _, before in own for x in before.values() if type(x) in (list, dict, set)]
    buffers = [(m, name, x, x.clone()) for m in model.modules() for name, x in m.named_buffers(recurse=False)]
    try:
        yield
    finally:
        for path, p in parameters.items():
            p.grad = grads[path]
        for module, before in own:
            now = vars(module)
            for name in [name for name in now if name not in usual]:
                del now[name]
            now |= before
        for some, before in contents:
            some.clear()
            (some.extend if type(some) is list else some.update)(before)
        for module, name, buffer, before in buffers:
            module._buffers[name] = buffer
            with torch.no_grad(), suppress(RuntimeError):  # what is expanded nobody can have written into
                buffer.copy_(before)


def _check_comparable(expected: _Run) -> None:
    """Refuse (EquivalenceError) a whole run of which nothing can be compared."""
    if not expected.loss.isfinite():
        raise EquivalenceError(f"run whole the model has the loss {expected.loss.item()}, which is not finite")
    if not any(gradient.any() for gradient in expected.gradients.values()):
        raise EquivalenceError("run whole the model has gradients that are all 0, so that nothing could be compared")


def _keeping(outputs: dict[str, Tensor], path: str) -> Callable[[nn.Module, Any, Any], None]:
    def keep(_module: nn.Module, _args: Any, output: Any) -> None:
        values = (
            output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple | list) else [output]
        )
        tensors = [x for x in values if isinstance(x, Tensor) and x.is_floating_point() and x.ndim > 1]
        if tensors and path not in outputs:
            outputs[path] = tensors[0].detach()

    return keep


def _loss(loss: Any) -> Tensor:
    """A loss, or a refusal (TypeError) of what is none."""
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        what = f"shape {tuple(loss.shape)} of {loss.dtype}" if isinstance(loss, Tensor) else type(loss).__name__
        raise TypeError(f"whole and sharded must return a loss, a tensor of one number, got {what}")
    return loss.reshape(())
