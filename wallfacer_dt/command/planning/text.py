"""A plan and a profile as text, readable in a terminal of 100 columns."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from wallfacer_dt.command.explain.text import print_table
from wallfacer_dt.command.planning.document import runs_of
from wallfacer_dt.command.planning.figures import Figures
from wallfacer_dt.command.planning.machines import MEASURED
from wallfacer_dt.command.planning.share import print_figures
from wallfacer_dt.command.planning.usage import code_of
from wallfacer_dt.planning import Candidate, Cluster, Link, ModelShape, Plan, Profile, Ranked
from wallfacer_dt.planning.dividing import DivisionPlan
from wallfacer_dt.planning.model import kinds_of_layers
from wallfacer_dt.planning.units import format_rate, format_size, format_speed, format_time

_WIDTH = 100
_DROPPED = 3  # of which more is said than how many
_MESH = "ulysses x\nring x team"


def make_console() -> Console:
    """Standard output, of a fixed width where it is no terminal."""
    return Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else _WIDTH)


def print_plan(plan: Plan, figures: Figures, top: int, console: Console) -> None:
    """Print the best plans, what was dropped, and the code of the first.

    Args:
        plan: the plan.
        figures: of it.
        top: how many of the best.
        console: where.
    """
    for line in _summary(plan, figures.origins):
        console.print(line)
    if figures.source:
        console.print(figures.source)
    best = plan.ranked[:top]
    what = "" if plan.model.ffn else " of attention"
    layers = f", {plan.model.layers} layers" if plan.model.layers > 1 else ""
    print_table(
        f"The best {len(best)} of {plan.considered} plans{asked_of(plan)}, for a step{what}{layers}",
        _costs(best, figures),
        console,
    )
    print_table("Why", _reasons(plan, best), console)
    _print_dropped(plan.dropped, console)
    print_figures(plan, figures, console)
    console.print("\nTo use plan 1:", style="bold")
    console.print(code_of(plan, figures.activation), soft_wrap=True)


def print_profile(plan: Plan, profile: Profile, path: Path, console: Console) -> None:
    """Print the cluster as it was measured, the plans that were run, and which was chosen.

    Args:
        plan: what was chosen.
        profile: what was measured.
        path: where it was written.
        console: where to print.
    """
    for line in _summary(plan, MEASURED):
        console.print(line)
    kernels = plan.cluster.kernels
    console.print(f"a kernel call costs {format_time(kernels.overhead)}")
    if kernels.copy:
        console.print(f"a rank copies what it sends and receives, at {format_rate(1 / kernels.copy)}")
    print_table("Plans that were run: a step of attention, forward and backward", _runs(plan, profile), console)
    console.print(f"\nchosen: {plan.chosen}")
    console.print(f"written to {path}; wallfacer plan --profile reads it", soft_wrap=True)


def _summary(plan: Plan, origins: Mapping[str, str]) -> Iterator[str]:
    sequence = plan.sequence
    yield from summary_of_cluster(plan.cluster, origins)
    orders = sorted({one.candidate.order for one in plan.ranked})
    yield (
        f"{sequence.length} tokens in {' or '.join(orders)} order{mask_of(plan)}, batch {sequence.batch}, "
        f"{sequence.dtype_name}"
    )
    yield summary_of_model(plan.model)


def summary_of_cluster(cluster: Cluster, origins: Mapping[str, str]) -> Iterator[str]:
    """Ranks, links and kernels, a line each.

    Args:
        cluster: it.
        origins: who says the kernels' rates.

    Yields:
        The lines.
    """
    nodes = f"{cluster.nodes} node{'s' * (cluster.nodes > 1)} of {min(cluster.ranks, cluster.ranks_per_node)}"
    limit = "" if cluster.memory is None else f", each with {format_size(cluster.memory)}"
    yield f"{cluster.ranks} rank{'s' * (cluster.ranks > 1)} on {nodes}{limit}"
    links = [f"into a rank {_link(cluster.intra)}"] * (cluster.ranks_per_node > 1)
    shared = f" over {cluster.nics} interfaces" if cluster.nics > 1 else ""
    links += [f"into a node {_link(cluster.inter)}{shared}"] * (cluster.nodes > 1)
    if cluster.ranks > 1:
        yield "; ".join(links)
    kernels = cluster.kernels
    speeds = [f"{format_speed(getattr(kernels, name))} ({origins[name]})" for name in ("forward", "backward", "linear")]
    long = f" in long blocks, half of that in those of {kernels.half_rows:.0f} queries" * (kernels.half_rows >= 0.5)
    by = f" by {kernels.attention}" * (kernels.attention != "auto")
    yield f"attention{by} at {speeds[0]}, its backward at {speeds[1]}{long}, other matrix products at {speeds[2]}"
    yield f"memory is read and written at {format_rate(kernels.merge)} ({origins['merge']})"
    if kernels.launch:
        yield f"the host launches an operation of attention in {format_time(kernels.launch)} ({origins['launch']})"


def asked_of(plan: Plan | DivisionPlan) -> str:
    """What all plans had to have."""
    return f" with {plan.only}" * bool(plan.only)


def mask_of(plan: Plan | DivisionPlan) -> str:
    """What is seen, after a comma."""
    seen = ", causal" if plan.sequence.is_causal else ", full"
    if documents := plan.sequence.documents:
        least, most, number = min(documents), max(documents), len(plan.sequence.mask.documents[0]) - 1
        seen += f", {number} documents of {f'{least} to ' * (least < most)}{most} tokens"
    *others, (layers, sequence) = kinds_of_layers(plan.model, plan.sequence)
    if sequence.window_size is None:
        return seen
    return f"{seen}, window {sequence.window_size[0]}" + f" in {layers} of {plan.model.layers} layers" * bool(others)


def summary_of_model(model: ModelShape) -> str:
    """Its sizes."""
    shared = f" beside a shared one of {model.shared_ffn}" * bool(model.shared_ffn)
    experts = f", {model.experts_per_token} of {model.experts} experts{shared}" if model.experts else ""
    if model.dense_layers:
        experts += f", but one of {model.dense_ffn} in the first {model.dense_layers} of {model.layers} layers"
    ffn = f", {'gated ' * model.gated}feed-forward of {model.ffn}{experts}" if model.ffn else ""
    vocab = f", vocabulary of {model.vocab}" if model.vocab else ""
    values = f" and {model.value_dim}" * (model.value_dim is not None)
    ranks = [str(rank) for rank in (model.q_rank, model.kv_rank) if rank]
    latents = f", latents of {' and '.join(ranks)}" * bool(ranks)
    heads = f"{model.heads}/{model.keys} heads of {model.dim}{values}{latents}"
    return f"hidden {model.hidden}, {heads}{ffn}{vocab}"


def _link(link: Link) -> str:
    return f"{format_rate(link.bandwidth)} and {format_time(link.latency)}"


def _costs(best: Sequence[Ranked], figures: Figures) -> Table:
    table = _table("step", "tokens\nper s", *["MFU"] * (figures.peak is not None), "exposed", gap=0)
    for heading in ("into\na rank", "into\na node", "hops", "memory"):
        table.add_column(heading, justify="right")
    for number, one in enumerate(best, 1):
        p = one.prediction
        mfu = figures.mfu(one)
        shares = [] if mfu is None else [f"{mfu:.0%}"]
        times = [format_time(one.seconds), f"{figures.rate(one):.0f}", *shares, format_time(p.exposed)]
        sizes = [format_size(p.rank_bytes), format_size(p.node_bytes), str(p.hops), format_size(p.memory)]
        table.add_row(str(number), *_choices(one.candidate), *times, *sizes, style="bold" if number == 1 else None)
    return table


def _table(*times: str, gap: int = 1) -> Table:
    """A table of candidates, with columns for how long they take."""
    table = plain_table(gap)
    for heading in (_MESH, "in\nnode", "schedule", "rotates\nfwd,bwd"):
        table.add_column(heading)
    for heading in times:
        table.add_column(heading, justify="right")
    return table


def _choices(it: Candidate) -> list[str]:
    """What tells attentions apart; a dash where there is nothing to choose."""
    several = sum(size > 1 for size in it.axes) > 1
    return [
        f"{it.ulysses} x {it.ring} x {it.team}",
        it.placement.removesuffix("_in_node") if several else "-",
        it.schedule if it.team > 1 else "-",
        f"{it.rotate_forward}, {it.rotate}" if it.ring * it.team > 1 else "-",
    ]


def _reasons(plan: Plan, best: Sequence[Ranked]) -> Table:
    """With the choices that not every plan has, so that the other table is not too wide."""
    table = plain_table()
    columns = {
        "order": (len({one.candidate.order for one in plan.ranked}) > 1, lambda one: one.candidate.order),
        "feed-forward": (bool(plan.model.ffn), lambda one: one.candidate.feed_forward.replace("metp", "METP")),
        "projections": (
            any(one.candidate.projections == "metp" for one in best),
            lambda one: one.candidate.projections.replace("metp", "METP"),
        ),
        "checkpoint": (
            bool(plan.model.ffn) or any(one.candidate.checkpoint != "none" for one in best),
            lambda one: one.candidate.checkpoint,
        ),
        "measured": (
            any(one.measured is not None for one in best),
            lambda one: "-" if one.measured is None else format_time(one.measured),
        ),
    }
    shown = {name: cell for name, (is_shown, cell) in columns.items() if is_shown}
    for name in shown:
        table.add_column(name, justify="right" if name == "measured" else "left", no_wrap=True)
    table.add_column("")
    table.show_header = bool(shown)
    for number, one in enumerate(best, 1):
        table.add_row(str(number), *(cell(one) for cell in shown.values()), one.why)
    return table


def _runs(plan: Plan, profile: Profile) -> Table:
    runs = runs_of(plan, profile)
    differ = len({one.candidate.order for one in runs}) > 1
    table = _table(*["order"] * differ, "predicted", "measured")
    for number, one in enumerate(runs, 1):
        style = "bold" if one.candidate == plan.chosen else None
        others = [*[one.candidate.order] * differ, format_time(one.prediction.seconds), format_time(one.seconds)]
        table.add_row(str(number), *_choices(one.candidate), *others, style=style)
    return table


def _print_dropped(dropped: Sequence[Ranked], console: Console) -> None:
    if not dropped:
        return
    console.print(f"\nDropped, {len(dropped)}:", style="bold")
    for one in dropped[:_DROPPED]:
        console.print(f"{one.candidate}: {one.why}")
    if len(dropped) > _DROPPED:
        console.print(f"and {len(dropped) - _DROPPED} that need as much or more")


def plain_table(gap: int = 1) -> Table:
    """A table of numbered rows."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, gap, 0, 0), pad_edge=False)
    table.add_column("#", justify="right", no_wrap=True)
    return table
