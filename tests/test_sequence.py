"""Dealing sequences out and putting them together again, on real ranks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.cases import Case, held, index_of, mesh_of
from tests.strategies import PLACEMENTS, examples, ulysses_meshes
from wallfacer_dt import (
    TokenOrder,
    context_mesh,
    sequence_positions,
    shard_sequence,
    unshard_sequence,
)
from wallfacer_dt.layout import deal
from wallfacer_dt.mesh import whole_context_group
from wallfacer_dt.testing import RankPool, worst_error
from wallfacer_dt.testing.fake import fake_world

pytestmark = pytest.mark.ranks
Ranks = Callable[[int], RankPool]


def gradient_of_the_whole(shard: torch.Tensor, whole: torch.Tensor, **options: Any) -> bool:
    """Whether a shard's gradient is the sum of what ranks, each of which says something else, say of its rows."""

    def said(rank: int) -> torch.Tensor:
        return (torch.arange(whole.numel()).view(whole.shape) * (rank + 3) % 7).double()

    everyone = torch.stack([said(rank) for rank in range(dist.get_world_size())]).sum(0)
    mine = shard_sequence(everyone, **options)
    for leaf, factor in ((shard.double(), 1), (shard.to(torch.complex128), 1 + 2j)):
        out = unshard_sequence(leaf.requires_grad_(), grad=True, **options)
        (found,) = torch.autograd.grad(out, leaf, said(dist.get_rank()) * factor)
        if not found.equal(mine * factor):
            return False
    return True


def round_trip(case: Case, shape: tuple[int, ...], dim: int) -> tuple[bool, ...]:
    mesh = mesh_of(case.ring, case.team, case.placement, case.ulysses)
    whole = torch.arange(torch.Size(shape).numel()).view(shape).float()
    rows = torch.tensor(held(index_of(case), case.axes, case.order, shape[dim]), dtype=torch.int64)
    shard = shard_sequence(whole, TokenOrder(case.order, mesh), dim=dim)
    leaf = whole.clone().requires_grad_()
    shard_sequence(leaf, TokenOrder(case.order, mesh), dim=dim).sum().backward()
    touched = torch.zeros_like(whole).index_fill(dim, rows, 1.0)
    return (
        shard.equal(whole.index_select(dim, rows)) and shard.is_contiguous(),
        unshard_sequence(shard, TokenOrder(case.order, mesh), dim=dim).equal(whole),
        sequence_positions(shape[dim], TokenOrder(case.order, mesh)).equal(rows),
        leaf.grad is not None and leaf.grad.equal(touched),
        gradient_of_the_whole(shard, whole, dim=dim, order=TokenOrder(case.order, mesh)),
    )


@pytest.mark.parametrize("order", ["contiguous", "head_tail"])
@pytest.mark.parametrize("placement", ["team_in_node", "ring_in_node"])
@pytest.mark.parametrize("mesh", [(1, 1), (4, 1), (2, 2), (1, 4), (3, 2)])
@pytest.mark.parametrize(("shape", "dim"), [((2, 24), 1), ((24,), 0), ((2, 3, 24, 5), -2)])
def test_round_trip(
    threads: Ranks, mesh: tuple[int, int], placement: str, order: str, shape: tuple[int, ...], dim: int
) -> None:
    case = Case(*mesh, placement=placement, order=order)
    assert all(all(checks) for checks in threads(case.size).run(round_trip, case, shape, dim))


def test_rows_of_documents_go_with_a_dim_of_the_batch() -> None:
    with fake_world(2):
        order = TokenOrder("document_head_tail", context_mesh("cpu", 2))
        ids = torch.zeros(2, 20, dtype=torch.int64)
        for call, rows in ((shard_sequence, 20), (unshard_sequence, 10)):
            with pytest.raises(ValueError, match=r"document_ids \(B, N\) go with a tensor whose dim 0 is the batch"):
                call(torch.zeros(rows, 2), order, dim=0, document_ids=ids)


@pytest.mark.parametrize("size", [1, 2, 4, 6, 8])
@examples(25)
@given(data=st.data())
def test_round_trip_of_any_length(threads: Ranks, size: int, data: st.DataObject) -> None:
    """On meshes of three axes, too, and with fewer tokens than ranks."""
    ring, team, ulysses = data.draw(st.sampled_from(ulysses_meshes(size)))
    order, placement = data.draw(st.sampled_from(["contiguous", "head_tail"])), data.draw(st.sampled_from(PLACEMENTS))
    case = Case(ring, team, ulysses=ulysses, placement=placement, order=order)
    shape = data.draw(st.lists(st.integers(1, 3), max_size=3))
    dim = data.draw(st.integers(0, len(shape)))
    shape.insert(dim, data.draw(st.integers(1, 5 * size)))
    dim -= data.draw(st.sampled_from([0, len(shape)]))
    assert all(all(checks) for checks in threads(size).run(round_trip, case, tuple(shape), dim))


def by_document(case: Case, ids: torch.Tensor, use_cumulative: bool) -> tuple[list[list[int]], bool, bool, bool]:
    """Positions that this rank holds by row, whether they say so themselves, and whether a batch comes back."""
    mesh = mesh_of(case.ring, case.team, case.placement, case.ulysses)
    batch, length = ids.shape
    documents = {"document_ids": ids}
    if use_cumulative:
        ends = torch.nonzero(ids[0].diff()).flatten() + 1
        documents = {"cu_seqlens": torch.cat([torch.tensor([0]), ends, torch.tensor([length])])}
    whole = torch.arange(length).expand(batch, -1)
    stacked = torch.stack([whole + 100 * row for row in range(batch)])[torch.arange(batch), torch.arange(batch)]
    options = {"dim": 1, "order": TokenOrder("document_head_tail", mesh)} | documents
    shard = shard_sequence(stacked, **options)
    positions = sequence_positions(length, TokenOrder("document_head_tail", mesh), **documents)
    positions = positions if positions.ndim == 2 else positions.expand(batch, -1)
    offset = 100 * torch.arange(batch)[:, None]
    return (
        (shard - offset).tolist(),
        shard.equal(positions + offset),
        unshard_sequence(shard, **options).equal(stacked),
        gradient_of_the_whole(shard, stacked, **options),
    )


def written_to(order: str, grad: bool) -> bool:
    mesh = context_mesh("cpu", dist.get_world_size())
    shard = torch.arange(8.0)[None]
    whole = unshard_sequence(shard, TokenOrder(order, mesh), dim=1, grad=grad)
    whole.add_(1)
    return shard.equal(torch.arange(8.0)[None])


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("order", ["contiguous", "head_tail"])
@pytest.mark.parametrize("size", [1, 2])
def test_who_writes_to_the_whole_writes_to_nobodys_shard(threads: Ranks, size: int, order: str, grad: bool) -> None:
    assert threads(size).run(written_to, order, grad) == [True] * size


@pytest.mark.parametrize("size", [1, 4, 6])
@examples(20)
@given(data=st.data())
def test_round_trip_by_document(threads: Ranks, size: int, data: st.DataObject) -> None:
    """Each row by its own documents: on each rank as many tokens of every document as may be."""
    ring, team, ulysses = data.draw(st.sampled_from(ulysses_meshes(size)))
    case = Case(ring, team, ulysses=ulysses, placement=data.draw(st.sampled_from(PLACEMENTS)))
    batch, length = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 6 * size))
    begins = data.draw(st.lists(st.sets(st.integers(0, length - 1), max_size=4), min_size=batch, max_size=batch))
    use_cumulative = data.draw(st.booleans())
    begins = begins[:1] * batch if use_cumulative else begins
    ids = torch.tensor([[sum(b <= p for b in row) for p in range(length)] for row in begins])
    answers = threads(size).run(by_document, case, ids, use_cumulative)
    assert all(checks == [True, True, True] for _, *checks in answers)
    for row in range(batch):
        assert sorted(p for held_by_row, *_ in answers for p in held_by_row[row]) == list(range(length))
        for document in set(ids[row].tolist()):
            counts = [sum(int(ids[row, p]) == document for p in held_by_row[row]) for held_by_row, *_ in answers]
            assert max(counts) - min(counts) <= 2


TYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64),
    *(torch.uint64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.complex64),
]


def of_every_type(length: int) -> list[torch.dtype]:
    """Of which what is dealt out does not come back, whether few slices make it or an index does."""
    mesh, random = context_mesh("cpu", ring=2, ulysses=dist.get_world_size() // 2), torch.Generator().manual_seed(0)
    ids = torch.arange(length).div(7, rounding_mode="floor").expand(2, -1).clone()
    ids[1, 3:] += 1
    lost = []
    for dtype in TYPES:
        whole = torch.randint(0, 100, (2, length, 3), generator=random).to(dtype)
        for order, told in (("head_tail", {}), ("document_head_tail", {"document_ids": ids})):
            options: dict[str, Any] = {"dim": 1, "order": TokenOrder(order, mesh)} | told
            found = unshard_sequence(shard_sequence(whole, **options), **options)
            if found.dtype != dtype or not found.view(torch.uint8).equal(whole.view(torch.uint8)):
                lost.append(dtype)
    return lost


@pytest.mark.parametrize("length", [9, 64])
def test_round_trip_of_every_type(ranks: Ranks, length: int) -> None:
    """Backends know some of them; and torch has few operations of some."""
    assert ranks(2).run(of_every_type, length) == [[]] * 2
    assert ranks(4).run(of_every_type, length) == [[]] * 4


def classified(order: str) -> float:
    """A head on the mean of a sequence of a length that ranks do not divide, as docs/composition.md has it."""
    mesh = mesh_of(2, 2)
    order = TokenOrder(order, mesh)
    torch.manual_seed(0)
    whole, head = torch.randn(2, 13, 6, dtype=torch.float64), torch.nn.Linear(6, 3).double()
    label, length = torch.tensor([0, 2]), whole.shape[1]
    x = whole.clone().requires_grad_()
    torch.nn.functional.cross_entropy(head(x.mean(1)), label).backward()
    expected = [shard_sequence(x.grad, order, dim=1), *(p.grad.clone() for p in head.parameters())]
    head.zero_grad()
    mine = shard_sequence(whole, order, dim=1).requires_grad_()
    sums = unshard_sequence(mine.sum(1, keepdim=True), order, dim=1, grad=True)
    loss = torch.nn.functional.cross_entropy(head(sums.sum(1) / length), label)
    (loss / mesh.size()).backward()
    for p in head.parameters():
        dist.all_reduce(p.grad)
    found = [mine.grad, *(p.grad for p in head.parameters())]
    return worst_error(list(zip(found, expected, strict=True)), relative_to="largest")


@pytest.mark.parametrize("order", ["contiguous", "head_tail"])
def test_a_mean_over_the_sequence(threads: Ranks, order: str) -> None:
    assert max(threads(4).run(classified, order)) < 1e-12


def as_a_dtensor(case: Case, length: int) -> tuple[bool, bool]:
    """Whether a contiguous shard is the local tensor of a DTensor, and the whole its full tensor."""
    mesh = mesh_of(case.ring, case.team, case.placement, case.ulysses)
    whole = torch.arange(3 * length).view(length, 3)
    shard = shard_sequence(whole, TokenOrder("contiguous", mesh), dim=0)
    split = [Shard(0)] * mesh.ndim
    made = DTensor.from_local(shard, mesh, split, run_check=False, shape=whole.shape, stride=whole.stride())
    dealt = distribute_tensor(whole, mesh, split).to_local()
    return dealt.equal(shard), made.full_tensor().equal(unshard_sequence(shard, TokenOrder("contiguous", mesh), dim=0))


@pytest.mark.parametrize("length", [1, 3, 8, 9, 21, 31, 32])
@pytest.mark.parametrize("mesh", [(2, 2, 2), (8, 1, 1), (4, 1, 2), (1, 4, 2)])
def test_contiguous_shards_are_those_of_a_dtensor(ranks: Ranks, mesh: tuple[int, int, int], length: int) -> None:
    ring, team, ulysses = mesh
    assert all(all(checks) for checks in ranks(8).run(as_a_dtensor, Case(ring, team, ulysses=ulysses), length))


def of_wrong_sizes() -> str:
    mesh = mesh_of(2, 1)
    x = torch.zeros(2 + 2 * dist.get_rank())
    try:
        unshard_sequence(x, TokenOrder("contiguous", mesh), dim=0)
    except ValueError as error:
        return str(error)
    return ""


def test_shards_that_are_none_are_refused(ranks: Ranks) -> None:
    for message in ranks(2).run(of_wrong_sizes):
        assert "shards of [2, 4] positions are none of shard_sequence's" in message
        assert "[3, 3]" in message


def meshes_of_every_kind() -> list[tuple[str, tuple[int, ...]]]:
    """(axes, positions) on a mesh of one axis, a slice of a larger one, and the two placements."""
    one = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
    large = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("dp", "cp_ring", "cp_team"))
    kinds = [one, large["cp_ring", "cp_team"], context_mesh("cpu", 2, 2, placement="ring_in_node")]
    found = []
    for mesh in kinds:
        found.append((str(mesh.mesh_dim_names), tuple(sequence_positions(8, TokenOrder("head_tail", mesh)).tolist())))
    return found


def test_meshes_of_every_kind(ranks: Ranks) -> None:
    answers = ranks(4).run(meshes_of_every_kind)
    assert [a[0][1] for a in answers] == [(0, 7), (1, 6), (2, 5), (3, 4)]
    assert [a[1][1] for a in answers] == [(0, 1, 6, 7), (2, 3, 4, 5)] * 2
    # Neighbouring ranks in the ring: ranks 0, 1 are (0, 0), (1, 0).
    assert [a[2][1] for a in answers] == [(0, 7), (2, 5), (1, 6), (3, 4)]


def timeouts() -> list[float]:
    meshes = [context_mesh("cpu", 2, 2), context_mesh("cpu", 4)]
    whole_context_group(meshes[0])
    groups = [group for mesh in meshes for group in mesh.get_all_groups()]
    world = dist.group.WORLD
    return [g._get_backend(torch.device("cpu")).options._timeout.total_seconds() for g in (world, *groups)]


def test_the_groups_of_a_mesh_wait_as_long_as_the_world(ranks: Ranks) -> None:
    for found in ranks(4).run(timeouts):
        assert found == [ranks(4).timeout] * len(found)


def test_every_position_is_held_once() -> None:
    for size in range(1, 20):
        for order in ("contiguous", "head_tail"):
            shards = deal(6 * size, (1, size, 1), order)
            spans = [span for spans in shards for span in spans]
            assert sorted(p for span in spans for p in range(*span)) == list(range(6 * size))
            assert [p for span in shards[size // 2] for p in range(*span)] == held(size // 2, size, order, 6 * size)
