"""WallFacer's clusters (table 2) as the planner takes them, and what it predicts for a model on them.

The paper gives GPUs, nodes and Ethernet's rate. The rest is assumed, in round numbers, before anything was predicted;
nothing is fitted to the paper's results.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from recipes.benchmarks.papers.models import GIB, Model
from wallfacer_dt.planning import Candidate, Cluster, Link, ModelShape, Prediction, SequenceShape
from wallfacer_dt.planning.candidates import attentions
from wallfacer_dt.planning.gpus import GPUS
from wallfacer_dt.planning.predict import AttentionCost, attention_cost, predict
from wallfacer_dt.planning.stack import stack_memory

A100_KERNELS, H100_KERNELS = (GPUS[name].kernels(head_dim=128) for name in ("a100", "h100"))
ETHERNET = Link(12.5e9, 30e-6)
"""100 Gbit/s into a node (table 2)."""
INFINIBAND = GPUS["h100"].cluster(16).inter
"""Eight adapters a node (section 4.1), assumed to have 400 Gbit/s each."""
SLOW_INFINIBAND = Link(200e9, 10e-6)
"""The same with 200 Gbit/s each."""

CHECKPOINT = "attention"
"""Section 3.6: a layer is computed again but for its attention."""


def a100(nodes: int, per_node: int) -> Cluster:
    """Nodes of A100s with 40 GB, NVLink within them and 100 Gbit/s Ethernet between them."""
    cluster = GPUS["a100"].cluster(nodes * per_node, per_node)
    return replace(cluster, inter=ETHERNET, nics=1, memory=40 * GIB, kernels=A100_KERNELS)


def h100(gpus: int, inter: Link = INFINIBAND, nics: int = 8) -> Cluster:
    """H100s with 80 GB, eight to a node, NVLink within them and InfiniBand between them."""
    return replace(GPUS["h100"].cluster(gpus), inter=inter, nics=nics, memory=80 * GIB, kernels=H100_KERNELS)


@dataclass(frozen=True, slots=True)
class Setting:
    """A bar of a figure, or a group of them.

    Attributes:
        name: of the cluster.
        model: whose step.
        tokens: N.
        cluster: where.
        is_causal: a GPT's attention is, a DiT's is not.
    """

    name: str
    model: Model
    tokens: int
    cluster: Cluster
    is_causal: bool

    @property
    def shape(self) -> ModelShape:
        """The model as the planner takes it."""
        it = self.model
        return ModelShape(it.hidden, it.heads, ffn=it.ffn, gated=it.matrices == 3, layers=it.layers, vocab=it.vocab)

    @property
    def sequence(self) -> SequenceShape:
        """Batch 1 in bfloat16."""
        return SequenceShape(self.tokens, is_causal=self.is_causal)


@dataclass(frozen=True, slots=True)
class Way:
    """How a setting's ranks share a sequence, and what is predicted of it.

    Attributes:
        candidate: it, with its layers.
        attention: seconds of one layer's attention, forward and backward.
        prediction: of the step.
        tokens: N.
        fits: into memory.
    """

    candidate: Candidate
    attention: float
    prediction: Prediction
    tokens: int
    fits: bool

    @property
    def throughput(self) -> float:
        """Tokens per second, of all ranks together."""
        return self.tokens / self.prediction.seconds

    @property
    def exposed(self) -> float:
        """Share of the step in which ranks wait."""
        return self.prediction.exposed / self.prediction.seconds

    def gain(self, ring: "Way", *, attention: bool = False) -> float:
        """How much more tokens per second than with a ring: 0.5 is half as much again."""
        if attention:
            return ring.attention / self.attention - 1
        return self.throughput / ring.throughput - 1


@dataclass(frozen=True, slots=True)
class Ways:
    """What is predicted of a setting.

    Attributes:
        ring: Ring Attention.
        walls: WallFacer as published by C, on the better of its placements; None where C^2 does not divide P.
        best: the fastest of all that fits.
        considered: how many there are.
    """

    ring: Way
    walls: dict[int, Way | None]
    best: Way
    considered: int

    @property
    def best_team(self) -> int:
        """The better C."""
        return min((way.prediction.seconds, team) for team, way in self.walls.items() if way)[1]

    @property
    def best_wall(self) -> Way:
        """WallFacer as published with it."""
        way = self.walls[self.best_team]
        assert way is not None
        return way


@cache
def predicted(setting: Setting, teams: tuple[int, ...] = (2, 4)) -> Ways:
    """Predict a setting.

    Args:
        setting: what and where.
        teams: C of the published schedule.

    Returns:
        What is predicted.
    """
    every = [_predicted(setting, one) for one in attentions(setting.shape, setting.sequence, setting.cluster)]
    every.sort(key=lambda one: one.prediction.seconds)

    def first(chosen: Iterable[_Predicted]) -> Way | None:
        return next((_way(setting, one) for one in chosen), None)

    plain = {"axes": (1, setting.cluster.ranks, 1), "rotate": "kv", "rotate_forward": "kv"}
    ring = first(one for one in every if all(getattr(one.candidate, name) == value for name, value in plain.items()))
    walls = {
        team: first(
            one for one in every if one.candidate.schedule == "published" and one.candidate.axes[::2] == (1, team)
        )
        for team in teams
    }
    best = next(way for way in (_way(setting, one) for one in every) if way.fits)
    assert ring is not None
    return Ways(ring, walls, best, len(every))


class _Predicted(NamedTuple):
    """What is quick to say of a candidate, with its layers: all but its memory."""

    candidate: Candidate
    cost: AttentionCost
    prediction: Prediction


def _predicted(setting: Setting, attention: Candidate) -> _Predicted:
    candidate = replace(attention, checkpoint=CHECKPOINT)
    cost = attention_cost(attention, setting.shape, setting.sequence, setting.cluster)
    return _Predicted(candidate, cost, predict(candidate, setting.shape, setting.sequence, setting.cluster, cost))


def _way(setting: Setting, one: _Predicted) -> Way:
    peak = stack_memory(one.candidate, setting.shape, setting.sequence).peak
    fits = setting.cluster.memory is None or peak <= setting.cluster.memory
    seconds = one.cost.forward.seconds + one.cost.backward.seconds
    return Way(one.candidate, seconds, replace(one.prediction, memory=peak), setting.tokens, fits)
