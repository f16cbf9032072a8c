"""What torch's compiler is told of functions that it is not to look into, without importing it.

The decorators of ``torch.compiler`` import the compiler: some 350 modules, for whoever only plans or deals out data.

Private APIs of the compiler are called here only; run on torch 2.13.0.
"""

from collections.abc import Callable
from operator import index
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def untraced(reason: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """``torch.compiler.disable``, applied when the function is first called; a compiler that is told so says why."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        outside = torch._disable_dynamo(function)
        outside._torchdynamo_disable = True  # pyrefly: ignore[missing-attribute]
        outside._torchdynamo_disable_msg = reason  # pyrefly: ignore[missing-attribute]
        return outside

    return decorate


def constant(function: Callable[P, R]) -> Callable[P, R]:
    """``torch.compiler.assume_constant_result``: called while a compiler traces, it answers for the whole graph."""
    function._dynamo_marked_constant = True  # pyrefly: ignore[missing-attribute]
    return function


def sizes(x: Tensor) -> tuple[int, ...]:
    """A shape for a message: what a compiler takes for a symbol is a number then, since a symbol has no text."""
    return tuple(map(index, x.shape))
