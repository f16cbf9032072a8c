"""What attention on a mesh would make silently wrong, refused by name before anything runs."""

import inspect
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import chain
from typing import Any

from diffusers import ModelMixin
from diffusers.models.embeddings import LabelEmbedding
from torch import nn

from wallfacer_dt.integrations import adapters
from wallfacer_dt.integrations.diffusers import upstream
from wallfacer_dt.integrations.diffusers.plans import PROCESSORS, Plan

_KEYWORDS = "what adapters, guidance and others are told by it is not known (a LoRA's scale goes into set_adapters)"
_RESIDUALS = "a ControlNet's residuals are of all tokens"
_REFUSED = {
    "attention_mask": "a mask of the image would be of all tokens",
    "attention_kwargs": _KEYWORDS,
    "cross_attention_kwargs": _KEYWORDS,
    "joint_attention_kwargs": _KEYWORDS,
    "controlnet_block_samples": _RESIDUALS,
    "controlnet_single_block_samples": _RESIDUALS,
    "block_controlnet_hidden_states": _RESIDUALS,
    "skip_layers": "blocks that are left out would attend nowhere",
}
_MIXING = (nn.modules.conv._ConvNd, nn.RNNBase, nn.modules.batchnorm._BatchNorm, nn.GroupNorm, nn.MultiheadAttention)


def why_refused(argument: str) -> str:
    """Of an argument of a call, in words."""
    return _REFUSED.get(argument, "what it does with a part of the tokens is not known")


def attention_modules(model: ModelMixin, plan: Plan) -> dict[str, Any]:
    """By path, modules of blocks that have an attention processor; what wraps some passes on theirs. What lies outside
    blocks attends to the text alone, of which all ranks hold all.
    """
    return {
        path: module
        for blocks in plan.blocks
        for path, module in model.get_submodule(blocks).named_modules(prefix=blocks)
        if hasattr(type(module), "set_processor")
    }


def token_modules(model: ModelMixin, plan: Plan) -> list[str]:
    """Paths of the modules that give tokens, without those that the model could have, and has not."""
    return [path for path in plan.tokens if getattr(model, path, path) is not None]


def attentions_of(model: ModelMixin, plan: Plan) -> dict[str, dict[str, nn.Module]]:
    """By a block's path, its attention in which the image's tokens see each other, by path; of a block that comes twice
    by each of its paths.
    """
    found = {}
    for name in plan.blocks:
        for number, block in enumerate(model.get_submodule(name)):  # pyrefly: ignore[bad-argument-type]
            parts = {f"{name}.{number}.{part}": getattr(block, part, None) for part in plan.attends}
            found[f"{name}.{number}"] = {path: x for path, x in parts.items() if x is not None}
    return found


def told_blocks(model: ModelMixin, plan: Plan) -> dict[str, nn.Module]:
    """By path, blocks that are told something of all tokens, also within what wraps them, and what comes after them."""
    option, value = plan.told_if
    if not plan.told_in_blocks or (option and getattr(model.config, option) != value):
        return {}
    told: dict[str, nn.Module] = {}
    for blocks in plan.blocks:
        for path, module in model.get_submodule(blocks).named_modules(prefix=blocks):
            # What is within a block is told by it.
            if _takes(type(module), plan.told_in_blocks) and not any(path.startswith(f"{outer}.") for outer in told):
                told[path] = module
    return told | ({plan.told_after: model.get_submodule(plan.told_after)} if plan.told_after else {})


@lru_cache(maxsize=1024)
def _takes(kind: type[nn.Module], names: tuple[str, ...]) -> bool:
    return inspect.signature(kind.forward).parameters.keys() >= set(names)


def check_model_is_known(model: ModelMixin, plan: Plan) -> None:
    """Refuse (ValueError) a model in which more than attention looks at several tokens, or attention is not known."""
    why = next(_reasons(model, plan), None)
    if why is not None:
        raise ValueError(f"{type(model).__name__} cannot be made context parallel: {why}")


def _reasons(model: ModelMixin, plan: Plan) -> Iterator[str]:
    if getattr(model.config, "attention_type", "default") != "default":
        yield f"attention_type={model.config.attention_type!r} (GLIGEN) is not implemented"
    paths = {path for path, _ in model.named_modules(remove_duplicate=False)}
    for path in (*token_modules(model, plan), plan.output):
        if path not in paths:
            yield f"it has no {path}, where tokens are dealt out or put together"
            return
    have_processors = attention_modules(model, plan)
    yield from _unknown({path: module.processor for path, module in have_processors.items()})
    for path, attentions in attentions_of(model, plan).items():
        if not attentions:
            yield f"{path} has no {plan.attends[0]}, which is to attend on the mesh"
        for part, module in attentions.items():
            if not any(inner in have_processors.values() for inner in module.modules()):
                yield f"{part} ({type(module).__name__}) has no attention processor, which is to attend on the mesh"
    for name in plan.blocks:
        for path, module in model.get_submodule(name).named_modules(prefix=name):
            if isinstance(module, _MIXING):
                kind = type(module).__name__
                yield f"{path} ({kind}) looks at several tokens, of which a rank would see its own only"
    yield from _passing_reasons(model, plan)


def check_model_may_run(model: ModelMixin, plan: Plan, processors: Mapping[str, Any]) -> None:
    """Refuse (ValueError) what may be set between forwards, and makes ranks differ or skips attention.

    Processors, by path, are diffusers' own, which may have been set within ``whole()``.
    """
    why = next(chain(_unknown(processors), _passing_reasons(model, plan)), None)
    if why is not None:
        raise ValueError(f"{type(model).__name__} cannot run context parallel: {why}")


def _unknown(processors: Mapping[str, Any]) -> Iterator[str]:
    for path, processor in processors.items():
        if type(processor) not in PROCESSORS:
            known = ", ".join(sorted(one.__name__ for one in PROCESSORS))
            yield f"the processor {type(processor).__name__} of {path} is not known; known are {known}"


def _passing_reasons(model: ModelMixin, plan: Plan) -> Iterator[str]:
    for option, known in plan.only:
        if getattr(model.config, option) != known:
            yield f"{option}={getattr(model.config, option)!r} is not implemented, which must be {known!r}"
    yield from adapters.reasons(model)
    if adapters.draw_for_each(model):
        yield "noise of PVeRA would be drawn by every rank for itself, also for text, which all hold: leave it out"
    if upstream.is_parallel(model):
        yield "diffusers' own enable_parallelism is on"
    if getattr(model, "is_cache_enabled", False):
        yield "a cache skips attention on some ranks and not on others: call disable_cache()"
    for path, module in model.named_modules():
        for name in upstream.foreign_hooks(module):
            yield f"diffusers' hook {name!r} of {path or 'the model'} may skip or replace what ranks compute together"
        if getattr(module, "_chunk_size", None):
            yield f"{path} computes in chunks, which divide some ranks' tokens only: call disable_forward_chunking()"
        if isinstance(module, nn.Dropout) and module.p and module.training:
            yield (
                f"dropout={module.p} of {path} would be drawn by every rank for itself, also for text, which all hold: "
                "set it to 0"
            )
        if isinstance(module, LabelEmbedding) and module.dropout_prob and module.training:
            yield (
                f"{path} drops labels at random, other ones on every rank: set its dropout_prob to 0, and give "
                "class_labels of which some are num_classes, the same on all ranks"
            )
