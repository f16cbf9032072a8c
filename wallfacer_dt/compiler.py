"""What torch's compiler is told of functions that it is not to look into, without importing it.

The decorators of ``torch.compiler`` import the compiler: some 350 modules, for whoever only plans or deals out data.

Note [Options as text]
An operator takes its options as one text, and beside it what a compiler may take for a symbol: each further argument of
a schema costs time at every call (torch fills in defaults in time that grows as the square of their number), and must
be told again wherever the schema is. The same options are the same text, so that it can be part of a cache's key.

Note [What a compiled graph bakes in]
Generated code holds sizes and strides that this package states, and torch caches code by the graph's text, on a disk
that ranks may share. So a digest of the package's sources is an argument of the operators, as is the rank's place.

Private APIs of the compiler are called here only; run on torch 2.11.0, 2.13.0, 2.14.1 and 2.15.0.
"""

import ast
import hashlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import index
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._C._dynamo import eval_frame


def _digest_of_sources() -> str:
    sources = sorted(Path(__file__).parent.rglob("*.py"))
    if not sources:
        raise ImportError("wallfacer_dt must be installed with its sources, which are part of torch's cache keys")
    digest = hashlib.sha256()
    for path in sources:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


SOURCES = _digest_of_sources()
"""Digest of the package's sources; see Note [What a compiled graph bakes in]. Ranks compare it at every call."""

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


def opaque(body: Callable[P, R]) -> Callable[P, R]:
    """An operator's body, into which, and whatever it calls, a compiler that runs it is not to look.

    :func:`untraced` does so too, at every call; this marks the code, and so that of all closures of it.
    """
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(body.__code__, eval_frame._FrameExecStrategy(skip, skip))
    return body


def constant(function: Callable[P, R]) -> Callable[P, R]:
    """``torch.compiler.assume_constant_result``: called while a compiler traces, it answers for the whole graph."""
    function._dynamo_marked_constant = True  # pyrefly: ignore[missing-attribute]
    return function


@constant
def is_exporting() -> bool:
    """``torch.compiler.is_exporting``, of which torch 2.11's compiler says yes in any graph."""
    return torch.compiler.is_exporting()


def as_text(options: Sequence[Any]) -> str:
    """Options as one text: integers, texts, None, and sequences of these; see Note [Options as text].

    What a compiler took for a symbol it takes for a constant then.
    """
    return _as_text(tuple(map(_plain, options)))


def _plain(x: Any) -> Any:
    if x is None or isinstance(x, bool | str):  # index() makes an integer of a bool
        return x
    return tuple(map(_plain, x)) if isinstance(x, tuple | list) else index(x)


@constant
def _as_text(options: tuple[Any, ...]) -> str:
    return repr(_exact(options))  # by single quotes, which Inductor need not escape where it writes C++


def _exact(x: Any) -> Any:
    """Texts of an enum as texts."""
    if isinstance(x, str):
        return str.__str__(x)
    return tuple(map(_exact, x)) if isinstance(x, tuple) else x


@lru_cache(1024)
def from_text(text: str) -> tuple[Any, ...]:
    """What :func:`as_text` was given."""
    return ast.literal_eval(text)


def sizes(x: Tensor) -> tuple[int, ...]:
    """A shape for a message: what a compiler takes for a symbol is a number then, since a symbol has no text."""
    return tuple(map(index, x.shape))
