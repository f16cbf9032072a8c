"""What a mask depends on, as far as Python shows it: something that is equal as long as nothing of it has changed.

Note [What can be seen]
Seen are a function's code, its closure, its defaults and the globals that its code names, and so on of the functions
among these; of modules and classes the attributes that the code names; numbers, strings, and containers of few. Of a
tensor it is the contents, since a write through ``.data`` or numpy leaves no other trace. Torch, numpy and the standard
library stay as they are. Any other object may answer by whatever it can reach, so it is refused, and so is a container
too long to be read at every call.
"""

import dis
import hashlib
import sys
from collections.abc import Hashable, Mapping
from enum import Enum
from functools import lru_cache, partial
from types import BuiltinFunctionType, CodeType, EllipsisType, FunctionType, MethodType, ModuleType, NoneType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from wallfacer_dt.mesh import outside_modes

MOST = 512
"""Things that are looked at before a mask is refused."""

_Names = frozenset[str]
_PLAIN = {
    *(bool, int, float, complex, str, bytes, range, NoneType, EllipsisType),
    *(torch.dtype, torch.device, torch.layout),
}
_CONTAINERS = {tuple, list, set, frozenset, dict, torch.Size}
_LIBRARIES = {"torch", "numpy", *sys.stdlib_module_names}
# What flex_attention reads of a BlockMask in its forward.
_OF_BLOCK_MASK = (
    "mask_mod", "seq_lengths", "BLOCK_SIZE", "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices",
)  # fmt: skip


def fingerprint(mask: Any) -> Hashable:
    """What a mask_mod or BlockMask depends on; see Note [What can be seen].

    Captured tensors are read whole, and copied to the host from a device.

    Args:
        mask: the mask.

    Returns:
        What is equal to an earlier one as long as nothing that the mask depends on has changed.

    Raises:
        TypeError: it depends on what cannot be seen.
    """
    with outside_modes(), torch.no_grad():
        return _Reader().read("", mask, frozenset())


class _Reader:
    """Reads one mask, and what it meets again only once."""

    def __init__(self) -> None:
        self._left = MOST
        self._met: dict[tuple[int, _Names], tuple[int, Any]] = {}

    def read(self, name: str, value: Any, used: _Names) -> Hashable:
        """Read what the mask knows by a name; ``used`` are the attributes that the code names."""
        self._left -= 1
        if self._left < 0:
            raise _unseen(name, value, f"one thing more than the {MOST} that are read at every call")
        if type(value) in _PLAIN or isinstance(value, np.generic):
            return type(value), repr(value) if isinstance(value, float | complex | np.generic) else value
        if isinstance(value, Enum):
            return type(value), value.name
        key = id(value), used
        if key in self._met:
            return self._met[key][0]
        self._met[key] = len(self._met), value  # which is kept, so that nothing else gets its id
        return self._read_parts(name, value, used)

    def _read_parts(self, name: str, value: Any, used: _Names) -> Hashable:
        if _is_constant(value):
            return value
        if isinstance(value, FunctionType):
            return self._read_function(name, value, used)
        if isinstance(value, partial):
            return partial, self._read_all(name, {n: getattr(value, n) for n in ("func", "args", "keywords")}, used)
        if isinstance(value, BlockMask):
            return BlockMask, self._read_all(name, {n: getattr(value, n) for n in _OF_BLOCK_MASK}, used)
        if isinstance(value, ModuleType | type):
            return value, self._read_all(name, {n: getattr(value, n) for n in used if hasattr(value, n)}, used)
        if isinstance(value, MethodType) and isinstance(value.__self__, type):
            return self.read(name, value.__func__, used), self.read(name, value.__self__, used)
        if type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided:
            flat = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
            return value.dtype, tuple(value.shape), _digest(flat.numpy())
        if type(value) is np.ndarray and not value.dtype.hasobject:
            return value.dtype.str, value.shape, _digest(np.ascontiguousarray(value))
        if type(value) in _CONTAINERS or (isinstance(value, tuple) and hasattr(value, "_fields")):
            return type(value), self._read_container(name, value, used)
        raise _unseen(name, value, "whose state cannot be seen")

    def _read_function(self, name: str, function: FunctionType, used: _Names) -> Hashable:
        code = function.__code__
        names = _names(code)
        if names.imports:
            raise TypeError(
                f"mask_mod imports `{names.imports[0]}` when it is asked: import it outside of the function"
            )
        space = function.__globals__
        captured = {n: space[n] for n in names.loads if n in space} | _cells(function)
        arguments = reversed(code.co_varnames[: code.co_argcount])
        defaults = dict(zip(arguments, reversed(function.__defaults__ or ()), strict=False))
        own = {n: x for n, x in vars(function).items() if n in used}
        return (
            code,
            self._read_all("", captured, names.attributes),
            self._read_all("", defaults | (function.__kwdefaults__ or {}), names.attributes),
            self._read_all(name, own, used),
        )

    def _read_container(self, name: str, value: Any, used: _Names) -> Hashable:
        if len(value) > self._left:
            raise _unseen(name, value, f"whose {len(value)} entries are too many to be read at every call")
        if isinstance(value, dict):
            return tuple((self.read(name, k, used), self.read(f"{name}[{k!r}]", x, used)) for k, x in value.items())
        entries = [self.read(f"{name}[{i}]", x, used) for i, x in enumerate(value)]
        return frozenset(entries) if isinstance(value, set | frozenset) else tuple(entries)

    def _read_all(self, owner: str, things: Mapping[str, Any], used: _Names) -> Hashable:
        prefix = f"{owner}." if owner else ""
        return tuple((n, self.read(f"{prefix}{n}", x, used)) for n, x in sorted(things.items()))


def _is_constant(value: Any) -> bool:
    """Whether it is a library's, or C, and holds nothing of a caller's."""
    if isinstance(value, BuiltinFunctionType):
        return isinstance(value.__self__, ModuleType | type | NoneType)
    module = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    if not isinstance(value, ModuleType | type | FunctionType) or str(module).split(".")[0] not in _LIBRARIES:
        return False
    # What a function of theirs has made may have captured anything, as and_masks(...) has.
    return not isinstance(value, FunctionType) or "<locals>" not in value.__qualname__


class _Code(NamedTuple):
    """Names in a function's code, and in that of the functions within."""

    loads: _Names
    attributes: _Names
    imports: tuple[str, ...]


@lru_cache(1024)
def _names(code: CodeType) -> _Code:
    by_operation: dict[str, set[str]] = {}
    for instruction in dis.get_instructions(code):
        by_operation.setdefault(instruction.opname, set()).add(instruction.argval)
    found = [by_operation.get(name, set()) for name in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_ATTR", "LOAD_METHOD")]
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    loads = found[0] | found[1]
    return _Code(
        frozenset(loads.union(*(each.loads for each in inner))),
        frozenset((found[2] | found[3]).union(*(each.attributes for each in inner))),
        (*sorted(by_operation.get("IMPORT_NAME", ())), *(n for each in inner for n in each.imports)),
    )


def _cells(function: FunctionType) -> dict[str, Any]:
    cells = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            cells[name] = cell.cell_contents
        except ValueError:  # nothing is in it yet
            continue
    return cells


def _digest(contents: np.ndarray) -> bytes:
    # The fastest of hashlib where processors have instructions for it; nobody is to be kept from colliding on purpose.
    return hashlib.sha1(contents.data, usedforsecurity=False).digest()


def _unseen(name: str, value: Any, why: str) -> TypeError:
    kind = f"a method of {type(value.__self__).__name__}" if isinstance(value, MethodType) else type(value).__name__
    if not name:
        return TypeError(f"mask_mod is {kind}, {why}: pass a function that captures tensors and numbers")
    return TypeError(f"mask_mod depends on `{name}` ({kind}), {why}: capture tensors and numbers instead")
