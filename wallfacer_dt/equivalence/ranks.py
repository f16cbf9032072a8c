"""What the ranks of a mesh tell each other, so that all of them go on or all of them raise."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh

from wallfacer_dt.agreement import hear_all
from wallfacer_dt.equivalence.style import EquivalenceError
from wallfacer_dt.mesh import name_of


def run_together(mesh: DeviceMesh, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function on every rank, and raise on all of them if one has failed.

    Args:
        mesh: whose ranks all call this.
        function: what may fail on some.
        *args: its arguments.

    Returns:
        What the function has returned here.

    Raises:
        Exception: this rank's own.
        EquivalenceError: the first that another rank has raised.
        ValueError: what another rank has raised, of any other type.
    """
    result, failure, mine = None, None, None
    try:
        result = function(*args)
    except Exception as error:  # which the other ranks are to hear of
        failure, mine = error, (isinstance(error, EquivalenceError), str(error))
    heard = {rank: theirs for rank, theirs in sorted(exchange(mine, mesh).items()) if theirs is not None}
    if failure is not None:
        raise failure
    for rank, (differs, text) in heard.items():
        raise (EquivalenceError if differs else ValueError)(f"on rank {rank} of the mesh {text}")
    return result


def exchange(mine: Any, mesh: DeviceMesh) -> dict[int, Any]:
    """What every rank of the mesh has, by rank."""
    return hear_all("check_equivalence", mine, name_of(mesh))


def is_pretended(mesh: DeviceMesh) -> bool:
    """Whether tensors or ranks hold nothing that could be compared."""
    fake = any(dist.get_backend(group) == "fake" for group in mesh.get_all_groups())
    return fake or isinstance(torch.empty(0), FakeTensor)
