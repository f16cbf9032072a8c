"""Embeddings that are scaled by how many tokens are masked, as ESM's ``token_dropout`` does, of which a rank sees some.

On a mesh ranks count together, document by document, as one process counts that runs each of them; and the module is
given embeddings that are scaled already.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from wallfacer_dt.collectives.over_axes import gathered
from wallfacer_dt.compiler import untraced
from wallfacer_dt.integrations.transformers import upstream
from wallfacer_dt.integrations.transformers.sequence import ForwardPass, ShardedSequence
from wallfacer_dt.layout import BY_DOCUMENT
from wallfacer_dt.sequence import local_shard

_IN_TRAINING = 0.15 * 0.8
"""The part of all tokens that were masked when ESM was trained (as its code has it), by which it scales."""
_UNTRACED = "ranks count masked tokens at every call"


def count_masked_tokens(model: nn.Module, in_forward: Callable[[], ForwardPass]) -> list[RemovableHandle]:
    """Have every such module of a model scale by what is masked in all of the forward that it is called in.

    Args:
        model: whose.
        in_forward: finds the forward, or refuses.

    Returns:
        Handles that undo it.
    """

    @untraced(_UNTRACED)
    def scale(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        given = inspect.signature(module.forward).bind(*args, **kwargs)
        ids = given.arguments.get("input_ids")
        if ids is not None and upstream.scales_by_masked_tokens(module):
            masked = ids == module.mask_token_id
            kept = 1 - _ratios(masked, in_forward().sequence)
            # Of padding that is masked, too; but for that, of a document of masks alone one process makes NaN.
            kept = kept.masked_fill(kept == 0, 1.0)[..., None]
            embeddings = module.word_embeddings(ids).masked_fill(masked[..., None], 0.0)
            scaled = (embeddings * (1 - _IN_TRAINING) / kept).to(embeddings.dtype)
            given.arguments.update(input_ids=None, inputs_embeds=scaled)
        return given.args, given.kwargs

    modules = filter(upstream.scales_by_masked_tokens, model.modules())
    return [module.register_forward_pre_hook(scale, with_kwargs=True) for module in modules]


def _ratios(masked: Tensor, sequence: ShardedSequence) -> Tensor:
    """(B, L), float32: of the document of each of this rank's tokens the part that is masked."""
    order, documents = sequence.order, sequence.document_ids
    numbers = (sequence.whole_positions().cpu() == 0).long().cumsum(-1).view(-1, sequence.length) - 1
    by_document = {"document_ids": documents} if order.name == BY_DOCUMENT else {}
    mine = local_shard(numbers, order, dim=1, **by_document).to(masked.device).expand_as(masked)
    lengths = numbers.new_zeros(len(numbers), int(numbers.max()) + 1).scatter_add_(1, numbers, torch.ones_like(numbers))
    counts = masked.new_zeros(len(masked), lengths.shape[1], dtype=torch.int64).scatter_add_(1, mine, masked.long())
    counts = gathered(counts.flatten(), order.groups.names, "masked tokens").view(-1, *counts.shape).sum(0)
    return (counts.float() / lengths.to(counts.device)).gather(1, mine)
