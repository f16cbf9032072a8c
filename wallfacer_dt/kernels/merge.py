"""Merging partial attention results, and what stands in for an output that is not sent.

With partial results (out_i, lse_i) over disjoint keys, the whole is sum_i out_i exp(lse_i - lse), where
lse = logsumexp_i lse_i: the online softmax of Ring Attention (section 3) and of WallFacer's combine.
"""

from collections.abc import Sequence
from importlib.util import find_spec

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from wallfacer_dt.kernels.visible import finite

_HAS_TRITON = find_spec("triton") is not None  # torch brings it for CUDA on Linux


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of partial results: float64 for float64, otherwise float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def as_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x.to(dtype)``, of which torch takes its time to find out that there is nothing to be done."""
    return x if x.dtype == dtype else x.to(dtype)


def is_fused(x: Tensor) -> bool:
    """Whether partial results like this one are combined by one kernel, in Triton."""
    return x.is_cuda and not isinstance(x, FakeTensor) and _HAS_TRITON


def combined(partial: Sequence[Tensor], more: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """By that kernel (out, lse) merged with another one, or (x,) with one added: the first of them in ``dtype``.

    Computed in the accumulation dtype, and in place of what is, and shall be, in that dtype.
    """
    from wallfacer_dt.kernels.merge_triton import combine_into

    wide = accumulation_dtype(dtype)
    wanted = zip(partial, (dtype, wide), strict=False)
    into = tuple([x if x.dtype == own == wide else torch.empty_like(x, dtype=own) for x, own in wanted])
    combine_into(partial, more, into)
    return into


def merge_(out: Tensor, lse: Tensor, more_out: Tensor, more_lse: Tensor) -> None:
    """Merge a partial result (B, N, L, H), (B, N, L) into ``out`` and ``lse``, in place.

    Either lse, or both, may be -inf where no key was visible; ``out`` is 0 there.
    """
    if is_fused(out):
        from wallfacer_dt.kernels.merge_triton import combine_into

        combine_into((out, lse), (more_out, more_lse), (out, lse))
        return
    # -inf less a finite number: of a row that neither has seen the weight is 0, not NaN.
    weight = (more_lse - lse.clamp_min(torch.finfo(lse.dtype).min)).sigmoid_()
    out.lerp_(as_dtype(more_out, out.dtype), weight.unsqueeze(-1))
    torch.logaddexp(lse, more_lse, out=lse)


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """The whole result (B, N, L, H), (B, N, L) when a logit more (N,) for every head is in the sum, with no value."""
    sinks = sinks.to(lse.dtype).unsqueeze(-1)
    with_sink = torch.logaddexp(lse, sinks)
    weight = torch.exp(lse - finite(with_sink))
    return out * weight.unsqueeze(-1), with_sink


def sinks_gradient(lse: Tensor, delta: Tensor, sinks: Tensor) -> Tensor:
    """The gradient of sinks (N,) from what the rows' softmax and delta were, (B, N, L), sinks included.

    A sink's value is 0, so its score's gradient p (dp - delta) is -p delta.
    """
    scores = sinks.to(lse.dtype).unsqueeze(-1)
    probability = torch.exp(scores - finite(lse))
    return -(probability * delta).sum((0, 2)).to(sinks.dtype)


def row_delta(grad_out: Tensor, out: Tensor, dtype: torch.dtype) -> Tensor:
    """delta = rowsum(grad_out * out) (B, N, L): all that a backward kernel reads of the output."""
    return (as_dtype(grad_out, dtype) * out).sum(-1)


def output_factor(grad_out: Tensor, delta: Tensor) -> Tensor:
    """By row the factor (B, N, L) of grad_out that makes it an output O' with rowsum(grad_out * O') = delta.

    So a backward sends it instead of O (B, N, L, H). It is delta / norm^2, in delta's dtype; less than that in
    rows whose gradients are all below the smallest normal number.
    """
    # Squares of small gradients underflow, so rows are scaled by their largest entry first.
    # An infinity norm would be shorter, but not of no rows (torch 2.13.0's meta kernel).
    low, high = torch.aminmax(grad_out, dim=-1, keepdim=True)
    tiny, bound = torch.finfo(delta.dtype).tiny, torch.finfo(delta.dtype).max
    largest = as_dtype(torch.maximum(high, low.neg_()), delta.dtype).clamp_min_(tiny)
    # At least 1, but for rows of next to nothing, whose norm is taken to be no less and whose factor has a bound.
    norm = torch.linalg.vector_norm(grad_out / largest, dim=-1).clamp_min_(1)
    largest = largest.squeeze(-1)
    return (delta / largest).div_(norm).div_(norm).div_(largest).clamp_(-bound, bound)


def output_from(grad_out: Tensor, factor: Tensor) -> Tensor:
    """The output O' of :func:`output_factor`, in grad_out's dtype."""
    factor = factor.unsqueeze(-1)
    if grad_out.dtype == factor.dtype:
        return grad_out * factor
    # Multiplied in the factor's dtype, and rounded once.
    return torch.mul(grad_out, factor, out=torch.empty_like(grad_out))
