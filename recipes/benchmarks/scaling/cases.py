"""What is planned: heads, clusters, sequences, and the ways that are looked at."""

from collections.abc import Iterator
from dataclasses import dataclass

from wallfacer_dt.planning import Candidate, Cluster, Link, ModelShape, SequenceShape
from wallfacer_dt.planning.candidates import attentions

K = 1024
STRONG_RANKS = (8, 16, 32, 64, 128, 256, 512, 1024)
WEAK_RANKS = (16, 64, 256, 1024)
PER_NODE = 8
HEADS = ((52, 52), (64, 8), (8, 8))
HEAD_DIM = 128
STRONG_TOKENS = 1024 * K
WEAK_TOKENS = 16 * K

INTRA = Link(450e9, 5e-6)
FAST, SLOW = "400 GB/s a node", "12.5 GB/s a node"
_INTER = {FAST: (Link(400e9, 10e-6), 8), SLOW: (Link(12.5e9, 10e-6), 1)}

RING, PUBLISHED, ULYSSES, USP, BEST = "ring", "published", "Ulysses", "USP", "best plan"
NAMES = (RING, PUBLISHED, ULYSSES, USP, BEST)
LARGEST_RING, LARGEST_TEAM = 128, 64


@dataclass(frozen=True, slots=True)
class Case:
    """A point of the curves.

    Attributes:
        ranks: P.
        heads: of queries.
        kv_heads: of keys and values.
        weak: sequences grow with the ranks.
    """

    ranks: int
    heads: int
    kv_heads: int
    weak: bool

    @property
    def tokens(self) -> int:
        """N."""
        return WEAK_TOKENS * self.ranks if self.weak else STRONG_TOKENS

    @property
    def name(self) -> str:
        """Of its heads."""
        return f"{self.heads}/{self.kv_heads} heads"

    @property
    def model(self) -> ModelShape:
        """One layer's attention."""
        return ModelShape(self.heads * HEAD_DIM, self.heads, self.kv_heads, HEAD_DIM)

    @property
    def sequence(self) -> SequenceShape:
        """One causal sequence in bfloat16."""
        return SequenceShape(self.tokens, is_causal=True)

    def cluster(self, inter: str) -> Cluster:
        """Nodes of 8 ranks with FAST or SLOW links between them."""
        link, nics = _INTER[inter]
        return Cluster(self.ranks, PER_NODE, INTRA, link, nics)


def considered(case: Case) -> Iterator[Candidate]:
    """The ways that are predicted: the plain ring, and all others but long rings and large teams, for time's sake."""
    for candidate in attentions(case.model, case.sequence, case.cluster(FAST)):
        is_long = candidate.ring > LARGEST_RING or candidate.team > LARGEST_TEAM
        if not is_long or RING in names_of(candidate):
            yield candidate


def names_of(candidate: Candidate) -> list[str]:
    """What a way is an example of; every one may be the best plan."""
    ulysses, ring, team = candidate.axes
    names = [BEST]
    if ulysses == team == 1:
        names += [RING] * (candidate.rotate == candidate.rotate_forward == "kv")
    elif candidate.schedule == "published" and ulysses == 1:
        names.append(PUBLISHED)
    elif ring == team == 1:
        names.append(ULYSSES)
    elif team == 1:
        names.append(USP)
    return names
