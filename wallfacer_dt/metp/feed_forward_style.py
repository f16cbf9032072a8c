"""The ParallelStyle of METP for a feed-forward."""

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement
from torch.distributed.tensor.parallel import ParallelStyle

from wallfacer_dt.algorithms import ACTIVATIONS
from wallfacer_dt.metp.boundary import Boundary, check_layouts
from wallfacer_dt.metp.feed_forward import FeedForwardOptions
from wallfacer_dt.metp.holding import WeightMesh, as_computed, local, watched
from wallfacer_dt.metp.modules import arguments_of, check_names, check_projections, linear, the_input
from wallfacer_dt.metp.proof import Inputs, compare, small_inputs


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

    Hooks of the projections do not run. A weight that a module without METP has as well is shared with it no more; that
    two modules under METP share one is refused.

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
        units = weights.together(lambda: self._units(module, who))
        dims = {f"{name}.{part}": 0 for name in self._inward for part in ("weight", "bias")}
        nested = weights.shard(module, dims | {f"{self.down}.weight": 1, f"{self.down}.bias": 0}, self.src_data_rank)
        held = weights.by_rank(weights.sizes(units))
        options = FeedForwardOptions(
            weights.group, weights.ranks[weights.index], units, held, self.activation, weights.tp_group
        )
        # Bound, so that a copy of the module uses its own weights.
        module.forward = MethodType(
            self._forward(arguments_of(module)[0], Boundary(weights, *self.layouts, nested), options), module
        )
        return module

    @property
    def _inward(self) -> list[str]:
        return [self.up] if self.gate is None else [self.up, self.gate]

    def _units(self, module: nn.Module, who: str) -> int:
        """How many hidden units there are, or a refusal (ValueError, EquivalenceError) of the module."""
        check_projections(module, [*self._inward, self.down], who)
        units = [linear(module, name).weight.shape[0] for name in self._inward]
        units.append(linear(module, self.down).weight.shape[1])
        if len(set(units)) > 1:
            names = ", ".join([*self._inward, self.down])
            raise ValueError(f"{who}: {names} must have as many hidden units, got {units}")
        if self.check:
            self._check_module(module, who)
        return units[0]

    def _forward(self, name: str, boundary: Boundary, options: FeedForwardOptions) -> Callable[..., Tensor]:
        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
            x = the_input(name, args, kwargs)
            up, down = linear(module, self.up), linear(module, self.down)
            gate = None if self.gate is None else linear(module, self.gate)
            refusal = boundary.refusal(x, down.out_features, lambda: boundary.check(x, up.weight))
            if refusal is not None:
                return refusal
            inside, leave = boundary.enter(x)
            tensors = as_computed(
                inside.flatten(0, -2), local(up.weight), None if gate is None else local(gate.weight),
                local(down.weight), local(up.bias), None if gate is None else local(gate.bias),
            )  # fmt: skip
            y = torch.ops.wallfacer_dt.feed_forward(*tensors, *options)
            y = watched(y, module.parameters())
            return leave(boundary.with_bias(y, down.bias).unflatten(0, inside.shape[:-1]))

        return forward

    def _check_module(self, module: nn.Module, who: str) -> None:
        units, dim = 10, 6
        shapes = dict.fromkeys(self._inward, (units, dim)) | {self.down: (dim, units)}
        alone = FeedForwardOptions("", 0, units, (units,), self.activation, "")

        def formula(inputs: Inputs) -> Tensor:
            x = inputs[""]
            weights = [inputs[f"{self.up}.weight"], inputs.get(f"{self.gate}.weight"), inputs[f"{self.down}.weight"]]
            biases = [inputs.get(f"{name}.bias") for name in (self.up, self.gate, self.down)]
            y = torch.ops.wallfacer_dt.feed_forward(x.flatten(0, -2), *weights, *biases[:2], *alone)
            y = y.unflatten(0, x.shape[:-1])
            return y if biases[2] is None else y + biases[2]

        inputs = small_inputs(module, shapes, (2, 5, dim))
        compare(module, who, inputs, [((), {})], lambda inputs, *_: formula(inputs))
