"""The attention function that a model's layers call: whatever a call brings is implemented or refused by name."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from wallfacer_dt.agreement.agree import refusing_together
from wallfacer_dt.agreement.progress import Within
from wallfacer_dt.attention import context_parallel_attention
from wallfacer_dt.compiler import untraced
from wallfacer_dt.integrations.transformers.masks import ShardedMask
from wallfacer_dt.integrations.transformers.sequence import GENERATE, PROMPTS, SAME_STATE
from wallfacer_dt.integrations.transformers.upstream import is_hooked_by_accelerate
from wallfacer_dt.mesh import name_of
from wallfacer_dt.options import AttentionKeywords

# What models hand down to attention, or all the way from their own call, and means nothing to the scores.
_ELSEWHERE = frozenset({
    "position_ids", "position_embeddings", "cache_position", "labels", "shift_labels", "num_items_in_batch",
    "output_hidden_states", "return_dict", "deterministic",
})  # fmt: skip
_CACHE = "a cache would hold this rank's keys only: pass use_cache=False"
REFUSED = {
    "cu_seq_lens_q": "tell shard_inputs document_ids or cu_seqlens of the whole sequence instead",
    "cu_seq_lens_k": "tell shard_inputs document_ids or cu_seqlens of the whole sequence instead",
    "cache": f"{_CACHE}; {GENERATE}",
    "past_key_values": f"{_CACHE}; {GENERATE}; {PROMPTS}",
    "use_cache": f"{_CACHE}; {GENERATE}",
    "output_attentions": "probabilities are never put together",
}
"""Arguments of a model and of its attention that are refused, and why."""

_REMEDIES = {
    **REFUSED,
    "position_bias": "a bias of scores would be made of this rank's positions only",
    "head_mask": "heads cannot be masked",
}


@dataclass(frozen=True)
class AttentionOnMesh:
    """Attention of one model on its mesh.

    Attributes:
        mesh: context mesh.
        options: what is the same at every call: order, schedule, rotations, kernel.
    """

    mesh: DeviceMesh
    options: AttentionKeywords

    @untraced("it looks process groups up, and at what is known of a batch; with fullgraph=True use a style")
    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: ShardedMask | Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Attention as transformers calls it: (B, N, L, H) in, (B, L, N, Hv) out, and no probabilities."""
        with refusing_together(name_of(self.mesh)):
            mask = self._read(module, attention_mask, query, key)
            _check_asked(dropout, kwargs)
            _check_causal(getattr(module, "is_causal", None) if is_causal is None else is_causal, mask)
            _check_window(sliding_window, mask)
            options: AttentionKeywords = {**self.options, "is_causal": mask.is_causal, "scale": scaling}
            if mask.left is not None or mask.right is not None:
                options["window_size"] = (mask.left, None if mask.is_causal else mask.right)
            if softcap is not None:
                options["softcap"] = softcap
            if mask.forward.sequence.is_uneven:
                options["length"] = mask.forward.sequence.length
            documents = mask.documents()
        with Within(_layer(module)):
            out = context_parallel_attention(
                query, key, value, self.mesh, document_ids=documents, sinks=s_aux, **options
            )  # fmt: skip
        mask.forward.calls += 1
        return out.transpose(1, 2).contiguous(), None

    def _read(self, module: nn.Module, mask: ShardedMask | Tensor | None, query: Tensor, key: Tensor) -> ShardedMask:
        name = type(module).__name__
        if not isinstance(mask, ShardedMask):
            if mask is None and is_hooked_by_accelerate(module):
                raise ValueError(
                    f"{name} was called with no mask, which accelerate's ParallelismConfig(cp_size=...) takes away: "
                    "leave parallelism_config out, and train with ContextParallelTrainer, or deal batches out by "
                    "shard_inputs"
                )
            what = "no mask" if mask is None else f"a {type(mask).__name__}"
            raise ValueError(
                f"{name} was called with {what}, not with one that the model asked context_parallel for: who sees whom "
                f"cannot be known (a vision tower, cross attention, or a mask of the model's own); {SAME_STATE}"
            )
        if query.shape[2] != key.shape[2]:
            raise ValueError(
                f"{name} has {query.shape[2]} queries and {key.shape[2]} keys: cross attention and caches are not "
                "implemented"
            )
        if query.shape[2] != (shard := mask.forward.sequence.shard):
            raise ValueError(
                f"{name} has {query.shape[2]} queries, of the sequence this rank has {shard} tokens: what is not of "
                "them, as in a vision tower, is not implemented"
            )
        return mask


def _layer(module: nn.Module) -> str:
    """For messages; transformers counts the layers of most of its models."""
    number = getattr(module, "layer_idx", None)
    return type(module).__name__ if number is None else f"{type(module).__name__} {number}"


def _check_asked(dropout: float, kwargs: dict[str, Any]) -> None:
    if dropout:
        raise ValueError(f"dropout={dropout} of attention is not implemented: set it to 0 in the config")
    for name, value in kwargs.items():
        if name in _ELSEWHERE or value is None or value is False:
            continue
        raise ValueError(
            f"attention was called with {name}, which context_parallel does not implement"
            + (f": {_REMEDIES[name]}" if name in _REMEDIES else "")
        )


def _check_causal(asked: bool | None, mask: ShardedMask) -> None:
    """Eager attention goes by the mask, others by the flag where there is none; where they differ, so do models."""
    if asked is not None and bool(asked) != mask.is_causal:
        raise ValueError(
            f"the module says is_causal={asked}, its mask is {'' if mask.is_causal else 'not '}causal: implementations "
            "of transformers differ in which they follow"
        )


def _check_window(asked: int | None, mask: ShardedMask) -> None:
    """A window is the mask's, of which flash attention is told a second time; it counts the query itself."""
    if asked is not None and mask.left != asked - 1:
        seen = "no window" if mask.left is None else f"a window of {mask.left + 1}"
        raise ValueError(f"attention was called with sliding_window={asked}, its mask has {seen}")
