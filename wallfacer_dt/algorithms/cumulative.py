"""Segments as cumulative lengths, which kernels take that compute many of them in one call."""

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from wallfacer_dt.algorithms.segments import Ints, Segments
from wallfacer_dt.kernels.block import Ragged


def cumulative(segments: Segments, q: Tensor, k: Tensor) -> Ragged:
    """Segments over queries and keys (B, N, L, H), of which the first ones are the first that are in a segment.

    What lies between segments makes sequences of queries without keys, and of keys without queries.
    """
    key = q.shape[0], q.shape[2], k.shape[2], q.device
    if key in segments.cumulative:
        return segments.cumulative[key]
    first = np.repeat([start for start, _ in segments.extents], 2)
    some = [_lengths(rows - first, q.shape[2], k.shape[2]) for rows in segments.rows]
    q_lengths, k_lengths = np.concatenate(some * (q.shape[0] // len(some)), 1)
    # Where it is 1, FlashAttention-2 and torch's copy take sequences for queries, of which gaps of keys have none.
    most = max(2, int(q_lengths.max()))
    masked_rows, masked_keys = np.repeat(k_lengths == 0, q_lengths), np.repeat(q_lengths == 0, k_lengths)
    ragged = Ragged(
        _summed(q_lengths, q.device), _summed(k_lengths, q.device), most, int(k_lengths.max()),
        segments.left, segments.right, _rows(masked_rows, q), _rows(masked_keys, q),
    )  # fmt: skip
    if not isinstance(q, FakeTensor):
        segments.cumulative[key] = ragged
    return ragged


def _lengths(some: Ints, q_length: int, k_length: int) -> Ints:
    """(2, sequences): how many queries and keys each has, in one row of the batch."""
    ends = np.concatenate([[[0, 0, 0, 0]], some, [[q_length, q_length, k_length, k_length]]])
    between, within = ends[1:, ::2] - ends[:-1, 1::2], np.append(some[:, 1::2] - some[:, ::2], [[0, 0]], 0)
    nothing = np.zeros_like(between[:, 0])
    lengths = np.stack(
        [np.stack([between[:, 0], nothing, within[:, 0]], -1), np.stack([nothing, between[:, 1], within[:, 1]], -1)]
    ).reshape(2, -1)
    return lengths[:, lengths.any(0)]


def _summed(lengths: Ints, device: torch.device) -> Tensor:
    return torch.tensor(np.append(0, np.cumsum(lengths)), dtype=torch.int32, device=device)


def _rows(which: Ints, q: Tensor) -> Tensor | None:
    """(B, 1, L), or nothing."""
    return torch.tensor(which, device=q.device).view(q.shape[0], 1, -1) if which.any() else None
