"""Write the report and its pictures.

python -m recipes.benchmarks.papers --out docs/benchmarks
"""

import os
import platform
import time
from datetime import date
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from recipes.benchmarks.attention import commit
from recipes.benchmarks.papers.report import sections

_HEAD = """\
# The papers' numbers beside ours

{date}, commit {commit}, torch {torch}, a virtual machine with {cores} {machine} cores. Made in {seconds:.0f} s by
`{command}`.

WallFacer is Liu, Cheng et al., "WallFacer: Harnessing multi-dimensional ring parallelism for efficient long sequence
model training"; Ring Attention is Liu, Zaharia, Abbeel, "Ring attention with blockwise Transformers for near-infinite
context". Both were read as text, without their pictures.

"Executed, P fake ranks" is a call of this package's attention on one rank (rank 1) of a fake process group of P ranks,
on tensors without contents: the collectives that run are counted, and what tensors hold is read after every operation.
"Formula" is arithmetic on what the papers print. Units: N tokens, H hidden size, P ranks, C ranks of a team, A = NH / P
elements; of Ring Attention b, s, h, n and c: batch, tokens, hidden size, heads and tokens of a rank; GiB and MiB are
2^30 and 2^20 bytes, K is 1,024 tokens. Where ours differs from the paper, the note says why.

"Predicted" is what this package's planner says of the paper's clusters, on which nothing was run.
"""


def main(
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("docs/benchmarks"),
    day: Annotated[str, typer.Option("--date", help="Of the report, in its name; today by default.")] = "",
) -> None:
    """Compute the papers' numbers, and write a report with pictures."""
    # The commit at which this began: its own pictures are changes, too.
    start, at, day = time.perf_counter(), commit(), day or str(date.today())
    out.mkdir(parents=True, exist_ok=True)
    console = Console()
    parts = []
    for section in sections(out):
        console.print(f"{time.perf_counter() - start:5.0f} s  {section.table.title}")
        parts.append(section.markdown())
    head = _HEAD.format(
        date=day, commit=at, torch=torch.__version__, cores=os.cpu_count(), machine=platform.machine(),
        seconds=time.perf_counter() - start, command="python -m recipes.benchmarks.papers",
    )  # fmt: skip
    (out / f"papers_{day}.md").write_text("\n\n".join([head.rstrip(), *parts]) + "\n")


if __name__ == "__main__":
    typer.run(main)
