"""Process groups by name, and agreement between their ranks before anything is sent."""

import weakref
import zlib
from collections.abc import Hashable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

# Private; run on torch 2.11.0, 2.13.0 and 2.14.1.
from torch.distributed.distributed_c10d import _resolve_process_group

from wallfacer_dt.mesh import outside_modes

# On a device, signatures that all ranks have had, oldest first; ranks of one program have them in the same order.
_agreed: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Hashable, None]] = weakref.WeakKeyDictionary()
_KEPT = 1024


_ABSENT = "absent"


def absent_group(rank: int, size: int) -> str:
    """The name of a process group that does not exist, for tensors on the meta device: nothing can be sent in it.

    Args:
        rank: of the one who looks.
        size: number of ranks.

    Returns:
        A name that :func:`group_size` and :func:`group_rank` know.
    """
    return f"{_ABSENT} {rank} {size}"


def group_size(name: str) -> int:
    """Number of ranks in the named process group."""
    return int(name.split()[2]) if name.startswith(_ABSENT) else _group(name).size()


def group_rank(name: str) -> int:
    """This rank's number in the named process group."""
    return int(name.split()[1]) if name.startswith(_ABSENT) else _group(name).rank()


def group_ranks(name: str) -> list[int]:
    """The ranks of the world that are in the named process group, by their numbers in it."""
    return dist.get_process_group_ranks(_group(name))


def agree(signature: tuple[tuple[str, Hashable], ...], *names: str, every_call: bool = True, error: str = "") -> None:
    """Compare a call's signature with that of all ranks, and refuse on all of them if one differs.

    A rank that refuses its own arguments comes here with its error, so that the others do not wait for it; where it
    would find nobody, it returns.

    Args:
        signature: pairs of a name and a value whose repr is the same on every rank.
        *names: the groups of the mesh's axes, innermost first; empty names are skipped.
        every_call: compare a digest at every call, on CPU tensors. Otherwise, because it stalls a device, only at the
            first call with a signature; ranks of one program see the same ones in the same order.
        error: why this rank cannot make the call at all.

    Raises:
        ValueError: on every rank, naming what differs and where; with an attribute ``met``, since all ranks know.
    """
    groups = [group for group in map(_group, filter(None, names)) if group.size() > 1]
    if not groups or dist.get_backend(groups[0]) == "fake":
        return
    known = [_agreed.get(group, {}) for group in groups]
    if every_call:
        if _same_digest((error, signature), groups):
            return
    elif all(known) if error and not signature else all(signature in seen for seen in known):
        return
    everyone = {dist.get_rank(): (error, signature)}
    for group in groups:
        heard: list[dict] = [{} for _ in range(group.size())]
        dist.all_gather_object(heard, everyone, group=group)
        everyone = {rank: theirs for part in heard for rank, theirs in part.items()}
    try:
        _refuse_differences(everyone)
    except ValueError as error:
        error.met = True  # pyrefly: ignore[missing-attribute]
        raise
    for group in groups:
        seen = _agreed.setdefault(group, {})
        seen[signature] = None
        if len(seen) > _KEPT:  # every packing of documents is a signature of its own
            del seen[next(iter(seen))]


@torch.library.custom_op(
    "wallfacer_dt::agree",
    mutates_args=(),
    schema="(Tensor q, str[] names, str[] values, str team, str ring, str ulysses) -> ()",
)
def _agree_op(q: Tensor, names: Sequence[str], values: Sequence[str], team: str, ring: str, ulysses: str) -> None:
    """:func:`agree` as an operator, which generated code can call."""
    agree(tuple(zip(names, values, strict=True)), team, ring, ulysses, every_call=q.device.type == "cpu")


@_agree_op.register_fake
def _agree_fake(q: Tensor, names: Sequence[str], values: Sequence[str], team: str, ring: str, ulysses: str) -> None:
    pass


# It returns nothing, and must not be dropped for that.
torch.fx.node.has_side_effect(torch.ops.wallfacer_dt.agree.default)


def _same_digest(what: object, groups: list[dist.ProcessGroup]) -> bool:
    """Whether all ranks of the mesh have the same; one small all-gather per axis."""
    with outside_modes():
        digest = torch.tensor([zlib.crc32(repr(what).encode())])
        for group in groups:
            heard = [torch.empty_like(digest) for _ in range(group.size())]
            dist.all_gather(heard, digest, group=group)
            digest = torch.cat(heard)
        return bool((digest == digest[0]).all())


def _refuse_differences(everyone: dict[int, tuple[str, tuple[tuple[str, Hashable], ...]]]) -> None:
    refusing = {rank: error for rank, (error, _) in sorted(everyone.items()) if error}
    if refusing:
        rank = min(refusing)
        raise ValueError(f"rank {rank} of the mesh cannot make this call: {refusing[rank]}")
    signatures = {rank: signature for rank, (_, signature) in sorted(everyone.items())}
    for position, (what, _) in enumerate(next(iter(signatures.values()))):
        values = {rank: signature[position][1] for rank, signature in signatures.items()}
        if len(set(values.values())) > 1:
            listing = ", ".join(f"rank {rank}: {value}" for rank, value in values.items())
            raise ValueError(f"{what} must be the same on every rank of the mesh, got {listing}")


def _group(name: str) -> dist.ProcessGroup:
    # torch 2.13 names a type of its own for group names, 2.11 does not.
    return _resolve_process_group(name)  # pyrefly: ignore[bad-argument-type]
