"""Plans for ``parallelize_module``: which modules of known models a style replaces. The models are not imported."""

from typing import Unpack

from torch.distributed.tensor.parallel import ParallelStyle

from wallfacer_dt.options import NOT_WAYS, WayKeywords, ways_of, with_options
from wallfacer_dt.order import TokenOrder
from wallfacer_dt.styles import WallFacerParallel


def llama3_plan(*, order: TokenOrder, check: bool = True, **options: Unpack[WayKeywords]) -> dict[str, ParallelStyle]:
    """Context-parallel attention for torchtitan's Llama 3, on a mesh of axes ``("cp_ring", "cp_team")``.

    Apply it before the model's own tensor parallelism, activation checkpointing, compilation and FSDP. A mesh with a
    team of one makes it Ring Attention. The model's inner attention must be ``ScaledDotProductAttention``; masks of the
    others are refused when they arrive. Torchtitan's load balancer ``"headtail"`` deals tokens out in ``"head_tail"``,
    its ``None`` in ``"contiguous"``; with Ulysses the mesh must deal to the same ranks in turn, see
    :func:`wallfacer_dt.split_context_axis`.

    Args:
        order: in which the loader deals out tokens.
        check: compare each inner attention with the style first, see :func:`wallfacer_dt.check_equivalence`.
        **options: ``schedule``, ``rotate``, ``rotate_forward`` and ``kernel``, as
            :class:`wallfacer_dt.AttentionOptions` has them.

    Returns:
        ``{fully qualified name: style}``.
    """
    ways = ways_of("llama3_plan", options, own=("order", "check"))
    style = WallFacerParallel(is_causal=True, order=order, layout="BLNH", check=check, **ways)
    return {"layers.*.attention.inner_attention": style}


llama3_plan.__signature__ = with_options(llama3_plan, NOT_WAYS)  # pyrefly: ignore[missing-attribute]
