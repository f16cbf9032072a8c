"""Plans for ``parallelize_module``: which modules of known models a style replaces. The models are not imported."""

from torch.distributed.tensor.parallel import ParallelStyle

from wallfacer_dt.order import TokenOrder
from wallfacer_dt.styles import WallFacerParallel


def llama3_plan(
    *,
    order: TokenOrder,
    schedule: str = "2d",
    rotate: str = "auto",
    rotate_forward: str = "auto",
    kernel: str = "auto",
    check: bool = True,
) -> dict[str, ParallelStyle]:
    """Context-parallel attention for torchtitan's Llama 3, on a mesh of axes ``("cp_ring", "cp_team")``.

    Apply it before the model's own tensor parallelism, activation checkpointing, compilation and FSDP. A mesh with a
    team of one makes it Ring Attention. The model's inner attention must be ``ScaledDotProductAttention``; masks of the
    others are refused when they arrive. Torchtitan's load balancer ``"headtail"`` deals tokens out in ``"head_tail"``,
    its ``None`` in ``"contiguous"``; with Ulysses the mesh must deal to the same ranks in turn, see
    :func:`wallfacer_dt.split_context_axis`.

    Args:
        order: in which the loader deals out tokens.
        schedule: ``"2d"``, ``"rings"`` (the same for teams on slow links), or ``"published"`` for WallFacer's
            Algorithms 1 to 3.
        rotate: which side moves round the ring in the backward, ``"kv"``, ``"q"`` or ``"auto"``.
        rotate_forward: the same for the forward.
        kernel: ``"auto"``, or the name of one, see docs/kernels.md.
        check: compare each inner attention with the style first, see :func:`wallfacer_dt.check_equivalence`.

    Returns:
        ``{fully qualified name: style}``.
    """
    style = WallFacerParallel(
        is_causal=True,
        order=order,
        schedule=schedule,
        rotate=rotate,
        rotate_forward=rotate_forward,
        kernel=kernel,
        layout="BLNH",
        check=check,
    )
    return {"layers.*.attention.inner_attention": style}
