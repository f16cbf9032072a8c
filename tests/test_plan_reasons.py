"""What is said of plans that compute longer."""

from dataclasses import replace

import pytest

from tests.divided import KERNELS, MODEL, SEQUENCE
from wallfacer_dt import Cluster, Link
from wallfacer_dt.planning import Candidate
from wallfacer_dt.planning.division import Division
from wallfacer_dt.planning.layer import Layer
from wallfacer_dt.planning.reasons import longer
from wallfacer_dt.planning.step import beside_attention, by_kind

FIRST = Division(Candidate(2), shards=4)
ALL_SHARE = Division(Candidate(8))
METP = replace(ALL_SHARE, context=Candidate(8, feed_forward="metp"))
BY_TENSOR = Division(Candidate(1), tensor=8, microbatch=9)
FULL, SELECTIVE = (replace(FIRST, context=Candidate(2, checkpoint=kind)) for kind in ("full", "attention"))
IN_TWO = {"shards": 2, "pipeline": 2, "microbatches": 2}
STAGES = Division(Candidate(1), shards=2, pipeline=4, microbatches=9)
PROJECTED = replace(ALL_SHARE, context=Candidate(8, projections="metp"))
REPLICAS = replace(FIRST, replicas=2, shards=2)
TILES = "smaller tiles, more merging, or idle heads"


def layer_of(division: Division, merge: float) -> Layer:
    kernels = replace(KERNELS, merge=merge)
    sequence = replace(SEQUENCE, batch=division.microbatch)
    return Layer(division, MODEL, sequence, Cluster(8, 8, Link(1e9), Link(1e9), kernels=kernels))


@pytest.mark.parametrize(
    ("division", "first", "merge", "more", "why"),
    [
        (REPLICAS, FIRST, 1e10, 0.0, "more weights to update"),
        (REPLICAS, FIRST, 1e10, 1.0, TILES),
        (REPLICAS, FIRST, 1e10, 1e-4, f"{TILES} and more weights to update"),
        (replace(FIRST, microbatches=2), FIRST, 1e6, 0.0, "norms and activations and FSDP's copies"),
        (replace(FIRST, microbatches=2), FIRST, 1e30, 0.0, "matrix products"),
        (FULL, FIRST, 1e10, 0.0, "layers twice"),
        (FULL, SELECTIVE, 1e10, 1.0, "layers twice"),
        (SELECTIVE, FULL, 1e10, 1.0, TILES),
        (SELECTIVE, FIRST, 1e10, 0.0, "layers but for attention twice"),
        (SELECTIVE, FIRST, 1e10, 1.0, TILES),
        (METP, ALL_SHARE, 1e6, 0.0, "METP's sums"),
        (METP, ALL_SHARE, 1e30, 0.0, "METP's units once more"),
        (ALL_SHARE, METP, 1e8, 0.0, "FSDP's copies"),
        (replace(METP, microbatches=2), replace(METP, microbatch=2), 1e6, 0.0, "METP's sums"),
        (replace(FIRST, **IN_TWO), FIRST, 1e30, 0.0, "unlike stages"),
        (
            replace(FULL, **IN_TWO),
            SELECTIVE,
            1e30,
            0.0,
            "unlike stages",
        ),
        (STAGES, replace(STAGES, microbatches=1, microbatch=9), 1e6, 0.0, "sums of microbatches' gradients"),
        (STAGES, BY_TENSOR, 1e6, 0.0, "unlike stages and sums of microbatches' gradients"),
        (PROJECTED, ALL_SHARE, 1e30, 1.0, "METP's projections once more"),
        (replace(BY_TENSOR, microbatch=1, microbatches=9), BY_TENSOR, 1e6, 0.0, "sums of microbatches' gradients"),
    ],
)
def test_what_takes_longer_is_named(division: Division, first: Division, merge: float, more: float, why: str) -> None:
    """By what is beside attention, and so many seconds more of that."""
    mine, other = (layer_of(one, merge) for one in (division, first))
    seconds = [sum(beside_attention(layer).values()) for layer in (mine, other)]
    computed, others = by_kind(mine, seconds[0] + 1.0 + more), by_kind(other, seconds[1] + 1.0)
    assert longer(division, first, computed, others) == why
