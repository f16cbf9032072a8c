"""How long a schedule takes: one rank's steps against links on two levels, each shared by what is under way on it.

Ranks are taken to run in step, so one of those with most work stands for all, and what a link of a node carries is what
all its ranks receive in that transfer.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from wallfacer_dt.planning.cluster import Cluster
from wallfacer_dt.planning.traffic import Wire


class Compute(NamedTuple):
    """Compute for so many seconds."""

    seconds: float
    what: str = ""


class Begin(NamedTuple):
    """Start a transfer."""

    name: str
    wire: Wire


class End(NamedTuple):
    """Wait for a transfer."""

    name: str


Event = Compute | Begin | End


class Bar(NamedTuple):
    """What something took from when to when, in seconds."""

    lane: str
    what: str
    start: float
    stop: float


@dataclass(slots=True)
class Timeline:
    """What came of a run.

    Attributes:
        seconds: from the first event to the last.
        compute: seconds of computing.
        waiting: seconds of waiting for transfers.
        copying: seconds of copying what is sent, and what comes.
        intra: seconds during which the link within a node was busy.
        inter: the same of the one between nodes.
        bars: of lanes "compute", "intra" and "inter".
    """

    seconds: float = 0.0
    compute: float = 0.0
    waiting: float = 0.0
    copying: float = 0.0
    intra: float = 0.0
    inter: float = 0.0
    bars: list[Bar] = field(default_factory=list)

    @property
    def busy(self) -> tuple[float, float]:
        """Seconds in which each link was busy."""
        return self.intra, self.inter

    @property
    def transfer(self) -> float:
        """The sum of both."""
        return self.intra + self.inter

    @property
    def exposed(self) -> float:
        """Seconds of both: what is not hidden."""
        return self.waiting + self.copying

    @property
    def overlapped(self) -> float:
        """Seconds of transfers that are hidden behind computing or other transfers."""
        return max(0.0, self.transfer - self.waiting)


def on_links(wire: Wire, cluster: Cluster) -> tuple[float, float]:
    """Seconds that a transfer takes of the link within a node, and of the one between nodes."""
    intra = inter = 0.0
    if wire.intra:
        intra = cluster.intra.latency * wire.near + wire.intra / cluster.intra.bandwidth
    if wire.inter:
        lanes = cluster.inter.bandwidth / cluster.nics
        inter = max(wire.node / cluster.inter.bandwidth, wire.inter / lanes) + cluster.inter.latency * wire.far
    return intra, inter


def run(events: Iterable[Event], cluster: Cluster) -> Timeline:
    """Run events in order."""
    line, lanes, under_way = Timeline(), (_Lane(), _Lane()), {}
    copy = cluster.kernels.copy
    now = 0.0
    for event in events:
        match event:
            case Compute(seconds, what):
                line.bars.append(Bar("compute", what, now, now + seconds))
                line.compute += seconds
                now += seconds
            case Begin(name, wire):
                now += _copied(line, wire, copy)
                under_way[name] = wire, now
                for lane, seconds in zip(lanes, on_links(wire, cluster), strict=True):
                    lane.begin(name, seconds, now)
            case End(name):
                wire, began = under_way.pop(name)
                there = now
                for lane, level in zip(lanes, ("intra", "inter"), strict=True):
                    arrives = lane.end(name)
                    if arrives is not None:
                        line.bars.append(Bar(level, name, began, arrives))
                        there = max(there, arrives)
                line.waiting += there - now
                now = there + _copied(line, wire, copy)
    line.seconds, line.intra, line.inter = now, lanes[0].busy, lanes[1].busy
    return line


class _Lane:
    """A link that is shared evenly by all that is under way."""

    def __init__(self) -> None:
        self.busy = 0.0  # seconds in which something was under way
        self._now = 0.0
        self._left: dict[str, float] = {}  # seconds that each needs alone
        self._arrived: dict[str, float] = {}

    def begin(self, name: str, seconds: float, now: float) -> None:
        """Something that alone takes so long, perhaps nothing."""
        if seconds:
            self._run_until(now)
            self._left[name] = seconds

    def end(self, name: str) -> float | None:
        """When it arrives, if nothing more begins before; None where nothing went over this link."""
        while name in self._left:
            self._next()
        return self._arrived.pop(name, None)

    def _run_until(self, now: float) -> None:
        while self._left and self._now + self._first * len(self._left) <= now:
            self._next()
        if self._left and now > self._now:
            each = (now - self._now) / len(self._left)
            self._left = {name: left - each for name, left in self._left.items()}
            self.busy += now - self._now
        self._now = max(self._now, now)

    @property
    def _first(self) -> float:
        return min(self._left.values())

    def _next(self) -> None:
        """Go on until the next one has arrived, or several that end together."""
        first, some = self._first, self._left
        self._now += first * len(some)
        self.busy += first * len(some)
        self._left = {name: left - first for name, left in some.items() if left > first}
        self._arrived.update((name, self._now) for name in some.keys() - self._left.keys())


def _copied(line: Timeline, wire: Wire, copy: float) -> float:
    """Seconds of copying what is sent, or received: as much."""
    seconds = copy * wire.nbytes
    line.copying += seconds
    return seconds
