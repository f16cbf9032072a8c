"""Bytes that are alive: a dispatch mode that sees what operators make, those inside this package's operators too.

torch's ``MemTracker`` sees an operator of this package as one op, and what it makes and drops inside as nothing. Here
the operator's body runs under the mode, as in ``wallfacer_dt.testing.count_collectives``. Storages are followed by weak
references, and their sizes read again at every op that is no view, if they may change as FSDP's do. What one op
allocates and frees in itself (a kernel's workspace) is not seen, but may be told.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

# A private name; run on torch 2.11.0, 2.13.0, 2.14.1 and 2.15.0. Its type, no operation.
from torch.distributed._functional_collectives import AsyncCollectiveTensor  # noqa: TID251
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from wallfacer_dt.metp import BODIES as METP_BODIES
from wallfacer_dt.ops import BODIES
from wallfacer_dt.planning.meta import call

_BODIES = {**BODIES, **METP_BODIES}
_COPIED_FIRST = ("all_reduce", "broadcast")
_WRAPPERS = (DTensor, AsyncCollectiveTensor)
Workspace = Callable[[Any, tuple], int]


class Alive(TorchDispatchMode):
    """Follows the storages of tensors: ``peak`` is the most bytes alive after any op, ``largest`` those of one tensor.

    Args:
        *given: tensors that are there already.
        are_resized: storages may be resized while they are followed.
        workspace: from an op and its arguments the bytes that it allocates and frees in itself.
    """

    def __init__(self, *given: Tensor, are_resized: bool = True, workspace: Workspace = lambda *_: 0) -> None:
        super().__init__()
        self._are_resized, self._workspace = are_resized, workspace
        self._refs: dict[int, weakref.ref] = {}
        self._in_flight: dict[int, list[Any]] = {}
        self.peak = self.largest = 0
        self._follow(given)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: torch would have its compiler look away at every op, which takes time; nothing is compiled here.

        A private name of torch 2.13's; versions without it do not ask.
        """
        return False

    @property
    def now(self) -> int:
        """Bytes alive."""
        return sum([storage.nbytes() for ref in list(self._refs.values()) if (storage := ref()) is not None])

    def reset(self) -> None:
        """Forget the peak."""
        self.peak, self.largest = self.now, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if types and any(issubclass(kind, _WRAPPERS) for kind in types):
            return NotImplemented  # it becomes ops on plain tensors, and those come here
        is_view = func.is_view
        if is_view:
            result = func(*args, **kwargs)
        elif func in _BODIES:
            with self:
                return _BODIES[func](*args, **kwargs)
        else:
            result = call(func, args, kwargs)
            if func.namespace == "_c10d_functional":
                result = self._sent(func, args, result)
        is_new = self._follow((result,) if type(result) is Tensor else tree_leaves(result))
        if is_new or (self._are_resized and not is_view):
            self.peak = max(self.peak, self.now + self._workspace(func, args))
        return result

    def _sent(self, func: Any, args: tuple, result: Any) -> Any:
        """Make fake collectives live as real ones: what is sent until it is waited for, which brings no new tensor."""
        name = func._schema.name.partition("::")[2]
        if name == "wait_tensor":
            self._in_flight.pop(storage_of(args[0])._cdata, None)
            return args[0]
        if name not in _COPIED_FIRST:
            sent = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
            self._in_flight |= {storage_of(x)._cdata: sent for x in tree_leaves(result)}
        return result

    def _follow(self, tensors: Iterable[Any]) -> bool:
        """Whether some are new."""
        is_new = False
        for x in tensors:
            if type(x) is not Tensor and (not isinstance(x, Tensor) or isinstance(x, _WRAPPERS)):
                continue
            storage = storage_of(x)
            key = storage._cdata
            ref = self._refs.get(key)
            if ref is None or ref() is not storage:
                self._refs[key] = weakref.ref(storage, lambda ref, key=key: self._drop(key, ref))
                self.largest = max(self.largest, storage.nbytes())
                is_new = True
        return is_new

    def _drop(self, key: int, ref: weakref.ref) -> None:
        if self._refs.get(key) is ref:
            del self._refs[key]


def storage_of(x: Tensor) -> torch.UntypedStorage:
    """What a tensor's elements lie in."""
    return x.untyped_storage()
