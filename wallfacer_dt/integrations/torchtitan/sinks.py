"""GPT-OSS's sinks, in every version of torchtitan the function that attention is given for its output."""

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor


class Nothing:
    """The class of no object."""

    get_attention_masks = _apply_sinks = None


def class_of(module: str, name: str) -> type:
    """A class of torchtitan's models; where its module is not imported, one without objects. Some import much."""
    return getattr(sys.modules.get(f"torchtitan.models.{module}"), name, Nothing)


def sinks_of(out_transform: Callable[..., Any]) -> Tensor | None:
    """The sinks (N,) of this rank's heads that an ``out_transform`` applies, or None where it is another function.

    With L the log-sum-exp of a query's scores, GPT-OSS's multiplies the output by sigmoid(L - sink), which is softmax
    with the sink beside the scores.
    """
    owner, kind = getattr(out_transform, "__self__", None), class_of("gpt_oss.model", "Attention")
    if type(owner) is not kind or getattr(out_transform, "__func__", None) is not kind._apply_sinks:
        return None
    sinks = owner.sinks
    return sinks.to_local(grad_placements=sinks.placements) if isinstance(sinks, DTensor) else sinks
