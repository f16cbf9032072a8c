"""A torchtitan model on a mesh, in one call, with a guard against calls that would be silently wrong."""

from functools import partial
from typing import Any, Unpack

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from wallfacer_dt.agreement.agree import refusing_together, tell
from wallfacer_dt.integrations.torchtitan import upstream
from wallfacer_dt.integrations.torchtitan.documents import Documents
from wallfacer_dt.integrations.torchtitan.plan import PlanOptions, context_plan
from wallfacer_dt.layout import shard_sizes
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
        check = partial(_check_call, order=order, length=options.get("length"), mesh=name_of(mesh))
        model.register_forward_pre_hook(check, with_kwargs=True)
    return model


def _no_masks(positions: Tensor) -> None:
    """Of a part of the sequence, or cut by torchtitan, its masks have no meaning for attention on a mesh."""


def _check_call(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    order: TokenOrder,
    length: int | None,
    mesh: str,
) -> None:
    """Refuse (ValueError), on every rank, a call whose parts are not of the same tokens."""
    try:
        positions = kwargs.get("positions", args[1] if len(args) > 1 else None)
        if positions is None:
            raise ValueError(
                f"{type(model).__name__} was called without positions, which it would count from each shard's "
                "beginning: pass this rank's, of the whole sequence"
            )
        tokens = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
        if tokens is None:
            return
        rows, here = tokens.shape[:2]
        if positions.shape[-1] != here:
            raise ValueError(f"positions are of {positions.shape[-1]} tokens, this rank has {here}: pass this rank's")
        documents = next((x for x in (*args, *kwargs.values()) if isinstance(x, Documents)), None)
        if documents is not None:
            _check_documents(documents, rows, here, order, length)
    except ValueError as error:
        tell(error, mesh)
        raise


def _check_documents(documents: Documents, rows: int, here: int, order: TokenOrder, length: int | None) -> None:
    of, tokens = documents.ids.shape
    if of != rows:
        raise ValueError(f"Documents are of {of} sequences, the batch has {rows}: make them of this batch's positions")
    sizes = shard_sizes(tokens, order.axes, order.name)
    if length is None and len({*sizes}) > 1:
        raise ValueError(
            f"sequences of {tokens} tokens are dealt out as {sizes}: give context_parallel length={tokens}, or a "
            f"length that {len(sizes)} ranks divide"
        )
    if here not in sizes:
        raise ValueError(
            f"Documents are of sequences of {tokens} tokens, of which ranks have {sizes}, this one has {here}: make "
            "them of the whole sequences' positions"
        )
