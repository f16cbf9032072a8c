"""Diffusion transformers of Hugging Face diffusers, unedited, on a mesh. Needs the extra ``diffusers``.

Run on diffusers 0.41.0 to 0.42.1. See docs/diffusers.md.
"""

from wallfacer_dt.integrations.diffusers.inputs import share_inputs
from wallfacer_dt.integrations.diffusers.model import ContextParallel, context_parallel

__all__ = ["ContextParallel", "context_parallel", "share_inputs"]
