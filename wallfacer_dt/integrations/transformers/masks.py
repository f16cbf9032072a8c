"""What a query sees, read off the mask function that transformers composes; what cannot be said is refused by name."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from wallfacer_dt.integrations.carried import carried
from wallfacer_dt.integrations.transformers.sequence import SAME_STATE, ForwardPass
from wallfacer_dt.integrations.transformers.upstream import leaf, packed_rows
from wallfacer_dt.layout import BY_DOCUMENT

_IS_NO_TENSOR = (
    "the model reads {} of its attention mask, which under context_parallel is no tensor: masks that a model changes "
    "itself are not implemented"
)


@carried
@dataclass(frozen=True)
class ShardedMask:
    """What the mask function gives layers in place of a tensor: who sees whom in the whole sequence.

    It holds what belongs to this forward, so that a layer that is computed again in the backward finds the same.

    Attributes:
        forward: the forward of the model that it is of.
        is_causal: a query sees no later keys.
        left: how far back a query sees, None for any distance.
        right: how far ahead.
        chunk: tokens that see each other only, counted from each document's beginning; 0 for no chunks.
    """

    forward: ForwardPass = field(repr=False)
    is_causal: bool = False
    left: int | None = None
    right: int | None = None
    chunk: int = 0

    def __getattr__(self, name: str) -> Any:
        """Say what a model misses that works on masks as tensors."""
        raise AttributeError(_IS_NO_TENSOR.format(f"{name!r}"))

    def __getitem__(self, part: Any) -> "ShardedMask":
        """Itself where all is asked for, as Gemma 4 does for its last layers."""
        parts = part if isinstance(part, tuple) else (part,)
        if all(isinstance(x, slice) and x in (slice(None), slice(0, None)) for x in parts):
            return self
        raise ValueError(_IS_NO_TENSOR.format("a part"))

    @classmethod
    def __torch_function__(cls, function: Any, *_: Any) -> Any:
        """Say why torch is given it: attention of a model that is within ``whole()``, of a forward that was not."""
        raise ValueError(f"torch was given an attention mask of context_parallel, which is no tensor: {SAME_STATE}")

    def both(self, other: "ShardedMask") -> "ShardedMask":
        """What both let through."""
        if self.chunk and other.chunk and self.chunk != other.chunk:
            raise ValueError(f"chunks of {self.chunk} and of {other.chunk} tokens in one mask are not implemented")
        return ShardedMask(
            self.forward, is_causal=self.is_causal or other.is_causal, left=_nearer(self.left, other.left),
            right=_nearer(self.right, other.right), chunk=self.chunk or other.chunk,
        )  # fmt: skip

    def documents(self) -> Tensor | None:
        """(B, N): of every token of the whole sequence the number of its document, cut further where chunks end."""
        sequence = self.forward.sequence
        if not self.chunk:
            return sequence.document_ids
        if sequence.order.name == BY_DOCUMENT:
            raise ValueError(
                f"chunked attention (chunks of {self.chunk}) cuts documents further, which {BY_DOCUMENT!r} dealt out "
                "whole: use order head_tail or contiguous"
            )
        positions = sequence.whole_positions().cpu()
        starts = positions % self.chunk == 0
        if sequence.document_ids is not None:
            starts[..., 1:] |= sequence.document_ids.diff(dim=-1) != 0
        return starts.long().cumsum(-1)


def read_mask(function: Callable[..., Any], forward: ForwardPass) -> ShardedMask:
    """What a mask function of transformers lets through, or a refusal (ValueError) that names the leaf."""
    name, held = leaf(function)
    everything = ShardedMask(forward)
    if name == "and_masks":
        for part in held["mask_functions"]:
            everything = everything.both(read_mask(part, forward))
        return everything
    if name == "causal_mask_function":
        return ShardedMask(forward, is_causal=True)
    if name == "bidirectional_mask_function":
        return everything
    if name == "sliding_window_overlay":
        return ShardedMask(forward, left=held["sliding_window"] - 1)
    if name == "sliding_window_bidirectional_overlay":
        return ShardedMask(forward, left=held["sliding_window"], right=held["sliding_window"])
    if name == "chunked_overlay":
        if bool(held["left_padding"].any()):
            raise ValueError("chunked attention with padding on the left is not implemented: pad on the right")
        return ShardedMask(forward, chunk=int(held["chunk_size"]))
    if name == "remap_positions_for_packed_sequence":
        # Positions count from each document's beginning, which windows and causality do not depend on.
        _check_own_positions(held["position_ids"], forward)
        return read_mask(held["mask_function"], forward)
    if name == "packed_sequence_mask_function":
        _check_own_rows(held["packed_sequence_mask"], forward)
        return everything
    raise ValueError(
        f"the model's attention mask has a part that context_parallel does not know: {name}; known are causal, sliding "
        "window, chunked and bidirectional masks, and documents told to shard_inputs"
    )


def _check_own_positions(position_ids: Tensor, forward: ForwardPass) -> None:
    """Positions of a head and a tail look to transformers like packed rows; others would be a mask of their own."""
    if not torch.equal(*torch.broadcast_tensors(position_ids, forward.sequence.positions.to(position_ids.device))):
        raise ValueError("the model makes its mask of other position_ids than it was called with")


def _check_own_rows(rows: Tensor, forward: ForwardPass) -> None:
    """Which rows are packed, is known from the whole sequence; of a shard it is only what its positions look like."""
    looks_like = packed_rows(forward.sequence.positions.to(rows.device))
    if looks_like is None:  # which a compiler is not told
        looks_like = torch.zeros_like(rows)
    if not torch.equal(*torch.broadcast_tensors(rows, looks_like)):
        raise ValueError("the model packs rows otherwise than position_ids say: tell shard_inputs document_ids")


def _nearer(one: int | None, other: int | None) -> int | None:
    return min((n for n in (one, other) if n is not None), default=None)
