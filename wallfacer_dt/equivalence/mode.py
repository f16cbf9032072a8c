"""Trying a module in another mode than it is in."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def in_mode(module: nn.Module, *, training: bool) -> Iterator[None]:
    """Put a module and all in it into training or evaluation mode, and afterwards each back into its own.

    Args:
        module: the module.
        training: which.

    Yields:
        Nothing.
    """
    was = {child: child.training for child in module.modules()}
    module.train(training)
    try:
        yield
    finally:
        for child, its in was.items():
            child.training = its
