"""What the planner predicts of every way to share a sequence, and what people call a way."""

from collections.abc import Callable
from dataclasses import dataclass

from wallfacer_dt import Cluster, Kernels, ModelShape, SequenceShape
from wallfacer_dt.planning import Candidate
from wallfacer_dt.planning.candidates import attentions
from wallfacer_dt.planning.predict import attention_cost

RING, PUBLISHED, ULYSSES, USP, BEST = "ring", "published", "Ulysses", "USP", "best plan"
NAMES = (RING, PUBLISHED, ULYSSES, USP, BEST)
# Round: torch's flash has 0.7 and 0.8 of that, FlashAttention-4 1.4 and 1.5.
H100 = Kernels(500e12, 400e12, 600e12, merge=2e12, takes_segments=False)


@dataclass(frozen=True, slots=True)
class Way:
    """One call of attention, forward and backward: seconds, and the bytes into the rank and node that receive most."""

    candidate: Candidate
    seconds: float
    exposed: float
    rank_bytes: tuple[int, ...]
    node_bytes: int


def predicted_ways(
    model: ModelShape, sequence: SequenceShape, cluster: Cluster, only: Callable[[Candidate], bool] = lambda _: True
) -> list[Way]:
    """All ways, the fastest first."""
    ways = []
    for it in filter(only, attentions(model, sequence, cluster)):
        cost = attention_cost(it, model, sequence, cluster)
        ways.append(Way(it, cost.seconds, cost.exposed, cost.rank_bytes, sum(cost.node_bytes)))
    return sorted(ways, key=lambda way: way.seconds)


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
