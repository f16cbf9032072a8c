"""The tensors of a call of attention, in one bundle from what a user hands over to what an operator takes."""

from typing import NamedTuple

import torch
from torch import Tensor


class AttentionInputs(NamedTuple):
    """A call's tensors, in the order in which operators take them."""

    q: Tensor  # queries (B, N, L, H)
    k: Tensor  # keys (B, Nkv, L, H), or (B, Nkv, L, H - Hs) with ``k_shared``
    v: Tensor  # values (B, Nkv, L, Hv)
    k_shared: Tensor | None = None  # (B, 1, L, Hs): the end of every head's key
    sinks: Tensor | None = None  # (N,): a logit more for every head, without a value
    # (B, N) or (N,), int, on the CPU: the document of every token of the whole sequence; to operators (B, N) or (1, N).
    document_ids: Tensor | None = None
    # (documents + 1,), int, on the CPU: the documents' cumulative lengths, for all rows of the batch.
    cu_seqlens: Tensor | None = None

    @property
    def keys(self) -> tuple[Tensor, ...]:
        """What goes where keys go: (k, v) or (k, v, k_shared)."""
        return (self.k, self.v) if self.k_shared is None else (self.k, self.v, self.k_shared)

    @property
    def documents(self) -> tuple[str, Tensor | None]:
        """What says where documents are: ``"ids"``, ``"cu_seqlens"`` or nothing, and the tensor."""
        if self.document_ids is not None:
            return "ids", self.document_ids
        return ("", None) if self.cu_seqlens is None else ("cu_seqlens", self.cu_seqlens)

    def need_gradients(self) -> bool:
        """Whether there will be a backward, which all ranks then make together."""
        return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in self[:5])


INPUTS = AttentionInputs._fields
INPUTS_SCHEMA = ", ".join(f"Tensor{'?' * (name in AttentionInputs._field_defaults)} {name}" for name in INPUTS)
