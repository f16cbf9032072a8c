"""What one rank receives in one attention call: closed formulas, independent of the schedules.

U = B * L * N * H elements is one rank's query shard (L = sequence / P), g = kv heads / query heads, R and C the ring
and team sizes, P = R * C. In units of U:

    2d forward            2(C-1)             + 2g(R-1)
    2d backward, kv       3(C-1)             + 4g(R-1)      rotate k, v and their gradients
    2d backward, q        4g(C-1)            + 3(R-1)       rotate q, dO and dq
    published forward     (2+2g)(C-1)        + 2gP/C        WallFacer equations 3 and 4 are g = 1
    published backward    (3+4g)(C-1)        + 3P/C

The left part is gathered or exchanged in the team, the right part hops. A gradient that is carried costs R-1 hops: the
block computed first is one's own and does not travel. A published placement, or its way back, costs a rank nothing
where Algorithm 2 names the rank itself, which only this rank's formula can tell. Beside this payload travel
statistics, B * L * N elements each: lse with every partial output, lse and delta with every query of a backward.
"""

from dataclasses import dataclass

import torch

from wallfacer_dt.kernels import accumulation_dtype
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
    """The volumes of one attention call, and the rotation its backward uses."""

    forward: Volume
    backward: Volume
    rotate: str


def attention_volume(
    ring: int,
    team: int,
    *,
    batch: int,
    length: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    schedule: str = "2d",
    rotate: str = "auto",
    index: int | None = None,
) -> AttentionVolume:
    """What one rank receives in one attention call (design: the module's table).

    Args:
        ring: R.
        team: C.
        batch: B.
        length: N, of the whole sequence, a multiple of ring * team.
        heads: query heads.
        kv_heads: key and value heads.
        head_dim: H.
        dtype: of q, k and v.
        schedule: ``"2d"`` or ``"published"``.
        rotate: ``"kv"``, ``"q"`` or ``"auto"``: for the backward; auto takes the fewest bytes.
        index: sequence index of the rank (ring-major); without it, one that is never its own target in a published
            placement.

    Returns:
        Forward and backward volumes.

    Raises:
        ValueError: unknown schedule or rotation, they do not fit the mesh or each other, or the length does not
            divide.
    """
    if length % (ring * team):
        raise ValueError(f"length must be a multiple of ring * team = {ring * team}, got {length}")
    rotate = resolve_rotate(
        rotate, schedule, ring, team, heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype
    )
    tokens = batch * (length // (ring * team))
    unit = _Unit(tokens * heads * head_dim, tokens * kv_heads * head_dim, tokens * heads, dtype)
    published = schedule == "published" and team > 1
    # Hops of the moving side and of what is carried for it, each of `wide` shards.
    hops, carried, wide = (ring // team, ring // team, team) if published else (ring - 1, ring - 1, 1)
    own_target = own_holder = False
    if published and index is not None:
        place = Coordinate(ring, team, *divmod(index, team))
        own_target, own_holder = _is_own_target(place), _is_own_holder(place)
    mates = team - 1
    kv_gather = 2 * mates * published
    forward = unit.volume(q=2 * mates, kv=kv_gather + 2 * wide * (hops - own_target), statistics=mates)
    if rotate == "kv":
        backward = unit.volume(q=3 * mates, kv=2 * hops, carried_kv=2 * carried, statistics=2 * mates)
    else:
        moved = wide * (hops - own_target)
        backward = unit.volume(
            q=2 * moved + 3 * mates * published,
            kv=4 * mates,
            carried_q=wide * (carried - own_holder),
            statistics=2 * moved + 2 * mates * published,
        )
    return AttentionVolume(forward, backward, rotate)


def check_rotate(rotate: str, schedule: str, ring: int, team: int) -> None:
    """Refuse (ValueError) a schedule and rotation that do not exist, or do not fit the mesh or each other."""
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule must be one of {SCHEDULES}, got {schedule!r}")
    if rotate not in ROTATIONS:
        raise ValueError(f"rotate must be one of {ROTATIONS}, got {rotate!r}")
    if schedule == "published" and ring % team:
        raise ValueError(
            f"schedule='published' needs team * team to divide the ranks, got team {team} on {ring * team} ranks; "
            "choose another team size, or schedule='2d'"
        )
    if schedule == "published" and rotate == "kv":
        raise ValueError(
            "schedule='published' rotates queries in its backward: pass rotate='q' or 'auto', or schedule='2d'"
        )


def resolve_rotate(
    rotate: str,
    schedule: str,
    ring: int,
    team: int,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
) -> str:
    """The rotation of the backward: as asked for, or the one that receives the fewest bytes (ties: kv)."""
    check_rotate(rotate, schedule, ring, team)
    if schedule == "published":
        return "q"
    if rotate != "auto":
        return rotate

    def received(rotation: str) -> int:
        return attention_volume(
            ring, team, batch=1, length=ring * team, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
            dtype=dtype, rotate=rotation,
        ).backward.bytes  # fmt: skip

    return "q" if received("q") < received("kv") else "kv"


@dataclass(frozen=True, slots=True)
class _Unit:
    """Elements of one rank's q, of its k, and of a statistic."""

    q: int
    kv: int
    statistic: int
    dtype: torch.dtype

    def volume(
        self,
        *,
        q: int = 0,
        kv: int = 0,
        carried_q: int = 0,
        carried_kv: int = 0,
        statistics: int = 0,
    ) -> Volume:
        sent = q * self.q + kv * self.kv
        carried = carried_q * self.q + carried_kv * self.kv
        stats = statistics * self.statistic
        wide = accumulation_dtype(self.dtype).itemsize
        return Volume(sent + carried, stats, sent * self.dtype.itemsize + (carried + stats) * wide)


def _is_own_target(place: Coordinate) -> bool:
    """Whether Algorithm 2 sends this rank's team rows to this rank."""
    return _target(place, hops=0) == (place.ring_rank, place.team_rank)


def _is_own_holder(place: Coordinate) -> bool:
    """Whether this rank itself holds its team's rows after the last hop."""
    return _target(place, hops=place.ring // place.team - 1) == (place.ring_rank, place.team_rank)


def _target(place: Coordinate, hops: int) -> tuple[int, int]:
    """(inter-team, intra-team) rank of a rank's placed rows (Algorithm 2) after some hops (Algorithm 3)."""
    blocks = place.ring // place.team
    position = (place.ring_rank // place.team + hops) % blocks
    return place.team_rank * blocks + position, place.ring_rank % place.team
