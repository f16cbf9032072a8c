"""What was measured, as lines of JSON in one compressed file: a line for every case."""

import gzip
import json
import statistics
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from recipes.benchmarks.cluster.cases import Case
from wallfacer_dt.planning.candidates import Candidate


@dataclass(frozen=True, slots=True)
class Measured:
    """One way to share the sequence of a case; pairs are of forward and backward.

    Attributes:
        way: it.
        predicted: seconds, by the links as probed.
        rounds: seconds, by round.
        busy: seconds in which the busiest device computed.
        node_bytes: that came into the busiest node, headers included, in both together.
    """

    way: Candidate
    predicted: tuple[float, float]
    rounds: tuple[tuple[float, float], ...]
    busy: tuple[float, float]
    node_bytes: int

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
    def over_busy(self) -> list[float]:
        """Of forward and backward, the median time over that in which the busiest device computes."""
        seconds = (statistics.median(some) for some in zip(*self.rounds, strict=True))
        return [one / busy for one, busy in zip(seconds, self.busy, strict=True)]

    @property
    def error(self) -> float:
        """How much longer than measured it was predicted to take, as a part of that."""
        return sum(self.predicted) / self.seconds - 1


@dataclass(frozen=True, slots=True)
class Result:
    """A case.

    Attributes:
        case: it.
        commit: of the checkout.
        machine: on which it was emulated.
        ways: by name; what was predicted, or profiled, is under its own name as well where another is the same.
        bound: seconds of forward and backward that no way goes below.
        choosing: seconds that profiling took.
    """

    case: Case
    commit: str
    machine: str
    ways: Mapping[str, Measured]
    bound: tuple[float, float]
    choosing: float = field(compare=False, default=0.0)

    def line(self) -> str:
        """As one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_line(cls, line: str) -> "Result":
        """What :meth:`line` gave."""
        given = json.loads(line)
        ways = {name: _measured(one) for name, one in given["ways"].items()}
        return cls(**given | {"case": Case.from_json(given["case"]), "ways": ways, "bound": tuple(given["bound"])})


def _measured(given: Mapping[str, Any]) -> Measured:
    fields: dict[str, Any] = {**given, "way": Candidate(**given["way"]), "rounds": tuple(map(tuple, given["rounds"]))}
    fields |= {name: tuple(given[name]) for name in ("predicted", "busy")}
    return Measured(**fields)


def read(path: Path) -> dict[Case, Result]:
    """By case its last result; none where there is no file."""
    return {result.case: result for result in map(Result.from_line, _lines(path))}


def append(path: Path, result: Result) -> None:
    """Add a result."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [*_lines(path), result.line()]
    whole = path.with_name(f".{path.name}")
    whole.write_bytes(gzip.compress("".join(f"{line}\n" for line in lines).encode(), mtime=0))
    whole.replace(path)


def _lines(path: Path) -> list[str]:
    if not path.exists():
        return []
    text = zlib.decompress(path.read_bytes(), wbits=31).decode()
    return text.splitlines()
