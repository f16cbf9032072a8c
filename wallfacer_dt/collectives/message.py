"""Several tensors in one flat buffer, so that what travels together is one transfer.

The buffer has the narrowest dtype among the tensors; wider ones travel as their bits. No padding, so a message is
exactly as large as its tensors.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Field(NamedTuple):
    """Shape and dtype of one tensor in a message."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


def fields_of(tensors: Sequence[Tensor]) -> tuple[Field, ...]:
    """The fields of a message of these tensors."""
    return tuple(Field(tuple(tensor.shape), tensor.dtype) for tensor in tensors)


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Lay tensors end to end in a flat buffer, widest dtype first (as :func:`unpack` expects)."""
    flat = flattened(tensors)
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def flattened(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The pieces of a message of these tensors, to be laid end to end."""
    if not tensors:
        return []
    carrier = min((tensor.dtype for tensor in tensors), key=lambda dtype: dtype.itemsize)
    order = _widest_first([tensor.dtype for tensor in tensors])
    # reshape(-1) alone may leave a strided view, which is neither a message nor viewable as another dtype.
    return [tensors[i].contiguous().view(-1).view(carrier) for i in order]


def unpack(buffer: Tensor, fields: Sequence[Field]) -> tuple[Tensor, ...]:
    """The tensors of a packed message, as views where the buffer's alignment allows it."""
    sizes = [field.nbytes // buffer.itemsize for field in fields]
    out: list[Tensor] = [buffer] * len(fields)
    offset = 0
    for i in _widest_first([field.dtype for field in fields]):
        part = buffer.narrow(0, offset, sizes[i])
        # A row of a gathered buffer may start in the middle of a wider element.
        if part.storage_offset() * part.itemsize % fields[i].dtype.itemsize:
            part = part.clone()
        out[i] = part.view(fields[i].dtype).view(fields[i].shape)
        offset += sizes[i]
    return tuple(out)


def _widest_first(dtypes: Sequence[torch.dtype]) -> list[int]:
    return sorted(range(len(dtypes)), key=lambda i: -dtypes[i].itemsize)
