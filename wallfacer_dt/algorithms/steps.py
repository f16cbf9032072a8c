"""What schedules consist of: transfers, their starts and waits, and what is computed in between."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from wallfacer_dt.algorithms.segments import Work
from wallfacer_dt.mesh import TEAM_AXIS
from wallfacer_dt.rows import Members

Side = Literal["q", "kv"]
SIDES: tuple[Side, Side] = ("q", "kv")
Part = Literal["local", "peer"]
CONTEXT = "cp"  # both axes together
HOME = -1  # the place of what a published schedule carries back to the rank that the rows belong to


@dataclass(frozen=True, slots=True)
class Gather:
    """All-gather one side's data in the team."""

    kind: ClassVar[str] = "gather"
    axis: ClassVar[str] = TEAM_AXIS
    side: Side

    def __str__(self) -> str:
        return f"all_gather {TEAM_AXIS} {self.side}"


@dataclass(frozen=True, slots=True)
class Move:
    """Pass rotating block ``held`` on: the receiver knows it as block ``block``."""

    side: Side
    held: int
    block: int
    axis: str
    to: int
    source: int

    @property
    def kind(self) -> str:
        """``"place"`` on the published schedule's way to its ring."""
        return "place" if self.axis == CONTEXT else "move"

    def __str__(self) -> str:
        return f"permute {self.axis} {self.side}[{self.block}] to {self.to} from {self.source}"


@dataclass(frozen=True, slots=True)
class Carry:
    """Pass on what has been computed for rotating block ``block``; it is added to the receiver's ``into``.

    ``result`` is what that is called: gradients (``"dq"``, ``"dkv"``), or queries' outputs (``"out"``). It comes to its
    owner where that is 0, or ``HOME``.
    """

    side: Side
    block: int
    into: int
    axis: str
    to: int
    source: int
    result: str

    @property
    def kind(self) -> str:
        """``"home"`` where it comes to its owner."""
        return "home" if self.into in (0, HOME) else "carry"

    def __str__(self) -> str:
        into = "home" if self.into == HOME else f"into {self.result}[{self.into}]"
        what = f"{self.result}[{self.block}] {into}"
        return f"permute {self.axis} {what} to {self.to} from {self.source}"


@dataclass(frozen=True, slots=True)
class Exchange:
    """All-to-all of partial results in the team: everyone's go to their owner, who combines them."""

    kind: ClassVar[str] = "exchange"
    axis: ClassVar[str] = TEAM_AXIS
    side: Side

    def __str__(self) -> str:
        return f"all_to_all {TEAM_AXIS} partial {self.side}"


@dataclass(frozen=True, slots=True)
class _RoundTeam:
    """Of rows of the resident side that are attended ``distance`` ranks from their owner, round the team."""

    kind: ClassVar[str]
    what: ClassVar[str]
    axis: ClassVar[str] = TEAM_AXIS
    side: Side
    distance: int
    to: int
    source: int

    def __str__(self) -> str:
        return f"permute {TEAM_AXIS} {self.what}{self.side}+{self.distance} to {self.to} from {self.source}"


@dataclass(frozen=True, slots=True)
class Pass(_RoundTeam):
    """Pass them on, from where they have come ``distance - 1`` ranks."""

    kind: ClassVar[str] = "pass"
    what: ClassVar[str] = ""


@dataclass(frozen=True, slots=True)
class Return(_RoundTeam):
    """Send their partial result to the owner, who combines."""

    kind: ClassVar[str] = "return"
    what: ClassVar[str] = "partial "


Hop = Move | Carry | Pass | Return
"""What goes to one rank and comes from one."""

Transfer = Gather | Exchange | Hop


@dataclass(frozen=True, slots=True)
class Start:
    """Start a transfer."""

    transfer: Transfer

    def __str__(self) -> str:
        return f"start {self.transfer}"


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait for a started transfer and take up what it brought."""

    transfer: Transfer

    def __str__(self) -> str:
        return f"wait  {self.transfer}"


@dataclass(frozen=True, slots=True)
class Attend:
    """Attend the resident side's rows (own or the others') and a rotating block.

    ``distance``: of the others' rows only those that have come so far round the team; 0 for all. ``frees``: the block
    is not needed afterwards.
    """

    part: Part
    resident: Side
    block: int
    work: Work
    distance: int = 0
    frees: bool = False

    def __str__(self) -> str:
        rotating = "kv" if self.resident == "q" else "q"
        work = "; ".join(map(str, self.work))
        whose = f"{self.part} {self.resident}" + f"+{self.distance}" * bool(self.distance)
        return f"      attend {whose} x {rotating}[{self.block}]: {work or 'nothing visible'}"


Step = Start | Wait | Attend


@dataclass(frozen=True, slots=True)
class Schedule:
    """One rank's schedule of one attention call, forward or backward.

    Shards may differ in length; what is sent is as long as the longest, and nothing touches the rest.
    """

    steps: tuple[Step, ...]  # in program order, the same kinds of transfers on every rank
    resident: Side  # the side that is gathered and stays
    # What is computed for the own shard of the rotating side ends up in block 0 (``"block"``), or comes out of an
    # exchange after all blocks (``"exchange"``).
    home: Literal["block", "exchange"]
    peers: Members  # the team's rows of the resident side without one's own
    everyone: Members  # the whole team's rows of the rotating side; only for one that is gathered
    padded_lengths: tuple[int, int]  # rows of a shard as it is sent, of queries and of keys
    gathered: int  # rows of a rotating side that is gathered, as they are sent

    @property
    def transfers(self) -> list[Transfer]:
        """In the order in which they start."""
        return [step.transfer for step in self.steps if isinstance(step, Start)]

    def rows(self, transfer: Transfer) -> int:
        """How many rows a transfer brings from each of its sources."""
        if self.home == "exchange" and isinstance(transfer, Move | Carry):
            return self.gathered
        return self.padded_lengths[0 if transfer.side == "q" else 1]

    def __str__(self) -> str:
        return "\n".join(str(step) for step in self.steps)
