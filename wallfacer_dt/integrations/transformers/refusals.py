"""Models that attention on a mesh alone would make silently wrong, refused by name before anything runs."""

import inspect
from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedModel

from wallfacer_dt.integrations.transformers import upstream

# Heads that look at tokens one by one.
_HEADS = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForTokenClassification")
_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
# These look at the largest position, of which ranks hold different ones.
_ROPE = {"dynamic", "longrope"}
_MIXING = (nn.modules.conv._ConvNd, nn.RNNBase, nn.modules.batchnorm._BatchNorm, nn.MultiheadAttention)


def check_model_is_known(model: PreTrainedModel) -> None:
    """Refuse (ValueError) a model in which more than attention looks at several tokens, or of whose positions or loss a
    shard is not a part.
    """
    name = type(model).__name__
    why = next(_reasons(model, name), None)
    if why is not None:
        raise ValueError(f"{name} cannot be made context parallel: {why}")


def leaves_layers_out(model: PreTrainedModel) -> bool:
    """Whether it does at random in training (layerdrop). Modules read a copy that they took from the config, or it."""
    told = (*upstream.configs(model), *model.modules())
    return any(getattr(x, f"{part}layerdrop", 0) for x in told for part in ("", "encoder_", "decoder_"))


def _reasons(model: PreTrainedModel, name: str) -> Iterator[str]:
    fixed = upstream.fixed_attention(model)
    if fixed:
        yield f"{fixed} does not compute its attention by transformers' AttentionInterface"
    for config in upstream.configs(model):
        if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
            yield "cross attention, of an encoder-decoder, is not implemented"
        for layers in ("layer_types", "layers_block_type"):
            others = sorted(set(getattr(config, layers, None) or ()) - _LAYERS - {"attention"})
            if others:
                yield f"its {layers} have {', '.join(others)}, of which a rank would see its own tokens only"
        if getattr(config, "attn_temperature_tuning", False) and any(
            not rope for rope in getattr(config, "no_rope_layers", None) or ()
        ):
            yield "attn_temperature_tuning counts positions from each shard's beginning: set it to False"
        if getattr(config, "output_router_logits", False):
            yield "the router's loss is no sum over tokens: set output_router_logits=False"
        if getattr(config, "output_attentions", False):
            yield "probabilities are never put together: set output_attentions=False"
    if leaves_layers_out(model):
        yield (
            "layerdrop leaves layers out at random, other ones on every rank: set it to 0 in the config before the "
            "model is made"
        )
    for path, module in model.named_modules():
        kinds = getattr(module, "rope_type", None)
        found = _ROPE & {*(kinds.values() if isinstance(kinds, dict) else [kinds])}
        if found:
            yield f"rope_type {found.pop()!r} of {path} depends on the largest position, of which ranks hold others"
        if upstream.counts_from_padding(module):
            yield f"{path} counts positions from padding_idx + 1, which shard_inputs does not"
        if isinstance(module, _MIXING):
            yield f"{path} ({type(module).__name__}) looks at several tokens, of which a rank would see its own only"
    if getattr(model, "pooler", None) is not None:
        yield "its pooler takes the first token, which one rank holds: add_pooling_layer=False"
    if model.base_model is not model and not name.endswith(_HEADS):
        yield (
            f"a head of that kind is not known to look at tokens one by one (known are {', '.join(_HEADS)}): give "
            "context_parallel the model inside it"
        )
    if "position_ids" not in inspect.signature(model.forward).parameters:
        yield "it is not told positions (position_ids), so it would count from 0 on every rank"
