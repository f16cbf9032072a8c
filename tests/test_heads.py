"""Ulysses: who computes which heads, and that tokens exchanged for heads come back as they were."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.cases import held
from tests.strategies import examples
from wallfacer_dt.algorithms.heads import HeadExchange, Heads, split_heads
from wallfacer_dt.algorithms.steps import Parts
from wallfacer_dt.algorithms.turns import Computing, in_turn
from wallfacer_dt.layout import ORDERS, Spans, deal, in_order
from wallfacer_dt.rows import Members
from wallfacer_dt.testing import RankPool, worst_error

PAUSES = [None] * (len(Parts._fields) - 1)
ALONE = Parts[str]((), (), ("attend",), ())
SENDING = [Parts(("start",), ("wait",), ("attend",), ends) for ends in ((), ("wait",))]


@st.composite
def counts(draw: st.DrawFn) -> tuple[int, int, int]:
    """(query heads, key heads, ranks), at least a query head for each rank."""
    kv_heads, share = draw(st.integers(1, 12)), draw(st.integers(1, 8))
    return kv_heads * share, kv_heads, draw(st.integers(1, min(16, kv_heads * share)))


@examples(500)
@given(counts(), st.booleans())
def test_every_head_is_computed_once_and_evenly(chosen: tuple[int, int, int], hidden: bool) -> None:
    heads, kv_heads, ulysses = chosen
    share = heads // kv_heads
    ranks = split_heads(heads, kv_heads, ulysses, hidden=hidden)
    assert len(ranks) == ulysses
    assert len({len(groups) for groups in ranks}) == 1, "ranks have different numbers of exchanges"
    assert [h for groups in ranks for group in groups for h in range(*group.q)] == list(range(heads))
    mine = [sum(group.q[1] - group.q[0] for group in groups) for groups in ranks]
    assert max(mine) - min(mine) <= 1
    assert min(mine) >= 1
    for groups in ranks:
        full = [group for group in groups if not group.is_empty]
        assert groups[: len(full)] == tuple(full), "an empty group before a full one"
        queries = [h for group in full for h in range(*group.q)]
        keys = [h for group in full for h in range(*group.kv)]
        assert keys == sorted({h // share for h in queries}), "keys that nobody asked for, or twice"
        for group in full:
            ratio, rest = divmod(group.q[1] - group.q[0], group.kv[1] - group.kv[0])
            assert rest == 0
            # A kernel takes query head i of a group for key head i // ratio.
            assert [group.kv[0] + (h - group.q[0]) // ratio for h in range(*group.q)] == [
                h // share for h in range(*group.q)
            ]


@given(counts(), st.booleans())
def test_as_many_groups_as_hide_something(chosen: tuple[int, int, int], hidden: bool) -> None:
    """Neighbouring key heads of one ratio are one group; to hide exchanges, up to four if there are as many."""
    heads, kv_heads, ulysses = chosen
    share = heads // kv_heads
    wanted = []
    for groups in split_heads(heads, kv_heads, ulysses, hidden=hidden):
        queries = [h for group in groups for h in range(*group.q)]
        ratios = [sum(h // share == kv for h in queries) for kv in range(queries[0] // share, queries[-1] // share + 1)]
        runs = 1 + sum(before != after for before, after in pairwise(ratios))
        wanted.append(max(runs, min(4, len(ratios))) if hidden and ulysses > 1 else runs)
        assert sum(not group.is_empty for group in groups) == wanted[-1]
    assert len(groups) == max(wanted)


def test_groups_of_a_kind_are_what_a_tensor_has() -> None:
    group = Heads((4, 8), (1, 2))
    assert [group.of(kind) for kind in ("q", "kv", "shared")] == [(4, 8), (1, 2), (0, 1)]
    assert Heads((0, 0), (0, 0)).of("shared") == (0, 0)


@dataclass(frozen=True)
class Exchange:
    """What a group of ranks exchanges: every ``inner``-th rank of a mesh of ``axes``, from the ``me``-th on."""

    groups: tuple[tuple[Heads, ...], ...]
    order: str
    axes: tuple[int, int, int]
    me: int
    batch: int
    dims: dict[str, tuple[int, int, int]]
    kinds: tuple[str, ...]
    parts: Parts[str]  # of a schedule, by which groups take turns

    @property
    def rows(self) -> dict[str, list[list[int]]]:
        """By kind and rank of the group, the positions that it holds."""
        ulysses, inner, _ = self.axes
        places = [self.me + inner * u for u in range(ulysses)]
        return {kind: [held(u, self.axes, self.order, self.dims[kind][1]) for u in places] for kind in self.dims}

    def tensor(self, i: int) -> Tensor:
        """The whole one; two of a kind differ, also in dtype, since they share a message."""
        generator = torch.Generator().manual_seed(1 + i)
        whole = torch.randint(0, 100, (self.batch, *self.dims[self.kinds[i]]), generator=generator).double()
        return whole if i != 1 else (whole + 0.5).float()


class Exchanged(TorchDispatchMode):
    """Bytes that this rank receives in all-to-alls, of which it sends itself nothing."""

    received = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.ops._c10d_functional.all_to_all_single.default:
            buffer, received, sent, _ = args
            assert sent[dist.get_rank()] == received[dist.get_rank()] == 0, "sent to oneself"
            self.received += sum(received) * buffer.itemsize
        return func(*args, **(kwargs or {}))


def exchange_of(
    rank: int, groups: tuple[tuple[Heads, ...], ...], queries: Sequence[Spans], keys: Sequence[Spans]
) -> HeadExchange:
    """Of all ranks, by whom the queries and the keys are held."""
    of_queries, of_keys = (Members.made([in_order(enumerate(shards))], len(shards)) for shards in (queries, keys))
    return HeadExchange(str(dist.group.WORLD.group_name), rank, groups, (of_queries, of_keys))


def exchanged(case: Exchange) -> int:
    """There and back on this rank; the bytes received."""
    rank, rows, groups = dist.get_rank(), case.rows, case.groups
    shards = {kind: deal(case.dims[kind][1], case.axes, case.order)[case.me :: case.axes[1]] for kind in case.dims}
    exchange = exchange_of(rank, groups, shards["q"], shards["kv"])
    weight = 10.0**rank

    def compute(number: int, given: tuple[Tensor, ...]) -> Computing[list[Tensor]]:
        mine = groups[rank][number]
        for i, (kind, x) in enumerate(zip(case.kinds, given, strict=True)):
            whole = case.tensor(i)
            assert x.dtype == whole.dtype
            assert x.equal(whole[:, slice(*mine.of(kind))][:, :, sorted(chain.from_iterable(rows[kind]))])
        yield from PAUSES
        return [given[0] * 2, *(x * weight for x in given[2:])]

    tensors = [case.tensor(i)[:, :, rows[kind][rank]] for i, kind in enumerate(case.kinds)]
    with Exchanged() as counted:
        turns = in_turn(len(groups[rank]), case.parts)
        out, *sums = exchange.run(tensors, case.kinds, turns, compute, ["q", *case.kinds[2:]])
    assert out.equal(tensors[0] * 2)
    for kind, x, total in zip(case.kinds[2:], tensors[2:], sums, strict=True):
        weights = torch.zeros(case.dims[kind][0], dtype=torch.float64)
        for u, of_rank in enumerate(groups):
            for group in of_rank:
                weights[slice(*group.of(kind))] += 10.0**u
        assert total.equal(x * weights[:, None, None])
    return counted.received


@pytest.mark.ranks
@examples(60)
@given(
    chosen=counts().filter(lambda chosen: 2 <= chosen[2] <= 5), hidden=st.booleans(), order=st.sampled_from(ORDERS[:2]),
    q_length=st.integers(1, 20), k_length=st.integers(1, 20), inner=st.integers(1, 3), batch=st.integers(1, 2),
    has_shared=st.booleans(), parts=st.sampled_from([ALONE, *SENDING]), data=st.data(),
)  # fmt: skip
def test_round_trip(
    threads: Callable[[int], RankPool], chosen: tuple[int, int, int], hidden: bool, order: str, q_length: int,
    k_length: int, inner: int, batch: int, has_shared: bool, parts: Parts[str], data: st.DataObject,
) -> None:  # fmt: skip
    """Each rank is given its heads with all tokens in order; results come home, those of several ranks as their sum."""
    heads, kv_heads, ulysses = chosen
    dims = {"q": (heads, q_length, 3), "kv": (kv_heads, k_length, 2), "shared": (1, k_length, 5)}
    groups = split_heads(heads, kv_heads, ulysses, hidden=hidden)
    kinds = ("q", "q", "kv", "shared") if has_shared else ("q", "q", "kv")
    case = Exchange(groups, order, (ulysses, inner, 1), data.draw(st.integers(0, inner - 1)), batch, dims, kinds, parts)
    for rank, received in enumerate(threads(ulysses).run(exchanged, case)):
        assert received == batch * received_bytes(groups, rank, case.rows, has_shared=has_shared)


def received_bytes(groups: tuple[tuple[Heads, ...], ...], me: int, rows: dict, *, has_shared: bool) -> int:
    """Of a row of the batch: heads of others' tokens (q in float64 and float32, k), and what others computed."""
    others = {kind: sum(len(held) for u, held in enumerate(rows[kind]) if u != me) for kind in rows}
    total = 0
    for rank, of_rank in enumerate(groups):
        for group in of_rank:
            n, m, shared = (stop - start for start, stop in (group.q, group.kv, group.of("shared")))
            keys = m * 2 + (shared * 5 if has_shared else 0)
            if rank == me:
                total += others["q"] * n * 3 * (8 + 4) + others["kv"] * keys * 8
            else:
                total += len(rows["q"][me]) * n * 3 * 8 + len(rows["kv"][me]) * keys * 8
    return total


def summed_in_half() -> float:
    """Of a key head that all ranks compute, the sum of 256 and ones, which bfloat16 would not add."""
    rank, size = dist.get_rank(), dist.get_world_size()
    shards = deal(2 * size, (size, 1, 1), "contiguous")
    heads = split_heads(size, 1, size, hidden=False)
    exchange = exchange_of(rank, heads, shards, shards)

    def compute(number: int, given: tuple[Tensor, ...]) -> Computing[list[Tensor]]:
        yield from PAUSES
        return [torch.full_like(given[0], 1 if rank else 256)]

    ones, turns = torch.ones(1, 1, 2, 4, dtype=torch.bfloat16), in_turn(1, ALONE)
    (total,) = exchange.run([ones], ["kv"], turns, compute, ["kv"])
    assert total.shape == (1, 1, 2, 4)
    return worst_error([(total.double(), torch.full(total.shape, 255.0 + size, dtype=torch.float64))])


def test_gradients_of_a_key_head_are_summed_in_single_precision(threads: Callable[[int], RankPool]) -> None:
    assert threads(4).run(summed_in_half) == [0] * 4
