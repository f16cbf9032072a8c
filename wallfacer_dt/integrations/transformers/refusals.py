"""Models that attention on a mesh alone would make silently wrong, refused by name before anything runs."""

import inspect
from collections.abc import Container, Iterator

from torch import nn
from transformers import PreTrainedModel

from wallfacer_dt.integrations import adapters
from wallfacer_dt.integrations.transformers import upstream
from wallfacer_dt.integrations.transformers.rope import largest_matters, takes_positions

# Heads that look at tokens one by one.
_HEADS = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForTokenClassification")
_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
ROUTER = (
    "the router's loss is no sum over tokens: set output_router_logits=False in its config, which TRL sets to True "
    "unless SFTConfig has router_aux_loss_coef=0.0"
)
"""Why a config is refused that has output_router_logits, which may be set at any time."""
_ALORA = (
    "pass alora_offsets to every call, of each row the number of this rank's tokens from its invocation on, and set "
    "alora_offsets_are_told = True on the handle that context_parallel returned"
)
_MIXING = (nn.modules.conv._ConvNd, nn.RNNBase, nn.modules.batchnorm._BatchNorm, nn.MultiheadAttention)


def check_model_is_known(model: PreTrainedModel) -> None:
    """Refuse (ValueError) a model in which more than attention looks at several tokens, or of whose positions or loss a
    shard is not a part.
    """
    name = type(model).__name__
    why = next(_reasons(model, name), None)
    if why is not None:
        raise ValueError(f"{name} cannot be made context parallel: {why}")


def check_adapters(model: PreTrainedModel, *, offsets_are_told: bool) -> None:
    """Refuse (ValueError) adapters of peft, which may come at any time, that look at several tokens by themselves.

    With ``offsets_are_told`` calls bring aLoRA's offsets, so that it does not.
    """
    why = next(adapters.reasons(model, None if offsets_are_told else _ALORA), None)
    if why is not None:
        raise ValueError(f"an adapter of {type(model).__name__} cannot be made context parallel: {why}")


def check_modules(model: PreTrainedModel, told: Container[nn.Module]) -> None:
    """Refuse (ValueError) modules that look at several tokens by themselves and came after all others were looked at.

    Args:
        model: whose.
        told: those that are told the largest position, or of masked tokens.
    """
    for module in model.modules():
        has_rope = "rope_type" in vars(module) and largest_matters(module)
        is_to_be_told = has_rope or upstream.scales_by_masked_tokens(module)
        if (is_to_be_told and module not in told) or isinstance(module, _MIXING):
            path = next(path for path, one in model.named_modules() if one is module)
            raise ValueError(
                f"{path} ({type(module).__name__}) looks at several tokens, or at the largest position, and came or "
                "changed after context_parallel: call that again, which sets it up or says why it cannot"
            )


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
        if getattr(config, "trigram_input", False):
            yield "trigram_input joins the embeddings of neighbouring tokens, of which other ranks hold some"
        if getattr(config, "output_router_logits", False):
            yield ROUTER
        if getattr(config, "z_loss_coefficient", 0):
            yield "z_loss_coefficient adds a mean over this rank's tokens to the loss: set it to 0 in its config"
        if getattr(config, "output_attentions", False):
            yield "probabilities are never put together: set output_attentions=False"
    if leaves_layers_out(model):
        yield (
            "layerdrop leaves layers out at random, other ones on every rank: set it to 0 in the config before the "
            "model is made"
        )
    for path, module in model.named_modules():
        found = largest_matters(module)
        if found and not takes_positions(module):
            yield f"rope_type {found!r} of {path} depends on the largest position, and it takes no position_ids"
        if upstream.counts_from_padding(module):
            yield f"{path} counts positions from padding_idx + 1, which shard_inputs does not"
        if isinstance(module, _MIXING):
            yield f"{path} ({type(module).__name__}) looks at several tokens, of which a rank would see its own only"
    if getattr(model, "pooler", None) is not None:
        yield "its pooler takes the first token, which one rank holds: add_pooling_layer=False"
    if upstream.pools_within(model):
        yield "it pools tokens (pooler_output), which one rank holds, or of which it holds some"
    if upstream.is_head(model) and not name.endswith(_HEADS):
        yield (
            f"a head of that kind is not known to look at tokens one by one (known are {', '.join(_HEADS)}): give "
            "context_parallel the model inside it, call that by itself, and compute the head from what it gives, on "
            "the rank that has the token"
        )
    if upstream.counts_for_itself(model):
        yield "it counts positions from 0 on every rank, whatever position_ids it is told"
    if "position_ids" not in inspect.signature(model.forward).parameters:
        yield "it is not told positions (position_ids), so it would count from 0 on every rank"
