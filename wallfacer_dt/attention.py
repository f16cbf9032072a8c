"""Context-parallel attention on shards: its options, what a mesh makes of them, and the call of the operator."""

import math
import pickle
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from operator import index
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.attention.flex_attention import BlockMask

from wallfacer_dt import sharding
from wallfacer_dt.agreement.agree import agree, named, refusing_together
from wallfacer_dt.agreement.meeting import kept
from wallfacer_dt.agreement.worlds import lasting
from wallfacer_dt.algorithms.blocks import Captured, Read, mask_key, mask_name, read_by, recorded_mask
from wallfacer_dt.algorithms.recorded import MaskMod, UnrecordedError
from wallfacer_dt.algorithms.schedule import check_schedule
from wallfacer_dt.algorithms.volume import resolve_rotations
from wallfacer_dt.autocast import as_computed, is_autocast_on_anywhere
from wallfacer_dt.calls import groups_here
from wallfacer_dt.compiler import SOURCES, is_exporting, untraced
from wallfacer_dt.dealing import warn_undealt
from wallfacer_dt.inputs import INPUTS, AttentionInputs
from wallfacer_dt.kernels.registry import check_kernel
from wallfacer_dt.layout import check_length
from wallfacer_dt.mesh import ContextGroups, context_groups, name_of, whole_context_group
from wallfacer_dt.ops import attention as operator
from wallfacer_dt.options import AttentionKeywords, AttentionOptions, Options, Setting, Told, options_of, with_options
from wallfacer_dt.order import check_order_fits, check_order_is_told
from wallfacer_dt.validation import check_call, kind_of

_KINDS = 256  # of tensors, that are remembered


@untraced("it looks process groups up; in a compiled model use a style")
def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mesh: DeviceMesh,
    *,
    document_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    sinks: Tensor | None = None,
    k_shared: Tensor | None = None,
    **options: Unpack[AttentionKeywords],
) -> Tensor:
    """Attention over a sequence sharded on a context mesh. Differentiable.

    Every rank passes its shard and gets its shard of what ``scaled_dot_product_attention`` would return for the whole
    sequence. ``team=1`` is Ring Attention (Liu et al., section 3); ``team>1`` is WallFacer (sections 3.2 and 3.3) with
    the 2D schedule or as published; ``ring=1`` gathers and does not hop (keys and values, or queries); an axis
    ``cp_ulysses`` exchanges tokens for heads around them (DeepSpeed-Ulysses). All ranks of the mesh must call it
    together, with their shards: plain tensors, or DTensors on a mesh that contains the context mesh's axes, the
    sequence sharded on these and batch or heads, or nothing, on others.

    Args:
        q: queries (B, N, L, H), L tokens of this rank (as a DTensor: the whole sequence).
        k: keys (B, Nkv, L, H); Nkv divides N (grouped-query attention; heads are never expanded to be sent). Without
            a mask they may be of another length than queries (cross attention).
        v: values (B, Nkv, L, Hv).
        mesh: axes ``("cp_ulysses", "cp_ring", "cp_team")`` or some of them; for DTensors a slice of theirs.
        document_ids: (B, N) or (N,), int, on the CPU: the document of every token of the whole sequence, a new one
            wherever they change; a query sees its own document only. The same on every rank.
        cu_seqlens: instead of them, documents' cumulative lengths (documents + 1,), int, on the CPU, for all rows.
        sinks: (N,): for every head a logit that takes part in the softmax and has no value. As with any parameter, a
            rank's gradient is its tokens' part.
        k_shared: (B, 1, L, Hs): the end of every head's key (the rotary part of MLA's); never expanded to be sent.
            k then has H - Hs.
        **options: see :class:`AttentionOptions`.

    Returns:
        The output (B, N, L, Hv), in q's dtype or, as ``scaled_dot_product_attention`` has it, autocast's: this rank's,
        or for DTensors one in the placements in which q is taken: its own, but that an axis besides the context mesh's
        which shards the sequence, too, shards heads, or nothing; k and v follow. 0 for a query that sees no key.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: a mesh, shapes, placements or options that do not fit, or that differ between ranks; raised on
            every rank before any tensor is sent.
        NotImplementedError: forward-mode differentiation.
    """
    inputs = AttentionInputs(q, k, v, k_shared, sinks, document_ids, cu_seqlens)
    with refusing_together(name_of(mesh)):
        chosen = options_of("context_parallel_attention", options, own=INPUTS[3:])
        attention = ContextAttention.on(mesh, chosen)
        inputs = under_autocast(inputs)
        told = attention.checked(inputs)
    return attention.run(inputs, told)


def under_autocast(inputs: AttentionInputs) -> AttentionInputs:
    """A call's tensors as ``scaled_dot_product_attention`` would take them; ``k_shared`` as k.

    Sinks stay as they are: no rounding of theirs would save anything, and what they are folded into is float32.
    """
    if not is_autocast_on_anywhere():
        return inputs
    q, k, v, k_shared = as_computed(*inputs[:4])
    return inputs._replace(q=q, k=k, v=v, k_shared=k_shared)


@dataclass(frozen=True, slots=True)
class ContextAttention(Setting):
    """Context-parallel attention with its mesh and options resolved: what is left to check is the tensors."""

    # What the mask reads, for a compiled graph, whose inputs these are; otherwise that is looked at at every call.
    captured: Read = field(default_factory=Read, repr=False, compare=False)
    # By kind of tensors, what the operator is told of them.
    known: dict[Hashable, Told] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def on(cls, mesh: DeviceMesh, options: AttentionOptions, *, any_axis: str = "") -> "ContextAttention":
        """Resolve a mesh and options, refusing what does not fit; see :func:`context_parallel_attention`.

        All ranks call it together: the published schedule makes a process group of ring and team. A mesh of one axis of
        any other name is taken as ``any_axis`` (``"cp_ring"`` or ``"cp_ulysses"``).
        """
        groups = context_groups(mesh, any_axis=any_axis)
        place = groups.coordinate
        options.check()
        check_kernel(options.kernel)
        check_schedule(options.schedule, place.ring, place.team)
        if options.order is not None:
            check_order_fits(options.order, mesh)
        elif options.has_mask:
            check_order_is_told(None, place.size)
        if options.schedule == "published" and place.team > 1:
            # Making a group is done together, so no rank may have refused before.
            agree("attention", [("schedule", "published")], name_of(mesh))
            context, context_ranks = whole_context_group(mesh)
            groups = groups._replace(context=context, context_ranks=context_ranks)
        return cls(
            options=options, order=options.order_name, mask_key=mask_key(options.mask_mod), mesh=name_of(mesh),
            device_type=mesh.device_type, groups=groups, captured=_read_by(options.mask_mod, mesh.device_type),
        )  # fmt: skip

    def _check_lasts(self, what: str) -> None:
        """Refuse (ValueError) what has no meaning in another process."""
        if self.groups.context:
            raise ValueError(
                f"schedule='published' has a process group of its own, which {what} would not find: use schedule='2d'"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> "ContextAttention":
        """Nothing of it changes."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """What finds the mesh again, in this world or where meshes have been made as in it."""
        self._check_lasts("a pickled module")
        try:
            pickle.dumps(self.options.mask_mod)
        except Exception as error:  # whatever a mask holds
            raise TypeError(
                f"a styled module is pickled with its mask_mod, which cannot be: {error}; save the module's "
                "state_dict() and apply the style to a new one, or use a function of a module"
            ) from error
        return _unpickled, (lasting(self.mesh), self.device_type, self.groups, self.options)

    def with_mask(self, mask_mod: MaskMod | BlockMask) -> "ContextAttention":
        """The same attention under an arbitrary mask, which a call brings with it."""
        options = replace(self.options, mask_mod=mask_mod)
        options.check()
        check_order_is_told(options.order, self.place.size)
        return replace(self, options=options, mask_key=mask_key(mask_mod), captured=Read())

    def of_length(self, length: int) -> "ContextAttention":
        """The same attention for a sequence of another length, which a call brings with it."""
        check_length(length)
        if length == self.options.length:  # and what is known of such calls stays known
            return self
        return replace(self, options=replace(self.options, length=length))

    def checked(self, inputs: AttentionInputs, scale: float | None = None) -> Told:
        """What the operator is told, of tensors that are checked; of a kind that has been checked, they are not again.

        Whatever else a call depends on is looked at every time: documents, a mask, and what is no plain tensor.
        """
        kind = None if self.mask_key else kind_of(inputs)
        if kind is None:
            return self._checked_anew(inputs, scale)
        key = (kind, scale, inputs.need_gradients())
        return kept(self.known, key, _KINDS, lambda: self._checked_anew(inputs, scale))

    def _checked_anew(self, inputs: AttentionInputs, scale: float | None) -> Told:
        check_call(inputs, self)
        self.warn_undealt(inputs.q)
        return self.resolve(inputs, scale).told()

    def warn_undealt(self, x: Tensor) -> None:
        """Warn, once, of a plain tensor of ranks to which no sequence was dealt out; see ``dealing``."""
        if self.mesh and not isinstance(x, DTensor):
            warn_undealt(named(self.mesh).ranks)

    def resolve(self, inputs: AttentionInputs, scale: float | None = None) -> Options:
        """The operator's options for tensors that have been checked; asks a ``mask_mod``, which may raise anything.

        A ``scale``, checked as well, goes before one's own.
        """
        q, k, v, k_shared = inputs[:4]
        options, place = self.options, self.place
        exporting = is_exporting()
        if exporting:
            self._check_lasts("an exported program")
            if self.mask_key:
                raise ValueError(
                    "mask_mod does not go into an exported program: use is_causal, window_size or document_ids"
                )
        scale = options.scale if scale is None else scale
        # A compiler may take any size for a symbol, which int() leaves it; heads and their size are the model's.
        heads, kv_heads, head_dim, value_dim = map(index, (q.shape[1], k.shape[1], q.shape[-1], v.shape[-1]))
        forward, backward = resolve_rotations(
            options.rotate, options.rotate_forward, options.schedule, index(place.ring), index(place.team),
            heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=q.dtype, ulysses=index(place.ulysses),
            value_dim=value_dim, shared_dim=0 if k_shared is None else index(k_shared.shape[-1]),
            lengths=self._ratio(q, k),
        )  # fmt: skip
        length, kv_length = options.length, options.kv_length
        if isinstance(q, DTensor) and (q.shape[2] % place.size or k.shape[2] % place.size):
            length, kv_length = q.shape[2], None if q.shape[2] == k.shape[2] else index(k.shape[2])
        told = replace(
            options, window_size=options.window, mask_mod=None, length=length, kv_length=kv_length, order=None,
            rotate=backward, rotate_forward=forward,
        )  # fmt: skip
        setting = replace(
            self,
            options=told,
            order=self.order or "contiguous",
            mask_key=self.mask_key if torch.compiler.is_compiling() else 0,  # eager code has just asked
            mesh=lasting(self.mesh) if exporting else self.mesh,
        )
        mask, captured = self._mask(inputs)
        return Options(
            1 / math.sqrt(head_dim) if scale is None else float(scale),
            float(options.softcap or 0.0),
            setting,
            SOURCES,
            mask,
            inputs.need_gradients(),
            # The same objects at every call, of which it is known whether they have been written into.
            Captured(sharding.replicate(x.detach() if x.requires_grad else x, q) for x in captured),
        )

    def run(self, inputs: AttentionInputs, told: Told) -> Tensor:
        """Call the operator."""
        ids, ends = inputs.document_ids, inputs.cu_seqlens
        if ids is not None:
            rows = ids if ids.ndim == 2 else ids.unsqueeze(0)
            inputs = inputs._replace(document_ids=sharding.replicate(rows, inputs.q))
        elif ends is not None:
            inputs = inputs._replace(cu_seqlens=sharding.replicate(ends, inputs.q))
        return operator(*inputs, *told)[0]

    def _ratio(self, q: Tensor, k: Tensor) -> tuple[int, int]:
        """Queries and keys, as far as they matter for which of them to move: not at all where they are as many."""
        told = self.options
        are_as_many = told.kv_length is None and (told.length is not None or q.shape[2] == k.shape[2])
        if self.has_mask or are_as_many:
            return 1, 1
        return self.whole(q.shape, k.shape, shards=not isinstance(q, DTensor))

    def _mask(self, inputs: AttentionInputs) -> tuple[str, tuple[Tensor, ...]]:
        """The name of the mask, and what it captures."""
        if self.options.mask_mod is None:
            return "", ()
        q, k, divided = inputs.q, inputs.k, sharding.divided(inputs, self.groups)
        if isinstance(self.options.mask_mod, BlockMask):
            _check_table(self.options.mask_mod, q)
        may = {"by_row": sharding.BATCH not in divided, "by_head": sharding.HEADS not in divided}
        lengths = self.seen_by_mask(q.shape, k.shape, shards=not isinstance(q, DTensor))
        lengths = index(lengths[0]), index(lengths[1])
        if torch.compiler.is_compiling():
            return mask_name(self.mask_key, lengths, q.device.type, **may), self.captured.tensors
        return recorded_mask(self.options.mask_mod, lengths, q.device.type, **may)


def _check_table(mask: BlockMask, q: Tensor) -> None:
    """Refuse (ValueError) a table for another batch, or for other heads."""
    for what, has, needed in zip(("rows", "heads"), mask.shape, q.shape, strict=False):
        if has not in (1, needed):
            raise ValueError(
                f"the BlockMask must be for {needed} {what}, which q has, or for one as for all, got {has}"
            )


def _unpickled(mesh: str, device_type: str, groups: ContextGroups, options: AttentionOptions) -> ContextAttention:
    """What was pickled, or a refusal (ValueError) where there is no such mesh."""
    try:
        here = groups_here(mesh, groups)
    except ValueError as error:
        raise ValueError(f"{error}; or load the module's state_dict() into one that has been styled here") from error
    return ContextAttention(
        options=options, order=options.order_name, mask_key=mask_key(options.mask_mod), mesh=named(mesh).name,
        device_type=device_type, groups=here, captured=_read_by(options.mask_mod, device_type),
    )  # fmt: skip


def _read_by(mask: MaskMod | BlockMask | None, device_type: str) -> Read:
    """What a mask reads, if it can be asked yet; what it will never do is refused (TypeError)."""
    if mask is None:
        return Read()
    read = read_by(mask_key(mask), device_type)
    try:
        read.tensors = recorded_mask(mask, None, device_type)[1]
    except UnrecordedError:
        raise
    except Exception:  # what it reads may not be there yet
        pass
    return read


context_parallel_attention.__signature__ = with_options(context_parallel_attention)  # pyrefly: ignore[missing-attribute]
