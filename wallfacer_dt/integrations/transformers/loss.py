"""A model's own loss function, which is let sum over ranks only if it divides by the counted tokens of all."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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
        if kwargs.get("num_items_in_batch") is None:
            raise ValueError(
                "labels without num_items_in_batch: the mean over this rank's tokens would be no part of the whole "
                "loss; let shard_inputs make the batch, labels=...; where the model's head does not hand it on, leave "
                "labels out, and compute a loss from logits"
            )
        if _SHIFTS[name] and kwargs.get("shift_labels") is None:
            raise ValueError(
                "labels without shift_labels: the label of a shard's last token is on another rank; let shard_inputs "
                "make the batch, labels=..."
            )
        if not _SHIFTS[name] and kwargs.get("shift_labels") is not None:
            raise ValueError(f"{name} does not predict the next token: shard_inputs(..., shift=False)")
        self.forward().losses += 1
        return self.own(*args, **kwargs)
