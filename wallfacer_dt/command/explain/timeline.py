"""When one rank computes, and when its transfers are under way, by a simple model of time.

A kernel takes as long as it has (query, key) pairs times heads; 1 is all pairs of own rows and one block, of the first
group of heads. A transfer takes no time of its own: it lasts from its start to its wait. One with nothing to hide
behind is given :data:`EXPOSED`, so that it can be seen.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from wallfacer_dt.command.explain.facts import Attend, Kind, Rank, Transfer

EXPOSED = 0.25


@dataclass(frozen=True, slots=True)
class Bar:
    """Work or a transfer of one rank.

    Attributes:
        start: of a rank's program, in units of a block.
        stop: likewise.
        work: what is computed, or None.
        transfer: what is under way, or None.
        is_exposed: nothing is computed between the transfer's start and its wait.
    """

    start: float
    stop: float
    work: Attend | None = None
    transfer: Transfer | None = None
    is_exposed: bool = False


def lanes(bars: Sequence[Bar], kind: Kind) -> list[list[Bar]]:
    """The transfers of one kind, in as few lanes as keep those apart that are under way together."""
    found: list[list[Bar]] = []
    mine = [bar for bar in bars if bar.transfer and bar.transfer.kind == kind]
    for bar in sorted(mine, key=lambda bar: bar.start):
        free = next((lane for lane in found if lane[-1].stop <= bar.start + 1e-9), None)
        if free is None:
            found.append([bar])
        else:
            free.append(bar)
    return found


def timeline(rank: Rank) -> Iterator[Bar]:
    """The bars of one rank: its work in order, and its transfers by when they are waited for."""
    unit = _unit(rank)
    clock, started, busy = 0.0, {}, set()
    transfers = {transfer.number: transfer for transfer in rank.transfers}
    for step in rank.steps:
        if isinstance(step, Attend):
            lasts = step.pairs * _heads(rank, step.group) / unit
            if lasts:
                yield Bar(clock, clock + lasts, work=step)
                busy |= set(started)
            clock += lasts
        elif step.kind == "start":
            started[step.transfer] = clock
        else:
            start = started.pop(step.transfer)
            is_exposed = step.transfer not in busy
            # Another that was exposed in between may have moved the clock already.
            clock = max(clock, start + EXPOSED) if is_exposed else clock
            yield Bar(start, clock, transfer=transfers[step.transfer], is_exposed=is_exposed)


def _unit(rank: Rank) -> int:
    own = [work.possible for work in rank.attends if work.part == "local" and work.group == 0]
    return max(1, max(own, default=1) * _heads(rank, 0))


def _heads(rank: Rank, group: int) -> int:
    start, stop = rank.heads[group].q
    return stop - start
