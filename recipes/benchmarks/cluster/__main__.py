"""Measure the named ways to share a sequence, and the planner's choice, on emulated clusters; as root on Linux.

    python -m recipes.benchmarks.cluster

What was measured is in the record, which a later run goes on with; the report is made of the record alone.
"""

import sys
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from recipes.benchmarks.cluster.cases import Case, Machines, cases, contenders, number_cases
from recipes.benchmarks.cluster.launch import started
from recipes.benchmarks.cluster.network import ClusterError
from recipes.benchmarks.cluster.papers import paper_cases
from recipes.benchmarks.cluster.record import append, read
from recipes.benchmarks.cluster.report import write
from recipes.benchmarks.cluster.run import check_network, check_numbers, measure
from recipes.benchmarks.report import commit
from wallfacer_dt import Cluster as Links
from wallfacer_dt.reading import FileError

_CONSOLE = Console(stderr=True)
_PAGE = Path("docs/benchmarks/cluster.md")


def main(
    only: Annotated[str, typer.Option(help="Cases whose names contain this.")] = "",
    rounds: Annotated[int, typer.Option(min=1, help="In which all ways take turns.")] = 2,
    again: Annotated[bool, typer.Option(help="Measure again what the record has.")] = False,
    numbers: Annotated[bool, typer.Option(help="Check every contender's numbers with real kernels instead.")] = False,
    report_only: Annotated[bool, typer.Option(help="Measure nothing.")] = False,
    page: Annotated[Path, typer.Option(help="The report; its record is beside it.")] = _PAGE,
) -> None:
    """Measure what the record does not have yet, and write the report."""
    record, at = page.with_suffix(".jsonl.gz"), commit(page)  # at which this runs, whatever becomes of the checkout
    some = [case for case in (number_cases() if numbers else (*cases(), *paper_cases())) if only in case.name]
    try:
        known = {} if again or numbers else read(record)
        wanted = [] if report_only else [case for case in some if case not in known]
        for machines, group in groupby(wanted, key=lambda case: case.machines):
            _on(machines, list(group), rounds, record, at, numbers=numbers)
        results = {} if numbers else read(record)
        if not some or not (numbers or results):
            raise ClusterError("the record is empty: measure something first" if some else f"no case has {only!r}")
    except (ClusterError, FileError) as error:
        print(f"recipes.benchmarks.cluster: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    if not numbers:
        write({case: results[case] for case in (*cases(), *paper_cases()) if case in results}, page)
        _CONSOLE.print(f"report: {page}")


def _on(machines: Machines, some: list[Case], rounds: int, record: Path, at: str, *, numbers: bool) -> None:
    with started(machines) as cluster:
        check_network(cluster)
        if numbers:
            for case in some:
                for name, error in check_numbers(cluster, case).items():
                    _CONSOLE.print(f"{case.name}: {name} is off by {error:.1e}")
            return
        way = next(iter(contenders(some[0]).values()))
        cluster.ask("turn", case=asdict(some[0]), way=asdict(way))  # what the first call of all does once
        links = Links.from_json(cluster.ask("links"))
        _CONSOLE.print(f"{machines.name}: {links.intra}, {links.inter} over {links.nics}")
        for case in some:
            append(record, measure(cluster, links, case, rounds, at, _CONSOLE.print))


if __name__ == "__main__":
    typer.run(main)
