"""Models of Hugging Face transformers, unedited, with their attention on a mesh. Needs the extra ``transformers``.

Run on transformers 5.19.0 to 5.24.0. See docs/transformers.md.
"""

import transformers

from wallfacer_dt.versions import check_version

check_version("transformers", transformers.__version__)  # others may not have what is imported next

from wallfacer_dt.integrations.transformers.inputs import shard_inputs  # noqa: E402
from wallfacer_dt.integrations.transformers.model import ContextParallel, context_parallel  # noqa: E402

__all__ = ["ContextParallel", "context_parallel", "shard_inputs"]
