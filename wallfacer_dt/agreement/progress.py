"""Where a training loop and a model say that this rank is, for messages of waits in vain; see Note [Whereabouts]."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType

import torch.distributed as dist

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


@contextmanager
def waiting(what: str, ranks: Sequence[int] | None = None) -> Iterator[None]:
    """Have a collective of one's own that waits in vain say what it is, and where the other ranks are.

    Args:
        what: the collective, and what it brings.
        ranks: that take part; all of the world if not told.

    Raises:
        WaitError: in place of the collective's own.
    """
    world = this_world()
    if world is None:
        yield
        return
    here = world.whereabouts
    here.waits_for = what
    try:
        yield
    except RuntimeError as error:
        if not here.is_wait(error):
            raise
        raise here.in_vain(error, range(dist.get_world_size()) if ranks is None else ranks) from error
    finally:
        here.waits_for = None
