"""How blocks go round a ring: which come when, whose they are, and what is computed for them on its way behind them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from wallfacer_dt.algorithms.holdings import Holdings, Ranks, index_of
from wallfacer_dt.algorithms.segments import split_work
from wallfacer_dt.algorithms.steps import Attend, Hop, Start, Step, Wait
from wallfacer_dt.mesh import RING_AXIS


@dataclass(frozen=True)
class Rotation:
    """Every rank's own block moves round its ring."""

    held: Holdings
    _hops: dict[tuple[int, int, bool], Hop] = field(default_factory=dict, init=False)

    @property
    def blocks(self) -> int:
        """How many a rank sees, its own among them."""
        return len(self._route[0])

    @property
    def carries(self) -> bool:
        """Whether something is computed for them that comes home."""
        return self.held.is_given(self.held.rotating)

    def move(self, block: int) -> Hop:
        """By which a block comes."""
        before = 0 if block == 1 + self._route[1] else block - 1
        return self._hop(before, block)

    def carry(self, block: int) -> Hop:
        """By which what has been computed for a block goes on, behind it."""
        into = 0 if block in (self._route[1], self.blocks - 1) else block + 1
        return self._hop(block, into, partial=True)

    def owner(self, block: int) -> Ranks:
        """Whose a block is."""
        place = self.held.place
        return (index_of(place, (place.ring_rank - self._route[0][block]) % place.ring, place.team_rank),)

    def own(self, *, returns: bool) -> tuple[Attend, Attend | None]:
        """Own rows x own block; in two parts where something has to be hidden before it and after it.

        ``returns``: what is computed for the team's rows leaves.
        """
        whole = self.held.attend(0, 0, self.owner(0))
        if not (returns if self.blocks == 1 else self.carries):
            return whole, None
        now, later = (replace(whole, work=part) for part in split_work(whole.work))
        return now, later if later.work else None

    def goes_on(self, block: int) -> Iterator[Step]:
        """What has been computed for a block follows it, with what has come of it."""
        if self.carries:
            if block > 1:
                yield Wait(self.carry(block - 1))
            yield Start(self.carry(block))

    def coming_home(self) -> Iterator[Step]:
        """Wait for the last of what is carried."""
        if self.carries and self.blocks > 1:
            yield Wait(self.carry(self.blocks - 1))

    def _hop(self, start: int, stop: int, *, partial: bool = False) -> Hop:
        """By which a block becomes another: one object, since equal ones are compared field by field."""
        if (start, stop, partial) not in self._hops:
            ring, me, come = self.held.place.ring, self.held.place.ring_rank, self._route[0]
            to, source = ((me + way * (come[stop] - come[start])) % ring for way in (1, -1))
            self._hops[start, stop, partial] = Hop(self.held.rotating, start, stop, RING_AXIS, to, source, partial)
        return self._hops[start, stop, partial]

    @cached_property
    def _route(self) -> tuple[Sequence[int], int]:
        """By block how far it has come, and how many come the first way round.

        Block 0 is one's own. The distances, ascending, are visited outwards from it; what is nearer the other way comes
        that way, unless all are visited.
        """
        ring, distances = self.held.place.ring, self.held.offsets
        if len(distances) == ring - 1:
            return (0, *distances), ring - 1
        ahead = [distance for distance in distances if 2 * distance <= ring]
        back = [distance - ring for distance in reversed(distances) if 2 * distance > ring]
        return (0, *ahead, *back), len(ahead)
