"""Diffusion transformers of Hugging Face diffusers, unedited, on a mesh. Needs the extra ``diffusers``.

Run on diffusers 0.41.0 to 0.42.1. See docs/diffusers.md.
"""

import diffusers

from wallfacer_dt.versions import check_version

check_version("diffusers", diffusers.__version__)  # others may not have what is imported next

from wallfacer_dt.integrations.diffusers.inputs import share_inputs  # noqa: E402
from wallfacer_dt.integrations.diffusers.model import ContextParallel, context_parallel  # noqa: E402

__all__ = ["ContextParallel", "context_parallel", "share_inputs"]
