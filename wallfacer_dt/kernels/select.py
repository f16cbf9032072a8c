"""Which kernel runs: named by the caller, or the fused one where there is one. Nothing falls back in silence."""

import torch

from wallfacer_dt.kernels import aten, reference
from wallfacer_dt.kernels.block import BlockKernel

KERNELS = ("auto", "flash", "reference")

_HALF = (torch.bfloat16, torch.float16)


def check_kernel(kernel: str) -> None:
    """Refuse (ValueError) a name that is not one of KERNELS."""
    if kernel not in KERNELS:
        raise ValueError(f"kernel must be one of {KERNELS}, got {kernel!r}")


def select_kernel(kernel: str, device_type: str, dtype: torch.dtype, head_dim: int) -> BlockKernel:
    """The block kernel for these tensors.

    Args:
        kernel: ``"flash"``: torch's fused kernel (CPU: any floating dtype; CUDA: half precision, head dim to 256);
            ``"reference"``: plain operations, memory grows with the block's area; ``"auto"``: flash.
        device_type: where the tensors are.
        dtype: of q, k and v.
        head_dim: H.

    Returns:
        The kernel.

    Raises:
        ValueError: the name is unknown, or flash cannot run these tensors.
    """
    check_kernel(kernel)
    if kernel == "reference":
        return reference.KERNEL
    if device_type == "cpu":
        return aten.FLASH_CPU
    if device_type == "cuda" and dtype in _HALF and head_dim <= 256:
        return aten.FLASH_CUDA
    raise ValueError(
        f"kernel={kernel!r} runs on cpu, and on cuda in bfloat16 or float16 with a head dim of at most 256; got "
        f"{device_type}, {dtype}, head dim {head_dim}: cast q, k and v, or pass kernel='reference'"
    )
