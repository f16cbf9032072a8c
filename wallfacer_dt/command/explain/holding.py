"""Whose rows a rotating block holds, followed back through the hops that brought it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from wallfacer_dt.algorithms.holdings import peer_of
from wallfacer_dt.algorithms.steps import Hop, Schedule
from wallfacer_dt.mesh import Coordinate


@dataclass(frozen=True, slots=True)
class Holding:
    """The blocks of all ranks of one group of heads.

    Attributes:
        schedules: by inner index.
        team: C.
        known: what has been found, by inner index and block.
    """

    schedules: Mapping[int, Schedule]
    team: int
    known: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)

    def of(self, inner: int, block: int) -> tuple[int, ...]:
        """The inner indices whose rows a rank has as a block when it computes with it."""
        if (inner, block) not in self.known:
            self.known[inner, block] = self._found(inner, block)
        return self.known[inner, block]

    def _found(self, inner: int, block: int) -> tuple[int, ...]:
        place = Coordinate(len(self.schedules) // self.team, self.team, *divmod(inner, self.team))
        for transfer in self.schedules[inner].transfers:
            if isinstance(transfer, Hop) and transfer.kind in ("move", "place") and transfer.into == block:
                source = peer_of(place, transfer.axis, transfer.source)
                # A placement (Algorithm 2) sends what its sender has gathered.
                return team_of(source, self.team) if block == 0 else self.of(source, transfer.block)
        return (inner,)


def team_of(inner: int, team: int) -> tuple[int, ...]:
    """The inner indices of a rank's team."""
    first = inner // team * team
    return tuple(range(first, first + team))
