"""Models that call scaled_dot_product_attention, unedited, against one process."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported
from torch._dynamo.testing import CompileCounter
from torch.nn.attention.flex_attention import flex_attention

# As a model has it that was written long ago.
from torch.nn.functional import scaled_dot_product_attention as imported
from torch.utils.checkpoint import checkpoint

from tests.cases import mesh_of
from wallfacer_dt import TokenOrder, shard_sequence
from wallfacer_dt.sdpa import context_parallel
from wallfacer_dt.testing import RankPool, worst_error

pytestmark = pytest.mark.ranks
Ranks = Callable[[int], RankPool]

HEADS, DIM, WORDS = 4, 8, 11


class Block(nn.Module):
    """Attention with grouped heads that reads it from where others do, and projections."""

    def __init__(self, kv_heads: int, *, is_causal: bool) -> None:
        super().__init__()
        self.kv_heads, self.is_causal = kv_heads, is_causal
        self.qkv = nn.Linear(HEADS * DIM, (HEADS + 2 * kv_heads) * DIM)
        self.out = nn.Linear(HEADS * DIM, HEADS * DIM)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, DIM)).transpose(1, 2)
        q, k, v = heads.split((HEADS, self.kv_heads, self.kv_heads), 1)
        attend = imported if self.is_causal else F.scaled_dot_product_attention
        out = attend(q, k, v, is_causal=self.is_causal, enable_gqa=self.kv_heads < HEADS, scale=0.3)
        return x + self.out(out.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """Two blocks between words and logits; positions are a buffer of the batch."""

    def __init__(self, kv_heads: int = HEADS, *, is_causal: bool = True, checkpointed: str = "") -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, HEADS * DIM), nn.Embedding(64, HEADS * DIM)
        self.blocks = nn.ModuleList(Block(kv_heads, is_causal=is_causal) for _ in range(2))
        self.checkpointed = checkpointed

    def forward(self, ids: Tensor, positions: Tensor, labels: Tensor) -> Tensor:
        x = self.words(ids) + self.places(positions)
        for block in self.blocks:
            x = CHECKPOINTS[self.checkpointed](block, x) if self.checkpointed else block(x)
        return F.cross_entropy((x @ self.words.weight.t()).flatten(0, 1), labels.flatten(), reduction="sum")


def batch(length: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(WORDS, (2, length + 1), generator=generator)
    return [words[:, :-1].contiguous(), torch.arange(length), words[:, 1:].contiguous()]


def trained(model: nn.Module, loss: Tensor) -> list[Tensor]:
    loss.backward()
    return [loss.detach(), *(x.grad for x in model.parameters())]


def both(
    axes: tuple[int, int, int], make: Callable[[], nn.Module], length: int, order: str, window: int | None = None
) -> None:
    """Loss and gradients of one process, and of ranks; buffers are there again."""
    ring, team, ulysses = axes
    mesh = mesh_of(ring, team, ulysses=ulysses)
    torch.manual_seed(0)
    model = make().double()
    tensors = batch(length)
    expected = trained(model, model(*tensors))
    model.zero_grad()
    options: Any = {"order": TokenOrder(order, mesh)} | ({} if window is None else {"window_size": (window, 0)})
    with context_parallel(mesh, buffers=tensors, buffer_seq_dims=[1, 0, 1], **options):
        assert tensors[0].shape[1] < length
        found = trained(model, model(*tensors))
    assert all(x.equal(y) for x, y in zip(tensors, batch(length), strict=True))
    for mine, whole in zip(found, expected, strict=True):
        dist.all_reduce(mine)
        assert worst_error([(mine, whole)], relative_to="largest") < 1e-12


@pytest.mark.parametrize("axes", [(4, 1, 1), (2, 2, 1), (2, 1, 2)], ids=["ring", "2d", "hybrid"])
@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("is_causal", [True, False])
def test_trains_as_in_one_process(
    threads: Ranks, axes: tuple[int, int, int], kv_heads: int, *, is_causal: bool
) -> None:
    threads(4).run(both, axes, partial(Model, kv_heads, is_causal=is_causal), 16, "head_tail")


@pytest.mark.parametrize("order", ["contiguous", "head_tail"])
def test_any_length(threads: Ranks, order: str) -> None:
    threads(4).run(both, (2, 2, 1), Model, 13, order)


def test_options_are_those_of_attention(threads: Ranks) -> None:
    with pytest.raises(RuntimeError, match="AssertionError"):  # a window changes what comes out
        threads(4).run(both, (2, 2, 1), Model, 16, "contiguous", 3)
    threads(4).run(both, (2, 2, 1), Model, 16, "contiguous", 15)


def in_graphs() -> int:
    """How many there are of a model, of one process and of ranks."""
    count = CompileCounter()

    def made() -> nn.Module:
        model = Model()
        model.compile(backend=count)
        return model

    both((2, 1, 1), made, 16, "head_tail")
    return count.frame_count


@pytest.mark.slow
def test_a_compiled_model_has_attention_between_its_graphs(ranks: Ranks) -> None:
    assert min(ranks(2).run(in_graphs)) > 2  # one of one process, and of ranks those around attention


class Again(torch.autograd.Function):
    """A checkpoint as others write them."""

    @staticmethod
    def forward(ctx: Any, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(x)
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.function(x)
        torch.autograd.backward(out, grad)
        return None, x.grad


CHECKPOINTS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "torch's": lambda block, x: checkpoint(block, x, use_reentrant=False),
    "torch's reentrant": lambda block, x: checkpoint(block, x, use_reentrant=True),
    "another": lambda block, x: Again.apply(block, x),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_what_is_computed_again_is_seen(threads: Ranks, name: str) -> None:
    threads(4).run(both, (4, 1, 1), partial(Model, checkpointed=name), 16, "head_tail")


@contextmanager
def entered(**changes: Any) -> Iterator[list[Tensor]]:
    tensors = batch(16)
    told = {"buffers": tensors, "buffer_seq_dims": [1, 0, 1]} | changes
    with context_parallel(mesh_of(4, 1), **told):
        yield tensors


def attend(*shape: int, of: Callable[..., Any] = F.scaled_dot_product_attention, **options: Any) -> None:
    with entered():
        x = torch.zeros(shape or (2, HEADS, 4, DIM))
        of(x, x, x, **options)


def compiled() -> None:
    with entered() as tensors:
        torch.compile(Model(), backend="eager", fullgraph=True)(*tensors)


def nothing_attends() -> None:
    with entered():
        pass


def nested() -> None:
    with entered(), entered():
        pass


def of_torch() -> None:
    with entered():
        nn.MultiheadAttention(8, 2)(*torch.zeros(3, 2, 4, 8))


REFUSALS = {
    "a mask": (partial(attend, attn_mask=torch.ones(4, 4, dtype=torch.bool)), ValueError, "attn_mask is of one rank"),
    "dropout": (partial(attend, dropout_p=0.1), ValueError, "dropout is not implemented"),
    "three dims": (partial(attend, 2, 4, DIM), ValueError, r"queries and keys \(B, N, L, H\)"),
    "tokens that were not dealt out": (partial(attend, 2, HEADS, 5, DIM), ValueError, "16 tokens this rank holds 4"),
    "flex_attention": (partial(attend, of=flex_attention), NotImplementedError, "flex_attention computes attention"),
    "torch's module": (of_torch, NotImplementedError, "MultiheadAttention computes attention where"),
    "a model compiled to one graph": (compiled, Unsupported, r"/wallfacer_dt/sdpa\.py.* in __torch_function__"),
    "nothing attends": (nothing_attends, RuntimeError, "nothing in context_parallel called"),
    "one within another": (nested, ValueError, "context_parallel within another"),
    "an unknown option": (lambda: entered(windw=3).__enter__(), TypeError, "did you mean 'window_size'"),
    "no tensor": (lambda: entered(buffers=[3], buffer_seq_dims=[0]).__enter__(), TypeError, "a buffer is a tensor"),
    "two dims of keys": (
        partial(attend, of=lambda q, k, v: F.scaled_dot_product_attention(q, k[0, 0], v)), ValueError, "B, N, L, H",
    ),
    "an option of calls": (lambda: entered(is_causal=True).__enter__(), ValueError, "is_causal is no option"),
    "a dim too few": (lambda: entered(buffer_seq_dims=[1]).__enter__(), ValueError, "a dim for each of the buffers"),
    "no buffers": (lambda: entered(buffers=[], buffer_seq_dims=[]).__enter__(), ValueError, "a dim for each"),
    "no such dim": (lambda: entered(buffer_seq_dims=[9, 0, 1]).__enter__(), IndexError, "got 9"),
    "lengths": (lambda: entered(buffer_seq_dims=[0, 0, 1]).__enter__(), ValueError, "different numbers of positions"),
    "an unknown buffer": (
        lambda: entered(no_restore_buffers={torch.zeros(1)}).__enter__(), ValueError, "none of the buffers",
    ),
    "a gradient": (
        lambda: entered(buffers=[torch.zeros(1, 8, requires_grad=True)], buffer_seq_dims=[1]).__enter__(),
        ValueError, "use shard_sequence",
    ),
}  # fmt: skip


def refused(name: str) -> str:
    refuse, kind, _ = REFUSALS[name]
    try:
        refuse()
    except kind as error:
        return str(error)
    return "was not refused"


@pytest.mark.parametrize("name", REFUSALS)
def test_what_is_not_seen_is_refused(threads: Ranks, name: str) -> None:
    for said in threads(4).run(refused, name):
        with pytest.raises(REFUSALS[name][1], match=REFUSALS[name][2]):
            raise REFUSALS[name][1](said)


def left_as_it_is(collected: Callable[[list[Tensor]], Any]) -> bool:
    tensors = batch(16)
    kept = collected([tensors[2]])
    with (
        pytest.raises(KeyError),
        context_parallel(mesh_of(4, 1), buffers=tensors, buffer_seq_dims=[1, 0, 1], no_restore_buffers=kept),
    ):
        raise KeyError
    order = TokenOrder("head_tail", mesh_of(4, 1))
    shard = shard_sequence(batch(16)[2], order, dim=1)
    return tensors[0].equal(batch(16)[0]) and tensors[2].equal(shard)


@pytest.mark.parametrize("collected", [set, list])
def test_buffers_are_put_back_after_an_error_but_for_some(
    threads: Ranks, collected: Callable[[list[Tensor]], Any]
) -> None:
    assert all(threads(4).run(left_as_it_is, collected))


@pytest.mark.parametrize("checkpointed", ["", *CHECKPOINTS])
def test_backward_after_the_context_is_refused(threads: Ranks, checkpointed: str) -> None:
    # Torch sees for itself that its checkpoint gives something else.
    why = "Recomputed values" if checkpointed == "torch's" else "call backward within the context"
    assert all(why in said for said in threads(2).run(outside, checkpointed))


def outside(checkpointed: str) -> str:
    model = Model(checkpointed=checkpointed).double()
    tensors = batch(16)
    told: Any = {"buffers": tensors, "buffer_seq_dims": [1, 0, 1], "no_restore_buffers": set(tensors)}
    with context_parallel(mesh_of(2, 1), **told):
        loss = model(*tensors)
    try:
        loss.backward()
    except RuntimeError as error:
        with context_parallel(mesh_of(2, 1), buffers=batch(16), buffer_seq_dims=[1, 0, 1]):
            F.scaled_dot_product_attention(*torch.zeros(3, 2, HEADS, 8, DIM))
        torch.ones(1, requires_grad=True).sum().backward()  # others are none the worse
        return str(error)
    return "was not refused"


def elsewhere() -> bool:
    """Torch's functions that have been replaced do what they did."""
    with entered() as tensors:
        Model().double()(*tensors)
    x = torch.randn(1, 1, 16, 8, requires_grad=True)
    losses = [
        checkpoint(lambda x: imported(x, x, x).sum(), x, use_reentrant=True),
        checkpoint(lambda x: imported(x, x, x).sum(), x, use_reentrant=False, debug=True),
    ]
    (grad,) = torch.autograd.grad(losses[1], x)
    losses[0].backward()
    assert x.grad is not None
    return x.grad.equal(grad) and flex_attention(*[x.detach()] * 3).shape == x.shape


def test_outside_a_context_all_is_as_it_was(threads: Ranks) -> None:
    assert all(threads(4).run(elsewhere))


def one_refuses() -> str:
    tensors = batch(16)
    dims = [1, 0, 1] if dist.get_rank() else [1, 0]
    try:
        with context_parallel(mesh_of(2, 1), buffers=tensors, buffer_seq_dims=dims):
            dist.all_reduce(torch.ones(1))  # as FSDP would, before any attention
    except ValueError as error:
        return str(error)
    return "was not refused"


def test_all_refuse_where_one_does(threads: Ranks) -> None:
    assert all("a dim for each of the buffers" in said for said in threads(2).run(one_refuses))


def of_other_lengths() -> str:
    try:
        with context_parallel(mesh_of(2, 1), buffers=[torch.zeros(4 + dist.get_rank())], buffer_seq_dims=[0]):
            pass
    except ValueError as error:
        return str(error)
    return "was not refused"


def test_buffers_of_other_lengths_are_refused_on_all_ranks(threads: Ranks) -> None:
    assert all("length" in said and "4" in said and "5" in said for said in threads(2).run(of_other_lengths))


def entered_halfway() -> bool:
    """A buffer that cannot be changed: the others are whole."""
    with torch.inference_mode():
        frozen = torch.zeros(16)
    ids = batch(16)[0]
    try:
        with context_parallel(mesh_of(2, 1), buffers=[ids, frozen], buffer_seq_dims=[1, 0]):
            pass
    except ValueError as error:
        return "inference mode" in str(error) and ids.shape[1] == 16
    return False


def test_a_buffer_of_inference_mode_is_refused(threads: Ranks) -> None:
    assert all(threads(2).run(entered_halfway))
