"""Predictions of all ways of a case, and the fastest by name."""

from dataclasses import dataclass, replace
from functools import cache

from recipes.benchmarks.scaling.cases import FAST, SLOW, Case, considered, names_of
from wallfacer_dt.planning import Candidate
from wallfacer_dt.planning.candidates import attentions
from wallfacer_dt.planning.predict import AttentionCost, attention_cost


@dataclass(frozen=True, slots=True)
class Way:
    """One way, and what is predicted of a call of attention, forward and backward.

    Attributes:
        candidate: it.
        cost: predicted.
    """

    candidate: Candidate
    cost: AttentionCost

    @property
    def seconds(self) -> float:
        """It takes."""
        return self.cost.forward.seconds + self.cost.backward.seconds

    @property
    def exposed(self) -> float:
        """Seconds of them in which a rank waits."""
        return self.cost.forward.exposed + self.cost.backward.exposed

    @property
    def share(self) -> float:
        """That share of them."""
        return self.exposed / self.seconds

    @property
    def node_bytes(self) -> int:
        """Into the node that receives most."""
        return sum(self.cost.node_bytes)


@dataclass(frozen=True, slots=True)
class Point:
    """A case on both clusters.

    Attributes:
        case: it.
        ways: by link between nodes and name; the fastest of its kind, and nothing where there is none.
        least_team: the least bytes a rank receives in the forward without Ulysses, of all ways considered.
        least: likewise of all.
        least_node: the least bytes into a node, forward and backward.
        considered: how many ways.
        every: how many there are.
    """

    case: Case
    ways: dict[tuple[str, str], Way]
    least_team: int
    least: int
    least_node: int
    considered: int
    every: int


@cache
def predicted(case: Case) -> Point:
    """Predict all ways of a case on both clusters."""
    ways: dict[tuple[str, str], Way] = {}
    looked_at = list(considered(case))
    received: dict[Candidate, int] = {}
    least_node: list[int] = []
    for candidate in looked_at:
        for link in (FAST, SLOW):
            cost = attention_cost(candidate, case.model, case.sequence, case.cluster(link))
            way = Way(candidate, _without_bars(cost))
            received[candidate] = cost.rank_bytes[0]
            least_node.append(way.node_bytes)
            for name in names_of(candidate):
                if (link, name) not in ways or way.seconds < ways[link, name].seconds:
                    ways[link, name] = way
    least_team = min(nbytes for candidate, nbytes in received.items() if candidate.ulysses == 1)
    every = sum(1 for _ in attentions(case.model, case.sequence, case.cluster(FAST)))
    return Point(case, ways, least_team, min(received.values()), min(least_node), len(looked_at), every)


def _without_bars(cost: AttentionCost) -> AttentionCost:
    """Nor events: thousands of them would be kept."""
    forward, backward = (replace(way, line=replace(way.line, bars=[]), events=()) for way in cost.ways)
    return replace(cost, ways=(forward, backward))
