"""What METP's operators read and write beside products and attention, in the planner and in fact."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from wallfacer_dt import METPAttentionParallel, METPParallel, WallFacerParallel, context_mesh
from wallfacer_dt.metp import BODIES
from wallfacer_dt.planning import Candidate, ModelShape, SequenceShape
from wallfacer_dt.planning.elementwise import attention_bytes, feed_forward_bytes
from wallfacer_dt.testing.fake import fake_world

DIM, UNITS = 128, 384
CASES = [(128, 2, (32, 16)), (128, 4, (32, 16)), (300, 8, (32, 16)), (64, 16, (32, 8)), (512, 4, (32, 4))]
"""Tokens of a rank, ranks, and heads: of some a group's weights come from several ranks."""
ALLOCATIONS, ZEROS = {"empty", "empty_like", "new_empty", "empty_strided"}, {"zeros", "zeros_like", "new_zeros"}


class Touched(TorchDispatchMode):
    """Bytes that operations read and write; of a product that is added to a sum those of the sum that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in BODIES:
            with self:
                return BODIES[func](*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        own, given = ({x.untyped_storage()._cdata for x in tensors(some)} for some in (result, args))
        if func.namespace != "aten" or name in ALLOCATIONS | {"mm"} or (own & given and not func._schema.is_mutable):
            return result
        read = args[:1] if name == "addmm_" else () if name in ZEROS else args[name == "copy_" :]
        written = () if name == "addmm_" else (result,)
        self.nbytes += sum(x.numel() * x.itemsize for x in tensors((read, written)))
        return result


def tensors(some: Any) -> list[Tensor]:
    return [x for x in tree_leaves(some) if isinstance(x, Tensor)]


class FeedForward(nn.Module):
    def __init__(self, *, gated: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, UNITS, bias=False), nn.Linear(UNITS, DIM, bias=False)
        self.gate = nn.Linear(DIM, UNITS, bias=False) if gated else None


class Attention(nn.Module):
    def __init__(self, heads: tuple[int, int]) -> None:
        super().__init__()
        keys = heads[1] * DIM // heads[0]
        self.query, self.key, self.value = (nn.Linear(DIM, n, bias=False) for n in (DIM, keys, keys))
        self.output = nn.Linear(DIM, DIM, bias=False)


@contextmanager
def no_attention() -> Iterator[None]:
    """Attention's own operations are not counted."""

    def forward(_: Any, q: Tensor, keys: Any, sinks: Any = None) -> tuple[Tensor, Tensor]:
        del keys, sinks
        return torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)

    def backward(_: Any, grad_out: Tensor, out: Tensor, lse: Tensor, q: Tensor, keys: Any) -> tuple:
        del grad_out, out, lse
        return tuple(map(torch.empty_like, (q, *keys))), None

    with (
        mock.patch("wallfacer_dt.calls.Call.forward", forward),
        mock.patch("wallfacer_dt.calls.Call.backward", backward),
    ):
        yield


def touched(
    module: nn.Module, style: ParallelStyle, tokens: int, ranks: int, dtype: torch.dtype, *args: Any
) -> tuple[int, int]:
    """By the module, forward and backward, on one of so many ranks."""
    with fake_world(ranks, 1), no_attention():
        parallelize_module(module.to(dtype), context_mesh("cpu", ranks), style, src_data_rank=None)
        x = torch.randn(1, tokens, DIM, dtype=dtype, requires_grad=True)
        with Touched() as forward:
            out = module(x, *args)
        with Touched() as backward:
            out.backward(torch.empty_like(out))
    return forward.nbytes, backward.nbytes


def told(
    part: Callable[..., int], tokens: int, ranks: int, heads: tuple[int, int], dtype: torch.dtype, *, gated: bool = True
) -> list[int]:
    """The same, in the planner."""
    way = Candidate(ranks, feed_forward="metp", projections="metp")
    model, sequence = ModelShape(DIM, *heads, ffn=UNITS, gated=gated), SequenceShape(tokens * ranks, dtype=dtype)
    return [part(way, model, sequence, tokens, backward=backward) for backward in (False, True)]


DTYPES = torch.bfloat16, torch.float32


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("tokens", "ranks", "heads"), CASES)
def test_what_metps_feed_forward_touches(
    tokens: int, ranks: int, heads: tuple[int, int], gated: bool, dtype: torch.dtype
) -> None:
    style = METPParallel(up="up", down="down", gate="gate" if gated else None, activation="silu", check=False)
    counted = touched(FeedForward(gated=gated), style, tokens, ranks, dtype)
    assert told(feed_forward_bytes, tokens, ranks, heads, dtype, gated=gated) == pytest.approx(counted, rel=0.15)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pairs", ["half", "interleaved"])
@pytest.mark.parametrize(("tokens", "ranks", "heads"), CASES)
def test_what_metps_attention_touches(
    tokens: int, ranks: int, heads: tuple[int, int], pairs: str, dtype: torch.dtype
) -> None:
    dim = DIM // heads[0]
    angles = torch.ones(tokens, dim // 2)
    style = METPAttentionParallel(
        query="query", key="key", value="value", output="output", head_dim=dim,
        attention=WallFacerParallel(check=False), check=False, rotary=pairs,
    )  # fmt: skip
    counted = touched(Attention(heads), style, tokens, ranks, dtype, (angles, angles))
    assert told(attention_bytes, tokens, ranks, heads, dtype) == pytest.approx(counted, rel=0.15)
