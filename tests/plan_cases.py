"""What the planner's memory model is compared with: ways to measure what is alive, and a real stack of layers."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from tests.cases import Inner, shard_sizes
from wallfacer_dt import METPAttentionParallel, METPParallel, ModelShape, SequenceShape, TokenOrder, WallFacerParallel
from wallfacer_dt.checkpoint import save_attention
from wallfacer_dt.metp import BODIES as METP_BODIES
from wallfacer_dt.ops import BODIES
from wallfacer_dt.planning import Candidate, dry_run, memory, probe
from wallfacer_dt.planning.alive import Alive


def rows_of(candidate: Candidate, length: int, index: int) -> int:
    """How many of so many tokens a sequence index holds."""
    if candidate.order == "document_head_tail":
        return length // candidate.size + (index < length % candidate.size)
    return shard_sizes(length, candidate.axes)[index]


def measured_shortly() -> Any:
    """Links and kernels are, where what is measured does not matter."""
    return mock.patch.multiple(probe, _SECONDS=0.01, _LARGEST=2**20, _LONG=0.02)


@contextmanager
def kernels_without_workspace() -> Iterator[None]:
    """As trackers see memory, which do not look into a kernel."""
    with mock.patch.object(dry_run, "_workspace", lambda *_: 0):  # noqa: PT008  (which would hold tensors)
        _forget()
        try:
            yield
        finally:
            _forget()


def _forget() -> None:
    for known in (memory._of_rank, memory._projected_of_rank):
        known.cache_clear()


class Bodies(TorchDispatchMode):
    """Shows a tracker what an operator of this package does inside, and sent tensors as held until waited for.

    The tracker sees such an operator as one op otherwise, and fake collectives let go of what they send at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.in_flight: dict[int, list[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        bodies = {**BODIES, **METP_BODIES}
        if func in bodies:
            with self:
                return bodies[func](*args, **(kwargs or {}))
        if func is torch.ops._c10d_functional.wait_tensor.default:
            self.in_flight.pop(args[0].untyped_storage()._cdata, None)
            return args[0]
        result = func(*args, **(kwargs or {}))
        # A broadcast copies what it sends first (torch's Functional.cpp), and holds only the copy, its result.
        if func.namespace == "_c10d_functional" and func is not torch.ops._c10d_functional.broadcast.default:
            self.in_flight[result.untyped_storage()._cdata] = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
        return result


class Tracked:
    """Peaks by ``MemTracker`` of what runs within :meth:`phase`."""

    def __init__(self, *given: Any) -> None:
        self.tracker, self.bodies = MemTracker(), Bodies()
        self.tracker.track_external(*given)

    @contextmanager
    def phase(self) -> Iterator[None]:
        """Forget the peak, and see what runs."""
        with self.tracker, self.bodies:
            yield

    @property
    def now(self) -> int:
        return self._total("current")

    @property
    def peak(self) -> int:
        return self._total("peak")

    def _total(self, which: str) -> int:
        return self.tracker.get_tracker_snapshot(which)[torch.device("cpu")]["Total"]


class Followed(Alive):
    """The same by this repository's own way of measuring."""

    @contextmanager
    def phase(self) -> Iterator[None]:
        """Forget the peak, and see what runs."""
        self.reset()
        with self:
            yield


class SwiGLU(nn.Module):
    """Llama's feed-forward."""

    def __init__(self, hidden: int, ffn: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.up, self.gate = (nn.Linear(hidden, ffn, bias=False, dtype=dtype) for _ in range(2))
        self.down = nn.Linear(ffn, hidden, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class GELU(nn.Module):
    """The same without a gate."""

    def __init__(self, hidden: int, ffn: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, ffn, bias=False, dtype=dtype)
        self.down = nn.Linear(ffn, hidden, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Experts(nn.Module):
    """A mixture of such experts, each of which is dealt equally many tokens; in the order of transformers' own.

    Ranks may have some each, and are sent their tokens as torchtitan sends them.
    """

    def __init__(self, model: ModelShape, dtype: torch.dtype, ranks: int = 1) -> None:
        super().__init__()
        self.router = nn.Linear(model.hidden, model.experts, bias=False, dtype=dtype)
        self.ranks, own = ranks, model.experts // ranks
        inward, outward = ((own, *sizes) for sizes in ((model.hidden, model.ffn), (model.ffn, model.hidden)))
        self.up, self.gate = (nn.Parameter(torch.empty(inward, dtype=dtype)) for _ in range(2))
        self.down = nn.Parameter(torch.empty(outward, dtype=dtype))
        self.each = model.experts_per_token
        self.shared = SwiGLU(model.hidden, model.shared_ffn, dtype) if model.shared_ffn else None

    def forward(self, x: Tensor) -> Tensor:
        return self._routed(x) if self.shared is None else self._routed(x) + self.shared(x)

    def _routed(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, experts = self.router(tokens).softmax(-1).topk(self.each)
        order = experts.flatten().argsort()
        given = tokens[order // self.each]
        if self.ranks > 1:
            # By experts, and for each by ranks, as they do not come.
            places = torch.arange(len(given)).view(self.ranks, len(self.down), -1).transpose(0, 1).flatten()
            given = _Exchanged.apply(given)[places]
        given = given.unflatten(0, (len(self.down), -1))
        found = torch.bmm(F.silu(torch.bmm(given, self.gate)) * torch.bmm(given, self.up), self.down).flatten(0, 1)
        if self.ranks > 1:
            found = _Exchanged.apply(torch.empty_like(found).index_put((places,), found))
        weighted = found * weights.flatten()[order, None]
        return weighted[order.argsort()].unflatten(0, (-1, self.each)).sum(1).view_as(x)


class _Exchanged(torch.autograd.Function):
    """Equally many rows from every rank to every other."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        received = torch.empty_like(rows)
        dist.all_to_all_single(received, rows)
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _Exchanged.apply(grad.contiguous())


class Attention(nn.Module):
    """With its projections."""

    def __init__(self, model: ModelShape, dtype: torch.dtype) -> None:
        super().__init__()
        self.dim = model.dim
        self.query, self.key, self.value = (
            nn.Linear(model.hidden, n * model.dim, bias=False, dtype=dtype)
            for n in (model.heads, model.keys, model.keys)
        )
        self.output = nn.Linear(model.heads * model.dim, model.hidden, bias=False, dtype=dtype)
        self.inner = Inner()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (project(x).unflatten(-1, (-1, self.dim)) for project in (self.query, self.key, self.value))
        return self.output(self.inner(q, k, v).flatten(2))


class LatentAttention(nn.Module):
    """DeepSeek's, as torchtitan has it; what stands for turning keeps nothing, as that does."""

    def __init__(self, model: ModelShape, dtype: torch.dtype) -> None:
        super().__init__()
        self.dim, self.rotary, self.value, self.rank = model.dim, model.rotary_dim, model.dim_of_values, model.kv_rank

        def linear(*sizes: int) -> nn.Linear:
            return nn.Linear(*sizes, bias=False, dtype=dtype)

        queries = model.heads * model.dim
        self.query: nn.Module = linear(model.hidden, queries)
        if model.q_rank:
            parts = linear(model.hidden, model.q_rank), Norm(model.q_rank, dtype=dtype), linear(model.q_rank, queries)
            self.query = nn.Sequential(*parts)
        self.down, self.norm = linear(model.hidden, self.rank + self.rotary), Norm(self.rank, dtype=dtype)
        self.up = linear(self.rank, model.heads * (self.dim - self.rotary + self.value))
        self.output = linear(model.heads * self.value, model.hidden)
        self.inner = Inner()

    def forward(self, x: Tensor) -> Tensor:
        own = self.dim - self.rotary
        q, turned = self.query(x).unflatten(-1, (-1, self.dim)).split([own, self.rotary], -1)
        q = torch.cat([q, -turned], -1)
        latent, turned = self.down(x).split([self.rank, self.rotary], -1)
        k, v = self.up(self.norm(latent)).unflatten(-1, (-1, own + self.value)).split([own, self.value], -1)
        k = torch.cat([k, -turned[:, :, None].expand(-1, -1, k.shape[2], -1)], -1)
        return self.output(self.inner(q, k, v).flatten(2))


class _FusedNorm(torch.autograd.Function):
    """What torch's fused RMSNorm, which CPU wheels have no kernel of, keeps and makes; no numbers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(*x.shape[:-1], 1, dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


class Norm(nn.RMSNorm):
    """As on CUDA."""

    def forward(self, x: Tensor) -> Tensor:
        return _FusedNorm.apply(x, self.weight)


class Layer(nn.Module):
    """x + attention(norm(x)), x + ffn(norm(x))."""

    def __init__(self, model: ModelShape, dtype: torch.dtype, expert: int = 1) -> None:
        super().__init__()
        self.norms = nn.ModuleList(Norm(model.hidden, dtype=dtype) for _ in range(2))
        self.attention = (LatentAttention if model.kv_rank else Attention)(model, dtype)
        if model.experts:
            self.ffn: nn.Module = Experts(model, dtype, expert)
        else:
            self.ffn = (SwiGLU if model.gated else GELU)(model.hidden, model.ffn, dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.ffn(self.norms[1](x))


class Stack(nn.Module):
    """Layers under a checkpoint, an embedding before them, and a norm, a projection and a loss after them."""

    def __init__(self, model: ModelShape, dtype: torch.dtype, how: str, expert: int = 1) -> None:
        super().__init__()
        kinds = [kind for kind, layers in model.kinds for _ in range(layers)]
        self.layers = nn.ModuleList(Layer(model.of(kind), dtype, expert) for kind in kinds)
        self.how = how
        self.embedding = nn.Embedding(model.vocab, model.hidden, dtype=dtype)
        self.norm = Norm(model.hidden, dtype=dtype)
        self.head = nn.Linear(model.hidden, model.vocab, bias=False, dtype=dtype)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            context = {"context_fn": save_attention()} if self.how == "attention" else {}
            x = layer(x) if self.how == "none" else checkpoint(layer, x, use_reentrant=False, **context)
        return self.loss(self.norm(x), targets)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), targets.flatten())


def stack_of(
    candidate: Candidate, model: ModelShape, sequence: SequenceShape, mesh: DeviceMesh, expert: int = 1
) -> Stack:
    """The stack as one rank has it: with METP's shards, and weights in full otherwise; gradients are there already."""
    stack = Stack(model, sequence.dtype, candidate.checkpoint, expert)
    inner = WallFacerParallel(
        is_causal=sequence.is_causal,
        order=TokenOrder(candidate.order, mesh),
        rotate=candidate.rotate,
        rotate_forward=candidate.rotate_forward,
        check=False,
    )
    plan: dict[str, ParallelStyle] = {"layers.*.attention.inner": inner}
    if candidate.projections == "metp":
        attention = METPAttentionParallel(
            query="query", key="key", value="value", output="output", head_dim=model.dim, attention=inner, check=False
        )
        plan = {"layers.*.attention": attention}
    if candidate.feed_forward == "metp":
        gate, activation = ("gate", "silu") if model.gated else (None, "gelu")
        plan["layers.*.ffn"] = METPParallel(up="up", down="down", gate=gate, activation=activation, check=False)
    parallelize_module(stack, mesh, plan, src_data_rank=None)
    for weight in stack.parameters():
        weight.grad = torch.zeros_like(weight)
    return stack
