"""Ulysses: who computes which heads, and that tokens exchanged for heads come back as they were."""

from collections.abc import Callable
from itertools import chain, pairwise
from threading import Barrier, Thread
from unittest.mock import patch

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.cases import held
from wallfacer_dt.algorithms import heads as module
from wallfacer_dt.algorithms.heads import HeadExchange, Heads, split_heads
from wallfacer_dt.layout import ORDERS, deal


@st.composite
def counts(draw: st.DrawFn) -> tuple[int, int, int]:
    """(query heads, key heads, ranks), at least a query head for each rank."""
    kv_heads, share = draw(st.integers(1, 12)), draw(st.integers(1, 8))
    return kv_heads * share, kv_heads, draw(st.integers(1, min(16, kv_heads * share)))


@settings(max_examples=500)
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
        wanted.append(max(runs, min(4, len(ratios))) if hidden else runs)
        assert sum(not group.is_empty for group in groups) == wanted[-1]
    assert len(groups) == max(wanted)


def test_groups_of_a_kind_are_what_a_tensor_has() -> None:
    group = Heads((4, 8), (1, 2))
    assert [group.of(kind) for kind in ("q", "kv", "shared")] == [(4, 8), (1, 2), (0, 1)]
    assert Heads((0, 0), (0, 0)).of("shared") == (0, 0)


class Wire:
    """An all-to-all between threads, each of which is a rank named by its group's name."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = Barrier(size, timeout=30)
        self.sent: dict[int, list[Tensor]] = {}
        self.received = dict.fromkeys(range(size), 0)

    def all_to_all(self, buffer: Tensor, sent: list[int], received: list[int], group: str) -> Tensor:
        rank = int(group)
        self.sent[rank] = list(buffer.split(sent))
        self.barrier.wait()
        parts = [self.sent[other][rank] for other in range(self.size)]
        self.barrier.wait()
        assert [part.numel() for part in parts] == received, "what is sent is not what is expected"
        assert sent[rank] == received[rank] == 0, "sent to oneself"
        self.received[rank] += sum(part.nbytes for part in parts)
        return torch.cat(parts)

    def run(self, function: Callable[[int], None]) -> None:
        errors: list[BaseException] = []

        def guarded(rank: int) -> None:
            try:
                function(rank)
            except BaseException as error:
                errors.append(error)
                self.barrier.abort()

        threads = [Thread(target=guarded, args=(rank,)) for rank in range(self.size)]
        with patch.object(module, "all_to_all", self.all_to_all), patch.object(module, "wait", lambda x: x):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if errors:
            raise errors[0]


@settings(max_examples=60)
@given(
    chosen=counts().filter(lambda chosen: 2 <= chosen[2] <= 5), hidden=st.booleans(), order=st.sampled_from(ORDERS[:2]),
    q_length=st.integers(1, 20), k_length=st.integers(1, 20), inner=st.integers(1, 3), has_shared=st.booleans(),
    data=st.data(),
)  # fmt: skip
def test_round_trip(
    chosen: tuple[int, int, int], hidden: bool, order: str, q_length: int, k_length: int, inner: int, has_shared: bool,
    data: st.DataObject,
) -> None:  # fmt: skip
    """Each rank is given its heads with all tokens in order; results come home, those of several ranks as their sum."""
    heads, kv_heads, ulysses = chosen
    axes, me = (ulysses, inner, 1), data.draw(st.integers(0, inner - 1))
    generator = torch.Generator().manual_seed(heads + 100 * q_length)
    dims = {"q": (heads, q_length, 3), "kv": (kv_heads, k_length, 2), "shared": (1, k_length, 5)}
    wholes = {
        kind: torch.randint(0, 100, (2, n, length, dim), generator=generator).double()
        for kind, (n, length, dim) in dims.items()
    }
    kinds = ["q", "q", "kv", "shared"] if has_shared else ["q", "q", "kv"]
    groups = split_heads(heads, kv_heads, ulysses, hidden=hidden)
    shards = {kind: deal(dims[kind][1], axes, order)[me::inner] for kind in dims}
    rows = {kind: [held(me + inner * u, axes, order, dims[kind][1]) for u in range(ulysses)] for kind in dims}
    together = {kind: sorted(chain.from_iterable(rows[kind])) for kind in dims}
    wire = Wire(ulysses)

    def tensor(i: int, kind: str) -> Tensor:
        # Two of a kind differ, also in dtype, since they share a message.
        return wholes[kind] if i != 1 else (wholes[kind] + 0.5).float()

    def on_rank(rank: int) -> None:
        exchange = HeadExchange(str(rank), rank, groups, shards["q"], shards["kv"])
        weight = 10.0**rank

        def compute(number: int, given: tuple[Tensor, ...]) -> list[Tensor]:
            mine = groups[rank][number]
            for i, (kind, x) in enumerate(zip(kinds, given, strict=True)):
                whole = tensor(i, kind)
                assert x.dtype == whole.dtype
                assert x.equal(whole[:, slice(*mine.of(kind))][:, :, together[kind]])
            return [given[0] * 2, *(x * weight for x in given[2:])]

        tensors = [tensor(i, kind)[:, :, rows[kind][rank]] for i, kind in enumerate(kinds)]
        out, *sums = exchange.run(tensors, kinds, compute, ["q", *kinds[2:]])
        assert out.equal(tensors[0] * 2)
        for kind, x, total in zip(kinds[2:], tensors[2:], sums, strict=True):
            weights = torch.zeros(dims[kind][0], dtype=torch.float64)
            for u in range(ulysses):
                for group in groups[u]:
                    weights[slice(*group.of(kind))] += 10.0**u
            assert total.equal(x * weights[:, None, None])

    wire.run(on_rank)
    for rank in range(ulysses):
        assert wire.received[rank] == received_bytes(groups, rank, rows, has_shared=has_shared)


def received_bytes(groups: tuple[tuple[Heads, ...], ...], me: int, rows: dict, *, has_shared: bool) -> int:
    """Of two rows of the batch: heads of others' tokens (q in float64 and float32, k), and what others computed."""
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
    return 2 * total
