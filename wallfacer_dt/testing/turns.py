"""Ranks that take turns: one runs at a time, until it waits for what others have not given yet, or has ended."""

import threading
from collections import Counter
from dataclasses import dataclass
from typing import Any

Answer = tuple[bool, Any]
"""Whether a rank's function returned; and what, or else the traceback."""

STUCK = "waits in vain"


@dataclass(slots=True)
class Meeting:
    """One collective of some ranks.

    Attributes:
        what: its name, for errors.
        ranks: of the world, by their numbers in the group.
        given: what each brings to it, or None as long as it has not come.
    """

    what: str
    ranks: tuple[int, ...]
    given: list[Any]

    def absent(self) -> list[int]:
        """The ranks that have not come yet."""
        return [rank for rank, given in zip(self.ranks, self.given, strict=True) if given is None]


class Turns:
    """Whose turn it is, and where ranks meet.

    The order is the same every time, and ranks that would wait for each other for ever are told so at once.

    Args:
        size: number of ranks.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        # Locks that are free for whoever's turn it is; another thread releases them.
        self._may_run = [threading.Lock() for _ in range(size)]
        self._all_have_ended = threading.Lock()
        for lock in (*self._may_run, self._all_have_ended):
            lock.acquire()
        self._present: set[int] = set()
        self._awaited: dict[int, Meeting] = {}
        self._meetings: dict[Any, Meeting] = {}
        self._calls: Counter[Any] = Counter()

    def go_round(self) -> None:
        """Let all ranks run, from the first on, until every one has ended."""
        self._meetings.clear()
        self._calls.clear()
        self._present = set(range(self.size))
        self._pass_on(self.size - 1)
        self._all_have_ended.acquire()

    def begin(self, rank: int) -> None:
        """Wait for this rank's first turn."""
        self._may_run[rank].acquire()

    def end(self, rank: int) -> None:
        """Let others run to their ends."""
        self._present.remove(rank)
        self._pass_on(rank)

    def come(self, rank: int, group: tuple[str, tuple[int, ...]], what: str, given: Any) -> Meeting:
        """Bring something, which others may read from now on, to the group's next collective, without waiting for them.

        That is called ``what``: a RuntimeError if it is another on a rank that came before. All that is given will be
        in the meeting.
        """
        name, ranks = group
        self._calls[group, rank] += 1
        key = group, self._calls[group, rank]
        meeting = self._meetings.setdefault(key, Meeting(what, ranks, [None] * len(ranks)))
        if meeting.what != what:
            raise RuntimeError(f"rank {rank} calls {what} on group {name}, where another rank calls {meeting.what}")
        meeting.given[ranks.index(rank)] = given
        if not meeting.absent():
            del self._meetings[key]
        return meeting

    def wait(self, rank: int, meeting: Meeting) -> None:
        """Let others run until all have come to the meeting; RuntimeError where nobody can."""
        if meeting.absent():
            self._awaited[rank] = meeting
            self._pass_on(rank)
            self._may_run[rank].acquire()
            del self._awaited[rank]
        if absent := meeting.absent():
            raise RuntimeError(
                f"rank {rank} {STUCK} for ranks {absent} in {meeting.what}: all others have ended, or wait in vain too"
            )

    def _pass_on(self, rank: int) -> None:
        following = [other % self.size for other in range(rank + 1, rank + 1 + self.size)]
        present = [other for other in following if other in self._present]
        able = [other for other in present if other not in self._awaited or not self._awaited[other].absent()]
        # Where nobody is able, whoever's turn it is raises.
        chosen = (able or present)[:1]
        (self._may_run[chosen[0]] if chosen else self._all_have_ended).release()
