"""The inputs of a model, which all ranks of a mesh hold whole: made the same, and compared."""

import hashlib
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves

from wallfacer_dt.agreement.agree import agree, refusing_together
from wallfacer_dt.collectives.functional import broadcast, wait
from wallfacer_dt.comparison import bytes_of
from wallfacer_dt.mesh import context_groups, name_of


def share_inputs(mesh: DeviceMesh, **inputs: Any) -> dict[str, Any]:
    """The inputs of the mesh's first rank, on all its ranks, bit for bit.

    A model on a mesh wants the same latents, noise, timesteps and text on all ranks, which draw noise of their own
    and whose encoders may round otherwise. All ranks call it together, with tensors of the same shapes.

    Args:
        mesh: that :func:`context_parallel` was given.
        **inputs: tensors without a gradient; what is no tensor is returned as it is.

    Returns:
        The inputs by name.

    Raises:
        ValueError: a tensor needs a gradient, is not on the mesh's device type, or is within something else, or there
            is an array; shapes, dtypes, or what is no tensor, differ between ranks.
    """
    name = name_of(mesh)
    with refusing_together(name):
        groups = context_groups(mesh).names
        tensors = {key: x for key, x in inputs.items() if isinstance(x, Tensor)}
        for key, x in inputs.items():
            if key not in tensors and any(isinstance(leaf, Tensor | np.ndarray) for leaf in tree_leaves(x)):
                raise ValueError(
                    f"{key} holds tensors, or is an array: give share_inputs tensors, each by its own name"
                )
        for key, x in tensors.items():
            if x.requires_grad:
                raise ValueError(f"{key} needs a gradient, which would be lost: give share_inputs what has none")
            if x.device.type != mesh.device_type:
                raise ValueError(f"{key} must be on the mesh's device type {mesh.device_type!r}, got {x.device}")
        told = [(key, _kind(x) if isinstance(x, Tensor) else x) for key, x in inputs.items()]
        agree("share_inputs", told, name)
    shared = dict(inputs)
    for key, x in tensors.items():
        flat = bytes_of(x)
        for group in filter(None, groups):
            flat = wait(broadcast(flat, 0, group), "broadcast of a batch", group)
        shared[key] = flat.view(x.dtype).view(x.shape)
    return shared


def compare_inputs(what: str, inputs: Mapping[str, Any], mesh: str) -> None:
    """Refuse (ValueError), on all ranks, inputs that differ between them. Digests are taken on the CPU."""
    agree(what, _told(inputs), mesh)


def _told(inputs: Mapping[str, Any]) -> Iterator[tuple[str, Hashable]]:
    for name, value in inputs.items():
        if isinstance(value, Tensor):
            yield f"the kind of {name}", _kind(value)
            if not value.requires_grad:  # a trained encoder's may differ by rounding, and cannot be shared
                yield f"what {name} holds", _digest(value)
        elif isinstance(value, list | tuple) and any(isinstance(x, Tensor) for x in tree_leaves(value)):
            yield from _told({f"{name}[{number}]": x for number, x in enumerate(value)})
        elif isinstance(value, Mapping):
            yield from _told({f"{name}[{key!r}]": value[key] for key in value})
        elif any(isinstance(x, Tensor | np.ndarray) for x in tree_leaves(value)):
            raise ValueError(
                f"{name} is an array, or holds one or tensors, of which it is not known how to compare them"
            )
        else:
            yield name, value


def _kind(x: Tensor) -> Hashable:
    return tuple(x.shape), str(x.dtype)


def _digest(x: Tensor) -> str:
    return hashlib.blake2b(bytes_of(x.cpu()).numpy().tobytes(), digest_size=8).hexdigest()
