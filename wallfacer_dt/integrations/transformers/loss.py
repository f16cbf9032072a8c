"""A model's own loss function, which is let sum over ranks only if it divides by the counted tokens of all."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from wallfacer_dt.integrations.transformers.sequence import ForwardPass

_SHIFTS = {"ForCausalLMLoss": True, "ForMaskedLMLoss": False, "ForTokenClassification": False}


def shifts_labels(loss: Callable[..., Any]) -> bool:
    """Whether a loss function of transformers predicts the next token."""
    return _SHIFTS.get(getattr(loss, "__name__", ""), False)


@dataclass(frozen=True)
class SummedLoss:
    """In place of a model's loss function: the same, called in a way in which ranks' losses add up.

    Attributes:
        own: the model's.
        forward: gives the forward that it is called in.
    """

    own: Callable[..., Tensor]
    forward: Callable[[], ForwardPass]

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """This rank's part of the loss of the whole batch, or a refusal (ValueError)."""
        name = getattr(self.own, "__name__", type(self.own).__name__)
        if name not in _SHIFTS:
            raise ValueError(
                f"of the loss {name} it is not known whether ranks' losses add up to that of one process: leave labels "
                "out, and compute a loss from logits"
            )
        _check_labels(kwargs, name, shifts=_SHIFTS[name])
        self.forward().losses += 1
        return self.own(*args, **kwargs)


@dataclass(frozen=True)
class SumOfLogits:
    """In place of the mean of cross entropy that a head such as BERT's takes in its forward, which gets no labels.

    Attributes:
        labels: (B, L), of this rank's tokens.
        counted: by what their sum is divided, of the whole batch.
    """

    labels: Tensor
    counted: Tensor

    @classmethod
    def taken_from(cls, given: dict[str, Any], name: str) -> "SumOfLogits":
        """What a model, by its name, was called with; or a refusal (ValueError)."""
        _check_labels(given, name, shifts=False)
        return cls(given["labels"], given["num_items_in_batch"])

    def added_to(self, output: Any) -> Any:
        """The output of the model, by name or a tuple, with this rank's part of the loss, in float32 at least."""
        logits = output[0] if isinstance(output, tuple) else output["logits"]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)
        loss = F.cross_entropy(logits, self.labels.flatten().to(logits.device), reduction="sum") / self.counted
        return (loss, *output) if isinstance(output, tuple) else type(output)(loss=loss, **output)


def _check_labels(given: dict[str, Any], name: str, *, shifts: bool) -> None:
    """Refuse (ValueError) labels of which ranks' losses would not add up; ``name`` of what they are given to."""
    if given.get("num_items_in_batch") is None:
        raise ValueError(
            "labels without num_items_in_batch: the mean over this rank's tokens would be no part of the whole loss; "
            "let shard_inputs make the batch, labels=...; where the model's head does not hand it on, leave labels "
            "out, and compute a loss from logits"
        )
    if shifts and given.get("shift_labels") is None:
        raise ValueError(
            "labels without shift_labels: the label of a shard's last token is on another rank; let shard_inputs make "
            "the batch, labels=..."
        )
    if not shifts and given.get("shift_labels") is not None:
        raise ValueError(f"{name} does not predict the next token: shard_inputs(..., shift=False)")
