"""What one rank receives in one attention call: closed formulas, which know nothing of schedules.

U = B * L * N * H elements is one rank's query shard (L = sequence / P), g = kv heads / query heads, R and C the ring
and team sizes, P = R * C. In units of U:

    2d forward, kv        2(C-1)             + 2g(R-1)      rotate k and v
    2d forward, q         2g(C-1)            + 2(R-1)       rotate q and its output
    2d backward, kv       3(C-1)             + 4g(R-1)      rotate k, v and their gradients
    2d backward, q        4g(C-1)            + 3(R-1)       rotate q, dO and dq
    published forward     (2+2g)(C-1)        + 2gP/C        WallFacer equations 3 and 4 are g = 1
    published backward    (3+4g)(C-1)        + 3P/C

The left part is gathered or exchanged in the team, the right part hops; a mask that leaves shards unseen by everybody
leaves h hops of R - 1. What is computed for a rotating block, and carried along, costs R - 1 hops: the block computed
first is one's own and does not travel. The last of these hops brings it to its owner, in the inputs' dtype: one, or two
where a window has blocks come both ways round the ring; the others are wide, as it is added to. A published placement,
or its way back, costs a rank nothing where Algorithm 2 names the rank itself, which only this rank's formula can tell.
Beside this payload travel statistics, B * L * N elements each: lse with every partial output that is sent or carried,
lse and delta with every query of a backward.

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

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np
import torch

from tests.cases import shard_sizes
from wallfacer_dt import AttentionVolume, Volume
from wallfacer_dt.algorithms.heads import split_heads

NOTHING = np.zeros(3, np.int64)


@dataclass(frozen=True, kw_only=True)
class Closed:
    """A call, as ``attention_volume`` takes it; of what is received (sent, carried, statistics) elements are told."""

    ring: int
    team: int
    ulysses: int = 1
    batch: int
    length: int
    kv_length: int | None = None
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int | None = None
    shared_dim: int = 0
    dtype: torch.dtype
    schedule: str = "2d"
    rotate: str = "auto"
    rotate_forward: str = "auto"
    hops: Collection[int] | None = None
    order: str = "contiguous"
    replicated: int = 0
    index: int = 0

    def volume(self) -> AttentionVolume:
        rotations = [self.rotation(backward=backward) for backward in (False, True)]
        forward, backward = (
            self.told(self.of_heads(backward) + self.inner(rotation, backward) + self.of_replicated(backward))
            for backward, rotation in enumerate(rotations)
        )
        return AttentionVolume(forward, backward, rotations[1], rotations[0])

    def told(self, received: np.ndarray) -> Volume:
        sent, carried, statistics = map(int, received)
        wide = 8 if self.dtype == torch.float64 else 4
        return Volume(sent + carried, statistics, sent * self.dtype.itemsize + (carried + statistics) * wide)

    def rotation(self, *, backward: bool) -> str:
        """As asked for, or what receives the fewer bytes of payload at the first rank, without a mask; of ties kv."""
        asked = self.rotate if backward else self.rotate_forward
        if self.schedule == "published":
            return "q" if backward else "kv"
        if asked != "auto":
            return asked
        # As long as it takes for all shards to be equal.
        lengths = [n * self.size for n in (self.length, self.length if self.kv_length is None else self.kv_length)]
        whole = replace(self, length=lengths[0], kv_length=lengths[1], hops=None, index=0, replicated=0, batch=1)
        q, kv = (whole.told(whole.inner(side, backward) * [1, 1, 0]).bytes for side in ("q", "kv"))
        return "q" if q < kv else "kv"

    @property
    def size(self) -> int:
        return self.ulysses * self.ring * self.team

    @property
    def is_published(self) -> bool:
        return self.schedule == "published" and self.team > 1

    @property
    def tokens(self) -> tuple[np.ndarray, np.ndarray]:
        """(ulysses, ring * team) queries and keys that each rank takes care of."""

        def cut(length: int, order: str) -> np.ndarray:
            if order == "document_head_tail":
                return length // self.size + (np.arange(self.size) < length % self.size)
            return np.array(shard_sizes(length, (self.ulysses, self.ring, self.team)))

        first = cut(self.replicated, "contiguous")
        lengths = self.length, self.length if self.kv_length is None else self.kv_length
        q, k = ((cut(n, self.order) + first).reshape(self.ulysses, -1) for n in lengths)
        return q, k

    def elements(self, q: int, k: int, n: int, m: int) -> tuple[int, int, int, int]:
        """Of q, outputs, k with v, and a statistic: of q queries with n heads and k keys with m."""
        value_dim = self.head_dim if self.value_dim is None else self.value_dim
        kv = m * (self.head_dim - self.shared_dim + value_dim) + (self.shared_dim if m else 0)
        return tuple(self.batch * x for x in (q * n * self.head_dim, q * n * value_dim, k * kv, q * n))

    def groups(self, rank: int) -> list[tuple[int, int]]:
        """By group of heads, how many query heads and key heads a rank of ``cp_ulysses`` computes."""
        if self.ulysses == 1:
            return [(self.heads, self.kv_heads)]
        ranks = split_heads(self.heads, self.kv_heads, self.ulysses, hidden=not self.shared_dim)
        return [(group.q[1] - group.q[0], group.kv[1] - group.kv[0]) for group in ranks[rank]]

    def of_heads(self, backward: bool) -> np.ndarray:
        """Of Ulysses: tokens for heads, and back."""
        mine, inner = divmod(self.index, self.ring * self.team)
        (q, k), received = self.tokens, NOTHING.copy()
        for rank in set(range(self.ulysses)) - {mine}:
            for n, m in self.groups(mine):
                queries, outs, keys, statistic = self.elements(q[rank, inner], k[rank, inner], n, m)
                received += [queries + keys + backward * outs, 0, 2 * backward * statistic]
            for n, m in self.groups(rank):
                queries, outs, keys, statistic = self.elements(q[mine, inner], k[mine, inner], n, m)
                received += [queries + keys, 0, 0] if backward else [outs, 0, statistic]
        return received

    def inner(self, rotate: str, backward: bool) -> np.ndarray:
        """Of the ring and the team."""
        q, k = (some.sum(0) for some in self.tokens)
        way = self.published if self.is_published else self.two_dimensional
        return sum((way(n, m, q, k, rotate, backward) for n, m in self.groups(self.index // len(q)) if n), NOTHING)

    def two_dimensional(self, n: int, m: int, q: np.ndarray, k: np.ndarray, rotate: str, backward: bool) -> np.ndarray:
        queries, outs, keys, statistic = self.elements(q.max(), k.max(), n, m)
        distances, mates = set(range(1, self.ring) if self.hops is None else self.hops), self.team - 1
        hops = len(distances)
        # Distances up to half the ring come one way, larger ones the other, if some are left out. What queries see of
        # keys that come from one side, keys are seen of by queries that come from the other.
        if rotate == "q":
            distances = {self.ring - one for one in distances}
        home = min(hops, 1) if hops == self.ring - 1 else len({2 * one > self.ring for one in distances})
        wide = hops - home
        if not backward and rotate == "kv":
            return np.array([mates * (queries + outs) + hops * keys, 0, mates * statistic])
        if not backward:
            return np.array([mates * keys + hops * queries + home * outs, wide * outs, hops * statistic])
        if rotate == "kv":
            return np.array([mates * (2 * queries + outs) + (hops + home) * keys, wide * keys, 2 * mates * statistic])
        hopped = hops * (queries + outs) + home * queries
        return np.array([2 * mates * keys + hopped, wide * queries, 2 * hops * statistic])

    def published(self, n: int, m: int, q: np.ndarray, k: np.ndarray, rotate: str, backward: bool) -> np.ndarray:
        assert rotate == ("q" if backward else "kv")
        queries, outs, keys, statistic = self.elements(q.max(), k.max(), n, m)
        of_team = (some.reshape(-1, self.team).sum(1).max() for some in (q, k))
        team_queries, team_outs, team_keys, team_statistic = self.elements(*of_team, n, m)
        mates, blocks, me = self.team - 1, self.ring // self.team, self.index % len(q)

        def target(rank: int) -> int:
            """Algorithm 2: to whom a rank sends what its team has gathered."""
            ring_rank, team_rank = divmod(rank, self.team)
            return (team_rank * blocks + ring_rank // self.team) * self.team + ring_rank % self.team

        # After its last hop a block is one back from where it began.
        ring_rank, team_rank = divmod(target(me), self.team)
        end = ring_rank - 1 if ring_rank % blocks else ring_rank + blocks - 1
        hops, home = blocks - (target(me) == me), end * self.team + team_rank != me
        if not backward:
            return np.array([mates * (queries + keys + outs) + hops * team_keys, 0, mates * statistic])
        sent = mates * (2 * queries + outs + 2 * keys) + hops * (team_queries + team_outs)
        wide = (blocks - 1) * team_queries
        return np.array([sent + home * team_queries, wide, 2 * mates * statistic + 2 * hops * team_statistic])

    def of_replicated(self, backward: bool) -> np.ndarray:
        """What is computed for them, or said of it."""
        rows = max(shard_sizes(self.replicated, (self.ulysses, self.ring, self.team)))
        _, outs, _, _ = self.elements(rows, 0, self.heads, 0)
        return (self.size - 1) * outs * np.array([not backward, backward, 0])
