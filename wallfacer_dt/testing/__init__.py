"""For tests, one's own and users': how to compare, what was really sent, an independent oracle, pools of ranks."""

from wallfacer_dt.comparison import IncomparableError, worst_error
from wallfacer_dt.testing.oracle import AttentionResult, attention_oracle
from wallfacer_dt.testing.pool import RankPool
from wallfacer_dt.testing.traffic import Received, Traffic, count_collectives

__all__ = [
    "AttentionResult",
    "IncomparableError",
    "RankPool",
    "Received",
    "Traffic",
    "attention_oracle",
    "count_collectives",
    "worst_error",
]
