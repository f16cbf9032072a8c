"""The steps of a run: progress, metrics and checkpoints round a trainer."""

from __future__ import annotations

import time
from dataclasses import asdict
from functools import partial
from typing import Any

from recipes.training.batches import Batches
from recipes.training.checkpoint import Checkpoints, History
from recipes.training.metrics import Metrics
from recipes.training.progress import Bar
from recipes.training.ranks import Ranks, device_name
from recipes.training.record import Run, Traffic, remove_earlier, run_name, write_run, writing
from recipes.training.settings import Output, RecipeError, Saving
from recipes.training.traffic import LayerSizes, counted
from recipes.training.trainer import Trainer, learning_rate
from wallfacer_dt import WaitError, note_progress
from wallfacer_dt.agreement.agree import have_all, hear_all
from wallfacer_dt.agreement.progress import places
from wallfacer_dt.agreement.whereabouts import Whereabouts
from wallfacer_dt.mesh import name_of


def train_steps(
    trainer: Trainer,
    batches: Batches,
    saving: Saving,
    output: Output,
    *,
    length: int,
    data: str,
    unit: str,
    sizes: LayerSizes | None = None,
) -> Run:
    """Make the steps that are left of a run, on every rank, and return the record that every rank has, once written.

    Args:
        trainer: at its start, or of what it is brought to by a checkpoint.
        batches: likewise.
        saving: whether to keep checkpoints, and to go on from one.
        output: where metrics go.
        length: tokens of a sequence.
        data: where they came from.
        unit: of the losses.
        sizes: of a model whose bytes the first step is to count.

    Raises:
        RecipeError: a loss is not finite; a checkpoint is of another run or cannot be written; or there are some, and
            none is whole.
    """
    settings, ranks = trainer.settings, trainer.ranks
    checkpoints = Checkpoints(saving, trainer, batches)
    history = checkpoints.resume()
    first, tokens = len(history.losses), settings.samples * length
    traffic: tuple[Traffic, Traffic] | tuple[None, None] = (None, None)
    name = run_name(ranks.ulysses, ranks.ring, ranks.team, settings.data_parallel, settings.metp)
    shown = ranks.launch.rank == 0
    if shown and first < settings.steps:
        remove_earlier(output.out)

    def numbers(step: int) -> dict[str, float]:
        return {
            "loss": history.losses[step],
            "grad_norm": history.norms[step],
            "learning_rate": learning_rate(step, settings.steps, settings.lr),
            "tokens_per_second": tokens / history.seconds[step],
        }

    made = [numbers(step) for step in range(first)]
    with Bar(name, settings.steps, first, shown=shown) as bar, Metrics(output, made, shown=shown) as metrics:
        for step in range(first, settings.steps):
            start = time.perf_counter()
            note_progress(f"step {step + 1}, its batch")
            batch = next(batches)
            try:
                if step == first and sizes is not None:
                    (loss, norm), traffic = counted(partial(trainer.step, step, batch), settings, sizes, ranks)
                else:
                    loss, norm = trainer.step(step, batch)
            except Exception as error:
                if step == first and _is_refused(error, ranks):
                    raise RecipeError(str(error)) from error
                at = f"rank {ranks.launch.rank} of {ranks.launch.world}, step {step + 1} of {settings.steps}"
                # An error of FSDP's waits says nothing of where ranks are.
                is_others = Whereabouts.is_wait(error) and not isinstance(error, WaitError)
                error.add_note(f"{at}; {places()}" if is_others else at)
                raise
            history.add(loss, norm, time.perf_counter() - start)
            written = numbers(step)
            bar.advance(loss, written["tokens_per_second"])
            metrics.write(step + 1, **written)
            checkpoints.keep(history)
    checkpoints.finish()
    note_progress("the end")
    run = _record(trainer, name, history, traffic, first=first, tokens=tokens, text=data, unit=unit)
    if shown:
        # Before what a recipe leaves beside it, which may not fit on a disk.
        with writing(output, "run.json"):
            write_run(output.out / "run.json", run)
    return run


def _record(
    trainer: Trainer, name: str, history: History, traffic: tuple[Traffic | None, Traffic | None], **fields: Any
) -> Run:
    ranks = trainer.ranks
    return Run(
        name=name,
        ulysses=ranks.ulysses,
        ring=ranks.ring,
        team=ranks.team,
        data_parallel=trainer.settings.data_parallel,
        device=device_name(ranks.device),
        parameters=sum(parameter.numel() for parameter in trainer.model.parameters()),
        losses=tuple(history.losses),
        grad_norms=tuple(history.norms),
        seconds=tuple(history.seconds),
        forward=traffic[0],
        backward=traffic[1],
        options=asdict(trainer.settings),
        **fields,
    )


def _is_refused(error: Exception, ranks: Ranks) -> bool:
    """Whether all ranks that share sequences refuse the same, as dropout of attention, and none because of another."""
    if ranks.context is None or isinstance(error, WaitError) or not have_all(error, mesh := name_of(ranks.context)):
        return False
    is_kind = isinstance(error, ValueError | TypeError | NotImplementedError)
    said = hear_all("what each refuses", str(error), mesh)  # all have an error now, be it another's
    return is_kind and len({*said.values()}) == 1
