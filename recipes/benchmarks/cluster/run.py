"""Measuring a case: all contenders in turn, round after round; in the first each is checked."""

import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import NamedTuple, TypeVar

import torch

from recipes.benchmarks.cluster.cases import Case
from recipes.benchmarks.cluster.contenders import FLOOR, PLANNED, RING, Contender, contenders
from recipes.benchmarks.cluster.launch import Cluster
from recipes.benchmarks.cluster.network import ClusterError
from recipes.benchmarks.cluster.record import Entry
from recipes.benchmarks.cluster.stolen import ATTEMPTS, undisturbed

TOLERANCE = 1e-4
_TALK = 1 << 20

T = TypeVar("T")


class Sample(NamedTuple):
    """One turn: seconds of forward and backward, and the share of the cores' time that was stolen meanwhile."""

    forward: float
    backward: float
    stolen: float


def check_loopback(cluster: Cluster) -> tuple[int, int]:
    """See by the counters that ranks of a node reach each other without its link, and others over it.

    Returns:
        Bytes into the busiest node when every rank sent a MiB about in its node, and across nodes.

    Raises:
        ClusterError: it is otherwise.
    """
    seen = []
    for where in ("inside", "across"):
        # Connections are made when first used.
        cluster.ask("talk", where=where, bytes=4096)
        seen.append(counted(cluster, lambda where=where: cluster.ask("talk", where=where, bytes=_TALK))[1])
    inside, across = seen
    shape = cluster.nodes
    if shape.per_node > 1 and inside > _TALK // 8:
        raise ClusterError(f"ranks of one node sent {inside} bytes over its link, which they should not")
    if shape.nodes > 1 and across < _TALK // 2:
        raise ClusterError(f"ranks of different nodes sent {across} bytes over their links, {_TALK} or more expected")
    return inside, across


def counted(cluster: Cluster, call: Callable[[], T]) -> tuple[T, int]:
    """What a call returns, and the bytes into the busiest node meanwhile."""
    before = cluster.network.received()
    returned = call()
    return returned, max(after - was for was, after in zip(before, cluster.network.received(), strict=True))


def selected(cluster: Cluster, case: Case, only: Sequence[str]) -> list[Contender]:
    """The contenders of a case whose names contain one of ``only``, and those that others are divided by."""
    every = contenders(cluster.nodes, case.heads, is_causal=case.is_causal)
    needed = (FLOOR, RING)
    return [c for c in every if not only or c.name in needed or any(part in c.name for part in only)]


def measure(
    cluster: Cluster, case: Case, rounds: int, running: Sequence[Contender], commit: str, say: Callable[[str], None]
) -> list[Entry]:
    """Measure one case.

    A round goes before that does not count, but for long sequences: there the first one does, too.

    Args:
        cluster: the ranks.
        case: what to compute.
        rounds: how many count.
        running: contenders, the floor first; what is predicted and planned is added.
        commit: of this checkout.
        say: told of what is done.

    Returns:
        An entry for each contender.

    Raises:
        ClusterError: a contender's result is not that of one process.
    """
    warm_up = not case.is_long
    begun = datetime.now(UTC).isoformat(timespec="seconds")
    cluster.network.limit(case.rate)
    # Choosing takes minutes: it is done once more at most.
    chosen, share = undisturbed(
        lambda: cluster.ask("choose", case=asdict(case)), f"{case.name}: choosing", say, attempts=2
    )
    running = [*running, Contender(**chosen["predicted"]), Contender(**chosen["planned"])]
    choosing = {PLANNED: f"{chosen['ran']} plans run, {chosen['seconds']:.0f} s, {share:.0%} stolen"}
    cluster.ask("prepare", case=asdict(case), contenders=[asdict(contender) for contender in running])
    checked: dict[str, tuple[int, float]] = {}
    samples: dict[str, list[Sample]] = {contender.name: [] for contender in running}
    for turn in range(rounds + warm_up):
        say(f"{case.name}: round {turn + (not warm_up)} of {rounds}")
        # Whom one comes after is not always the same.
        for contender in [*running[turn:], *running[:turn]]:
            counts = turn > 0 or not warm_up
            sample, sent = _one_pass(cluster, case, contender, say, attempts=ATTEMPTS if counts else 1)
            if turn == 0:
                checked[contender.name] = sent, _check(cluster, case, contender)
            if counts:
                samples[contender.name].append(sample)
    return [
        _entry(begun, commit, cluster, case, c, samples[c.name], *checked[c.name], choosing.get(c.name, ""), warm_up)
        for c in running
    ]


def _entry(
    begun: str,
    commit: str,
    cluster: Cluster,
    case: Case,
    contender: Contender,
    samples: Sequence[Sample],
    sent: int,
    error: float,
    choosing: str,
    warm_up: bool,
) -> Entry:
    forward, backward, stolen = zip(*samples, strict=True)
    return Entry(
        begun, commit, machine(), cluster.nodes, case, contender, forward, backward, sent, error, choosing, stolen,
        warm_up,
    )  # fmt: skip


def _one_pass(
    cluster: Cluster, case: Case, contender: Contender, say: Callable[[str], None], *, attempts: int
) -> tuple[Sample, int]:
    """One turn, and the bytes that came into the busiest node meanwhile."""
    (answer, sent), stolen = undisturbed(
        lambda: counted(cluster, lambda: cluster.ask("pass", contender=asdict(contender))),
        f"{case.name}: {contender.name}", say, attempts=attempts,
    )  # fmt: skip
    return Sample(answer["forward"], answer["backward"], stolen), sent


def _check(cluster: Cluster, case: Case, contender: Contender) -> float:
    """How far the last result is off."""
    # The result is gathered on one rank, which is no part of any contender.
    cluster.network.limit(None)
    error = cluster.ask("check", contender=asdict(contender))["error"]
    cluster.network.limit(case.rate)
    if error > TOLERANCE:
        raise ClusterError(f"{case.name}: {contender.name} is off by {error:.1e}, at most {TOLERANCE:.0e} is allowed")
    return error


def machine() -> str:
    """Cores and versions, in words."""
    return f"{os.cpu_count()} {platform.machine()} cores, Linux {platform.release()}, torch {torch.__version__}"
