"""What of diffusers has no public name, and nothing else; run on diffusers 0.41.0 to 0.42.1."""

from collections.abc import Iterator

from diffusers import ModelMixin
from torch import nn

# Hooks that diffusers puts into modules and that leave results as they are.
_HARMLESS = ("layerwise_casting", "peft_autocast_disable", "group_offloading", "layer_execution_tracker",
             "lazy_prefetch_group_offloading", "lazy_leafs")  # fmt: skip


def is_parallel(model: ModelMixin) -> bool:
    """Whether diffusers' own parallelism has been enabled on a model."""
    return model._parallel_config is not None


def foreign_hooks(module: nn.Module) -> Iterator[str]:
    """Names of diffusers' hooks in a module that may leave something out, or put something else in its place."""
    registry = getattr(module, "_diffusers_hook", None)
    yield from () if registry is None else (name for name in registry.hooks if not name.startswith(_HARMLESS))
