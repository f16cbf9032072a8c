"""Which modules are alike, so that one check is enough for all of them: by what they hold, not by which objects.

What a module's code finds elsewhere, as in globals and attributes of classes, is not looked at.
"""

import hashlib
import pickle
from collections.abc import Hashable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from wallfacer_dt.comparison import bytes_of

_LARGEST = 2**20  # elements of a tensor, and bytes of all else, that are looked through
_REFUSED = (nn.Module, torch.UntypedStorage, torch.TypedStorage)


def likeness(module: nn.Module, told: Hashable = None, without_parameters: bool = False) -> Hashable | None:
    """Equal for modules that are of the same types, and hold the same, in all that is within them.

    Args:
        module: stays as it is.
        told: what must be equal besides.
        without_parameters: of parameters only names, shapes and dtypes count.

    Returns:
        The likeness; None for a module that is like no other, as it has hooks, or holds what is large, on the meta
        device, or cannot be pickled; or if what was told cannot be hashed.
    """
    usual = vars(nn.Module())
    hooks = [name for name in usual if name.startswith(("_forward", "_backward"))]
    kinds, held = [], []
    digest = _Digest()
    try:
        for path, part in module.named_modules(remove_duplicate=False):
            if any(vars(part)[name] for name in hooks):
                return None
            kinds.append((path, type(part), type(part).forward, part.training))
            own = {name: value for name, value in vars(part).items() if name not in usual}
            shapes = {name: x if x is None else (tuple(x.shape), x.dtype) for name, x in part._parameters.items()}
            held.append((own, shapes if without_parameters else part._parameters, part._buffers))
        _Pickler(digest, protocol=5).dump(held)
        found = tuple(kinds), digest.hash.digest(), told
        hash(found)
    except Exception:  # whatever an object may raise that is to be pickled
        return None
    return found


class _Digest:
    """A file that keeps a digest of what is written, and takes only so much."""

    def __init__(self) -> None:
        self.hash, self.left = hashlib.blake2b(), _LARGEST

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        self.left -= size
        if self.left < 0:
            raise pickle.PicklingError
        self.hash.update(data)
        return size


class _Pickler(pickle.Pickler):
    """Takes a digest for a tensor, and nothing that is large."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, _REFUSED) or (isinstance(obj, np.ndarray) and obj.nbytes > _LARGEST):
            raise pickle.PicklingError(type(obj).__name__)
        return (str, (_digest_of(obj),)) if isinstance(obj, Tensor) else NotImplemented


def _digest_of(x: Tensor) -> str:
    # Another kind of tensor may hold other tensors, or a part of one, or nothing.
    if type(x) not in (Tensor, nn.Parameter) or x.is_meta or x.numel() > _LARGEST:
        raise pickle.PicklingError(type(x).__name__)
    content = hashlib.blake2b(bytes_of(x).cpu().numpy().tobytes()).hexdigest()
    return f"{type(x).__name__} {tuple(x.shape)} {x.dtype} {content}"
