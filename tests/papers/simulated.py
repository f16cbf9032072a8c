"""Bytes that the package's own attention receives on ranks of a world that does not exist, against the planner's."""

from collections.abc import Sequence

import torch

from recipes.benchmarks.report import Table
from recipes.benchmarks.scaling.cases import PER_NODE, Case
from tests.papers.executed import ranks_of, traffic_of
from wallfacer_dt.planning import Candidate
from wallfacer_dt.planning.traffic import arrivals

Bytes = tuple[int, int]
"""What some ranks receive together, and of that what comes from other nodes."""
Check = tuple[Case, Candidate, range, bool]
"""A case, how its ranks share it, ranks of one node, and whether the backward runs, too."""

CHECKS: Sequence[Check] = tuple(
    (case, Candidate(*axes, order="head_tail"), ranks, backward)
    for case, axes, ranks, backward in (
        (Case(1024, 52, 52, False), (1024,), range(1), False),
        (Case(1024, 52, 52, False), (32, 8, 4, "ulysses_in_node", "published", "q"), range(1), True),
        (Case(1024, 52, 52, False), (16, 2, 32, "ring_in_node", "2d", "q"), range(5, 6), True),
        (Case(1024, 64, 8, False), (4, 8, 32), range(8, 16), True),
        (Case(1024, 64, 8, True), (128, 1, 8, "ulysses_in_node"), range(9, 10), True),
        (Case(1024, 8, 8, True), (32, 32), range(1023, 1024), True),
        (Case(64, 52, 52, False), (4, 4, 4, "ulysses_in_node"), range(7, 8), True),
        (Case(64, 64, 8, False), (1, 1, 64), range(3, 4), True),
    )
)


def check_table(checks: Sequence[Check] = CHECKS) -> Table:
    """Counted against predicted bytes."""
    rows = []
    for check in checks:
        case, way, ranks, backward = check
        seen, said = counted(*check), planned(*check)
        who = f"{ranks.start}" if len(ranks) == 1 else f"{ranks.start} to {ranks.stop - 1} (a node)"
        name = f"{case.ranks} ranks, {case.heads}/{case.kv_heads} heads, N = {case.sequence.length:,}: {way}"
        numbers = (f"{n:,}" for pair in zip(seen, said, strict=True) for n in pair)
        phases = "forward and backward" if backward else "forward"
        rows.append([name, who, phases, *numbers, "yes" if seen == said else "NO"])
    head = [
        "run", "ranks", "of", "bytes counted", "predicted", "of these from other nodes, counted", "predicted", "equal",
    ]  # fmt: skip
    return Table("Counted by simulation", head, rows)


def counted(case: Case, way: Candidate, ranks: range, backward: bool) -> Bytes:
    """What some ranks receive, run one after the other as ranks of a world that does not exist."""
    total = crossing = 0
    for rank in ranks:
        traffic = traffic_of(way, case.model, case.sequence, rank, backward=backward)
        for phase in (traffic.forward, traffic.backward):
            total += phase.received_bytes
            crossing += sum(n for other, n in phase.via.items() if other // PER_NODE != rank // PER_NODE)
    return total, crossing


def planned(case: Case, way: Candidate, ranks: range, backward: bool) -> Bytes:
    """What the planner says that these ranks receive."""
    total = crossing = 0
    rank_of = ranks_of(way)
    for key, some in arrivals(way, case.model, case.sequence).items():
        receivers, senders = (rank_of[torch.from_numpy(ends)] for ends in (some.receiver, some.via))
        nbytes = torch.from_numpy(some.total) * (receivers >= ranks.start) * (receivers < ranks.stop)
        if backward or not key.backward:
            total += int(nbytes.sum())
            crossing += int(nbytes[senders // PER_NODE != receivers // PER_NODE].sum())
    return total, crossing
