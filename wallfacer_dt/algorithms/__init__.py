"""Context-parallel attention: schedules as data, one loop that executes them, and the volumes they move."""

from wallfacer_dt.algorithms.arithmetic import Arithmetic, Backward, Forward, Operand, Scores
from wallfacer_dt.algorithms.blocks import (
    Answers,
    Captured,
    check_mask,
    known_recording,
    mask_key,
    mask_name,
    recorded_mask,
)
from wallfacer_dt.algorithms.execute import Groups, execute
from wallfacer_dt.algorithms.feed_forward import (
    ACTIVATIONS,
    FeedForward,
    FeedForwardBackward,
    RingOfWeights,
    Units,
    add_product_,
    linear,
)
from wallfacer_dt.algorithms.flows import Content, Flows, Shape, everyone
from wallfacer_dt.algorithms.head_groups import OUT, HeadGroup, Piece, head_groups
from wallfacer_dt.algorithms.heads import HeadExchange, Heads, Kind, split_heads
from wallfacer_dt.algorithms.masks import Mask
from wallfacer_dt.algorithms.metp_volume import feed_forward_volume, metp_attention_volume
from wallfacer_dt.algorithms.recorded import MaskMod, UnrecordedError
from wallfacer_dt.algorithms.replicated import Replicated
from wallfacer_dt.algorithms.rotary import PAIRS, turned
from wallfacer_dt.algorithms.schedule import check_schedule, make_asked_schedule, make_schedule, needed_offsets
from wallfacer_dt.algorithms.segments import Segments, Work
from wallfacer_dt.algorithms.sequences import Sequences, exchanged, hops
from wallfacer_dt.algorithms.steps import Schedule, Side
from wallfacer_dt.algorithms.volume import (
    AttentionVolume,
    Volume,
    attention_volume,
    check_rotate,
    resolve_rotations,
)

__all__ = [
    "ACTIVATIONS",
    "OUT",
    "PAIRS",
    "Answers",
    "Arithmetic",
    "AttentionVolume",
    "Backward",
    "Captured",
    "Content",
    "FeedForward",
    "FeedForwardBackward",
    "Flows",
    "Forward",
    "Groups",
    "HeadExchange",
    "HeadGroup",
    "Heads",
    "Kind",
    "Mask",
    "MaskMod",
    "Operand",
    "Piece",
    "Replicated",
    "RingOfWeights",
    "Schedule",
    "Scores",
    "Segments",
    "Sequences",
    "Shape",
    "Side",
    "Units",
    "UnrecordedError",
    "Volume",
    "Work",
    "add_product_",
    "attention_volume",
    "check_mask",
    "check_rotate",
    "check_schedule",
    "everyone",
    "exchanged",
    "execute",
    "feed_forward_volume",
    "head_groups",
    "hops",
    "known_recording",
    "linear",
    "make_asked_schedule",
    "make_schedule",
    "mask_key",
    "mask_name",
    "metp_attention_volume",
    "needed_offsets",
    "recorded_mask",
    "resolve_rotations",
    "split_heads",
    "turned",
]
