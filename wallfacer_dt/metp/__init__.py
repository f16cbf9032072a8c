"""METP, memory-efficient tensor parallelism: ranks that share a sequence share weights, too, and nothing is gathered.

Liang et al., "Memory-efficient tensor parallelism for long-sequence Transformer training".
"""

from wallfacer_dt.metp.attention import BODIES as _ATTENTION
from wallfacer_dt.metp.attention_style import METPAttentionParallel
from wallfacer_dt.metp.feed_forward import BODIES as _FEED_FORWARD
from wallfacer_dt.metp.feed_forward_style import METPParallel

BODIES = {**_FEED_FORWARD, **_ATTENTION}
"""What METP's operators do on one rank."""

__all__ = ["BODIES", "METPAttentionParallel", "METPParallel"]
