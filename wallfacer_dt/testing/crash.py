"""What a rank says that dies of a signal.

A corrupted heap is noticed by whichever thread allocates next, most often one of gloo's, which has no Python stack.
``torch._C._set_print_stack_traces_on_fatal_signal`` is private (run on torch 2.13.0).
"""

import faulthandler
import signal
from contextlib import suppress

import torch


def say_where_it_crashes() -> None:
    """Of a fatal signal, print the native stacks of all threads and then Python's on stderr, before dying of it."""
    interrupted = signal.getsignal(signal.SIGINT)
    with suppress(RuntimeError, OSError, AttributeError):  # where there is no stderr
        faulthandler.enable()
    print_native_stacks = getattr(torch._C, "_set_print_stack_traces_on_fatal_signal", None)
    if print_native_stacks is not None:
        print_native_stacks(True)  # and then asks the handler there was, faulthandler's
        signal.signal(signal.SIGINT, interrupted)  # an interrupt is no crash
