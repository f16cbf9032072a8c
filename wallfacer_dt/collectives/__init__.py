"""Asynchronous, traceable collectives on flat buffers, and the packing of tensors into such buffers.

The only package that calls torch's functional collectives. Every operation returns a buffer whose contents may
be read only after :func:`wait`; a wait that takes longer than its process group's timeout raises there.
"""

from wallfacer_dt.collectives.functional import all_gather, all_to_all, broadcast, exchange, permute, wait
from wallfacer_dt.collectives.groups import absent_group, group_rank, group_ranks, group_size
from wallfacer_dt.collectives.send_buffer import Layout, layout, layout_of, pack

__all__ = [
    "Layout",
    "absent_group",
    "all_gather",
    "all_to_all",
    "broadcast",
    "exchange",
    "group_rank",
    "group_ranks",
    "group_size",
    "layout",
    "layout_of",
    "pack",
    "permute",
    "wait",
]
