"""torch's fused attention kernels, called below autograd (private aten ops; run on torch 2.11.0, 2.13.0, 2.14.1 and
2.15.0 on the CPU, on CUDA with 2.11.0 on an H200, with the others with fake tensors).

Traps of the CPU's: a last dim whose stride is not 1 is read as if it were, log-sum-exps come with odd strides,
gradients need not be contiguous, v must have q's head dim (so the smaller is padded). An empty block kills the process,
and a row that sees no key has lse 0. So has one whose scores have all overflowed to -inf, and one whose scores are all
NaN, where no mask is given and keys fewer than a vector has lanes. Those of flash on CUDA: see ``windows``.

The memory-efficient one (kernel_forward.h and kernel_backward.h in torch 2.13.0's headers, attention_backward.cu):
causal from the top left corner, as on the CPU; no grouped heads; a bias in q's dtype of all heads whose rows start at
multiples of 16; lse with rows padded to 32, +inf there; out laid out by tokens, of which it takes two strides only; a
row that sees no key has lse 0.

cuDNN's (MHA.cpp, sdp_utils.cpp): it is given no bias, since -inf there gave NaN, its stand-in -65504 hides nothing from
a row that sees no key, and gradients were NaN for some lengths (pytorch issues 139298, 177842, 196678). Nor does it
take a single key. Its lse is (B, N, Lq, 1), both ways. It keeps plans by the strides of q, k and v, not of out,
grad_out and lse: here all are without gaps, by heads or by tokens, out and grad_out as q, and lse is contiguous. Where
a plan could not be made, the next call of its kind crashes. For rows whose lse is below -88.7, of which exp(-lse) is
infinite, the backward of some versions on compute capability 9.x gives NaN: where all keys are seen and 64 of them are
more than a multiple of 128 (pytorch issue 196678, cudnn-frontend 628), and for a single query (cudnn-frontend 1072).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.attention
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from wallfacer_dt.kernels import reference
from wallfacer_dt.kernels.block import (
    CAUSAL,
    FULL,
    HALF,
    NO_MASK,
    Band,
    BlockKernel,
    Gradients,
    How,
    Need,
    Supports,
    no_softcap,
    refuse,
)
from wallfacer_dt.kernels.merge import accumulation_dtype, as_dtype
from wallfacer_dt.kernels.visible import finite, visible_keys
from wallfacer_dt.kernels.windows import Launch, Windowed, cropped, loadable
from wallfacer_dt.rows import padded

_ANTICAUSAL = Band(0, None)
_LANES = 16
"""As many numbers as the longest vector of a CPU holds."""


@dataclass(frozen=True)
class Dense:
    """A kernel of torch's that sees all keys, is causal from the top left corner, or is told what rows see."""

    name: str
    # From torch's operators, q, k, v, what rows see (or None), whether it is causal, and the scale to out and lse.
    run_forward: Callable[..., tuple[Tensor, Tensor]]
    # From torch's operators, grad_out, q, k, v, out, lse and these to dq, dk and dv.
    run_backward: Callable[..., Gradients]
    # Whether it can be told what rows see. Otherwise the reference computes such blocks, which are small squares of
    # narrow windows, and single queries and keys.
    is_told: bool = True
    operators: Callable[[], Any] = lambda: torch.ops.aten

    def forward(self, q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, Tensor]:
        """See :class:`wallfacer_dt.kernels.block.Forward`."""
        how = self._simplest(how, q, k)
        if how.seen == _ANTICAUSAL and _is_square(how, q, k):
            out, lse = self.forward(q.flip(2), k.flip(2), v.flip(2), how._replace(seen=CAUSAL))
            return out.flip(2), lse.flip(2)
        if not (self.is_told or _needs_no_telling(how, q, k)):
            return reference.forward(q, k, v, how)
        is_causal, visible = _seen(how, q, k)
        out, lse = self.run_forward(self.operators(), q, k, v, visible, is_causal, how.scale)
        return out, lse if visible is None else lse.masked_fill(visible.any(-1).logical_not(), -torch.inf)

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, how: How
    ) -> Gradients:
        """See :class:`wallfacer_dt.kernels.block.Backward`."""
        how = self._simplest(how, q, k)
        if how.seen == _ANTICAUSAL and _is_square(how, q, k):
            grad_out, q, k, v, out, lse = (x.flip(2) for x in (grad_out, q, k, v, out, lse))
            dq, dk, dv = self.backward(grad_out, q, k, v, out, lse, how._replace(seen=CAUSAL))
            return dq.flip(2), dk.flip(2), dv.flip(2)
        if not (self.is_told or _needs_no_telling(how, q, k)):
            return reference.backward(grad_out, q, k, v, out, lse, how)
        is_causal, visible = _seen(how, q, k)
        return self.run_backward(self.operators(), grad_out, q, k, v, out, finite(lse), visible, is_causal, how.scale)

    def _simplest(self, how: How, q: Tensor, k: Tensor) -> How:
        if how.softcap or how.mask is not None:
            refuse(self.name, how, softcap=True, mask=not self.is_told)
        # A block of one row stays causal, so that one causal schedule calls one kernel whatever its lengths.
        return how if how.seen in (FULL, CAUSAL) else how._replace(seen=how.band.within(q.shape[2], k.shape[2]))


def _is_square(how: How, q: Tensor, k: Tensor) -> bool:
    """Whether rows that see what does not come before them are causal once they are reversed, with no mask made."""
    return how.mask is None and q.shape[2] == k.shape[2]


def _needs_no_telling(how: How, q: Tensor, k: Tensor) -> bool:
    return min(q.shape[2], k.shape[2]) > 1 and (how.seen == FULL or (how.seen == CAUSAL and q.shape[2] == k.shape[2]))


def _seen(how: How, q: Tensor, k: Tensor) -> tuple[bool, Tensor | None]:
    """Whether a kernel is to be causal, or else what its rows see."""
    if how.mask is None and how.seen in (FULL, CAUSAL):
        return how.seen == CAUSAL, None
    return False, visible_keys(how, q, k)


def _bias(visible: Tensor | None, dtype: torch.dtype, multiple: int = 1) -> Tensor | None:
    """What is added to scores, with rows that start at multiples of some number."""
    if visible is None:
        return None
    columns = visible.shape[-1]
    room = torch.zeros((*visible.shape[:-1], columns + -columns % multiple), dtype=dtype, device=visible.device)
    return room[..., :columns].masked_fill_(visible.logical_not(), -torch.inf)


def _cpu_forward(
    _aten: Any, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    bias = _bias(visible, q.dtype)
    if bias is None and k.shape[2] < _LANES:
        bias = q.new_zeros(q.shape[2], k.shape[2])  # hides nothing, and so no NaN
    queries, values, keys = _in_rows(q, v, k)
    # Torch's function takes its arguments in less time than its operator; the backward has none.
    run = partial(torch._scaled_dot_product_flash_attention_for_cpu, queries, keys)
    out, lse = run(values, 0.0, is_causal, attn_mask=bias, scale=scale)
    # Fake tensors of torch 2.11 have another dtype here than real ones.
    lse = as_dtype(lse, accumulation_dtype(q.dtype))
    if not (lse.is_meta or isinstance(lse, FakeTensor) or lse.all()):
        # Of a row whose scores have all overflowed to -inf it is 0, too: where values of 1 have no sum.
        unseen = lse == 0 if visible is None else (lse == 0) & visible.any(-1)
        if unseen.any() and (unseen := unseen & (out == 0).all(-1)).any():
            ones, _ = run(torch.ones_like(values), 0.0, is_causal, attn_mask=bias, scale=scale)
            lse = lse.masked_fill(unseen & (ones == 0).all(-1), -torch.inf)
    return cropped(out, v), lse


def _cpu_backward(
    aten: Any, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    visible: Tensor | None, is_causal: bool, scale: float,
) -> Gradients:  # fmt: skip
    queries, values, keys, grad_out, out = _in_rows(q, v, k, grad_out, out)
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, queries, keys, values, out, lse, 0.0, is_causal, attn_mask=_bias(visible, q.dtype), scale=scale
    )
    return cropped(dq, q), cropped(dk, k), cropped(dv, v)


def _in_rows(q: Tensor, v: Tensor, *others: Tensor) -> list[Tensor]:
    """Of one head dim, the larger one of these two, with numbers that lie side by side."""
    rows = [x if x.stride(-1) == 1 else x.contiguous() for x in (q, v, *others)]
    widths = q.shape[-1], v.shape[-1]
    return rows if widths[0] == widths[1] else [padded(x, x.ndim - 1, max(widths)) for x in rows]


def _efficient_forward(
    aten: Any, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    operands = loadable([q, *_for_each_head(q, k, v)])
    bias = _bias_of_heads(visible, q, k)
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(*operands, bias, True, 0.0, is_causal, scale=scale)
    out = cropped(out, v)
    if visible is not None:
        out = out.masked_fill(visible.any(-1, keepdim=True).logical_not(), 0)
    return out, lse[..., : q.shape[2]]


def _efficient_backward(
    aten: Any, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    visible: Tensor | None, is_causal: bool, scale: float,
) -> Gradients:  # fmt: skip
    *operands, out = loadable([grad_out, q, *_for_each_head(q, k, v), out])
    out = out.transpose(1, 2).contiguous().transpose(1, 2)
    lse = F.pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf)
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        *operands, _bias_of_heads(visible, q, k), out, lse, *_no_dropout(q), 0.0, [True, True, True, False], is_causal,
        scale=scale,
    )  # fmt: skip
    dk, dv = (x if x.shape[1] == k.shape[1] else x.unflatten(1, (k.shape[1], -1)).sum(2) for x in (dk, dv))
    return cropped(dq, q), cropped(dk, k), cropped(dv, v)


def _for_each_head(q: Tensor, *tensors: Tensor) -> list[Tensor]:
    groups = q.shape[1] // tensors[0].shape[1]
    return [x if groups == 1 else x.repeat_interleave(groups, 1) for x in tensors]


def _bias_of_heads(visible: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    bias = _bias(visible, q.dtype, multiple=16)
    return None if bias is None else bias.expand(*q.shape[:2], q.shape[2], k.shape[2])


def _cudnn_forward(
    aten: Any, q: Tensor, k: Tensor, v: Tensor, _visible: None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    operands = [_dense(x, x) for x in loadable([q, k, v])]
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(*operands, None, True, 0.0, is_causal, False, scale=scale)
    return cropped(out, v), lse.squeeze(3)


def _cudnn_backward(
    aten: Any, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    _visible: None, is_causal: bool, scale: float,
) -> Gradients:  # fmt: skip
    if not is_causal and k.shape[2] % 128 == 64:
        return _in_two(aten, grad_out, q, k, v, out, lse, scale)
    operands = loadable([grad_out, q, k, v, out])
    _, queries, keys, values, _ = operands
    operands = [_dense(x, y) for x, y in zip(operands, (queries, queries, keys, values, queries), strict=True)]
    dq, dk, dv = aten._scaled_dot_product_cudnn_attention_backward(
        *operands, lse.unsqueeze(-1).contiguous(), *_no_dropout(q), None, None, None, q.shape[2], k.shape[2], 0.0,
        is_causal, scale=scale,
    )  # fmt: skip
    return cropped(dq, q), cropped(dk, k), cropped(dv, v)


def _in_two(
    aten: Any, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> Gradients:
    """Gradients of keys (B, Nkv, Lk, H) that all rows see, the last 32 by themselves: no length is 64 modulo 128."""
    first, last = (
        _cudnn_backward(aten, grad_out, q, k[:, :, some], v[:, :, some], out, lse, None, False, scale)
        for some in (slice(-32), slice(-32, None))
    )
    return first[0] + last[0], torch.cat([first[1], last[1]], 2), torch.cat([first[2], last[2]], 2)


def _dense(x: Tensor, like: Tensor) -> Tensor:
    """x (B, N, L, H) without gaps, by tokens or by heads, as the other is."""
    by_tokens = like.stride(1) < like.stride(2)
    return x.transpose(1, 2).contiguous().transpose(1, 2) if by_tokens else x.contiguous()


def _no_dropout(q: Tensor) -> tuple[Tensor, Tensor]:
    """Seed and offset, which only dropout reads."""
    unread = torch.empty((), dtype=torch.int64, device=q.device)
    return unread, unread


def _flash_forward(aten: Any, q: Tensor, k: Tensor, v: Tensor, launch: Launch) -> tuple[Tensor, Tensor]:
    lengths = launch.lengths or (None, None, q.shape[1], k.shape[1])
    out, lse, *_ = aten._flash_attention_forward(
        q, k, v, *lengths, 0.0, launch.is_causal, False, **_window_options(launch)
    )
    return out, lse


def _flash_backward(
    aten: Any, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, launch: Launch
) -> Gradients:
    # Only dropout reads it.
    state = torch.empty(2, dtype=torch.uint64, device=q.device)
    lengths = launch.lengths or (None, None, q.shape[1], k.shape[1])
    return aten._flash_attention_backward(
        grad_out, q, k, v, out, lse, *lengths, 0.0, launch.is_causal, state, state, **_window_options(launch)
    )


def _window_options(launch: Launch) -> dict[str, Any]:
    return {"scale": launch.scale, "window_size_left": launch.left, "window_size_right": launch.right}


def _supports(need: Need) -> bool | str:
    if need.softcap:
        return no_softcap(need.softcap)
    if need.device_type in ("cpu", "meta"):  # without contents as on the CPU
        return True
    if need.device_type == "cuda" and need.masked:
        return NO_MASK
    head_dim = max(need.head_dim, need.value_dim)
    if need.device_type != "cuda" or need.dtype not in HALF or head_dim > 256:
        return (
            "runs on cpu, and on cuda in bfloat16 or float16 with a head dim of at most 256; got "
            f"{need.device_type}, {need.dtype}, head dim {head_dim}: cast q, k and v, or pass kernel='reference' "
            "('efficient' on cuda, float32 too)"
        )
    major, minor = need.capability or (9, 0)
    if major < 8:
        return f"runs on compute capability 8.0 and later; got {major}.{minor}: pass kernel='reference'"
    if 192 < head_dim <= 224 and ((major, minor) in ((8, 6), (8, 9)) or major == 12):
        # As scaled_dot_product_attention refuses there (sdp_utils.cpp).
        return f"has no backward for head dims of 193 to 224 on compute capability {major}.{minor}; got {head_dim}"
    other = torch.nn.attention.current_flash_attention_impl()
    if other is not None and not need.is_elsewhere:
        return (
            f"is torch's own, for which activate_flash_attention_impl({other!r}) has put another: call "
            "restore_flash_attention_impl(), or pass kernel='flash_attn_3' or 'flash_attn_4'"
        )
    return True


def _supports_efficient(need: Need) -> bool | str:
    if need.softcap:
        return no_softcap(need.softcap)
    if need.device_type != "cuda" or need.dtype not in (*HALF, torch.float32):
        return f"runs on cuda, in float32, bfloat16 or float16; got {need.device_type}, {need.dtype}"
    if need.capability and need.capability < (8, 0) and need.dtype == torch.bfloat16:
        return f"runs in bfloat16 on compute capability 8.0 and later; got {need.capability[0]}.{need.capability[1]}"
    return True


def _supports_cudnn(need: Need) -> bool | str:
    if need.softcap:
        return no_softcap(need.softcap)
    if need.masked:
        return NO_MASK
    head_dim = max(need.head_dim, need.value_dim)
    if need.device_type != "cuda" or need.dtype not in HALF or head_dim > 128:
        return (
            "runs on cuda, in bfloat16 or float16, with head dims of at most 128; got "
            f"{need.device_type}, {need.dtype}, head dim {head_dim}"
        )
    if need.deterministic:
        return "has no deterministic backward"
    if need.capability and need.capability[0] < 8:
        return f"runs on compute capability 8.0 and later; got {need.capability[0]}.{need.capability[1]}"
    if need.capability and need.capability[0] in (10, 11):
        # pytorch issue 193893 (outputs, without an error), cudnn-frontend 744 (gradients); 11.x is of that family.
        here = ".".join(map(str, need.capability))
        remedy = "pass kernel='flash' or 'flash_attn_4'"
        return f"is known to be wrong on the family of compute capability 10.x; got {here}: {remedy}"
    if torch.version.hip and not need.is_elsewhere:  # whose devices are cuda's, and MIOpen's version is cuDNN's
        return "runs on NVIDIA's GPUs"
    is_here = need.capability is not None and not need.is_elsewhere
    version = torch.backends.cudnn.version() if is_here else None
    if torch.version.cuda and is_here and version is None:
        return "needs cuDNN, which this torch has been built without"
    # What sdp_utils.cpp wants before it prefers it: earlier ones are wrong for lengths that 128 does not divide.
    if version is not None and version <= 91500:
        return f"needs cuDNN 9.15.1 or later; got {version}"
    return True


FLASH = Windowed("flash", lambda: torch.ops.aten, _flash_forward, _flash_backward, has_softcap=False)
EFFICIENT = Dense("efficient", _efficient_forward, _efficient_backward)
CUDNN = Dense("cudnn", _cudnn_forward, _cudnn_backward, is_told=False)


def _kernel(run: Dense, supports: Supports) -> BlockKernel:
    return BlockKernel(run.name, run.forward, run.backward, supports, f"torch {torch.__version__}")


CPU = _kernel(Dense("flash", _cpu_forward, _cpu_backward), _supports)
CUDA = CPU._replace(forward=FLASH.forward, backward=FLASH.backward, takes_bands=True, takes_segments=True)
KERNELS = CPU, _kernel(EFFICIENT, _supports_efficient), _kernel(CUDNN, _supports_cudnn)
