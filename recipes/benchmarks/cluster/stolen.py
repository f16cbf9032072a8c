"""How much of this machine's cores its host gives to others; what was measured meanwhile is measured again."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

LIMIT = 0.05
"""The share of the cores' time that may be missing."""

ATTEMPTS = 4
_PAUSE = 15.0  # seconds, after a disturbed attempt

T = TypeVar("T")


class Ticks(NamedTuple):
    """Time of all cores since they started, as Linux counts it.

    Attributes:
        every: all of it, idle or not.
        stolen: when a core had work, and the host had it do something else; 0 on a machine that is its own host.
    """

    every: int
    stolen: int

    @classmethod
    def now(cls) -> "Ticks":
        """Those of ``/proc/stat``, whose first line has user, nice, system, idle, iowait, irq, softirq and steal."""
        fields = [int(ticks) for ticks in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        return cls(sum(fields), fields[7])


def undisturbed(
    call: Callable[[], T],
    what: str,
    say: Callable[[str], None],
    *,
    attempts: int = ATTEMPTS,
    ticks: Callable[[], Ticks] = Ticks.now,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[T, float]:
    """Measure until the host leaves the cores alone meanwhile.

    Args:
        call: the measurement.
        what: it is, in words.
        say: told of every attempt that was disturbed.
        attempts: at most so many; then the least disturbed one counts.
        ticks: how time is counted.
        sleep: how to wait before another attempt.

    Returns:
        What ``call`` returned, and the share of the cores' time, from 0 to 1, that was missing meanwhile.
    """
    tried: list[tuple[float, T]] = []
    while True:
        before = ticks()
        result = call()
        after = ticks()
        share = (after.stolen - before.stolen) / max(after.every - before.every, 1)
        tried.append((share, result))
        if share <= LIMIT or len(tried) == attempts:
            break
        say(f"{what}: the host took {share:.0%} of the cores, so it is measured again")
        sleep(_PAUSE)
    share, result = min(tried, key=lambda one: one[0])
    return result, share
