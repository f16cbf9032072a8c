"""What is known of a world: the names of its meshes, and the meetings of their ranks.

Note [Names of meshes]
Operators are told of a mesh by a name, as they are of process groups. Ranks compare it, and find their meeting by it.
Group names are given anew in a new world; a name of a mesh is not, so that what was made for a mesh of a world that is
gone does not run on whatever groups happen to be called like it. What outlives its world on purpose (an exported
program, a pickled module) has a lasting name instead, which is that of the mesh that is like it in any world.
"""

import hashlib
import os
import weakref
from collections.abc import Sequence
from datetime import timedelta
from itertools import count
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from wallfacer_dt.agreement.meeting import Meeting, default_store
from wallfacer_dt.agreement.whereabouts import Whereabouts


class Named(NamedTuple):
    """A mesh: its name; what it is, in words that are the same on all its ranks; these, ascending; its axes' groups."""

    name: str
    text: str
    ranks: tuple[int, ...]
    groups: tuple[str, ...]


class World:
    """What is known while a world lives."""

    def __init__(self) -> None:
        self.number = next(_numbers)
        self.meshes: dict[str, Named] = {}
        self.names: dict[tuple[str, tuple[str, ...]], str] = {}
        self.meetings: dict[tuple[int, ...], Meeting] = {}
        self.whereabouts = Whereabouts()
        self.parents: dict[tuple[int, ...], Meeting] | None = None  # in a process forked from one that was in the world

    def find(self, name: str) -> Named | None:
        """The mesh of a name, lasting or not, if it has been named in this world."""
        found = self.meshes.get(name)
        if found is None and is_lasting(name):
            text = name.removeprefix(_LASTING)
            found = next((mesh for mesh in self.meshes.values() if mesh.text == text), None)
        return found

    def meeting(self, ranks: tuple[int, ...]) -> Meeting | None:
        """That of these ranks, which all of them make at their first call; None for one, or ranks only imagined."""
        if ranks not in self.meetings and len(ranks) > 1 and dist.get_backend() != "fake":
            if self.parents is not None:
                raise RuntimeError("ranks cannot meet in a process forked from theirs, as the worker of a loader is")
            self.meetings[ranks] = Meeting(ranks, _timeout(), self.whereabouts)
            if dist.get_backend() != "threaded":  # whose ranks never wait in vain
                self.whereabouts.tell(default_store(), dist.get_rank(), _timeout())
        return self.meetings.get(ranks)


_worlds: weakref.WeakKeyDictionary[dist.ProcessGroup, World] = weakref.WeakKeyDictionary()
_last: tuple[Any, Any] = (lambda: None, lambda: None)
_numbers = count(1)
_LASTING, _OF_WORLD = "like the ", " of world "


def this_world() -> World | None:
    """What is known of the world that there is now, if there is one."""
    world = dist.group.WORLD
    if world is None:
        return None
    global _last
    group, last = _last
    if group() is not world:  # to look into the dictionary takes longer, and every call asks several times
        if world not in _worlds:
            _worlds[world] = World()
        group, last = _last = weakref.ref(world), weakref.ref(_worlds[world])
    return last()


def _forked() -> None:
    """Leave the connections to the process that this one is forked from, whose threads wait on them."""
    world = this_world()
    if world is not None and world.parents is None:  # a process forked from a fork has met nobody
        world.parents, world.meetings = world.meetings, {}


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_forked)


def name_mesh(what: str, ranks: Sequence[int], groups: Sequence[str]) -> str:
    """The name under which ranks compare their calls on a mesh, see Note [Names of meshes].

    It is made of the device type and axes in words, the ranks as they lie in the mesh, and the names of this rank's
    process groups on its axes. Meshes that are alike and have groups of their own get names of their own, in the order
    in which they are named first; so it is asked for only where all ranks of the mesh ask.
    """
    world = this_world()
    assert world is not None, "a mesh has been made, so there is a world"
    text = f"{what} of ranks {_short(ranks)}"
    if (text, tuple(groups)) not in world.names:
        alike = sum(other == text for other, _ in world.names)
        told = f"{text} (number {alike + 1} of its kind)" if alike else text
        name = f"{told}{_OF_WORLD}{world.number}" if world.number > 1 else told
        world.names[text, tuple(groups)] = name
        world.meshes[name] = Named(name, told, tuple(sorted(ranks)), tuple(groups))
    return world.names[text, tuple(groups)]


def lasting(name: str) -> str:
    """The name of a mesh for what outlives its world, see Note [Names of meshes]."""
    return name and (name if is_lasting(name) else _LASTING + name.partition(_OF_WORLD)[0])


def is_lasting(name: str) -> bool:
    """Whether a name is that of a mesh in any world."""
    return name.startswith(_LASTING)


def _short(ranks: Sequence[int], most: int = 16) -> str:
    if len(ranks) <= most:
        return ", ".join(map(str, ranks))
    digest = hashlib.blake2b(repr(list(ranks)).encode(), digest_size=8).hexdigest()
    return f"{', '.join(map(str, ranks[:most]))}, ... ({len(ranks)}, {digest})"


def _timeout() -> timedelta:
    """What ``init_process_group`` was given."""
    world = dist.group.WORLD
    assert world is not None
    found = map(world_timeout, world._device_types)
    return next((timeout for timeout in found if timeout is not None), default_pg_timeout)


# Private methods of process groups; run on torch 2.11.0, 2.13.0, 2.14.1 and 2.15.0.


def world_timeout(device: torch.device) -> timedelta | None:
    """What ``init_process_group`` was given for a device; None where the world's group of it has no timeout."""
    world = dist.group.WORLD
    # A process group in Python has no backend, a fake one no options.
    known = world is not None and device in world._device_types
    options = getattr(world._get_backend(device), "options", None) if known else None
    return None if options is None else options._timeout
