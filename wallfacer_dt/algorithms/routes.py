"""The ways that blocks take: round a ring, and in WallFacer's published schedule. Pure numbers."""

from collections.abc import Sequence
from dataclasses import dataclass

from wallfacer_dt.mesh import Coordinate


@dataclass(frozen=True, slots=True)
class Route:
    """How rotating blocks come round a ring in the 2D schedule, block 0 being one's own.

    Attributes:
        ring: size of the ring.
        offsets: by block, how far it has come: first one way round, ascending, then what is nearer the other way.
        ahead: how many blocks come the first way.
    """

    ring: int
    offsets: tuple[int, ...]
    ahead: int

    @classmethod
    def of(cls, ring: int, distances: Sequence[int]) -> "Route":
        """The route that visits blocks at these distances, from 1 to ring - 1, ascending."""
        if len(distances) == ring - 1:
            return cls(ring, (0, *distances), ring - 1)
        ahead = [distance for distance in distances if 2 * distance <= ring]
        back = [distance - ring for distance in reversed(distances) if 2 * distance > ring]
        return cls(ring, (0, *ahead, *back), len(ahead))

    @property
    def blocks(self) -> int:
        """How many blocks are attended, one's own included."""
        return len(self.offsets)

    def held_before(self, block: int) -> int:
        """The block that is passed on to become this one."""
        return 0 if block == 1 + self.ahead else block - 1

    def into(self, block: int) -> int:
        """The block to which the result of this one is added where it goes next."""
        return 0 if block in (self.ahead, self.blocks - 1) else block + 1

    def move(self, block: int) -> int:
        """How much further round the ring the block has come than before its last hop."""
        return self.offsets[block] - self.offsets[self.held_before(block)]

    def carry(self, block: int) -> int:
        """How much further round the ring the result of this block goes."""
        return self.offsets[self.into(block)] - self.offsets[block]


@dataclass(frozen=True, slots=True)
class PublishedRoute:
    """Whom one rank's blocks come from in the published schedule (WallFacer, Algorithms 2 and 3)."""

    place: Coordinate

    @property
    def blocks(self) -> int:
        """P / C^2, how many blocks are attended: "team group size" of the algorithms."""
        return self.place.ring // self.place.team

    @property
    def next(self) -> int:
        """The ring rank to which blocks are passed on (Algorithm 3)."""
        return self._group * self.blocks + (self.place.ring_rank + 1) % self.blocks

    @property
    def previous(self) -> int:
        """The ring rank from which they come."""
        return self._group * self.blocks + (self.place.ring_rank - 1) % self.blocks

    @property
    def placed_from(self) -> int:
        """The inner index whose team's rows are placed here (Algorithm 2, read backwards)."""
        position = self.place.ring_rank % self.blocks
        return (position * self.place.team + self.place.team_rank) * self.place.team + self._group

    @property
    def fetched_from(self) -> int:
        """The inner index where this rank's team's rows, as it placed them, are after the last hop."""
        first = self.place.ring_rank // self.place.team
        last = self.place.team_rank * self.blocks + (first + self.blocks - 1) % self.blocks
        return last * self.place.team + self.place.ring_rank % self.place.team

    @property
    def _group(self) -> int:
        return self.place.ring_rank // self.blocks
