"""What one rank receives in one attention call: closed formulas, independent of the schedules.

U = B * L * N * H elements is one rank's query shard (L = sequence / P), g = kv heads / query heads, R and C the ring
and team sizes, P = R * C. In units of U:

    2d forward            2(C-1)             + 2g(R-1)
    2d backward, kv       3(C-1)             + 4g(R-1)      rotate k, v and their gradients
    2d backward, q        4g(C-1)            + 3(R-1)       rotate q, dO and dq
    published forward     (2+2g)(C-1)        + 2gP/C        WallFacer equations 3 and 4 are g = 1
    published backward    (3+4g)(C-1)        + 3P/C

The left part is gathered or exchanged in the team, the right part hops; a mask that leaves shards unseen by everybody
leaves h hops of R - 1 (:func:`attention_volume` takes h). A gradient that is carried costs R-1 hops: the
block computed first is one's own and does not travel. A published placement, or its way back, costs a rank nothing
where Algorithm 2 names the rank itself, which only this rank's formula can tell. Beside this payload travel
statistics, B * L * N elements each: lse with every partial output, lse and delta with every query of a backward.

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

from dataclasses import dataclass
from typing import NamedTuple

import torch

from wallfacer_dt.algorithms.heads import Heads, split_heads
from wallfacer_dt.kernels import accumulation_dtype
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
    """The volumes of one attention call, and the rotation its backward uses."""

    forward: Volume
    backward: Volume
    rotate: str


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
        rotate: ``"kv"``, ``"q"`` or ``"auto"``: for the backward; auto takes the fewest bytes.
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
    kv_length = length if kv_length is None else kv_length
    value_dim = head_dim if value_dim is None else value_dim
    rotate = resolve_rotate(
        rotate, schedule, ring, team, ulysses=ulysses, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
        value_dim=value_dim, shared_dim=shared_dim, lengths=(length, kv_length), dtype=dtype,
    )  # fmt: skip
    shape = _Shape(batch, heads, kv_heads, head_dim, value_dim, shared_dim)
    place = Coordinate(ring, team, *divmod((index or 0) % (ring * team), team), ulysses, (index or 0) // (ring * team))
    parts = shard_sizes(replicated, place.axes)
    q_sizes, k_sizes = (
        tuple(map(sum, zip(shard_sizes(n, place.axes, order), parts, strict=True))) for n in (length, kv_length)
    )
    exchanges = _Exchanges(place, shape, q_sizes, k_sizes)
    forward, backward = _Counter(dtype), _Counter(dtype)
    # Everyone's part of the output is gathered, and what everyone says of it is summed, as long as the longest part.
    others = (place.size - 1) * max(parts) * shape.out(heads)
    forward.sent += others
    backward.carried += others
    if ulysses > 1:
        exchanges.count(forward, backward)
    route = _Route.of(place, schedule, hops, known=index is not None)
    for shard, hop in exchanges.units(by_team=route.is_published):
        _count_forward(forward, shard, hop, route)
        _count_backward(backward, shard, hop, route, rotate)
    return AttentionVolume(forward.volume, backward.volume, rotate)


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


# A compiler need not look into it, and warns of the caches that it would find there.
@torch.compiler.assume_constant_result
def resolve_rotate(
    rotate: str,
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
) -> str:
    """The rotation of the backward: as asked for, or the one that receives the fewest bytes (ties: kv).

    It is one for all ranks, so it goes by the first's heads; ``lengths`` are queries and keys, or their ratio.
    """
    check_rotate(rotate, schedule, ring, team)
    if schedule == "published":
        return "q"
    if rotate != "auto":
        return rotate
    shape = _Shape(1, heads, kv_heads, head_dim, value_dim, shared_dim)
    place = Coordinate(ring, team, 0, 0, ulysses, 0)
    # Scaled up, so that no ratio is lost in whole shards.
    sizes = [tuple([length] * place.size) for length in lengths]
    units = _Exchanges(place, shape, *sizes).units(by_team=False)
    route = _Route.of(place, schedule, None, known=False)

    def received(rotation: str) -> int:
        counter = _Counter(dtype)
        for shard, hop in units:
            _count_backward(counter, shard, hop, route, rotation)
        return counter.volume.bytes

    return "q" if received("q") < received("kv") else "kv"


class _Shape(NamedTuple):
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    shared_dim: int

    def q(self, heads: int) -> int:
        """Elements of a token's queries."""
        return self.batch * heads * self.head_dim

    def out(self, heads: int) -> int:
        """Elements of a token's outputs."""
        return self.batch * heads * self.value_dim

    def kv(self, heads: int) -> int:
        """Elements of a token's keys and values."""
        shared = self.shared_dim if heads else 0
        return self.batch * (heads * (self.head_dim - shared + self.value_dim) + shared)


class _Unit(NamedTuple):
    """Elements of one shard, or of a team's: q, output, k with v, a statistic."""

    q: int
    out: int
    kv: int
    statistic: int


@dataclass(slots=True)
class _Counter:
    """What is received: payload in the inputs' dtype, payload that accumulates and statistics in the wide one."""

    dtype: torch.dtype
    sent: int = 0
    carried: int = 0
    statistics: int = 0

    @property
    def volume(self) -> Volume:
        wide = accumulation_dtype(self.dtype).itemsize
        bytes_ = self.sent * self.dtype.itemsize + (self.carried + self.statistics) * wide
        return Volume(self.sent + self.carried, self.statistics, bytes_)


@dataclass(frozen=True, slots=True)
class _Exchanges:
    """Tokens for heads and back, on one rank; sizes are tokens by sequence index."""

    place: Coordinate
    shape: _Shape
    q_sizes: tuple[int, ...]
    k_sizes: tuple[int, ...]

    def units(self, *, by_team: bool) -> list[tuple[_Unit, _Unit]]:
        """By group of heads, the shard that is gathered in a team, and what hops: a shard too, or a team's shards."""
        place, shape = self.place, self.shape
        inner = place.ring * place.team
        q_rows, k_rows = ([sum(sizes[i::inner]) for i in range(inner)] for sizes in (self.q_sizes, self.k_sizes))
        if place.ulysses == 1:
            heads = [(shape.heads, shape.kv_heads)]
        else:
            heads = [(g.q[1] - g.q[0], g.kv[1] - g.kv[0]) for g in self._groups()[place.ulysses_rank]]

        def unit(together: int, n: int, m: int) -> _Unit:
            q, k = (max(sum(rows[i : i + together]) for i in range(0, inner, together)) for rows in (q_rows, k_rows))
            return _Unit(q * shape.q(n), q * shape.out(n), k * shape.kv(m), q * shape.batch * n)

        return [(unit(1, n, m), unit(place.team if by_team else 1, n, m)) for n, m in heads if n]

    def count(self, forward: _Counter, backward: _Counter) -> None:
        """Add what the exchanges receive."""
        me, shape, inner = self.place.ulysses_rank, self.shape, self.place.ring * self.place.team
        mine_q, mine_k = self.q_sizes[self.place.index], self.k_sizes[self.place.index]
        others_q = sum(self.q_sizes[self.place.inner_index :: inner]) - mine_q
        others_k = sum(self.k_sizes[self.place.inner_index :: inner]) - mine_k
        for rank, groups in enumerate(self._groups()):
            for (q, q_stop), (kv, kv_stop) in groups:
                n, m = q_stop - q, kv_stop - kv
                if rank == me:
                    forward.sent += others_q * shape.q(n) + others_k * shape.kv(m)
                    backward.sent += others_q * (shape.q(n) + shape.out(n)) + others_k * shape.kv(m)
                    backward.statistics += 2 * others_q * shape.batch * n
                else:
                    forward.sent += mine_q * shape.out(n)
                    forward.statistics += mine_q * shape.batch * n
                    backward.sent += mine_q * shape.q(n) + mine_k * shape.kv(m)

    def _groups(self) -> tuple[tuple[Heads, ...], ...]:
        hidden = not self.shape.shared_dim
        return split_heads(self.shape.heads, self.shape.kv_heads, self.place.ulysses, hidden=hidden)


class _Route(NamedTuple):
    """How one rank's moving shards travel: hops, and how many of a placement's and of its way back are its own."""

    mates: int
    is_published: bool
    hops: int
    placed_here: bool
    fetched_here: bool

    @classmethod
    def of(cls, place: Coordinate, schedule: str, hops: int | None, *, known: bool) -> "_Route":
        """With ``known``, of this very rank; otherwise of one that always sends its rows to others."""
        mates = place.team - 1
        if schedule == "2d" or place.team == 1:
            return cls(mates, False, place.ring - 1 if hops is None else hops, False, False)
        blocks = place.ring // place.team
        me = place.ring_rank, place.team_rank
        targets = [known and _target(place, hops=hop) == me for hop in (0, blocks - 1)]
        return cls(mates, True, blocks, *targets)


def _count_forward(counter: _Counter, shard: _Unit, hop: _Unit, route: _Route) -> None:
    gathered = shard.kv if route.is_published else 0
    counter.sent += route.mates * (shard.q + shard.out + gathered) + (route.hops - route.placed_here) * hop.kv
    counter.statistics += route.mates * shard.statistic


def _count_backward(counter: _Counter, shard: _Unit, hop: _Unit, route: _Route, rotate: str) -> None:
    if rotate == "kv":
        counter.sent += route.mates * (2 * shard.q + shard.out) + route.hops * hop.kv
        counter.carried += route.hops * hop.kv
        counter.statistics += 2 * route.mates * shard.statistic
        return
    moved = route.hops - route.placed_here
    gathered = route.mates if route.is_published else 0  # queries, and their gradients on their way back
    counter.sent += 2 * route.mates * shard.kv + moved * (hop.q + hop.out) + gathered * (2 * shard.q + shard.out)
    counter.carried += (route.hops - route.fetched_here) * hop.q
    counter.statistics += 2 * (moved * hop.statistic + gathered * shard.statistic)


def _target(place: Coordinate, hops: int) -> tuple[int, int]:
    """(inter-team, intra-team) rank of a rank's placed rows (Algorithm 2) after some hops (Algorithm 3)."""
    blocks = place.ring // place.team
    position = (place.ring_rank // place.team + hops) % blocks
    return place.team_rank * blocks + position, place.ring_rank % place.team
