"""METP's attention as a rank's events: groups of heads one after the other, projected, attended and projected back.

The next group's weights are on their way while one is computed, and in the backward the last one's gradients are, too
(METP, algorithms 5 and 6; ``metp.projections`` sends as here). A rank that owns a group's weights receives nothing of
them, but as ranks wait for each other the events are those of one that owns none.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from wallfacer_dt.algorithms.head_groups import OUT, HeadGroup, head_groups
from wallfacer_dt.planning.attention import HOP
from wallfacer_dt.planning.candidates import Candidate
from wallfacer_dt.planning.cluster import Cluster
from wallfacer_dt.planning.groups import Group
from wallfacer_dt.planning.model import ModelShape, SequenceShape
from wallfacer_dt.planning.timeline import Begin, Compute, End, Event, Lag, Settle
from wallfacer_dt.planning.traffic import Ints

Heads = tuple[int, int]
"""How many query heads and key heads a group has."""


class ProjectedAttention:
    """One call of METP's attention on the ranks of a cluster, all of which share its weights.

    Args:
        candidate: how ranks share the sequence.
        model: whose heads.
        sequence: what is attended; weights, and their gradients where they are sent, have its dtype.
        cluster: where.
    """

    def __init__(self, candidate: Candidate, model: ModelShape, sequence: SequenceShape, cluster: Cluster) -> None:
        self.candidate, self.model, self.sequence, self.cluster = candidate, model, sequence, cluster
        # Of separate weights, without biases.
        self.groups = head_groups(model.heads, model.keys, model.dim, candidate.axes, fused=False)
        self._ranks = Group(candidate.size, 1, min(cluster.ranks, cluster.ranks_per_node))

    def events(self, attention: Callable[[Heads], Sequence[Event]], *, backward: bool) -> Iterator[Event]:
        """The rank's program.

        Args:
            attention: events of attention on so many heads.
            backward: those of the backward, which projects anew.

        Yields:
            The events in program order.
        """
        yield from self._weights(0)
        for number, group in enumerate(self.groups):
            yield from (End(self._named("weights", number, owner)) for owner in self._owners(number))
            yield from self._weights(number + 1)
            inward, outward = self._elements(group)
            launched = 8 if backward else 3
            yield self._compute(number, inward + 2 * outward if backward else inward, launched)
            yield from (_of_group(event, number) for event in attention(group.heads.counts))
            # By inputs and by weights.
            yield self._compute(number, 2 * inward if backward else outward, launched)
            if backward:
                yield from self._on_their_way(number)
                yield from self._gradients("sums", number)
        if backward:
            yield from self._on_their_way(len(self.groups))
            yield from self._on_their_way(len(self.groups) + 1)

    def received(self, *, backward: bool) -> Ints:
        """Bytes of weights, and in the backward of gradients, that every rank receives in a call."""
        ranks = self.candidate.size
        received = np.zeros(ranks, np.int64)
        for group in self.groups:
            for owner in group.by_owner:
                received += self._sent(group, owner)
                received[owner] -= self._sent(group, owner)
                if backward:
                    summed = (ranks - 1) * self._share(group, owner)
                    received += summed
                    received[owner] += summed
        return received

    def _on_their_way(self, number: int) -> Iterator[Event]:
        """Take up gradients of the group two before that have come home, and send home those of the one before."""
        if number > 1:
            yield from self._arrived("gradients", number - 2)
        if 0 < number <= len(self.groups):
            yield from self._arrived("sums", number - 1)
            yield from self._gradients("gradients", number - 1)

    def _arrived(self, what: str, number: int) -> Iterator[Event]:
        return (End(self._named(what, number, owner)) for owner in self._owners(number))

    def _weights(self, number: int) -> Iterator[Event]:
        for owner in self._owners(number):
            wire = self._ranks.broadcast(
                self._sent(self.groups[number], owner), is_striped=self.cluster.striped_gathers
            )
            yield Begin(self._named("weights", number, owner), wire, launches=HOP)

    def _gradients(self, what: str, number: int) -> Iterator[Event]:
        """To be summed, a part on every rank, or the sums home to the owner."""
        for owner in self._owners(number):
            share = self._share(self.groups[number], owner)
            wire = self._ranks.exchange(share) if what == "sums" else self._ranks.collect(share)
            yield Begin(self._named(what, number, owner), wire, launches=HOP)

    def _owners(self, number: int) -> Iterable[int]:
        """Of a group; none where there is no such group, and where there is one rank, which sends nothing."""
        return self.groups[number].by_owner if number < len(self.groups) and self.candidate.size > 1 else ()

    def _named(self, what: str, number: int, owner: int) -> str:
        return f"projections' {what} {number} of {owner}"

    def _part(self, group: HeadGroup, owner: int) -> int:
        """Elements that a rank has of a group's weights."""
        return self.model.hidden * sum(piece.length for piece in group.by_owner[owner])

    def _sent(self, group: HeadGroup, owner: int) -> int:
        return self._part(group, owner) * self.sequence.dtype.itemsize

    def _share(self, group: HeadGroup, owner: int) -> int:
        """Bytes of what a rank sums of a gradient."""
        return -(-self._part(group, owner) // self.candidate.size) * self.sequence.dtype.itemsize

    def _elements(self, group: HeadGroup) -> tuple[int, int]:
        """Elements of a group's projections to queries, keys and values, and of the one back."""
        lengths = [0, 0]
        for piece in group.pieces:
            lengths[piece.part == OUT] += self.model.hidden * piece.length
        return lengths[0], lengths[1]

    def _compute(self, number: int, elements: int, launched: int) -> Compute:
        tokens = self.sequence.batch * -(-self.sequence.length // self.candidate.size)
        return Compute(2 * tokens * elements / self.cluster.kernels.linear, f"projections {number}", launched)


def _of_group(event: Event, number: int) -> Event:
    """Attention's event, by a name that no other group's has."""
    if isinstance(event, Compute | Settle | Lag):
        return event
    return event._replace(name=f"{event.name} of heads {number}")
