"""A lower bound of what ranks, or nodes, receive: the least rows and columns with which work of a given area is done.

Parts (ranks, or nodes) own equal numbers of tokens, and share the pairs of a query and a key that a mask shows equally
among them; a part that works on a query, or key, that it does not own receives it, and what it has computed for it is
received by others. In the forward that is q and the output for a query, k and v for a key; in the backward q, the
output's gradient and dq, and k, v, dk and dv, where nothing is kept from the forward but what one owns. Averaged over
parts, so that one receives at least as much; lse and delta, and whatever else, are left out.

For one head and no mask this is design's 4 sqrt(P) U - 4 U. Heads that are not split only help: with h heads it is
about 4 sqrt(P / h) U, for P >= h.
"""

from math import sqrt
from typing import NamedTuple

from wallfacer_dt.planning import ModelShape, SequenceShape

_FORWARD, _BACKWARD = (2, 2), (3, 4)


class _Group(NamedTuple):
    """A key head with its query heads, tokens that a part owns and all, and tensors received for a query and a key."""

    shared: int
    own: float
    length: float
    query: int
    key: int

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
    """Bytes that the part which receives most receives at least in a call of attention, or in its forward alone."""
    tensors = (_FORWARD, _BACKWARD) if backward else (_FORWARD,)
    elements = sum(_elements(model, sequence, parts, *some) for some in tensors)
    return sequence.batch * model.dim * elements * sequence.dtype.itemsize


def _elements(model: ModelShape, sequence: SequenceShape, parts: int, query: int, key: int) -> float:
    own = sequence.length / parts
    group = _Group(model.heads // model.keys, own, sequence.length, query, key)
    # Of what a part owns, queries by keys, a causal mask hides nearly half.
    area = model.heads * (sequence.pairs() / parts + sequence.is_causal * own * (own - 1) / 2)
    free, full = group.shared * own**2, group.shared * group.length**2
    extra = area - model.keys * free
    if extra <= 0:
        return 0.0
    # More area costs ever more: keys come first as queries of many heads are dear, and there are few.
    if group.shared * own * query > key * group.length:
        return model.keys * group.cost(free + extra / model.keys)
    # A concave cost is least where all but one group have nothing or everything.
    whole, rest = divmod(extra, full - free)
    return whole * group.cost(full) + group.cost(free + rest)
