"""Blocks with masks on CUDA: torch's flex_attention, fused with the mask that it is given.

It takes gradients by autograd, for which it computes the block's output again: the operator that would not,
flex_attention_backward, torch 2.11.0's Dynamo does not trace. Run on an H200 with torch 2.11.0, and on the CPU without
its fused kernels, in both directions (there torch refuses gradients, but for the tests), with 2.11.0, 2.13.0, 2.14.1
and 2.15.0, as was Dynamo's configuration, which is private.

Note [Gradients of one block from autograd]
A block gives out_i and lse_i, and the row's result is out = sum_i w_i out_i with w_i = exp(lse_i - lse) and
lse = logsumexp_i lse_i. So, for a gradient grad_out of out, that of out_i is w_i grad_out, and since
d out / d lse_i = w_i (out_i - out), that of lse_i is w_i (rowsum(grad_out * out_i) - rowsum(grad_out * out)).
"""

from collections.abc import Callable
from functools import cache
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, and_masks, create_block_mask, flex_attention

from wallfacer_dt.agreement.meeting import kept, outside_dispatch
from wallfacer_dt.kernels.block import FULL, Band, BlockKernel, Gradients, How, Need, no_softcap, refuse
from wallfacer_dt.kernels.merge import accumulation_dtype
from wallfacer_dt.kernels.visible import finite

_KEPT = 64  # bands and shapes of each mask
# As long as the mask is, as in visible.py.
_in_bands: WeakKeyDictionary[BlockMask, dict[Any, BlockMask]] = WeakKeyDictionary()
_bands: dict[Any, BlockMask] = {}  # without a mask
_configuring = Lock()


def attend(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | None, scale: float) -> tuple[Tensor, Tensor]:
    """out and lse of one block by flex_attention, differentiable on CUDA; no mask: all is visible.

    Never by its kernel for decoding, which takes all query heads of a key head at once: for some lengths under 128 that
    finds no shape which fits an H200 ("No choices exist for backend", torch 2.11.0).
    """
    run: Callable = _fused() if q.is_cuda else flex_attention
    # Every mask is another program, in either direction, with and without bounds and at lengths that vary. Dynamo's
    # limit of 8 is for what should be one; its last, 256, remains, for masks that are another program at every step.
    config = torch._dynamo.config
    # Of all threads in torch 2.11, which would otherwise take it from each other.
    with _configuring, config.patch(recompile_limit=config.accumulated_recompile_limit):
        out, aux = run(
            q, k, v, block_mask=mask, scale=scale, enable_gqa=True, return_aux=AuxRequest(lse=True),
            kernel_options={"FORCE_USE_FLEX_ATTENTION": True},
        )  # fmt: skip
    return out, aux.lse


@cache
def _fused() -> Callable:
    # Not compiled, it would compute all scores; fullgraph: nor will it do so in silence after many recompilations.
    return torch.compile(flex_attention, fullgraph=True)


def _blocks(how: How, q: Tensor, k: Tensor) -> BlockMask | None:
    """A block's mask, in its band."""
    band, mask = how.band, how.mask
    if band == FULL:
        return mask
    key = band, q.shape[2], k.shape[2], q.device
    known = _bands if mask is None else _in_bands.setdefault(mask, {})
    return kept(known, key, _KEPT, lambda: _in_band(mask, *key))


def _in_band(mask: BlockMask | None, band: Band, rows: int, columns: int, device: torch.device) -> BlockMask:
    # Tensors, so that other bounds are not another compilation; filled there, as a copy would be waited for.
    bounds = -(1 << 62) if band.low is None else band.low, 1 << 62 if band.high is None else band.high

    def in_band(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:  # noqa: ARG001  (as torch calls it)
        return (j - i >= low) & (j - i <= high)

    # What is kept in an evaluation is for training, too.
    with torch.inference_mode(False), torch.no_grad():
        low, high = (torch.full((), bound, device=device) for bound in bounds)
        seen = in_band if mask is None else and_masks(in_band, mask.mask_mod)
        batch, heads = (None, None) if mask is None else mask.shape[:2]
        return create_block_mask(seen, batch, heads, rows, columns, device=device)


def forward(q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, Tensor]:
    """See :class:`wallfacer_dt.kernels.block.Forward`."""
    refuse("flex", how, softcap=True)
    if isinstance(q, FakeTensor):
        return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(q.shape[:-1], dtype=accumulation_dtype(q.dtype))
    with outside_dispatch(), torch.no_grad():  # whatever called: one compilation
        out, lse = attend(q, k, v, _blocks(how, q, k), how.scale)
    return out.contiguous(), lse.contiguous()


def backward(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, how: How) -> Gradients:
    """See :class:`wallfacer_dt.kernels.block.Backward`, and Note [Gradients of one block from autograd]."""
    refuse("flex", how, softcap=True)
    if isinstance(q, FakeTensor):
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    wide = lse.dtype
    with outside_dispatch(), torch.enable_grad():
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        block_out, block_lse = attend(q, k, v, _blocks(how, q, k), how.scale)
        weight = (block_lse.detach() - finite(lse)).exp()
        shift = (grad_out.to(wide) * (block_out.detach().to(wide) - out)).sum(-1)
        grad_block_out = (weight.unsqueeze(-1) * grad_out).to(block_out.dtype)
        dq, dk, dv = torch.autograd.grad((block_out, block_lse), (q, k, v), (grad_block_out, weight * shift))
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


_LEAST = 16  # the head dim from which Inductor's kernel makes products (torch 2.13.0)


def _supports(need: Need) -> bool | str:
    if need.softcap:
        return no_softcap(need.softcap)
    if need.device_type == "cuda" and min(need.head_dim, need.value_dim) < _LEAST:
        return (
            f"takes head dims from {_LEAST} on, got {need.head_dim} and {need.value_dim}: pad q, k and v, or pass "
            "kernel='reference'"
        )
    if need.device_type == "cuda" and need.dtype != torch.float64:
        return True
    return (
        "is flex_attention, which runs on cuda, not in float64 (on cpu it has no backward); got "
        f"{need.device_type}, {need.dtype}: cast q, k and v, or pass kernel='reference' (on cpu: kernel='flash')"
    )


KERNEL = BlockKernel("flex", forward, backward, _supports, f"torch {torch.__version__}")
