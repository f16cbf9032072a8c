"""What a run leaves behind, and its JSON form: `run.json`."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from recipes.training.settings import Launch, Output, RecipeError, first_line
from wallfacer_dt.command.planning.launch import cores


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes that one step's attention, and METP, received in one direction (forward or backward).

    Attributes:
        received: bytes each rank received in the counted step, by rank.
        calls: calls of attention and of METP's feed-forward that each rank made in it, by rank.
        expected_calls: how many each should have made: one a layer, two where the feed-forward is METP's.
        layers: how many layers these are the calls of.
        formula: bytes each should receive in one layer, by rank.
    """

    received: tuple[int, ...]
    calls: tuple[int, ...]
    expected_calls: int
    layers: int
    formula: tuple[int, ...]

    @property
    def per_layer(self) -> tuple[float, ...]:
        """Bytes received in one layer on average, by rank."""
        return tuple(received / self.layers for received in self.received)

    @property
    def as_formula(self) -> bool:
        """Whether every rank made every call and received exactly the formula's bytes."""
        formula = tuple(self.layers * layer for layer in self.formula)
        return self.received == formula and set(self.calls) == {self.expected_calls}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Traffic:
        """The inverse of `dataclasses.asdict` after a trip through JSON."""
        made: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in fields.items()}
        return cls(**made)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One finished training run.

    Attributes:
        name: such as "ring 2 x team 2".
        ulysses: ranks that split the heads.
        ring: ranks in a ring.
        team: ranks in a team.
        data_parallel: groups of ulysses x ring x team ranks with different sequences.
        device: "cpu" or the name of the GPU.
        parameters: elements of the model's weights.
        tokens: tokens of one step, over all ranks.
        text: where the data came from.
        losses: mean loss of each step over all ranks, in `unit`.
        grad_norms: norm of the whole gradient of each step before clipping.
        seconds: wall-clock seconds of each step on rank 0, the first with the counting of bytes.
        first: of the steps, the one that was the first to be made here, rather than found in a checkpoint.
        forward: what attention and METP received forward in the first step that was made here; None where no sequence
            was shared, or none was left to make.
        backward: what it received backward, likewise.
        options: the settings, by name.
        unit: of the losses.
    """

    name: str
    ulysses: int
    ring: int
    team: int
    data_parallel: int
    device: str
    parameters: int
    tokens: int
    text: str
    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    seconds: tuple[float, ...]
    first: int = 0
    forward: Traffic | None = None
    backward: Traffic | None = None
    options: dict[str, Any] = field(default_factory=dict)
    unit: str = "nats per byte"

    @property
    def ranks(self) -> int:
        """Processes that took part."""
        return self.ulysses * self.ring * self.team * self.data_parallel

    @property
    def step_seconds(self) -> float:
        """Median seconds of a step made here, without the first (which warms up and counts), if there are such."""
        return statistics.median(self.seconds[self.first + 1 :] or self.seconds[self.first :] or self.seconds)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Run:
        """The inverse of `dataclasses.asdict` after a trip through JSON."""
        fields = dict(fields)
        for name in ("losses", "grad_norms", "seconds"):
            fields[name] = tuple(fields[name])
        for name in ("forward", "backward"):
            fields[name] = fields[name] and Traffic.from_dict(fields[name])
        return cls(**fields)


def run_name(ulysses: int, ring: int, team: int, data_parallel: int, metp: tuple[str, ...] = ()) -> str:
    """What to call a run on this mesh: "ring 2 x team 2", "ulysses of 4", "one process"; METP after a comma."""
    return ", ".join([_mesh_name(ulysses, ring, team, data_parallel), *filter(None, [_metp_name(metp)])])


def _mesh_name(ulysses: int, ring: int, team: int, data_parallel: int) -> str:
    if ulysses * ring * team == 1:
        return "one process" if data_parallel == 1 else f"{data_parallel} data-parallel ranks"
    axes = {"ulysses": ulysses, "ring": ring, "team": team}
    # A ring of one is named where there is a team, which it is a ring of.
    named = {axis: size for axis, size in axes.items() if size > 1 or (axis == "ring" and team > 1)}
    (axis, size), *more = named.items()
    context = " x ".join(f"{axis} {size}" for axis, size in named.items()) if more else f"{axis} of {size}"
    return context if data_parallel == 1 else f"{context} x {data_parallel} data-parallel"


def _metp_name(metp: tuple[str, ...]) -> str:
    # Of both, the usual case, the word alone.
    return f"METP {metp[0]}" if len(metp) == 1 else "METP" * bool(metp)


def make_folders(out: Path, checkpoint: Path | None, launch: Launch) -> None:
    """Make the folders that a run writes to, on rank 0; refuse (RecipeError) those that cannot be."""
    if launch.rank == 0:
        make_folder(out)
        if checkpoint is not None:
            make_folder(checkpoint, "--checkpoint")


def make_folder(path: Path, option: str = "--out") -> None:
    """Make the folder a run is to leave things in, before the run rather than after it.

    Raises:
        RecipeError: it cannot be made or written to.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RecipeError(f"{option}: {path} cannot be made: {error.strerror}") from error
    if not os.access(path, os.W_OK):
        raise RecipeError(f"{option}: {path} cannot be written to")


def remove_earlier(out: Path) -> None:
    """Remove what a run or demo before this one left in its folder, which would pass for this one's if it fails.

    Not its model, which somebody may want, nor anything of a name that no recipe gives.

    Raises:
        RecipeError: something cannot be removed.
    """
    for name in ("run.json", "curve.png", "curves.png", "samples.png"):
        try:
            (out / name).unlink(missing_ok=True)
        except OSError as error:
            raise RecipeError(f"--out: {out / name} of an earlier run cannot be removed: {error.strerror}") from error


@contextmanager
def writing(output: Output, name: str, errors: type[Exception] = OSError) -> Iterator[None]:
    """Write a file or folder of `--out`, on rank 0; what cannot be is refused when the run ends, and the rest is left.

    Other ranks know nothing of it: a refusal before they end would have them wait for this one.
    """
    try:
        yield
    except errors as error:
        why = getattr(error, "strerror", None) or first_line(error)
        output.failures.append(f"--out: {output.out / name} cannot be written: {why}")


def write_run(path: Path, run: Run) -> None:
    """Write one run, with versions and machine, as JSON."""
    write_json(path, {"run": asdict(run)})


def read_run(path: Path) -> Run:
    """Read what `write_run` wrote."""
    return Run.from_dict(json.loads(path.read_text())["run"])


def write_json(path: Path, fields: dict[str, Any]) -> None:
    """Write `fields` as JSON, after the versions and the machine they were made with."""
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = {"versions": versions(), "machine": machine(), **fields}
    path.write_text(json.dumps(whole, indent=2) + "\n")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that the numbers depend on."""
    found = {"python": platform.python_version()}
    for package in ("torch", "wallfacer_dt", "numpy"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed (run from a checkout)"
    return found


def machine() -> dict[str, Any]:
    """What the run ran on, as far as Python can tell without naming the host."""
    return {
        "system": f"{platform.system()} {platform.release()}",
        "processor": platform.processor() or platform.machine(),
        "cores": cores(),
    }
