"""Context-parallel inner attention for torchtitan's main branch: a class for its ``ContextParallelTransform``.

Run on stand-ins with that interface alone. Shape suffixes are torchtitan's: T = tokens of one packed sequence, of which
a rank has its part, H = heads, K and V = their dims.
"""

from dataclasses import dataclass
from typing import Any, Literal, Unpack

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from wallfacer_dt.agreement.agree import refusing_together
from wallfacer_dt.agreement.worlds import this_world
from wallfacer_dt.attention import context_parallel_attention
from wallfacer_dt.compiler import untraced
from wallfacer_dt.integrations.torchtitan import main_branch
from wallfacer_dt.integrations.torchtitan.documents import Documents
from wallfacer_dt.integrations.torchtitan.sinks import sinks_of
from wallfacer_dt.layout import check_length
from wallfacer_dt.mesh import name_of, split_context_axis
from wallfacer_dt.options import WayKeywords, ways_of
from wallfacer_dt.order import TokenOrder
from wallfacer_dt.sequence import sequence_positions

_WINDOWS = {"VarlenInnerAttention": "pair", "SlidingWindowFlexInnerAttention": "tokens", "FlexInnerAttention": ""}


def context_attention(
    inner: type,
    *,
    ulysses: int = 1,
    team: int = 1,
    order: Literal["contiguous", "head_tail"] = "contiguous",
    **options: Unpack[WayKeywords],
) -> type:
    """A class to put in an inner attention's place: ``ContextParallelTransform(inner_attention_map={inner: it})``.

    Args:
        inner: ``VarlenInnerAttention``, ``FlexInnerAttention`` or ``SlidingWindowFlexInnerAttention``.
        ulysses: ranks of the axis ``cp`` that split the heads.
        team: ranks in a team.
        order: in which torchtitan deals tokens out: its load balancer's permutation is compared with it at every batch.
        **options: ``schedule``, ``rotate``, ``rotate_forward`` and ``kernel``, as
            :class:`wallfacer_dt.AttentionOptions` has them.

    Returns:
        A subclass of ``inner`` and of torchtitan's base class of context parallelism, with a ``Config``.

    Raises:
        ValueError: another inner attention, or order.
    """
    if inner.__name__ not in _WINDOWS:
        raise ValueError(f"inner must be one of {', '.join(_WINDOWS)} of torchtitan, got {inner.__name__}")
    if order not in ("contiguous", "head_tail"):
        raise ValueError(f"order must be contiguous or head_tail, which torchtitan deals out, got {order!r}")
    check_length(ulysses, "ulysses")
    check_length(team, "team")
    ways = ways_of("context_attention", options, own=("ulysses", "team", "order"))
    base = main_branch.base_class()
    meshes = _Meshes(ulysses, team, order)

    class ContextInnerAttention(base, inner):  # pyrefly: ignore[invalid-inheritance]
        """Attention on the current mesh's axis ``cp``."""

        @dataclass(kw_only=True, slots=True)
        class Config(base.Config, inner.Config):  # pyrefly: ignore[invalid-inheritance]
            """The inner attention's, which makes no masks."""

            def build_attention_metadata(self, positions: Tensor, **_: Any) -> Documents:
                """Documents, of the positions (T,) of the whole sequence."""
                return Documents.of(positions.unsqueeze(0))

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.window = _window_of(inner, config)

        @staticmethod
        def prepare_cp_metadata(attention_metadata: Documents, *, permutation: Tensor | None) -> Documents:
            """The same, if tokens are dealt out as attention is told; refused (ValueError) on every rank if not."""
            meshes.check_permutation(attention_metadata, permutation)
            return attention_metadata

        @untraced("it looks process groups up")
        def forward(
            self,
            q_THK: Tensor,
            k_THK: Tensor,
            v_THV: Tensor,
            *,
            attention_metadata: Documents,
            scale: float | None = None,
            enable_gqa: bool = False,  # noqa: ARG002  heads are counted
            out_transform: Any = None,
            **others: Any,
        ) -> Tensor:
            """Attention on this rank's tokens."""
            mesh, token_order = meshes.current()
            with refusing_together(name_of(mesh)):
                sinks = _check_call(attention_metadata, out_transform, others)
            q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q_THK, k_THK, v_THV))
            out = context_parallel_attention(
                q, k, v, mesh, document_ids=attention_metadata.ids, sinks=sinks, is_causal=True,
                window_size=self.window, scale=scale, order=token_order, **ways,
            )  # fmt: skip
            return out.squeeze(0).transpose(0, 1)

    ContextInnerAttention.__name__ = ContextInnerAttention.__qualname__ = f"Context{inner.__name__}"
    return ContextInnerAttention


class _Meshes:
    """The context meshes of the meshes that have been current, each made once."""

    def __init__(self, ulysses: int, team: int, order: str) -> None:
        self.ulysses, self.team, self.order = ulysses, team, order
        self.known: dict[tuple[DeviceMesh, int], tuple[DeviceMesh, TokenOrder]] = {}

    def current(self) -> tuple[DeviceMesh, TokenOrder]:
        cp = main_branch.current_mesh()
        key = cp, world.number if (world := this_world()) else 0  # a mesh like it of another world is equal to it
        if key not in self.known:
            size = self.ulysses * self.team
            if cp.size() % size:
                raise ValueError(f"ulysses * team = {size} does not divide the {cp.size()} ranks of the axis cp")
            placement = "ulysses_in_node" if self.order == "head_tail" else "team_in_node"
            mesh = split_context_axis(cp, cp.size() // size, self.team, ulysses=self.ulysses, placement=placement)
            self.known[key] = mesh, TokenOrder(self.order, mesh)
        return self.known[key]

    def check_permutation(self, documents: Any, permutation: Tensor | None) -> None:
        mesh, order = self.current()
        with refusing_together(name_of(mesh)):
            if not isinstance(documents, Documents):
                raise ValueError(f"expected Documents, which this class's Config makes, got {type(documents).__name__}")
            length = documents.ids.shape[1]
            cp = main_branch.current_mesh()
            if length % cp.size():
                raise ValueError(
                    f"the {cp.size()} ranks of the axis cp do not divide sequences of {length} tokens, of which "
                    "torchtitan's models need equal shards: pad or cut them to a multiple"
                )
            dealt = torch.arange(length) if permutation is None else permutation.reshape(-1).cpu()
            mine = dealt.view(cp.size(), -1)[cp.get_local_rank()] if len(dealt) == length else dealt[:0]
            if not torch.equal(mine, sequence_positions(length, order).cpu()):
                raise ValueError(f"torchtitan deals tokens out in another order than {order.name!r}: set order")


def _window_of(inner: type, config: Any) -> tuple[int, int] | None:
    kind = _WINDOWS[inner.__name__]
    if not kind:
        return None
    left, right = config.window_size if kind == "pair" else (config.window_size - 1, 0)
    if right != 0:
        raise ValueError(f"window_size={config.window_size} is not causal")
    return None if left < 0 else (left, 0)


def _check_call(documents: Any, out_transform: Any, others: dict[str, Any]) -> Tensor | None:
    """The sinks; what is not implemented is refused (ValueError)."""
    if not isinstance(documents, Documents):
        raise ValueError(f"attention_metadata must be Documents, got {type(documents).__name__}")
    if asked := [name for name, value in others.items() if value is not None]:
        raise ValueError(f"attention was called with {', '.join(asked)}, which is not implemented")
    sinks = None if out_transform is None else sinks_of(out_transform)
    if out_transform is not None and sinks is None:
        raise ValueError("of functions given as out_transform only GPT-OSS's sinks are known")
    return sinks
