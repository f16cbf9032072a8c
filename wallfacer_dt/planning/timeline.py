"""How long a schedule takes: one rank's steps against links on two levels, each shared by what is under way on it.

Ranks that have as much to do run in step, so one stands for all; others are run together (``last_of``). What a link of
a node carries is what all its ranks receive in that transfer, whether or not this rank is one of them.

Note [Latency]
A link's bytes are shared and its latency is not: of messages that are under way together each waits for its own, and
only then takes part of the link (Hockney 1994 has a message's time as the sum of both). Where a rank receives messages
one after the other, in a gather, their latencies are taken to come first.

Note [The host]
A GPU runs what its host has launched. Here it never waits for that; in a row of like layers the host is ahead by as
much as it can be, and whichever of the two takes longer says how long a layer takes (``step``).
"""

import math
from bisect import insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from wallfacer_dt.planning.cluster import Cluster
from wallfacer_dt.planning.traffic import Wire


class Compute(NamedTuple):
    """Compute for so many seconds, by so many operations that the host launches."""

    seconds: float
    what: str = ""
    launches: int = 0


class Begin(NamedTuple):
    """Start a transfer.

    Attributes:
        name: it.
        wire: how much of it comes over which link.
        sources: of ranks that run together, whom it comes from.
        late: seconds until the last of these starts to send.
        launches: operations that the host launches for it, with what is copied for it and from it.
    """

    name: str
    wire: Wire
    sources: tuple[int, ...] = ()
    late: float = 0.0
    launches: int = 0


class End(NamedTuple):
    """Wait for a transfer."""

    name: str


class Settle(NamedTuple):
    """Wait for what only others of the node receive of what was begun: whoever waits for them ends no sooner."""


class Lag(NamedTuple):
    """The host of another rank launches so many operations more than this one's: who waits for it is as late.

    Under METP of each group of heads, so that where groups' slowest hosts are of unlike ranks it is a little too many.
    """

    launches: int


Event = Compute | Begin | End | Settle | Lag

_NEVER = math.inf


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
        intra: seconds during which something was under way on the link within a node.
        inter: the same of the one between nodes.
        busy: seconds in which bytes came over each of them.
        host: seconds in which the host launches all that, or of ranks that wait for it another's; see Note [The host].
        bars: of lanes "compute", "intra" and "inter".
    """

    seconds: float = 0.0
    compute: float = 0.0
    waiting: float = 0.0
    copying: float = 0.0
    intra: float = 0.0
    inter: float = 0.0
    busy: tuple[float, float] = (0.0, 0.0)
    host: float = 0.0
    bars: list[Bar] = field(default_factory=list)

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


def on_links(wire: Wire, cluster: Cluster) -> tuple[tuple[float, float], tuple[float, float]]:
    """Of the link within a node, and of the one between nodes: seconds of latency, and those that bytes take alone."""
    intra = inter = (0.0, 0.0)
    if wire.intra:
        intra = cluster.intra.latency * wire.near, wire.intra / cluster.intra.bandwidth
    if wire.node:
        lane = cluster.inter.bandwidth / cluster.nics
        inter = cluster.inter.latency * wire.far, max(wire.node / cluster.inter.bandwidth, wire.inter / lane)
    return intra, inter


def run(events: Iterable[Event], cluster: Cluster, *, shares_links: bool = True) -> Timeline:
    """Run events in order.

    Args:
        events: of a rank.
        cluster: where.
        shares_links: evenly, see Note [Latency]. If not, everything comes as if it came alone, and so no later than in
            any run of these events, whatever others are between or beside them.

    Returns:
        What came of it.
    """
    rank = _Rank(cluster, shares_links=shares_links)
    for event in events:
        rank.run(event)
    return rank.finished()


def work(events: Iterable[Event], cluster: Cluster) -> tuple[float, float]:
    """Seconds in which bytes of what is begun come over each link: a :class:`Timeline`'s ``busy``."""
    begun = [on_links(event.wire, cluster) for event in events if isinstance(event, Begin)]
    return sum(intra for (_, intra), _ in begun), sum(inter for _, (_, inter) in begun)


def launches(event: Event) -> int:
    """How many operations the host launches for it."""
    return event.launches if isinstance(event, Compute | Begin | Lag) else 0


def last_of(programs: Sequence[Iterable[Event]], cluster: Cluster) -> tuple[int, list[Event]]:
    """Run ranks together, what comes from others starting when they send it; and see which is through last.

    Args:
        programs: the events of every rank: the same transfers, with more or less to compute between them.
        cluster: where.

    Returns:
        Which rank, and its events, which say how late others were.
    """
    ranks, ran = [_Rank(cluster) for _ in programs], [list[Event]() for _ in programs]
    for steps in zip(*map(_to_transfers, programs), strict=True):
        for rank, some, (computing, _) in zip(ranks, ran, steps, strict=True):
            some += computing
            for event in computing:
                rank.run(event)
        starts = [rank.now for rank in ranks]
        for rank, some, (_, event) in zip(ranks, ran, steps, strict=True):
            if event is None:
                continue
            if isinstance(event, Begin):
                event = event._replace(late=max([0.0, *(starts[source] - rank.now for source in event.sources)]))
            some.append(event)
            rank.run(event)
    last = max(range(len(ranks)), key=lambda index: ranks[index].now)
    return last, ran[last]


def _to_transfers(events: Iterable[Event]) -> Iterator[tuple[list[Compute], Begin | End | Settle | Lag | None]]:
    """What a rank computes up to each start of a transfer and each wait, and that; at last what it computes then."""
    some: list[Compute] = []
    for event in events:
        if isinstance(event, Compute):
            some.append(event)
        else:
            yield some, event
            some = []
    yield some, None


class _Rank:
    """A rank on its links."""

    def __init__(self, cluster: Cluster, *, shares_links: bool = True) -> None:
        self.now, self._cluster, self._line = 0.0, cluster, Timeline()
        lane = _Lane if shares_links else _Unshared
        self._lanes = {"intra": lane(), "inter": lane()}
        self._under_way: dict[str, tuple[Wire, float]] = {}
        self._of_others: dict[str, float] = {}  # what this node's link brings others alone, and when that began

    def run(self, event: Event) -> None:
        """The next event."""
        line = self._line
        line.host += self._cluster.kernels.launch * launches(event)
        match event:
            case Compute(seconds, what):
                line.bars.append(Bar("compute", what, self.now, self.now + seconds))
                line.compute += seconds
                self.now += seconds
            case Begin(name, wire, late=late):
                self._copy(wire)
                self._under_way[name] = wire, self.now + late
                for lane, (latency, seconds) in zip(self._lanes.values(), on_links(wire, self._cluster), strict=True):
                    lane.begin(name, latency, seconds, self.now + late)
                if wire.node and not wire.inter:
                    self._of_others[name] = self.now + late
            case End(name):
                wire, began = self._under_way.pop(name)
                self._wait(name, began, ("intra",) if name in self._of_others else ("intra", "inter"))
                self._copy(wire)
            case Settle():
                for name, began in self._of_others.items():
                    self._wait(name, began, ("inter",))
                self._of_others.clear()

    def finished(self) -> Timeline:
        """What came of it."""
        line, (intra, inter) = self._line, self._lanes.values()
        line.seconds, line.intra, line.inter = self.now, intra.under_way, inter.under_way
        line.busy = intra.busy, inter.busy
        return line

    def _wait(self, name: str, began: float, levels: Iterable[str]) -> None:
        there = self.now
        for level in levels:
            arrives = self._lanes[level].end(name)
            if arrives is not None:
                self._line.bars.append(Bar(level, name, began, arrives))
                there = max(there, arrives)
        self._line.waiting += there - self.now
        self.now = there

    def _copy(self, wire: Wire) -> None:
        """What is sent, or received: as much."""
        seconds = self._cluster.kernels.copy * wire.nbytes
        self._line.copying += seconds
        self.now += seconds


class _Lane:
    """A link that is shared evenly by all of which bytes are coming; see Note [Latency].

    It goes on only as far as somebody waits for, so that what begins may be told in any order until then.
    """

    def __init__(self) -> None:
        self.busy = 0.0  # seconds in which bytes came
        self._now = 0.0
        self._began: dict[str, float] = {}  # when what has not arrived did
        self._coming: list[tuple[float, str, float]] = []  # when bytes begin to come, of what, what they take alone
        self._left: dict[str, float] = {}  # seconds that each needs alone
        self._arrived: dict[str, float] = {}
        self._spans: list[tuple[float, float]] = []  # of what has arrived, from when to when it was under way

    def begin(self, name: str, latency: float, seconds: float, start: float) -> None:
        """Something whose bytes take so long alone after its latency, or nothing."""
        if latency or seconds:
            self._began[name] = start
            insort(self._coming, (start + latency, name, seconds))

    def end(self, name: str) -> float | None:
        """When it arrives, if nothing more begins before; None where nothing went over this link."""
        while name in self._began:
            self._next()
        return self._arrived.pop(name, None)

    @property
    def under_way(self) -> float:
        """Seconds in which something was."""
        seconds = last = 0.0
        for start, stop in sorted(self._spans):
            seconds += max(0.0, stop - max(start, last))
            last = max(last, stop)
        return seconds

    def _next(self) -> None:
        """Go on until bytes of something begin to come, or have come."""
        first = min(self._left.values(), default=0.0)
        begins = self._coming[0][0] if self._coming else _NEVER
        arrives = self._now + first * len(self._left) if self._left else _NEVER
        at = min(begins, arrives)
        if self._left:
            each = first if at == arrives else (at - self._now) / len(self._left)
            self.busy += at - self._now
            for name in [name for name, left in self._left.items() if left <= each]:
                del self._left[name]
                self._arrived[name] = at
                self._spans.append((self._began.pop(name), at))
            self._left = {name: left - each for name, left in self._left.items()}
        while self._coming and self._coming[0][0] <= at:
            _, name, seconds = self._coming.pop(0)
            self._left[name] = seconds
        self._now = at


class _Unshared(_Lane):
    """A link over which everything comes as if it came alone."""

    def begin(self, name: str, latency: float, seconds: float, start: float) -> None:
        """Something whose bytes take so long after its latency, or nothing."""
        if latency or seconds:
            self.busy += seconds
            self._arrived[name] = start + latency + seconds
            self._spans.append((start, self._arrived[name]))
