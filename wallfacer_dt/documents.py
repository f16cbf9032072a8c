"""Packed documents: from what a loader has (ids by token, cumulative lengths) to where each document begins.

Both are about the whole sequence in its natural order, and on the CPU, since the schedule is made on the host.
"""

import hashlib
from operator import index

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from wallfacer_dt.compiler import sizes


def check_documents(documents: Tensor, kind: str, batch: int, length: int | None) -> None:
    """Refuse (TypeError, ValueError) a tensor that cannot be what ``kind`` says, by its shape and dtype.

    That is ``"ids"``, (B, N) or (N,), or ``"cu_seqlens"``, (documents + 1,).
    """
    name = "document_ids" if kind == "ids" else "cu_seqlens"
    if not isinstance(documents, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(documents).__name__}")
    if isinstance(documents, DTensor):
        raise TypeError(f"{name} must be a plain tensor, all of it on every rank, got a DTensor")
    if documents.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{name} must be int64 or int32, got {documents.dtype}")
    if documents.device.type != "cpu":
        raise ValueError(f"{name} must be on the CPU, where the schedule is made, got {documents.device}")
    shape = tuple(documents.shape)  # of which a compiler may take a size for a symbol
    if kind == "cu_seqlens":
        if len(shape) != 1 or shape[0] < 2:
            raise ValueError(
                f"cu_seqlens must have shape (documents + 1,), got {sizes(documents)}; for rows that differ pass ids"
            )
    elif len(shape) not in (1, 2) or (len(shape) == 2 and shape[0] not in (1, batch)):
        raise ValueError(f"document_ids must have shape (B, N) or (N,) with B = {index(batch)}, got {sizes(documents)}")
    elif length is not None and shape[-1] != length:
        raise ValueError(
            f"document_ids must be those of the whole sequence of {index(length)} tokens on every rank, got "
            f"{sizes(documents)}"
        )


def boundaries(documents: Tensor, kind: str, length: int) -> tuple[tuple[int, ...], ...]:
    """Where documents begin, and the sequence's length: a row for each of the batch, or one for all alike.

    Of ids (B, N) or (N,), a new document wherever they change, or of cumulative lengths from 0 to N; others are refused
    (ValueError).

    >>> boundaries(torch.tensor([[7, 7, 8, 8], [1, 1, 1, 1]]), "ids", 4)
    ((0, 2, 4), (0, 4))
    """
    values = documents.numpy()
    if kind == "cu_seqlens":
        values = values.reshape(-1)
        if values[0] != 0 or values[-1] != length or (values[1:] < values[:-1]).any():
            shown = np.array2string(values, threshold=8, edgeitems=3, separator=", ")
            raise ValueError(f"cu_seqlens must ascend from 0 to the sequence's length {length}, got {shown}")
        return ((0, *values[1:][values[1:] != values[:-1]].tolist()),)
    if values.shape[-1] != length:
        raise ValueError(f"document_ids must be those of the whole sequence of {length} tokens, got {values.shape}")
    # Of a million ids, which every layer looks at, differences take four times as long.
    rows = [(0, *(np.flatnonzero(row[1:] != row[:-1]) + 1).tolist(), length) for row in values.reshape(-1, length)]
    return tuple(rows[:1]) if all(row == rows[0] for row in rows) else tuple(rows)


def digest(numbers: Tensor | np.ndarray | None) -> str:
    """What ranks compare: the same for the same numbers, whatever integers hold them."""
    if numbers is None:
        return "none"
    return hashlib.blake2b(np.ascontiguousarray(numbers, np.int64).data, digest_size=8).hexdigest()
