"""What is known of the whole sequence, of which a batch holds a rank's part; and one forward of a model on it."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from wallfacer_dt.integrations.carried import carried
from wallfacer_dt.order import TokenOrder
from wallfacer_dt.sequence import local_shard

# What else may be the matter where a model is not called as it should be: of peft.
PAST_HOOKS = (
    "its forward was called past its hooks (model.forward(...), as peft before 0.21, AdaLoRA and adaption prompts do)"
)
PROMPTS = "peft's prompt, prefix and p-tuning put tokens before the sequence, which is not implemented"
GENERATE = "generate() runs on whole tokens, on every rank, within `with handle.whole():`"

SAME_STATE = (
    "with gradient checkpointing, which computes layers again, run the backward in the state of its forward, both "
    "within `handle.whole()` or both outside of it"
)


@carried
@dataclass(frozen=True)
class ShardedSequence:
    """The whole sequence that a batch is a part of.

    Attributes:
        length: N.
        order: in which tokens were dealt out.
        positions: (1, L) or (B, L), of this rank's tokens; within their documents where there are some.
        largest_position: of the whole batch.
        document_ids: (B, N) or (N,), int, on the CPU: the document of every token; None for one document.
        is_padded_before: some row has padding before its tokens.
        counted: labels that count, of all ranks and rows; 0 where they are not known.
    """

    length: int
    order: TokenOrder
    positions: Tensor = field(repr=False)
    largest_position: int = field(repr=False)
    document_ids: Tensor | None = field(default=None, repr=False)
    is_padded_before: bool = False
    counted: int = 0

    def __getattr__(self, name: str) -> Any:
        """Say to a model that takes this for its attention mask, since it has not been set up, what to do."""
        raise AttributeError(
            f"a batch of shard_inputs is this rank's part of a sequence, and has no {name!r}: give the model to "
            "context_parallel, which knows what it says in place of an attention mask; if you have, "
            f"{PAST_HOOKS}, or {PROMPTS}, or it is to generate: {GENERATE}"
        )

    @classmethod
    def of_equal_shards(cls, shard: int, order: TokenOrder) -> "ShardedSequence":
        """The sequence of which every rank holds as many tokens, without documents."""
        length = shard * order.groups.coordinate.size
        whole = torch.arange(length, device=order.device_type)
        return cls(length, order, local_shard(whole, order, dim=0).unsqueeze(0), length - 1)

    @property
    def is_uneven(self) -> bool:
        """Whether ranks hold different numbers of tokens."""
        return self.length % self.order.groups.coordinate.size != 0

    @property
    def shard(self) -> int:
        """Tokens that this rank holds of a row."""
        return self.positions.shape[-1]

    def whole_positions(self) -> Tensor:
        """(N,) or (B, N): the position of every token within its document."""
        return positions_within(self.document_ids, self.length)


def positions_within(document_ids: Tensor | None, length: int) -> Tensor:
    """(N,) or (B, N): positions that count from where each document begins.

    >>> positions_within(torch.tensor([7, 7, 7, 8, 8]), 5).tolist()
    [0, 1, 2, 0, 1]
    """
    whole = torch.arange(length, device="cpu")
    if document_ids is None:
        return whole
    starts = torch.where(document_ids.diff(dim=-1) != 0, whole[1:], 0).cummax(-1).values
    return whole - torch.nn.functional.pad(starts, (1, 0))


@carried
@dataclass
class ForwardPass:
    """One forward of a model on this rank's part of a sequence.

    Attributes:
        sequence: the whole one.
        calls: of attention on the mesh, as yet.
        losses: calls of the model's loss function, as yet.
        own_loss: what is to be added to the output, of a head that would take a mean by itself.
    """

    sequence: ShardedSequence
    calls: int = 0
    losses: int = 0
    own_loss: Any = None
