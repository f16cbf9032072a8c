"""Context-parallel attention: schedules as data, one loop that executes them, and the volumes they move."""

from wallfacer_dt.algorithms.arithmetic import Backward, Forward, Operand, Scores
from wallfacer_dt.algorithms.blocks import MaskMod, known_blocks, mask_key, mask_name
from wallfacer_dt.algorithms.execute import Groups, execute
from wallfacer_dt.algorithms.heads import HeadExchange, Heads, Kind, split_heads
from wallfacer_dt.algorithms.masks import Mask
from wallfacer_dt.algorithms.replicated import Replicated
from wallfacer_dt.algorithms.schedule import make_schedule
from wallfacer_dt.algorithms.sequences import Sequences, hops
from wallfacer_dt.algorithms.steps import Schedule, Side
from wallfacer_dt.algorithms.tiles import Tile
from wallfacer_dt.algorithms.volume import (
    AttentionVolume,
    Volume,
    attention_volume,
    check_rotate,
    resolve_rotate,
)

__all__ = [
    "AttentionVolume",
    "Backward",
    "Forward",
    "Groups",
    "HeadExchange",
    "Heads",
    "Kind",
    "Mask",
    "MaskMod",
    "Operand",
    "Replicated",
    "Schedule",
    "Scores",
    "Sequences",
    "Side",
    "Tile",
    "Volume",
    "attention_volume",
    "check_rotate",
    "execute",
    "hops",
    "known_blocks",
    "make_schedule",
    "mask_key",
    "mask_name",
    "resolve_rotate",
    "split_heads",
]
