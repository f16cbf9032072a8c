"""What a block kernel is, and which keys of a block its rows see."""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask


class Band(NamedTuple):
    """Row t of the queries sees row s of the keys if, and only if, low <= s - t <= high; None is no bound."""

    low: int | None
    high: int | None

    def within(self, rows: int, columns: int) -> "Band":
        """The same band without the bounds that hide nothing of a block.

        >>> Band(-5, 2).within(rows=4, columns=4)
        Band(low=None, high=2)
        """
        low = None if self.low is None or self.low <= 1 - rows else self.low
        high = None if self.high is None or self.high >= columns - 1 else self.high
        return Band(low, high)


FULL = Band(None, None)
CAUSAL = Band(None, 0)


class Ragged(NamedTuple):
    """Many segments in one call, one after the other in B * L rows: query t of n sees key s of m in its own segment.

    Windows are aligned at the bottom right corner: t + m - n - left <= s <= t + m - n + right.

    Attributes:
        cu_seqlens_q: cumulative numbers of queries (segments + 1,), int32.
        cu_seqlens_k: of keys. Some segments have no queries, others no keys.
        max_seqlen_q: the most queries of a segment, or 2.
        max_seqlen_k: the most keys.
        left: -1: no bound.
        right: -1: no bound.
        masked_rows: queries without keys, boolean (B, 1, Lq); None: there are none.
        masked_keys: keys without queries, boolean (B, 1, Lk), likewise.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    left: int
    right: int
    masked_rows: Tensor | None
    masked_keys: Tensor | None


class How(NamedTuple):
    """What is computed of a block: which keys its rows see, and what becomes of their scores.

    Attributes:
        seen: which keys a row sees: a band, or segments, which only kernels that take them are given.
        scale: of the scores.
        mask: which of those keys it sees: a BlockMask of B or 1, N or 1, Lq and Lk, as ``flex_attention`` takes it.
            None: all.
        softcap: scores s become ``softcap * tanh(s / softcap)`` after the scale. 0.0: they stay.
    """

    seen: Band | Ragged
    scale: float
    mask: BlockMask | None = None
    softcap: float = 0.0

    @property
    def band(self) -> Band:
        """The band, of what is no segments."""
        assert isinstance(self.seen, Band), "segments are for kernels that take them"
        return self.seen


Gradients = tuple[Tensor, Tensor, Tensor]
"""dq, dk and dv."""


class Forward(Protocol):
    """Attention of one block: ``softmax(scale * q k^T) v``, with the log-sum-exp of its scores."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, Tensor]:
        """Return out (B, N, Lq, Hv) in q's dtype and lse (B, N, Lq), float32 or, for float64, float64.

        Of queries (B, N, Lq, H), keys (B, Nkv, Lk, H) and values (B, Nkv, Lk, Hv); no length is 0, and Nkv divides N. A
        row that sees no key has out 0 and lse -inf. What is returned may be written over.
        """


class Backward(Protocol):
    """Gradients of one block, given what the whole row's softmax was."""

    def __call__(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, how: How
    ) -> Gradients:
        """Return dq, dk, dv in the inputs' dtype, of what :class:`Forward` takes.

        ``out`` and ``lse`` are those of the whole row, over all blocks; of ``out`` only rowsum(grad_out * out)
        matters. A row with lse -inf, which sees no key of any block, has no gradient. What is returned may be
        written over.
        """


HALF = (torch.bfloat16, torch.float16)


class Need(NamedTuple):
    """What a call asks of a kernel.

    Attributes:
        device_type: where its tensors are.
        dtype: of q, k and v.
        head_dim: of q and k.
        value_dim: of v.
        masked: whether blocks have masks beside their bands.
        softcap: of the scores, 0.0 for none.
        capability: of the CUDA device; None elsewhere, and where there is no such device.
        deterministic: whether the same call must give the same bits: ``torch.use_deterministic_algorithms``.
        is_elsewhere: whether the device is another machine's, so that what is installed on this one says nothing.
    """

    device_type: str
    dtype: torch.dtype
    head_dim: int
    value_dim: int
    masked: bool = False
    softcap: float = 0.0
    capability: tuple[int, int] | None = None
    deterministic: bool = False
    is_elsewhere: bool = False

    @classmethod
    def of(cls, q: Tensor, v: Tensor, *, masked: bool, softcap: float) -> "Need":
        """What a call on q (B, N, L, H) and v (B, Nkv, L, Hv) asks."""
        deterministic = torch.are_deterministic_algorithms_enabled()
        return cls(
            q.device.type, q.dtype, q.shape[-1], v.shape[-1], masked, softcap, capability_of(q.device), deterministic
        )


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """Of a CUDA device; None elsewhere, and where there is no such device, as there may be none of fake tensors."""
    has_device = device.type == "cuda" and torch.cuda.is_available()
    return torch.cuda.get_device_capability(device) if has_device else None


class Supports(Protocol):
    """Whether a kernel can run a call, any band of it, forward and backward."""

    def __call__(self, need: Need) -> bool | str:
        """Return True, or why not: words to stand after the kernel's name ("takes no mask"), or False."""


class BlockKernel(NamedTuple):
    """A kernel: its functions, and what they can run."""

    name: str  # by which it is chosen
    forward: Forward
    backward: Backward
    supports: Supports
    version: str = ""  # of the package that has them
    # Whether any band is computed at the cost of what it shows. Others are given rectangles, triangles and narrow
    # squares.
    takes_bands: bool = False
    takes_segments: bool = False  # whether many segments are computed in one call, see `Ragged`


def no_softcap(softcap: float) -> str:
    """What a kernel without a soft cap says."""
    return f"has no soft cap (softcap is {softcap}): pass kernel='reference'"


NO_MASK = "takes no mask here: pass kernel='flex' or kernel='reference'"
"""What a kernel without masks says."""


def refuse(kernel: str, how: How, *, mask: bool = False, softcap: bool = False) -> None:
    """Refuse (ValueError) a mask, or a soft cap, for a kernel that has none."""
    if softcap and how.softcap:
        raise ValueError(f"kernel={kernel!r} {no_softcap(how.softcap)}")
    if mask and how.mask is not None:
        raise ValueError(f"kernel={kernel!r} {NO_MASK}")
