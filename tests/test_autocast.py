"""Attention follows autocast as ``scaled_dot_product_attention`` does: dtypes, values and gradients are its."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.parallel import parallelize_module

from tests.cases import Inner, mesh_of
from wallfacer_dt import TokenOrder, WallFacerParallel, context_parallel_attention
from wallfacer_dt.comparison import worst_error
from wallfacer_dt.planning import Candidate, ModelShape, SequenceShape
from wallfacer_dt.planning.dry_run import attention_peaks
from wallfacer_dt.testing import RankPool

pytestmark = pytest.mark.ranks
Ranks = Callable[[int], RankPool]
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

CALLS: dict[str, tuple[tuple[torch.dtype, ...], torch.dtype]] = {
    "float32": ((FP32, FP32, FP32), BF16),
    "values that a projection has cast already": ((FP32, FP32, BF16), BF16),
    "keys of another half": ((FP16, BF16, FP32), BF16),
    "to float16": ((FP32, FP32, BF16), FP16),
    "float64 is not cast": ((FP64, FP64, FP64), BF16),
}


def drawn(dtypes: tuple[torch.dtype, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return [torch.randn(1, 4, 6, 16, generator=generator).to(dtype).requires_grad_() for dtype in dtypes]


def both_ways(attend: Callable[..., Tensor], tensors: list[Tensor]) -> list[Tensor]:
    """The output and all gradients."""
    out = attend(*tensors)
    return [out.detach(), *torch.autograd.grad(out, tensors, torch.linspace(-1, 1, out.numel()).view_as(out).to(out))]


def attention(*given: Tensor, **options: Any) -> Tensor:
    q, k, v, *rest = given
    extras = dict(zip(("k_shared", "sinks"), rest, strict=False))
    order = TokenOrder("contiguous", mesh_of(2, 1))
    return context_parallel_attention(q, k, v, mesh_of(2, 1), is_causal=True, order=order, **extras, **options)


def as_cast_by_hand(
    dtypes: tuple[torch.dtype, ...], to: torch.dtype, kernel: str
) -> tuple[list[tuple[Tensor, Tensor]], list[list[str]]]:
    """Results under autocast beside those of tensors that were cast before; dtypes beside those of SDPA."""
    tensors = drawn(dtypes)
    with torch.autocast("cpu", to):
        found = both_ways(lambda *given: attention(*given, kernel=kernel), tensors)
        sdpa = both_ways(lambda *given: F.scaled_dot_product_attention(*given, is_causal=True), tensors)
    as_cast = [x.detach() if x.dtype == FP64 else x.detach().to(to) for x in tensors]
    expected = both_ways(lambda *given: attention(*given, kernel=kernel), [x.requires_grad_() for x in as_cast])
    expected = [expected[0], *(grad.to(x.dtype) for grad, x in zip(expected[1:], tensors, strict=True))]
    return list(zip(found, expected, strict=True)), [[str(x.dtype) for x in results] for results in (found, sdpa)]


@pytest.mark.parametrize("kernel", ["auto", "reference"])
@pytest.mark.parametrize("name", CALLS)
def test_the_same_as_of_tensors_that_are_cast_before(ranks: Ranks, name: str, kernel: str) -> None:
    """To the bit: what attention accumulates, autocast leaves alone."""
    for pairs, (ours, sdpas) in ranks(2).run(as_cast_by_hand, *CALLS[name], kernel):
        assert worst_error(pairs) == 0
        assert ours == sdpas


def with_extras() -> list[tuple[Tensor, Tensor]]:
    q, k, v, k_shared, sinks = drawn((FP32,) * 5)
    given = [q, k[..., :12], v, k_shared[:, :1, :, :4], sinks[0, :, 0, 0]]
    tensors = [x.detach().requires_grad_() for x in given]
    with torch.autocast("cpu", BF16):
        found = both_ways(attention, tensors)
    as_cast = [x.detach().to(BF16) for x in tensors[:4]] + [tensors[4].detach()]
    expected = both_ways(attention, [x.requires_grad_() for x in as_cast])
    assert all(grad.dtype == FP32 for grad in found[1:])
    return [(mine.float(), its.float()) for mine, its in zip(found, expected, strict=True)]


def test_shared_keys_as_keys_and_sinks_as_they_are(ranks: Ranks) -> None:
    for pairs in ranks(2).run(with_extras):
        assert worst_error(pairs) == 0


class SDPA(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = True) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)


def styled(backend: str) -> tuple[list[tuple[Tensor, Tensor]], list[list[str]]]:
    torch._dynamo.reset()
    order = TokenOrder("contiguous", mesh_of(2, 1))
    style = WallFacerParallel(is_causal=True, order=order, layout="BNLH", check=False)
    module: Any = parallelize_module(SDPA(), mesh_of(2, 1), style)
    module = torch.compile(module, fullgraph=True, backend=backend) if backend else module
    tensors = drawn((FP32, FP32, BF16))
    with torch.autocast("cpu", BF16):
        found = both_ways(module, tensors)
        expected = both_ways(attention, tensors)
    return list(zip(found, expected, strict=True)), [[str(x.dtype) for x in results] for results in (found, tensors)]


@pytest.mark.parametrize("backend", ["", "aot_eager", "inductor"])
def test_a_styled_module(ranks: Ranks, backend: str) -> None:
    for pairs, (ours, given) in ranks(2).run(styled, backend):
        # Inductor's fused merges round otherwise.
        allowed = torch.finfo(BF16).eps if backend == "inductor" else 0
        assert worst_error(pairs, relative_to="largest") <= allowed
        assert ours == ["torch.bfloat16", *given]


def on_one_rank(style: bool) -> str:
    tensors = drawn((FP32,) * 3)
    module: Any = parallelize_module(Inner(), mesh_of(2, 1), WallFacerParallel(layout="BNLH", check=False))
    with torch.autocast("cpu", BF16) if dist.get_rank() else nullcontext():
        try:
            module(*tensors) if style else attention(*tensors)
        except ValueError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("style", [False, True])
def test_autocast_on_one_rank_alone_is_refused(ranks: Ranks, style: bool) -> None:
    for text in ranks(2).run(on_one_rank, style):
        assert "the dtype of q must be the same on every rank of the mesh, got rank 0: torch.float32, rank 1" in text


def test_what_sdpa_refuses_is_refused(ranks: Ranks) -> None:
    for text in ranks(2).run(mixed_with_float64):
        assert "q, k and v must have one dtype, got torch.float64, torch.bfloat16, torch.bfloat16" in text


def mixed_with_float64() -> str:
    with torch.autocast("cpu", BF16), pytest.raises(TypeError) as caught:
        attention(*drawn((FP64, FP32, FP32)))
    return str(caught.value)


def test_planning_under_autocast_is_planning() -> None:
    way, shape, sequence = Candidate(2, 2), ModelShape(64, 4, 2), SequenceShape(64)
    peaks = attention_peaks(way, shape, sequence, 1, by_tokens=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attention_peaks(way, shape, sequence, 1, by_tokens=False) == peaks
