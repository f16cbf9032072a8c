"""Models of torchtitan, unedited, with their attention on a mesh. Needs the extra ``torchtitan``.

Run on torchtitan 0.3.0, for which it has :func:`context_parallel`. Where its main branch is installed, in which context
parallelism is a class that a model's config names, it has :func:`context_attention` instead. See docs/torchtitan.md.
"""

from wallfacer_dt.integrations.torchtitan.documents import Documents
from wallfacer_dt.integrations.torchtitan.main_branch import is_installed

if is_installed():
    from wallfacer_dt.integrations.torchtitan.backend import context_attention

    __all__ = ["Documents", "context_attention"]
else:
    from wallfacer_dt.integrations.torchtitan.model import context_parallel
    from wallfacer_dt.integrations.torchtitan.plan import context_plan, feed_forward_plan
    from wallfacer_dt.integrations.torchtitan.style import InnerAttentionParallel

    __all__ = ["Documents", "InnerAttentionParallel", "context_parallel", "context_plan", "feed_forward_plan"]
