"""What is known of torchtitan's classes, which nothing promises: read and run on torchtitan 0.3.0.

Inner attention is a module without parameters, called with q, k, v in (B, L, N, H), ``attention_masks``, ``scale``,
``enable_gqa`` and, where there are sinks, ``out_transform``. What it masks is said in three places: documents by
``attention_masks``, windows by the module (``VarlenAttention``) or by the outer attention (``FlexAttention``, whose
masks a method of the model makes), sinks by the function that is given as ``out_transform``.
"""

from collections.abc import Iterator

from torch import nn
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention, VarlenAttention
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.common.moe import TokenChoiceTopKRouter

from wallfacer_dt.integrations.torchtitan.sinks import class_of

__all__ = ["Decoder", "FeedForward", "TokenChoiceTopKRouter"]

_KINDS = (ScaledDotProductAttention, FlexAttention, VarlenAttention)
_FLUX, _GPT_OSS, _MUSE = "flux.model.model", "gpt_oss.model", "muse_glimmer.model"


def is_inner_attention(module: nn.Module) -> bool:
    """Whether a module is one of torchtitan's inner attentions, as it is made, or of a subclass."""
    return isinstance(module, _KINDS)


def is_known_attention(module: nn.Module) -> bool:
    """Whether it is no subclass, and nobody has replaced its forward."""
    return type(module) in _KINDS and "forward" not in vars(module)


def masks_documents(module: nn.Module) -> bool:
    """Whether an inner attention is told documents, at every call."""
    return isinstance(module, FlexAttention | VarlenAttention)


def is_flux(model: nn.Module) -> bool:
    """Whether a model is Flux, whose attention sees everything."""
    return isinstance(model, class_of(_FLUX, "FluxModel"))


def makes_known_masks(model: Decoder) -> bool:
    """Whether FlexAttention's masks are causal within documents, with windows as `window_of` finds them."""
    kinds = Decoder, class_of(_GPT_OSS, "GptOssModel"), class_of(_MUSE, "MuseGlimmerModel")
    return type(model).get_attention_masks in [kind.get_attention_masks for kind in kinds]


def attentions(model: Decoder) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """Every layer's name, outer attention and inner attention; of a layer without, the refusal (ValueError)."""
    for key, block in model.layers.items():
        outer = getattr(block, "attention", None)
        inner = getattr(outer, "inner_attention", None)
        if not isinstance(outer, nn.Module) or not isinstance(inner, nn.Module):
            kinds = [type(part).__name__ for part in block.children()]
            raise ValueError(
                f"{type(model).__name__} cannot be made context parallel: layers.{key} has no "
                f"attention.inner_attention, but {', '.join(kinds)}"
            )
        yield key, outer, inner


def window_of(model: Decoder, key: str, outer: nn.Module, inner: nn.Module) -> tuple[int, int] | None:
    """A layer's window, which the model, the outer or the inner attention says.

    Args:
        model: the model.
        key: the layer's name in it.
        outer: the layer's attention.
        inner: what that calls.

    Returns:
        (left, 0), or None for a layer that sees everything before.

    Raises:
        ValueError: it is not causal, or torchtitan's masks have another window than the layer.
    """
    if isinstance(inner, VarlenAttention):
        left, right = inner.window_size
        if right != 0:
            raise ValueError(f"layers.{key} has window_size={inner.window_size}, which is not causal")
        return None if left < 0 else (left, 0)
    if isinstance(outer, class_of(_MUSE, "Attention")):
        size = outer.window_size
    elif isinstance(outer, class_of(_GPT_OSS, "Attention")):
        size = model.config.layers[int(key)].attention.sliding_window_size
        # Of several sizes its mask has the first.
        sizes = {layer.attention.sliding_window_size for layer in model.config.layers} - {None}
        if len(sizes) > 1:
            raise ValueError(f"layers have windows of {sorted(sizes)}, of which torchtitan makes one mask")
    else:
        return None
    return None if size is None else (size - 1, 0)
