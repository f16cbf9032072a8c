"""Arbitrary masks: their tables, names, and what is kept of them."""

import gc
import weakref
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from tests.cases import MASK_MODS
from tests.strategies import examples
from wallfacer_dt.algorithms.blocks import (
    EMPTY_BLOCK,
    FULL_BLOCK,
    PARTIAL_BLOCK,
    SIZE,
    Blocks,
    blocks_of,
    known_blocks,
    mask_key,
    mask_name,
)
from wallfacer_dt.layout import positions

CPU = torch.device("cpu")


def answers(name: str, batch: int, heads: int, q_length: int, k_length: int) -> np.ndarray:
    """A mask's answers about every pair, one at a time in each of batch and heads."""
    q, k = torch.arange(q_length)[:, None], torch.arange(k_length)
    rows = [[MASKS[name](torch.tensor(b), torch.tensor(h), q, k) for h in range(heads)] for b in range(batch)]
    return torch.stack([torch.stack(row) for row in rows]).numpy()


def only_some_heads(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """Of which the first sees all, and the others see blocks that are full, partial and empty."""
    return (h == 0) | (kv <= q)


MASKS = MASK_MODS | {"only_some_heads": only_some_heads}
NAMES = st.sampled_from(list(MASKS))


@examples(80)
@given(name=NAMES, batch=st.integers(1, 2), heads=st.integers(1, 2), q=st.integers(1, 400), k=st.integers(1, 400))
def test_table(name: str, batch: int, heads: int, q: int, k: int) -> None:
    blocks, said = blocks_of(MASKS[name], batch, heads, q, k, CPU), answers(name, batch, heads, q, k)
    assert blocks.rows == (batch if name == "per_row" else 1)
    assert blocks.by_head == (heads > 1 and name in ("per_head", "only_some_heads"))
    assert blocks.table.shape == (blocks.rows, -(-q // SIZE), -(-k // SIZE))
    for row, i, j in np.ndindex(blocks.table.shape):
        rows = slice(None) if blocks.rows == 1 else row
        block = said[rows][..., i * SIZE : (i + 1) * SIZE, j * SIZE : (j + 1) * SIZE]
        kind = FULL_BLOCK if block.all() else PARTIAL_BLOCK if block.any() else EMPTY_BLOCK
        assert blocks.table[row, i, j] == kind


@examples(80)
@given(name=NAMES, data=st.data())
def test_answers_about_any_positions(name: str, data: st.DataObject) -> None:
    length = 400
    blocks, said = blocks_of(MASKS[name], 2, 2, length, length, CPU), answers(name, 2, 2, length, length)
    ends = st.lists(st.integers(0, length), min_size=2, max_size=6, unique=True).map(sorted)
    q, k = (np.array(list(pairwise(data.draw(ends)))[::2]) for _ in range(2))
    expected = said[:, :, positions(q)][..., positions(k)]
    got = blocks.visible(range(2), q, k)
    assert np.array_equal(np.broadcast_to(got, expected.shape), expected)
    # By block: of what is not seen some may be.
    assert blocks.sees(q, k) >= bool(expected.any())
    nothing = (blocks.table[:, np.unique(positions(q) // SIZE)][..., np.unique(positions(k) // SIZE)] == 0).all()
    assert blocks.sees(q, k) == (not nothing)


def test_answers_of_some_heads_are_theirs() -> None:
    blocks = blocks_of(MASK_MODS["per_head"], 1, 6, 40, 40, CPU)
    whole = answers("per_head", 1, 6, 40, 40)
    got = blocks.visible(range(2, 5), np.array([[3, 20]]), np.array([[10, 40]]))
    assert np.array_equal(got[0], whole[0, 2:5, 3:20, 10:40])


def name_of(mask: Any, batch: int = 2, heads: int = 2, length: int = 20, **may: bool) -> str:
    may = {"by_row": True, "by_head": True} | may
    return mask_name(mask_key(mask), batch, heads, length, length, "cpu", **may)


def test_a_name_is_what_the_mask_says() -> None:
    def other(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q - kv) % (h + 2) != 1

    mask = MASK_MODS["per_head"]
    assert name_of(other) == name_of(mask) == name_of(mask)
    assert len({name_of(some) for some in MASK_MODS.values()}) == len(MASK_MODS)
    # Heads that a rank does not have are not asked, and lengths are part of what is said.
    assert name_of(mask, heads=3) != name_of(mask)
    assert name_of(mask, length=21) != name_of(mask)
    assert name_of(MASK_MODS["checker"], heads=3, batch=1) == name_of(MASK_MODS["checker"])
    assert isinstance(known_blocks(name_of(mask)), Blocks)
    assert mask_key(None) == 0


def test_one_pair_makes_another_name() -> None:
    def but(odd: tuple[int, int]) -> Any:
        return lambda b, h, q, kv: (q != odd[0]) | (kv != odd[1])

    pairs = [(0, 0), (0, 19), (19, 0), (19, 19), (7, 12)]
    assert len({name_of(but(pair)) for pair in pairs}) == len(pairs)


def test_blocks_of_one_name_are_equal() -> None:
    first, second = (blocks_of(MASK_MODS["blind"], 1, 1, 30, 30, CPU) for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)
    assert first != blocks_of(MASK_MODS["checker"], 1, 1, 30, 30, CPU)


def test_a_block_mask_is_known_by_what_it_says() -> None:
    mask = MASK_MODS["checker"]
    block_mask = create_block_mask(mask, 1, 1, 20, 20, device="cpu", BLOCK_SIZE=4)
    assert name_of(block_mask) == name_of(mask)


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
    blocks = known_blocks(name_of(listed, length=12))
    assert blocks.visible(range(1), np.array([[0, 12]]), np.array([[0, 12]]))[0, 0].equal(seen)
    with pytest.raises(
        ValueError, match="the BlockMask is for 12 queries and 12 keys, the whole sequence has 16 and 16"
    ):
        name_of(listed, length=16)


def test_a_name_that_was_never_given_is_refused() -> None:
    with pytest.raises(ValueError, match="the answers of the mask 'never' are gone, or were never here"):
        known_blocks("never")


def test_a_mask_is_forgotten_with_its_function() -> None:
    """Unless somebody has its answers for a backward."""

    def distance(n: int) -> Any:
        return lambda b, h, q, kv: q - kv < n

    masks = [distance(n) for n in range(5)]
    names = [name_of(mask) for mask in masks]
    references = [weakref.ref(mask) for mask in masks]
    held = known_blocks(names[1])
    assert len(set(names)) == 5
    del masks[:4]
    gc.collect()
    assert [reference() is None for reference in references] == [True, True, True, True, False]
    for name in (names[0], names[2], names[3]):
        with pytest.raises(ValueError, match="are gone, or were never here"):
            known_blocks(name)
    assert known_blocks(names[1]) is held
    known_blocks(names[4])
    # Whoever makes it again is known again.
    again = distance(0)
    assert name_of(again) == names[0]
    known_blocks(names[0])
