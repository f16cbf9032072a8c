"""How long a schedule takes: one rank's steps against links on two levels, each of which carries one thing at a time.

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
        transfer: seconds during which links were busy.
        bars: of lanes "compute", "intra" and "inter".
    """

    seconds: float = 0.0
    compute: float = 0.0
    waiting: float = 0.0
    copying: float = 0.0
    transfer: float = 0.0
    bars: list[Bar] = field(default_factory=list)

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
    line, free, arrives = Timeline(), [0.0, 0.0], {}
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
                arrives[name] = now, wire
                for level, (lane, seconds) in enumerate(zip(("intra", "inter"), on_links(wire, cluster), strict=True)):
                    if seconds:
                        start = max(now, free[level])
                        free[level] = start + seconds
                        line.bars.append(Bar(lane, name, start, free[level]))
                        line.transfer += seconds
                        arrives[name] = max(arrives[name][0], free[level]), wire
            case End(name):
                there, wire = arrives.pop(name)
                line.waiting += max(0.0, there - now)
                now = max(now, there)
                now += _copied(line, wire, copy)
    line.seconds = now
    return line


def _copied(line: Timeline, wire: Wire, copy: float) -> float:
    """Seconds of copying what is sent, or received: as much."""
    seconds = copy * wire.nbytes
    line.copying += seconds
    return seconds
