"""Write the report and its pictures.

python -m recipes.benchmarks.memory
"""

import os
import platform
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from recipes.benchmarks.attention import commit
from recipes.benchmarks.memory import report
from recipes.benchmarks.memory.formulas import KINDS
from recipes.benchmarks.memory.picture import draw_longest, draw_peaks
from recipes.benchmarks.memory.tables import Table

_HEAD = """\
# METP's memory beside TP+SP and FSDP+Ulysses

{date}, commit {commit}, torch {torch}, a virtual machine with {cores} {machine} cores. Made in {seconds:.0f} s by
`{command}`.

METP is `METPParallel` and `METPAttentionParallel`; TP+SP is torch's `ColwiseParallel` and `RowwiseParallel` with
tokens sharded outside; FSDP+Ulysses is FSDP2's `fully_shard` on each projection, and `UlyssesParallel`. RSA is there as
a formula. The layers are the paper's: a feed-forward h to 4h to h with GELU, and four projections h to h round
attention, no biases, batch 1. Unless something else is said, h = {hidden}, {heads} heads, {tokens:,} tokens, {dtype}.

Measured is what tensors hold on rank 0 of a fake process group (no contents, no communication), read after every
operation, those inside this package's operators too (torch's `MemTracker` does not see them); what is being sent counts
until it is waited for. Left out are a rank's own weights, and what one kernel allocates and frees in itself. "After
forward" is x and what autograd keeps, without the output. "Peak of the step" is that of forward and backward; the
output, its gradient and the gradients of the rank's weights are among it. The paper's formulas are of the forward
alone; their states are weights, gradients and Adam's moments.
"""

_SHOWS = """\
## What it shows

- After the forward METP holds what the formula says: x, and of attention x, its output and the lse. The others hold
  more of a feed-forward than theirs say, which count one of the two tensors (GELU's argument and its result) that
  autograd keeps; and TP+SP keeps the gathered x, which Megatron gathers again in its backward.
- METP's peak is above its formula, which leaves out the output (summed in float32), two shards of weights (one in use,
  one arriving) and, of attention, keys and values on their way and the output of a group of heads: "What METP's forward
  holds" has the bytes. torch's TP+SP is above its formula too: its partial output, of all tokens, is copied before it
  is scattered along them.
- Equation 10, formula against formula, is {equation} on {ranks} ranks: on 2, 41.7% less. Measured against measured
  METP's peak of the forward is {ratios} of TP+SP's, and {long_ratios} at {long:,} tokens, where weights do not count;
  in float32 {ratios_32} and {long_ratios_32}. Both sides hold more than their formulas; METP's surcharge is dearer on
  few ranks and in 16 bits, TP+SP's on many. METP as measured there in float32 is {against} of TP+SP's formula, which
  torch's TP+SP does not reach.
- After the forward, which is what a stack of layers adds up to, METP's attention holds {kept} of TP+SP's.
- With stored scores METP's peak falls as p to the power of {metp_law} from {first} to {last} ranks, where x, the output
  and weights are no longer small beside them, and TP+SP's as {tp_law}. Kernel `reference` has more than one tensor of a
  tile's scores at a time; each is bns^2 / p^3 to the byte. Ulysses here goes through a rank's heads in groups, so it
  stores fewer scores than table 2 says, but never fewer than one head's, which no number of ranks makes smaller.
- Longest sequences by the formulas: METP's are {gains} times as long as the others' on 8 ranks. The paper measured
  2.38 to 2.99 times on 8 GPUs. Nothing is fitted: {budget} GiB, all states in 16 bits, no embeddings, norms, logits or
  allocator, and none of what is said above to be missing in the formulas.
- Gloo ranks hold what fake ones do; where they hold more, a collective's buffer stays for a while after the wait.
  Resident sets grow by more than tensors: the rank's weights are among it, gloo's and the kernels' own buffers.

## Where METP loses

- At short sequences the two shards of weights are more than the activations saved. Of the lengths measured on 8 ranks,
  its peak is not below TP+SP's at {worse}.
- On few ranks a group is many heads. At {tokens:,} tokens attention's peak of the forward is not below FSDP+Ulysses' on
  {above_fsdp} ranks, and that of the step not below TP+SP's on {above_tp}.
- In 16 bits sums are in float32: the output, and in the backward the gradients of x and of a shard of weights, take
  twice what elements of the formula do, and a product that is added to them exists beside them.
- In the backward weights and their gradients both travel, each with one message being sent and one arriving: several
  shards of weights more than TP+SP, which sends none. "By tokens" has the lengths from which the step pays, too.
"""


def main(
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("docs/benchmarks"),
    date: Annotated[str, typer.Option(help="Of the report, in its name.")] = "2026-11-21",
    hidden: Annotated[int, typer.Option(help="h.")] = 4096,
    heads: Annotated[int, typer.Option(help="n.")] = 32,
    tokens: Annotated[int, typer.Option(help="s.")] = 32768,
    real: Annotated[bool, typer.Option(help="Run gloo ranks, too.")] = True,
) -> None:
    """Measure METP's memory beside others', and write a report with pictures."""
    start, at = time.perf_counter(), commit()  # before there are pictures, which are changes, too
    sizes = replace(report.Sizes(), hidden=hidden, heads=heads, tokens=tokens)
    console = Console()
    tables = []
    for table in _tables(sizes, real=real):
        console.print(table.rich())
        tables.append(table)
    out.mkdir(parents=True, exist_ok=True)
    stored, plain = (report.score_peaks(sizes, flash=flash) for flash in (False, True))
    titles = [
        f"{what}, {sizes.scores[0]:,} tokens, h = {sizes.scores[1]}" for what in ("Scores stored", "Flash attention")
    ]
    panels = [(title, *curves) for title, curves in zip(titles, (stored, plain), strict=True)]
    draw_peaks(out / "metp_memory_peak.png", panels, {"metp": -3, "tp": -1})
    budget = f"{sizes.budget // report.GIB} GiB"
    draw_longest(out / "metp_memory_longest.png", report.longest_curves(sizes), budget)
    head = _HEAD.format(
        date=date, commit=at, torch=torch.__version__, cores=os.cpu_count(), machine=platform.machine(),
        seconds=time.perf_counter() - start, command="python -m recipes.benchmarks.memory", hidden=hidden, heads=heads,
        tokens=tokens, dtype=sizes.dtype,
    )  # fmt: skip
    pictures = (
        "![Peak of the forward by ranks](metp_memory_peak.png)\n\n![Longest sequence by ranks](metp_memory_longest.png)"
    )
    parts = [head.rstrip(), _wrapped(_shows(sizes)).rstrip(), pictures, *(table.markdown() for table in tables)]
    (out / f"metp_memory_cpu_{date}.md").write_text("\n\n".join(parts) + "\n")


def _tables(sizes: report.Sizes, *, real: bool) -> Iterator[Table]:
    for kind in KINDS:
        yield report.side_by_side(sizes, kind)
    yield report.ratios(sizes)
    yield report.surcharges(sizes)
    yield report.scores(sizes)
    yield report.longest_table(sizes)
    for kind in KINDS:
        yield report.short_sequences(sizes, kind)
    if real:
        yield report.on_ranks(sizes)
    yield from report.formulas(sizes)


def _shows(sizes: report.Sizes) -> str:
    """What the tables show, in words with their numbers."""
    columns = [", ".join(cells) for cells in zip(*report.ratios(sizes).rows, strict=True)]
    laws = report.scores(sizes).rows[-1]
    factors = [float(cell) for row in report.longest_table(sizes).rows for cell in row[4:] if cell != "-"]
    worse = []
    for kind in KINDS:
        for name, what in (("peak", "forward"), ("step_peak", "step")):
            lengths = report.lengths_lost(sizes, kind, name)
            worse.append(f"{_listed(lengths)} ({kind}, {what})")
    above = {
        "above_fsdp": _listed(report.ranks_lost(sizes, "fsdp", "peak"), ""),
        "above_tp": _listed(report.ranks_lost(sizes, "tp", "step_peak"), ""),
    }
    return _SHOWS.format(
        equation=columns[1], ratios=columns[3], kept=columns[4], long_ratios=columns[5], ratios_32=columns[6],
        long_ratios_32=columns[7], against=columns[8], long=sizes.long, ranks=", ".join(str(p) for p in sizes.ranks),
        first=sizes.ranks[0], last=sizes.ranks[-1], metp_law=laws[3], tp_law=laws[1], tokens=sizes.tokens,
        gains=f"{min(factors):.2f} to {max(factors):.2f}", budget=sizes.budget // report.GIB, worse=", ".join(worse),
        **above,
    )  # fmt: skip


def _wrapped(text: str) -> str:
    """Points of a list filled anew, once their numbers are in."""
    joined = text.replace("\n  ", " ")
    return "\n".join(textwrap.fill(line, 120, subsequent_indent="  ") for line in joined.split("\n"))


def _listed(numbers: Sequence[int], what: str = " tokens") -> str:
    if not numbers:
        return f"no number of{what or ' ranks'} measured"
    return f"{numbers[0]:,}{what}" if len(numbers) == 1 else f"{numbers[0]:,} to {numbers[-1]:,}{what}"


if __name__ == "__main__":
    typer.run(main)
