"""Context-parallel attention on shards: its options, what a mesh makes of them, and the call of the operator."""

import math
import pickle
from dataclasses import dataclass, replace
from operator import index
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.attention.flex_attention import BlockMask

from wallfacer_dt import sharding
from wallfacer_dt.agreement import agree, lasting, named, refusing_together
from wallfacer_dt.algorithms import MaskMod, check_rotate, check_schedule, mask_key, mask_name, resolve_rotations
from wallfacer_dt.autocast import as_computed
from wallfacer_dt.calls import Options, groups_here, needs_gradient
from wallfacer_dt.compiler import untraced
from wallfacer_dt.kernels import check_kernel
from wallfacer_dt.layout import check_length
from wallfacer_dt.mesh import Coordinate, context_groups, name_of, whole_context_group
from wallfacer_dt.ops import CODE
from wallfacer_dt.order import TokenOrder, check_order_fits, check_order_is_told, check_token_order
from wallfacer_dt.refusal import NO_EXTRAS, Expected, Extras, check_call


@untraced("it looks process groups up; in a compiled model use a style")
def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mesh: DeviceMesh,
    *,
    is_causal: bool = False,
    window_size: tuple[int | None, int | None] | None = None,
    prefix_length: int = 0,
    mask_mod: MaskMod | BlockMask | None = None,
    document_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    sinks: Tensor | None = None,
    k_shared: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    length: int | None = None,
    kv_length: int | None = None,
    replicated: int = 0,
    order: TokenOrder | None = None,
    schedule: str = "2d",
    rotate: str = "auto",
    rotate_forward: str = "auto",
    kernel: str = "auto",
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
        is_causal: a query sees the keys up to its own position.
        window_size: (left, right): a query at i sees keys from i - left to i + right; None or -1 for no bound.
        prefix_length: with ``is_causal``, keys before this position are seen by all queries.
        mask_mod: any other mask, in place of all these: a function of (batch, head, query position, key position) or
            a ``BlockMask`` of flex_attention.
        document_ids: (B, N) or (N,), int, on the CPU: the document of every token of the whole sequence, a new one
            wherever they change; a query sees its own document only. The same on every rank.
        cu_seqlens: instead of them, documents' cumulative lengths (documents + 1,), int, on the CPU, for all rows.
        sinks: (N,): for every head a logit that takes part in the softmax and has no value. As with any parameter, a
            rank's gradient is its tokens' part.
        k_shared: (B, 1, L, Hs): the end of every head's key (the rotary part of MLA's); never expanded to be sent.
            k then has H - Hs.
        scale: factor of the scores; 1 / sqrt(H) by default.
        softcap: scores s become softcap * tanh(s / softcap).
        length: N, for a sequence whose shards are not equal.
        kv_length: the number of keys, where it is another one.
        replicated: the first T rows of q, k, v and of the output are tokens before the sequence that every rank holds
            (the text in joint attention); without any mask. Gradients of the output's rows are summed over ranks, those
            of the inputs' rows are a rank's part of a sum.
        order: in which tokens were dealt out: what :func:`wallfacer_dt.shard_sequence` or the loader was given. Under
            a mask, and within documents, there is no default on several ranks.
        schedule: ``"2d"``, or ``"published"`` for WallFacer's Algorithms 1 to 3 (team must divide ring).
        rotate: which side moves round the ring in the backward: ``"kv"``, ``"q"``, or ``"auto"`` for what has the
            smaller payload without a mask (see :func:`wallfacer_dt.attention_volume`).
        rotate_forward: the same for the forward, where with queries goes what has been computed of the output.
        kernel: ``"auto"``, or the name of one, see docs/kernels.md and :func:`wallfacer_dt.register_kernel`; what a
            kernel cannot do is refused.

    Returns:
        The output (B, N, L, Hv), in q's dtype or, as ``scaled_dot_product_attention`` has it, autocast's: this rank's,
        or for DTensors one with q's placements (q, k and v are redistributed where a placement allows it, k and v to
        q's). 0 for a query that sees no key.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: a mesh, shapes, placements or options that do not fit, or that differ between ranks; raised on
            every rank before any tensor is sent.
        NotImplementedError: forward-mode differentiation.
    """
    extras = Extras(document_ids, cu_seqlens, sinks, k_shared)
    with refusing_together(name_of(mesh)):
        options = AttentionOptions(
            is_causal, window_size, prefix_length, mask_mod, scale, softcap, length, kv_length, replicated, order,
            schedule, rotate, rotate_forward, kernel,
        )  # fmt: skip
        attention = ContextAttention.on(mesh, options)
        q, k, v, extras = under_autocast(q, k, v, extras)
        check_call(q, k, v, extras, attention.expected)
        resolved = attention.resolve(q, k, v, extras)
    return attention.run(q, k, v, extras, resolved)


def under_autocast(q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> tuple[Tensor, Tensor, Tensor, Extras]:
    """A call's tensors as ``scaled_dot_product_attention`` would take them; ``k_shared`` as k.

    Sinks stay as they are: no rounding of theirs would save anything, and what they are folded into is float32.
    """
    q, k, v, k_shared = as_computed(q, k, v, extras.k_shared)
    return q, k, v, extras._replace(k_shared=k_shared)


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """The options of :func:`context_parallel_attention` that do not change from call to call; attributes are its."""

    is_causal: bool = False
    window_size: tuple[int | None, int | None] | None = None
    prefix_length: int = 0
    mask_mod: MaskMod | BlockMask | None = None
    scale: float | None = None
    softcap: float | None = None
    length: int | None = None
    kv_length: int | None = None
    replicated: int = 0
    order: TokenOrder | None = None
    schedule: str = "2d"
    rotate: str = "auto"
    rotate_forward: str = "auto"
    kernel: str = "auto"

    def check(self) -> None:
        """Refuse (TypeError, ValueError) options that mean nothing, or do not go together."""
        if self.order is not None:
            check_token_order(self.order)
        if not isinstance(self.kernel, str):  # whether there is such a one, ranks ask together, on a mesh
            raise TypeError(f"kernel must be a name, got {self.kernel!r}")
        check_schedule(self.schedule, 1, 1)
        check_rotate(self.rotate, self.rotate_forward, self.schedule)
        check_scale(self.scale)
        if not isinstance(self.is_causal, bool):
            raise TypeError(f"is_causal must be a bool, got {self.is_causal!r}")
        _check_window(self.window_size, self.is_causal)
        for name in ("prefix_length", "replicated"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name} must be an int, got {value!r}")
            if value < 0:
                raise ValueError(f"{name} must be at least 0, got {value}")
        for name in ("length", "kv_length"):
            if getattr(self, name) is not None:
                check_length(getattr(self, name), name)
        if self.softcap is not None:
            check_scale(self.softcap, "softcap")
        if self.mask_mod is not None and not callable(self.mask_mod) and not isinstance(self.mask_mod, BlockMask):
            raise TypeError(f"mask_mod must be a function or a BlockMask, got {type(self.mask_mod).__name__}")
        self._check_together()

    def _check_together(self) -> None:
        has_window = self.window not in ((-1, -1), (-1, 0)) or (self.window == (-1, 0) and not self.is_causal)
        if self.prefix_length and (not self.is_causal or has_window):
            raise ValueError("prefix_length goes with is_causal=True and without window_size")
        named = {"is_causal": self.is_causal, "window_size": has_window, "prefix_length": self.prefix_length}
        masks = [name for name, value in named.items() if value]
        if self.mask_mod is not None and masks:
            raise ValueError(f"mask_mod must say everything by itself, got {', '.join(masks)} as well")
        if self.replicated and (masks or self.mask_mod is not None):
            raise ValueError("replicated tokens have no place in the sequence: they go without any mask")
        if self.kv_length is not None and self.length is None:
            raise ValueError("kv_length is given without length")
        if self.kv_length not in (None, self.length) and self.has_mask:
            raise ValueError("under a mask queries and keys are the same tokens: kv_length must be left out")

    @property
    def has_mask(self) -> bool:
        """Whether not all queries see all keys."""
        return self.is_causal or self.mask_mod is not None or self.window != (-1, -1)

    @property
    def order_name(self) -> str:
        """Of the token order; empty where there is none, which only attention without a mask can do without."""
        return "" if self.order is None else self.order.name

    @property
    def window(self) -> tuple[int, int]:
        """How far back and ahead a query sees, -1 for any distance."""
        left, right = self.window_size or (None, None)
        return -1 if left is None else left, 0 if self.is_causal else -1 if right is None else right


@dataclass(frozen=True, slots=True)
class ContextAttention:
    """Context-parallel attention with its mesh and options resolved: what is left to check is the tensors.

    Attributes:
        mesh: its name, by which ranks compare their calls.
        place: this rank's coordinate.
        device_type: of the mesh.
        ulysses: name of the process group of axis ``cp_ulysses``, or empty.
        ring: name of the ring's process group, or empty.
        team: name of the team's process group, or empty.
        context: name of the ring's and team's common process group, where the schedule uses it.
        context_ranks: for every inner index its rank in ``context``.
        options: the call's.
        mask_key: of the options' mask_mod, 0 for none.
    """

    mesh: str
    place: Coordinate
    device_type: str
    ulysses: str
    ring: str
    team: str
    context: str
    context_ranks: tuple[int, ...]
    options: AttentionOptions
    mask_key: int

    @classmethod
    def on(cls, mesh: DeviceMesh, options: AttentionOptions, *, any_axis: str = "") -> "ContextAttention":
        """Resolve a mesh and options, refusing what does not fit; see :func:`context_parallel_attention`.

        All ranks call it together: the published schedule makes a process group of ring and team.

        Args:
            mesh: the context mesh.
            options: the call's.
            any_axis: ``"cp_ring"`` or ``"cp_ulysses"``: as which a mesh of one axis of any other name is taken.

        Returns:
            The attention.
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
        context, context_ranks = "", ()
        if options.schedule == "published" and place.team > 1:
            # Making a group is done together, so no rank may have refused before.
            agree("attention", [("schedule", "published")], name_of(mesh))
            context, context_ranks = whole_context_group(mesh)
        return cls(
            name_of(mesh), place, mesh.device_type, groups.ulysses, groups.ring, groups.team, context, context_ranks,
            options, mask_key(options.mask_mod),
        )  # fmt: skip

    @property
    def expected(self) -> Expected:
        """What a call's tensors are checked against."""
        options = self.options
        return Expected(
            self.mesh, self.ulysses, self.ring, self.team, self.device_type, self.place.axes, self.place.index,
            self._lengths, options.replicated, options.has_mask, options.mask_mod is not None,
            options.mask_mod is None and not options.prefix_length and not options.replicated
            and options.kv_length in (None, options.length),
            options.order_name, options.softcap or 0.0, options.kernel,
        )  # fmt: skip

    def _check_lasts(self, what: str) -> None:
        """Refuse (ValueError) what has no meaning in another process."""
        if self.context:
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
        groups = self.ulysses, self.ring, self.team
        return _unpickled, (lasting(self.mesh), self.place, self.device_type, groups, self.options)

    def with_mask(self, mask_mod: MaskMod | BlockMask) -> "ContextAttention":
        """The same attention under an arbitrary mask, which a call brings with it."""
        options = replace(self.options, mask_mod=mask_mod)
        options.check()
        check_order_is_told(options.order, self.place.size)
        return replace(self, options=options, mask_key=mask_key(mask_mod))

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, extras: Extras = NO_EXTRAS, scale: float | None = None
    ) -> Tensor:
        """Attention on tensors that have been checked; ``scale``, checked as well, goes before one's own."""
        return self.run(q, k, v, extras, self.resolve(q, k, v, extras, scale))

    def resolve(self, q: Tensor, k: Tensor, v: Tensor, extras: Extras, scale: float | None = None) -> Options:
        """The operator's options for tensors that have been checked; asks a ``mask_mod``, which may raise anything."""
        documents = "ids" if extras.document_ids is not None else "cu_seqlens" if extras.cu_seqlens is not None else ""
        return self._options(q, k, v, extras, documents, scale)

    def run(self, q: Tensor, k: Tensor, v: Tensor, extras: Extras, options: Options) -> Tensor:
        """Call the operator."""
        documents = extras.cu_seqlens if extras.document_ids is None else extras.document_ids
        if documents is not None:
            documents = sharding.replicate(documents if documents.ndim == 2 else documents.unsqueeze(0), q)
        out, _, _ = torch.ops.wallfacer_dt.attention(q, k, v, extras.k_shared, extras.sinks, documents, *options.told())
        return out

    @property
    def _lengths(self) -> tuple[int, ...]:
        length, kv_length = self.options.length, self.options.kv_length
        return () if length is None else (length, length if kv_length is None else kv_length)

    def _options(self, q: Tensor, k: Tensor, v: Tensor, extras: Extras, documents: str, scale: float | None) -> Options:
        options, place = self.options, self.place
        if torch.compiler.is_exporting():
            self._check_lasts("an exported program")
            if self.mask_key:
                raise ValueError(
                    "mask_mod's answers do not go into an exported program: use is_causal, window_size or document_ids"
                )
        scale = options.scale if scale is None else scale
        # A compiler may take any size for a symbol, which int() leaves it; heads and their size are the model's.
        heads, kv_heads, head_dim, value_dim = map(index, (q.shape[1], k.shape[1], q.shape[-1], v.shape[-1]))
        lengths = self._lengths
        if isinstance(q, DTensor) and (q.shape[2] % place.size or k.shape[2] % place.size):
            lengths = (index(q.shape[2]), index(k.shape[2]))
        forward, backward = resolve_rotations(
            options.rotate, options.rotate_forward, options.schedule, index(place.ring), index(place.team),
            heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=q.dtype, ulysses=index(place.ulysses),
            value_dim=value_dim, shared_dim=0 if extras.k_shared is None else int(extras.k_shared.shape[-1]),
            lengths=self._ratio(q, k, lengths),
        )  # fmt: skip
        return Options(
            1 / math.sqrt(head_dim) if scale is None else float(scale),
            float(options.softcap or 0.0),
            (place.ring, place.team, place.ring_rank, place.team_rank, place.ulysses, place.ulysses_rank),
            self.ulysses,
            self.ring,
            self.team,
            self.context,
            self.context_ranks,
            lasting(self.mesh) if torch.compiler.is_exporting() else self.mesh,
            lengths,
            options.replicated,
            options.is_causal,
            options.window,
            options.prefix_length,
            self._mask_name(q, k, lengths),
            # Eager code has just asked.
            self.mask_key if torch.compiler.is_compiling() else 0,
            documents,
            options.order_name or "contiguous",
            options.schedule,
            backward,
            forward,
            options.kernel,
            CODE,
            needs_gradient(q, k, v, extras.k_shared, extras.sinks),
        )

    def _ratio(self, q: Tensor, k: Tensor, lengths: tuple[int, ...]) -> tuple[int, int]:
        """Queries and keys, as far as they matter for which of them to move: not at all where they are as many."""
        if self.options.has_mask or (not lengths and q.shape[2] == k.shape[2]):
            return 1, 1
        replicated = self.options.replicated
        return (lengths[0], lengths[1]) if lengths else (index(q.shape[2]) - replicated, index(k.shape[2]) - replicated)

    def _mask_name(self, q: Tensor, k: Tensor, lengths: tuple[int, ...]) -> str:
        if not self.mask_key:
            return ""
        distributed = isinstance(q, DTensor)
        q_length, k_length = lengths or (
            index(q.shape[2]) * (1 if distributed else self.place.size),
            index(k.shape[2]) * (1 if distributed else self.place.size),
        )
        sharded = sharding.sharded_dims(q) if isinstance(q, DTensor) else ()
        return mask_name(
            self.mask_key, index(q.shape[0]), index(q.shape[1]), q_length, k_length, q.device.type,
            by_row=sharding.BATCH not in sharded, by_head=sharding.HEADS not in sharded,
        )  # fmt: skip


def _unpickled(
    mesh: str, place: Coordinate, device_type: str, groups: tuple[str, str, str], options: AttentionOptions
) -> ContextAttention:
    """What was pickled, or a refusal (ValueError) where there is no such mesh."""
    try:
        here = groups_here(mesh, place, groups)
    except ValueError as error:
        raise ValueError(f"{error}; or load the module's state_dict() into one that has been styled here") from error
    return ContextAttention(named(mesh).name, place, device_type, *here, "", (), options, mask_key(options.mask_mod))


def _check_window(window: Any, is_causal: bool) -> None:
    if window is None:
        return
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise TypeError(f"window_size must be a pair (left, right), got {window!r}")
    for n in window:
        if n is not None and (not isinstance(n, int) or isinstance(n, bool)):
            raise TypeError(f"window_size must be a pair of ints or None, got {window!r}")
        if n is not None and n < -1:
            raise ValueError(f"window_size must be at least 0, or -1 for no bound, got {window!r}")
    if is_causal and window[1] not in (None, -1, 0):
        raise ValueError(f"is_causal=True sees no later keys, got window_size={window!r}")


def check_scale(scale: float | None, name: str = "scale") -> None:
    """Refuse (TypeError, ValueError) a factor that is no finite number above 0."""
    # A tensor may want a gradient, which it would not get.
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, int | float)):
        raise TypeError(f"{name} must be a float or None, got {scale!r}")
    if scale is not None and not 0 < scale < math.inf:
        # A compiler may take it for a symbol, which has no text.
        raise ValueError(f"{name} must be finite and above 0, got {float(scale)}")
