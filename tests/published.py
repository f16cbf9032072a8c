"""Runs that others have published, beside what the planner says of them: the table of docs/benchmarks/published.md.

``python -m tests.published`` prints it, of the rows of docs/benchmarks/published_runs.json. A row is a division, which
is predicted by itself; of what its source leaves open (an attention's placement and rotations, microbatches) the
planner chooses. Memory does not matter here.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, combinations
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from wallfacer_dt import Link, ModelShape, SequenceShape
from wallfacer_dt.planning.dividing import divide
from wallfacer_dt.planning.gpus import GPUS, INTER_LATENCY
from wallfacer_dt.planning.units import format_time

FILE = Path(__file__).parents[1] / "docs" / "benchmarks" / "published_runs.json"
HEAD = "| by | model | tokens | GPUs | division | checkpoint | compiled | measured | predicted | / measured |"
_CHECKPOINTS = {"none": "", "attention": "selective", "full": "full"}
_COMPILED = {True: "yes", False: "no", None: "–"}


_KNOWN: dict[str, float] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A step that somebody has timed.

    Attributes:
        source: who.
        model: its name.
        tokens: of a sequence.
        sequences: of a step.
        gpu: by the name of the planner's.
        gpus: how many, in nodes of 8.
        only: the division.
        seconds: of a step.
        compiled: by torch.compile or XLA; None where it does not apply.
        kernel: of attention.
        inter: bytes per second into a node, over one adapter, where the source has no adapter for each GPU.
        interleave: stages of a pipeline's rank.
    """

    source: str
    model: str
    tokens: int
    sequences: int
    gpu: str
    gpus: int
    only: dict[str, int | str]
    seconds: float
    compiled: bool | None
    kernel: str = "auto"
    inter: float | None = None
    interleave: int = 1

    def predicted(self) -> float:
        """Seconds of a step, as the planner has it."""
        key = str(replace(self, source="", seconds=0.0, compiled=None))
        if key not in _KNOWN:
            _KNOWN[key] = self._predicted()
        return _KNOWN[key]

    def _predicted(self) -> float:
        model, gpu = models()[self.model], GPUS[self.gpu]
        cluster = replace(gpu.cluster(self.gpus), memory=None, kernels=gpu.kernels(model.dim, self.kernel))
        if self.inter is not None:
            cluster = replace(cluster, inter=Link(self.inter, INTER_LATENCY), nics=1)
        sequence = SequenceShape(self.tokens, is_causal=True, dtype=torch.bfloat16)
        plain: dict[str, int | str] = {"feed_forward": "plain", "projections": "plain", "interleave": self.interleave}
        # Memory takes longest to say.
        with mock.patch("wallfacer_dt.planning.dividing.division_memory", return_value=mock.Mock(peak=0)):
            return divide(model, sequence, cluster, self.sequences, only=plain | self.only, keep=1).prediction.seconds

    def row(self) -> str:
        """Of the table."""
        predicted = self.predicted()
        where = [self.source, self.model, f"{self.tokens:,}", f"{self.gpus} {self.gpu.upper()}", self.division()]
        how = [_CHECKPOINTS[str(self.only["checkpoint"])], _COMPILED[self.compiled]]
        times = [format_time(self.seconds), format_time(predicted), f"{predicted / self.seconds:.2f}"]
        return f"| {' | '.join(where + how + times)} |"

    def division(self) -> str:
        """In a few words."""
        only = self.only
        names = {"replicas": "replicas", "shards": "FSDP", "tensor": "TP", "pipeline": "PP"}
        parts = [f"{name} {only[key]}" for key, name in names.items() if only.get(key, 1) != 1]
        parts += [f"{name} {only[name]}" for name in ("ring", "ulysses") if name in only]
        return ", ".join(parts) + f", {self.interleave} stages a rank" * (self.interleave > 1)


@cache
def _file() -> dict[str, Any]:
    return json.loads(FILE.read_text())


@cache
def models() -> dict[str, ModelShape]:
    """By name."""
    return {name: ModelShape(**sizes) for name, sizes in _file()["models"].items()}


def runs() -> Iterator[Run]:
    """All of the file, in its order."""
    for row in _file()["rows"]:
        given = dict(row)
        rate = given.pop("tokens_per_second_per_gpu", None)
        if rate is not None:
            given["seconds"] = row["tokens"] * row["sequences"] / rate / row["gpus"]
        yield Run(**given)


def table() -> list[str]:
    """Its lines."""
    columns = HEAD.count("|") - 1
    rule = "|" + " --- |" * (columns - 3) + " ---: |" * 3
    return [HEAD, rule, *(run.row() for run in runs())]


def pairs() -> list[str]:
    """Ways to run the same steps on the same GPUs, one after the other: how long each took of the other's time."""
    lines = ["| by | model | tokens | ways | measured | predicted |", "| --- | --- | --- | --- | ---: | ---: |"]
    alike: dict[tuple, list[Run]] = {}
    for run in runs():
        alike.setdefault((run.source, run.model, run.tokens, run.sequences, run.gpu, run.gpus), []).append(run)
    for one, other in chain.from_iterable(combinations(some, 2) for some in alike.values()):
        named = [f"{run.division()}{_how(run, one.compiled != other.compiled)}" for run in (one, other)]
        shares = (one.seconds / other.seconds, one.predicted() / other.predicted())
        cells = [one.source, one.model, f"{one.tokens:,}", " / ".join(named), *(f"{share:.2f}" for share in shares)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _how(run: Run, says_compiled: bool) -> str:
    compiled = f", {'' if run.compiled else 'not '}compiled" * says_compiled
    return f" ({_CHECKPOINTS[str(run.only['checkpoint'])] or 'none'}{compiled})"


if __name__ == "__main__":
    print("\n".join([*table(), "", *pairs()]))
