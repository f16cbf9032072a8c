"""What one rank's schedule is made of: the rows that ranks hold, and what this one computes of a block."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from wallfacer_dt.algorithms.masks import Mask
from wallfacer_dt.algorithms.segments import Sees, Stored, Work, plan_block
from wallfacer_dt.algorithms.steps import CONTEXT, TEAM, Attend, Exchange, Side, Start, Step
from wallfacer_dt.layout import Shards, in_order
from wallfacer_dt.mesh import TEAM_AXIS, Coordinate
from wallfacer_dt.rows import Members

Ranks = tuple[int, ...]
"""Inner indices."""


@dataclass(frozen=True, eq=False)
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
    # What is computed of whose rows of the resident side and of the other; a backward's may be its forward's.
    works: dict[tuple[Ranks, Ranks], Work] = field(default_factory=dict)
    _rows: dict[tuple[Side, Ranks], list[Stored]] = field(default_factory=dict)

    @property
    def rotating(self) -> Side:
        """The side that moves round the ring."""
        return "kv" if self.resident == "q" else "q"

    def is_given(self, side: Side) -> bool:
        """Whether something is computed for a side."""
        return self.backward or side == "q"

    def attend_all(self, block: int, moves: Ranks, exchange: Exchange | None) -> Iterator[Step]:
        """Others' rows and then one's own with a block; the exchange, if any, starts between them."""
        if self.place.team > 1:
            yield self.attend(TEAM, block, moves)
            if exchange:
                yield Start(exchange)
        yield self.attend(0, block, moves)

    def attend(self, number: int, block: int, moves: Ranks) -> Attend:
        """Rows of the resident side, by their number, with a block of some ranks' rows; see ``steps.Attend``."""
        if not any(self.held.values()):
            return Attend(self.resident, number, block, (), (), moves)
        place = self.place
        distances = range(1, place.team) if number == TEAM else (number,)  # round the team
        mates = [(place.team_rank - distance) % place.team for distance in distances]
        stays = tuple([index_of(place, place.ring_rank, mate) for mate in mates])
        return Attend(self.resident, number, block, self.work(stays, moves), stays, moves)

    def work(self, stays: Ranks, moves: Ranks) -> Work:
        """What is computed of some ranks' rows of the resident side and some ranks' of the other."""
        if (stays, moves) not in self.works:
            blocks = self._stored(self.resident, stays), self._stored(self.rotating, moves)
            self.works[stays, moves] = self.planned(*blocks if self.resident == "q" else blocks[::-1])
        return self.works[stays, moves]

    def planned(self, queries: Sequence[Stored], keys: Sequence[Stored]) -> Work:
        """What is computed of these, by row of the batch."""
        return plan_block(queries, keys, self.sees)

    def _stored(self, side: Side, owners: Ranks) -> list[Stored]:
        if (side, owners) not in self._rows:
            rows = [
                shards[owners[0]] if len(owners) == 1 else in_order((i, shards[i]) for i in owners).span
                for shards in self.held[side]
            ]
            self._rows[side, owners] = Stored.by_row(rows, self.mask)
        return self._rows[side, owners]

    def put_together(self, side: Side, exclude: int | None = None) -> Members:
        """How the rows of one's own team are put together."""
        first, team = index_of(self.place, self.place.ring_rank, 0), range(self.place.team)
        pieces = [in_order((m, shards[first + m]) for m in team if m != exclude) for shards in self.held[side]]
        return Members.made(pieces, self.place.team)


def index_of(place: Coordinate, ring_rank: int, team_rank: int) -> int:
    """The inner index of another rank of one's own mesh."""
    return ring_rank * place.team + team_rank


def peer_of(place: Coordinate, axis: str, position: int) -> int:
    """The inner index of whoever a transfer over an axis names by its position there."""
    if axis == TEAM_AXIS:
        return index_of(place, place.ring_rank, position)
    return position if axis == CONTEXT else index_of(place, position, place.team_rank)
