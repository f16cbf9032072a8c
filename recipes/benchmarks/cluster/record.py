"""What was measured, as lines of JSON in one compressed file: a line for every case."""

import gzip
import json
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from recipes.benchmarks.cluster.cases import Case
from wallfacer_dt.planning.candidates import Candidate
from wallfacer_dt.reading import FileError, make, read_packed_lines

_MOST_BYTES = 2**24


@dataclass(frozen=True, slots=True)
class Measured:
    """One way to share the sequence of a case; pairs are of forward and backward."""

    way: Candidate
    predicted: tuple[float, float]  # seconds, by the links as probed
    rounds: tuple[tuple[float, float], ...]  # seconds, by round
    busy: tuple[float, float]  # seconds in which the busiest device computed
    node_bytes: int  # that came into the busiest node, headers included, in both together
    held: tuple[float, float]  # seconds a device held its rank, at most, in the best round

    def __post_init__(self) -> None:
        """Refuse (ValueError) times that are none."""
        pairs = (self.predicted, self.busy, self.held, *self.rounds)
        if not self.rounds or not all(seconds > 0 for pair in pairs for seconds in pair) or self.node_bytes < 0:
            raise ValueError("seconds must be above 0, of at least one round, and bytes at least 0")

    @property
    def seconds(self) -> float:
        """Of both, the median of the rounds."""
        return statistics.median(map(sum, self.rounds))

    @property
    def spread(self) -> float:
        """From the fastest round to the slowest, as a part of the median."""
        sums = [*map(sum, self.rounds)]
        return (max(sums) - min(sums)) / self.seconds

    @property
    def medians(self) -> list[float]:
        """Of forward and of backward."""
        return [statistics.median(some) for some in zip(*self.rounds, strict=True)]

    @property
    def over_busy(self) -> list[float]:
        """Of forward and backward, the median time over that in which the busiest device computes."""
        return [one / busy for one, busy in zip(self.medians, self.busy, strict=True)]

    @property
    def errors(self) -> list[float]:
        """The error of forward and of backward alone."""
        return [told / one - 1 for told, one in zip(self.predicted, self.medians, strict=True)]

    @property
    def overslept(self) -> float:
        """For how much longer than it computes a device held its rank, as a part of that."""
        return sum(self.held) / sum(self.busy) - 1

    @property
    def error(self) -> float:
        """How much longer than measured it was predicted to take, as a part of that."""
        return sum(self.predicted) / self.seconds - 1


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a case."""

    case: Case
    commit: str  # of the checkout
    machine: str  # on which it was emulated
    # By name; what was predicted, or profiled, is under its own name as well where another is the same.
    ways: Mapping[str, Measured]
    bound: tuple[float, float]  # seconds of forward and backward that no way goes below
    choosing: float = field(compare=False, default=0.0)  # seconds that profiling took

    def fastest(self, beginning: str = "") -> str:
        """The name of the fastest way, of those whose names begin so."""
        some = (name for name in self.ways if name.startswith(beginning))
        return min(some, key=lambda name: self.ways[name].seconds)


def read(path: Path) -> dict[Case, Result]:
    """By case its last result; none where there is no file; a FileError where it is no such record."""
    return {result.case: result for result in _results(path)}


def append(path: Path, result: Result) -> None:
    """Add a result."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(asdict(one)) for one in (*_results(path), result)]
    whole = path.with_name(f".{path.name}")
    whole.write_bytes(gzip.compress("".join(f"{line}\n" for line in lines).encode(), mtime=0))
    whole.replace(path)


def _results(path: Path) -> list[Result]:
    results = []
    for number, given in enumerate(read_packed_lines(path, _MOST_BYTES) if path.exists() else (), 1):
        try:
            results.append(make(Result, given))
        except (TypeError, ValueError) as error:
            raise FileError(path, f"is no record, line {number}: {error}") from error
    return results
