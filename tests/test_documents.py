"""Packed documents: where they begin, and what cannot be documents."""

from itertools import groupby

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from wallfacer_dt.documents import boundaries, check_documents, digest


def begins(ids: list[int]) -> tuple[int, ...]:
    """Position by position."""
    ends, position = [0], 0
    for _, run in groupby(ids):
        position += len(list(run))
        ends.append(position)
    return tuple(ends)


@given(
    rows=st.integers(1, 3).flatmap(
        lambda n: st.lists(st.lists(st.integers(-2, 2), min_size=n, max_size=n), min_size=1, max_size=12)
    ),
    dtype=st.sampled_from([torch.int32, torch.int64]),
)
def test_boundaries_of_ids(rows: list[list[int]], dtype: torch.dtype) -> None:
    """An id that comes back later is another document; rows that are alike are one."""
    ids = torch.tensor(rows, dtype=dtype).T
    expected = tuple(begins(row) for row in ids.tolist())
    expected = expected[:1] if len(set(expected)) == 1 else expected
    assert boundaries(ids, "ids", ids.shape[1]) == expected
    assert boundaries(ids[0], "ids", ids.shape[1]) == (begins(ids[0].tolist()),)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8).filter(any))
def test_boundaries_of_cumulative_lengths(lengths: list[int]) -> None:
    """Documents of no token are none."""
    cumulative = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    ids = [i for i, n in enumerate(lengths) for _ in range(n)]
    expected = (begins(ids),)
    assert boundaries(cumulative, "cu_seqlens", sum(lengths)) == expected
    # As an operator is given it.
    assert boundaries(cumulative.unsqueeze(0), "cu_seqlens", sum(lengths)) == expected


@pytest.mark.parametrize("wrong", [[1, 4, 8], [0, 4, 7], [0, 5, 4, 8], [0, 9, 8]])
def test_what_is_no_cumulative_length_is_refused(wrong: list[int]) -> None:
    with pytest.raises(ValueError, match="cu_seqlens must ascend from 0 to the sequence's length 8"):
        boundaries(torch.tensor(wrong), "cu_seqlens", 8)


def test_ids_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match="whole sequence of 9 tokens"):
        boundaries(torch.zeros(1, 8, dtype=torch.int64), "ids", 9)


IDS = torch.zeros(2, 8, dtype=torch.int64)


@pytest.mark.parametrize(
    ("documents", "kind"),
    [(IDS, "ids"), (IDS[:1], "ids"), (IDS[0], "ids"), (IDS.int(), "ids"), (torch.tensor([0, 8]), "cu_seqlens")],
)
def test_documents_are_taken(documents: Tensor, kind: str) -> None:
    check_documents(documents, kind, 2, 8)
    check_documents(documents, kind, 2, None)


@pytest.mark.parametrize(
    ("documents", "kind", "error", "message"),
    [
        ([0] * 8, "ids", TypeError, "document_ids must be a tensor, got list"),
        (IDS.float(), "ids", TypeError, "document_ids must be int64 or int32, got torch.float32"),
        (IDS.bool(), "ids", TypeError, "int64 or int32, got torch.bool"),
        (IDS.to("meta"), "ids", ValueError, "document_ids must be on the CPU, .* got meta"),
        (IDS.expand(2, 2, 8), "ids", ValueError, r"shape \(B, N\) or \(N,\) with B = 2, got \(2, 2, 8\)"),
        (IDS.repeat(2, 1), "ids", ValueError, r"with B = 2, got \(4, 8\)"),
        (IDS[:, :4], "ids", ValueError, r"whole sequence of 8 tokens on every rank, got \(2, 4\)"),
        (torch.tensor(0), "ids", ValueError, r"got \(\)"),
        (IDS, "cu_seqlens", ValueError, r"shape \(documents \+ 1,\), got \(2, 8\)"),
        (torch.tensor([0]), "cu_seqlens", ValueError, r"shape \(documents \+ 1,\), got \(1,\)"),
        (torch.tensor([0.0, 8.0]), "cu_seqlens", TypeError, "cu_seqlens must be int64 or int32"),
    ],
)
def test_what_cannot_be_documents_is_refused(documents: object, kind: str, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        check_documents(documents, kind, 2, 8)


def test_digests_differ_where_documents_do() -> None:
    assert digest(None) != digest(IDS)
    other = IDS.clone()
    other[1, 3] = 1
    assert digest(IDS) == digest(IDS.clone()) != digest(other)
    # By content, not by layout.
    strided = torch.stack([other, other], -1)[..., 0]
    assert digest(strided) == digest(other)


@pytest.mark.parametrize("ids", [torch.tensor([3, 3, 7, 9]), torch.tensor([[0, 0, 1], [0, 2, 2]])])
def test_the_same_numbers_are_the_same_documents(ids: Tensor) -> None:
    assert digest(ids) == digest(ids.to(torch.int32)) == digest(ids.flatten())
    assert digest(ids) != digest(ids + 1)
