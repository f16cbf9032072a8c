"""Whether a style computes what the module computes that it replaces: both are tried out on one short sequence.

A style can see what a module is called with, not what its forward does. Attention whose window, sinks, scale or soft
cap stand in its code would train on as something else, and no shape would show it.
"""

from wallfacer_dt.equivalence.check import check_equivalence, check_once
from wallfacer_dt.equivalence.trial import (
    CAUSAL_NAMES,
    SCALE_NAMES,
    SOFTCAP_NAMES,
    AttentionStyle,
    EquivalenceError,
    in_mode,
)

__all__ = [
    "CAUSAL_NAMES",
    "SCALE_NAMES",
    "SOFTCAP_NAMES",
    "AttentionStyle",
    "EquivalenceError",
    "check_equivalence",
    "check_once",
    "in_mode",
]
