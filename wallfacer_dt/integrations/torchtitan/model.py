"""A torchtitan model on a mesh, in one call, with a guard against calls that would be silently wrong."""

import inspect
import warnings
from dataclasses import dataclass
from typing import Any, Unpack

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from wallfacer_dt.agreement.agree import refusing_together
from wallfacer_dt.compiler import untraced
from wallfacer_dt.integrations.torchtitan import upstream
from wallfacer_dt.integrations.torchtitan.plan import PlanOptions, context_plan
from wallfacer_dt.integrations.torchtitan.positions import check_positions
from wallfacer_dt.mesh import name_of
from wallfacer_dt.order import TokenOrder


def context_parallel(
    model: nn.Module, mesh: DeviceMesh, *, order: TokenOrder, **options: Unpack[PlanOptions]
) -> nn.Module:
    """Replace a torchtitan model's attention by context-parallel attention, in place; all ranks call it together.

    It applies :func:`context_plan`. A decoder then refuses, on every rank, to be called without ``positions``, which it
    would count from each shard's beginning, or with others than this rank's; it makes no masks of its own any more:
    hand it ``attention_masks=Documents.of(positions)`` of the whole sequences.

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
        check = _BeforeForward(order, tuple(inspect.signature(model.forward).parameters))
        model.register_forward_pre_hook(check, with_kwargs=True)
    return model


def _no_masks(positions: Tensor) -> None:
    """Of a part of the sequence, or cut by torchtitan, its masks have no meaning for attention on a mesh."""


_RESTARTED = (
    "positions restart at 0 wherever a rank's part of a sequence begins, as they do if each rank counts for itself: "
    "pass this rank's part of the whole sequence's; where documents do begin there, use FlexAttention or "
    "VarlenAttention, which are told so by Documents"
)


@dataclass(slots=True)
class _BeforeForward:
    """A decoder's forward pre-hook: plain data, so that it is copied and pickled with the model."""

    order: TokenOrder
    names: tuple[str, ...]  # of the forward's positional arguments
    restarted: bool = False  # whether in the forward before positions began at 0 wherever a rank's part does

    @untraced("ranks compare what they were called with; compile layers, as torchtitan does")
    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse on every rank, before FSDP's next all-gather, what one was given and is not its part of a sequence."""
        given = dict(zip(self.names, args, strict=False)) | kwargs
        with refusing_together(self.order.mesh_name):
            told = given.get(self.names[0]), given.get("positions"), given.get("attention_masks")
            before, self.restarted = self.restarted, check_positions(model, self.order, *told)
            if self.restarted and before:
                raise ValueError(_RESTARTED)
            if self.restarted:
                warnings.warn(f"{_RESTARTED}; if the next forward's do, too, they are refused", stacklevel=2)
