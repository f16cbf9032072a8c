"""Ulysses: who computes which heads, as data made on the host, and the exchange of tokens for heads and back.

Ranks of axis ``cp_ulysses`` hold different tokens and all heads; after the exchange each holds all their tokens and
some heads (DeepSpeed-Ulysses). Query heads are split as evenly as they can be. A key and value head goes to every rank
that computes one of its query heads, so with fewer of them than ranks each is sent as often as it is needed and no
more, and its gradients are summed where they come back.

Heads are exchanged in groups: while one group's attention is computed, the next group is on its way, and the last one's
results are on theirs; see ``turns``.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate, groupby, pairwise
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from wallfacer_dt.algorithms.arithmetic import HEADS_DIM, SEQUENCE_DIM
from wallfacer_dt.algorithms.turns import Computing, Turn, last
from wallfacer_dt.collectives.functional import all_to_all, wait
from wallfacer_dt.collectives.send_buffer import Layout, Shares, layout
from wallfacer_dt.kernels.merge import accumulation_dtype
from wallfacer_dt.layout import check_length
from wallfacer_dt.rows import Members, Rows

Kind = Literal["q", "kv", "shared"]
"""Which heads of a tensor a rank is sent: its query heads, its key heads, or (of one head for all) that one."""
_KINDS: tuple[Kind, ...] = ("q", "kv", "shared")

_GROUPS = 4


class Heads(NamedTuple):
    """One group of one rank: query heads and key heads (start, stop), all key heads having as many query heads."""

    q: tuple[int, int]
    kv: tuple[int, int]

    def of(self, kind: Kind) -> tuple[int, int]:
        """The heads of a tensor of that kind."""
        return {"q": self.q, "kv": self.kv, "shared": (0, 0 if self.is_empty else 1)}[kind]

    @property
    def counts(self) -> tuple[int, int]:
        """How many query heads and how many key heads."""
        return self.q[1] - self.q[0], self.kv[1] - self.kv[0]

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute."""
        return self.q[0] == self.q[1]


def check_heads(heads: int, kv_heads: int, ulysses: int = 1) -> None:
    """Refuse (TypeError, ValueError) what are no heads, or too few to be split over so many ranks."""
    for name, number in (("heads", heads), ("kv_heads", kv_heads), ("ulysses", ulysses)):
        check_length(number, name)
    if heads % kv_heads:
        raise ValueError(f"heads must be a multiple of kv_heads, got {heads} and {kv_heads}")
    if heads < ulysses:
        raise ValueError(f"ulysses must be at most heads, which it splits, got {ulysses} and {heads}")


@lru_cache(maxsize=256)
def split_heads(heads: int, kv_heads: int, ulysses: int, *, hidden: bool) -> tuple[tuple[Heads, ...], ...]:
    """By rank of ``cp_ulysses``, its groups of heads; every rank has as many, some perhaps empty.

    >>> for groups in split_heads(10, 2, 4, hidden=False):
    ...     print(*groups)
    Heads(q=(0, 3), kv=(0, 1)) Heads(q=(0, 0), kv=(0, 0))
    Heads(q=(3, 5), kv=(0, 1)) Heads(q=(5, 6), kv=(1, 2))
    Heads(q=(6, 8), kv=(1, 2)) Heads(q=(0, 0), kv=(0, 0))
    Heads(q=(8, 10), kv=(1, 2)) Heads(q=(0, 0), kv=(0, 0))

    ``heads`` is at least ``ulysses`` and a multiple of ``kv_heads``; ``hidden`` makes several groups of a rank's heads,
    where it has several key heads and there is something to hide.
    """
    sizes = [heads // ulysses + (rank < heads % ulysses) for rank in range(ulysses)]
    ranks = [_groups(start, stop, heads // kv_heads) for start, stop in pairwise(accumulate(sizes, initial=0))]
    if hidden and ulysses > 1:
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
    runs = [list(run) for _, run in groupby(pieces, key=lambda piece: piece.counts[0])]
    return [Heads((run[0].q[0], run[-1].q[1]), (run[0].kv[0], run[-1].kv[1])) for run in runs]


def _divided(groups: list[Heads]) -> list[Heads]:
    """Up to ``_GROUPS`` groups, by halving the one with most key heads."""
    groups = list(groups)
    while len(groups) < _GROUPS:
        widest = max(range(len(groups)), key=lambda i: groups[i].counts[1])
        (q, q_stop), (kv, kv_stop) = groups[widest]
        if kv_stop - kv == 1:
            break
        middle = (kv + kv_stop) // 2
        cut = q + (q_stop - q) // (kv_stop - kv) * (middle - kv)
        groups[widest : widest + 1] = [Heads((q, cut), (kv, middle)), Heads((cut, q_stop), (middle, kv_stop))]
    return groups


class _Leaving(NamedTuple):
    """An exchange under way: what is pending, what others send in it, and what is not sent."""

    pending: Tensor
    shares: Shares
    own: tuple[Tensor, ...]


_Fields = tuple[tuple[int, Sequence[int], torch.dtype], ...]
"""Of tensors, the rows of the batch, their dims after that of tokens, and dtypes."""


@dataclass(frozen=True, eq=False)
class HeadExchange:
    """The exchanges of calls of one kind on one rank, and what is known of them from one call to the next."""

    group: str  # name of the process group of axis ``cp_ulysses``
    rank: int  # this rank's position on that axis
    heads: tuple[tuple[Heads, ...], ...]  # by rank, its groups of heads
    tokens: tuple[Members, Members]  # how the ranks' tokens are put together, of queries and of keys
    _known: dict[tuple[int, tuple[Kind, ...], _Fields], tuple[Shares, Shares]] = field(default_factory=dict, repr=False)

    def run(
        self,
        tensors: Sequence[Tensor],
        kinds: Sequence[Kind],
        turns: Iterable[Turn],
        compute: Callable[[int, tuple[Tensor, ...]], Computing[Sequence[Tensor]]],
        result_kinds: Sequence[Kind],
    ) -> list[Tensor]:
        """Compute something by heads that is given, and wanted, by tokens.

        Tensors and results are (B, N, L, ...) of this rank's tokens with all heads; those of ``compute`` have all
        tokens in order and the heads of the group whose number it is given. It pauses after every turn of the group but
        the last. A head that several ranks computed is summed. A result lies in memory as the first tensor of its kind
        does.
        """
        count = len(self.heads[0])
        computing: dict[int, Computing[Sequence[Tensor]]] = {}
        leaving = []
        coming = [self._start(0, tensors, kinds, HEADS_DIM)]  # at most one, which is let go when it has come
        for turn in turns:
            if turn.is_first:
                computing[turn.group] = compute(turn.group, self._gathered(coming.pop(), kinds))
                if turn.group + 1 < count:
                    coming.append(self._start(turn.group + 1, tensors, kinds, HEADS_DIM))
            if not turn.is_last:
                next(computing[turn.group])
            else:
                leaving.append(self._start(turn.group, last(computing.pop(turn.group)), result_kinds, SEQUENCE_DIM))
        come = [self._by_rank(some) for some in leaving]
        results = zip(*[zip(*ranks, strict=True) for ranks in come], strict=True)
        return [
            self._whole(parts, kind, tensors[kinds.index(kind)])
            for parts, kind in zip(results, result_kinds, strict=True)
        ]

    def _start(self, number: int, tensors: Sequence[Tensor], kinds: Sequence[Kind], dim: int) -> _Leaving:
        """Start sending every other rank, of a group of heads, its heads of one's own tokens or its tokens of these."""
        fields = tuple([(x.shape[0], x.shape[3:], x.dtype) for x in tensors])
        sent, received = self._shares(number, tuple(kinds), fields)[:: 1 if dim == HEADS_DIM else -1]
        if dim == HEADS_DIM:
            rows = [self._head_rows[kind][number] for kind in kinds]
        else:
            rows = [self.tokens[kind != "q"].rows for kind in kinds]
        own = tuple(some[self.rank].of(x, dim) for x, some in zip(tensors, rows, strict=True))
        pending = all_to_all(sent.packed(tensors, rows, dim), sent.splits, received.splits, self.group)
        return _Leaving(pending, received, own)

    def _by_rank(self, coming: _Leaving) -> list[tuple[Tensor, ...]]:
        """Wait: the tensors of every rank, one's own among them."""
        parts = {self.rank: coming.own}
        for first, stacked in coming.shares.views(wait(coming.pending, "all_to_all cp_ulysses", self.group)):
            parts |= enumerate(zip(*(x.unbind(0) for x in stacked), strict=True), first)
        return [parts[rank] for rank in range(len(parts))]

    def _gathered(self, coming: _Leaving, kinds: Sequence[Kind]) -> tuple[Tensor, ...]:
        """Wait, and put the tokens of all ranks together in order."""
        by_tensor = zip(*self._by_rank(coming), strict=True)
        return tuple(
            self.tokens[kind != "q"].together(x, SEQUENCE_DIM) for x, kind in zip(by_tensor, kinds, strict=True)
        )

    def _whole(self, parts: Sequence[Sequence[Tensor]], kind: Kind, like: Tensor) -> Tensor:
        """A result with all heads out of what, by number of a group and rank, was computed of some."""
        some = [part for ranks in parts for part in ranks]
        heads = [groups[number].of(kind) for number in range(len(parts)) for groups in self.heads]
        dim, by_tokens = HEADS_DIM, some[0].ndim > 3 and like.stride(HEADS_DIM) < like.stride(SEQUENCE_DIM)
        if by_tokens:
            dim, some = SEQUENCE_DIM, [part.transpose(HEADS_DIM, SEQUENCE_DIM) for part in some]
        total = max(stop for _, stop in heads)
        if sum(stop - start for start, stop in heads) == total:
            whole = torch.cat([part for _, part in sorted(zip(heads, some, strict=True), key=lambda one: one[0])], dim)
        else:  # several ranks compute some head
            shape = (*some[0].shape[:dim], total, *some[0].shape[dim + 1 :])
            whole = some[0].new_zeros(shape, dtype=accumulation_dtype(some[0].dtype))
            for (start, stop), part in zip(heads, some, strict=True):
                whole.narrow(dim, start, stop - start).add_(part)
        return whole.transpose(HEADS_DIM, SEQUENCE_DIM) if by_tokens else whole

    @cached_property
    def _head_rows(self) -> dict[Kind, list[tuple[Rows, ...]]]:
        return _head_rows(self.heads)

    def _shares(self, number: int, kinds: tuple[Kind, ...], fields: _Fields) -> tuple[Shares, Shares]:
        """By rank, its heads of one's own tokens, and its tokens of one's own heads."""
        key = (number, kinds, fields)
        if key not in self._known:
            me, ranks = self.rank, range(len(self.heads))
            sizes = [(self._head_rows[kind][number], self.tokens[kind != "q"].rows) for kind in kinds]

            def of(heads: int, tokens: int) -> Layout:
                shapes = [
                    (batch, n[heads].length, m[tokens].length, *dims)
                    for (batch, dims, _), (n, m) in zip(fields, sizes, strict=True)
                ]
                return layout(*zip(shapes, [dtype for *_, dtype in fields], strict=True))

            self._known[key] = (
                Shares([of(rank, me) for rank in ranks], me),
                Shares([of(me, rank) for rank in ranks], me),
            )
        return self._known[key]


@lru_cache(maxsize=64)
def _head_rows(heads: tuple[tuple[Heads, ...], ...]) -> dict[Kind, list[tuple[Rows, ...]]]:
    """By number of a group and rank, its heads in it, out of all heads; the same for every packing of documents."""
    groups = [*zip(*heads, strict=True)]
    return {kind: [tuple(Rows.at([np.array([one.of(kind)])]) for one in some) for some in groups] for kind in _KINDS}


head_exchange = lru_cache(maxsize=64)(HeadExchange)
"""Equal arguments give the same object."""
