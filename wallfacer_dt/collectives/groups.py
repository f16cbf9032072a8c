"""Process groups by name."""

import torch
import torch.distributed as dist

# Private; run on torch 2.11.0, 2.13.0, 2.14.1 and 2.15.0.
from torch.distributed.distributed_c10d import _resolve_process_group

_ABSENT = "absent"


def absent_group(rank: int, size: int) -> str:
    """The name of a process group that does not exist, for tensors on the meta device, with a size and this rank."""
    return f"{_ABSENT} {rank} {size}"


def group_size(name: str) -> int:
    """Number of ranks in the named process group."""
    return int(name.split()[2]) if name.startswith(_ABSENT) else _group(name).size()


def group_rank(name: str) -> int:
    """This rank's number in the named process group."""
    return int(name.split()[1]) if name.startswith(_ABSENT) else _group(name).rank()


def is_sent_by(name: str, device: torch.device, backend: str) -> bool:
    """Whether a backend sends tensors of a device in the named process group."""
    return f"{device.type}:{backend}" in dist.get_backend_config(_group(name)).split(",")


def group_ranks(name: str) -> tuple[int, ...]:
    """The ranks of the world that are in the named process group, by their numbers in it."""
    return tuple(dist.get_process_group_ranks(_group(name)))


def _group(name: str) -> dist.ProcessGroup:
    # torch 2.13 names a type of its own for group names, 2.11 does not.
    return _resolve_process_group(name)  # pyrefly: ignore[bad-argument-type]
