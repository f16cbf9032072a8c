"""What every rank does by itself, and all of them raise where one has failed; and the random state that they leave."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from wallfacer_dt.agreement.agree import have_all, hear_all
from wallfacer_dt.equivalence.trial import EquivalenceError


def random_state_kept(mesh: DeviceMesh) -> AbstractContextManager[None]:
    """Afterwards the random state, of the host and of this rank's device, is as before."""
    kind = mesh.device_type
    devices = [] if kind == "cpu" else [torch.get_device_module(kind).current_device()]
    return torch.random.fork_rng(devices, device_type="cuda" if kind == "cpu" else kind)


def run_together(what: str, mesh: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function on every rank, and raise on all of them if one has failed: this rank's own error, or another's.

    That is an EquivalenceError where it was one there, and a ValueError where it was any other.
    """
    result, failure, mine = None, None, None
    try:
        result = function(*args)
    except Exception as error:  # which the other ranks are to hear of
        if have_all(error, mesh):  # and one that failed otherwise has left with it
            raise
        failure, mine = error, (isinstance(error, EquivalenceError), str(error))
    try:
        heard = hear_all(what, mine, mesh)
    except ValueError as error:  # the others are in the middle of the function, and hear that this rank is not
        raise error from failure
    if failure is not None:
        raise failure
    for rank, theirs in sorted(heard.items()):
        if theirs is not None:
            differs, text = theirs
            raise (EquivalenceError if differs else ValueError)(f"on rank {rank} of the mesh {text}")
    return result
