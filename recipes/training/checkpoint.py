"""Checkpoints of a run: written whole or not at all, and resumed on any mesh.

What is kept: weights and optimiser by torch.distributed.checkpoint, which puts them together anew for other ranks; the
curve so far; the state of every rank's random generators; and in the manifest, as plain values, the settings, the mesh,
and which batch is next. The learning rate is a function of the step, so there is no scheduler to keep.

torch.distributed.checkpoint reads its own index by pickle: go on from checkpoints of your own only.
"""

from __future__ import annotations

import functools
import json
import math
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from recipes.training import manifest
from recipes.training.batches import Batches
from recipes.training.manifest import BrokenError
from recipes.training.settings import LostError, RecipeError, Saving, first_line
from recipes.training.trainer import Trainer
from wallfacer_dt import note_progress
from wallfacer_dt.agreement.whereabouts import Whereabouts

T = TypeVar("T")

# By parameter, not by group of parameters, of which other meshes have others.
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
_STEP = re.compile(r"step_(\d+)")


@dataclass
class History:
    """A run's curve so far: of each step the loss, the norm of the gradient, and rank 0's seconds."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def add(self, loss: float, norm: float, seconds: float) -> None:
        """One more step."""
        self.losses.append(loss)
        self.norms.append(norm)
        self.seconds.append(seconds)


class Checkpoints:
    """The checkpoints of one run, on every rank; all ranks call every method together.

    Args:
        saving: where, how often and how many; nothing is written without a folder.
        trainer: what is kept.
        batches: whose position is kept.
    """

    def __init__(self, saving: Saving, trainer: Trainer, batches: Batches) -> None:
        self._saving, self._trainer, self._batches = saving, trainer, batches
        self._launch = trainer.ranks.launch
        self._pending: tuple[int, Callable[[], None]] | None = None
        self._group: Any = None
        if saving.checkpoint is not None and dist.is_initialized():
            # Of its own: a thread that writes talks to others' while training talks on the default group.
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=trainer.settings.comm_timeout))
        # It says so whenever there is one process, even if told.
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        self._writer = ThreadPoolExecutor(1, "checkpoint")

    def keep(self, history: History) -> None:
        """After a step: write a checkpoint if it is time to."""
        step, steps = len(history.losses), self._trainer.settings.steps
        if self._saving.checkpoint is None or (step % self._saving.save_every and step < steps):
            return
        self.finish()
        partial = self._saving.checkpoint / f".step_{step}.partial"
        self._on_first(partial.mkdir)
        state, fields = self._state(history), self._fields(step)
        storage = dcp.FileSystemWriter(partial)
        options: dict[str, Any] = {"process_group": self._group, "no_dist": self._group is None}
        if self._saving.save_async:
            written = dcp.async_save(state, storage_writer=storage, **options)
            assert isinstance(written, Future)  # its stager is not asked to run beside it
            commit = self._writer.submit(lambda: self._commit(written.result, partial, fields))
            self._pending = step, commit.result
        else:
            save = functools.partial(dcp.save, state, storage_writer=storage, **options)
            self._pending = step, lambda: self._commit(save, partial, fields)
            self.finish()

    def finish(self) -> None:
        """Wait for the checkpoint that is being written.

        Raises:
            RecipeError: it could not be written.
        """
        if self._pending is None:
            return
        note_progress(f"the checkpoint of step {self._pending[0]}")
        (step, commit), self._pending = self._pending, None
        try:
            commit()
        except (RecipeError, LostError):
            raise
        # A CheckpointException, of what ranks could not write, is not an Exception.
        except (Exception, dcp.api.CheckpointException) as error:
            if self._group is not None and Whereabouts.is_wait(error):
                raise self._lost(error) from error
            raise RecipeError(
                f"--checkpoint: that of step {step} could not be written: {_first_line(error)}"
            ) from error

    def resume(self) -> History:
        """Bring trainer and batches to the newest checkpoint that is whole; without --resume, to none.

        Returns:
            The curve up to there.

        Raises:
            RecipeError: there are checkpoints and none is whole, it is of another run, or --resume was not given.
        """
        if self._saving.checkpoint is None:
            return History()
        names, has_partial = self._on_first(lambda: _found(self._saving.checkpoint, remove=self._saving.resume))
        if not self._saving.resume:
            if names or has_partial:
                raise RecipeError(
                    f"--checkpoint: {self._saving.checkpoint} has checkpoints already{'' if names else ', none whole'}:"
                    " --resume goes on from them; or name another folder"
                )
            return History()
        broken: list[Path] = []
        for name in names:
            folder = self._saving.checkpoint / name
            try:
                fields = self._whole(folder)
            except BrokenError as error:
                self._say(f"{folder} is not loaded: {error}")
                broken.append(folder)
                continue
            history = self._load(folder, fields)
            # Not before: where none is whole, the next restart is to find them, and to refuse, too.
            for each in broken:
                self._say(f"{each} is called {each.name}.broken from now on")
                self._on_first(lambda each=each: _set_aside(each))
            return history
        if names:
            raise RecipeError(f"--resume: of {len(names)} checkpoints in {self._saving.checkpoint} none is whole")
        self._say(f"{self._saving.checkpoint} has no checkpoint: starting at the beginning")
        return History()

    def _state(self, history: History) -> dict[str, Any]:
        """What torch.distributed.checkpoint keeps: tensors alone."""
        state = self._tensors()
        state["rng"] = {str(self._launch.rank): _random_states(self._trainer.ranks.device)}
        if self._launch.rank == 0:
            state["history"] = _as_tensor(history)
        return state

    def _tensors(self) -> dict[str, Any]:
        """Weights and optimiser; a fresh optimiser is given its tensors first."""
        optimizer = get_optimizer_state_dict(self._trainer.model, self._trainer.optimizer, options=_FLAT)
        moments = {name: value for name, value in optimizer.items() if isinstance(value, Tensor)}
        return {"model": get_model_state_dict(self._trainer.model), "optimizer": moments}

    def _fields(self, step: int) -> dict[str, Any]:
        """What the manifest keeps."""
        return {
            "step": step,
            "settings": self._settings(),
            "mesh": self._mesh(),
            "batches": self._batches.state_dict(),
            "rng_shapes": [list(state.shape) for state in _random_states(self._trainer.ranks.device)],
        }

    def _settings(self) -> dict[str, Any]:
        """Those that make the curve, as they are after a trip through JSON."""
        settings = self._trainer.settings
        # The precision that ranks compute in: without --dtype that depends on the device.
        mine = asdict(settings) | {"dtype": str(self._trainer.ranks.dtype).removeprefix("torch.")}
        return json.loads(json.dumps({k: v for k, v in mine.items() if k not in settings.NO_MATTER}))

    def _mesh(self) -> dict[str, Any]:
        ranks = self._trainer.ranks
        return {
            "world": self._launch.world, "device": ranks.device.type,
            "ulysses": ranks.ulysses, "ring": ranks.ring, "team": ranks.team,
            "placement": self._trainer.settings.placement, "metp": list(self._trainer.settings.metp),
        }  # fmt: skip

    def _commit(self, write: Callable[[], Any], partial: Path, fields: Mapping[str, Any]) -> None:
        """Have the files written, then say what they are, then give the folder its name."""
        write()
        names = self._on_first(lambda: manifest.files_of(partial))
        mine = names[self._launch.rank :: self._launch.world]
        parts = self._everywhere(lambda: manifest.fingerprints(partial, mine))
        files = {name: file for part in parts for name, file in part.items()}
        self._on_first(lambda: self._name(partial, files, fields))

    def _name(self, partial: Path, files: manifest.Files, fields: Mapping[str, Any]) -> None:
        assert self._saving.checkpoint is not None
        manifest.write(partial, files, fields)
        manifest.sync(partial)
        partial.rename(self._saving.checkpoint / f"step_{fields['step']}")
        manifest.sync(self._saving.checkpoint)
        for name in _steps_in(self._saving.checkpoint)[self._saving.keep :]:
            old = self._saving.checkpoint / name
            try:
                old.unlink() if old.is_symlink() or not old.is_dir() else shutil.rmtree(old)
            except OSError as error:  # no reason to end a run, whose newest is whole
                self._say(f"--keep: {old} cannot be removed: {first_line(error)}")

    def _whole(self, folder: Path) -> dict[str, Any]:
        """What a checkpoint's manifest says, after every file has been read by some rank (BrokenError)."""
        fields, files = self._on_first(lambda: manifest.read(folder))
        mine = sorted(files)[self._launch.rank :: self._launch.world]
        self._everywhere(lambda: manifest.check(folder, {name: files[name] for name in mine}))
        return fields

    def _load(self, folder: Path, fields: dict[str, Any]) -> History:
        self._check_settings(fields["settings"])
        state = self._tensors()
        state["history"] = _as_tensor(History(*([math.nan] * fields["step"] for _ in range(3))))
        same = fields["mesh"] == self._mesh()
        if same:
            shapes = fields["rng_shapes"]
            state["rng"] = {str(self._launch.rank): [torch.empty(shape, dtype=torch.uint8) for shape in shapes]}
        try:
            # A weight that has never had a gradient has no state in an optimizer but a new one.
            kept = self._on_first(lambda: set(dcp.FileSystemReader(folder).read_metadata().state_dict_metadata))
            state["optimizer"] = {name: x for name, x in state["optimizer"].items() if f"optimizer.{name}" in kept}
            dcp.load(state, checkpoint_id=folder, process_group=self._group, no_dist=self._group is None)
        except (RecipeError, LostError):
            raise
        except (Exception, dcp.api.CheckpointException) as error:
            if self._group is not None and Whereabouts.is_wait(error):
                raise self._lost(error) from error
            raise RecipeError(f"--resume: {folder} cannot be loaded: {_first_line(error)}") from error
        model, optimizer = self._trainer.model, self._trainer.optimizer
        set_model_state_dict(model, state["model"])
        # What is no tensor, as weight decay, is that of the settings.
        whole = get_optimizer_state_dict(model, optimizer, options=_FLAT) | state["optimizer"]
        set_optimizer_state_dict(model, optimizer, whole, options=_FLAT)
        # Of such a weight the new one has made a step, by which its first would be another.
        known = {name.rpartition(".")[0] for name in state["optimizer"]}
        for name, weight in model.named_parameters():
            if name in state["model"] and f"state.{name}" not in known:
                optimizer.state.pop(weight, None)
        self._batches.load_state_dict(fields["batches"])
        if same:
            _set_random_states(state["rng"][str(self._launch.rank)], self._trainer.ranks.device)
        mesh = "the same mesh" if same else f"another mesh, {_mesh_words(fields['mesh'])}"
        self._say(f"going on from step {fields['step']} in {folder}, made on {mesh}")
        return History(*state["history"].tolist())

    def _check_settings(self, saved: Mapping[str, Any]) -> None:
        mine = self._settings()
        for name in sorted({*saved, *mine}):
            if None in (saved.get(name, ""), mine.get(name, "")):
                continue  # a size of a model that is loaded, which the data's fingerprint has
            if saved.get(name) != mine.get(name):
                raise RecipeError(
                    f"--resume: the checkpoint was made with --{name.replace('_', '-')} {saved.get(name)},"
                    f" this run has {mine.get(name)}"
                )

    def _lost(self, error: RuntimeError) -> LostError:
        rank, world = self._launch.rank, self._launch.world
        return LostError(f"rank {rank} of {world}: waited for other ranks' part in a checkpoint: {_first_line(error)}")

    def _say(self, text: str) -> None:
        if self._launch.rank == 0:
            print(text, file=sys.stderr, flush=True)

    def _on_first(self, function: Callable[[], T]) -> T:
        """What a function gives on rank 0, on every rank; if it fails there, all fail."""
        found = self._everywhere(lambda: function() if self._launch.rank == 0 else None)[0]
        return cast(T, found)

    def _everywhere(self, function: Callable[[], T]) -> list[T]:
        """By rank, what a function gives there; if one fails, all do (RecipeError, or BrokenError of a checkpoint)."""
        answer: tuple[Any, Exception | None]
        try:
            answer = function(), None
        except BrokenError as error:
            answer = None, error
        except Exception as error:  # others wait for this rank's answer, whatever went wrong
            answer = None, RecipeError(f"--checkpoint: rank {self._launch.rank}: {_first_line(error)}")
        answers = [answer]
        if self._group is not None:
            answers = [answer] * self._launch.world
            try:
                dist.all_gather_object(answers, answer, group=self._group)
            except RuntimeError as error:
                raise self._lost(error) from error
        for _, failure in answers:
            if failure is not None:
                raise failure
        return cast(list[T], [value for value, _ in answers])


def _first_line(error: BaseException) -> str:
    """Of what first went wrong on some rank."""
    failures = getattr(error, "failures", None)
    cause = next(iter(failures.values()))[0] if failures else error
    return first_line(cause)


def _found(folder: Path | None, *, remove: bool) -> tuple[list[str], bool]:
    """Names of checkpoints, the newest first, and whether there is a part of another; which is removed if wanted."""
    assert folder is not None
    partial = list(folder.glob(".step_*.partial"))
    for cut_off in partial if remove else ():
        shutil.rmtree(cut_off)
    return _steps_in(folder), bool(partial)


def _set_aside(folder: Path) -> None:
    aside = folder.with_name(f"{folder.name}.broken")
    if aside.exists():
        shutil.rmtree(aside)
    folder.rename(aside)


def _steps_in(folder: Path | None) -> list[str]:
    """Names of checkpoints, the newest first."""
    assert folder is not None
    found = ((int(match[1]), path.name) for path in folder.iterdir() if (match := _STEP.fullmatch(path.name)))
    return [name for _, name in sorted(found, reverse=True)]


def _as_tensor(history: History) -> Tensor:
    return torch.tensor([history.losses, history.norms, history.seconds], dtype=torch.float64)


def _random_states(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


def _set_random_states(states: list[Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)


def _mesh_words(mesh: Mapping[str, Any]) -> str:
    return f"of {mesh['world']} ranks: ulysses {mesh['ulysses']} x ring {mesh['ring']} x team {mesh['team']}"
