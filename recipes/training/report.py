"""What runs showed: tables for the terminal, and `run.json`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from recipes.training.compare import Comparison
from recipes.training.record import Run, Traffic, write_json

_ROWS = 20


def print_run(run: Run) -> None:
    """Print what one run showed, in a few lines."""
    console = Console(highlight=False, soft_wrap=True)
    console.print(
        f"{run.name}: {run.parameters:,} parameters, {len(run.losses)} steps of {run.tokens:,}"
        f" tokens, loss {run.losses[0]:.4f} to {run.losses[-1]:.4f},"
        f" {run.step_seconds:.2f} s a step on {run.device}"
    )
    for direction, traffic in (("forward", run.forward), ("backward", run.backward)):
        if traffic is not None:
            console.print(
                f"  {direction}: {_range(traffic.per_layer)} bytes received per rank and layer,"
                f" {_range(traffic.formula)} by the formula"
            )


def print_comparison(console: Console, runs: Sequence[Run], comparison: Comparison) -> None:
    """Print the losses side by side, the bytes next to their formula, and the verdict."""
    console.print(_loss_table(runs, comparison))
    if any(run.forward for run in runs):
        console.print(_byte_table(runs))
    console.print(
        f"largest loss difference {comparison.largest_loss_difference:.1e}"
        f" (at most {comparison.tolerance:.0e} is right),"
        f" largest relative gradient norm difference {comparison.largest_grad_norm_difference:.1e}"
    )
    for failure in comparison.failures:
        console.print(f"[bold red]WRONG[/] {failure}")
    if not comparison.failures:
        counted = ", and bytes are the formula's" if any(run.forward for run in runs) else ""
        console.print(f"[bold green]RIGHT[/] the runs agree{counted}")


def write_comparison(path: Path, runs: Sequence[Run], comparison: Comparison) -> None:
    """Write all runs and their comparison, with versions and machine, as JSON."""
    verdict = {
        **asdict(comparison),
        "largest_loss_difference": comparison.largest_loss_difference,
        "largest_grad_norm_difference": comparison.largest_grad_norm_difference,
    }
    write_json(path, {"comparison": verdict, "runs": [asdict(run) for run in runs]})


def _loss_table(runs: Sequence[Run], comparison: Comparison) -> Table:
    table = Table(title=f"Loss, {runs[0].unit}", title_justify="left")
    table.add_column("step", justify="right")
    for run in runs:
        table.add_column(run.name, justify="right")
    table.add_column("apart by", justify="right")
    steps = list(zip(*(run.losses for run in runs), comparison.loss_differences, strict=True))
    for step, (*losses, difference) in enumerate(steps, start=1):
        # Of a long run every so many, and the last.
        if step % max(1, len(steps) // _ROWS) and step < len(steps):
            continue
        colour = "green" if difference <= comparison.tolerance else "red"
        shown = [f"{loss:.6f}" for loss in losses]
        table.add_row(str(step), *shown, f"[{colour}]{difference:.1e}[/]")
    return table


def _byte_table(runs: Sequence[Run]) -> Table:
    table = Table(title="Bytes one rank receives in one layer, as counted and by the formula", title_justify="left")
    # Where the terminal is narrow, names are broken before numbers are.
    table.add_column("run")
    for heading in ("forward", "formula", "backward", "formula", "s/step"):
        table.add_column(heading, justify="right")
    for run in runs:
        cells = [*_cells(run.forward), *_cells(run.backward), f"{run.step_seconds:.2f}"]
        table.add_row(run.name, *cells)
    return table


def _cells(traffic: Traffic | None) -> tuple[str, str]:
    if traffic is None:
        return "-", "-"
    colour = "green" if traffic.as_formula else "red"
    return f"[{colour}]{_range(traffic.per_layer)}[/]", _range(traffic.formula)


def _range(values: Sequence[float]) -> str:
    """One number where all ranks have it, else the lowest and the highest."""
    low, high = min(values), max(values)
    return f"{low:,.0f}" if low == high else f"{low:,.0f} to {high:,.0f}"
