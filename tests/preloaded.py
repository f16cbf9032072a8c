"""What every rank of a pool imports sooner or later, imported once: by the fork server of a run that has ranks."""

import gc

import hypothesis  # noqa: F401
import pytest  # noqa: F401
import torch._dynamo.guards
import torch._functorch.aot_autograd

import tests.strategies  # noqa: F401

# For a number in its log, torch writes 32 MiB after every compilation.
torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0
# Collections of ranks need not look at it, which would copy the pages, too.
gc.freeze()
