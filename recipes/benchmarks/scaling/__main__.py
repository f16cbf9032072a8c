"""Write the report and its pictures.

python -m recipes.benchmarks.scaling --out docs/benchmarks
"""

import os
import platform
import textwrap
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from recipes.benchmarks.attention import commit
from recipes.benchmarks.memory.tables import Table
from recipes.benchmarks.scaling.cases import (
    BEST,
    FAST,
    HEADS,
    LARGEST_RING,
    LARGEST_TEAM,
    PUBLISHED,
    RING,
    SLOW,
    USP,
)
from recipes.benchmarks.scaling.picture import draw
from recipes.benchmarks.scaling.predictions import Point, predicted
from recipes.benchmarks.scaling.report import cases, check_table, forward_table, node_bound, ways_table

_HEAD = """\
# Scaling to 1024 ranks, predicted

{date}, commit {commit}, torch {torch}, a virtual machine with {cores} {machine} cores. Made in {seconds:.0f} s by
`python -m recipes.benchmarks.scaling`. Nothing here was run on GPUs.

What the planner predicts of one layer's attention, forward and backward: one causal sequence in bfloat16, heads of 128,
tokens in head-tail order, on nodes of 8 ranks with 450 GB/s into a rank within a node, 5 us a message there and 10 us
between nodes, and the planner's default rates (attention at 500 / 400 TFLOP/s forward / backward, 20 us a kernel call).
"{fast}" has eight interfaces, each serving one rank; "{slow}" has one. Strong scaling:
N = 1,048,576; weak: 16,384 tokens a rank. GB is 10^9 bytes.

"Exposed" are seconds in which a rank waits for others. Ring, published WallFacer, Ulysses (as many ranks as there are
query heads at most) and USP (Ulysses x ring) are each the fastest of their kind: of every C, size and placement. The
best plan is the fastest of all considered: every size of Ulysses, ring and team, placement, schedule and rotation, but
rings of more than {ring} ranks, other than the plain one, and teams of more than {team}, which are left out for time's
sake (with them the published schedule with C = 2 on 512 and 1024 ranks, and with C = 4 on 1024). What does not fit into
memory is not dropped here.

The lower bound: parts (nodes, or ranks) own as many tokens, and do as many (query, key) pairs, each. A part receives q
for every query that it does not own and works on, and has its output sent back, k and v for every such key; in the
backward q, the output's gradient and dq, and k, v, dk and dv, nothing but own shards having been kept. The area of rows
times columns is at least that of its pairs. The least sum is the bound, for the part that receives most; lse and delta
are left out. No schedule need reach it: a causal mask gives it half the area of a full one, which a schedule makes use
of only with blocks that the mask does not cut. It is of bytes, not of time; of time the bound is waiting for nothing.
"""


def main(
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("docs/benchmarks"),
    day: Annotated[str, typer.Option("--date", help="Of the report, in its name; today by default.")] = "",
) -> None:
    """Predict attention on 8 to 1024 ranks, check bytes by simulation, and write a report with pictures."""
    # The commit at which this began: its own pictures are changes, too.
    start, at, day = time.perf_counter(), commit(), day or str(date.today())
    out.mkdir(parents=True, exist_ok=True)
    console = Console()
    parts = []
    for table in _tables():
        console.print(f"{time.perf_counter() - start:5.0f} s  {table.title}")
        parts.append(replace(table, note=textwrap.fill(table.note, 120)).markdown())
    pictures = []
    for weak, name in ((False, "strong"), (True, "weak")):
        draw(out / f"scaling_{day}_{name}.png", weak=weak)
        pictures.append(f"![{name.capitalize()} scaling](scaling_{day}_{name}.png)")
    points = [predicted(case) for weak in (False, True) for heads in HEADS for case in cases(heads, weak=weak)]
    head = _HEAD.format(
        date=day, commit=at, torch=torch.__version__, cores=os.cpu_count(), machine=platform.machine(),
        seconds=time.perf_counter() - start, fast=FAST, slow=SLOW, ring=LARGEST_RING, team=LARGEST_TEAM,
    )  # fmt: skip
    text = "\n\n".join([head.rstrip(), _shows(points), *pictures, *parts]) + "\n"
    (out / f"scaling_{day}.md").write_text(text)


def _tables() -> Iterator[Table]:
    yield check_table()
    for weak in (False, True):
        for heads in HEADS:
            yield ways_table(heads, weak=weak)
    yield forward_table()


def _shows(points: list[Point]) -> str:
    """What the tables show, in words with their numbers."""
    lines = ["## What it shows", ""]
    for link in (FAST, SLOW):
        largest = [point for point in points if point.case.ranks == 1024]
        for name in (RING, PUBLISHED, USP):
            times = [point.ways[link, name].seconds / point.ways[link, BEST].seconds for point in largest]
            lines.append(f"- {link}, 1024 ranks: {name} takes {_span(times)} times as long as the best plan.")
        shares = [point.ways[link, BEST].share for point in largest]
        rings = [point.ways[link, RING].share for point in largest]
        ratios = [point.ways[link, BEST].node_bytes / node_bound(point.case) for point in largest]
        lines.append(
            f"- {link}, 1024 ranks: the best plan waits {_percents(shares)} of its time, the ring {_percents(rings)} "
            f"(52/52, 64/8 and 8/8 heads, strong scaling, then weak); into a node come {_span(ratios)} times the bound."
        )
    lines.append(_least_bytes(points))
    return "\n".join(textwrap.fill(line, 120, subsequent_indent="  ") for line in lines)


def _least_bytes(points: list[Point]) -> str:
    behind = [point for point in points if node_bound(point.case)]
    more = sum(
        point.ways[link, BEST].node_bytes > point.ways[link, RING].node_bytes
        for point in behind
        for link in (FAST, SLOW)
    )
    least = [point.least_node / node_bound(point.case) for point in behind]
    return (
        f"- The best plan is the fastest, not the one that sends least: in {more} of {2 * len(behind)} rows more bytes "
        f"come into a node than with the ring. The least of all ways considered is {_span(least)} times the bound."
    )


def _span(numbers: list[float]) -> str:
    return f"{min(numbers):.2f} to {max(numbers):.2f}"


def _percents(shares: list[float]) -> str:
    return ", ".join(f"{share:.1%}" for share in shares)


if __name__ == "__main__":
    typer.run(main)
