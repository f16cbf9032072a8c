"""Autocast as ``scaled_dot_product_attention`` follows it, for operators of which torch's autocast knows nothing.

That operator is on autocast's lists of what runs in the lower precision, on the CPU and on CUDA: where autocast is on
for a tensor's device, a floating-point tensor other than float64 is cast (ATen/autocast_mode.h, is_eligible).
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from wallfacer_dt.agreement.agree import settle
from wallfacer_dt.agreement.meeting import below_views
from wallfacer_dt.compiler import constant


def is_autocast_on(device_type: str) -> bool:
    """Whether autocast is on for tensors of this device type; there is none for some, as for meta."""
    return _has_autocast(device_type) and torch.is_autocast_enabled(device_type)


@constant  # torch 2.11's compiler does not trace it
def _has_autocast(device_type: str) -> bool:
    return torch.amp.is_autocast_available(device_type)


def is_autocast_on_anywhere() -> bool:
    """Whether it is on for some device type."""
    return torch._C._is_any_autocast_enabled()


def computed_dtype(dtype: torch.dtype, device_type: str) -> torch.dtype:
    """The dtype that a tensor of this dtype is computed in."""
    if not dtype.is_floating_point or dtype == torch.float64 or not is_autocast_on(device_type):
        return dtype
    return torch.get_autocast_dtype(device_type)


def as_computed(*tensors: Any) -> tuple[Any, ...]:
    """The tensors in the dtype that they are computed in; gradients are in their own. What is no tensor stays."""
    if not is_autocast_on_anywhere():
        return tensors
    return tuple(x.to(computed_dtype(x.dtype, x.device.type)) if isinstance(x, Tensor) else x for x in tensors)


def operator_body(body: Callable[..., Any]) -> Callable[..., Any]:
    """An operator's body, whose own operations autocast leaves alone: it accumulates in a dtype of its choice.

    What it gives are no views, even of what it made, so that it can be written into, as SDPA's output can. All calls
    that have been posted are looked at before it returns; see Note [Comparing calls]. To be captured in a CUDA graph it
    refuses (NotImplementedError): a replay would compare nothing, and have the documents and masks of the capture.
    """

    @wraps(body)
    def run(x: Tensor, *rest: Any) -> Any:
        if x.is_cuda and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            raise NotImplementedError(
                "context-parallel attention and METP cannot be captured in a CUDA graph, got a stream that is being "
                "captured: ranks compare calls, and documents and masks are read, on the host; leave them out of the "
                "graph, as torch.compile does"
            )
        with below_views():
            if not is_autocast_on_anywhere() or not is_autocast_on(x.device.type):
                result = body(x, *rest)
            else:
                with torch.autocast(x.device.type, enabled=False):
                    result = body(x, *rest)
        settle()
        return result

    return run
