"""``wallfacer plan --sequences``: divided ranks as text, readable in a terminal of 100 columns, or as JSON."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from wallfacer_dt import planning
from wallfacer_dt.command.explain.text import print_table
from wallfacer_dt.command.options import OptionError, check_least
from wallfacer_dt.command.planning.document import divided_as_json
from wallfacer_dt.command.planning.figures import Figures
from wallfacer_dt.command.planning.flags import flags_of
from wallfacer_dt.command.planning.machines import Where
from wallfacer_dt.command.planning.share import print_figures
from wallfacer_dt.command.planning.text import (
    asked_of,
    make_console,
    mask_of,
    plain_table,
    summary_of_cluster,
    summary_of_model,
)
from wallfacer_dt.planning import SequenceShape
from wallfacer_dt.planning.dividing import DivisionPlan, RankedDivision, divide
from wallfacer_dt.planning.known_models import KnownModel
from wallfacer_dt.planning.units import format_size, format_time

GAIN = 0.01  # of a step, below which more context ranks are called waste


def check_divisible(sequences: int, *, batch: int, is_longest: bool, picture: Path | None) -> None:
    """Refuse (OptionError) what does not go with ``--sequences``."""
    check_least("--sequences", sequences)
    if batch != 1:
        raise OptionError("--batch: --sequences says how many there are, and microbatches are chosen; leave it out")
    if is_longest:
        raise OptionError("--seq longest: not with --sequences; say how many tokens")
    if picture is not None:
        raise OptionError("--picture: not with --sequences, which draws nothing; leave it out")


def print_divided(
    known: KnownModel,
    sequence: SequenceShape,
    sequences: int,
    where: Where,
    only: Mapping[str, int | str],
    top: int,
    *,
    as_document: bool,
) -> None:
    """Divide ranks, and print what came of it.

    Args:
        known: the model.
        sequence: one of those of a step.
        sequences: of a step, over all ranks.
        where: the cluster.
        only: values that divisions must have.
        top: how many divisions are shown.
        as_document: as JSON.

    Raises:
        OptionError: there is no division, or none fits.
    """
    with Console(stderr=True).status(f"dividing {where.cluster.ranks} ranks"):
        try:
            plan = divide(known.shape, sequence, where.cluster, sequences, only=only, keep=top)
        except planning.PlanningError as error:
            raise OptionError(f"--{error.about}: {error}") from error
    figures = Figures.of(plan, where, known)
    if as_document:
        print(divided_as_json(plan, figures))
    else:
        print_division(plan, figures, make_console())


def print_division(plan: DivisionPlan, figures: Figures, console: Console) -> None:
    """Print the best divisions, whether context ranks are too many, and the flags of the first.

    Args:
        plan: the plan.
        figures: of its first.
        console: where.
    """
    for line in summary_of_cluster(plan.cluster, figures.origins):
        console.print(line)
    sequence, number = plan.sequence, f"{plan.sequences} sequence{'s' * (plan.sequences > 1)}"
    console.print(f"{number} in a step, of {sequence.length} tokens{mask_of(plan)}, {sequence.dtype_name}")
    console.print(summary_of_model(plan.model))
    if figures.source:
        console.print(figures.source)
    best = plan.ranked
    title = (
        f"The best {len(best)} of {plan.considered} divisions{asked_of(plan)}, for a step of {plan.model.layers} layers"
    )
    print_table(title, _costs(best, figures), console)
    print_table("Why, and how a division's context ranks share a sequence", _reasons(best), console)
    if len(plan.contexts) > 1:
        console.print("\nContext ranks:", style="bold")
        for line in context_lines(plan):
            console.print(line)
    print_figures(plan, figures, console)
    console.print("\nPlan 1 for torchtitan, by recipes.torchtitan:", style="bold")
    console.print(flags_of(plan), soft_wrap=True)


def context_lines(plan: DivisionPlan) -> list[str]:
    """Whether more context ranks would be waste, and what fewer cost."""
    enough = plan.enough_context(GAIN)
    seconds = {one.division.context.size: one.seconds for one in plan.by_context}
    more, fewer = ([size for size in seconds if (size > enough) is above and size != enough] for above in (True, False))

    def others(sizes: list[int]) -> str:
        return ", ".join(f"{size}: {seconds[size] / seconds[enough] - 1:+.1%}" for size in sizes)

    if not more:
        lines = [f"{_ranks(enough)}, the most of which a division fits, are no waste"]
    elif all(seconds[size] >= seconds[enough] for size in more):
        lines = [f"context parallelism beyond {_ranks(enough)} makes the step slower ({others(more)})"]
    else:
        lines = [f"context parallelism beyond {_ranks(enough)} gains less than {GAIN:.0%} ({others(more)})"]
    if fewer:
        lines.append(f"with fewer the step is as much longer ({others(fewer)})")
    missing = [size for size in plan.contexts if size not in seconds]
    if missing:
        lines.append(f"of {', '.join(map(str, missing))} nothing fits into memory")
    return lines


def _ranks(number: int) -> str:
    return f"{number} rank{'s' * (number > 1)}"


def _costs(best: Sequence[RankedDivision], figures: Figures) -> Table:
    table = plain_table()
    deals_experts = any(one.division.expert > 1 for one in best)
    headings = ["repli-\ncas", "shards", "con-\ntext", "ten-\nsor", "pipe-\nline", *["ex-\npert"] * deals_experts]
    headings += ["micro-\nbatches", "step"]
    headings += ["tokens\nper s", *["MFU"] * (figures.peak is not None), "waiting", "bubble", "memory"]
    for heading in headings:
        table.add_column(heading, justify="right")
    for number, one in enumerate(best, 1):
        it, p, mfu = one.division, one.prediction, figures.mfu(one)
        experts = [it.expert] * deals_experts
        pipeline = f"{it.pipeline}" + f" x {it.interleave}" * (it.interleave > 1)
        sizes = map(str, (it.replicas, it.shards, it.context.size, it.tensor, pipeline, *experts))
        shares = [] if mfu is None else [f"{mfu:.1%}"]
        bubble = f"{it.bubble:.0%}" if it.pipeline > 1 else "-"
        times = [format_time(p.seconds), f"{figures.rate(one):.0f}", *shares, f"{p.exposed / p.seconds:.0%}"]
        taken = f"{it.microbatches} of {it.microbatch}"
        style = "bold" if number == 1 else None
        table.add_row(str(number), *sizes, taken, *times, bubble, format_size(p.memory), style=style)
    return table


def _reasons(best: Sequence[RankedDivision]) -> Table:
    table = plain_table()
    table.add_column("")
    table.show_header = False
    for number, one in enumerate(best, 1):
        table.add_row(str(number), f"{one.why}; {one.division.context}")
    return table
