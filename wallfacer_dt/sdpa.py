"""Context-parallel attention in models that call ``scaled_dot_product_attention``, as they are.

Note [What is seen]
The mode sees every call of torch's function by the thread that entered it, wherever the caller has it from. It does not
see attention that is computed otherwise: of that, functions of torch that contain attention are refused by name, and a
context in which no call was seen is refused when it ends. What a checkpoint computes again is computed in the mode
again, since ``backward`` is a function of torch, below which no mode is on; a reentrant one knows no context and is
refused. Both need torch's own functions to be other ones, which outside a context do what they did.
"""

from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager
from functools import cache, wraps
from inspect import signature
from threading import local
from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

# Private: what is replaced in these; run on torch 2.13.0.
from torch.nn.attention import flex_attention
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from wallfacer_dt.agreement.agree import refusing_together
from wallfacer_dt.attention import context_parallel_attention
from wallfacer_dt.compiler import untraced
from wallfacer_dt.mesh import name_of
from wallfacer_dt.options import AttentionKeywords
from wallfacer_dt.order import TokenOrder
from wallfacer_dt.sequence import shard_sequence

_SDPA = F.scaled_dot_product_attention
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
    no_restore_buffers: Set[Tensor] = frozenset(),
    **options: Unpack[AttentionKeywords],
) -> Iterator[None]:
    """Have ``scaled_dot_product_attention`` attend a whole sequence, of which every rank has a shard.

    Called as ``torch.distributed.tensor.experimental.context_parallel``. Within it, buffers hold this rank's shards of
    what they held, in ``order`` (head_tail unless it is told), and every call of ``scaled_dot_product_attention`` in
    this thread is one of :func:`context_parallel_attention`, gradients included. All ranks enter it together. The
    backward belongs into it: what a model has saved of a buffer that was put back is gone, and torch refuses to go on.

    Args:
        mesh: a context mesh.
        buffers: plain tensors with N positions, the same on every rank: input ids or embeddings, labels (shifted
            before), positions, rotary tables. None of them may need a gradient.
        buffer_seq_dims: by buffer, the dim of its positions.
        no_restore_buffers: those that need not be put back.
        **options: see :class:`AttentionOptions`; ``is_causal`` and ``scale`` are the calls' own.

    Yields:
        Nothing.

    Raises:
        TypeError: a buffer is no plain tensor.
        ValueError: buffers do not fit, or need gradients; an option that calls bring; in a call, a mask, dropout, keys
            of another length than queries, or tensors that are not (B, N, L, H).
        NotImplementedError: attention that is computed by a function of torch that contains it.
        RuntimeError: nothing has called ``scaled_dot_product_attention``.
    """
    with refusing_together(name_of(mesh)):
        order = options.pop("order", None) or TokenOrder("head_tail", mesh)
        length = _checked(buffers, buffer_seq_dims, no_restore_buffers, options)
        shards = [shard_sequence(x, order, dim=dim) for x, dim in zip(buffers, buffer_seq_dims, strict=True)]
    whole = [x.detach() for x in buffers]
    mode = _Attending(mesh, order, length, options)
    _replace()
    _put(zip(buffers, shards, strict=True))
    try:
        with mode, _entered(mode):
            yield
    finally:
        _put((x, was) for x, was in zip(buffers, whole, strict=True) if x not in no_restore_buffers)
    if not mode.calls:
        raise RuntimeError(
            "nothing in context_parallel called scaled_dot_product_attention, so every rank attended its own tokens "
            "alone; a model that computes attention otherwise needs a style: see docs/attention.md"
        )


class _Attending(TorchFunctionMode):
    """See Note [What is seen]."""

    def __init__(self, mesh: DeviceMesh, order: TokenOrder, length: int, options: AttentionKeywords) -> None:
        super().__init__()
        self.mesh, self.order, self.length, self.options, self.calls = mesh, order, length, options, 0

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        del types
        if func in _NOT_SEEN:
            self.refuse_unseen(_NOT_SEEN[func])
        return (self._attend if func is _SDPA else func)(*args, **kwargs or {})

    def refuse_unseen(self, what: str) -> None:
        """Refuse (NotImplementedError) attention that cannot be replaced."""
        self.refuse(
            f"{what} computes attention where context_parallel does not see it; use a module that calls "
            "scaled_dot_product_attention, or a style"
        )

    def refuse(self, why: str) -> None:
        """Refuse (NotImplementedError), on all ranks."""
        with refusing_together(name_of(self.mesh)):
            raise NotImplementedError(why)

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
            if query.ndim != 4 or key.shape[2] != query.shape[2]:
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
        return context_parallel_attention(
            query, key, value, self.mesh, is_causal=is_causal, scale=scale, order=self.order, length=self.length,
            **self.options,
        )  # fmt: skip


_ACTIVE = local()


@contextmanager
def _entered(mode: _Attending) -> Iterator[None]:
    """Let this thread's functions of torch that are replaced know the mode."""
    outer, _ACTIVE.mode = _active(), mode
    try:
        yield
    finally:
        _ACTIVE.mode = outer


def _active() -> _Attending | None:
    return getattr(_ACTIVE, "mode", None)


@contextmanager
def _again(mode: _Attending, own: Any) -> Iterator[None]:
    """What a checkpoint computes again."""
    with ExitStack() as stack:
        for each in (own, mode, _entered(mode)):
            stack.enter_context(each)
        yield


@cache
def _replace() -> None:
    """See Note [What is seen]; once, as ranks may be threads."""
    name = "_checkpoint_without_reentrant_generator"
    name += "_impl" * hasattr(checkpoint, f"{name}_impl")  # from torch 2.14 on
    make, apply = getattr(checkpoint, name), checkpoint.CheckpointFunction.apply
    validate = flex_attention._validate_sdpa_input

    @wraps(make)
    def generator(*args: Any, **kwargs: Any) -> Any:
        mode, given = _active(), signature(make).bind(*args, **kwargs)
        context_fn = given.arguments["context_fn"]

        def contexts() -> tuple[Any, Any]:
            forward, again = context_fn()
            return forward, _again(mode, again) if mode else again

        given.arguments["context_fn"] = contexts
        return make(*given.args, **given.kwargs)

    def reentrant(*args: Any) -> Any:
        mode = _active()
        if mode is not None:
            mode.refuse("context_parallel does not see what a reentrant checkpoint computes: use_reentrant=False")
        return apply(*args)

    def flex(*args: Any, **kwargs: Any) -> Any:
        mode = _active()
        if mode is not None:
            mode.refuse_unseen("flex_attention")
        return validate(*args, **kwargs)

    setattr(checkpoint, name, generator)
    checkpoint.CheckpointFunction.apply = reentrant
    flex_attention._validate_sdpa_input = flex


def _checked(buffers: Sequence[Tensor], dims: Sequence[int], kept: Set[Tensor], options: AttentionKeywords) -> int:
    """The sequence's length, of what fits."""
    if own := [name for name in _OWN if name in options]:
        raise ValueError(f"{own[0]} is no option of context_parallel: calls bring it, or it knows")
    if not buffers or len(buffers) != len(dims):
        raise ValueError(f"buffer_seq_dims has a dim for each of the buffers, got {len(dims)} for {len(buffers)}")
    if any(all(x is not buffer for buffer in buffers) for x in kept):
        raise ValueError("no_restore_buffers has a tensor that is none of the buffers")
    for x in buffers:
        if isinstance(x, Tensor) and x.requires_grad:
            raise ValueError("a buffer needs a gradient, which would be lost: use shard_sequence, which has one")
    lengths = {x.shape[dim] for x, dim in zip(buffers, dims, strict=True)}
    if len(lengths) > 1:
        raise ValueError(f"buffers have different numbers of positions: {sorted(lengths)}")
    return lengths.pop()


def _put(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Let buffers be other tensors, nothing of which is copied."""
    with torch.no_grad():
        for buffer, x in pairs:
            buffer.set_(x)  # pyrefly: ignore[bad-argument-type]  (torch says that it takes storages alone)
