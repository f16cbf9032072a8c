"""What was measured, as lines of JSON: one for every case and contender, with all samples."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from recipes.benchmarks.cluster.cases import Case, Nodes
from recipes.benchmarks.cluster.contenders import Contender


@dataclass(frozen=True, slots=True)
class Entry:
    """One contender in one case.

    Attributes:
        run: when the case was begun; entries of one run took turns.
        commit: of the checkout.
        machine: cores and versions, in words.
        cluster: how ranks were spread over nodes.
        case: what was computed.
        contender: how.
        forward: seconds from barrier to barrier, by round.
        backward: likewise.
        node_bytes: bytes into the busiest node in one call, forward and backward, by its link's counter.
        error: of output and gradients relative to the largest element of one process', the largest.
        choosing: for what was planned, what was run to choose it, how long that took, and what was stolen meanwhile.
        stolen: the share of the cores' time that the host gave to others, by round; nothing where it was not looked at.
        warm_up: whether a round that is not counted went before the first one.
    """

    run: str
    commit: str
    machine: str
    cluster: Nodes
    case: Case
    contender: Contender
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    node_bytes: int
    error: float
    choosing: str = ""
    stolen: tuple[float, ...] = ()
    warm_up: bool = True

    @property
    def sums(self) -> list[float]:
        """Seconds of forward and backward, by round."""
        return [sum(pair) for pair in zip(self.forward, self.backward, strict=True)]

    @property
    def seconds(self) -> float:
        """The median of the sums."""
        return statistics.median(self.sums)

    @property
    def range(self) -> float:
        """Seconds from the fastest round to the slowest."""
        return max(self.sums) - min(self.sums)

    @classmethod
    def from_line(cls, line: str) -> "Entry":
        """The inverse of :meth:`line`."""
        fields = json.loads(line)
        for name, make in {"cluster": Nodes, "case": Case, "contender": Contender}.items():
            fields[name] = make(**fields[name])
        for name in {"forward", "backward", "stolen"} & fields.keys():
            fields[name] = tuple(fields[name])
        return cls(**fields)

    def line(self) -> str:
        """As one line of JSON."""
        return json.dumps(asdict(self))


def read(path: Path) -> list[Entry]:
    """The entries of a record, none where there is no file; a last line that was cut off does not count."""
    if not path.exists():
        return []
    return [Entry.from_line(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def append(path: Path, entries: Sequence[Entry]) -> None:
    """Add a case's entries."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.read_text().endswith("\n"):
        # What an interrupted run left of a line is taken away, or the next would be part of it.
        path.write_text("".join(line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")))
    with path.open("a") as file:
        file.write("".join(entry.line() + "\n" for entry in entries))


def is_done(
    entries: Sequence[Entry], commit: str, cluster: Nodes, case: Case, names: Sequence[str], rounds: int
) -> bool:
    """Whether one run of this commit has measured a case with all contenders of these names, in so many rounds."""
    return any(set(names) <= run.keys() and _rounds(run) >= rounds for run in _runs(entries, commit, cluster, case))


def latest(entries: Sequence[Entry]) -> dict[Case, dict[str, Entry]]:
    """On the last cluster: by case the contenders at its last commit, of the run with most of them and most rounds."""
    if not entries:
        return {}
    cluster = entries[-1].cluster
    commits = {entry.case: entry.commit for entry in entries if entry.cluster == cluster}
    return {
        case: max(reversed(_runs(entries, at, cluster, case)), key=lambda run: (len(run), _rounds(run)))
        for case, at in commits.items()
    }


def _rounds(run: dict[str, Entry]) -> int:
    return min(len(entry.forward) for entry in run.values())


def _runs(entries: Sequence[Entry], commit: str, cluster: Nodes, case: Case) -> list[dict[str, Entry]]:
    runs: dict[str, dict[str, Entry]] = {}
    for entry in entries:
        if (entry.commit, entry.cluster, entry.case) == (commit, cluster, case):
            runs.setdefault(entry.run, {})[entry.contender.name] = entry
    return list(runs.values())
