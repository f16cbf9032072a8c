"""What a rank says that dies of a signal.

A corrupted heap is noticed by whichever thread allocates next, most often one of gloo's, which has no Python stack.
Native stacks need memory: where the allocator died holding a lock, the rank hangs after Python's stacks, until whoever
waits for it gives up.

``torch._C._set_print_stack_traces_on_fatal_signal`` is private (run on torch 2.13.0).
"""

import faulthandler
import signal
from contextlib import suppress

import torch


def say_where_it_crashes() -> None:
    """Before dying of a signal, print Python's stacks on stderr, and then the native ones of all threads."""
    interrupted = signal.getsignal(signal.SIGINT)
    print_native_stacks = getattr(torch._C, "_set_print_stack_traces_on_fatal_signal", None)
    if print_native_stacks is not None:
        print_native_stacks(True)
        signal.signal(signal.SIGINT, interrupted)  # an interrupt is no crash
    # Python's handler allocates nothing, so it is asked first.
    with suppress(RuntimeError, OSError, AttributeError):  # where there is no stderr
        faulthandler.enable()
