"""Counting what attention and METP receive, from the collectives that run, not from the schedules that ask for them."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

from wallfacer_dt.collectives.groups import group_rank, group_ranks
from wallfacer_dt.mesh import CONTEXT_AXES, RING_AXIS, context_groups
from wallfacer_dt.metp import BODIES as METP_BODIES
from wallfacer_dt.ops import BODIES

_BODIES = {**BODIES, **METP_BODIES}


@dataclass(slots=True)
class Received:
    """What this rank received.

    Attributes:
        calls: operators that ran.
        collectives: how often each (operation, axis) ran; the axis is "cp" where it is ring and team.
        received: bytes per (operation, axis).
        sources: bytes per rank (of the world) that they come from.
        via: bytes per rank that this one has them from: the same, but in an all-gather, which goes round, a neighbour.
    """

    calls: int = 0
    collectives: Counter[tuple[str, str]] = field(default_factory=Counter)
    received: Counter[tuple[str, str]] = field(default_factory=Counter)
    sources: Counter[int] = field(default_factory=Counter)
    via: Counter[int] = field(default_factory=Counter)

    @property
    def received_bytes(self) -> int:
        """Bytes received from other ranks, over all operations."""
        return self.received.total()


@dataclass(slots=True)
class Traffic:
    """What attention and METP received, forward and backward."""

    forward: Received = field(default_factory=Received)
    backward: Received = field(default_factory=Received)


@contextmanager
def count_collectives(mesh: DeviceMesh) -> Iterator[Traffic]:
    """Count the collectives of attention's and METP's operators in this block, on this rank.

    Works on real ranks and on fake tensors with a fake process group alike.

    Args:
        mesh: context mesh, or a mesh of one axis.

    Yields:
        The counts, which grow as operators run.
    """
    groups = context_groups(mesh, any_axis=RING_AXIS)
    names = dict(zip(groups.names, CONTEXT_AXES, strict=True))
    mode = _Counting(Traffic(), names)
    with mode:
        yield mode.traffic


class _Counting(TorchDispatchMode):
    def __init__(self, traffic: Traffic, axes: dict[str, str]) -> None:
        super().__init__()
        self.traffic, self.axes = traffic, axes
        self.current: Received | None = None

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let a compiler be, whose graphs call the operators as others do (Dynamo runs nothing under other modes)."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in _BODIES:
            backward = func._schema.name.endswith("_backward")
            self.current = self.traffic.backward if backward else self.traffic.forward
            self.current.calls += 1
            # The operator is opaque: its body runs under this mode instead.
            try:
                with self:
                    return _BODIES[func](*args, **(kwargs or {}))
            finally:
                self.current = None
        if func.namespace == "_c10d_functional" and self.current is not None:
            self._count(self.current, func, args)
        return func(*args, **(kwargs or {}))

    def _count(self, into: Received, func: Any, args: tuple) -> None:
        name = func._schema.name.partition("::")[2]
        if name == "wait_tensor":
            return
        buffer, group = args[0], args[-1]
        me, ranks = group_rank(group), group_ranks(group)
        if name == "all_gather_into_tensor":
            elements = dict.fromkeys(ranks, buffer.numel())
        elif name == "broadcast":
            elements = {ranks[args[1]]: buffer.numel()}
        elif name == "all_to_all_single":
            elements = dict(zip(ranks, args[1], strict=True))
        else:
            raise NotImplementedError(f"count_collectives does not know {name}")
        elements.pop(ranks[me], None)
        key = (name, self.axes.get(group, "cp"))
        into.collectives[key] += 1
        into.received[key] += sum(elements.values()) * buffer.itemsize
        sources = Counter({rank: n * buffer.itemsize for rank, n in elements.items() if n})
        into.sources.update(sources)
        round_the_group = name == "all_gather_into_tensor" and sources
        into.via.update({ranks[me - 1]: sources.total()} if round_the_group else sources)
