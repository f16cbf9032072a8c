"""Which kernel runs: named by the caller, or chosen by what the call needs. Nothing falls back in silence."""

import logging
from functools import cache

from torch.nn import attention

from wallfacer_dt.kernels import aten, flash_attn, flex, reference
from wallfacer_dt.kernels.block import Backward, BlockKernel, Forward, Need, Supports

_log = logging.getLogger(__name__)

_kernels = {kernel.name: kernel for kernel in (*aten.KERNELS, flex.KERNEL, reference.KERNEL, *flash_attn.KERNELS)}
_OURS = tuple(_kernels)
_ACTIVATED = {"FA3": "flash_attn_3", "FA4": "flash_attn_4"}
"""By torch's name of an implementation of flash attention, our adapter: torch's own unpacks two results of some."""
_FASTER = ", where an H200 took half as long with 'flash_attn_3' or 'flash_attn_4'"


def register_kernel(
    name: str,
    forward: Forward,
    backward: Backward,
    supports: Supports,
    version: str = "",
    *,
    takes_bands: bool = False,
    takes_segments: bool = False,
) -> None:
    """Make a kernel of one's own known, to be chosen as ``kernel=name``; on every rank, before it is chosen.

    Args:
        name: a new one.
        forward: out and lse of one block, see :class:`wallfacer_dt.kernels.block.Forward`.
        backward: its gradients, see :class:`wallfacer_dt.kernels.block.Backward`.
        supports: from what a call needs True, or why the kernel cannot run it.
        version: ranks whose kernels have another refuse the call.
        takes_bands: whether any band is computed at the cost of what it shows; otherwise the kernel is given blocks
            without bands as far as can be.
        takes_segments: whether many segments are computed in one call, see
            :class:`wallfacer_dt.kernels.block.Ragged`; otherwise the kernel is given them one by one.

    Raises:
        TypeError: something is not what it should be.
        ValueError: there is another kernel of that name; a backward must find that of its forward.
    """
    if not (isinstance(name, str) and isinstance(version, str) and all(map(callable, (forward, backward, supports)))):
        raise TypeError("register_kernel takes a name, three functions and perhaps a version")
    kernel = BlockKernel(name, forward, backward, supports, version, takes_bands, takes_segments)
    if name in ("", "auto", *_OURS) or _kernels.get(name, kernel) != kernel:
        raise ValueError(f"there is another kernel {name!r}: register another name")
    _kernels[name] = kernel


def names() -> tuple[str, ...]:
    """Of the kernels that there are."""
    return tuple(_kernels)


def check_kernel(kernel: str) -> None:
    """Refuse (ValueError) the name of no kernel."""
    if kernel != "auto" and kernel not in _kernels:
        known = "auto", *_kernels
        raise ValueError(f"kernel must be one of {known}, got {kernel!r}; register_kernel makes others known")


def takes_segments(kernel: object, device_type: object) -> bool:
    """Whether a kernel of this name computes many segments in a call on such devices; where there is none, False."""
    found = _kernels.get("flash" if kernel == "auto" else str(kernel))
    return found is not None and _on(device_type, found).takes_segments


def _on(device_type: object, kernel: BlockKernel) -> BlockKernel:
    """The same there: what is torch's flash on the CPU is another on CUDA."""
    return aten.CUDA if kernel is aten.CPU and device_type == "cuda" else kernel


def select_kernel(kernel: str, need: Need) -> BlockKernel:
    """The block kernel of a name; refuses (ValueError) an unknown one, and one that cannot run the call.

    ``"auto"`` is torch's own, ``"flash"``, for masks on CUDA ``"flex"``, for soft caps there ``"flash_attn"``.
    ``"flash"`` on CUDA is the package that ``activate_flash_attention_impl`` has named. Which it is, is logged once.
    """
    name, reason = _automatic(need) if kernel == "auto" else (kernel, "")
    if name == "flash" and need.device_type == "cuda" and not need.is_elsewhere:
        activated = attention.current_flash_attention_impl()
        if activated in _ACTIVATED:
            name, reason = _ACTIVATED[activated], f"since activate_flash_attention_impl({activated!r}) was called"
    check_kernel(name)
    found = _kernels[name]
    answer = found.supports(need)
    if not isinstance(answer, bool | str):
        raise TypeError(f"supports of kernel={name!r} must return True or why not, got {answer!r}")
    if answer is not True:
        who = f"kernel={kernel!r} is {name!r} {reason}, which" if reason else f"kernel={kernel!r}"
        raise ValueError(f"{who} {answer or 'does not support this call'}")
    if reason:
        is_slower = name == "flash" and need.capability is not None and need.capability[0] == 9
        _say(kernel, name, reason + _FASTER * is_slower)
    return _on(need.device_type, found)


def _automatic(need: Need) -> tuple[str, str]:
    """What ``"auto"`` is, and for what."""
    if need.device_type != "cuda":
        return "flash", f"on {need.device_type}"
    if need.masked:
        return "flex", "for masks on cuda"
    if need.softcap:
        return "flash_attn", "for soft caps on cuda"
    return "flash", "on cuda"


@cache
def _say(kernel: str, name: str, reason: str) -> None:
    _log.info("kernel=%r is %r %s", kernel, name, reason)
