"""The ParallelStyle of METP for a feed-forward."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement
from torch.distributed.tensor.parallel import ParallelStyle

from wallfacer_dt.algorithms.feed_forward import ACTIVATIONS
from wallfacer_dt.autocast import as_computed
from wallfacer_dt.bound import BoundForward
from wallfacer_dt.equivalence.inputs import shortened
from wallfacer_dt.metp.boundary import Boundary, check_layouts
from wallfacer_dt.metp.feed_forward import FeedForwardOptions, feed_forward
from wallfacer_dt.metp.holding import WeightMesh, local, watched
from wallfacer_dt.metp.modules import (
    AsApplied,
    Parameters,
    check_names,
    check_projections,
    check_returns_one,
    described,
    linear,
    needing_gradients,
    parts_of,
)
from wallfacer_dt.metp.proof import (
    LARGE,
    LARGEST,
    SMALL,
    Inputs,
    compare,
    first_that_agrees,
    once,
    small_inputs,
    where_it_runs,
)
from wallfacer_dt.options import AttentionOptions
from wallfacer_dt.unmatched import name_in_plan


class METPParallel(ParallelStyle):
    """METP for a feed-forward (Algorithms 1 and 2): ranks that share a sequence share its weights.

    The module computes ``down(f(up(x)))`` or, with a gate, ``down(f(gate(x)) * up(x))``, of ``nn.Linear`` projections
    with or without biases, and has no other parameters. They become DTensors, sharded by hidden units over all axes
    of the mesh. Weights go round the ranks while tokens stay, and gradients come home; a rank never holds the weights
    of more than three ranks, nor the hidden units of more than one at a time, which the backward computes anew.

    Keyword Args:
        up: name of the projection to the hidden units (w_in; Llama's ``up_proj``, torchtitan's ``w3``).
        down: of the one back (w_out, ``down_proj``, ``w2``).
        activation: f: ``"gelu"``, ``"gelu_tanh"``, ``"relu"`` or ``"silu"``.
        gate: of the one that the activation is applied to (``gate_proj``, ``w1``), or None.
        input_layouts: of a plain x on an axis ``tp``: ``Replicate()``, or ``Shard(1)`` under sequence parallelism.
        output_layouts: of the output on an axis ``tp``.
        check: compare the module with the formula first, in this process, on small random weights; buffers are taken to
            stay as they are.

    The module is called with x and, if with anything else, with the defaults of its forward, with which it has been
    tried; other values are refused.

    Hooks of submodules, which would not run, are refused at a call (a graph has them as they were when it was
    compiled). A weight that a module without METP has as well is shared with it no more; that two modules under METP
    share one is refused.

    The mesh has axes ``("cp_ulysses", "cp_ring", "cp_team")`` or some of them, or one of any name, and may have
    ``tp`` after them, which splits the hidden units further and sums the output (METP, section 6.2). Where ranks share
    a sequence over other axes than the mesh's, gradients are still to be summed over those, as with any weight.
    """

    def __init__(
        self,
        *,
        up: str,
        down: str,
        activation: str,
        gate: str | None = None,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        check: bool = True,
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {tuple(ACTIVATIONS)}, got {activation!r}")
        check_names({"up": up, "down": down} | ({} if gate is None else {"gate": gate}))
        if not isinstance(check, bool):
            raise TypeError(f"check must be a bool, got {check!r}")
        self.up, self.down, self.gate, self.activation, self.check = up, down, gate, activation, check
        self.layouts = check_layouts(input_layouts, output_layouts)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        who = type(self).__name__
        weights = WeightMesh.of(device_mesh)
        dims = {f"{name}.{part}": 0 for name in self._inward for part in ("weight", "bias")}
        dims |= {f"{self.down}.weight": 1, f"{self.down}.bias": 0}
        told = {"METP's style": who, "activation": self.activation, "its projections": (*self._inward, self.down)}

        def read() -> int:
            return self._units(module, who, device_mesh.device_type)

        units = weights.together(read, module, dims, self.layouts, self.src_data_rank, told)
        shards = weights.shard(module, dims, self.src_data_rank)
        held = weights.by_rank(weights.sizes(units))
        options = FeedForwardOptions(
            weights.group, weights.ranks[weights.index], units, held, self.activation, weights.name
        )
        # Bound, so that a copy of the module uses its own weights.
        boundary = Boundary(weights, *self.layouts, shards)
        out_dim = linear(module, self.down).out_features
        # As the style is now, whatever becomes of it.
        forward = copy.copy(self)._forward(Parameters.of(module), AsApplied.of(module), boundary, options, out_dim)
        module.forward = BoundForward(forward, module, who, name_in_plan(module)).forward
        return module

    @property
    def _inward(self) -> list[str]:
        return [self.up] if self.gate is None else [self.up, self.gate]

    def _units(self, module: nn.Module, who: str, device_type: str) -> int:
        """How many hidden units there are, or a refusal (ValueError, EquivalenceError) of the module."""
        check_projections(module, [*self._inward, self.down], who)
        units = [linear(module, name).weight.shape[0] for name in self._inward]
        units.append(linear(module, self.down).weight.shape[1])
        if len(set(units)) > 1:
            names = ", ".join([*self._inward, self.down])
            raise ValueError(f"{who}: {names} must have as many hidden units, got {units}")
        if not self.check:
            check_returns_one(module, who)
        else:
            told = units[0], self.activation, *self._inward, self.down
            once(self, module, told, device_type, lambda: self._check_module(module, who, device_type, units[0]))
        return units[0]

    def _forward(
        self,
        parameters: Parameters,
        applied: AsApplied,
        boundary: Boundary,
        options: FeedForwardOptions,
        out_dim: int,
    ) -> Callable[..., Tensor]:
        names, who = [*self._inward, self.down], type(self).__name__

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
            x, args, kwargs = parameters.split(args, kwargs)

            def check() -> None:
                self._check_call(parameters, x, args, kwargs)
                parts = parts_of(module, names)
                applied.check(module, who)
                boundary.check(x, linear(module, self.up).weight, parts)

            refusal = boundary.refusal(x, out_dim, check)
            if refusal is not None:
                return refusal
            up, down = linear(module, self.up), linear(module, self.down)
            gate = None if self.gate is None else linear(module, self.gate)
            parts = parts_of(module, names)
            inside, leave = boundary.enter(x)
            tensors = as_computed(
                inside.flatten(0, -2), local(up.weight), None if gate is None else local(gate.weight),
                local(down.weight), local(up.bias), None if gate is None else local(gate.bias),
            )  # fmt: skip
            told = options._replace(gradients=needing_gradients(x, parts))
            y, number = feed_forward(*tensors, *told)
            y = watched(y, x, tensors[0], parts, f"{self.down}.bias", boundary.weights.name)
            return leave(boundary.with_bias(y, down.bias, number).unflatten(0, inside.shape[:-1]), number)

        return forward

    def _check_call(self, parameters: Parameters, x: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Refuse (TypeError, ValueError) arguments after x that are not as they were when the module was tried."""
        if x is None:
            raise TypeError(f"called without {parameters.x}")
        for name, value in parameters.differing(parameters.given(args, kwargs), {}).items():
            default = f" but {described(name, parameters.defaults[name])}" if name in parameters.defaults else ""
            raise ValueError(
                f"a feed-forward under {type(self).__name__} was called with {described(name, value)}; it knows of "
                f"nothing after {parameters.x}{default}: do outside of the module what {name} asks for"
            )

    def _check_module(self, module: nn.Module, who: str, device_type: str, units: int) -> None:
        """Compare the module with what METP computes: small, or as large as it is, if it minds."""
        own = linear(module, self.up).in_features
        _, (length, _) = shortened(AttentionOptions(), None, 1)  # as attention is tried

        def trial(units: int, dim: int) -> Callable[[], int]:
            return lambda: self._compared(module, who, device_type, units, dim, length)

        tried = [trial(10, SMALL)]
        if own <= LARGEST:
            tried.append(trial(units, own))
        first_that_agrees(tried)

    def _compared(self, module: nn.Module, who: str, device_type: str, units: int, dim: int, length: int) -> int:
        shapes = dict.fromkeys(self._inward, (units, dim)) | {self.down: (dim, units)}
        alone = FeedForwardOptions("", 0, units, (units,), self.activation, "")

        def formula(inputs: Inputs, *_: Any) -> Tensor:
            x = inputs[""]
            weights = [inputs[f"{self.up}.weight"], inputs.get(f"{self.gate}.weight"), inputs[f"{self.down}.weight"]]
            *biases, last = [inputs.get(f"{name}.bias") for name in (self.up, self.gate, self.down)]
            tensors = as_computed(x.flatten(0, -2), *weights, *biases)
            y, _ = feed_forward(*tensors, *alone)
            y = y.unflatten(0, x.shape[:-1])
            return y if last is None else y + last.to(y.dtype)

        def trial(length: int, large: Mapping[str, Tensor] | None = None) -> int:
            inputs = small_inputs(module, shapes, (2, length, dim), large)
            return compare(module, who, inputs, [((), {})], formula, device_type, are_large=large is not None)

        # What comes of a product with a gate is as large as what comes without.
        factor = LARGE ** (1 / len(self._inward))
        large = dict.fromkeys(self._inward, torch.full((units,), factor, dtype=torch.float64, device="cpu"))
        agreed = trial(length)
        where_it_runs(lambda tokens: trial(tokens, large), length)
        return agreed
