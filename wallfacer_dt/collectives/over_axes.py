"""Transfers among all ranks of a mesh, one axis after the other; waited for at once.

Groups are named from the outermost axis to the innermost, empty where there is no such axis. Ranks are counted in that
order, the innermost axis running fastest.
"""

from collections.abc import Sequence

from torch import Tensor

from wallfacer_dt.collectives.functional import all_gather, all_to_all, wait
from wallfacer_dt.collectives.groups import group_size


def gathered(flat: Tensor, groups: Sequence[str], what: str) -> Tensor:
    """Every rank's buffer (n,): (P * n,), by rank. ``what`` that is, in words."""
    for group in reversed(_longer_than_one(groups)):
        flat = wait(all_gather(flat, group), f"all_gather of {what}", group)
    return flat


def summed(parts: Tensor, groups: Sequence[str], what: str) -> Tensor:
    """From what every rank has for every rank, (P, ...) by rank, the sum over ranks of what they have for this one."""
    shape = parts.shape[1:]
    for group in _longer_than_one(groups):
        size = group_size(group)
        splits = [parts.numel() // size] * size
        pending = all_to_all(parts.contiguous().view(-1), splits, splits, group)
        parts = wait(pending, f"all_to_all of {what}", group).view(size, -1, *shape).sum(0)
    return parts.view(shape)


def _longer_than_one(groups: Sequence[str]) -> list[str]:
    return [group for group in groups if group and group_size(group) > 1]
