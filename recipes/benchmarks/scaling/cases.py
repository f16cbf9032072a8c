"""What is planned: heads, clusters and sequences."""

from dataclasses import dataclass
from functools import cache

from recipes.benchmarks.report import K
from recipes.benchmarks.scaling.bound import least_received
from recipes.benchmarks.ways import H100, RING, Way, names_of, predicted_ways
from wallfacer_dt import Cluster, Link, ModelShape, SequenceShape
from wallfacer_dt.planning import Candidate

STRONG_RANKS = (8, 16, 32, 64, 128, 256, 512, 1024)
WEAK_RANKS = (16, 64, 256, 1024)
PER_NODE = 8
HEADS = ((52, 52), (64, 8), (8, 8))
FAST, SLOW = "400 GB/s a node", "12.5 GB/s a node"
LINKS = {FAST: (Link(400e9, 10e-6), 8), SLOW: (Link(12.5e9, 10e-6), 1)}
"""Between nodes, with how many interfaces."""
LARGEST_RING, LARGEST_TEAM = 128, 64


@dataclass(frozen=True, slots=True)
class Case:
    """One layer's attention of one causal sequence in bfloat16, which where scaling is weak grows with the ranks."""

    ranks: int
    heads: int
    kv_heads: int
    weak: bool

    @property
    def model(self) -> ModelShape:
        """Heads of 128."""
        return ModelShape(self.heads * 128, self.heads, self.kv_heads, 128)

    @property
    def sequence(self) -> SequenceShape:
        """Of 16K tokens a rank, or of 1024K."""
        return SequenceShape(16 * K * self.ranks if self.weak else 1024 * K, is_causal=True)

    @property
    def node_bound(self) -> float:
        """The least bytes into a node, forward and backward; nothing for one node."""
        return least_received(self.model, self.sequence, self.ranks // PER_NODE) if self.ranks > PER_NODE else 0.0

    def cluster(self, link: str) -> Cluster:
        """Nodes of 8 ranks with such links between them."""
        return Cluster(self.ranks, PER_NODE, Link(450e9, 5e-6), *LINKS[link], kernels=H100)


@cache
def predicted(case: Case, link: str) -> list[Way]:
    """All ways considered, the fastest first."""
    return predicted_ways(case.model, case.sequence, case.cluster(link), is_considered)


def is_considered(way: Candidate) -> bool:
    """The plain ring is, and all others but long rings and large teams, for time's sake."""
    return (way.ring <= LARGEST_RING and way.team <= LARGEST_TEAM) or RING in names_of(way)
