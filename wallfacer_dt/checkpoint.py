"""Activation checkpointing that never reruns a ring: WallFacer's checkpoint placement (section 3.6).

A checkpointed block is computed again in the backward, and with it every hop of its attention. Attention's backward
needs q, k, v and its own output; q, k and v are cheap to compute again, the output is not. So the output is kept, as
many elements a layer as q, with its log-sum-exp. Of METP's attention its result is kept as well. METP's feed-forward
needs nothing of its own, so under a checkpoint it runs again, as any other does.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from wallfacer_dt import metp, ops  # noqa: F401  they register the operators

ATTENTION_SAVE_OPS: frozenset[OpOverload] = frozenset(
    {torch.ops.wallfacer_dt.attention.default, torch.ops.wallfacer_dt.metp_attention.default}
)
"""The operators whose outputs selective checkpointing must save, for save lists such as torchtitan's."""

Policy = Callable[..., CheckpointPolicy | bool]


def save_attention(
    policy: Policy | Sequence[OpOverload] | None = None,
) -> Callable[[], tuple[AbstractContextManager, AbstractContextManager]]:
    """A ``context_fn`` for checkpoints whose recomputation skips attention.

    ``checkpoint(block, x, use_reentrant=False, context_fn=save_attention())`` computes everything else of the block
    again (full activation checkpointing), eager and compiled.

    Args:
        policy: what to do with other operators: a policy or a list of operators to save, as
            ``torch.utils.checkpoint.create_selective_checkpoint_contexts`` takes it; None recomputes them all.

    Returns:
        The argument ``context_fn`` of ``torch.utils.checkpoint.checkpoint``, which needs ``use_reentrant=False``.

    Raises:
        ValueError: something in the list is no operator, as ``torch.ops.aten.mm`` without ``.default``.
    """
    if policy is not None and not callable(policy):
        policy = [*policy]
        for op in policy:  # as torch looks at a list of its own
            if not isinstance(op, OpOverload | HigherOrderOperator):
                raise ValueError(f"policy must list operators such as torch.ops.aten.mm.default, got {op!r}")
    return partial(create_selective_checkpoint_contexts, partial(_decide, policy))


def _decide(
    policy: Policy | Sequence[OpOverload] | None, ctx: Any, op: OpOverload, *args: Any, **kwargs: Any
) -> CheckpointPolicy | bool:
    if op in ATTENTION_SAVE_OPS:
        return CheckpointPolicy.MUST_SAVE
    if callable(policy):
        return policy(ctx, op, *args, **kwargs)
    return CheckpointPolicy.MUST_SAVE if op in (policy or ()) else CheckpointPolicy.PREFER_RECOMPUTE
