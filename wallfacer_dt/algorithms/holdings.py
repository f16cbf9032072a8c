"""What one rank's schedule is made of: the rows that ranks hold, and what this one computes of a block."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from wallfacer_dt.algorithms.masks import Mask
from wallfacer_dt.algorithms.segments import ByRow, Sees, plan_work
from wallfacer_dt.algorithms.steps import CONTEXT, TEAM, Attend, Exchange, Side, Start, Step
from wallfacer_dt.layout import Pieces, Shards, in_order
from wallfacer_dt.mesh import TEAM_AXIS, Coordinate
from wallfacer_dt.rows import Members


@dataclass(frozen=True)
class Holdings:
    """Who holds which rows, seen from one rank."""

    place: Coordinate  # the rank's coordinate; or of many ranks, see ``schedule.outline``
    resident: Side  # the side that stays
    backward: bool  # something is computed for both sides, and not for queries only
    # The distances round the ring, other than 0, at which some rank needs a rotating block, ascending.
    offsets: tuple[int, ...]
    mask: Mask
    # By side and row of the batch, the positions of every inner index; no rows where only transfers are asked for, as
    # then there is nothing to compute.
    held: dict[Side, Sequence[Shards]]
    sees: Sees | None = None  # of a mask that is asked

    @property
    def rotating(self) -> Side:
        """The side that moves round the ring."""
        return "kv" if self.resident == "q" else "q"

    def is_given(self, side: Side) -> bool:
        """Whether something is computed for a side."""
        return self.backward or side == "q"

    def attend_all(self, block: int, rotating: ByRow, exchange: Exchange | None) -> Iterator[Step]:
        """Others' rows and then one's own with a block; the exchange, if any, starts between them."""
        if self.place.team > 1:
            yield self.attend(TEAM, block, rotating)
            if exchange:
                yield Start(exchange)
        yield self.attend(0, block, rotating)

    def attend(self, number: int, block: int, rotating: ByRow) -> Attend:
        """Rows of the resident side, by their number, with a block; see ``steps.Attend``."""
        rows = self._peers if number == TEAM else self.shard(self.resident, mate_of(self.place, number))
        queries, keys = (rows, rotating) if self.resident == "q" else (rotating, rows)
        work = plan_work(queries, keys, self.mask, self.sees) if queries else ()
        return Attend(self.resident, number, block, work)

    @cached_property
    def _peers(self) -> ByRow:
        """The positions of the others of one's team, of the resident side."""
        return self.team(self.resident, self.place.ring_rank, exclude=self.place.team_rank)

    def shard(self, side: Side, index: int) -> ByRow:
        """By row of the batch, the positions that an inner index holds."""
        return [shards[index] for shards in self.held[side]]

    def team(self, side: Side, ring_rank: int, exclude: int | None = None) -> ByRow:
        """The positions of a team."""
        return [pieces.span for pieces in self._pieces(side, ring_rank, exclude)]

    def _pieces(self, side: Side, ring_rank: int, exclude: int | None) -> list[Pieces]:
        """By row of the batch, whose the positions of a team are."""
        first, team = index_of(self.place, ring_rank, 0), range(self.place.team)
        return [in_order((m, shards[first + m]) for m in team if m != exclude) for shards in self.held[side]]

    def put_together(self, side: Side, exclude: int | None = None) -> Members:
        """How the rows of one's own team are put together."""
        return Members.made(self._pieces(side, self.place.ring_rank, exclude), self.place.team)


def index_of(place: Coordinate, ring_rank: int, team_rank: int) -> int:
    """The inner index of another rank of one's own mesh."""
    return ring_rank * place.team + team_rank


def mate_of(place: Coordinate, distance: int) -> int:
    """The inner index of whose rows come so far round one's team."""
    return index_of(place, place.ring_rank, (place.team_rank - distance) % place.team)


def peer_of(place: Coordinate, axis: str, position: int) -> int:
    """The inner index of whoever a transfer over an axis names by its position there."""
    if axis == TEAM_AXIS:
        return index_of(place, place.ring_rank, position)
    return position if axis == CONTEXT else index_of(place, position, place.team_rank)
