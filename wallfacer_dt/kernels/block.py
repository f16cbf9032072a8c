"""What a block kernel is."""

from typing import NamedTuple, Protocol

from torch import Tensor


class Forward(Protocol):
    """Attention of one block: ``softmax(scale * q k^T) v``, with the log-sum-exp of its scores."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """Return out (B, N, Lq, H) in q's dtype and lse (B, N, Lq), float32 or, for float64, float64.

        ``k`` and ``v`` are (B, Nkv, Lk, H), Nkv dividing N; ``is_causal`` only with Lq = Lk. No length is 0.
        """
        ...


class Backward(Protocol):
    """Gradients of one block, given what the whole row's softmax was."""

    def __call__(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        is_causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq, dk, dv in the inputs' dtype.

        ``out`` and ``lse`` are those of the whole row, over all blocks; of ``out`` only rowsum(grad_out * out)
        matters.
        """
        ...


class BlockKernel(NamedTuple):
    """A kernel: its name and its two functions."""

    name: str
    forward: Forward
    backward: Backward
