"""METP's feed-forward as a rank's events: the schedule of its ring of weights, with what its steps cost.

The ring goes by rank, so that between two nodes it has one link (METP, section 3.2). Hidden units that do not divide
count as the longest shard wherever they are sent, and as they are where they are computed.
"""

from collections.abc import Iterator
from functools import lru_cache

from wallfacer_dt.algorithms.feed_forward import RingOfWeights
from wallfacer_dt.algorithms.schedule import make_schedule
from wallfacer_dt.algorithms.steps import Attend, Schedule, Start, Wait
from wallfacer_dt.kernels.merge import accumulation_dtype
from wallfacer_dt.layout import shard_sizes
from wallfacer_dt.mesh import Coordinate
from wallfacer_dt.planning.attention import HOP
from wallfacer_dt.planning.cluster import Cluster
from wallfacer_dt.planning.groups import Group
from wallfacer_dt.planning.model import ModelShape, SequenceShape
from wallfacer_dt.planning.timeline import Begin, Compute, End, Event


def feed_forward_events(
    axes: tuple[int, ...], tokens: int, model: ModelShape, sequence: SequenceShape, cluster: Cluster, *, backward: bool
) -> Iterator[Event]:
    """One call of METP's feed-forward on a rank; without a second one there is nothing to send.

    Args:
        axes: sizes of the axes that the weights are sharded over.
        tokens: of the rank, over the batch.
        model: whose feed-forward.
        sequence: whose dtype weights have; gradients are carried in the accumulation dtype until their last hop.
        cluster: where.
        backward: those of the backward, which computes hidden units anew: all projections but the last.

    Yields:
        The events in program order.
    """
    units = shard_sizes(model.ffn, axes)
    element = model.ffn_weights // model.ffn
    per_unit = (
        2 * tokens * element * (2 + (2 / 3 if model.gated else 1 / 2) if backward else 1) / cluster.kernels.linear
    )
    # Of each projection a product, or three and what is added up; and activations.
    launched = (8 if backward else 2) * (3 if model.gated else 2)
    sent = max(units) * element
    group = Group(len(units), 1, cluster.ranks_per_node)
    weights = group.send(sent * sequence.dtype.itemsize)
    carried = group.send(sent * accumulation_dtype(sequence.dtype).itemsize)
    for step in _schedule(units, backward).steps:
        match step:
            case Start(transfer):
                wire = carried if transfer.kind == "carry" else weights
                yield Begin(f"feed-forward {transfer}", wire, launches=HOP)
            case Wait(transfer):
                yield End(f"feed-forward {transfer}")
            case Attend(_, _, block, work):
                area = sum(tile.area for segments in work for tile in segments.tiles)
                # A token of the schedule is all tokens.
                yield Compute(area / _TOKENS * per_unit, f"feed-forward [{block}]", launched)


_TOKENS = 2  # enough to be split where something is kept for the end


@lru_cache(maxsize=16)
def _schedule(units: tuple[int, ...], backward: bool) -> Schedule:
    place = Coordinate(len(units), 1, len(units) - 1, 0)
    return make_schedule(place, RingOfWeights(_TOKENS, units), schedule="2d", resident="q", backward=backward)
