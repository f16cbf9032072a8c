"""What one rank receives in one attention call: closed formulas, independent of the schedules.

U = B * L * N * H elements is one rank's query shard (L = sequence / P), g = kv heads / query heads, R and C the ring
and team sizes, P = R * C. In units of U:

    2d forward, kv        2(C-1)             + 2g(R-1)      rotate k and v
    2d forward, q         2g(C-1)            + 2(R-1)       rotate q and its output
    2d backward, kv       3(C-1)             + 4g(R-1)      rotate k, v and their gradients
    2d backward, q        4g(C-1)            + 3(R-1)       rotate q, dO and dq
    published forward     (2+2g)(C-1)        + 2gP/C        WallFacer equations 3 and 4 are g = 1
    published backward    (3+4g)(C-1)        + 3P/C

The left part is gathered or exchanged in the team, the right part hops; a mask that leaves shards unseen by everybody
leaves h hops of R - 1 (:func:`attention_volume` takes h). What is computed for a rotating block, and carried along,
costs R-1 hops: the block computed first is one's own and does not travel. A published placement, or its way back, costs
a rank nothing where Algorithm 2 names the rank itself, which only this rank's formula can tell. Beside this payload
travel statistics, B * L * N elements each: lse with every partial output that is sent or carried, lse and delta with
every query of a backward.

With values of another head dim, outputs and values count as much less; a key that heads share counts once. Shards of
different lengths are sent as long as the longest; published hops, of a team's shards together, as long as the longest
team's.

Of T replicated tokens every rank receives the others' outputs, and in the backward what the others say of one's own.

Around this Ulysses exchanges tokens for heads. A rank that computes n of the N query heads, and for them m of the Nkv
key heads (m > n g only where key heads do not divide), receives, with u ranks on the axis:

    to heads    (u-1) tokens' worth of n query heads and m key and value heads
    to tokens   of its own tokens, what others computed: N - n query heads, and all others' key heads in a backward

The ring and the team then work on u times the tokens and the heads n and m.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

import torch

from wallfacer_dt.algorithms.flows import Flow, Flows, Held, Shape
from wallfacer_dt.algorithms.routes import PublishedRoute
from wallfacer_dt.algorithms.steps import CONTEXT
from wallfacer_dt.compiler import constant
from wallfacer_dt.layout import shard_sizes
from wallfacer_dt.mesh import Coordinate

SCHEDULES = ("2d", "published")
ROTATIONS = ("auto", "kv", "q")


@dataclass(frozen=True, slots=True)
class Volume:
    """Elements and bytes that one rank receives.

    Attributes:
        payload: elements of q, k, v, outputs and their gradients.
        statistics: elements of lse and delta.
        bytes: of both. What is carried hop by hop, and statistics, count in the accumulation dtype.
    """

    payload: int
    statistics: int
    bytes: int


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
    hops: int | None = None,
    order: str = "contiguous",
    replicated: int = 0,
    index: int | None = None,
) -> AttentionVolume:
    """What one rank receives in one attention call (design: the module's table).

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
        schedule: ``"2d"`` or ``"published"``.
        rotate: ``"kv"``, ``"q"`` or ``"auto"``: for the backward; auto takes what has the smaller payload without
            a mask.
        rotate_forward: the same for the forward.
        hops: of the 2D schedule round the ring, where a mask needs fewer than ring - 1.
        order: token order; ``"document_head_tail"`` cuts a sequence that does not divide otherwise.
        replicated: tokens before the sequence that every rank holds.
        index: sequence index of the rank; without it, one that is never its own target in a published placement, and
            otherwise the first.

    Returns:
        Forward and backward volumes.

    Raises:
        ValueError: unknown schedule or rotation, or they do not fit the mesh or each other.
    """
    flows, rotations = attention_flows(
        ring, team, ulysses=ulysses, batch=batch, length=length, kv_length=kv_length, heads=heads, kv_heads=kv_heads,
        head_dim=head_dim, value_dim=value_dim, shared_dim=shared_dim, dtype=dtype, schedule=schedule, rotate=rotate,
        rotate_forward=rotate_forward, distances=None if hops is None else tuple(range(1, hops + 1)), order=order,
        replicated=replicated,
    )  # fmt: skip
    if index is None:
        # Some rank that is not its own target in a placement: unless they are one rank there is one.
        index = _sender(ring, team) if schedule == "published" and team > 1 else 0
    forward, backward = flows(index)
    return AttentionVolume(_total(forward, dtype), _total(backward, dtype), rotations[1], rotations[0])


def attention_flows(
    ring: int,
    team: int,
    *,
    ulysses: int,
    batch: int,
    length: int,
    kv_length: int | None,
    heads: int,
    kv_heads: int,
    head_dim: int,
    value_dim: int | None,
    shared_dim: int,
    dtype: torch.dtype,
    schedule: str,
    rotate: str,
    rotate_forward: str,
    distances: tuple[int, ...] | None,
    order: str,
    replicated: int,
) -> tuple[Callable[[int], tuple[Iterator[Flow], Iterator[Flow]]], tuple[str, str]]:
    """The same by transfer: for a sequence index forward and backward; and which sides move in the two.

    ``distances`` are those at which the 2D schedule goes round the ring, None for all; see :func:`hops`.
    """
    kv_length = length if kv_length is None else kv_length
    value_dim = head_dim if value_dim is None else value_dim
    rotations = resolve_rotations(
        rotate, rotate_forward, schedule, ring, team, ulysses=ulysses, heads=heads, kv_heads=kv_heads,
        head_dim=head_dim, value_dim=value_dim, shared_dim=shared_dim, lengths=(length, kv_length), dtype=dtype,
    )  # fmt: skip
    shape = Shape(batch, heads, kv_heads, head_dim, value_dim, shared_dim)
    published = schedule == "published" and team > 1
    axes, inner = (ulysses, ring, team), ring * team
    parts = shard_sizes(replicated, axes)
    q_sizes, k_sizes = (
        tuple(map(sum, zip(shard_sizes(n, axes, order), parts, strict=True))) for n in (length, kv_length)
    )
    held = Held(q_sizes, k_sizes, ulysses)
    hop = held.together(team) if published else held.shard
    distances = tuple(range(1, ring)) if distances is None else distances
    # Everyone's part of the output is gathered, and what everyone says of it is summed, as long as the longest part.
    rows = max(parts) * shape.out(heads)

    def of(index: int) -> tuple[Iterator[Flow], Iterator[Flow]]:
        place = Coordinate(ring, team, *divmod(index % inner, team), ulysses, index // inner)
        flows = Flows(place, shape, held, hop, published, distances)
        others = tuple(other for other in range(place.size) if other != index) if replicated else ()
        return (
            chain(
                flows.all(rotations[0], backward=False),
                [Flow("replicated", "q", CONTEXT, 0, others, 1, sent=rows)],
            ),
            chain(
                flows.all(rotations[1], backward=True),
                [Flow("replicated", "q", CONTEXT, 0, others, 1, carried=rows)],
            ),
        )

    return of, rotations


def _total(flows: Iterable[Flow], dtype: torch.dtype) -> Volume:
    payload = statistics = nbytes = 0
    for flow in flows:
        payload += flow.arrivals * (flow.sent + flow.carried)
        statistics += flow.arrivals * flow.statistics
        nbytes += flow.arrivals * flow.nbytes(dtype)
    return Volume(payload, statistics, nbytes)


def _sender(ring: int, team: int) -> int:
    """An inner index that is nobody's own target in a published placement or on the way back from it, if any is."""
    for index in range(ring * team):
        route = PublishedRoute(Coordinate(ring, team, *divmod(index, team)))
        if index not in (route.placed_from, route.fetched_from):
            return index
    return 0


def check_schedule(schedule: str, ring: int, team: int) -> None:
    """Refuse (ValueError) a schedule that does not exist, or does not fit the mesh."""
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule must be one of {SCHEDULES}, got {schedule!r}")
    if schedule == "published" and ring % team:
        raise ValueError(
            f"schedule='published' needs team * team to divide the ranks, got team {team} on {ring * team} ranks; "
            "choose another team size, or schedule='2d'"
        )


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
    shape = Shape(1, heads, kv_heads, head_dim, value_dim, shared_dim)
    forward, backward = _cheapest_rotations(Coordinate(ring, team, 0, 0, ulysses, 0), shape, lengths, dtype)
    return forward if rotate_forward == "auto" else rotate_forward, backward if rotate == "auto" else rotate


@lru_cache(maxsize=256)
def _cheapest_rotations(
    place: Coordinate, shape: Shape, lengths: tuple[int, int], dtype: torch.dtype
) -> tuple[str, str]:
    # Scaled up, so that no ratio is lost in whole shards.
    q_sizes, k_sizes = ((length,) * place.size for length in lengths)
    held = Held(q_sizes, k_sizes, place.ulysses)
    flows = Flows(place, shape, held, held.shard, False, tuple(range(1, place.ring)))

    def cheapest(*, backward: bool) -> str:
        def received(rotation: str) -> int:
            some = (flow._replace(statistics=0) for flow in flows.inner(rotation, backward=backward))
            return _total(some, dtype).bytes

        return "q" if received("q") < received("kv") else "kv"

    return cheapest(backward=False), cheapest(backward=True)
