"""The blockwise feed-forward of Ring Attention (Liu et al., section 3): tokens in chunks, hidden computed anew.

Communicates nothing. It bounds what a feed-forward needs beside its input and output to one chunk of tokens, where
METP bounds it to one rank's hidden units and shares the weights as well.
"""

import warnings

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from wallfacer_dt.bound import BoundForward
from wallfacer_dt.comparison import IncomparableError, worst_error
from wallfacer_dt.equivalence.trial import EquivalenceError, in_mode
from wallfacer_dt.layout import check_length


class BlockwiseFeedForward(ParallelStyle):
    """A feed-forward computed on chunks of this rank's tokens, each again in the backward.

    Keyword Args:
        chunk: tokens of a sequence that are computed at a time; the batch is not split.
        check: try first, on four tokens in evaluation mode, with 1 for parameters that are 0 throughout, whether the
            module maps every token by itself. On the meta device it cannot be tried, which is warned of.

    The module is called with x (..., tokens, D) alone, a plain tensor. Dropout differs from what it would be on all
    tokens at once. The mesh is not used.
    """

    def __init__(self, *, chunk: int, check: bool = True) -> None:
        super().__init__()
        check_length(chunk, "chunk")
        if not isinstance(check, bool):
            raise TypeError(f"check must be a bool, got {check!r}")
        self.chunk, self.check = chunk, check

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:  # noqa: ARG002  (torch's signature)
        if self.check:
            _check_by_token(module)
        if "forward" in vars(module):
            raise ValueError(f"BlockwiseFeedForward: the module {type(module).__name__} already has a style")
        # Bound, so that a copy of the module uses its own weights.
        module.forward = BoundForward(self._forward, module, type(self).__name__).forward
        return module

    def _forward(self, module: nn.Module, x: Tensor) -> Tensor:
        if not isinstance(x, Tensor) or isinstance(x, DTensor) or x.ndim < 2:
            raise TypeError(f"BlockwiseFeedForward takes x (..., tokens, D), a plain tensor, got {type(x).__name__}")
        whole = type(module).forward
        parts = [checkpoint(whole, module, part, use_reentrant=False) for part in x.split(self.chunk, -2)]
        return torch.cat(parts, -2)


def _check_by_token(module: nn.Module) -> None:
    """Refuse (EquivalenceError) a module that mixes tokens, or cannot be tried."""
    name = type(module).__name__
    first = next((m for m in module.modules() if isinstance(m, nn.Linear)), None)
    if any(parameter.is_meta for parameter in module.parameters()):
        warnings.warn(f"{name} is on the meta device: whether it maps every token by itself is not tried", stacklevel=4)
        return
    try:
        assert first is not None, "it has no nn.Linear whose in_features say what D is"
        with in_mode(module, training=False), torch.no_grad(), torch.random.fork_rng([]):
            x = torch.randn(1, 4, first.in_features, device="cpu").to(first.weight)  # whose generator is put back
            # Weights that are 0 as yet, as the last may be, would hide what others do.
            ones = {name: torch.ones_like(p) for name, p in module.named_parameters() if not p.any()}
            whole, *each = (functional_call(module, ones, (part,)) for part in (x, *x.split(1, -2)))
            parts = torch.cat(each, -2)
    except Exception as error:  # whatever a module may raise
        raise EquivalenceError(f"{name} could not be tried on four tokens: {error}; or give check=False") from error
    try:
        error = worst_error({"the output in chunks": (parts, whole)}, relative_to="largest")
    except IncomparableError as why:
        raise EquivalenceError(f"{name} does not map every token by itself, as far as can be told: {why}") from None
    if error > 2e-2:
        raise EquivalenceError(f"{name} does not map every token by itself: in chunks it gives another output")
