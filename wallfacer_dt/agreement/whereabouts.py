"""Where the ranks of a world are: which call each came to last, and what it waits for.

Note [Whereabouts]
What a rank does is noted when it does it, by assigning what can be said of it later. A thread tells the store of the
world what is noted, after a second and then eight times within a timeout, so that there is something to read of a rank
that has been killed or stopped, too. Nobody reads it until a wait is in vain: the error then says where the other ranks
were last, and how long ago. On a device it is the host's place that is noted: a wait does not hold the host up there,
and of one that is in vain torch's own watchdog tells.
"""

import atexit
import json
import os
import threading
import time
import weakref
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeGuard

import torch
import torch.distributed as dist

_OFTEN = 8
_SHORTEST, _LONGEST = 0.05, 30.0  # seconds between two times
_FIRST = 1.0  # seconds until the first, and the second; then each is twice as long
_PLACES = 8
_PATIENCE = 5.0  # seconds


class WaitError(dist.DistError):
    """A rank has waited for others in vain: one did not come in time, or was lost. Their process group is spent."""


class Whereabouts:
    """Where one rank is, and the store in which all tell it."""

    def __init__(self) -> None:
        self.call = ""  # that it came to last, in words
        self.waits_for: Any = None  # what of other ranks', if anything: its text says it, and an empty one nothing
        self.layer = ""  # that runs, by its name in the model; empty where none is known to
        self.progress = ""  # of the training loop, in its own words, or nothing
        self._rank = -1
        self._process = 0
        self._store: Any = None

    def tell(self, store: dist.Store, rank: int, timeout: timedelta) -> None:
        """Begin to tell the world's store where this rank is; what has begun goes on."""
        if self._store is not None:
            return
        self._store, self._rank = dist.PrefixStore("wallfacer_dt whereabouts", store), rank
        self._process = os.getpid()
        often = min(max(timeout.total_seconds() / _OFTEN, _SHORTEST), _LONGEST)
        thread = threading.Thread(target=_telling, args=(weakref.ref(self), often), daemon=True)
        _threads.add(thread)
        thread.start()

    def say(self) -> None:
        """Tell it once."""
        self._store.set(str(self._rank), json.dumps([str(self), time.time()]))

    def of(self, ranks: Iterable[int]) -> str:
        """Where other ranks were last, those in one place together, each after a semicolon; empty if nobody tells."""
        if self._store is None or self._process != os.getpid():  # a forked process has no thread, and no connection
            return ""
        heard: dict[int, tuple[str, int]] = {}
        # A store whose host has stopped answers nothing, and torch waits for it without a timeout.
        asking = threading.Thread(target=self._ask, args=(tuple(ranks), heard), daemon=True)
        _threads.add(asking)
        asking.start()
        asking.join(_PATIENCE)
        ago_by_place: dict[str, dict[int, int]] = {}
        for rank, (place, ago) in list(heard.items()):
            ago_by_place.setdefault(place, {})[rank] = ago
        found = [
            f"; rank {', '.join(map(str, some))} {place}, told {max(some.values())} s ago"
            # First those for whom others may be waiting: in a ring all wait, each for another.
            for place, some in sorted(ago_by_place.items(), key=lambda found: _WAITED in found[0])
        ]
        return "".join(found[:_PLACES] + ["; ..."] * (len(found) > _PLACES))

    def _ask(self, ranks: tuple[int, ...], heard: dict[int, tuple[str, int]]) -> None:
        with suppress(RuntimeError):  # the store is gone with the rank that had it
            self.say()
            others = [str(rank) for rank in ranks if rank != self._rank]
            if not self._store.check(others):  # of a start in vain, where not all have begun to tell
                others = [rank for rank in others if not _ending.is_set() and self._store.check([rank])]
                heard.update((rank, ("had nothing to tell", 0)) for rank in ranks if rank != self._rank)
            for rank, told in zip(others, self._store.multi_get(others), strict=True):
                place, when = json.loads(told)
                heard[int(rank)] = place, max(0, round(time.time() - when))

    def __str__(self) -> str:
        at = f"at {self.progress}, " if self.progress else ""
        waits_for = self.waits_for  # which changes while a thread reads it
        waited = "" if waits_for is None else str(waits_for)
        waits = f"{_WAITED}{waited}" if waited else ""
        return f"{at}had come to {self.call or 'no call'}{waits}"

    @staticmethod
    def is_wait(error: object) -> TypeGuard[RuntimeError]:
        """Whether an error may be of a collective's wait, and not the device's or its memory's, which come late."""
        others = torch.OutOfMemoryError, NotImplementedError, torch.AcceleratorError
        return isinstance(error, RuntimeError) and not isinstance(error, others)


_WAITED = " and waited for "
_ending = threading.Event()
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def _telling(who: "weakref.ref[Whereabouts]", often: float) -> None:
    """Until the world is gone, or the store with the rank that had it, or this process ends; sooner at first."""
    pause = min(_FIRST, often)
    with suppress(RuntimeError):
        while not _ending.wait(pause):
            here = who()
            if here is None:
                return
            # Of a text that is made while what it says changes; the next one comes soon.
            with suppress(LookupError, AttributeError, TypeError, ValueError):
                here.say()
            del here  # or this thread would keep it, and with it the store of a world that is gone
            pause = min(2 * pause, often)


@atexit.register
def _end() -> None:
    """End the threads: one that is in its store while the interpreter ends would crash the process.

    Python ends a thread that comes back to it then, which torch's code is not made for: "terminate called without an
    active exception" (Python 3.11, torch 2.13.0).
    """
    _ending.set()
    for thread in list(_threads):
        thread.join(_PATIENCE)
