"""Process groups by name, and agreement between their ranks before anything is sent."""

import weakref
from collections.abc import Hashable

import torch.distributed as dist

# Private; run on torch 2.13.
from torch.distributed.distributed_c10d import _resolve_process_group

_agreed: weakref.WeakKeyDictionary[dist.ProcessGroup, set[Hashable]] = weakref.WeakKeyDictionary()


def group_size(name: str) -> int:
    """Number of ranks in the named process group."""
    return _group(name).size()


def group_rank(name: str) -> int:
    """This rank's number in the named process group."""
    return _group(name).rank()


def agree(signature: tuple[tuple[str, Hashable], ...], *names: str) -> None:
    """Compare a call's signature with that of all ranks, the first time it is seen; refuse on all if one differs.

    Ranks of one program see the same signatures in the same order, so all of them compare at the same call.

    Args:
        signature: pairs of a name and a value.
        *names: the groups of the mesh's axes, innermost first; empty names are skipped.

    Raises:
        ValueError: on every rank, naming what differs and where.
    """
    groups = [_group(name) for name in names if name]
    groups = [group for group in groups if group.size() > 1]
    if not groups or all(signature in _agreed.get(group, ()) for group in groups):
        return
    everyone = {dist.get_rank(): signature}
    for group in groups:
        heard: list[dict] = [{} for _ in range(group.size())]
        dist.all_gather_object(heard, everyone, group=group)
        everyone = {rank: theirs for part in heard for rank, theirs in part.items()}
    for position, (what, _) in enumerate(signature):
        values = {rank: theirs[position][1] for rank, theirs in sorted(everyone.items())}
        if len(set(values.values())) > 1:
            listing = ", ".join(f"rank {rank}: {value}" for rank, value in values.items())
            raise ValueError(f"{what} must be the same on every rank of the mesh, got {listing}")
    for group in groups:
        _agreed.setdefault(group, set()).add(signature)


def _group(name: str) -> dist.ProcessGroup:
    # torch 2.13 names a type of its own for group names, 2.11 does not.
    return _resolve_process_group(name)  # pyrefly: ignore[bad-argument-type]
