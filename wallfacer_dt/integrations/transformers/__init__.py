"""Models of Hugging Face transformers, unedited, with their attention on a mesh. Needs the extra ``transformers``.

Run on transformers 5.19.0 to 5.24.0. See docs/transformers.md.
"""

from wallfacer_dt.integrations.transformers.inputs import shard_inputs
from wallfacer_dt.integrations.transformers.model import ContextParallel, context_parallel

__all__ = ["ContextParallel", "context_parallel", "shard_inputs"]
