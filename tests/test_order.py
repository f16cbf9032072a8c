"""Token orders as objects: what makes two alike, and that several may be on the same ranks."""

import copy
import pickle
from collections.abc import Callable
from itertools import combinations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from tests.cases import Inner, mesh_of
from wallfacer_dt import (
    RingParallel,
    TokenOrder,
    WallFacerParallel,
    context_mesh,
    context_parallel_attention,
    sequence_positions,
    shard_sequence,
    unshard_sequence,
)
from wallfacer_dt.testing import RankPool, worst_error
from wallfacer_dt.testing.fake import fake_world

Ranks = Callable[[int], RankPool]
HEADS, HEAD_DIM, WINDOW = 2, 8, 5


def test_orders_that_deal_alike_are_equal() -> None:
    """Whichever mesh of the same axes they were made of."""
    with fake_world(4):
        larger = init_device_mesh("cpu", (1, 4, 1), mesh_dim_names=("dp", "cp_ring", "cp_team"))
        meshes = [
            context_mesh("cpu", 4),
            context_mesh("cpu", 2, 2),
            context_mesh("cpu", 2, 2, placement="ring_in_node"),
            context_mesh("cpu", 2, ulysses=2),
        ]
        orders = [TokenOrder(name, mesh) for name in ("contiguous", "head_tail") for mesh in meshes]
        again = [TokenOrder("contiguous", larger["cp_ring", "cp_team"]), TokenOrder("contiguous", larger["cp_ring"])]
    assert again == [orders[0]] * 2
    assert all(hash(order) == hash(orders[0]) for order in again)


@pytest.mark.parametrize("name", ["contiguous", "head_tail"])
def test_orders_of_other_axes_are_equal_where_they_deal_every_length_alike(name: str) -> None:
    meshes = [
        {"ring": 4}, {"ring": 1, "team": 4}, {"ring": 1, "ulysses": 4}, {"ring": 2, "team": 2},
        {"ring": 2, "ulysses": 2}, {"ring": 2, "team": 2, "placement": "ring_in_node"},
    ]  # fmt: skip
    orders, dealt = [], [[] for _ in meshes]
    for rank in range(4):
        with fake_world(4, rank=rank):
            orders = [TokenOrder(name, context_mesh("cpu", **mesh)) for mesh in meshes]
            for held, order in zip(dealt, orders, strict=True):
                held.append([sequence_positions(length, order).tolist() for length in range(1, 20)])
    for (one, its), (other, others) in combinations(zip(orders, dealt, strict=True), 2):
        assert (one == other) == (its == others) == (hash(one) == hash(other))
    assert orders[0] == orders[1] == orders[2] != orders[3]


def test_an_order_is_plain_data() -> None:
    """It may go to a loader's workers, which have no process groups."""
    with fake_world(4, rank=2):
        order = TokenOrder("head_tail", context_mesh("cpu", 2, ulysses=2))
    assert repr(order) == "TokenOrder('head_tail', ranks 0, 2, 1, 3 in turn)"
    whole = torch.arange(16)
    for other in (pickle.loads(pickle.dumps(order)), copy.deepcopy(order)):
        assert other == order
        assert hash(other) == hash(order)
        assert shard_sequence(whole, other, dim=0).tolist() == [2, 3, 12, 13]
        assert sequence_positions(16, other).tolist() == [2, 3, 12, 13]


def test_an_order_is_its_ranks_own() -> None:
    with fake_world(4, rank=2):
        order = TokenOrder("head_tail", context_mesh("cpu", 4))
    message = "was made on rank 2 and is used on rank 1: every rank makes its own"
    with fake_world(4, rank=1), pytest.raises(ValueError, match=message):
        shard_sequence(torch.arange(16), order, dim=0)


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        (("zigzag", None), ValueError, "order must be one of .*, got 'zigzag'"),
        (("head_tail", "cpu"), TypeError, "mesh must be a DeviceMesh, got str"),
    ],
)
def test_what_makes_no_order_is_refused(arguments: tuple, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        TokenOrder(*arguments)


@pytest.mark.parametrize("name", ["head_tail", "contiguous"])
def test_attention_takes_an_order_that_deals_to_its_ranks_in_turn(name: str) -> None:
    """On the other meshes rank 1's tokens would be others, though it is the same order on the same ranks."""
    said = []
    with fake_world(4):
        meshes = [
            context_mesh("cpu", 4),
            context_mesh("cpu", 2, ulysses=2),
            context_mesh("cpu", 2, 2, placement="ring_in_node"),
            context_mesh("cpu", 2, ulysses=2, placement="ulysses_in_node"),
            context_mesh("cpu", ulysses=4),
            context_mesh("cpu", 2, 2),
        ]
        order, q = TokenOrder(name, meshes[0]), torch.zeros(1, 4, 4, 8)
        for mesh in meshes:
            try:
                context_parallel_attention(q, q, q, mesh, is_causal=True, order=order)
                said.append("")
            except ValueError as error:
                said.append(str(error))
    refused = {"head_tail": [1, 2], "contiguous": [2, 3]}[name]
    assert [index for index, message in enumerate(said) if message] == refused
    assert "deals tokens out to ranks 0, 1, 2, 3 in turn, but on attention's mesh it deals to 0, 2, 1, 3" in said[2]
    assert f"order = TokenOrder('{name}', mesh)" in said[2]


def test_attention_refuses_an_order_by_document_of_a_mesh_that_lies_otherwise() -> None:
    """What is left of documents goes to ranks as they lie in the mesh, in whatever turn these are."""
    with fake_world(4):
        one, other = context_mesh("cpu", 4), context_mesh("cpu", 2, ulysses=2, placement="ulysses_in_node")
        order, q, ends = TokenOrder("document_head_tail", one), torch.zeros(1, 4, 5, 8), torch.tensor([0, 10, 20])
        options = {"is_causal": True, "order": order, "cu_seqlens": ends, "length": 20}
        assert order.dealt == TokenOrder("document_head_tail", other).dealt
        context_parallel_attention(q, q, q, one, **options)
        with pytest.raises(
            ValueError, match=r"ranks 0, 1, 2, 3, to which .* left of .* is of ranks 0, 2, 1, 3; use one"
        ):
            context_parallel_attention(q, q, q, other, **options)


class Windowed(Inner):
    """Attention of an encoder: each token sees its neighbours on both sides."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        apart = (torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])).abs()  # no comparison: of positions
        return F.scaled_dot_product_attention(q, k, v, apart <= WINDOW)


class Causal(Inner):
    """Of a decoder."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Cross(Inner):
    """From one to the other."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


class Translator(nn.Module):
    """An encoder's layer, a decoder's, and attention from that to this."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder, self.cross = Windowed(), Causal(), Cross()
        torch.manual_seed(0)
        self.weights = nn.ParameterList(torch.randn(HEAD_DIM, HEAD_DIM, dtype=torch.float64) / 3 for _ in range(8))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        encoded = source + self.encoder(*(source @ w for w in self.weights[:3]))
        decoded = target + self.decoder(*(target @ w for w in self.weights[3:6]))
        return decoded + self.cross(decoded, encoded @ self.weights[6], encoded @ self.weights[7])


def drawn() -> tuple[Tensor, Tensor, Tensor]:
    """An encoder's sequence, a shorter one of a decoder, and the gradient of the output; (B, N, L, H)."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(1, HEADS, length, HEAD_DIM) for length in (48, 32, 32)]
    source, target, grad = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return source, target, grad


def translated(ring: int, team: int) -> list[Tensor]:
    """The output and the gradients of inputs and weights, from an encoder and a decoder in orders of their own."""
    mesh, model = mesh_of(ring, team), Translator()
    orders = TokenOrder("contiguous", mesh), TokenOrder("head_tail", mesh)
    style = RingParallel if team == 1 else WallFacerParallel
    plan = {
        "encoder": style(window_size=(WINDOW, WINDOW), order=orders[0], layout="BNLH"),
        "decoder": style(is_causal=True, order=orders[1], layout="BNLH"),
        "cross": style(layout="BNLH"),
    }
    parallelize_module(model, mesh, plan)
    x, y, grad = drawn()
    source, target, grad = (
        shard_sequence(whole, order, dim=2) for whole, order in zip((x, y, grad), (*orders, orders[1]), strict=True)
    )
    out = model(source.requires_grad_(), target.requires_grad_())
    out.backward(grad)
    for weight in model.parameters():
        dist.all_reduce(weight.grad)
    shards = ((out.detach(), orders[1]), (source.grad, orders[0]), (target.grad, orders[1]))
    return [*(unshard_sequence(shard, order, dim=2) for shard, order in shards), *(w.grad for w in model.parameters())]


@pytest.mark.ranks
@pytest.mark.parametrize("sizes", [(2, 1), (2, 2)])
def test_an_encoder_and_a_decoder_have_orders_of_their_own(ranks: Ranks, sizes: tuple[int, int]) -> None:
    model, (source, target, grad) = Translator(), drawn()
    out = model(source.requires_grad_(), target.requires_grad_())
    out.backward(grad)
    expected = [out.detach(), source.grad, target.grad, *(w.grad for w in model.parameters())]
    for found in ranks(sizes[0] * sizes[1]).run(translated, *sizes):
        assert worst_error(zip(found, expected, strict=True)) < 1e-10
