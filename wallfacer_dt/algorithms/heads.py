"""Ulysses: who computes which heads, as data made on the host, and the exchange of tokens for heads and back.

Ranks of axis ``cp_ulysses`` hold different tokens and all heads; after the exchange each holds all their tokens and
some heads (DeepSpeed-Ulysses). Query heads are split as evenly as they can be. A key and value head goes to every rank
that computes one of its query heads, so with fewer of them than ranks each is sent as often as it is needed and no
more, and its gradients are summed where they come back.

Heads are exchanged in groups: while one group's attention is computed, the next group is on its way, and the last one's
results are on theirs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from wallfacer_dt.algorithms.arithmetic import HEADS_DIM, SEQUENCE_DIM
from wallfacer_dt.collectives import Field, all_to_all, flattened, unpack, wait
from wallfacer_dt.kernels import accumulation_dtype
from wallfacer_dt.rows import Members

Kind = Literal["q", "kv", "shared"]
"""Which heads of a tensor a rank is sent: its query heads, its key heads, or (of one head for all) that one."""

_GROUPS = 4


class Heads(NamedTuple):
    """One group of one rank: query heads and key heads (start, stop), all key heads having as many query heads."""

    q: tuple[int, int]
    kv: tuple[int, int]

    def of(self, kind: Kind) -> tuple[int, int]:
        """The heads of a tensor of that kind."""
        return {"q": self.q, "kv": self.kv, "shared": (0, 0 if self.is_empty else 1)}[kind]

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute."""
        return self.q[0] == self.q[1]


@lru_cache(maxsize=256)
def split_heads(heads: int, kv_heads: int, ulysses: int, *, hidden: bool) -> tuple[tuple[Heads, ...], ...]:
    """By rank of ``cp_ulysses``, its groups of heads; every rank has as many, some perhaps empty.

    >>> for groups in split_heads(10, 2, 4, hidden=False):
    ...     print(*groups)
    Heads(q=(0, 3), kv=(0, 1)) Heads(q=(0, 0), kv=(0, 0))
    Heads(q=(3, 5), kv=(0, 1)) Heads(q=(5, 6), kv=(1, 2))
    Heads(q=(6, 8), kv=(1, 2)) Heads(q=(0, 0), kv=(0, 0))
    Heads(q=(8, 10), kv=(1, 2)) Heads(q=(0, 0), kv=(0, 0))

    Args:
        heads: query heads, at least ``ulysses``.
        kv_heads: key and value heads, a divisor of ``heads``.
        ulysses: size of the axis.
        hidden: make several groups of a rank's heads, where it has several key heads.

    Returns:
        The groups.
    """
    bounds = [0]
    for rank in range(ulysses):
        bounds.append(bounds[-1] + heads // ulysses + (rank < heads % ulysses))
    ranks = [_groups(start, stop, heads // kv_heads) for start, stop in pairwise(bounds)]
    if hidden:
        ranks = [_divided(groups) for groups in ranks]
    most = max(map(len, ranks))
    nothing = Heads((0, 0), (0, 0))
    return tuple((*groups, *[nothing] * (most - len(groups))) for groups in ranks)


def _groups(start: int, stop: int, share: int) -> list[Heads]:
    """Neighbouring key heads of which a rank has equally many query heads, up to ``share``."""
    pieces = [
        Heads((max(start, kv * share), min(stop, (kv + 1) * share)), (kv, kv + 1))
        for kv in range(start // share, -(-stop // share))
    ]
    runs = [list(run) for _, run in groupby(pieces, key=lambda piece: piece.q[1] - piece.q[0])]
    return [Heads((run[0].q[0], run[-1].q[1]), (run[0].kv[0], run[-1].kv[1])) for run in runs]


def _divided(groups: list[Heads]) -> list[Heads]:
    """Up to ``_GROUPS`` groups, by halving the one with most key heads."""
    groups = list(groups)
    while len(groups) < _GROUPS:
        widest = max(range(len(groups)), key=lambda i: groups[i].kv[1] - groups[i].kv[0])
        (q, q_stop), (kv, kv_stop) = groups[widest]
        if kv_stop - kv == 1:
            break
        middle = (kv + kv_stop) // 2
        cut = q + (q_stop - q) // (kv_stop - kv) * (middle - kv)
        groups[widest : widest + 1] = [Heads((q, cut), (kv, middle)), Heads((cut, q_stop), (middle, kv_stop))]
    return groups


class Leaving(NamedTuple):
    """An exchange under way: the pending buffer, and by rank the fields of its message."""

    pending: Tensor
    fields: tuple[tuple[Field, ...], ...]
    own: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class HeadExchange:
    """The exchanges of one call on one rank.

    Attributes:
        group: name of the process group of axis ``cp_ulysses``.
        rank: this rank's position on it.
        heads: by rank, its groups of heads.
        rows: by rank of the axis, how many queries and how many keys it holds.
        together: how these are put together, of queries and of keys.
    """

    group: str
    rank: int
    heads: tuple[tuple[Heads, ...], ...]
    rows: tuple[tuple[int, ...], tuple[int, ...]]
    together: tuple[Members, Members]

    def run(
        self,
        tensors: Sequence[Tensor],
        kinds: Sequence[Kind],
        compute: Callable[[int, tuple[Tensor, ...]], Sequence[Tensor]],
        result_kinds: Sequence[Kind],
    ) -> list[Tensor]:
        """Compute something by heads that is given, and wanted, by tokens.

        Args:
            tensors: (B, N, L, ...) of this rank's tokens.
            kinds: which heads each has.
            compute: from a group's number and its tensors with all tokens in order to its results, likewise.
            result_kinds: which heads each result has.

        Returns:
            The results for this rank's tokens, with all heads; a head that several ranks computed is summed.
        """
        count = len(self.heads[0])
        leaving = []
        coming = self._gather(0, tensors, kinds)
        for number in range(count):
            gathered = self._gathered(coming, kinds)
            if number + 1 < count:
                coming = self._gather(number + 1, tensors, kinds)
            results = compute(number, gathered)
            del gathered  # before the next group's are put together
            leaving.append(self._scatter(number, results, result_kinds))
        arrived = [self._wait(one) for one in leaving]
        return [self._all_heads(arrived, i, kind) for i, kind in enumerate(result_kinds)]

    def _gather(self, number: int, tensors: Sequence[Tensor], kinds: Sequence[Kind]) -> Leaving:
        """Start sending a group's heads of this rank's tokens to the ranks that compute them."""
        messages = [self._heads_of(rank, number, tensors, kinds) for rank in range(len(self.heads))]
        mine = self.heads[self.rank][number]
        fields = [
            tuple(
                Field((x.shape[0], _size(mine.of(kind)), self._rows(rank, kind), *x.shape[3:]), x.dtype)
                for x, kind in zip(tensors, kinds, strict=True)
            )
            for rank in range(len(self.heads))
        ]
        return self._start(messages, fields)

    def _gathered(self, leaving: Leaving, kinds: Sequence[Kind]) -> tuple[Tensor, ...]:
        """Wait, and put the tokens of all ranks together in order."""
        arrived = self._wait(leaving)
        return tuple(self._in_order([message[i] for message in arrived], kind) for i, kind in enumerate(kinds))

    def _scatter(self, number: int, tensors: Sequence[Tensor], kinds: Sequence[Kind]) -> Leaving:
        """Start sending what was computed for a group's heads to the ranks that hold its tokens."""
        messages = [
            tuple(self._rows_of(rank, x, kind) for x, kind in zip(tensors, kinds, strict=True))
            for rank in range(len(self.heads))
        ]
        fields = [
            tuple(
                Field((x.shape[0], _size(heads[number].of(kind)), self._rows(self.rank, kind), *x.shape[3:]), x.dtype)
                for x, kind in zip(tensors, kinds, strict=True)
            )
            for heads in self.heads
        ]
        return self._start(messages, fields)

    def _all_heads(self, arrived: Sequence[Sequence[tuple[Tensor, ...]]], i: int, kind: Kind) -> Tensor:
        pieces = [
            (heads[number].of(kind), arrived[number][rank][i])
            for rank, heads in enumerate(self.heads)
            for number in range(len(heads))
            if not heads[number].is_empty
        ]
        pieces.sort(key=lambda piece: piece[0])
        if all(before[0][1] == after[0][0] for before, after in pairwise(pieces)):
            return torch.cat([piece for _, piece in pieces], HEADS_DIM)
        first = pieces[0][1]
        shape = (first.shape[0], max(stop for (_, stop), _ in pieces), *first.shape[2:])
        whole = first.new_zeros(shape, dtype=accumulation_dtype(first.dtype))
        for (start, stop), piece in pieces:
            whole.narrow(HEADS_DIM, start, stop - start).add_(piece)
        return whole

    def _start(self, messages: Sequence[tuple[Tensor, ...]], fields: Sequence[tuple[Field, ...]]) -> Leaving:
        own = messages[self.rank]  # which is not sent
        messages = [() if rank == self.rank else message for rank, message in enumerate(messages)]
        pieces = [flattened(message) for message in messages]
        sent = [sum(piece.numel() for piece in message) for message in pieces]
        buffer = torch.cat([piece for message in pieces for piece in message])
        received = [sum(field.nbytes for field in message) // buffer.itemsize for message in fields]
        received[self.rank] = 0
        return Leaving(all_to_all(buffer, sent, received, self.group), tuple(fields), own)

    def _wait(self, leaving: Leaving) -> list[tuple[Tensor, ...]]:
        buffer = wait(leaving.pending)
        arrived, offset = [], 0
        for rank, fields in enumerate(leaving.fields):
            if rank == self.rank:
                arrived.append(leaving.own)
                continue
            size = sum(field.nbytes for field in fields) // buffer.itemsize
            arrived.append(unpack(buffer.narrow(0, offset, size), fields))
            offset += size
        return arrived

    def _heads_of(self, rank: int, number: int, tensors: Sequence[Tensor], kinds: Sequence[Kind]) -> tuple[Tensor, ...]:
        heads = self.heads[rank][number]
        ranges = [heads.of(kind) for kind in kinds]
        return tuple(x.narrow(HEADS_DIM, start, stop - start) for x, (start, stop) in zip(tensors, ranges, strict=True))

    def _rows(self, rank: int, kind: Kind) -> int:
        return self.rows[kind != "q"][rank]

    def _in_order(self, parts: Sequence[Tensor], kind: Kind) -> Tensor:
        return self.together[kind != "q"].together.of(parts, SEQUENCE_DIM)

    def _rows_of(self, rank: int, x: Tensor, kind: Kind) -> Tensor:
        """The rows of one rank's tokens, out of those of all in order."""
        return self.together[kind != "q"].of[rank].of([x], SEQUENCE_DIM)


def _size(heads: tuple[int, int]) -> int:
    return heads[1] - heads[0]
