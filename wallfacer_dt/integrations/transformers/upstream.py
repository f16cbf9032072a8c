"""What of transformers has no public name, and nothing else; run on transformers 5.19.0 to 5.24.0.

A mask reaches an attention implementation as a function of four positions, made of closures of
``transformers.masking_utils``. Which closure it is, is read off its qualified name and what it holds.
"""

import inspect
import re
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, masking_utils
from transformers.loss.loss_utils import LOSS_MAPPING

_LOCAL = ".<locals>."
_MEAN = re.compile(r"CrossEntropyLoss\(\)[^\n]*\n(?:\s*(?:#.*|labels = labels\.to\(\w+\.device\))?\n)*"
                   r"\s*\w+ = \w+\(\s*(\w+)\.view\(-1, self\.[\w.]+\),\s*labels\.view\(-1\),?\s*\)")  # fmt: skip


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
    """Of a model and of all modules in it that have one, each once."""
    found = (vars(part).get("config") for part in model.modules())
    return list({id(config): config for config in found if isinstance(config, PreTrainedConfig)}.values())


def set_implementation(model: PreTrainedModel, name: str) -> None:
    """Of a model, and of layers that were copied, as by peft, with configs of which the model itself knows nothing."""
    model.set_attn_implementation(name)
    known = {id(part.config) for part in model.modules() if isinstance(part, PreTrainedModel)}
    for config in configs(model):
        if id(config) not in known:
            # It may be another than was asked for.
            config._attn_implementation_internal = implementation(model.config)


def fixed_attention(model: PreTrainedModel) -> str:
    """The first of the models in a model whose attention implementation cannot be set, or nothing."""
    parts = (part for part in model.modules() if isinstance(part, PreTrainedModel))
    return next((type(part).__name__ for part in parts if not part._can_set_attn_implementation()), "")


def counts_from_padding(module: nn.Module) -> bool:
    """Whether positions that a model is not told begin after that of padding, as fairseq counts."""
    name = "create_position_ids_from_input_ids"
    kind = type(module)
    asks = "position_ids" in inspect.signature(kind.forward).parameters and hasattr(module, "padding_idx")
    if getattr(module, "position_embedding_type", "") == "rotary":  # ESM's, which does not look at them here
        return False
    # A class that fully_shard makes of it is of another module.
    return asks and (hasattr(kind, name) or any(hasattr(sys.modules.get(k.__module__), name) for k in kind.__mro__))


def scales_by_masked_tokens(module: nn.Module) -> bool:
    """Whether a module scales embeddings by how many tokens of a row are masked."""
    return getattr(module, "token_dropout", False) is True and hasattr(module, "mask_token_id")


def counts_for_itself(model: PreTrainedModel) -> bool:
    """Whether a model takes positions, and does not go by them."""
    names = {kind.__name__ for part in model.modules() for kind in type(part).__mro__}
    return not names.isdisjoint({"CsmDepthDecoderModel", "MoshiDepthDecoder"})


def is_head(model: PreTrainedModel) -> bool:
    """Whether a model has another inside, which it names, or would by its name."""
    is_named = re.search(r"For[A-Z]", type(model).__name__) and not hasattr(model, model.base_model_prefix)
    return model.base_model is not model or bool(model.base_model_prefix and is_named)


def pools_within(model: PreTrainedModel) -> bool:
    """Whether a model of transformers pools tokens in its forward, by no module that could be left out."""
    forward = inspect.unwrap(type(model).forward)
    if hasattr(model, "pooler") or not forward.__module__.startswith("transformers."):  # others' may have no source
        return False
    return "pooler_output=" in inspect.getsource(forward)


def counts_from_mask(model: PreTrainedModel) -> bool:
    """Whether positions that a model is not told are those of the tokens that its mask does not hide."""
    return any(config.model_type == "opt" for config in configs(model))


def forget_evaluation(model: Any) -> None:
    """Have accelerate prepare a model for training that it prepared for evaluation, which it would leave as it is."""
    model._is_accelerate_prepared = False


def is_hooked_by_accelerate(module: nn.Module) -> bool:
    """Whether accelerate changes what a module is called with, as it does under its context parallelism."""
    hooks = module._forward_pre_hooks.values()
    return any(str(getattr(hook, "__module__", "")).startswith("accelerate.") for hook in hooks)


def called_by(model: PreTrainedModel) -> str:
    """The model of transformers in whose forward another is being called, or nothing. Of others a forward is theirs."""
    frame = sys._getframe()
    while (frame := frame.f_back) is not None:
        if frame.f_code.co_name == "forward" and frame.f_globals.get("__name__", "").startswith("transformers."):
            outer = frame.f_locals.get("self")
            if isinstance(outer, PreTrainedModel) and outer is not model:
                return type(outer).__name__
    return ""


def own_loss(model: PreTrainedModel) -> Callable[..., Any]:
    """The loss function that a model has by its kind; to ask its property would warn where it has no labels either."""
    return LOSS_MAPPING[model.loss_type if model.loss_type in LOSS_MAPPING else "ForCausalLM"]


def takes_mean_of_logits(model: PreTrainedModel) -> bool:
    """Whether a head computes its loss in its forward, as the mean of cross entropy of the logits that it gives.

    Nothing of anybody else's may be around that forward, nor another loss in its module.
    """
    if not type(model).__name__.endswith(("ForMaskedLM", "ForTokenClassification")):
        return False
    forward: Any = model.forward
    while True:
        forward = getattr(forward, "__func__", forward)
        told = getattr(forward, "__globals__", {"__name__": type(forward).__module__})
        if told["__name__"].split(".")[0] not in ("transformers", "accelerate", "torch"):
            return False
        if not hasattr(forward, "__wrapped__"):
            break
        forward = forward.__wrapped__
    is_torchs = told.get("CrossEntropyLoss", nn.CrossEntropyLoss) is nn.CrossEntropyLoss
    return is_torchs and told["__name__"].startswith("transformers.") and _is_mean_of_logits(forward)


@lru_cache
def _is_mean_of_logits(forward: Callable[..., Any]) -> bool:
    source = inspect.getsource(forward)
    means = _MEAN.findall(source)
    return len(means) == source.count("CrossEntropyLoss") == 1 and f"logits={means[0]}," in source


def swap_loss(model: PreTrainedModel, loss: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """Give a model a loss function, or that of its kind again. What it was given before is returned."""
    before = getattr(model, "_loss_function", None)
    if loss is not None:
        model.loss_function = loss
    elif before is not None:
        del model._loss_function
    return before
