"""What FSDP2 sends beside each layer of a stack, and what it copies; and sums of microbatches' gradients. Pure numbers.

Note [What FSDP sends, and when]
Embedding, layers, and the last norm with the output projection are a group of weights each, as in torchtitan
(``torchtitan.distributed.fsdp``). While a group computes, the weights of the next one come, and the gradients of the
one before are reduced; those of replicas are taken to begin a group later, since they have to wait for what a
reduce-scatter leaves (Zhao et al. 2023, section 3.3.2). The output projection stays whole between forward and backward,
which the last layer's weights come under; the embedding is gathered for its backward, too, which needs it not. Without
a vocabulary a layer is one of many alike.

Whole weights are copied out of the buffer in which they come, and gradients into the one from which they are reduced,
in the accumulation dtype. Both wait for what computes, and it for them; what a rank copies of its own shard does not.

Under a pipeline weights come once in a step, whole gradients are added up in the accumulation dtype, and reduced after
the last microbatch (``torch.distributed.pipelining``). Without others to share weights with there is taken to be no
FSDP: autograd adds gradients to those of the microbatch before. With them shards are added beside all else.

Of a model with experts the first layers may have none; their weights are others, which the first layer with experts has
before it, and they have its own after them.

Where experts are dealt to ranks, theirs are a group beside that of their layer's other weights, which those ranks share
that have the same experts; it comes and goes with the other (``ShardPlacementResult``). A rank that shares its experts
with none has FSDP for them, too: of such it casts and copies all that it has. Where there are more ranks than experts,
experts are sharded by their second dim, and put together once more wherever whole ones are copied.

METP's weights are likewise a group of their own where ranks with other sequences have the same, replicas among them,
and none of FSDP's where nobody else has them.
"""

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import torch

from wallfacer_dt.kernels.merge import accumulation_dtype
from wallfacer_dt.planning.model import Kinds, LayerKind, in_short

Weights = Literal["", "vocabulary"] | LayerKind
"""A group of weights: none, a layer's of a kind, or the embedding's and likewise the output projection's."""


class Sent(NamedTuple):
    """What FSDP sends while a layer computes.

    Attributes:
        gathered: weights that come.
        reduced: gradients of which shards go where they belong.
        replicated: likewise, whose shards replicas sum.
        beside: what kind of layer computes.
    """

    gathered: Weights = ""
    reduced: Weights = ""
    replicated: Weights = ""
    beside: LayerKind = "layer"


@lru_cache(maxsize=64)
def sent_beside(kinds: Kinds, *, has_vocabulary: bool, has_replicas: bool) -> tuple[Counter[Sent], Counter[Sent]]:
    """What is sent beside each of some layers, forward and backward, and beside how many of them it is that.

    Args:
        kinds: the layers, in their order.
        has_vocabulary: there are an embedding and an output projection.
        has_replicas: others have the same weights.

    Returns:
        Not to be changed.
    """
    row = in_short(kinds)
    layers = [kind for kind, _ in row]
    ends: tuple[Weights, Weights] = ("vocabulary",) * 2 if has_vocabulary else (layers[0], layers[-1])
    before: list[Weights] = [ends[0], *layers[:-1]]
    after: list[Weights] = [*layers[1:], ends[1]]
    last: Weights = "" if has_vocabulary else layers[-1]
    replicated = [*after[1:], last] if has_replicas else [Sent().replicated] * len(row)
    forward, backward = Counter[Sent](), Counter[Sent]()
    for n, (kind, times) in enumerate(row):
        forward[Sent(after[n], beside=kind)] += times
    for n, (kind, times) in reversed([*enumerate(row)]):
        backward[Sent(before[n], after[n], replicated[n], kind)] += times
    return forward, backward


def sent_around(kinds: Kinds, *, has_vocabulary: bool) -> tuple[Sequence[Sent], Sequence[Sent]]:
    """What is waited for before all layers, and after them, one after the other; see :func:`sent_beside`."""
    end: Weights = "vocabulary" if has_vocabulary else ""
    first, *others = (kind for kind, _ in in_short(kinds))
    second: Weights = others[0] if others else end or first
    after = Sent("", first, second), Sent("", end, first), Sent("", "", end)
    return (Sent(end), Sent(first)), after


def copied_out(dtype: torch.dtype, *, alone: bool = False) -> int:
    """Bytes that are read and written of an element that was gathered, or, ``alone``, of one that no other rank has."""
    return 2 * dtype.itemsize + alone * _cast(dtype)


def copied_in(dtype: torch.dtype, *, alone: bool = False) -> int:
    """The same of an element of which the gradient is reduced."""
    wide = accumulation_dtype(dtype).itemsize
    return dtype.itemsize + wide + alone * 2 * wide


def _cast(dtype: torch.dtype) -> int:
    """Of one that is made of the accumulation dtype."""
    wide = accumulation_dtype(dtype)
    return 0 if wide == dtype else dtype.itemsize + wide.itemsize


def added_up(dtype: torch.dtype, microbatches: int) -> int:
    """The same where gradients of so many microbatches are whole, added up, and reduced then."""
    wide = accumulation_dtype(dtype).itemsize
    return _cast(dtype) + (microbatches - 1) * (dtype.itemsize + 2 * wide) + 2 * wide
