"""Plans for ``parallelize_module`` from a torchtitan model's own modules, or a refusal by name."""

from collections.abc import Hashable
from typing import Unpack

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from wallfacer_dt.integrations.torchtitan import upstream
from wallfacer_dt.integrations.torchtitan.style import InnerAttentionParallel
from wallfacer_dt.metp import METPParallel
from wallfacer_dt.options import WayKeywords, ways_of
from wallfacer_dt.order import TokenOrder


class PlanOptions(WayKeywords, total=False):
    """What a model does not say itself."""

    check: bool


def context_plan(model: nn.Module, *, order: TokenOrder, **options: Unpack[PlanOptions]) -> dict[str, ParallelStyle]:
    """Context-parallel attention for a model of torchtitan: causal in decoders, with each layer's window; not in Flux.

    Apply it before the model's own tensor and expert parallelism, activation checkpointing, compilation and FSDP, on a
    whole model or on the part of it that a pipeline's stage has. Decoders are to be called with ``positions``.

    Args:
        model: of torchtitan.
        order: in which tokens are dealt out. Torchtitan's load balancer ``"headtail"`` deals them out in
            ``"head_tail"``, its ``None`` in ``"contiguous"``; in ``"document_head_tail"`` none of them does, but
            :func:`wallfacer_dt.shard_sequence` told the ids of :class:`Documents`.
        **options: ``check`` as :func:`wallfacer_dt.plans.llama3_plan` has it, and as
            :class:`wallfacer_dt.AttentionOptions` has them ``schedule``, ``rotate``, ``rotate_forward`` and ``kernel``.

    Returns:
        ``{fully qualified name: style}``, a name for every inner attention.

    Raises:
        ValueError: the model has something that would see a rank's tokens only, or an attention that is not known.
    """
    check = options.pop("check", True)
    ways = ways_of("context_plan", options, own=("order", "check"))
    if upstream.is_flux(model):
        style = InnerAttentionParallel(order=order, check=check, **ways)
        return {name: style for name, part in model.named_modules() if upstream.is_inner_attention(part)}
    if not isinstance(model, upstream.Decoder):
        raise ValueError(f"{type(model).__name__} is neither a Decoder nor a FluxModel of torchtitan")
    _check_decoder(model)
    styles: dict[Hashable, InnerAttentionParallel] = {}
    plan: dict[str, ParallelStyle] = {}
    for key, outer, inner in upstream.attentions(model):
        window, has_masks = upstream.window_of(model, key, outer, inner), upstream.masks_documents(inner)
        if (window, has_masks) not in styles:
            styles[window, has_masks] = InnerAttentionParallel(
                is_causal=True, window_size=window, order=order, check=check and not has_masks, **ways
            )
        plan[f"layers.{key}.attention.inner_attention"] = styles[window, has_masks]
    return plan


def feed_forward_plan(model: nn.Module) -> dict[str, ParallelStyle]:
    """METP for a decoder's dense feed-forwards: ranks that share a sequence share their weights.

    FSDP must leave these weights alone (``ignored_params``); they are DTensors on the context mesh. Experts and their
    shared experts stay as they are.

    Args:
        model: a decoder of torchtitan, or a pipeline stage's part of one.

    Returns:
        ``{fully qualified name: style}``, a name for every layer's feed-forward; empty if there is none.

    Raises:
        ValueError: the model is no decoder of torchtitan, or a layer has a feed-forward of a subclass.
    """
    if not isinstance(model, upstream.Decoder):
        raise ValueError(f"{type(model).__name__} is not a Decoder of torchtitan")
    style = METPParallel(gate="w1", up="w3", down="w2", activation="silu")
    plan: dict[str, ParallelStyle] = {}
    for key, block in model.layers.items():
        name, part = f"layers.{key}.feed_forward", getattr(block, "feed_forward", None)
        if not isinstance(part, upstream.FeedForward):
            continue
        if type(part) is not upstream.FeedForward:
            raise ValueError(
                f"{name} is {type(part).__name__}, and METP takes the place of FeedForward alone: make the model with "
                "tp_gemm_backend='default', and without overrides of FeedForward"
            )
        plan[name] = style
    return plan


def _check_decoder(model: upstream.Decoder) -> None:
    """Refuse (ValueError) what would look at several tokens, of which a rank has its own only."""
    name = type(model).__name__
    for path, part in model.named_modules():
        if isinstance(part, upstream.TokenChoiceTopKRouter) and part._debug_force_load_balance:
            raise ValueError(
                f"{name} cannot be made context parallel: {path} routes tokens by their place in a rank's shard "
                "(moe_force_load_balance)"
            )
    if getattr(model, "mtp_layers", None) is not None:
        raise ValueError(
            f"{name} cannot be made context parallel: mtp_layers predict from the tokens after a rank's own, which "
            "other ranks have"
        )
    if getattr(model, "vision_encoder", None) is not None:
        raise ValueError(
            f"{name} cannot be made context parallel: the vision_encoder's features are put into the whole sequence; "
            "set vision_encoder=None in its config for text alone"
        )
    if not upstream.makes_known_masks(model):
        raise ValueError(
            f"{name} cannot be made context parallel: its get_attention_masks is not torchtitan's, so that who sees "
            "whom is not known"
        )
