"""check_model: a whole model on a mesh beside one process; each mistake is named, on every rank."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wallfacer_dt import (
    EquivalenceError,
    TokenOrder,
    check_model,
    context_mesh,
    context_parallel_attention,
    dealing,
    shard_sequence,
)
from wallfacer_dt.sequence import local_shard
from wallfacer_dt.testing import RankPool
from wallfacer_dt.testing.fake import fake_world

Ranks = Callable[[int], RankPool]
N, V, D, HEADS = 32, 11, 16, 2
FACTORS = {"nan whole": float("nan"), "nothing": 0.0}  # of the loss


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)

    def forward(self, x: Tensor, inner: Callable[..., Tensor]) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.out(inner(4 * q, k, v).transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.position_embedding = nn.Embedding(V, D), nn.Embedding(N, D)
        self.layers = nn.ModuleList(Attention() for _ in range(2))
        self.head, self.dropout = nn.Linear(D, V), nn.Dropout(0.0)
        self.double()

    def forward(self, tokens: Tensor, positions: Tensor, inner: Callable[..., Tensor]) -> Tensor:
        x = self.embedding(tokens) + self.position_embedding(positions)
        for layer in self.layers:
            x = x + self.dropout(layer(x, inner))
        return self.head(x)


def check(mistake: str, size: int) -> str:
    """On every rank: what check_model says of a mistake; and whether grads and random state are as they were."""
    mesh = context_mesh("cpu", ring=size // 2, team=2)
    order = TokenOrder("head_tail", mesh)
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(V, (2, N + 1), generator=generator)
    tokens, labels = tokens[:, :-1], tokens[:, 1:]
    model = Model()
    rank = torch.distributed.get_rank()
    if mistake == "parameters" and rank == 1:
        model.head.weight.data *= 1.5
    if mistake == "shape" and rank == 1:
        model.layers[1].out = nn.Linear(D, D + 1).double()
    if mistake == "dropout":
        model.dropout.p = 0.5
    window = (5, 0) if mistake == "window" else None

    def whole_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        i = torch.arange(N)
        seen = i[:, None] >= i if window is None else (i[:, None] >= i) & (i[:, None] - i <= 5)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if mistake == "one rank fails" and rank == 2:
            raise IndexError("by chance")
        if mistake == "no attention":
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return context_parallel_attention(q, k, v, mesh, is_causal=True, order=order)

    def whole(model: nn.Module) -> Tensor:
        logits = model(tokens, torch.arange(N)[None], whole_attention)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) * FACTORS.get(mistake, 1)

    def sharded(model: nn.Module) -> Tensor:
        deal = local_shard if mistake == "none, dealt by hand" else shard_sequence
        mine, positions = deal(tokens, order, dim=1), deal(torch.arange(N)[None], order, dim=1)
        if mistake == "positions":
            positions = torch.arange(mine.shape[1])[None]
        wanted = deal(labels, order, dim=1)
        if mistake == "labels":
            wanted = F.pad(mine, (0, 1), value=1)[:, 1:]
        loss = F.cross_entropy(model(mine, positions, attention).flatten(0, 1), wanted.flatten(), reduction="sum")
        if mistake == "nan" and rank == 1:
            loss = loss * float("nan")
        if mistake == "no loss":
            return loss.expand(2)
        loss = loss * FACTORS.get(mistake, 1)
        return loss / (wanted.numel() if mistake == "mean" else labels.numel())

    model.head.bias.grad = torch.ones(V).double()
    state, noticed = torch.get_rng_state(), dealing._noticed(order.dealt)
    noticed.are_dealt = False
    try:
        check_model(model, mesh, whole=whole, sharded=sharded, order=order)
    except (EquivalenceError, ValueError, TypeError, IndexError) as error:
        text = f"{type(error).__name__}: {error}"
    else:
        text = "equal"
    assert bool((model.head.bias.grad == 1).all())
    assert model.head.weight.grad is None
    assert bool((torch.get_rng_state() == state).all())
    return text if noticed.are_dealt else f"{text}, and nothing was dealt out"


@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        ("", ["equal"]),
        ("none, dealt by hand", ["equal, and nothing was dealt out"]),
        (
            "no attention",
            ["EquivalenceError", "the loss is", "layers.0.out", "no attention was called on the mesh at all"],
        ),
        ("positions", ["EquivalenceError", "that of position_embedding", "are positions given"]),
        ("window", ["EquivalenceError", "that of layers.0.out", "a keyword swallowed"]),
        ("labels", ["EquivalenceError", "all outputs are right", "shifted before"]),
        ("mean", ["EquivalenceError", "a mean of its own"]),
        ("parameters", ["EquivalenceError", "other parameters", "rank 1"]),
        ("dropout", ["EquivalenceError", "dropout"]),
        ("nan", ["EquivalenceError", "not finite"]),
        ("nan whole", ["EquivalenceError", "run whole the model has the loss nan, which is not finite"]),
        ("nothing", ["EquivalenceError", "gradients that are all 0"]),
        (
            "shape",
            ["ValueError", "the parameter layers.1.out.weight must be the same", "rank 1: (17, 16) torch.float64"],
        ),
        ("no loss", ["TypeError", "a tensor of one number"]),
    ],
)
def test_mistakes_are_named_on_every_rank(ranks: Ranks, mistake: str, says: list[str]) -> None:
    for told in ranks(4).run(check, mistake, 4):
        for what in says:
            assert what in told, told


def test_one_rank_that_fails_is_heard_of(ranks: Ranks) -> None:
    told: list[Any] = ranks(4).run(check, "one rank fails", 4)
    for one in told:
        assert (
            "it must be the same on every rank of the mesh, got rank 0: attention, rank 1: attention, rank 2: " in one
        )
    assert ranks(4).run(check, "", 4) == ["equal"] * 4  # nobody was left behind


class WithStatistics(nn.Module):
    """Buffers that a forward changes in place, and one that it replaces, with what it says of that."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.table, self.made_for = nn.BatchNorm1d(D), nn.Buffer(torch.ones(4)), 0
        self.lengths: list[int] = []
        self.last: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.table, self.made_for, self.also = 2 * self.table, len(x), x
        self.lengths.append(len(x))
        self.last["x"] = x
        return self.norm(x).square().sum() + self.norm.weight.sum()


def buffers_after() -> dict[str, bool]:
    model = WithStatistics()
    before = {name: (x, x.clone()) for name, x in model.named_buffers()}
    x = torch.randn(8, D, generator=torch.Generator().manual_seed(0))
    mesh = context_mesh("cpu", ring=2)
    check_model(model, mesh, whole=lambda m: m(x), sharded=lambda m: m(x) / 2)
    found = {name: x is before[name][0] and torch.equal(x, before[name][1]) for name, x in model.named_buffers()}
    found["attributes"] = model.made_for == 0 and not hasattr(model, "also")
    return found | {"contents": (model.lengths, model.last) == ([], {})}


def test_buffers_are_left_as_they_were(ranks: Ranks) -> None:
    for found in ranks(2).run(buffers_after):
        assert len(found) == 6
        assert all(found.values()), found


def in_half_precision(tolerance: float | None) -> str:
    """Of a model in float32 that computes in 16 bits, and so sums its gradient over rows."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)), torch.randn(64, 64)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float().square().sum()

    mesh = context_mesh("cpu", ring=2)
    mine = x.chunk(2)[mesh.get_local_rank("cp_ring")]
    try:
        check_model(model, mesh, whole=lambda m: loss(m, x), sharded=lambda m: loss(m, mine), tolerance=tolerance)
    except EquivalenceError as error:
        return str(error)
    return "equal"


def test_the_tolerance_is_of_what_is_computed_in(ranks: Ranks) -> None:
    assert ranks(2).run(in_half_precision, None) == ["equal"] * 2
    assert all("gradients" in said for said in ranks(2).run(in_half_precision, 1e-3))


class Biased(nn.Module):
    """Attention whose keys have a bias, of which the gradient is 0 but for rounding."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key, self.value = (nn.Linear(D, D) for _ in range(3))
        self.to(dtype)

    def forward(self, x: Tensor, inner: Callable[..., Tensor]) -> Tensor:
        heads = (one(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in (self.query, self.key, self.value))
        return x + inner(*heads).transpose(1, 2).flatten(2)


def with_a_bias(dtype: torch.dtype, factor: float) -> str:
    """What is said of it, where on the mesh the gradient of the keys, or of the values' bias, is another."""
    mesh = context_mesh("cpu", ring=2)
    order = TokenOrder("contiguous", mesh)
    x = torch.randn(2, N, D, generator=torch.Generator().manual_seed(1)).to(dtype)
    mine = shard_sequence(x, order, dim=1)
    model = Biased(dtype)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return context_parallel_attention(q, k, v, mesh, order=order)

    def sharded(model: nn.Module) -> Tensor:
        bias = model.value.bias
        changed = (factor - 1) * (bias - bias.detach()).sum()  # 0, but for its gradient
        return model(mine, attention).float().square().sum() / x.numel() + changed / 2

    def whole(model: nn.Module) -> Tensor:
        return model(x, F.scaled_dot_product_attention).float().square().sum() / x.numel()

    try:
        check_model(model, mesh, whole=whole, sharded=sharded, order=order)
    except EquivalenceError as error:
        return str(error)
    return "equal"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_gradient_that_is_rounding_alone_is_none(ranks: Ranks, dtype: torch.dtype) -> None:
    assert ranks(2).run(with_a_bias, dtype, 1.0) == ["equal"] * 2
    for said in ranks(2).run(with_a_bias, dtype, 1.5):
        assert said.startswith("the gradients of 1 of 6 parameters differ, of value.bias by ")


@pytest.mark.parametrize("tolerance", [0.0, -1e-3, float("nan"), float("inf"), "1e-3"])
def test_a_tolerance_that_is_none_is_refused(tolerance: Any) -> None:
    with fake_world(1), pytest.raises(ValueError, match="tolerance must be a finite number above 0, got"):
        check_model(nn.Linear(1, 1), context_mesh("cpu"), whole=F.relu, sharded=F.relu, tolerance=tolerance)


class Bare(Biased):
    """Without biases, and with a gradient that is a thousand times as large."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        for one in (self.query, self.key, self.value):
            one.bias = None
        self.head = nn.Linear(D, 1, bias=False, dtype=dtype)

    def forward(self, x: Tensor, inner: Callable[..., Tensor]) -> Tensor:
        return super().forward(x, inner) + 1000 * self.head(x)


def without_keys(dtype: torch.dtype) -> str:
    """What is said where on the mesh keys have no gradient."""
    mesh = context_mesh("cpu", ring=2)
    order = TokenOrder("contiguous", mesh)
    x = torch.randn(2, N, D, generator=torch.Generator().manual_seed(1)).to(dtype)
    mine = shard_sequence(x, order, dim=1)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return context_parallel_attention(q, k.detach(), v, mesh, order=order)

    try:
        check_model(
            Bare(dtype), mesh, order=order, whole=lambda m: m(x, F.scaled_dot_product_attention).float().mean(),
            sharded=lambda m: m(mine, attention).float().mean() / 2,
        )  # fmt: skip
    except EquivalenceError as error:
        return str(error)
    return "equal"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_small_gradient_is_compared_by_itself(ranks: Ranks, dtype: torch.dtype) -> None:
    for said in ranks(2).run(without_keys, dtype):
        assert said.startswith("the gradients of 1 of 4 parameters differ, of key.weight by 1 of its largest element")
