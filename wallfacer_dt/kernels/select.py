"""Which kernel runs: named by the caller, or the fused one where there is one. Nothing falls back in silence."""

import torch

from wallfacer_dt.kernels import aten, flex, reference
from wallfacer_dt.kernels.block import BlockKernel, refuse_softcap

KERNELS = ("auto", "flash", "flex", "reference")

_HALF = (torch.bfloat16, torch.float16)


def check_kernel(kernel: str) -> None:
    """Refuse (ValueError) a name that is not one of KERNELS."""
    if kernel not in KERNELS:
        raise ValueError(f"kernel must be one of {KERNELS}, got {kernel!r}")


def select_kernel(
    kernel: str, device_type: str, dtype: torch.dtype, head_dim: int, *, masked: bool = False, softcap: float = 0.0
) -> BlockKernel:
    """The block kernel for these tensors.

    Args:
        kernel: ``"flash"``: torch's fused kernel (CPU: any floating dtype; CUDA: half precision, head dim to 256, no
            mask); ``"flex"``: torch's flex_attention (CUDA, no float64); ``"reference"``: plain operations, memory
            grows with the block's area; ``"auto"``: flash, for masks on CUDA flex.
        device_type: where the tensors are.
        dtype: of q, k and v.
        head_dim: H, or v's, the larger.
        masked: whether blocks have masks beside their bands.
        softcap: of the scores, 0.0 for none.

    Returns:
        The kernel.

    Raises:
        ValueError: the name is unknown, or the kernel cannot run these tensors.
    """
    check_kernel(kernel)
    if kernel == "reference":
        return reference.KERNEL
    refuse_softcap(kernel, softcap)
    if kernel == "flex" or (kernel == "auto" and masked and device_type == "cuda"):
        return _flex(kernel, device_type, dtype)
    return _flash(kernel, device_type, dtype, head_dim, masked)


def _flex(kernel: str, device_type: str, dtype: torch.dtype) -> BlockKernel:
    if device_type == "cuda" and dtype != torch.float64:
        return flex.KERNEL
    raise ValueError(
        f"kernel={kernel!r} with a mask is flex_attention, which runs on cuda, not in float64 (on cpu it has no "
        f"backward); got {device_type}, {dtype}: cast q, k and v, or pass kernel='reference' (on cpu: kernel='flash')"
    )


def _flash(kernel: str, device_type: str, dtype: torch.dtype, head_dim: int, masked: bool) -> BlockKernel:
    if device_type in ("cpu", "meta"):  # without contents as on the CPU
        return aten.FLASH_CPU
    if device_type == "cuda" and masked:
        raise ValueError(f"kernel={kernel!r} takes no mask on cuda: pass kernel='flex' or kernel='reference'")
    if device_type == "cuda" and dtype in _HALF and head_dim <= 256:
        return aten.FLASH_CUDA
    raise ValueError(
        f"kernel={kernel!r} runs on cpu, and on cuda in bfloat16 or float16 with a head dim of at most 256; got "
        f"{device_type}, {dtype}, head dim {head_dim}: cast q, k and v, or pass kernel='reference'"
    )
