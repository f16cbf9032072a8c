"""The packages of FlashAttention: ``flash_attn`` (FlashAttention-2), ``flash_attn_3`` and ``flash_attn_4``.

Each is imported when it is first chosen: by name, or the first one for soft caps on CUDA. Called are the functions
below their autograd, of flash-attn 2.8.3 (``flash_attn.flash_attn_interface``), of its repository at 0251105
(``hopper/flash_attn_interface.py``) and of flash-attn-4 4.0.0b36 (``flash_attn/cute/interface.py``). All were run on
an H200; the tests run these adapters with stand-ins of the same signatures.

Sinks are no kernel's affair here: a sink is in a row's sum once, and a kernel would add it in every block.
"""

from collections.abc import Callable
from functools import cache, partial
from importlib import import_module, metadata
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wallfacer_dt.kernels.block import HALF, NO_MASK, BlockKernel, Gradients, Need, capability_of
from wallfacer_dt.kernels.windows import Launch, Widths, Windowed, one_width, rounded


class Package(NamedTuple):
    """A package, and how its functions are called."""

    name: str  # of the kernel
    distribution: str
    module: str  # where its functions are
    functions: tuple[str, ...]
    majors: tuple[int, ...]  # the first numbers of the compute capabilities that it runs on, both ways
    forward: Callable[..., tuple[Tensor, Tensor]]  # as `run_forward` of `Windowed`
    backward: Callable[..., Gradients]
    limits: Callable[[Need], str]  # what else it cannot run, or an empty string
    widths: Widths = one_width


def kernel(package: Package, load: Callable[[str], Any] = import_module) -> BlockKernel:
    """A package as a block kernel; ``load`` makes of its module's name the module, when it is called."""
    functions = partial(load, package.module)
    windowed = Windowed(package.name, functions, package.forward, package.backward, package.widths)
    supports, version = partial(_supports, package), _version(package.distribution)
    return BlockKernel(
        package.name, windowed.forward, windowed.backward, supports, version, takes_bands=True, takes_segments=True
    )


def _supports(package: Package, need: Need) -> bool | str:
    if need.masked:
        return NO_MASK
    if need.device_type != "cuda" or need.dtype not in HALF:
        return (
            f"runs on cuda, in bfloat16 or float16; got {need.device_type}, {need.dtype}: cast q, k and v, or pass "
            "kernel='reference'"
        )
    if need.capability and need.capability[0] not in package.majors:
        here, known = ".".join(map(str, need.capability)), ", ".join(f"{major}.x" for major in package.majors)
        return f"runs on compute capability {known}; got {here}"
    return package.limits(need) or (not need.is_elsewhere and _missing(package)) or True


@cache
def _missing(package: Package) -> str:
    distribution = package.distribution
    if not _version(distribution):
        return f"needs the package {distribution}, which is not installed: install it, or pass kernel='reference'"
    try:
        module = import_module(package.module)
        functions = [getattr(module, name) for name in package.functions]
    except Exception as error:  # what was built for another torch fails in many ways
        return f"needs the package {distribution}, which cannot be imported: {error!r}"
    # An operator made with torch.library hides its function's parameters.
    if not all("window_size_left" in signature(getattr(f, "_init_fn", f)).parameters for f in functions):
        return f"needs another version of {distribution} than {_version(distribution)}: see docs/kernels.md"
    return ""


@cache
def _version(distribution: str) -> str:
    try:
        return f"{distribution} {metadata.version(distribution)}"
    except metadata.PackageNotFoundError:
        return ""


def _up_to_256(need: Need) -> str:
    head_dim = max(need.head_dim, need.value_dim)
    return "" if head_dim <= 256 else f"has head dims of at most 256; got {head_dim}: pass kernel='reference'"


def _as_flash_attn_3(need: Need) -> str:
    if need.deterministic and max(need.head_dim, need.value_dim) > 192:
        return "has no deterministic backward for head dims above 192"  # flash_api.cpp
    return _up_to_256(need)


def _as_flash_attn_4(need: Need) -> str:
    major = need.capability[0] if need.capability else None
    dims = rounded(need.head_dim), rounded(need.value_dim)
    if need.deterministic and major == 12:
        return "has no deterministic backward on compute capability 12.x"
    if need.softcap and major == 12:
        return f"has no soft cap on compute capability 12.x (softcap is {need.softcap})"
    if max(dims) <= 128 or (major == 9 and max(dims) <= 256):
        return ""
    if major in (10, 11) and (dims == (192, 128) or (dims == (256, 256) and not need.softcap)):
        return ""
    return (
        "has head dims of at most 128, on compute capability 9.x 256, on 10.x and 11.x 192 with values of 128, and 256 "
        f"without a soft cap; got {need.head_dim} and {need.value_dim}"
    )


def _widths_4(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, int]:
    """Head dims whose gradients are right (4.0.0b36), on the device of q.

    On compute capability 9.x its backward keeps accumulators of head dims to 128 rounded to 32, and fills them rounded
    to 16: seen on an H200, gradients are wrong for 80, and by its source for all that the two round apart. Grouped
    heads of two widths it refuses there, and of others it compiles some. On 12.x, by its source, it looks past the end
    of v where the head dim of v, and not that of q, is no multiple of 32.
    """
    major, _ = capability_of(q.device) or (9, 0)
    width, value_width = (_width_4(x.shape[-1], major) for x in (q, v))
    if major != 9 or ((width, value_width) == (192, 128) and q.shape[1] == k.shape[1]):
        return width, value_width
    widest = _width_4(max(width, value_width), major)
    return widest, widest


def _width_4(n: int, major: int) -> int:
    is_wrong = major == 12 or (major == 9 and n <= 128 and rounded(n, 16) != rounded(n, 32))
    return rounded(n, 32 if is_wrong else 8)


def _forward_2(flash: Any, q: Tensor, k: Tensor, v: Tensor, launch: Launch) -> tuple[Tensor, Tensor]:
    run = flash._flash_attn_varlen_forward if launch.lengths else flash._flash_attn_forward
    options = _options(launch, causal=launch.is_causal, dropout_p=0.0, alibi_slopes=None, return_softmax=False)
    out, lse, *_ = run(q, k, v, **options)
    return out, lse


def _backward_2(
    flash: Any, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, launch: Launch
) -> Gradients:
    run = flash._flash_attn_varlen_backward if launch.lengths else flash._flash_attn_backward
    grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    options = _backward_options(launch, causal=launch.is_causal, dropout_p=0.0, alibi_slopes=None)
    run(grad_out, q, k, v, out, lse, *grads, **options)
    return grads


def _forward_3(flash: Any, q: Tensor, k: Tensor, v: Tensor, launch: Launch) -> tuple[Tensor, Tensor]:
    out, lse, *_ = flash._flash_attn_forward(q, k, v, **_options(launch, causal=launch.is_causal))
    return out, lse


def _backward_3(
    flash: Any, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, launch: Launch
) -> Gradients:
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    options = _backward_options(launch, is_causal=launch.is_causal, dq=dq, dk=dk, dv=dv)
    flash._flash_attn_backward(grad_out, q, k, v, out, lse, **options)
    return dq, dk, dv


def _forward_4(flash: Any, q: Tensor, k: Tensor, v: Tensor, launch: Launch) -> tuple[Tensor, Tensor]:
    options = _options(launch, causal=launch.is_causal, softcap=launch.softcap or None, return_lse=True)
    out, lse, *_ = flash._flash_attn_fwd(q, k, v, **options | _unbounded(launch))
    return out, lse


def _backward_4(
    flash: Any, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, launch: Launch
) -> Gradients:
    options = _backward_options(launch, causal=launch.is_causal)
    dq, dk, dv, *_ = flash._flash_attn_bwd(q, k, v, out, grad_out, lse, **options | _unbounded(launch))
    return dq, dk, dv


def _options(launch: Launch, **others: Any) -> dict[str, Any]:
    """By the names that all of FlashAttention have for them."""
    options = {"softmax_scale": launch.scale, "softcap": launch.softcap}
    options |= {"window_size_left": launch.left, "window_size_right": launch.right}
    names = "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"
    return options | dict(zip(names, launch.lengths or (), strict=False)) | others


def _backward_options(launch: Launch, **others: Any) -> dict[str, Any]:
    return _options(launch, deterministic=torch.are_deterministic_algorithms_enabled(), **others)


def _unbounded(launch: Launch) -> dict[str, int | None]:
    """FlashAttention-4's bounds, of which none is None; a negative one would be a bound."""
    left, right = (None if bound < 0 else bound for bound in (launch.left, launch.right))
    return {"window_size_left": left, "window_size_right": right}


PACKAGES = (
    Package(
        "flash_attn", "flash-attn", "flash_attn.flash_attn_interface",
        (
            "_flash_attn_forward", "_flash_attn_backward",
            "_flash_attn_varlen_forward", "_flash_attn_varlen_backward",
        ),
        (8, 9, 10, 12), _forward_2, _backward_2, _up_to_256,
    ),
    Package(
        "flash_attn_3", "flash_attn_3", "flash_attn_interface", ("_flash_attn_forward", "_flash_attn_backward"),
        (8, 9), _forward_3, _backward_3, _as_flash_attn_3,
    ),
    Package(
        "flash_attn_4", "flash-attn-4", "flash_attn.cute.interface", ("_flash_attn_fwd", "_flash_attn_bwd"),
        (9, 10, 11, 12), _forward_4, _backward_4, _as_flash_attn_4, _widths_4,
    ),
)  # fmt: skip
KERNELS = tuple(map(kernel, PACKAGES))
