"""What schedules consist of: transfers, their starts and waits, and what is computed in between."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import ClassVar, Generic, Literal, NamedTuple, TypeVar

from wallfacer_dt.algorithms.segments import Work
from wallfacer_dt.mesh import TEAM_AXIS
from wallfacer_dt.rows import Members

Side = Literal["q", "kv"]
SIDES: tuple[Side, Side] = ("q", "kv")
CONTEXT = "cp"  # both axes together
# The block that is all rows of a team: of the resident side the others', of the rotating side what comes home to them.
TEAM = -1


@dataclass(frozen=True, slots=True)
class Gather:
    """All-gather one side's data in the team."""

    kind: ClassVar[Literal["gather"]] = "gather"
    axis: ClassVar[str] = TEAM_AXIS
    partial: ClassVar[bool] = False
    side: Side

    def __str__(self) -> str:
        return f"all_gather {TEAM_AXIS} {self.side}"


@dataclass(frozen=True, slots=True)
class Exchange:
    """All-to-all of partial results in the team: everyone's go to their owner, who combines them."""

    kind: ClassVar[Literal["exchange"]] = "exchange"
    axis: ClassVar[str] = TEAM_AXIS
    partial: ClassVar[bool] = True
    side: Side

    def __str__(self) -> str:
        return f"all_to_all {TEAM_AXIS} partial {self.side}"


@dataclass(frozen=True, slots=True)
class Hop:
    """Pass on block ``block`` of a side, or what has been computed for it (``partial``), to one rank; as much comes.

    The receiver knows the data as block ``into``, and adds partial results to what it has of that; they have come to
    their owner where that is 0, or ``TEAM``. Blocks of the resident side are the rows of others of the team, numbered
    by how far they have come round it.
    """

    side: Side
    block: int
    into: int
    axis: str
    to: int
    source: int
    partial: bool = False

    def __hash__(self) -> int:
        """Of what tells a schedule's hops apart: whoever runs one looks each up twice."""
        return hash((self.side, self.block, self.into, self.partial))

    @property
    def kind(self) -> str:
        """Of data ``"move"``, round the team ``"pass"``, on the published schedule's way to its ring ``"place"``.

        Of partial results ``"carry"``, or where they come to their owner ``"home"``, round the team ``"return"``.
        """
        if self.partial:
            return "return" if self.axis == TEAM_AXIS else "home" if self.into in (0, TEAM) else "carry"
        return {TEAM_AXIS: "pass", CONTEXT: "place"}.get(self.axis, "move")

    def __str__(self) -> str:
        into = "home" if self.into == TEAM else f"into {self.side}[{self.into}]"
        what = f"partial {self.side}[{self.block}] {into}" if self.partial else f"{self.side}[{self.into}]"
        return f"permute {self.axis} {what} to {self.to} from {self.source}"


Transfer = Gather | Exchange | Hop


@dataclass(frozen=True, slots=True)
class Start:
    """Start a transfer."""

    transfer: Transfer

    def __str__(self) -> str:
        return f"start {self.transfer}"


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait for a started transfer and take up what it brought; ``completes`` as an :class:`Attend` does."""

    transfer: Transfer
    completes: tuple[Side, ...] = ()

    def __str__(self) -> str:
        return f"wait  {self.transfer}"


@dataclass(frozen=True, slots=True)
class Attend:
    """Attend rows of the resident side and a rotating block.

    ``rows``: which block of the resident side: 0 is one's own, ``TEAM`` all others'. ``frees``: the rotating block is
    not needed afterwards. ``completes``: the sides of whose own shard nothing more is computed, nor comes home.
    """

    resident: Side
    rows: int
    block: int
    work: Work
    stays: tuple[int, ...]  # the inner indices whose rows are attended of the resident side
    moves: tuple[int, ...]  # and those whose rows the rotating block holds
    frees: bool = False
    completes: tuple[Side, ...] = ()

    @property
    def part(self) -> Literal["local", "peer"]:
        """Whose rows: one's own, or others'."""
        return "peer" if self.rows else "local"

    def __str__(self) -> str:
        rotating = "kv" if self.resident == "q" else "q"
        work = "; ".join(map(str, self.work))
        whose = f"{self.part} {self.resident}" + f"[{self.rows}]" * (self.rows > 0)
        return f"      attend {whose} x {rotating}[{self.block}]: {work or 'nothing visible'}"


Step = Start | Wait | Attend
T = TypeVar("T")


class Parts(NamedTuple, Generic[T]):
    """Steps in program order, in parts between which another group of heads may go on: see ``turns``."""

    begins: tuple[T, ...]  # first transfers start
    comes: tuple[T, ...]  # up to the wait for the last data
    computes: tuple[T, ...]  # what is left to compute, while results leave
    ends: tuple[T, ...]  # waits for results that come home

    @classmethod
    def of(cls, steps: Iterable[Step]) -> "Parts[Step]":
        """A schedule's. They end where its transfers say, which are alike on all ranks, as what is computed is not."""
        some = (*steps,)
        begun = next((at for at, step in enumerate(some) if not isinstance(step, Start)), len(some))
        come = [at + 1 for at, step in enumerate(some) if isinstance(step, Wait) and not step.transfer.partial]
        has_come, done = max(come, default=begun), len(some)
        while done > has_come and isinstance(some[done - 1], Wait):
            done -= 1
        return Parts(*(some[start:stop] for start, stop in pairwise((0, begun, has_come, done, len(some)))))


@dataclass(frozen=True, slots=True)
class Schedule:
    """One rank's schedule of one attention call, forward or backward.

    Shards may differ in length; what is sent is as long as the longest, and nothing touches the rest.
    """

    parts: Parts[Step]  # in program order, the same kinds of transfers on every rank
    resident: Side  # the side that is gathered and stays
    # By side how a team's rows are put together: of the resident side without one's own, of a gathered other all.
    members: dict[Side, Members]
    padded_lengths: tuple[int, int]  # rows of a shard as it is sent, of queries and of keys
    # Rows of a rotating side that is gathered in the team, as they are sent: what is computed for its own shard comes
    # out of an exchange after all blocks then, and otherwise ends up in block 0. None: it is not gathered.
    gathered: int | None

    @property
    def steps(self) -> tuple[Step, ...]:
        """All of them."""
        return (*chain(*self.parts),)

    @property
    def rotating(self) -> Side:
        """The side that moves."""
        return "kv" if self.resident == "q" else "q"

    @property
    def transfers(self) -> list[Transfer]:
        """In the order in which they start."""
        return [step.transfer for step in self.steps if isinstance(step, Start)]

    def rows(self, transfer: Transfer) -> int:
        """How many rows a transfer brings from each of its sources."""
        if self.gathered is not None and isinstance(transfer, Hop):
            return self.gathered
        return self.padded_lengths[0 if transfer.side == "q" else 1]

    def __str__(self) -> str:
        return "\n".join(str(step) for step in self.steps)
