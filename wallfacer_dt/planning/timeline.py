"""How long a schedule takes: one rank's steps against links on two levels, each of which carries one thing at a time.

Beside these there may be transfers in the background, which FSDP's are: also one at a time, and while a link has some
of both, each gets half of it, as communicators of NCCL share it.

Ranks are taken to run in step, so one of those with most work stands for all, and what a link of a node carries is what
all its ranks receive in that transfer.
"""

import math
from collections import deque
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
    """Start a transfer, which waits for those before it; one in the background for those alone that are so, too."""

    name: str
    wire: Wire
    is_background: bool = False


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
        intra: seconds of work of the link within a node.
        inter: seconds of work of the one between nodes.
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
        """Seconds of work that each link had to do."""
        return self.intra, self.inter

    @property
    def transfer(self) -> float:
        """Seconds of work of both links."""
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


class _Sent:
    """A transfer on one link: its seconds of work, how much of that is left, and when it began and was there."""

    __slots__ = ("bar", "left", "start", "stop")

    def __init__(self, lane: str, name: str, seconds: float) -> None:
        self.bar, self.left = (lane, name), seconds
        self.start = self.stop = math.nan


class _Lane:
    """One link: what waits for it, in the foreground and in the background, as of a time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.queues: tuple[deque[_Sent], deque[_Sent]] = (deque(), deque())

    def begin(self, sent: _Sent, now: float, is_background: bool) -> None:
        self.advance(now)
        self.queues[is_background].append(sent)

    def finish(self, sent: _Sent) -> float:
        """When it is there, as nothing else is begun before."""
        while sent.stop != sent.stop:  # still unknown
            self._step(math.inf)
        return sent.stop

    def advance(self, now: float) -> None:
        """Until then."""
        while self.now < now:
            if not (self.queues[0] or self.queues[1]):
                self.now = now
                return
            self._step(now)

    def _step(self, latest: float) -> None:
        """Until something is there, or the latest."""
        heads = [queue[0] for queue in self.queues if queue]
        share = len(heads)
        for head in heads:
            if head.start != head.start:
                head.start = self.now
        least = min(head.left for head in heads)
        stop = self.now + share * least
        if stop > latest:
            least, stop = (latest - self.now) / share, latest
        self.now = stop
        for queue in self.queues:
            if queue:
                head = queue[0]
                head.left -= least
                if head.left <= 0 and stop < math.inf:
                    head.stop = stop
                    queue.popleft()


def run(events: Iterable[Event], cluster: Cluster) -> Timeline:
    """Run events in order."""
    line, sending = Timeline(), {}
    lanes = {"intra": _Lane(), "inter": _Lane()}
    copy = cluster.kernels.copy
    now = 0.0
    transfers: list[_Sent] = []
    for event in events:
        match event:
            case Compute(seconds, what):
                line.bars.append(Bar("compute", what, now, now + seconds))
                line.compute += seconds
                now += seconds
            case Begin(name, wire, is_background):
                now += _copied(line, wire, copy)
                parts, work = [], on_links(wire, cluster)
                line.intra, line.inter = line.intra + work[0], line.inter + work[1]
                for (level, lane), seconds in zip(lanes.items(), work, strict=True):
                    if seconds:
                        sent = _Sent(level, name, seconds)
                        lane.begin(sent, now, is_background)
                        parts.append((lane, sent))
                        transfers.append(sent)
                sending[name] = parts, wire, now
            case End(name):
                parts, wire, there = sending.pop(name)
                for lane, sent in parts:
                    there = max(there, lane.finish(sent))
                line.waiting += max(0.0, there - now)
                now = max(now, there)
                now += _copied(line, wire, copy)
    line.seconds = now
    line.bars += (Bar(*sent.bar, sent.start, sent.stop) for sent in transfers if sent.stop == sent.stop)
    return line


def _copied(line: Timeline, wire: Wire, copy: float) -> float:
    """Seconds of copying what is sent, or received: as much."""
    seconds = copy * wire.nbytes
    line.copying += seconds
    return seconds
