"""Measuring a case: all ways take turns, round after round."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch

from recipes.benchmarks.cluster.cases import METP, METP_ATTENTION, Case, contenders
from recipes.benchmarks.cluster.device import KERNEL
from recipes.benchmarks.cluster.launch import Cluster
from recipes.benchmarks.cluster.network import ClusterError
from recipes.benchmarks.cluster.papers import OVERLAP
from recipes.benchmarks.cluster.record import Measured, Result
from recipes.benchmarks.report import machine
from wallfacer_dt import Cluster as Links
from wallfacer_dt.mesh import placed_ranks
from wallfacer_dt.planning.attention import compute_seconds
from wallfacer_dt.planning.candidates import Candidate, attentions
from wallfacer_dt.planning.predict import attention_cost
from wallfacer_dt.planning.timeline import Timeline, run
from wallfacer_dt.planning.weights_ring import feed_forward_events

PREDICTED, PROFILED = "predicted", "profiled"
TOLERANCE = 1e-4
BUSY, HELD = 0.01, 0.15
_AGAIN, _LONG = 1.25, 1.0  # times as long as the fastest, and seconds: ways that took longer take no other turn
_TALK = 1 << 20
_TOP = 4


def check_network(cluster: Cluster) -> None:
    """Refuse (ClusterError) that by the counters ranks of a node reach each other by what it shares with others."""
    machines, seen = cluster.network.machines, []
    for where in ("inside", "across"):
        # Connections are made when first used.
        cluster.ask("talk", where=where, count=4096)
        seen.append(_counted(cluster, "talk", where=where, count=_TALK)[1])
    if machines.per_node > 1 and seen[0] > _TALK // 2:
        raise ClusterError(f"ranks of one node sent {seen[0]} bytes over its link, which they should not")
    if machines.nodes > 1 and seen[1] < _TALK // 2:
        raise ClusterError(f"ranks of different nodes sent {seen[1]} bytes over links, {_TALK} or more expected")


def check_numbers(cluster: Cluster, case: Case) -> dict[str, float]:
    """By contender, the largest error with real kernels, as a part of the largest element; or a ClusterError."""
    found = {}
    for name, way in contenders(case).items():
        errors = cluster.ask("check", case=asdict(case), way=asdict(way))["errors"]
        if not all(error <= TOLERANCE for error in errors):
            raise ClusterError(f"{case.name}: {name} is off by {errors}, at most {TOLERANCE:.0e} is allowed")
        found[name] = max(errors)
    return found


def measure(cluster: Cluster, links: Links, case: Case, rounds: int, commit: str, say: Callable[[str], None]) -> Result:
    """Measure one case on links as they were probed; a device that computes longer or shorter than it should raises."""
    links = replace(links, kernels=replace(case.kernels, copy=links.kernels.copy, attention=KERNEL))
    names, choosing = contenders(case), 0.0
    rounds = rounds if case.ratio >= 1 else 1  # where sending hides, times differ by 0.4%, and take longest
    if case.figure not in (OVERLAP, METP, METP_ATTENTION):
        say(f"{case.name}: choosing")
        chosen = cluster.ask("choose", case=asdict(case), cluster=links.as_json(), top=_TOP)
        names |= {name: Candidate(**chosen[name]) for name in (PREDICTED, PROFILED)}
        choosing = chosen["seconds"]
    ways = list(dict.fromkeys(names.values()))
    turns: dict[Candidate, list[tuple[dict[str, Any], int]]] = {way: [] for way in ways}
    for turn in range(rounds):
        say(f"{case.name}: round {turn + 1} of {rounds}")
        # Whom one comes after is not always the same.
        start = turn % len(ways)
        first = {way: sum(one["seconds"] for one in some[0][0].values()) for way, some in turns.items() if some}
        for way in [*ways[start:], *ways[:start]]:
            if not turn or first[way] <= min(_LONG, _AGAIN * min(first.values())):
                turns[way].append(_counted(cluster, "turn", case=asdict(case), way=asdict(way)))
    found = {way: _measured(way, case, links, turns[way]) for way in ways}
    by_name = {name: found[way] for name, way in names.items()}
    return Result(case, commit, machine(), by_name, bound(case, links), choosing)


def _lines(way: Candidate, case: Case, links: Links) -> list[tuple[Timeline, int]]:
    """What the planner predicts of forward and backward, each with the inner index of the rank that it is of."""
    if case.figure != METP:
        ways = attention_cost(way, case.model, case.sequence, links).ways
        return [(one.line, one.inner or 0) for one in ways]
    events = partial(feed_forward_events, way.axes, case.tokens, case.model, case.sequence, links)
    return [(run(events(backward=backward), links), 0) for backward in (False, True)]


def bound(case: Case, links: Links) -> tuple[float, float]:
    """Seconds of forward and backward that no known way goes below: of devices, or the link for least bytes."""
    if case.figure in (METP, METP_ATTENTION):
        lines = _lines(contenders(case)[case.figure], case, links)
        forward, backward = (max(line.compute, *line.busy) for line, _ in lines)
        return forward, backward
    shapes = case.model, case.sequence
    costs = {way: attention_cost(way, *shapes, links) for way in attentions(*shapes, links)}
    least = least_compute(costs, case)
    forward, backward = (
        max(least[way], min(cost.node_bytes[way] for cost in costs.values()) / links.inter.bandwidth) for way in (0, 1)
    )
    return forward, backward


def least_compute(ways: Iterable[Candidate], case: Case) -> tuple[float, float]:
    """Of forward and backward, the seconds that the device with most to do computes at least, by the best of ways."""
    model, sequence = case.model, case.sequence
    told = {"together": sequence.mask.spares_hops}  # else ranks have about as much to do
    forward, backward = (
        min(compute_seconds(way, model, sequence, case.kernels, backward=which, **told) for way in ways)
        for which in (False, True)
    )
    return forward, backward


def _measured(way: Candidate, case: Case, links: Links, turns: list[tuple[dict[str, Any], int]]) -> Measured:
    lines = _lines(way, case, links)
    ranks = placed_ranks(way.ring, way.team, ulysses=way.ulysses, placement=way.placement).flatten()
    first, node_bytes = turns[0]
    planned, busy, held, best = [], [], [], min((answer for answer, _ in turns), key=_overslept)
    for name, (line, inner) in zip(("forward", "backward"), lines, strict=True):
        seen = first[name]["busy"]
        # Ranks that Ulysses gives other heads have other work, of which the planner takes the most.
        own = max(seen[rank] for rank in ranks[inner :: way.ring * way.team].tolist())
        if not (1 - BUSY) * line.compute <= own <= (1 + BUSY) * line.compute:
            raise ClusterError(
                f"{case.name}: in the {name} of {way} a device computed {own:.4f} s, the planner has "
                f"{line.compute:.4f} s"
            )
        planned.append(line.seconds)
        busy.append(max(seen))
        held.append(max(best[name]["held"]))
    if not _overslept(best) <= HELD:
        raise ClusterError(f"{case.name}: a device of {way} overslept by {_overslept(best):.0%} of the time")
    rounds = tuple((answer["forward"]["seconds"], answer["backward"]["seconds"]) for answer, _ in turns)
    return Measured(way, tuple(planned), rounds, tuple(busy), node_bytes, tuple(held))


def _overslept(answer: Mapping[str, Any]) -> float:
    """For how long a device held its rank at most beyond its kernels' time, as a part of the call's."""
    ways = answer["forward"], answer["backward"]
    held, busy = (torch.tensor([one[what] for one in ways]).sum(0) for what in ("held", "busy"))
    return float((held - busy).max()) / sum(one["seconds"] for one in ways)


def _counted(cluster: Cluster, do: str, **fields: Any) -> tuple[dict[str, Any], int]:
    """What the ranks answer, and the bytes into the busiest node meanwhile."""
    before = cluster.network.received()
    answer = cluster.ask(do, **fields)
    return answer, max(after - was for was, after in zip(before, cluster.network.received(), strict=True))
