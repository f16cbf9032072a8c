"""The bytes that attention, and METP, received in a step on every rank, beside those of the formulas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from recipes.training.ranks import Ranks
from recipes.training.record import Traffic
from recipes.training.settings import RunSettings
from wallfacer_dt import attention_volume, feed_forward_volume, metp_attention_volume
from wallfacer_dt.agreement.progress import Waiting
from wallfacer_dt.mesh import context_groups
from wallfacer_dt.testing import Received, count_collectives

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class LayerSizes:
    """Sizes of a model whose layers are alike.

    `length` is of its sequences, in tokens; `hidden_dim` of feed-forwards, of whose projections to the hidden `biases`
    have a bias.
    """

    layers: int
    length: int
    dim: int
    heads: int
    kv_heads: int
    hidden_dim: int
    gated: bool
    biases: int

    @property
    def head_dim(self) -> int:
        """Elements of one attention head."""
        return self.dim // self.heads


def counted(
    step: Callable[[], T], settings: RunSettings, sizes: LayerSizes, ranks: Ranks
) -> tuple[T, tuple[Traffic, Traffic] | tuple[None, None]]:
    """A step's result, and what it received forward and backward; None where no sequence is shared."""
    if ranks.context is None:
        return step(), (None, None)
    with count_collectives(ranks.context) as traffic:
        result = step()
    forward, backward = _layer_bytes(settings, sizes, ranks, ranks.context)
    # Of every layer attention and, as METP, the feed-forward.
    calls = sizes.layers * (2 if "ffn" in settings.metp else 1)
    return result, (
        _gather(traffic.forward, forward, calls, sizes.layers),
        _gather(traffic.backward, backward, calls, sizes.layers),
    )


def _layer_bytes(settings: RunSettings, sizes: LayerSizes, ranks: Ranks, context: DeviceMesh) -> tuple[int, int]:
    """What this rank should receive in one layer, forward and backward."""
    volume_of = partial(attention_volume, ulysses=ranks.ulysses)
    if "attention" in settings.metp:
        volume_of = partial(metp_attention_volume, model_dim=sizes.dim)
    attention = volume_of(
        ranks.ring,
        ranks.team,
        batch=settings.batch,
        length=sizes.length,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        dtype=ranks.dtype,
        schedule=settings.schedule,
        rotate=settings.rotate,
        rotate_forward=settings.rotate_forward,
        index=context_groups(context).coordinate.index,
    )
    forward, backward = attention.forward.bytes, attention.backward.bytes
    if "ffn" in settings.metp:
        weights = feed_forward_volume(
            tuple(context.shape),
            model_dim=sizes.dim,
            hidden=sizes.hidden_dim,
            dtype=ranks.dtype,
            gated=sizes.gated,
            biases=sizes.biases,
        )
        forward, backward = forward + weights[0].bytes, backward + weights[1].bytes
    return forward, backward


def _gather(received: Received, formula: int, calls: int, layers: int) -> Traffic:
    counts: list[tuple[int, int, int]] = [(0, 0, 0)] * dist.get_world_size()
    with Waiting("all_gather of bytes that were counted"):
        dist.all_gather_object(counts, (received.received_bytes, received.calls, formula))
    received_by_rank, calls_by_rank, formula_by_rank = zip(*counts, strict=True)
    return Traffic(
        received=received_by_rank, calls=calls_by_rank, expected_calls=calls, layers=layers, formula=formula_by_rank
    )
