"""WallFacer's clusters and models (tables 2 and 3) as the planner takes them, and what it predicts on them.

The paper gives GPUs, nodes and Ethernet's rate. The rest is assumed, in round numbers, before anything was predicted;
nothing is fitted to the paper's results.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from recipes.benchmarks.report import GIB, K
from recipes.benchmarks.ways import H100, PUBLISHED, RING, names_of, predicted_ways
from wallfacer_dt import Cluster, Kernels, Link, ModelShape, SequenceShape
from wallfacer_dt.planning import Candidate, Prediction
from wallfacer_dt.planning.predict import attention_cost, predict
from wallfacer_dt.planning.stack import stack_memory

# 3B has 12 heads in the paper, which do not divide 4096; with 16 nothing that is sent differs but lse.
GPT_3B = ModelShape(4096, 16, ffn=4 * 4096, gated=False, layers=16, vocab=50257)
GPT_7B = ModelShape(4096, 32, ffn=4 * 4096, gated=False, layers=32, vocab=50257)
DIT_1B = ModelShape(1536, 24, ffn=4 * 1536, gated=False, layers=24)
NAMES = {GPT_3B: "GPT 3B", GPT_7B: "GPT 7B", DIT_1B: "DiT 1B"}

ETHERNET = Link(12.5e9, 30e-6)
"""100 Gbit/s into a node (table 2)."""
INFINIBAND = Link(400e9, 10e-6)
"""Eight adapters a node (section 4.1), assumed to have 400 Gbit/s each."""
SLOW_INFINIBAND = Link(200e9, 10e-6)
"""The same with 200 Gbit/s each."""
NVLINK_OF_A100, NVLINK_OF_H100 = Link(300e9, 5e-6), Link(450e9, 5e-6)
# In round numbers; of heads of 64 it is 150e12.
A100 = Kernels(170e12, 140e12, 200e12, merge=1e12, launch=0.0, takes_segments=False)
PRINTED_DIT, PRINTED_GPT = 114.33, 60.71
"""Improvements over the ring in percent: of DiT on 32 A100s at 128K (section 4.3), of GPT on 64 H100s (figure 9)."""
CHECKPOINT = "attention"
"""Section 3.6: a layer is computed again but for its attention."""


def a100(nodes: int, per_node: int) -> Cluster:
    """Nodes of A100s with 40 GB, NVLink within them and 100 Gbit/s Ethernet between them; hosts are not waited for."""
    return Cluster(nodes * per_node, per_node, NVLINK_OF_A100, ETHERNET, memory=40 * GIB, kernels=A100)


def h100(gpus: int, inter: Link = INFINIBAND, nics: int = 8) -> Cluster:
    """H100s with 80 GB, eight to a node, NVLink within them and InfiniBand between them; likewise."""
    return Cluster(gpus, min(gpus, 8), NVLINK_OF_H100, inter, nics, 80 * GIB, replace(H100, launch=0.0))


@dataclass(frozen=True, slots=True)
class Setting:
    """A model's step of batch 1 in bfloat16 on a cluster; GPTs are causal, DiTs are not."""

    model: ModelShape
    tokens: int
    cluster: Cluster

    @property
    def sequence(self) -> SequenceShape:
        """What it takes."""
        return SequenceShape(self.tokens, is_causal=self.model != DIT_1B)


Curves = Mapping[str, Sequence[Setting]]


def throughputs() -> Curves:
    """Figure 7 by model and cluster: 32 GPUs; the text names one length only, the figure itself could not be read."""
    groups = (
        ("A100, 2 x 16", DIT_1B, a100(2, 16)), ("A100, 4 x 8", DIT_1B, a100(4, 8)), ("H100, 4 x 8", GPT_7B, h100(32)),
        ("H100, 4 x 8, 200 Gbit/s", GPT_7B, h100(32, SLOW_INFINIBAND)),
        ("H100, 4 x 8, as one link", GPT_7B, h100(32, nics=1)), ("H100, 4 x 8", GPT_3B, h100(32)),
    )  # fmt: skip
    return {
        f"{name}, {NAMES[model]}": [Setting(model, n * K, cluster) for n in (128, 256, 512)]
        for name, model, cluster in groups
    }


def scalings(*, weak: bool) -> Curves:
    """Figure 9 at 128K tokens, or figure 10, whose sequences grow with the GPUs from 64K (GPT) and 128K (DiT) on 8."""
    curves = {}
    for nodes in (2, 4):
        curves[f"DiT 1B, A100s on {nodes} nodes"] = [
            Setting(DIT_1B, (16 * n if weak else 128) * K, a100(nodes, n // nodes)) for n in (8, 16, 32)
        ]
    adapters = (("400 Gbit/s", INFINIBAND, 8), ("200 Gbit/s", SLOW_INFINIBAND, 8), ("as one link", INFINIBAND, 1))
    for name, link, nics in adapters:
        curves[f"GPT 7B, H100s, {name}"] = [
            Setting(GPT_7B, (8 * n if weak else 128) * K, h100(n, link, nics)) for n in (8, 16, 32, 64)
        ]
    return curves


def printed(setting: Setting) -> float | None:
    """The paper's improvement over the ring in percent where its text has it; of which A100 cluster it has not."""
    if setting.tokens == 128 * K and (setting.model, setting.cluster.ranks) == (DIT_1B, 32):
        return PRINTED_DIT
    return PRINTED_GPT if setting.tokens == 128 * K and setting.cluster.ranks == 64 else None


@dataclass(frozen=True, slots=True)
class Step:
    """How a setting's ranks share a sequence, with its layers, and what is predicted of attention and of the step."""

    candidate: Candidate
    attention: float
    prediction: Prediction
    tokens: int

    @property
    def throughput(self) -> float:
        """Tokens per second, of all ranks together."""
        return self.tokens / self.prediction.seconds

    def gain(self, ring: "Step", *, attention: bool = False) -> float:
        """How much more tokens per second than with a ring: 0.5 is half as much again."""
        return ring.attention / self.attention - 1 if attention else self.throughput / ring.throughput - 1


@dataclass(frozen=True, slots=True)
class Steps:
    """Ring Attention; WallFacer as published by C on the better of its placements, None where C^2 does not divide P;
    the fastest that fits; and of how many.
    """

    ring: Step
    walls: dict[int, Step | None]
    best: Step
    considered: int

    @property
    def best_wall(self) -> Step:
        """WallFacer as published with the better C."""
        return min((wall for wall in self.walls.values() if wall), key=lambda wall: wall.prediction.seconds)


@cache
def predicted(setting: Setting) -> Steps:
    """Predict a setting."""
    every = predicted_ways(setting.model, setting.sequence, setting.cluster)
    ring = next(_step(setting, way.candidate) for way in every if RING in names_of(way.candidate))
    published = [way.candidate for way in every if PUBLISHED in names_of(way.candidate)]
    walls = {team: next((_step(setting, it) for it in published if it.team == team), None) for team in (2, 4)}
    steps = sorted((_step(setting, way.candidate) for way in every), key=lambda step: step.prediction.seconds)
    return Steps(ring, walls, next(step for step in steps if _fits(setting, step.candidate)), len(every))


def _step(setting: Setting, candidate: Candidate) -> Step:
    candidate, sizes = replace(candidate, checkpoint=CHECKPOINT), (setting.model, setting.sequence)
    cost = attention_cost(candidate, *sizes, setting.cluster)
    return Step(candidate, cost.seconds, predict(candidate, *sizes, setting.cluster, cost), setting.tokens)


def _fits(setting: Setting, candidate: Candidate) -> bool:
    """Whether a rank holds it: told by a run on tensors without contents, which takes longer than all predictions."""
    memory = setting.cluster.memory
    return memory is None or stack_memory(candidate, setting.model, setting.sequence).peak <= memory
