"""Models of torchtitan, unedited, with their attention on a mesh. Needs the extra ``torchtitan``.

Run on torchtitan 0.3.0. See docs/torchtitan.md.
"""

from wallfacer_dt.integrations.torchtitan.documents import Documents
from wallfacer_dt.integrations.torchtitan.model import context_parallel
from wallfacer_dt.integrations.torchtitan.plan import context_plan, feed_forward_plan
from wallfacer_dt.integrations.torchtitan.style import InnerAttentionParallel

__all__ = ["Documents", "InnerAttentionParallel", "context_parallel", "context_plan", "feed_forward_plan"]
