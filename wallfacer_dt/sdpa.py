"""Context-parallel attention in models that call ``scaled_dot_product_attention``, as they are.

Note [What is seen]
The mode sees every call of torch's function by the thread that entered it, wherever the caller has it from. Torch's
``backward`` is such a function itself, below which no mode is on: so the engine is run in the mode again, and whatever
computes attention again in a backward, torch's checkpoints or others', is seen. After the context it would not be, so
there a backward is refused: by a hook of what attention gave or, where attention ran without gradients (in a checkpoint
that keeps none) and no backward followed, by the engine until another context is entered. Attention that is computed
otherwise is not seen. Functions of torch that contain it are refused by name as far as the mode sees them, and a
context in which no call was seen is refused when it ends. For all this two of torch's functions are replaced, which
outside a context do what they did.
"""

from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from functools import cache, wraps
from threading import Lock, local
from typing import Any, Unpack

import torch
import torch.nn.functional as F

# Private: `_engine_run_backward`, `_validate_sdpa_input`, and some of the functions below; run on torch 2.11.0,
# 2.13.0, 2.14.1 and 2.15.0.
from torch import Tensor, autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import flex_attention
from torch.overrides import TorchFunctionMode

from wallfacer_dt.agreement.agree import agree, refusing_together
from wallfacer_dt.attention import context_parallel_attention
from wallfacer_dt.compiler import untraced
from wallfacer_dt.mesh import name_of
from wallfacer_dt.options import AttentionKeywords, options_of
from wallfacer_dt.order import TokenOrder
from wallfacer_dt.sequence import checked_dim, shard_sequence

_SDPA = torch._C._nn.scaled_dot_product_attention
_BACKWARD = (Tensor.backward, autograd.backward, autograd.grad)
_NOT_SEEN = {
    F.multi_head_attention_forward: "torch.nn.MultiheadAttention",
    torch._native_multi_head_attention: "torch.nn.MultiheadAttention",
    torch._transformer_encoder_layer_fwd: "torch.nn.TransformerEncoderLayer",
}
_OWN = ("is_causal", "scale", "length", "kv_length", "mask_mod", "prefix_length", "replicated")


@contextmanager
def context_parallel(
    mesh: DeviceMesh,
    *,
    buffers: Sequence[Tensor],
    buffer_seq_dims: Sequence[int],
    no_restore_buffers: Set[Tensor] | None = None,
    **options: Unpack[AttentionKeywords],
) -> Iterator[None]:
    """Have ``scaled_dot_product_attention`` attend a whole sequence, of which every rank has a shard.

    Called as ``torch.distributed.tensor.experimental.context_parallel``. Within it, buffers hold this rank's shards of
    what they held, in ``order`` (head_tail unless it is told), and every call of ``scaled_dot_product_attention`` in
    this thread is one of :func:`context_parallel_attention`, gradients included. All ranks enter it together. The
    backward belongs into it.

    Args:
        mesh: a context mesh.
        buffers: plain tensors with N positions, the same on every rank: input ids or embeddings, labels (shifted
            before), positions, rotary tables. None of them may need a gradient.
        buffer_seq_dims: by buffer, the dim of its positions.
        no_restore_buffers: those that need not be put back.
        **options: see :class:`AttentionOptions`; but ``is_causal`` and ``scale`` are the calls' own, lengths those of
            buffers, and there is no ``mask_mod``, ``prefix_length`` or ``replicated``.

    Yields:
        Nothing.

    Raises:
        TypeError: a buffer is no plain tensor, or an option is unknown.
        ValueError: another one is entered; buffers do not fit, need gradients, or differ in length between ranks; an
            option that calls bring; in a call, a mask, dropout, keys of another length than queries, or tensors that
            are not (B, N, L, H).
        NotImplementedError: attention that is computed by a function of torch that contains it.
        RuntimeError: nothing has called ``scaled_dot_product_attention``; or a backward comes after the context.
    """
    kept = no_restore_buffers or frozenset()
    with refusing_together(name_of(mesh)):
        if _active() is not None:
            raise ValueError("context_parallel within another, which would see no call meanwhile: leave that first")
        order = options.pop("order", None) or TokenOrder("head_tail", mesh)
        length = _checked(buffers, buffer_seq_dims, kept, options)
        shards = [shard_sequence(x, order, dim=dim) for x, dim in zip(buffers, buffer_seq_dims, strict=True)]
        agree("context_parallel", [("length", length), ("order", order.name), *sorted(options.items())], name_of(mesh))
    whole = [x.detach() for x in buffers]
    mode = _Attending(mesh, order, length, options)
    with _ONCE:  # ranks may be threads
        _replace()
    try:
        _put(zip(buffers, shards, strict=True))
        with mode, _entered(mode):
            yield
    finally:
        mode.is_over, _ACTIVE.may_compute_again = True, mode.ran_without_gradients
        _put((x, was) for x, was in zip(buffers, whole, strict=True) if all(x is not one for one in kept))
    if not mode.calls:
        raise RuntimeError(
            "nothing in context_parallel called scaled_dot_product_attention: a model that computes attention "
            "otherwise, of each rank's tokens alone, needs a style (docs/attention.md), and one that has a style is "
            "called without context_parallel"
        )


class _Attending(TorchFunctionMode):
    """See Note [What is seen]."""

    def __init__(self, mesh: DeviceMesh, order: TokenOrder, length: int, options: AttentionKeywords) -> None:
        super().__init__()
        self.mesh, self.order, self.length, self.options = mesh, order, length, options
        self.calls, self.is_over = 0, False
        self.has_gradients, self.ran_without_gradients = torch.is_grad_enabled(), False

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        del types
        if func in _NOT_SEEN:
            self.refuse_unseen(_NOT_SEEN[func])
        if func in _BACKWARD:
            with _entered(self):
                return func(*args, **kwargs or {})
        return (self._attend if func is _SDPA else func)(*args, **kwargs or {})

    def refuse_unseen(self, what: str) -> None:
        """Refuse (NotImplementedError), on all ranks, attention that cannot be replaced."""
        with refusing_together(name_of(self.mesh)):
            raise NotImplementedError(
                f"{what} computes attention where context_parallel does not see it; use a module that calls "
                "scaled_dot_product_attention, or a style"
            )

    def _check_is_in_time(self, grad: Tensor) -> None:
        """A hook of what attention gave: refuses (RuntimeError) a backward after the context."""
        del grad
        if self.is_over:
            raise RuntimeError(_LATE)

    @untraced("it looks process groups up; in a compiled model use a style")
    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        with refusing_together(name_of(self.mesh)):
            if attn_mask is not None:
                raise ValueError(
                    "attn_mask is of one rank's tokens: say is_causal=True, or tell context_parallel a window_size"
                )
            if dropout_p:
                raise ValueError(f"dropout is not implemented, got dropout_p={dropout_p}: set it to 0")
            if any(x.ndim != 4 for x in (query, key, value)) or key.shape[2] != query.shape[2]:
                raise ValueError(
                    "context_parallel takes queries and keys (B, N, L, H) of the same tokens, got "
                    f"{tuple(query.shape)} and {tuple(key.shape)}; cross attention needs context_parallel_attention"
                )
            if query.shape[1] != key.shape[1] and not enable_gqa:
                raise ValueError(
                    f"{key.shape[1]} key heads for {query.shape[1]} query heads need enable_gqa=True, as without "
                    "context_parallel"
                )
        self.calls += 1
        self.ran_without_gradients |= self.has_gradients and not torch.is_grad_enabled()
        out = context_parallel_attention(
            query, key, value, self.mesh, is_causal=is_causal, scale=scale, order=self.order, length=self.length,
            **self.options,
        )  # fmt: skip
        if out.requires_grad:
            out.register_hook(self._check_is_in_time)
        return out


_ACTIVE, _ONCE = local(), Lock()
_LATE = (
    "the backward of a context_parallel came after it, where attention that is computed again would be a rank's own: "
    "call backward within the context"
)


@contextmanager
def _entered(mode: _Attending) -> Iterator[None]:
    """Let this thread's functions of torch that are replaced know the mode."""
    outer, _ACTIVE.mode = _active(), mode
    _ACTIVE.may_compute_again = False
    try:
        yield
    finally:
        _ACTIVE.mode = outer


def _active() -> _Attending | None:
    return getattr(_ACTIVE, "mode", None)


@cache
def _replace() -> None:
    """See Note [What is seen]."""
    engine, validate = autograd._engine_run_backward, flex_attention._validate_sdpa_input

    @wraps(engine)
    def backward(*args: Any, **kwargs: Any) -> Any:
        mode = _active()
        if mode is not None:
            with mode:
                found = engine(*args, **kwargs)
            mode.ran_without_gradients = False
            return found
        if getattr(_ACTIVE, "may_compute_again", False):
            raise RuntimeError(_LATE)
        return engine(*args, **kwargs)

    @wraps(validate)
    def flex(*args: Any, **kwargs: Any) -> Any:
        if mode := _active():
            mode.refuse_unseen("flex_attention")
        return validate(*args, **kwargs)

    autograd._engine_run_backward, flex_attention._validate_sdpa_input = backward, flex


def _checked(buffers: Sequence[Tensor], dims: Sequence[int], kept: Set[Tensor], options: AttentionKeywords) -> int:
    """The sequence's length, of what fits."""
    options_of("context_parallel", options).check()
    if own := [name for name in _OWN if name in options]:
        raise ValueError(
            f"{own[0]} is no option of context_parallel: is_causal and scale are each call's, lengths are known, and "
            "for a mask_mod, a prefix or replicated tokens use a style or context_parallel_attention"
        )
    if not buffers or len(buffers) != len(dims):
        raise ValueError(f"buffer_seq_dims has a dim for each of the buffers, got {len(dims)} for {len(buffers)}")
    if any(all(x is not buffer for buffer in buffers) for x in kept):
        raise ValueError("no_restore_buffers has a tensor that is none of the buffers")
    for x in buffers:
        if not isinstance(x, Tensor):
            raise TypeError(f"a buffer is a tensor, got {type(x).__name__}")
        if x.requires_grad:
            raise ValueError("a buffer needs a gradient, which would be lost: use shard_sequence, which has one")
        if x.is_inference() and not torch.is_inference_mode_enabled():
            raise ValueError("a buffer was made in inference mode, and cannot be changed outside it: clone it")
    lengths = {x.shape[checked_dim(x, dim)] for x, dim in zip(buffers, dims, strict=True)}
    if len(lengths) > 1:
        raise ValueError(f"buffers have different numbers of positions: {sorted(lengths)}")
    return lengths.pop()


def _put(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Let buffers be other tensors, nothing of which is copied."""
    with torch.no_grad():
        for buffer, x in pairs:
            buffer.set_(x)  # pyrefly: ignore[bad-argument-type]  (torch says that it takes storages alone)
