"""Context-parallel attention on shards: its options on a mesh, and the call of the operator."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from wallfacer_dt.algorithms import check_rotate, resolve_rotate
from wallfacer_dt.kernels import check_kernel
from wallfacer_dt.layout import check_order
from wallfacer_dt.mesh import Coordinate, bind_order, context_groups, whole_context_group
from wallfacer_dt.ops import CODE, Options
from wallfacer_dt.refusal import Expected, check_tensors, refusing_together


@torch.compiler.disable(reason="it looks process groups up; in a compiled model use a style")
def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mesh: DeviceMesh,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    order: str = "contiguous",
    schedule: str = "2d",
    rotate: str = "auto",
    kernel: str = "auto",
) -> Tensor:
    """Attention over a sequence sharded on a context mesh. Differentiable.

    Every rank passes its shard and gets its shard of what ``scaled_dot_product_attention`` would return for the whole
    sequence. ``team=1`` is Ring Attention (Liu et al., section 3); ``team>1`` is WallFacer (sections 3.2 and 3.3)
    with the 2D schedule or as published; ``ring=1`` gathers and does not hop. All ranks of the mesh must call it
    together, with shards of equal shape: plain tensors, or DTensors on a mesh that contains the context mesh's axes,
    the sequence sharded on these and batch or heads, or nothing, on others.

    Args:
        q: queries (B, N, L, H), L = sequence / P tokens of this rank (as a DTensor: the whole sequence).
        k: keys (B, Nkv, L, H); Nkv divides N (grouped-query attention; heads are never expanded to be sent).
        v: values (B, Nkv, L, H).
        mesh: axes ``("cp_ring", "cp_team")``, or ``("cp_ring",)``; for DTensors a slice of theirs.
        is_causal: a query sees the keys up to its own position.
        scale: factor of the scores; 1 / sqrt(H) by default.
        order: in which order tokens were dealt out, see :func:`wallfacer_dt.shard_sequence`; ``"head_tail"`` balances
            causal attention. Causal attention binds the mesh to it.
        schedule: ``"2d"``, or ``"published"`` for WallFacer's Algorithms 1 to 3 (team * team must divide P).
        rotate: which side moves round the ring in the backward: ``"kv"``, ``"q"``, or ``"auto"`` for the fewest bytes
            (see :func:`wallfacer_dt.attention_volume`).
        kernel: ``"flash"``, ``"reference"`` or ``"auto"`` (flash); where flash cannot run, this is refused.

    Returns:
        The output (B, N, L, H), in q's dtype: this rank's, or for DTensors one with q's placements (q, k and v are
        redistributed where a placement allows it, k and v to q's).

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: a mesh, shapes, placements or options that do not fit, or that differ between ranks; raised on
            every rank before any tensor is sent.
        NotImplementedError: forward-mode differentiation.
    """
    attention = ContextAttention.on(
        mesh,
        is_causal=is_causal,
        scale=scale,
        order=order,
        schedule=schedule,
        rotate=rotate,
        kernel=kernel,
    )
    expected = attention.expected
    with refusing_together(expected):
        check_tensors(q, k, v, expected)
        if is_causal:
            bind_order(mesh, order, "causal attention")
    return attention(q, k, v)


@dataclass(frozen=True, slots=True)
class ContextAttention:
    """Context-parallel attention with its mesh and options resolved: what is left to check is the tensors.

    Attributes are those of :func:`context_parallel_attention`; groups by name.
    """

    place: Coordinate
    device_type: str
    ring: str
    team: str
    context: str
    context_ranks: tuple[int, ...]
    is_causal: bool
    scale: float | None
    order: str
    schedule: str
    rotate: str
    kernel: str

    @classmethod
    def on(
        cls,
        mesh: DeviceMesh,
        *,
        is_causal: bool,
        scale: float | None,
        order: str,
        schedule: str,
        rotate: str,
        kernel: str,
        any_axis: bool = False,
    ) -> "ContextAttention":
        """Resolve a mesh and options, refusing what does not fit; see :func:`context_parallel_attention`.

        All ranks call it together: the published schedule makes a process group of both axes. Arguments are those of
        :func:`context_parallel_attention`; ``any_axis`` also takes a mesh of one axis of any name.
        """
        groups = context_groups(mesh, any_axis=any_axis)
        place = groups.coordinate
        check_order(order)
        if not isinstance(is_causal, bool):
            raise TypeError(f"is_causal must be a bool, got {is_causal!r}")
        check_scale(scale)
        check_kernel(kernel)
        check_rotate(rotate, schedule, place.ring, place.team)
        context, context_ranks = "", ()
        if schedule == "published" and place.team > 1:
            context, context_ranks = whole_context_group(mesh)
        return cls(
            place, mesh.device_type, groups.ring.group_name, groups.team_name, context, context_ranks,
            is_causal, scale, order, schedule, rotate, kernel,
        )  # fmt: skip

    @property
    def expected(self) -> Expected:
        """What q, k and v are checked against."""
        return Expected(self.device_type, self.place.size, self.order, self.kernel, self.ring, self.team)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
        """Attention on tensors that have been checked; ``scale``, checked as well, goes before one's own."""
        scale = self.scale if scale is None else scale
        place = self.place
        # A compiler may take any size for a symbol; heads and their size are the model's.
        heads, kv_heads, head_dim = int(q.shape[1]), int(k.shape[1]), int(q.shape[-1])
        rotate = resolve_rotate(
            self.rotate, self.schedule, place.ring, place.team,
            heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=q.dtype,
        )  # fmt: skip
        options = Options(
            (place.ring, place.team, place.ring_rank, place.team_rank),
            self.ring,
            self.team,
            self.context,
            self.context_ranks,
            self.is_causal,
            1 / math.sqrt(head_dim) if scale is None else float(scale),
            self.order,
            self.schedule,
            rotate,
            self.kernel,
            CODE,
        )
        out, _ = torch.ops.wallfacer_dt.attention(q, k, v, *options)
        return out


def check_scale(scale: float | None) -> None:
    """Refuse (TypeError, ValueError) a scale that is no finite number above 0."""
    # A tensor may want a gradient, which it would not get.
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, int | float)):
        raise TypeError(f"scale must be a float or None, got {scale!r}")
    if scale is not None and not 0 < scale < math.inf:
        raise ValueError(f"scale must be finite and above 0, got {scale}")
