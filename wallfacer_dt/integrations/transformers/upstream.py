"""What of transformers has no public name, and nothing else; run on transformers 5.24.0.

A mask reaches an attention implementation as a function of four positions, made of closures of
``transformers.masking_utils``. Which closure it is, is read off its qualified name and what it holds.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, masking_utils

_LOCAL = ".<locals>."


class Leaf(NamedTuple):
    """One function of a mask: what made it, and what it was made of."""

    name: str
    held: dict[str, Any]


def leaf(function: Callable[..., Any]) -> Leaf:
    """What a mask function is. Of a function that is not transformers' own the name says where it is from."""
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", repr(function))
    if module != masking_utils.__name__:
        return Leaf(f"{module}.{name}", {})
    if _LOCAL not in name:
        # A function of that name may have been put there by others.
        return Leaf(name if getattr(masking_utils, name, None) is function else f"another {name}", {})
    return Leaf(name.split(_LOCAL)[0], dict(inspect.getclosurevars(function).nonlocals))


def packed_rows(position_ids: Tensor) -> Tensor | None:
    """(B, L): of which of several packed sequences transformers takes each token to be; None for a single one."""
    return masking_utils.find_packed_sequence_indices(position_ids)


def implementation(config: PreTrainedConfig) -> str | None:
    """The name of the attention implementation that a config asks for."""
    return config._attn_implementation


def configs(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """Of a model and of the models in it, each once."""
    found = {id(part.config): part.config for part in model.modules() if isinstance(part, PreTrainedModel)}
    return list(found.values())


def set_loss(model: PreTrainedModel, loss: Callable[..., Any] | None) -> None:
    """Give a model a loss function, or its own again."""
    if loss is not None:
        model.loss_function = loss
    elif hasattr(model, "_loss_function"):
        del model._loss_function
