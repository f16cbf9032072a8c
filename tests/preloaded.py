"""What ranks of pools import sooner or later, the package among it: imported once, by a test run's fork server."""

import gc

import hypothesis  # noqa: F401
import pytest  # noqa: F401
import torch._dynamo.guards
import torch._functorch.aot_autograd
import torch.distributed.tensor.parallel

import tests.strategies  # noqa: F401
import wallfacer_dt.testing  # noqa: F401

# For a number in its log, torch writes 32 MiB after every compilation.
torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0
# Collections of ranks need not look at it, which would copy the pages, too.
gc.freeze()
