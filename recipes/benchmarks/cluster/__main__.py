"""Measure every contender on an emulated cluster, as root on Linux, and report.

    python -m recipes.benchmarks.cluster --rates 500 --lengths 4096

What was measured is in the record, which a later run goes on with; the report is made of the record alone.
"""

import sys
from datetime import date
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from recipes.benchmarks.attention import commit
from recipes.benchmarks.cluster.cases import HEADS, LENGTHS, MASKS, RATES, Case, Nodes, all_cases
from recipes.benchmarks.cluster.launch import Cluster, started
from recipes.benchmarks.cluster.network import ClusterError
from recipes.benchmarks.cluster.record import append, is_done, read
from recipes.benchmarks.cluster.report import case_table, write
from recipes.benchmarks.cluster.run import check_loopback, measure, selected

_CONSOLE = Console(stderr=True)


def main(
    rates: Annotated[
        str, typer.Option(help="Mbit/s of every link, with commas; none for no limit.")
    ] = "none,1000,500,200",
    heads: Annotated[str, typer.Option(help="Query/key heads, with commas.")] = "16/16,16/4,6/2",
    lengths: Annotated[str, typer.Option(help="Tokens of the whole sequence, with commas.")] = "4096,16384",
    masks: Annotated[str, typer.Option(help="full, causal, or both with a comma.")] = "full,causal",
    contenders: Annotated[str, typer.Option(help="Parts of names, with commas; ring and one process always run.")] = "",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds after the first, which is not counted.")] = 5,
    long_rounds: Annotated[
        int, typer.Option(min=1, help="Rounds of sequences above 4096 tokens; the first counts, too.")
    ] = 3,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes.")] = 4,
    per_node: Annotated[int, typer.Option(min=1, help="Ranks of a node.")] = 4,
    record: Annotated[Path, typer.Option(help="File of what was measured.")] = Path("runs/cluster/record.jsonl"),
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("docs/benchmarks"),
    day: Annotated[str, typer.Option("--date", help="Of the report, in its name; today by default.")] = "",
    report_only: Annotated[bool, typer.Option(help="Make the report of the record, and measure nothing.")] = False,
) -> None:
    """Measure what the record does not have yet, and write the report."""
    try:
        cases = _cases(rates, heads, lengths, masks)
        _check_lengths(cases, Nodes(nodes, per_node))
        at = commit()  # at which this runs, whatever becomes of the checkout meanwhile
        if not report_only:
            only = [part for part in contenders.split(",") if part]
            with started(Nodes(nodes, per_node)) as cluster:
                inside, across = check_loopback(cluster)
                _CONSOLE.print(f"a MiB exchanged in nodes, {inside} bytes over a link; across nodes, {across}")
                for case in cases:
                    _one(cluster, case, long_rounds if case.is_long else rounds, only, record, at)
        path = write(read(record), out, day or str(date.today()))
    except ClusterError as error:
        print(f"recipes.benchmarks.cluster: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    _CONSOLE.print(f"report: {path}")


def _one(cluster: Cluster, case: Case, rounds: int, only: list[str], record: Path, at: str) -> None:
    running = selected(cluster, case, only)
    names = [contender.name for contender in running]
    if is_done(read(record), at, cluster.nodes, case, names, rounds):
        _CONSOLE.print(f"{case.name}: in the record")
        return
    entries = measure(cluster, case, rounds, running, at, _CONSOLE.print)
    append(record, entries)
    # Tables are wider than what a pipe is taken for.
    wide = Console(width=None if sys.stdout.isatty() else 150)
    wide.print(case_table(case, {entry.contender.name: entry for entry in entries}).rich())


def _cases(rates: str, heads: str, lengths: str, masks: str) -> list[Case]:
    try:
        return all_cases(
            [None if rate == "none" else _positive(rate) for rate in rates.split(",")],
            [_heads(pair) for pair in heads.split(",")],
            [_positive(length) for length in lengths.split(",")],
            [MASKS[MASKS.index(mask)] for mask in masks.split(",")],
        )
    except ValueError:
        example = ",".join(f"{q}/{kv}" for q, kv in HEADS)
        rest = f"--lengths {LENGTHS[0]},{LENGTHS[1]}, --masks {','.join(MASKS)}"
        raise ClusterError(
            f"expected options like --rates none,{RATES[1]}, --heads {example}, {rest}; got {rates!r}, {heads!r}, "
            f"{lengths!r}, {masks!r}"
        ) from None


def _check_lengths(cases: list[Case], cluster: Nodes) -> None:
    unequal = [case.length for case in cases if case.length % (2 * cluster.ranks)]
    if unequal:
        raise ClusterError(f"--lengths must be multiples of {2 * cluster.ranks}, twice the ranks, got {unequal[0]}")


def _heads(pair: str) -> tuple[int, int]:
    q, kv = map(_positive, pair.split("/"))
    if q % kv:
        raise ValueError(pair)
    return q, kv


def _positive(text: str) -> int:
    if int(text) < 1:
        raise ValueError(text)
    return int(text)


if __name__ == "__main__":
    typer.run(main)
