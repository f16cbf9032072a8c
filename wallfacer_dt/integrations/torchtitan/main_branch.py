"""What is known of torchtitan's main branch, which no release has: read up to its commit 1bef8b427f, never run.

Context parallelism is a class of inner attention there, with a base class that was ``CPInnerAttention`` and is by now
``CPAttention``. While such a class runs, or prepares what attention is told of a batch, a mesh is current.
"""

from importlib import import_module
from importlib.util import find_spec

from torch.distributed.device_mesh import DeviceMesh

_PLACES = ("torchtitan.models.common.attention.cp_attention", "torchtitan.models.common.cp_attention")


def is_installed() -> bool:
    """Whether it is the main branch's interface that is there, not that of 0.3.0."""
    return _module() is not None


def base_class() -> type:
    """What a class of context-parallel inner attention inherits.

    Returns:
        The class, with its ``Config``.

    Raises:
        ImportError: no version with such a class is installed.
    """
    module = import_module(_module() or _PLACES[0])
    base = getattr(module, "CPAttention", None) or getattr(module, "CPInnerAttention", None)
    if base is None or not hasattr(base, "prepare_cp_metadata"):
        raise ImportError(f"{module.__name__} has no class with prepare_cp_metadata: this version is not known")
    return base


def current_mesh() -> DeviceMesh:
    """torchtitan's axis of context parallelism, as a mesh.

    Returns:
        The mesh of one axis.

    Raises:
        ValueError: no mesh with that axis is current.
    """
    mesh = import_module("torchtitan.distributed.spmd_types").current_spmd_mesh()
    if mesh is None or "cp" not in (mesh.mesh_dim_names or ()):
        raise ValueError("context-parallel attention needs a current mesh with an axis cp")
    return mesh["cp"]


def _module() -> str | None:
    for place in _PLACES:
        try:
            if find_spec(place) is not None:
                return place
        except ModuleNotFoundError:  # a parent is missing, or is no package
            continue
    return None
