"""The report, of the record alone: every case as a table, what was chosen beside what was best, and who lost."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from recipes.benchmarks.cluster.cases import Case
from recipes.benchmarks.cluster.contenders import (
    FLOOR,
    NOT_RUN,
    PLANNED,
    PREDICTED,
    PUBLISHED,
    RING,
    ULYSSES,
    USP,
)
from recipes.benchmarks.cluster.findings import findings
from recipes.benchmarks.cluster.judged import NOISE, ROUNDS, Measured, best_of, fastest, regret, times
from recipes.benchmarks.cluster.network import ClusterError
from recipes.benchmarks.cluster.picture import draw
from recipes.benchmarks.cluster.record import Entry, latest
from recipes.benchmarks.cluster.stolen import ATTEMPTS, LIMIT
from recipes.benchmarks.memory.tables import Table

_HEAD = """\
# Sharing a sequence over an emulated cluster

{date}, on a machine with {machine}, at the commits that the first table names:
{nodes} nodes x {per_node} ranks, gloo, one thread a rank; batch 1, heads of {head_dim}, float32. Made by
`python -m recipes.benchmarks.cluster`.

A node is a network namespace; its link is a veth pair on one bridge, limited by `tc tbf` in both directions, with no
delay or loss added. Ranks of a node talk over its loopback. All nodes share one machine's cores, so what ranks compute
is the work of one process cut in pieces, and not much faster for any number of ranks: what differs between contenders
is communication, and how well it is hidden. Ranks that wait give way to others, so a schedule that balances ranks
better gains little here.

"Predicted" is what the planner says is the fastest, from links and kernels measured in this case. "Planned" is the
fastest of its best few when these are run in turn in this case, as `wallfacer_dt.profile` does; how many they are, and
what choosing took, is in the table. Both are then measured as contenders like all others. These have the placement that
their name says, or neighbours in teams and rings, and rotate what has fewer bytes; the planner may do otherwise. Of
long sequences not all ran in every case; a case's table has those that did.

Seconds from barrier to barrier on rank 0, medians of {rounds} rounds in which all contenders of a case take turns,
after one that is not counted; spread is (slowest - fastest) / median of the sum. Slower beyond noise is what is slower
by more than {noise:.0%}, and in four of five of at least {judged} rounds. "One process, all cores" is
`scaled_dot_product_attention` on the whole sequence in one rank with all cores, while the others wait: the floor, but
that the smaller blocks of many ranks are faster at times ({least:.2f} times as long at best). Bytes are those that came
over the link of the busiest node in one call, by its counter, headers included. In the first round each contender's
output and gradients were compared with those of one process; the largest relative error is {error:.1e}, and above 1e-4
nothing is reported.{cold}

Without a mask tokens are in contiguous order; under the causal one in head-tail order, but for "ring".

The host of a virtual machine gives its cores to others at times. A turn is made again when more than {limit:.0%} of
their time was taken ("stolen") meanwhile, up to {attempts} times in all, choosing up to twice; the least disturbed
one counts.
{disturbed}
"""


def write(entries: Sequence[Entry], out: Path, date: str) -> Path:
    """Write the report and its picture.

    Args:
        entries: the record.
        out: the folder.
        date: in its name.

    Returns:
        The report's path.

    Raises:
        ClusterError: the record is empty.
    """
    cases = latest(entries)
    if not cases:
        raise ClusterError("the record is empty: measure something first")
    cases = {case: cases[case] for case in sorted(cases, key=_place)}
    out.mkdir(parents=True, exist_ok=True)
    picture = f"cluster_cpu_{date}.png"
    draw(out / picture, cases)
    path = out / f"cluster_cpu_{date}.md"
    path.write_text("\n\n".join(_parts(cases, date, picture)) + "\n")
    return path


def _parts(cases: Mapping[Case, Measured], date: str, picture: str) -> Iterator[str]:
    every = [entry for measured in cases.values() for entry in measured.values()]
    rounds = sorted({len(entry.forward) for entry in every})
    yield _HEAD.format(
        date=date, machine=every[0].machine, nodes=every[0].cluster.nodes,
        per_node=every[0].cluster.per_node, head_dim=every[0].case.head_dim, rounds=" or ".join(map(str, rounds)),
        error=max(entry.error for entry in every), limit=LIMIT, attempts=ATTEMPTS, disturbed=_disturbed(cases),
        noise=NOISE, judged=ROUNDS, cold=_cold(cases), least=_least(cases),
    ).rstrip()  # fmt: skip
    yield "## What it shows\n\n" + "\n".join(f"- {line}" for line in findings(cases))
    yield f"![Seconds of every contender, divided by the ring's, by case and rate]({picture})"
    yield summary(cases).markdown()
    rows = [(name, version, f"`{why}`") for name, version, why in NOT_RUN]
    yield Table("Not run", ["what", "version", "why, as seen on CPU ranks"], rows).markdown()
    yield from (case_table(case, measured).markdown() for case, measured in cases.items())


def _cold(cases: Mapping[Case, Measured]) -> str:
    """In how many cases every round counts, and how long the first one takes compared with later ones."""
    cold = [measured for measured in cases.values() if not all(entry.warm_up for entry in measured.values())]
    if not cold:
        return ""
    counts = f"\nIn {len(cold)} of the cases, of long sequences, the first round counts, too"
    sums = [entry.sums for measured in cold for entry in measured.values() if len(entry.forward) > 1]
    if not sums:
        return f"{counts}."
    ratios = sorted(first / statistics.median(later) for first, *later in sums)
    return (
        f"{counts}: where there are more, it takes {statistics.median(ratios):.3f} times as long in\nthe median, "
        f"{ratios[0]:.2f} to {ratios[-1]:.2f} times in all."
    )


def _least(cases: Mapping[Case, Measured]) -> float:
    """How many times as long as one process the best contender takes, where that is least."""
    ratios = [times(measured, best_of(measured), FLOOR) for measured in cases.values() if FLOOR in measured]
    return min(ratios, default=math.nan)


def _disturbed(cases: Mapping[Case, Measured]) -> str:
    """How many turns counted although the host took too much, and in how many cases nobody looked."""
    unseen = [case for case, measured in cases.items() if not all(entry.stolen for entry in measured.values())]
    taken = [share for measured in cases.values() for entry in measured.values() for share in entry.stolen]
    over = [share for share in taken if share > LIMIT]
    most = f", up to {max(over):.0%}" if over else ""
    return (
        f"Of {len(taken)} turns that counted {len(over)} had more taken{most}; in {len(unseen)} of {len(cases)} cases, "
        "measured earlier,\nthis was not looked at."
    )


def case_table(case: Case, measured: Measured) -> Table:
    """Every contender of a case, fastest first."""
    rows = []
    for name, entry in sorted(measured.items(), key=lambda pair: pair[1].seconds):
        medians = [statistics.median(samples) for samples in (entry.forward, entry.backward)]
        rows.append([
            f"{name} ({entry.contender.what})" if name in (PLANNED, PREDICTED) else name,
            *(f"{seconds:.3f}" for seconds in (*medians, entry.seconds)),
            f"{entry.range / entry.seconds:.0%}",
            *(_ratio(measured, name, other) for other in (RING, FLOOR)),
            f"{entry.node_bytes / 2**20:.1f}",
        ])  # fmt: skip
    head = [
        "contender", "forward, s", "backward, s", "sum, s", "spread", "/ ring", "/ one process",
        "MiB into the busiest node",
    ]  # fmt: skip
    return Table(case.name, head, rows)


def summary(cases: Mapping[Case, Measured]) -> Table:
    """By case the best contender, and what was planned."""
    rows = []
    for case, measured in cases.items():
        best = best_of(measured)
        published = fastest(measured, PUBLISHED)
        rows.append([
            case.name,
            f"{best} ({measured[best].seconds:.3f} s)",
            *(_ratio(measured, best, other) for other in (RING, FLOOR)),
            measured[PLANNED].contender.what if PLANNED in measured else "-",
            measured[PLANNED].choosing if PLANNED in measured else "-",
            f"{regret(measured):.0%}" if PLANNED in measured else "-",
            _ratio(measured, PREDICTED, best),
            *(_ratio(measured, PLANNED, other) for other in (RING, USP, ULYSSES, published, FLOOR)),
            measured[best].commit,
        ])  # fmt: skip
    head = [
        "case", "best contender", "best / ring", "best / one process", "planned: ulysses x ring x team", "chosen by",
        "regret", "predicted / best",
        "planned / ring", "/ USP", "/ Ulysses", "/ published", "/ one process", "commit",
    ]  # fmt: skip
    note = "Regret is planned / best - 1, not below 0, where best is none that is the same plan. - is what was not run."
    return Table("Best and planned", head, rows, note)


def _ratio(measured: Measured, name: str, other: str) -> str:
    return f"{times(measured, name, other):.2f}" if {name, other} <= measured.keys() else "-"


def _place(case: Case) -> tuple[float, ...]:
    return case.length, -case.heads, -case.kv_heads, case.is_causal, -(case.rate or 10**9)
