"""Groups of heads in turn: which group of a call goes on when, and with which part of its schedule, as data.

Heads are computed in groups, so that what one group waits for hides behind what another computes. When a group's last
data have come, the next group's heads are taken up and its first transfers start; only then what is left of the first
is computed. What comes home of its results comes while the next group's data do, and is waited for after these. So the
exchange of the next heads hides behind less, which costs time where it is slow and what the schedule sends is quick.
"""

from collections.abc import Generator, Iterator
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple, TypeVar

from wallfacer_dt.algorithms.steps import Parts

T = TypeVar("T")
Computing = Generator[None, None, T]
"""A group under way: it pauses after every part of its schedule but the last, and then gives T."""

_PARTS = range(len(Parts._fields))


class Turn(NamedTuple):
    """A group of heads goes on with a part of its schedule."""

    group: int
    part: int

    @property
    def is_first(self) -> bool:
        """Whether the group's heads must have come before."""
        return self.part == _PARTS[0]

    @property
    def is_last(self) -> bool:
        """Whether its results leave afterwards."""
        return self.part == _PARTS[-1]


def in_turn(groups: int, parts: Parts[Any]) -> tuple[Turn, ...]:
    """The turns of so many groups with one schedule; one after the other if that does not begin with transfers.

    >>> parts = Parts(("start",), ("wait",), ("attend",), ("wait",))
    >>> print(*(f"{turn.group} {Parts._fields[turn.part]}" for turn in in_turn(2, parts)), sep=", ")
    0 begins, 0 comes, 1 begins, 0 computes, 1 comes, 0 ends, 1 computes, 1 ends
    """
    return _turns(groups, bool(parts.begins), bool(parts.ends))


@lru_cache(maxsize=64)
def _turns(groups: int, sends: bool, has_end: bool) -> tuple[Turn, ...]:
    return tuple(_pipelined(groups, has_end) if sends else (Turn(*one) for one in product(range(groups), _PARTS)))


def _pipelined(groups: int, has_end: bool) -> Iterator[Turn]:
    begins, comes, computes, ends = _PARTS
    yield Turn(0, begins)
    for group in range(groups):
        is_last = group == groups - 1
        yield Turn(group, comes)
        if has_end and group > 0:
            yield Turn(group - 1, ends)
        if not is_last:
            yield Turn(group + 1, begins)
        yield Turn(group, computes)
        if is_last or not has_end:
            yield Turn(group, ends)


def last(computing: Computing[T]) -> T:
    """What a group gives after its last turn."""
    try:
        next(computing)
    except StopIteration as done:
        return done.value
    raise AssertionError  # it pauses more often than it has turns


def completed(computing: Computing[T]) -> T:
    """What a group that is alone gives in the end."""
    for _ in _PARTS[1:]:
        next(computing)
    return last(computing)
