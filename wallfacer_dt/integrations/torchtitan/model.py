"""A torchtitan model on a mesh, in one call, with a guard against calls that would be silently wrong."""

from typing import Any, Unpack

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from wallfacer_dt.agreement.agree import refusing_together
from wallfacer_dt.integrations.torchtitan import upstream
from wallfacer_dt.integrations.torchtitan.plan import PlanOptions, context_plan
from wallfacer_dt.mesh import name_of
from wallfacer_dt.order import TokenOrder


def context_parallel(
    model: nn.Module, mesh: DeviceMesh, *, order: TokenOrder, **options: Unpack[PlanOptions]
) -> nn.Module:
    """Replace a torchtitan model's attention by context-parallel attention, in place; all ranks call it together.

    It applies :func:`context_plan`. A decoder then refuses to be called without ``positions``, which it would count
    from each shard's beginning, and makes no masks of its own any more: hand it
    ``attention_masks=Documents.of(positions)`` of the whole sequences.

    Args:
        model: of torchtitan, or a pipeline stage's part of one; before its own ``parallelize()``.
        mesh: that :func:`wallfacer_dt.context_mesh` or :func:`wallfacer_dt.split_context_axis` has made.
        order: in which tokens are dealt out.
        **options: see :func:`context_plan`.

    Returns:
        The model.

    Raises:
        ValueError: on every rank: the model or mesh is refused.
    """
    with refusing_together(name_of(mesh)):
        plan = context_plan(model, order=order, **options)
    parallelize_module(model, mesh, plan)
    if isinstance(model, upstream.Decoder):
        model.get_attention_masks = _no_masks  # pyrefly: ignore[missing-attribute]
        model.register_forward_pre_hook(_check_positions, with_kwargs=True)
    return model


def _no_masks(positions: Tensor) -> None:
    """Of a part of the sequence, or cut by torchtitan, its masks have no meaning for attention on a mesh."""


def _check_positions(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if kwargs.get("positions", args[1] if len(args) > 1 else None) is None:
        raise ValueError(
            f"{type(model).__name__} was called without positions, which it would count from each shard's beginning: "
            "pass this rank's, of the whole sequence"
        )
