"""Transfers among all ranks of a mesh, one axis after the other; waited for at once.

Groups are named from the outermost axis to the innermost, empty where there is no such axis. Ranks are counted in that
order, the innermost axis running fastest.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from wallfacer_dt.collectives.functional import all_gather, all_to_all, wait
from wallfacer_dt.collectives.groups import group_size
from wallfacer_dt.rows import padded


def gathered(flat: Tensor, groups: Sequence[str], what: str) -> Tensor:
    """Every rank's buffer (n,): (P * n,), by rank. ``what`` that is, in words."""
    for group in reversed(_longer_than_one(groups)):
        flat = wait(all_gather(flat, group), f"all_gather of {what}", group)
    return flat


def gathered_rows(x: Tensor, dim: int, lengths: Sequence[int], groups: Sequence[str], what: str) -> list[Tensor]:
    """Every rank's rows, along a dim, of which it has as many as ``lengths`` say by rank."""
    mine = padded(x, dim, max(lengths)).contiguous()
    everyone = gathered(mine.view(-1), groups, what).view(len(lengths), *mine.shape)
    return [rows.narrow(dim, 0, n) for rows, n in zip(everyone.unbind(0), lengths, strict=True)]


def summed_rows(
    parts: Sequence[Tensor], dim: int, length: int, groups: Sequence[str], what: str, dtype: torch.dtype
) -> Tensor:
    """From what every rank says of every rank's rows, by rank and along a dim, the sum of this one's, in ``dtype``."""
    most = max(part.shape[dim] for part in parts)
    rows = torch.stack([padded(part, dim, most).to(dtype) for part in parts])
    shape = rows.shape[1:]
    for group in _longer_than_one(groups):
        size = group_size(group)
        splits = [rows.numel() // size] * size
        pending = all_to_all(rows.contiguous().view(-1), splits, splits, group)
        rows = wait(pending, f"all_to_all of {what}", group).view(size, -1, *shape).sum(0)
    return rows.view(shape).narrow(dim, 0, length)


def _longer_than_one(groups: Sequence[str]) -> list[str]:
    return [group for group in groups if group and group_size(group) > 1]
