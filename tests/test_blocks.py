"""Arbitrary masks by block: what is asked, names, and what is kept of them."""

import gc
import weakref
from collections.abc import Callable
from itertools import pairwise
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from tests.cases import MASK_MODS
from tests.strategies import examples
from wallfacer_dt import TokenOrder, context_mesh, context_parallel_attention
from wallfacer_dt.algorithms import blocks
from wallfacer_dt.algorithms.blocks import Answers, Captured, check_mask, known_recording, mask_key, recorded_mask
from wallfacer_dt.kernels import visible
from wallfacer_dt.kernels.block import FULL, How
from wallfacer_dt.kernels.visible import visible_keys
from wallfacer_dt.layout import positions
from wallfacer_dt.testing import RankPool

CPU = torch.device("cpu")
Ranks = Callable[[int], RankPool]


def said(name: str, batch: int, heads: int, length: int) -> np.ndarray:
    """A mask's answers about every pair, one at a time in each of batch and heads."""
    q, k = torch.arange(length)[:, None], torch.arange(length)
    rows = [[MASKS[name](torch.tensor(b), torch.tensor(h), q, k) for h in range(heads)] for b in range(batch)]
    return torch.stack([torch.stack(row) for row in rows]).numpy()


def only_some_heads(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """Of which the first sees all, and the others see blocks that are full, partial and empty."""
    return (h == 0) | (kv <= q)


MASKS = MASK_MODS | {"only_some_heads": only_some_heads}
NAMES = st.sampled_from(list(MASKS))


def answers_of(mask: Any, heads: range = range(2), *, batch: int = 2, length: int = 400) -> Answers:
    name, captured = recorded_mask(mask, (length, length), "cpu")
    return Answers.of(name, Captured(captured), batch, [heads], CPU)


def shown(block: BlockMask) -> Tensor:
    lengths = block.seq_lengths
    seen = visible_keys(How(FULL, 1.0, block), torch.empty(1, 1, lengths[0], 1), torch.empty(1, 1, lengths[1], 1))
    assert seen is not None
    return seen


@pytest.mark.parametrize("pairs", [1 << 24, 3000])
@examples(60)
@given(name=NAMES, first=st.integers(0, 2), data=st.data())
def test_answers_about_any_positions(pairs: int, name: str, first: int, data: st.DataObject) -> None:
    """Of some heads; asked in parts, or at once."""
    length, whole = 400, said(name, 2, 4, 400)
    heads = range(first, first + 2)
    ends = st.lists(st.integers(0, length), min_size=2, max_size=6, unique=True).map(sorted)
    q, k = (np.array(list(pairwise(data.draw(ends)))[::2]) for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(visible, "_PAIRS", pairs)
        answers = answers_of(MASKS[name], heads)
        answers._blocks.clear()
        block = answers.block(heads, q, k)
        expected = whole[:, heads][:, :, positions(q)][..., positions(k)]
        assert np.array_equal(np.broadcast_to(shown(block), expected.shape), expected)
    assert answers.sees(q, k) == bool(expected.any())
    # The table lists what torch's own does.
    torchs = create_block_mask(block.mask_mod, *block.shape[:2], *block.seq_lengths, device="cpu")
    for full in ("", "full_"):
        for side in ("q", "kv"):
            for what in ("num_blocks", "indices"):
                assert getattr(block, f"{full}{side}_{what}").equal(getattr(torchs, f"{full}{side}_{what}"))


def test_a_rank_without_heads_sees_nothing() -> None:
    everything = np.array([[0, 400]])
    assert not answers_of(MASKS["per_head"], range(0)).sees(everything, everything)


def test_captured_tensors_are_told_apart_by_their_contents() -> None:
    """And by where they are: kept answers read a tensor that may have been written into since."""
    q = np.array([[0, 16]])
    first, second = (torch.arange(16) // 4 for _ in range(2))

    def mask(ids: Tensor) -> Any:
        return lambda b, h, q, kv: ids[q] == ids[kv]

    masks = mask(first), mask(second)

    def answers(some: Any) -> Tensor:
        return shown(answers_of(some, length=16).block(range(2), q, q))[0, 0]

    by_four = answers(masks[0])
    assert answers_of(masks[0], length=16) is answers_of(masks[0], length=16)
    first.data.copy_(torch.arange(16) // 2)
    assert answers(masks[1]).equal(by_four)
    by_two = answers(masks[0])
    assert int(by_two.sum()) == 32
    first.numpy()[:] = np.arange(16) // 4
    assert answers(masks[0]).equal(by_four)


def test_contents_as_a_number() -> None:
    x = torch.arange(6)
    different = [x, x.to(torch.int32), x.view(2, 3), x.flip(0), x.float(), x[:5], torch.zeros(0), torch.tensor(0)]
    found = [Captured(some).contents for some in (*([one] for one in different), [x, x], [x, x.flip(0)], [])]
    assert len(set(found)) == len(found)
    assert Captured([x.clone()]).contents == Captured([x]).contents > 0 == Captured([]).contents
    assert Captured([torch.arange(12)[::2]]).contents == Captured([torch.arange(12)[::2].contiguous()]).contents


def digests() -> tuple[int, int, bool]:
    """Taken by a forward, and with its backward; whether all were of the captured tensor itself."""
    ids, taken, digest = torch.arange(8) // 3, [], blocks._digest
    q = torch.randn(1, 1, 8, 4, dtype=torch.float64, requires_grad=True)
    mesh = context_mesh("cpu")
    how = {"mask_mod": lambda b, h, i, j: ids[i] == ids[j], "order": TokenOrder("contiguous", mesh)}
    with mock.patch.object(blocks, "_digest", lambda x: taken.append(x) or digest(x)):
        out = context_parallel_attention(q, q, q, mesh, **how)
        forward = len(taken)
        out.sum().backward()
    return forward, len(taken), all(x is ids for x in taken)


def test_a_call_reads_what_its_mask_captures_once(ranks: Ranks) -> None:
    """And its backward once: there may be megabytes of it. Of a device's no more than once, by the tensor."""
    assert ranks(1).run(digests) == [(1, 2, True)]


class OnDevice(Tensor):
    """As if it had to be waited for."""

    is_cpu = False
    waits = 0

    def cpu(self) -> Tensor:
        OnDevice.waits += 1
        return self.as_subclass(Tensor)


def test_what_is_on_a_device_is_read_when_it_has_been_written_into() -> None:
    x, waits = torch.arange(6).as_subclass(OnDevice), OnDevice.waits
    first = Captured([x]).contents
    assert Captured([x]).contents == first
    assert OnDevice.waits == waits + 1
    x.add_(1)
    assert Captured([x]).contents != first
    assert OnDevice.waits == waits + 2


def name_of(mask: Any, length: int = 20, **may: bool) -> str:
    return recorded_mask(mask, (length, length), "cpu", **may)[0]


@pytest.mark.parametrize(
    ("name", "may", "message"), [("per_row", "by_row", "on the batch"), ("per_head", "by_head", "on the head")]
)
def test_what_a_mask_may_not_depend_on(name: str, may: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"mask_mod depends {message}"):
        name_of(MASK_MODS[name], **{may: False})
    name_of(MASK_MODS[name], **{"by_row": name != "per_row", "by_head": name != "per_head", may: True})
    name_of(MASK_MODS["blind"], by_row=False, by_head=False)


@pytest.mark.parametrize("full", [False, True])
def test_the_table_of_a_block_mask_counts(full: bool) -> None:
    """One made of a table alone sees the blocks that it lists, and all of those that it lists as full."""
    counts = torch.tensor([[[1, 2, 0]]], dtype=torch.int32)
    indices = torch.tensor([[[[2, 0, 1], [0, 1, 2], [0, 1, 2]]]], dtype=torch.int32)
    lists = (counts * 0, indices, counts, indices) if full else (counts, indices)
    listed = BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=4, mask_mod=lambda b, h, q, kv: kv != 8, seq_lengths=(12, 12))
    seen = torch.zeros(12, 12, dtype=torch.bool)
    seen[:4, 8:], seen[4:8, :8] = True, True
    if not full:
        seen[:, 8] = False
    everything = np.array([[0, 12]])
    assert shown(answers_of(listed, length=12).block(range(2), everything, everything))[0, 0].equal(seen)
    with pytest.raises(
        ValueError, match="the BlockMask is for 12 queries and 12 keys, the whole sequence has 16 and 16"
    ):
        name_of(listed, length=16)


def test_a_name_that_was_never_given_is_refused() -> None:
    with pytest.raises(ValueError, match="what the mask 'never' does is forgotten, or was never known here"):
        known_recording("never")


def test_a_mask_is_forgotten_with_its_function() -> None:
    """Unless somebody holds what it does for a backward; and states before the last few are."""

    def distance(n: int) -> Any:
        return lambda b, h, q, kv: q - kv < n + 900

    masks = [distance(n) for n in range(5)]
    names = [name_of(mask) for mask in masks]
    references = [weakref.ref(mask) for mask in masks]
    held = known_recording(names[1])
    assert len(set(names)) == 5
    del masks[:4]
    gc.collect()
    assert [reference() is None for reference in references] == [True, True, True, True, False]
    for name in (names[0], names[2], names[3]):
        with pytest.raises(ValueError, match="is forgotten, or was never known here"):
            known_recording(name)
    assert known_recording(names[1]) is held
    known_recording(names[4])
    again = distance(0)
    assert name_of(again) == names[0]
    known_recording(names[0])
    states = {"n": 0}

    def changing(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return q - kv < 950 + states["n"]

    names = []
    for states["n"] in range(6):
        names.append(name_of(changing))
    for number, name in enumerate(names):
        if number < 2:
            with pytest.raises(ValueError, match="is forgotten"):
                known_recording(name)
        else:
            known_recording(name)


def test_a_graph_holds_what_its_own_mask_does() -> None:
    """Whoever's code it is: a number of another mask, or of none, is not taken for the one that was named."""

    def distance(n: int) -> Any:
        return lambda b, h, q, kv: q - kv < n

    mine, same, other = distance(3), distance(3), distance(5)
    name = name_of(mine)
    for mask in (mine, same):
        check_mask(mask_key(mask), name, (), (16, 16), "cpu")
    for key in (mask_key(other), 10**9):
        with pytest.raises(ValueError, match="mask_mod's state has changed, or mask_mod has gone, since the graph"):
            check_mask(key, name, (), (16, 16), "cpu")


def test_a_graph_hands_over_what_its_mask_captures() -> None:
    ids, others = torch.arange(16) // 4, torch.arange(16) // 4
    held = {"ids": ids}

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return held["ids"][q] == held["ids"][kv]

    name, captured = recorded_mask(mask, (16, 16), "cpu")
    ids.add_(1)
    check_mask(mask_key(mask), name, captured, (16, 16), "cpu")
    held["ids"] = others
    with pytest.raises(ValueError, match="mask_mod's state has changed"):
        check_mask(mask_key(mask), name, captured, (16, 16), "cpu")


def test_a_mask_is_numbered_by_what_it_is() -> None:
    class Slots:
        __slots__ = ()

        def __call__(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return q >= kv

    mask = MASK_MODS["blind"]
    assert mask_key(mask) == mask_key(mask) > 0 == mask_key(None)
    assert mask_key(MASK_MODS["checker"]) != mask_key(mask)
    with pytest.raises(TypeError, match="mask_mod is a Slots of slots only; wrap it in a function"):
        mask_key(Slots())
