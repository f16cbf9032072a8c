"""Where a training loop and a model say that this rank is, for messages of waits in vain; see Note [Whereabouts]."""

from collections.abc import Callable, Sequence
from types import TracebackType

import torch.distributed as dist

from wallfacer_dt.agreement.whereabouts import WaitError
from wallfacer_dt.agreement.worlds import this_world


def note_progress(what: str) -> None:
    """Say where this rank's training loop is, such as ``"step 7"``.

    Where ranks wait in vain for each other the error says it of this rank and, as far as they have told, of the others.
    Nothing is sent to other ranks, and nothing happens without a process group.

    Args:
        what: in a few words, of one line; until it is noted otherwise.
    """
    world = this_world()
    if world is not None:
        world.whereabouts.progress = what


def places() -> str:
    """Where this rank is and the others were last, for errors of waits that are not this package's, as of FSDP's.

    Empty without a process group. Others are asked for some seconds at most.
    """
    world = this_world()
    if world is None:
        return ""
    return f"{world.whereabouts}{world.whereabouts.of(range(dist.get_world_size()))}"


class Within:
    """While it lasts a layer runs, of which the calls that this rank comes to are told; nothing if it has no name."""

    __slots__ = ("_here", "_layer", "_outer")

    def __init__(self, layer: str) -> None:
        self._layer = layer

    def __enter__(self) -> None:
        world = this_world() if self._layer else None
        self._here = None if world is None else world.whereabouts
        if self._here is not None:
            self._outer, self._here.layer = self._here.layer, self._layer

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if self._here is not None:
            self._here.layer = self._outer


class Waiting:
    """A wait for other ranks, which says what it is for while it lasts; see Note [Whereabouts].

    Where it is in vain, for a timeout or a rank that is lost, a WaitError takes the place of the collective's error,
    and says where the other ranks were last.

    Args:
        what: it brings; its text says it, and says nothing between one wait and the next.
        ranks: gives those that take part; all of the world if not told.
    """

    __slots__ = ("_here", "_outer", "_ranks", "_what")

    def __init__(self, what: object, ranks: Callable[[], Sequence[int]] | None = None) -> None:
        self._what, self._ranks = what, ranks

    def __enter__(self) -> None:
        world = this_world()
        self._here = None if world is None else world.whereabouts
        if self._here is not None:
            self._outer, self._here.waits_for = self._here.waits_for, self._what

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        here = self._here
        if here is None:
            return
        try:
            if error is not None and here.is_wait(error) and str(self._what):
                ranks = range(dist.get_world_size()) if self._ranks is None else self._ranks()
                said = f"this rank ({dist.get_rank()}) {here} in vain: {error}{here.of(ranks)}"
                raise WaitError(said) from error
        finally:
            here.waits_for = self._outer
