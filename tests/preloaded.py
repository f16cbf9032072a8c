"""What ranks of pools import sooner or later, the package among it: imported once, by a test run's fork server."""

import gc
import importlib.util

import hypothesis  # noqa: F401
import pytest  # noqa: F401
import torch._dynamo.guards
import torch._functorch.aot_autograd
import torch.distributed.tensor.parallel

import tests.strategies  # noqa: F401
import wallfacer_dt.testing  # noqa: F401

# Where torch is built for CUDA, some of this asks for its devices, which forks could not use then.
if torch.version.cuda is None:
    # For a first compilation.
    import torch._inductor.compile_fx
    import torch.distributed.tensor.experimental
    import torch.export._trace

    torch._dynamo.list_backends()
    # For models of other packages, digits and pictures, of those that are installed.
    for name in "transformers.trainer", "diffusers.models.modeling_utils", "sklearn.datasets", "matplotlib.figure":
        if importlib.util.find_spec(name.partition(".")[0]):
            importlib.import_module(name)

# For a number in its log, torch writes 32 MiB after every compilation.
torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0
# Collections of ranks need not look at it, which would copy the pages, too; and of their many were a tenth of what a
# compilation takes.
gc.freeze()
gc.set_threshold(20_000, 10, 10)
