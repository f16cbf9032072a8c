"""Which document each token of a packed sequence is in, as torchtitan's models hand it down to their attention."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Documents:
    """What goes where a torchtitan model takes ``attention_masks``: of the whole sequence, on every rank.

    No tensor and no container of tensors, since FSDP and pipelines move, cast and cut those.

    Attributes:
        ids: (B, N), int, on the CPU: a new one wherever a document begins.
        positions: (B, N), int, on the CPU: those of which the ids were made, with which a rank's are compared.
    """

    ids: Tensor
    positions: Tensor

    @classmethod
    def of(cls, positions: Tensor) -> "Documents":
        """From the positions (B, N) of whole sequences, as torchtitan's loaders count them: from 0 in every document.

        A row's first document may begin with any position, the rest of one that was cut.

        >>> Documents.of(torch.tensor([[3, 4, 0, 1, 2], [0, 1, 2, 3, 4]])).ids.tolist()
        [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]

        Args:
            positions: before they are dealt out; on another device they are copied, which waits for it.

        Returns:
            The documents.

        Raises:
            TypeError: no tensor of integers.
            ValueError: it is not (B, N).
        """
        if not isinstance(positions, Tensor) or positions.dtype not in (torch.int64, torch.int32):
            got = positions.dtype if isinstance(positions, Tensor) else type(positions).__name__
            raise TypeError(f"positions must be a tensor of int64 or int32, got {got}")
        if positions.ndim != 2:
            raise ValueError(f"positions must have shape (B, N), got {tuple(positions.shape)}")
        here = positions.to("cpu", copy=True)  # a loader may write into its own again
        return cls((here == 0).cumsum(1), here)
