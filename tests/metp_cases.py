"""What ranks run of METP: a feed-forward or an attention with its projections, against the same plain module.

Plain modules are written out here, in any dtype; mesh, token order and mask are those of ``tests.cases.Case``.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from tests.cases import Case, documents_of, index_of, mesh_of, rms, rows_of
from wallfacer_dt import METPAttentionParallel, METPParallel, RingParallel, WallFacerParallel
from wallfacer_dt.comparison import comparable
from wallfacer_dt.testing import RankPool, worst_error
from wallfacer_dt.testing.oracle import visibility

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}
Results = dict[str, np.ndarray]
"""``out``, ``x`` for its gradient, and the gradients of parameters by their names; in float64."""
OnRank = tuple[list[int], Results]
"""Rows of the whole sequence, and results of them."""


class FeedForward(nn.Module):
    """down(f(up(x))), or down(f(gate(x)) * up(x)); ``biases`` names the projections that have one."""

    def __init__(self, dim: int, hidden: int, out: int, activation: str, gated: bool, biases: tuple[str, ...]) -> None:
        super().__init__()
        self.activation = activation
        self.up = nn.Linear(dim, hidden, bias="up" in biases)
        self.gate = nn.Linear(dim, hidden, bias="gate" in biases) if gated else None
        self.down = nn.Linear(hidden, out, bias="down" in biases)

    def forward(self, x: Tensor) -> Tensor:
        f, up = ACTIVATIONS[self.activation], self.up(x)
        return self.down(f(up) if self.gate is None else f(self.gate(x)) * up)


class Attention(nn.Module):
    """Attention with its projections, separate or fused; ``masks`` are the oracle's."""

    def __init__(
        self,
        dim: int,
        heads: tuple[int, int],
        head_dim: int,
        out: int,
        fused: bool,
        rotary: str | None,
        biases: tuple[str, ...],
        scale: float | None,
        masks: dict[str, Any],
    ) -> None:
        super().__init__()
        self.heads, self.head_dim, self.rotary, self.scale, self.masks = heads, head_dim, rotary, scale, masks
        q, kv = (n * head_dim for n in heads)
        if fused:
            self.qkv = nn.Linear(dim, q + 2 * kv, bias="qkv" in biases)
        else:
            for name, rows in (("query", q), ("key", kv), ("value", kv)):
                setattr(self, name, nn.Linear(dim, rows, bias=name in biases))
        self.fused, self.sizes = fused, (q, kv, kv)
        self.output = nn.Linear(q, out, bias="output" in biases)

    def forward(self, x: Tensor, turn: Any = None, **documents: Tensor) -> Tensor:
        parts = self.qkv(x).split(self.sizes, -1) if self.fused else (self.query(x), self.key(x), self.value(x))
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts)
        q, k = self.turned(q, turn), self.turned(k, turn)
        seen = visibility(x.shape[0], self.heads[0], x.shape[1], x.shape[1], **self.masks, **documents)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=self.scale, enable_gqa=True)
        return self.output(out.transpose(1, 2).flatten(2))

    def turned(self, x: Tensor, turn: Any) -> Tensor:
        """By (cos, sin) of every element, or by complex numbers of every pair."""
        if self.rotary is None:
            return x
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        if self.rotary == "interleaved":
            pairs = torch.view_as_complex(wide.unflatten(-1, (-1, 2)).contiguous())
            if isinstance(turn, tuple):
                turn = torch.complex(*(angle[..., ::2] for angle in turn))
            turn = turn.to(pairs.dtype)
            return torch.view_as_real(pairs * turn.unsqueeze(-3)).flatten(-2).to(x.dtype)
        cos, sin = (angle.to(wide.dtype).unsqueeze(-3) for angle in turn)
        low, high = wide.chunk(2, -1)
        return (wide * cos + torch.cat([-high, low], -1) * sin).to(x.dtype)


@dataclass(frozen=True)
class Block(ABC):
    """A module to be put under METP.

    ``axis``: if given, the mesh is one axis of this name. ``case`` says of the rest what it says of attention: mesh,
    batch, tokens, order, dtype, heads, mask.
    """

    case: Case = field(default_factory=Case)
    dim: int = 6
    out: int = 6
    biases: tuple[str, ...] = ()
    axis: str = ""

    @abstractmethod
    def plain(self) -> nn.Module:
        """The module, in float64, its weights not yet drawn."""

    @abstractmethod
    def style(self, context: DeviceMesh, **options: Any) -> ParallelStyle:
        """METP for it."""

    def call(self, rows: list[int]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the module is called with after x, for these tokens."""
        return (), {}

    def module(self, dtype: torch.dtype | None = None) -> nn.Module:
        """The same wherever it is made; outputs are of order one."""
        torch.manual_seed(1)
        module = self.plain().double()
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5 if parameter.ndim > 1 else 1.0)
        # Of a lower precision in every dtype, so that errors are those of computing.
        return module.to(getattr(torch, self.case.dtype)).to(dtype or getattr(torch, self.case.dtype))

    def inputs(self) -> tuple[Tensor, Tensor]:
        """x and the gradient of the output, of the whole sequence."""
        generator = torch.Generator().manual_seed(2)
        shapes = [(self.case.batch, self.case.total, dim) for dim in (self.dim, self.out)]
        x, grad = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
        return x.to(getattr(torch, self.case.dtype)), grad.to(getattr(torch, self.case.dtype))

    def mesh(self) -> DeviceMesh:
        """On a rank."""
        if self.axis:
            return _line(dist.get_rank(), self.case.size, self.axis)
        return mesh_of(self.case.ring, self.case.team, self.case.placement, self.case.ulysses)


@dataclass(frozen=True)
class FeedForwardBlock(Block):
    """Of ``hidden`` units."""

    hidden: int = 8
    activation: str = "gelu"
    gated: bool = False

    def plain(self) -> nn.Module:
        return FeedForward(self.dim, self.hidden, self.out, self.activation, self.gated, self.biases)

    def style(self, context: DeviceMesh, **options: Any) -> ParallelStyle:
        gate = "gate" if self.gated else None
        return METPParallel(up="up", gate=gate, down="down", activation=self.activation, **({"check": False} | options))


@dataclass(frozen=True)
class AttentionBlock(Block):
    """Of the case's heads; ``angles`` says in which shape a call has them."""

    fused: bool = False
    rotary: str | None = None
    angles: str = "L"

    def plain(self) -> nn.Module:
        case = self.case
        masks = {name: value for name, value in case.masks.items() if name in ("is_causal", "window_size")}
        heads = (case.heads, case.kv_heads)
        return Attention(
            self.dim, heads, case.head_dim, self.out, self.fused, self.rotary, self.biases, case.scale, masks
        )

    def style(self, context: DeviceMesh, **options: Any) -> ParallelStyle:
        case = self.case
        told = case.options_on(context)
        told = {name: value for name, value in told.items() if name not in ("document_ids", "cu_seqlens")}
        if self.axis:
            del told["schedule"]
        inner = (RingParallel if self.axis else WallFacerParallel)(check=False, **told)
        projections = {"qkv": "qkv"} if self.fused else {"query": "query", "key": "key", "value": "value"}
        if self.fused and case.kv_heads != case.heads:
            projections |= {"kv_heads": case.kv_heads}
        return METPAttentionParallel(
            **projections, output="output", head_dim=case.head_dim, rotary=self.rotary, attention=inner,
            **({"check": False} | options),
        )  # fmt: skip

    def call(self, rows: list[int]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        told = {self.case.packed: documents_of(self.case)} if self.case.documents else {}
        if self.rotary is None:
            return (), told
        return (turns(torch.tensor(rows, dtype=torch.float64), self.case, self.rotary, self.angles),), told


def turns(positions: Tensor, case: Case, rotary: str, shape: str) -> Any:
    """cos and sin of these positions, as models have them: (L, H), with the batch before it, or complex (L, H / 2)."""
    angle = positions[:, None] * 100 ** -torch.linspace(0, 1, case.head_dim // 2, dtype=torch.float64)
    if shape == "complex":
        return torch.polar(torch.ones_like(angle), angle)
    angle = torch.cat([angle, angle], -1) if rotary == "half" else angle.repeat_interleave(2, -1)
    if shape == "1L":
        angle = angle[None]
    if shape == "BL":
        angle = angle.expand(case.batch, -1, -1)
    return angle.cos(), angle.sin()


@cache
def _line(rank: int, size: int, axis: str) -> DeviceMesh:
    """One for every rank: threads of one process share what is remembered."""
    return init_device_mesh("cpu", (size,), mesh_dim_names=(axis,))


def gradients(module: nn.Module, x: Tensor, grad: Tensor, call: tuple[Any, Any] = ((), {})) -> Results:
    """Forward and backward of a module, plain or under METP: whole gradients of its parameters, this rank's rows."""
    x = x.detach().clone().requires_grad_()
    out = module(x, *call[0], **call[1])
    names, parameters = zip(*module.named_parameters(), strict=True)
    grads = torch.autograd.grad(out, [x, *parameters], grad)
    found = dict(zip(("out", "x", *names), (out, *grads), strict=True))
    return {name: array(value) for name, value in found.items()}


def array(x: Tensor) -> np.ndarray:
    """All of it."""
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().double().numpy().copy()


def run(block: Block, **options: Any) -> OnRank:
    """On a rank, by METP's style with these options."""
    rows = rows_of(block.case, index_of(block.case), block.case.total)
    module = parallelize_module(block.module(), block.mesh(), block.style(block.mesh(), **options))
    x, grad = block.inputs()
    return rows, gradients(module, x[:, rows], grad[:, rows], block.call(rows))


def expected(block: Block, dtype: torch.dtype | None = torch.float64, *, part: int = 0, parts: int = 1) -> Results:
    """The plain module's results in one process, in this dtype, or None: in the case's own; of a part of the batch."""
    x, grad = (t.chunk(parts)[part].to(dtype or t.dtype) for t in block.inputs())
    return gradients(block.module(dtype), x, grad, block.call(list(range(block.case.total))))


def whole(block: Block, shards: list[OnRank]) -> Results:
    """Ranks' results put together; what several have must be the same on all of them."""
    x, grad = block.inputs()
    found = dict(shards[0][1]) | {"out": np.full(grad.shape, np.nan), "x": np.full(x.shape, np.nan)}
    for rows, results in shards:
        for name, value in results.items():
            if name in ("out", "x"):
                known = found[name][:, rows]
                assert np.array_equal(np.where(np.isnan(known), value, known), value), name
                found[name][:, rows] = value
            else:
                assert np.array_equal(value, found[name]), name
    return found


def check(ranks: Callable[[int], RankPool], block: Block) -> None:
    """A block on ranks, in float64, is the plain module."""
    assert_exact(whole(block, ranks(block.case.size).run(run, block)), expected(block))


def assert_exact(found: Results, exact: Results, tolerance: float = 1e-10) -> None:
    """Absolute error of every element."""
    assert found.keys() == exact.keys()
    for name, value in exact.items():
        if value.size or found[name].size:  # a rank may hold no token, or no hidden unit
            error = worst_error({name: (found[name], value)})
            assert error <= tolerance, f"{name}: {error:.3e}"


def assert_mean(found: Results, exact: Results, tolerance: float = 1e-5) -> None:
    """The paper's bar: mean absolute error per element (section 5.2)."""
    for name, value in exact.items():
        mine, its = comparable(name, found[name], value)
        error = float((mine - its).abs().mean())  # no comparison: of what has been found comparable
        assert error <= tolerance, f"{name}: {error:.3e}"


def assert_ratio(found: Results, single: Results, exact: Results, eps: float, most: float = 2.0) -> None:
    """Errors at most so many times one process' in the same dtype; one rounding of a typical element is allowed."""
    for name, value in exact.items():
        mine, its, size = rms(found[name], value), rms(single[name], value), rms(value)
        allowed = max(most * its, eps / 4 * size)
        assert mine <= allowed, f"{name}: {mine:.3e} against {its:.3e}, size {size:.3e}"
