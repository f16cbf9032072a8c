"""A lower bound of what ranks, or nodes, receive: the least rows and columns with which work of a given area is done.

Parts (ranks, or nodes) own equal numbers of tokens, and share the pairs of a query and a key that a mask shows equally
among them; a part that works on a query, or key, that it does not own receives it, and what it has computed for it is
received by others. In the forward that is q and the output for a query, k and v for a key; in the backward q, the
output's gradient and dq, and k, v, dk and dv, where nothing is kept from the forward but what one owns. Averaged over
parts, so that one receives at least as much; lse and delta, and whatever else, are left out.

For one head and no mask this is design's 4 sqrt(P) U - 4 U. Heads that are not split only help: with h heads it is
about 4 sqrt(P / h) U, for P >= h.
"""

from dataclasses import dataclass
from math import sqrt

from wallfacer_dt.planning import ModelShape, SequenceShape

_FORWARD, _BACKWARD = (2, 2), (3, 4)


@dataclass(frozen=True, slots=True)
class _Group:
    """One key head with its query heads, as a part sees it.

    Attributes:
        shared: query heads of the key head.
        own: tokens that the part owns.
        length: tokens of all.
        query: tensors received for a query's row that is not owned.
        key: for a key's.
    """

    shared: int
    own: float
    length: float
    query: int
    key: int

    @property
    def areas(self) -> tuple[float, float]:
        """Of what is owned, and of everything."""
        return self.shared * self.own**2, self.shared * self.length**2

    @property
    def is_convex(self) -> bool:
        """Whether more area costs ever more: keys come first as queries of many heads are dear, and there are few."""
        return self.shared * self.own * self.query > self.key * self.length

    def cost(self, area: float) -> float:
        """The least rows to receive, each counted as often as tensors are received for it, to have an area.

        >>> _Group(1, 2, 8, 2, 2).cost(4)
        0.0
        >>> _Group(1, 2, 8, 2, 2).cost(16)
        8.0
        """
        least = max(self.own, area / (self.shared * self.length))
        most = min(self.length, area / (self.shared * self.own))
        columns = min(max(sqrt(area * self.query / self.key), least), most)
        return self.query * (area / columns - self.shared * self.own) + self.key * (columns - self.own)


def least_received(model: ModelShape, sequence: SequenceShape, parts: int, *, backward: bool = True) -> float:
    """Bytes that the part which receives most receives at least, in one call of attention.

    Args:
        model: whose heads.
        sequence: what is attended, with or without a causal mask.
        parts: ranks, or nodes.
        backward: and forward, or the forward alone.

    Returns:
        The bytes.
    """
    tensors = (_FORWARD, _BACKWARD) if backward else (_FORWARD,)
    return sum(_elements(model, sequence, parts, *some) for some in tensors) * sequence.dtype.itemsize


def least_of_teams(model: ModelShape, sequence: SequenceShape, ranks: int) -> float:
    """The least that a rank receives in the forward from rings and teams of any size, heads not split.

    That is 2(C - 1) U + 2g(P / C - 1) U at C = sqrt(g P), which need not be a whole number, within 1 and P.

    Args:
        model: whose heads.
        sequence: what is attended; the mask does not matter.
        ranks: P.

    Returns:
        Bytes, lse left out.
    """
    g = model.keys / model.heads
    team = min(max(sqrt(g * ranks), 1.0), ranks)
    shard = sequence.batch * sequence.length * model.heads * model.dim / ranks
    return (2 * (team - 1) + 2 * g * (ranks / team - 1)) * shard * sequence.dtype.itemsize


def _elements(model: ModelShape, sequence: SequenceShape, parts: int, query: int, key: int) -> float:
    length = sequence.length
    own = length / parts
    group = _Group(model.heads // model.keys, own, length, query, key)
    # Of what a part owns, queries by keys, a causal mask hides nearly half.
    area = model.heads * (sequence.pairs() / parts + sequence.is_causal * own * (own - 1) / 2)
    return sequence.batch * model.dim * _least(group, model.keys, area)


def _least(group: _Group, groups: int, area: float) -> float:
    """Shared among groups so that it costs least; what is owned costs nothing."""
    free, full = group.areas
    extra = area - groups * free
    if extra <= 0:
        return 0.0
    if group.is_convex:
        return groups * group.cost(free + extra / groups)
    # A concave cost is least where all but one group have nothing or everything.
    whole, rest = divmod(extra, full - free)
    return whole * group.cost(full) + group.cost(free + rest)
