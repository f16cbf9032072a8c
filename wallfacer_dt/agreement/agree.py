"""Ranks compare their calls, and refuse together.

Note [Comparing calls]
Every call on a mesh posts a record (Note [Records]) before anything is sent. Whether all ranks posted the same is
found out at once on the CPU, where a call that differs could end the process. Elsewhere at once, too, if no such call
has been made before or this rank cannot make it; otherwise when the operator has queued its work: the record travels
while the device works. One record of a meeting is open at a time, so all ranks find a difference at the same call. They
then tell each other all that they know of theirs, and raise the same.

Note [Refusing together]
A rank that cannot make a call meets the others where they compare it, tells them why, and all of them raise. While a
compiler traces, ranks cannot meet: one may run, from a cache, while another still traces. So there a refusal becomes an
operator of the graph, which meets the others, and raises, when it runs.
"""

import functools
import hashlib
import json
import pickle
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from wallfacer_dt.agreement.meeting import Meeting, kept
from wallfacer_dt.agreement.whereabouts import WaitError
from wallfacer_dt.agreement.worlds import Named, is_lasting, this_world
from wallfacer_dt.compiler import SOURCES, untraced

_E = TypeVar("_E", bound=Exception)

_FORWARD = "the call that this is the backward of"
_ALWAYS = "mesh", "the version of torch, and of wallfacer_dt's sources,"
_VERSIONS = f"{torch.__version__.partition('+')[0]}, {SOURCES}"
_HEARD = 256


class _Said(NamedTuple):
    """What a rank tells of a call: why it cannot make it, or what it is, its arguments by name, and its layer."""

    error: str
    what: str
    names: tuple[str, ...]
    values: tuple[str, ...]
    layer: str = ""  # earlier versions do not say it


def agree(
    what: str,
    signature: Iterable[tuple[str, Hashable]],
    mesh: str,
    *,
    x: Tensor | None = None,
    forward: Tensor | int = 0,
    error: str = "",
) -> int:
    """Compare a call with that of all ranks of a mesh, and refuse on all of them if one differs.

    The mesh is told by its name, which is empty for none. A signature is pairs of a name and a value whose text is the
    same on every rank. A backward says the number of its forward, or the tensor in which that is the first; both are
    looked at only if there is somebody to agree with. A rank that refuses its own arguments comes here with
    its error, so that the others do not wait for it. Ranks wait for each other now; with x, one of the tensors of an
    operator, on a device other than the CPU only at the first call that is like this one, ``forward`` aside, and fake
    tensors pass by.

    Gives the call's number on the mesh's ranks, from 1; 0 where there is nobody to agree with. Raises, with the ranks
    that have it too as an attribute ``met``: a ValueError on every rank, naming what differs and where, of this call or
    of the last one, or that the mesh is of a world that is gone; a WaitError where a rank did not come in time.
    """
    found = None if isinstance(x, FakeTensor) else _meeting(mesh, what or error)
    if found is None:
        return 0
    text, meeting = found
    pairs = tuple(signature)
    names, values = (*_ALWAYS, *(name for name, _ in pairs)), (text, _VERSIONS, *(str(value) for _, value in pairs))
    record = likeness = _likeness((what, names, values))
    known = int(forward.view(-1)[0]) if isinstance(forward, Tensor) else forward
    if known:
        names, values = (*names, _FORWARD), (*values, str(known))
    try:
        _settle(meeting)
        at_once = x is None or waits_at_once(x.device) or bool(error) or likeness not in meeting.seen
        if at_once:
            settle()
    except (ValueError, WaitError) as late:  # of whatever mesh: this one's ranks hear it in place of this call
        tell(late, mesh)
        raise
    meeting.number += 1
    layer = meeting.layer_of(known)
    if known or error:
        record = _digest((likeness, known, error))
    elif layer and likeness not in meeting.unlayered:
        record = _likeness((likeness, layer))
    meeting.call = f"call {meeting.number} on the {text}, {what or error}" + f", in {layer}" * bool(layer)
    meeting.whereabouts.call = meeting.call
    meeting.posted = next(_posts)
    meeting.open = _Said(error, what, names, values, layer), likeness, meeting.post(record)
    if at_once:
        _settle(meeting)
    return meeting.number


def settle() -> None:
    """Look at all that has been posted, as far as that is still to be done; raises as :func:`agree`."""
    world = this_world()
    for meeting in () if world is None else tuple(world.meetings.values()):
        _settle(meeting)


def _settle(meeting: Meeting) -> None:
    """Look at what has been posted to a meeting, after what was posted to others before it.

    Where all look in the order in which all post, nobody waits for a rank that waits for him in another meeting.
    """
    if meeting.open is None:
        return
    world = this_world()
    others = () if world is None else world.meetings.values()
    for earlier in sorted((m for m in others if m.open and m.posted < meeting.posted), key=lambda m: m.posted):
        _settle(earlier)
    (said, likeness, pending), meeting.open = meeting.open, None
    with _naming_call(meeting):
        records = meeting.wait(pending)
        if len(set(records)) == 1:
            if not said.error:
                meeting.remember(likeness)
            return
        told = [_Said(*json.loads(text)) for text in meeting.exchange(json.dumps(said).encode())]
    difference = _difference(dict(zip(meeting.ranks, told, strict=True)))
    if not difference:
        meeting.remember(likeness, is_layered=False)
        return
    raise _met(ValueError(f"call {meeting.number} on this mesh: {difference}"), meeting.ranks)


@contextmanager
def _naming_call(meeting: Meeting) -> Iterator[None]:
    """Have a wait in vain say in which call, and where the others are, who hear it in the same way."""
    try:
        yield
    except RuntimeError as error:
        late = WaitError(f"{meeting.call}: {error}{meeting.whereabouts.of(meeting.ranks)}")
        raise _met(late, meeting.ranks) from error


def hear_all(what: str, mine: Any, mesh: str) -> dict[int, Any]:
    """What all ranks of a mesh (its name) have, by rank, one's own among it: anything that can be pickled.

    What cannot be raises before this rank says anything; the others hear of it where it is within
    :func:`refusing_together`, and wait for the timeout otherwise.
    """
    told = pickle.dumps(mine)
    found = _meeting(mesh, what)
    if found is None:
        return {dist.get_rank(): mine}
    _, meeting = found
    agree(what, (), mesh)
    with _naming_call(meeting):
        heard = meeting.exchange(told)
    return dict(zip(meeting.ranks, map(pickle.loads, heard), strict=True))


def hear_once(x: Tensor, key: Hashable, mine: Any, mesh: str) -> dict[int, Any] | None:
    """:func:`hear_all`, but for what ranks have said of the same key before, which must be the same on all of them.

    None where others are not heard: if x, one of an operator's tensors, is fake, or there are none.
    """
    found = None if isinstance(x, FakeTensor) else _meeting(mesh, str(key))
    if found is None:
        return None
    return kept(found[1].heard, key, _HEARD, lambda: hear_all("what ranks see of each other", mine, mesh))


@contextmanager
def refusing_together(mesh: str) -> Iterator[None]:
    """Have all ranks of a mesh (its name) refuse when one does; see Note [Refusing together]."""
    try:
        yield
    except Exception as error:  # a mask_mod may raise anything
        tell(error, mesh)
        raise


def waits_at_once(device: torch.device) -> bool:
    """Whether ranks compare a call on tensors of a device before they go on."""
    return device.type == "cpu"


@untraced("ranks cannot meet while a compiler traces")  # which it may want to where it has broken a graph off
def tell(error: Exception, mesh: str) -> None:
    """What :func:`refusing_together` does with an error: ranks hear it, unless all of the mesh have it already.

    For what every call passes: to catch one costs nothing where there is none, and a context does.
    """
    ranks = _ranks(mesh)
    if not ranks.issubset(getattr(error, "met", ())):
        with suppress(ValueError, RuntimeError):  # one's own error says more than the comparison
            agree("", (), mesh, error=str(error) or repr(error))
        _met(error, ranks)


def have_all(error: Exception, mesh: str) -> bool:
    """Whether all ranks of a mesh raise this error, so that none of them waits to hear of it."""
    ranks = _ranks(mesh)
    return bool(ranks) and ranks.issubset(getattr(error, "met", ()))


def _ranks(mesh: str) -> frozenset[int]:
    world = this_world()
    found = None if world is None else world.find(mesh)
    return frozenset(() if found is None else found.ranks)


def _meeting(mesh: str, came_to: str) -> tuple[str, Meeting] | None:
    """What the mesh is, and the meeting of its ranks; None where there is nobody to meet."""
    if not mesh:
        return None
    (_, text, ranks, _), world = named(mesh), this_world()
    assert world is not None, "a mesh is named in it"
    try:
        meeting = world.meeting(ranks)
    except RuntimeError as error:
        kind = RuntimeError if world.parents is not None else WaitError
        late = kind(f"not all ranks came to the first call on the {text}: {error}; this rank came to: {came_to}")
        raise _met(late, ranks) from error
    return None if meeting is None else (text, meeting)


def named(mesh: str) -> Named:
    """What a name stands for in this world, or a refusal (ValueError) of one for which no mesh has been named here."""
    world = this_world()
    found = None if world is None else world.find(mesh)
    if found is not None:
        return found
    if is_lasting(mesh):
        raise ValueError(
            f"there is no mesh here {mesh}, for which this was exported or pickled; make meshes as they were made "
            "there, and TokenOrder(name, mesh) of this one, before"
        )
    raise ValueError(
        f"the {mesh} is of a process group that has been destroyed since; make a new mesh, and apply styles on it to "
        "new modules"
    )


def _difference(told: dict[int, _Said]) -> str:
    """What differs, and where; nothing, where all there is to it is that some ranks know in which layer they are.

    As compiled code does not, where another rank's compiler has given up.
    """
    refusing = {rank: said.error for rank, said in told.items() if said.error}
    if refusing:
        rank = min(refusing)
        return f"rank {rank} of the mesh cannot make this call: {refusing[rank]}"
    by_rank = {rank: dict(zip(said.names, said.values, strict=True)) for rank, said in told.items()}
    names = dict.fromkeys(name for pairs in by_rank.values() for name in pairs)
    # What some ranks have no value for follows from something else that differs.
    ordered = sorted(names, key=lambda name: not all(name in pairs for pairs in by_rank.values()))
    differing = [("it", {rank: said.what for rank, said in told.items()})]
    differing += [(name, {rank: pairs.get(name, "nothing") for rank, pairs in by_rank.items()}) for name in ordered]
    differing.append(("the layer", {rank: said.layer for rank, said in told.items() if said.layer}))
    # As the projections of a module, told by name, of which a rank takes one for another.
    differing.append(("it", {rank: ", ".join(pairs) for rank, pairs in by_rank.items()}))
    for name, values in differing:
        if len(set(values.values())) > 1:
            return f"{name} must be the same on every rank of the mesh, got {_listing(values)}"
    return ""


def _listing(values: dict[int, str]) -> str:
    """By rank; of many ranks those together that have the same, the fewest first, and not all."""
    if len(values) <= _MANY:
        return ", ".join(f"rank {rank}: {value}" for rank, value in values.items())
    ranks: dict[str, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(rank)
    told = sorted(ranks.items(), key=lambda found: len(found[1]))
    listing = [
        f"rank {', '.join(map(str, some[:_MANY]))}{', ...' * (len(some) > _MANY)}: {value}" for value, some in told
    ]
    return "; ".join(listing[:_MANY] + ["..."] * (len(listing) > _MANY))


def _digest(what: object) -> int:
    digest = hashlib.blake2b(repr(what).encode(), digest_size=8).digest()
    return int.from_bytes(digest, signed=True) or 1


_MANY = 16  # ranks, or values, in a message
_posts = count(1)
_likeness = functools.lru_cache(1024)(_digest)  # of texts alone, so that what is equal is the same


def _met(error: _E, ranks: Iterable[int]) -> _E:
    """The error, noting that all these ranks have it."""
    error.met = {*getattr(error, "met", ()), *ranks}  # pyrefly: ignore[missing-attribute]
    return error
