"""Packing tensors of several dtypes into one flat buffer, without padding."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from wallfacer_dt.collectives import fields_of, pack, unpack

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@st.composite
def tensors(draw: st.DrawFn) -> list[torch.Tensor]:
    torch.manual_seed(draw(st.integers(0, 99)))
    shapes = draw(st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=4), min_size=1, max_size=4))
    return [torch.randn(shape).to(draw(st.sampled_from(DTYPES))) for shape in shapes]


@given(tensors(), st.integers(1, 3))
def test_round_trip_of_several_messages_in_one_buffer(some: list[torch.Tensor], copies: int) -> None:
    message = pack(some)
    assert message.nbytes == sum(x.nbytes for x in some)
    gathered = torch.cat([message] * copies)
    for row in gathered.view(copies, -1).unbind(0):
        for got, want in zip(unpack(row, fields_of(some)), some, strict=True):
            assert got.dtype == want.dtype
            assert got.equal(want)


def test_any_strides() -> None:
    x = torch.arange(6.0).view(2, 3).T
    assert unpack(pack([x]), fields_of([x]))[0].equal(x)


def test_a_strided_row_is_made_dense() -> None:
    """A column of one head and one token flattens to a strided view without a copy."""
    column, half = torch.arange(6.0).view(2, 1, 3)[..., :1], torch.ones(2, dtype=torch.bfloat16)
    message = pack([column, half])
    assert message.is_contiguous()
    assert unpack(message, fields_of([column, half]))[0].equal(column)
    assert pack([column]).is_contiguous()


def test_bits_survive() -> None:
    special = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45])
    half = torch.zeros(3, dtype=torch.bfloat16)
    back, _ = unpack(pack([special, half]), fields_of([special, half]))
    assert back.view(torch.int32).equal(special.view(torch.int32))


def test_a_tensor_of_no_element_is_a_field() -> None:
    """A rank that computes no head of a group is sent none."""
    some = [torch.ones(2, 3), torch.empty(2, 0, 3, dtype=torch.bfloat16), torch.arange(4.0).double()]
    message = pack(some)
    assert message.nbytes == 24 + 32
    for got, want in zip(unpack(message, fields_of(some)), some, strict=True):
        assert got.shape == want.shape
        assert got.equal(want)
    nothing = [torch.empty(2, 0), torch.empty(0, dtype=torch.float64)]
    assert [x.shape for x in unpack(pack(nothing), fields_of(nothing))] == [(2, 0), (0,)]
