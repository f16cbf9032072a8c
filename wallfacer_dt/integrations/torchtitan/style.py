"""The style of torchtitan's inner attention: what a call says, in torchtitan's words, becomes what attention takes."""

from typing import Any

from torch import nn

from wallfacer_dt.integrations.torchtitan import upstream
from wallfacer_dt.integrations.torchtitan.documents import Documents
from wallfacer_dt.integrations.torchtitan.sinks import sinks_of
from wallfacer_dt.styles import WallFacerParallel

_REMEDY = "pass attention_masks=Documents.of(positions), of the whole sequences' positions"


class InnerAttentionParallel(WallFacerParallel):
    """Context-parallel attention for ``ScaledDotProductAttention``, ``FlexAttention`` and ``VarlenAttention``.

    Keyword Args:
        layout: ``"BLNH"``, torchtitan's.
        check: compare a ``ScaledDotProductAttention`` with this style first, see
            :func:`wallfacer_dt.check_equivalence`; the others cannot be run without masks or gradients on every
            device.
        **options: see :class:`wallfacer_dt.AttentionOptions`; ``window_size`` is the layer's.

    ``attention_masks`` of the last two are :class:`Documents`, and GPT-OSS's ``out_transform`` are sinks. Every other
    mask or ``out_transform``, ``score_mod`` and subclasses of the three are refused.
    """

    def _read_module(self, module: nn.Module) -> tuple[list[str], dict[str, Any]]:
        if not upstream.is_known_attention(module):
            raise ValueError(
                f"{type(module).__name__} is not one of torchtitan's inner attentions as they are made: what it "
                "computes is not known; for an attention(q, k, v) of your own use WallFacerParallel"
            )
        return super()._read_module(module)

    def _translated(self, module: nn.Module, told: dict[str, Any]) -> dict[str, Any]:
        masks, transform = told.pop("attention_masks", None), told.pop("out_transform", None)
        kind = type(module).__name__
        if upstream.masks_documents(module):
            if not isinstance(masks, Documents):
                what = "no attention_masks" if masks is None else f"attention_masks of type {type(masks).__name__}"
                raise ValueError(f"{kind} was called with {what}, which has no meaning for shards: {_REMEDY}")
            told["document_ids"] = masks.ids
        elif masks is not None:
            raise ValueError(f"{kind} takes no attention_masks, got {type(masks).__name__}")
        if transform is not None:
            sinks = sinks_of(transform)
            if sinks is None:
                name = getattr(transform, "__qualname__", repr(transform))
                raise ValueError(
                    f"{kind} was called with out_transform={name}, of which only GPT-OSS's sinks are known"
                )
            told["sinks"] = sinks
        return told
