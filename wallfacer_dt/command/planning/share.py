"""What the first plan makes of its ranks, as text: MFU, time and memory by category, and what is not counted."""

from rich.console import Console

from wallfacer_dt.command.planning.figures import MFU, Figures
from wallfacer_dt.planning import Plan
from wallfacer_dt.planning.dividing import DivisionPlan
from wallfacer_dt.planning.division import Division
from wallfacer_dt.planning.units import format_size, format_speed, format_time

_SIZES = {
    "weights": "weights, a rank's shards",
    "gradients": "gradients, likewise",
    "optimizer": "optimizer: Adam's moments{master}, in float32",
    "kept": "activations, kept for the backward",
    "gathered": "buffers: FSDP's whole weights and gradients in use",
    "working": "buffers: the most that computing takes beside",
}


def print_figures(plan: Plan | DivisionPlan, figures: Figures, console: Console) -> None:
    """Print them.

    Args:
        plan: the plan.
        figures: of its first.
        console: where.
    """
    mfu = figures.mfu(plan.ranked[0])
    if mfu is None:
        console.print("\nMFU is not given: the peak is not known, give --peak-speed")
    else:
        console.print(f"\nMFU of plan 1: {mfu:.1%}", style="bold")
        console.print(f"{MFU}; {figures.flops:.3g} FLOPs, {format_speed(figures.peak or 0)} a rank")
    console.print(f"\nTime of plan 1, {format_time(plan.prediction.seconds)} a step as predicted:", style="bold")
    for name, text in _times(plan).items():
        if figures.time[name]:
            console.print(f"{format_time(figures.time[name]):>8}  {text}")
    console.print(f"\nMemory of plan 1, {format_size(figures.memory.peak)} a rank:", style="bold")
    master = " and master weights" * (plan.sequence.dtype.itemsize < 4)
    for name, text in _SIZES.items():
        console.print(f"{format_size(getattr(figures.memory, name)):>8}  {text.format(master=master)}")
    console.print("\nNot included:", style="bold")
    for one in figures.left_out:
        console.print(f"- {one}")


def _times(plan: Plan | DivisionPlan) -> dict[str, str]:
    """What each part of a step is."""
    division = plan.chosen if isinstance(plan, DivisionPlan) else Division(plan.chosen)
    added = ["sums of microbatches' gradients"] * (division.microbatches > 1 and division.adds_gradients)
    copies = ["FSDP's copies"] * (division.weight_ranks > 1) + added
    sums = ", METP's sums and copies" * ("metp" in division.context.layers.values())
    waits = ", other stages" * (division.pipeline > 1) + ", and copying" * bool(plan.cluster.kernels.copy)
    return {
        "attention": "attention" + " and its projections" * (division.context.projections == "metp"),
        "products": "other matrix products",
        "elementwise": f"norms, positions, activations{sums}" + ", embedding, loss" * bool(plan.model.vocab),
        "copies": ", ".join(copies),
        "optimizer": "clipping and optimizer",
        "transfers": f"waiting for transfers{waits}",
        "host": "waiting for the host",
    }
