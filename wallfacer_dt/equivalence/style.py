"""What the check knows of styles and of the modules they replace, and the error that it raises."""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from wallfacer_dt.attention import ContextAttention
from wallfacer_dt.options import AttentionOptions

# What modules call these options.
CAUSAL_NAMES = ("is_causal", "causal")
SCALE_NAMES = ("scale", "softmax_scale")
SOFTCAP_NAMES = ("softcap", "soft_cap")


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
