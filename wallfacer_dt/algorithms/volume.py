"""What one rank receives in one attention call: the sums of its flows; and the rotation that receives least."""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import lru_cache

import torch

from wallfacer_dt.algorithms.flows import Flow, Flows, Shape
from wallfacer_dt.algorithms.heads import check_heads
from wallfacer_dt.algorithms.masks import Mask
from wallfacer_dt.algorithms.schedule import check_schedule
from wallfacer_dt.algorithms.sequences import Sequences
from wallfacer_dt.compiler import constant
from wallfacer_dt.kernels.merge import accumulation_dtype
from wallfacer_dt.layout import check_length, check_order
from wallfacer_dt.mesh import Coordinate

ROTATIONS = ("auto", "kv", "q")


@dataclass(frozen=True, slots=True)
class Volume:
    """Elements and bytes that one rank receives.

    Attributes:
        payload: elements of q, k, v, outputs and their gradients.
        statistics: elements of lse and delta.
        bytes: of both. What is carried on, and statistics, count in the accumulation dtype.
    """

    payload: int
    statistics: int
    bytes: int

    def __add__(self, more: "Volume") -> "Volume":
        return Volume(self.payload + more.payload, self.statistics + more.statistics, self.bytes + more.bytes)


@dataclass(frozen=True, slots=True)
class AttentionVolume:
    """The volumes of one attention call, and which side moves in its backward and in its forward."""

    forward: Volume
    backward: Volume
    rotate: str
    rotate_forward: str


def attention_volume(
    ring: int,
    team: int,
    *,
    ulysses: int = 1,
    batch: int,
    length: int,
    kv_length: int | None = None,
    heads: int,
    kv_heads: int,
    head_dim: int,
    value_dim: int | None = None,
    shared_dim: int = 0,
    dtype: torch.dtype,
    schedule: str = "2d",
    rotate: str = "auto",
    rotate_forward: str = "auto",
    hops: Collection[int] | None = None,
    order: str = "contiguous",
    replicated: int = 0,
    index: int | None = None,
) -> AttentionVolume:
    """What one rank receives in one attention call.

    Args:
        ring: R.
        team: C.
        ulysses: size of axis ``cp_ulysses``.
        batch: B.
        length: N, of the whole sequence.
        kv_length: of the keys, where it is another one.
        heads: query heads.
        kv_heads: key and value heads.
        head_dim: H, of queries.
        value_dim: of values and outputs, where it is another one.
        shared_dim: what of H all heads of a key share.
        dtype: of q, k and v.
        schedule: ``"2d"``, ``"rings"`` or ``"published"``.
        rotate: ``"kv"``, ``"q"`` or ``"auto"``: for the backward; auto takes what has the smaller payload without
            a mask.
        rotate_forward: the same for the forward.
        hops: where a mask needs only some of the distances round the ring, 1 to ring - 1, these: at which queries see
            keys that have come so far. The published schedule makes all its hops whatever they are.
        order: token order; ``"document_head_tail"`` cuts a sequence that does not divide otherwise.
        replicated: tokens before the sequence that every rank holds.
        index: sequence index of the rank; without it, one that is never its own target in a published placement, and
            otherwise the first.

    Returns:
        Forward and backward volumes.

    Raises:
        TypeError: a size is no int.
        ValueError: sizes that are none, or that attention refuses; an unknown order, schedule or rotation, or they do
            not fit the mesh or each other; no such distances or rank.
    """
    value_dim = head_dim if value_dim is None else value_dim
    kv_length = length if kv_length is None else kv_length
    sizes = {"ring": ring, "team": team, "batch": batch, "length": length, "kv_length": kv_length}
    for name, size in (sizes | {"head_dim": head_dim, "value_dim": value_dim}).items():
        check_length(size, name)
    for name, size in (("shared_dim", shared_dim), ("replicated", replicated)):
        check_length(size, name, least=0)
    if shared_dim >= head_dim:
        raise ValueError(f"shared_dim must be a part of head_dim, got {shared_dim} and {head_dim}")
    check_heads(heads, kv_heads, ulysses)
    check_order(order)
    rotations = resolve_rotations(
        rotate, rotate_forward, schedule, ring, team, ulysses=ulysses, heads=heads, kv_heads=kv_heads,
        head_dim=head_dim, value_dim=value_dim, shared_dim=shared_dim, lengths=(length, kv_length), dtype=dtype,
    )  # fmt: skip
    shape = Shape(batch, heads, kv_heads, head_dim, value_dim, shared_dim)
    sequences = Sequences(length, kv_length, order, Mask(), replicated)
    if hops is not None and not set(hops) <= set(range(1, ring)):
        raise ValueError(f"hops must be distances from 1 to {ring - 1}, got {sorted(hops)}")
    inner = ring * team
    if index is None:
        index = 1 if schedule == "published" and team > 1 else 0
    elif not 0 <= index < ulysses * inner:
        raise ValueError(f"index must be from 0 to {ulysses * inner - 1}, a rank of these axes, got {index}")
    place = Coordinate(ring, team, *divmod(index % inner, team), ulysses, index // inner)
    forward, backward = (
        _total(Flows(place, shape, sequences, schedule, side, backward, _offsets(hops, ring, side)), dtype)
        for backward, side in zip((False, True), rotations, strict=True)
    )
    return AttentionVolume(forward, backward, rotations[1], rotations[0])


def _offsets(hops: Collection[int] | None, ring: int, rotate: str) -> tuple[int, ...] | None:
    """At which distances blocks are needed: queries come the other way than keys."""
    return None if hops is None else tuple(sorted({one if rotate == "kv" else ring - one for one in hops}))


def _total(flows: Iterable[Flow], dtype: torch.dtype) -> Volume:
    total = Volume(0, 0, 0)
    for flow in flows:
        content, arrivals = flow.content, len(flow.groups) * flow.times * flow.comes
        one = content.payload, content.statistics, content.nbytes(dtype)
        total += Volume(*(int((arrivals * n).sum()) for n in one))
    return total


def check_rotate(rotate: str, rotate_forward: str, schedule: str) -> None:
    """Refuse (ValueError) rotations that do not exist, or do not fit the schedule."""
    for name, value in (("rotate", rotate), ("rotate_forward", rotate_forward)):
        if value not in ROTATIONS:
            raise ValueError(f"{name} must be one of {ROTATIONS}, got {value!r}")
    if schedule == "published" and rotate == "kv":
        raise ValueError(
            "schedule='published' rotates queries in its backward: pass rotate='q' or 'auto', or schedule='2d'"
        )
    if schedule == "published" and rotate_forward == "q":
        raise ValueError(
            "schedule='published' rotates keys and values in its forward: pass rotate_forward='kv' or 'auto', or "
            "schedule='2d'"
        )


# A compiler need not look into it, and warns of the caches that it would find there.
@constant
def resolve_rotations(
    rotate: str,
    rotate_forward: str,
    schedule: str,
    ring: int,
    team: int,
    *,
    ulysses: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    value_dim: int,
    shared_dim: int,
    lengths: tuple[int, int],
    dtype: torch.dtype,
) -> tuple[str, str]:
    """Which sides move in the forward and in the backward: as asked for, or what receives the fewest bytes (ties: kv).

    Bytes are the payload's, of a call without a mask. The choice is one for all ranks, so it goes by the first's heads;
    ``rotate`` is the backward's, ``lengths`` are queries and keys, or their ratio.
    """
    check_schedule(schedule, ring, team)
    check_rotate(rotate, rotate_forward, schedule)
    if schedule == "published":
        return "kv", "q"
    place, shape = Coordinate(ring, team, 0, 0, ulysses, 0), Shape(1, heads, kv_heads, head_dim, value_dim, shared_dim)
    ratio = lengths[0] // math.gcd(*lengths), lengths[1] // math.gcd(*lengths)
    forward, backward = (
        _cheapest_rotation(place, shape, ratio, dtype, schedule, backward) if asked == "auto" else asked
        for asked, backward in ((rotate_forward, False), (rotate, True))
    )
    return forward, backward


@lru_cache(maxsize=256)
def _cheapest_rotation(
    place: Coordinate, shape: Shape, lengths: tuple[int, int], dtype: torch.dtype, schedule: str, backward: bool
) -> str:
    # Scaled up, so that no ratio is lost in whole shards.
    sequences = Sequences(lengths[0] * place.size, lengths[1] * place.size, "contiguous", Mask())

    def received(rotate: str) -> int:
        # Ulysses' exchanges are the same either way.
        volume = _total(Flows(place, shape, sequences, schedule, rotate, backward).inner(), dtype)
        return volume.bytes - volume.statistics * accumulation_dtype(dtype).itemsize

    return "q" if received("q") < received("kv") else "kv"
