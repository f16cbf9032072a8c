"""Send buffers: tensors of several dtypes in one flat buffer, without padding."""

from unittest import mock

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from wallfacer_dt import rows
from wallfacer_dt.collectives.send_buffer import Layout, layout, pack

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def layout_of(some: list[torch.Tensor]) -> Layout:
    return layout(*[(x.shape, x.dtype) for x in some])


def packed(some: list[torch.Tensor]) -> torch.Tensor:
    return pack(some, layout_of(some))


@st.composite
def tensors(draw: st.DrawFn) -> list[torch.Tensor]:
    torch.manual_seed(draw(st.integers(0, 99)))
    shapes = draw(st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=4), min_size=1, max_size=4))
    return [torch.randn(shape).to(draw(st.sampled_from(DTYPES))) for shape in shapes]


@given(tensors(), st.integers(1, 3))
def test_round_trip_of_several_in_one_buffer(some: list[torch.Tensor], copies: int) -> None:
    buffer = packed(some)
    assert buffer.nbytes == sum(x.nbytes for x in some)
    gathered = torch.cat([buffer] * copies)
    for row in gathered.view(copies, -1).unbind(0):
        for got, want in zip(layout_of(some).views(row), some, strict=True):
            assert got.dtype == want.dtype
            assert got.equal(want)


@given(tensors(), st.integers(0, 3), st.integers(1, 3))
def test_what_is_written_in_place_is_what_arrives(some: list[torch.Tensor], before: int, count: int) -> None:
    """Stacked, and behind another buffer, where tensors can be seen in their places."""
    places = layout_of(some)
    start = before * places.size
    buffer = torch.empty(start + count * places.size, dtype=places.dtype)
    for stacked, x in zip(places.views(buffer, start, count), some, strict=True):
        for i, view in enumerate(stacked.unbind(0)):
            view.copy_(x + i)
    assert places.is_even == (places.size * places.dtype.itemsize % max(x.itemsize for x in some) == 0)
    for i in range(count if places.is_even else 0):
        one = places.views(buffer, start + i * places.size)
        assert all(got.equal(x + i) for got, x in zip(one, some, strict=True))


def test_a_longer_place_is_filled_up_with_zeros() -> None:
    x, y = torch.ones(1, 2, 3, 4), torch.ones(2, dtype=torch.bfloat16)
    places = layout(((1, 2, 5, 4), torch.float64), ((2,), torch.bfloat16))
    wide, narrow = places.views(pack([x, y], places._replace(size=places.size + 3)))
    assert wide[:, :, :3].eq(1).all()
    assert wide[:, :, 3:].eq(0).all()
    assert narrow.equal(y)
    assert pack([x, y], places._replace(size=places.size + 3))[-3:].eq(0).all()


def test_one_tensor_in_a_longer_buffer_is_filled_up_with_zeros() -> None:
    """And not with what lies behind it in memory."""
    for whole in (torch.ones(6, 3), torch.ones(2, 3)):
        x = whole[:2]
        places = layout_of([x])
        buffer = pack([x], places._replace(size=places.size + 4))
        assert buffer.tolist() == [1] * 6 + [0] * 4


def test_any_strides() -> None:
    x = torch.arange(6.0).view(2, 3).T
    assert layout_of([x]).views(packed([x]))[0].equal(x)


def test_heads_lie_by_tokens() -> None:
    """So rows of one sequence have no gaps, and what lies so already is sent as it is."""
    x = torch.randn(1, 5, 3, 2).transpose(1, 2)
    (view,) = layout_of([x]).views(packed([x]))
    assert view.equal(x)
    assert view[:, :, 1:4].transpose(1, 2).is_contiguous()
    assert packed([x]).data_ptr() == x.data_ptr()
    by_heads = x.contiguous()
    assert packed([by_heads]).data_ptr() != by_heads.data_ptr()
    assert packed([by_heads]).equal(packed([x]))
    one = torch.randn(1, 1, 5, 2)  # head, by heads and by tokens
    assert packed([one]).data_ptr() == one.data_ptr()


def test_a_strided_row_is_made_dense() -> None:
    """A column of one head and one token flattens to a strided view without a copy."""
    column, half = torch.arange(6.0).view(2, 1, 3)[..., :1], torch.ones(2, dtype=torch.bfloat16)
    buffer = packed([column, half])
    assert buffer.is_contiguous()
    assert layout_of([column, half]).views(buffer)[0].equal(column)
    assert packed([column]).is_contiguous()


def test_bits_survive() -> None:
    special = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45])
    half = torch.zeros(3, dtype=torch.bfloat16)
    back, _ = layout_of([special, half]).views(packed([special, half]))
    assert back.view(torch.int32).equal(special.view(torch.int32))


def test_a_tensor_of_no_element_is_a_field() -> None:
    """A rank that computes no head of a group is sent none."""
    some = [torch.ones(2, 3), torch.empty(2, 0, 3, dtype=torch.bfloat16), torch.arange(4.0).double()]
    buffer = packed(some)
    assert buffer.nbytes == 24 + 32
    for got, want in zip(layout_of(some).views(buffer), some, strict=True):
        assert got.shape == want.shape
        assert got.equal(want)
    nothing = [torch.empty(2, 0), torch.empty(0, dtype=torch.float64)]
    assert [x.shape for x in layout_of(nothing).views(packed(nothing))] == [(2, 0), (0,)]


def test_indices_of_packings_that_are_over_are_let_go() -> None:
    """Plans of 64 packings are kept, on the host; what is on a device is of about four."""
    generator = np.random.default_rng(0)
    x = torch.arange(4000.0)
    with mock.patch.dict(rows._indices, clear=True):
        kept = []
        for _ in range(40):
            starts = np.sort(generator.choice(2000, 500, replace=False)) * 2
            some = rows.Rows.at([np.stack([starts, starts + 1], -1)])
            kept.append(some)
            assert some.of(x, 0).tolist() == starts.tolist()
        assert [*rows._indices] == [(some, x.device) for some in kept[-rows._KEPT :]]
        kept[-rows._KEPT].of(x, 0)
        assert [*rows._indices][-1][0] is kept[-rows._KEPT]
        large = rows.Rows.at([np.stack([np.arange(0, 4000, 2), np.arange(1, 4001, 2)], -1)])
        assert large.of(x, 0).tolist() == list(range(0, 4000, 2))
        assert len(rows._indices) == rows._KEPT + 1  # which is less than so many of the largest
