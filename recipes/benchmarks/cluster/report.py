"""The report, of the record alone: every case as a table, what was chosen beside what was best, and who lost."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from recipes.benchmarks.cluster.cases import Case, all_cases
from recipes.benchmarks.cluster.contenders import (
    FLOOR,
    HEAD_TAIL_RING,
    NOT_RUN,
    PLANNED,
    PREDICTED,
    PUBLISHED,
    RING,
    ULYSSES,
    USP,
    Contender,
)
from recipes.benchmarks.cluster.network import ClusterError
from recipes.benchmarks.cluster.picture import draw
from recipes.benchmarks.cluster.record import Entry, latest
from recipes.benchmarks.cluster.stolen import ATTEMPTS, LIMIT
from recipes.benchmarks.memory.tables import Table

Measured = Mapping[str, Entry]
"""The contenders of one case by name."""

# The bounds that the choice is held to: above the best; times one process where links have no limit; and how much
# faster than a ring it is where heads are fewer than ranks.
REGRET, OVER_FLOOR, OVER_RING = 0.10, 1.2, 1.5
# Slower beyond noise: in so many of the rounds, and in the median by more than this part.
_OFTEN, _NOISE = 0.8, 0.03

_HEAD = """\
# Sharing a sequence over an emulated cluster

{date}, on a machine with {machine}, at the commits that the first table names:
{nodes} nodes x {per_node} ranks, gloo, one thread a rank; batch 1, heads of {head_dim}, float32. Made by
`python -m recipes.benchmarks.cluster`.

A node is a network namespace; its link is a veth pair on one bridge, limited by `tc tbf` in both directions, with no
delay or loss added. Ranks of a node talk over its loopback. All nodes share one machine's cores, so what ranks compute
is the work of one process cut in pieces, and hardly faster than that for any number of ranks: what differs between
contenders is communication, and how well it is hidden. Ranks that wait give way to others, so a
schedule that balances ranks better gains little here.

"Predicted" is what the planner says is the fastest, from links and kernels measured in this case. "Planned" is the
fastest of its best few when these are run in turn in this case, as `wallfacer_dt.profile` does; how many they are, and
what choosing took, is in the table. Both are then measured as contenders like all others. These have the placement that
their name says, or neighbours in teams and rings, and rotate what has fewer bytes; the planner may do otherwise.

Seconds from barrier to barrier on rank 0, medians of {rounds} rounds in which all contenders of a case take turns,
after one that is not counted; spread is (slowest - fastest) / median of the sum. Slower beyond noise is what is slower
in four of five rounds or more, and by more than {noise:.0%}. "One process, all cores" is
`scaled_dot_product_attention` on the whole sequence in one rank with all cores, while the others wait: the floor. Bytes
are those that came over the link of the busiest node in one call, by its counter, headers included. In the uncounted
round each contender's output and gradients were compared with those of one process; the largest relative error is
{error:.1e}, and above 1e-4 nothing is reported.

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
        noise=_NOISE,
    ).rstrip()  # fmt: skip
    yield "## What it shows\n\n" + "\n".join(f"- {line}" for line in findings(cases))
    yield f"![Seconds of every contender, divided by the ring's, by case and rate]({picture})"
    yield summary(cases).markdown()
    rows = [(name, version, f"`{why}`") for name, version, why in NOT_RUN]
    yield Table("Not run", ["what", "version", "why, as seen on CPU ranks"], rows).markdown()
    yield from (case_table(case, measured).markdown() for case, measured in cases.items())


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
    for name, entry in sorted(measured.items(), key=lambda item: item[1].seconds):
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
        published = _fastest(measured, PUBLISHED)
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


def findings(cases: Mapping[Case, Measured]) -> list[str]:
    """What the tables show, in words, with the cases that were lost by name."""
    whole = set(all_cases())
    lines = [f"{len(whole & cases.keys())} of the {len(whole)} cases of the whole comparison are in this report."]
    firsts = [best_of(measured) for measured in cases.values()]
    counts = sorted(((firsts.count(name), name) for name in set(firsts)), key=lambda pair: (-pair[0], pair[1]))
    lines.append("Best by cases: " + "; ".join(f"{name}, {count}" for count, name in counts) + ".")
    planned = {case: measured for case, measured in cases.items() if PLANNED in measured}
    if not planned:
        return [*lines, "Nothing was planned in these cases."]
    beyond = [case for case, measured in planned.items() if regret(measured) > REGRET]
    lines.append(f"Planned is more than {REGRET:.0%} slower than the best {_in(beyond, planned)}.")
    for name, what in (
        (RING, "the plain ring"),
        (ULYSSES, "Ulysses"),
        (USP, "USP"),
        (PUBLISHED, "the published schedule"),
    ):
        those = [case for case, measured in planned.items() if _fastest(measured, name)]
        others = {case: _fastest(planned[case], name) for case in those}
        lost = [case for case, it in others.items() if is_slower(planned[case], it) and not _is_same(planned[case], it)]
        lines.append(f"Planned is slower than {what} beyond noise {_in(lost, those)}.")
    few = [case for case, measured in planned.items() if case.heads < measured[PLANNED].cluster.ranks]
    short = [case for case in few if over_rings(planned[case]) < OVER_RING]
    lines.append(
        f"With fewer heads than ranks the faster of the two rings takes less than {OVER_RING} times as long as planned "
        f"{_in(short, few)}."
    )
    if beyond_reach := [
        case for case in short if FLOOR in planned[case] and over_rings(planned[case], FLOOR) < OVER_RING
    ]:
        lines.append(
            f"In {len(beyond_reach)} of those {len(short)} the rings take less than {OVER_RING} times as long as one "
            "process, too: on these cores there is hardly that much to gain."
        )
    behind = [case for case in few if USP in planned[case] and _times(planned[case], PLANNED, USP) >= 1]
    lines.append(f"With fewer heads than ranks planned is not ahead of USP {_in(behind, few)}.")
    first = [case for case, measured in planned.items() if _behind_best(measured, PREDICTED) > REGRET]
    lines.append(f"What was predicted alone is more than {REGRET:.0%} slower than the best {_in(first, planned)}.")
    if again := noise(planned):
        lines.append(
            f"{len(again)} times another contender is the very plan that was planned, which counts as no regret: one "
            f"took {statistics.median(again):.0%} longer than the other in the median, and up to {max(again):.0%}."
        )
    free = [case for case in planned if case.rate is None and FLOOR in planned[case]]
    above = [case for case in free if _times(planned[case], PLANNED, FLOOR) > OVER_FLOOR]
    lines.append(f"Without a limit planned takes more than {OVER_FLOOR} times one process {_in(above, free)}.")
    return lines


def best_of(measured: Measured) -> str:
    """The fastest contender on ranks."""
    return min((name for name in measured if name != FLOOR), key=lambda name: measured[name].seconds)


def regret(measured: Measured) -> float:
    """How much slower the planned contender is than the best other one, as a part of that."""
    return _behind_best(measured, PLANNED)


def noise(cases: Mapping[Case, Measured]) -> list[float]:
    """How much slower the slower one is where another contender is the plan that was planned: it was measured twice."""
    twice = [
        _times(measured, other, PLANNED)
        for measured in cases.values()
        for other in measured
        if other != PLANNED and _is_same(measured, other)
    ]
    return [max(ratio, 1 / ratio) - 1 for ratio in twice]


def is_slower(measured: Measured, other: str) -> bool:
    """Whether the planned contender is slower than another in most rounds, in which both took turns, beyond noise."""
    pairs = list(zip(measured[PLANNED].sums, measured[other].sums, strict=True))
    often = sum(ours > theirs for ours, theirs in pairs) >= _OFTEN * len(pairs)
    return often and _times(measured, PLANNED, other) > 1 + _NOISE


def over_rings(measured: Measured, other: str = PLANNED) -> float:
    """How many times as long as planned, or another, the faster ring takes, in contiguous order or head-tail."""
    rings = [measured[name].seconds for name in (RING, HEAD_TAIL_RING) if name in measured]
    return min(rings) / measured[other].seconds


def _behind_best(measured: Measured, name: str) -> float:
    others = [other for other in measured if other != FLOOR and not _is_same(measured, other, name)]
    return max([0.0, *(_times(measured, name, other) - 1 for other in others)]) if name in measured else 0.0


def _is_same(measured: Measured, one: str, other: str = PLANNED) -> bool:
    """Whether two contenders are one but for their names."""
    if not {one, other} <= measured.keys():
        return False
    first, second = (_plain(measured[name].contender) for name in (one, other))
    return first == second


def _plain(it: Contender) -> Contender:
    """Without its name, and what makes no difference to its mesh."""
    if it.ulysses * it.ring * it.team in (it.ulysses, it.ring, it.team):
        it = replace(it, placement="team_in_node")
    if it.ring * it.team == 1:
        it = replace(it, schedule="2d", rotate="auto", rotate_forward="auto")
    return replace(it, name="")


def _in(lost: Sequence[Case], among: Mapping[Case, Measured] | Sequence[Case]) -> str:
    names = f": {'; '.join(case.name for case in lost)}" if lost else ""
    return f"in {len(lost)} of {len(among)} cases{names}"


def _fastest(measured: Measured, family: str) -> str:
    """The fastest contender of this name, or of those whose names begin with it where none has it; or nothing."""
    names = [family] if family in measured else [name for name in measured if name.startswith(f"{family},")]
    return min(names, key=lambda name: measured[name].seconds, default="")


def _times(measured: Measured, name: str, other: str) -> float:
    return measured[name].seconds / measured[other].seconds


def _ratio(measured: Measured, name: str, other: str) -> str:
    return f"{_times(measured, name, other):.2f}" if {name, other} <= measured.keys() else "-"


def _place(case: Case) -> tuple[float, ...]:
    return case.length, -case.heads, -case.kv_heads, case.is_causal, -(case.rate or 10**9)
