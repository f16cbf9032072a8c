"""Context-parallel attention: schedules as data, one loop that executes them, and the volumes they move."""

from wallfacer_dt.algorithms.arithmetic import Backward, Forward, Operand
from wallfacer_dt.algorithms.execute import Groups, execute
from wallfacer_dt.algorithms.schedule import Schedule, make_schedule
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
    "Operand",
    "Schedule",
    "Volume",
    "attention_volume",
    "check_rotate",
    "execute",
    "make_schedule",
    "resolve_rotate",
]
