"""The trial: a module on the whole sequence, a style on every rank's shard, and what the style gives in all."""

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.utils._pytree import tree_leaves

from wallfacer_dt.attention import ContextAttention
from wallfacer_dt.autocast import computed_dtype
from wallfacer_dt.comparison import IncomparableError
from wallfacer_dt.equivalence.inputs import Inputs, Results, Sizes, difference, draw, laid_out, tolerance
from wallfacer_dt.layout import deal
from wallfacer_dt.options import AttentionOptions

# What modules call these options.
CAUSAL_NAMES = ("is_causal", "causal")
SCALE_NAMES = ("scale", "softmax_scale")
SOFTCAP_NAMES = ("softcap", "soft_cap")
# Tokens of two rows: few, or as many as of one, for a module of one length, but not too many, and without gradients,
# so that the check does not take much longer.
_LENGTHS_OF_ROWS = {16: True, 1152: False}


class EquivalenceError(AssertionError):
    """A module computes something else than the style that is to replace it, or cannot be tried out."""


class AttentionStyle(Protocol):
    """What the check needs of a style."""

    options: AttentionOptions
    layout: str

    def attention_on(self, mesh: DeviceMesh, options: AttentionOptions) -> ContextAttention:
        """Attention on a mesh with these options instead of the style's own; all ranks call it together."""

    def forward_of(self, module: nn.Module, attention: ContextAttention) -> Callable[..., Tensor]:
        """What the style would give a module as its forward. The module stays as it is."""


class Reference(NamedTuple):
    """What the module made of the inputs, and what it was called with."""

    sizes: Sizes
    inputs: Inputs
    kwargs: dict[str, Any]
    results: Results
    by_mode: bool  # whether its output is another in training than in evaluation


class Shard(NamedTuple):
    """What the style made of one rank's rows of the queries and of the keys."""

    q_rows: Tensor
    kv_rows: Tensor
    results: Results


@dataclass(frozen=True, slots=True)
class Trial:
    """A module, of which a copy is run, and the style that is to replace it."""

    module: nn.Module
    style: AttentionStyle
    mesh: DeviceMesh
    attention: ContextAttention  # the style's on this mesh, with options for a short sequence
    sizes: list[Sizes]  # to be tried in this order
    kwargs: dict[str, Any]  # the caller's, of the whole sequence

    @property
    def names(self) -> str:
        """How an error about the two begins."""
        return f"{type(self.module).__name__} is not what {type(self.style).__name__} computes"

    def run_module(self) -> Reference:
        """The module on the whole sequence, with the first sizes that it takes."""
        self.style.forward_of(self.module, self.attention)  # which may refuse it
        module = copy_of(self.module)
        errors: list[Exception] = []
        for sizes in self.sizes:
            try:
                reference = self._run_module(module, sizes)
            except EquivalenceError:
                raise
            except Exception as error:  # whatever a module may raise
                errors.append(error)
            else:
                self._check_rows(module, sizes)
                return reference
        by_token = self.style.options.mask_mod is not None and self.style.options.length is None
        what = " or ".join(str((sizes.heads, sizes.kv_heads)) for sizes in self.sizes)
        raise EquivalenceError(
            f"{type(self.module).__name__} could not be run on q, k, v of {self.sizes[0].length} tokens, {what} heads "
            f"of {self.sizes[0].head_dim}, layout {self.style.layout!r}: {type(errors[0]).__name__}: {errors[0]}. "
            "Call check_equivalence with length=, heads=, head_dim= or kwargs= that fit, or give the style "
            + ("length=, as a mask_mod needs that reads something of every token" if by_token else "check=False")
        ) from errors[0]

    def run_style(self, reference: Reference) -> Shard:
        """The style on this rank's rows."""
        q_rows, kv_rows = self._rows(reference.sizes)
        inputs, kwargs = reference.inputs, dict(reference.kwargs)
        q, grad_out, probe = (x[:, :, q_rows] for x in (inputs.q, inputs.grad_out, inputs.probe))
        if self.attention.place.index:  # or else what all ranks hold would count as often
            for grad in (grad_out, probe):
                grad[:, :, : self.attention.options.replicated] = 0
        mine = Inputs(q, inputs.k[:, :, kv_rows], inputs.v[:, :, kv_rows], grad_out, probe, inputs.queries)
        if isinstance(kwargs.get("k_shared"), Tensor):
            dim = 2 if self.style.layout == "BNLH" else 1
            kwargs["k_shared"] = kwargs["k_shared"].index_select(dim, kv_rows)
        results = run(self.style.forward_of(self.module, self.attention), mine, self.style.layout, kwargs)
        return Shard(q_rows.cpu(), kv_rows.cpu(), results)

    def _run_module(self, module: nn.Module, sizes: Sizes) -> Reference:
        kwargs, layout = self._kwargs(module.forward, sizes), self.style.layout
        inputs = draw(self.attention.options, sizes, self.mesh.device_type, kwargs.get("k_shared"))
        results = run(module.forward, inputs, layout, kwargs)
        again = run(module.forward, inputs, layout, kwargs, backward=False)
        who = "in the module", "in its second call"
        try:
            changes = difference("the output", results.out, again.out, tolerance(sizes.computed, "cpu"), who)
        except IncomparableError as why:
            raise EquivalenceError(f"{self.names}: {why}") from None
        if changes:
            raise EquivalenceError(
                f"{self.names}: called again with the same tensors it gives another output; is there dropout? "
                "Context-parallel attention has none"
            )
        try:
            with in_mode(module, training=not module.training):
                other = run(module.forward, inputs, layout, kwargs, backward=False)
            by_mode = difference("the output", results.out, other.out, tolerance(sizes.computed, "cpu"), who) != ""
        except Exception:  # whatever a module may raise in a mode that it is not in
            by_mode = True
        return Reference(sizes, inputs, kwargs, results, by_mode)

    def _check_rows(self, module: nn.Module, sizes: Sizes) -> None:
        """Refuse (EquivalenceError) a module in which rows of a batch see each other, where it takes two rows."""
        if sizes.batch > 1:  # in the comparison with the style they show
            return
        for most, backward in _LENGTHS_OF_ROWS.items():
            tried = sizes._replace(length=min(most, sizes.length), kv_length=min(most, sizes.kv_length), batch=2)
            try:
                seeing = self._seeing_row(module, tried, backward=backward)
            except Exception:  # a module of one length, or of one row, will raise by itself
                continue
            if seeing is not None:
                raise EquivalenceError(
                    f"{self.names}: rows of the batch see each other: what comes of row {seeing} depends on row "
                    f"{1 - seeing}. The style attends within each row: make one sequence of them before the module"
                )
            return

    def _seeing_row(self, module: nn.Module, sizes: Sizes, *, backward: bool) -> int | None:
        """The row of two whose output or gradients are others beside another row.

        The module is compared with itself, as a mask may be another for each row.
        """
        kwargs, layout = self._kwargs(module.forward, sizes), self.style.layout
        inputs = draw(self.attention.options, sizes, self.mesh.device_type, kwargs.get("k_shared"))
        rtol = tolerance(sizes.computed, self.mesh.device_type)
        first = run(module.forward, inputs, layout, kwargs, backward=backward)
        for row in (0, 1):
            factor = torch.ones(2, 1, 1, 1, dtype=sizes.dtype).index_fill(0, torch.tensor(1 - row), 2)
            q, k, v = (x * factor for x in inputs[:3])
            beside = run(module.forward, inputs._replace(q=q, k=k, v=v), layout, kwargs, backward=backward)
            pairs = [(x, y) for x, y in zip(first, beside, strict=True) if x is not None and y is not None]
            if any(difference("a row", x[row : row + 1], y[row : row + 1], rtol) for x, y in pairs):
                return row
        return None

    def _rows(self, sizes: Sizes) -> tuple[Tensor, Tensor]:
        """Rows of the queries and of the keys that this rank holds."""
        place, options = self.attention.place, self.attention.options

        def held(length: int) -> Tensor:
            spans = deal(length, place.axes, options.order_name or "contiguous")[place.index] + options.replicated
            rows = [torch.arange(*span) for span in [(0, options.replicated), *spans.tolist()]]
            return torch.cat(rows).to(self.mesh.device_type)

        return held(sizes.length), held(sizes.kv_length)

    def _kwargs(self, forward: Callable[..., Any], sizes: Sizes) -> dict[str, Any]:
        """What the style was told, as far as the module's signature names it; then the caller's."""
        options = self.attention.options
        told: dict[str, Any] = dict.fromkeys(CAUSAL_NAMES, options.is_causal)
        told |= dict.fromkeys(SCALE_NAMES, options.scale) | dict.fromkeys(SOFTCAP_NAMES, options.softcap)
        told["prefix_length"] = options.prefix_length or None
        told["enable_gqa"] = True if sizes.heads != sizes.kv_heads else None
        if options.window_size is not None:
            left, right = options.window
            told["window_size"] = (left, right)
            told["sliding_window"] = left + 1 if options.is_causal and left >= 0 else None
        if options.mask_mod is not None:
            length = sizes.length + options.replicated
            told |= _named_masks(options.mask_mod, sizes.heads, length, self.mesh.device_type)
        named = inspect.signature(forward).parameters
        return {name: value for name, value in told.items() if name in named and value is not None} | self.kwargs


def assembled(like: Results, shards: Iterable[Shard]) -> Results:
    """The style's results on the whole sequence, whose shapes are those of the module's."""
    whole = {name: torch.zeros_like(x) for name, x in like._asdict().items() if x is not None}
    for q_rows, kv_rows, results in shards:
        for name, part in results._asdict().items():
            if part is None:
                whole.pop(name, None)
            elif name == "out":
                whole[name].index_copy_(2, q_rows, part)
            elif name in whole:  # of what all ranks hold, each has a part
                whole[name].index_add_(2, q_rows if name == "dq" else kv_rows, part)
    return Results(**whole)


def run(
    forward: Callable[..., Any], inputs: Inputs, layout: str, kwargs: Mapping[str, Any], *, backward: bool = True
) -> Results:
    """Call a forward and, where its output has a gradient, its backward twice: of the gradient and of the probe.

    Refuses (EquivalenceError) an output that is no tensor, or is of another shape or dtype than a style's.
    """
    leaves = [laid_out(x, layout).detach().requires_grad_(backward) for x in inputs[:3]]
    grad_out, probe = laid_out(inputs.grad_out, layout), laid_out(inputs.probe, layout)
    out = forward(*leaves, **kwargs)
    if not isinstance(out, Tensor):
        raise EquivalenceError(f"the module returns a {type(out).__name__}, a style a tensor")
    if out.shape != grad_out.shape:
        raise EquivalenceError(
            f"the module returns shape {tuple(out.shape)} for q {tuple(leaves[0].shape)}, a style of "
            f"layout={layout!r} returns {tuple(grad_out.shape)}"
        )
    computed = computed_dtype(leaves[0].dtype, leaves[0].device.type)
    if out.dtype != computed:
        raise EquivalenceError(f"the module returns {out.dtype} for q of {leaves[0].dtype}, a style {computed}")
    if not (backward and out.requires_grad):
        return Results(_gathered(out, layout))
    check_leaves(out, [leaves, dict(kwargs)], "q, k and v")
    grads = torch.autograd.grad(out, leaves, grad_out.to(computed), retain_graph=True, allow_unused=True)
    seen = torch.autograd.grad(out, leaves[2], probe.to(computed), allow_unused=True)
    found = zip((*leaves, leaves[2]), (*grads, *seen), strict=True)
    filled = (torch.zeros_like(leaf) if grad is None else grad for leaf, grad in found)
    return Results(*(_gathered(x, layout) for x in (out, *filled)))


def check_leaves(out: Tensor, given: Any, what: str) -> None:
    """Refuse (EquivalenceError) a module's output with a gradient by a tensor that it was not given.

    Args:
        out: of the module, with a gradient.
        given: the tensors that it was given, in any containers.
        what: they are, for the message.
    """
    tensors = (x for x in tree_leaves(given) if isinstance(x, Tensor))
    known = {get_gradient_edge(x).node for x in tensors if x.requires_grad}
    nodes = [out.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in known:
            continue
        known.add(node)
        if node.name() == "torch::autograd::AccumulateGrad":
            leaf = node.variable  # pyrefly: ignore[missing-attribute]
            raise EquivalenceError(
                f"the module's output has a gradient by a tensor of shape {tuple(leaf.shape)} beside {what}, which it "
                "finds outside of itself, as a learned bias or gate: under a style it would get none, and would not be "
                "trained. Apply it outside of the module"
            )
        nodes += [before for before, _ in node.next_functions]


def copy_of(module: nn.Module) -> nn.Module:
    """A copy, so that the module stays as it is."""
    try:
        return copy.deepcopy(module)
    except Exception:  # what it holds may not be copied
        return copy.copy(module)


@contextmanager
def in_mode(module: nn.Module, *, training: bool) -> Iterator[None]:
    """Put a module and all in it into training or evaluation mode, and afterwards each back into its own."""
    was = {child: child.training for child in module.modules()}
    module.train(training)
    try:
        yield
    finally:
        for child, its in was.items():
            child.training = its


def _named_masks(mask: Any, heads: int, length: int, device: str) -> dict[str, Any]:
    """A style's mask by the names that modules have for one."""
    if isinstance(mask, BlockMask):
        blocks, function = mask, mask.mask_mod
    else:
        blocks = create_block_mask(mask, 1, heads, length, length, device=device)
        function = mask
    return {"mask_mod": function, "block_mask": blocks, "attention_masks": blocks}


def _gathered(x: Tensor, layout: str) -> Tensor:
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return laid_out(x, layout).detach().to("cpu", dtype).contiguous()
