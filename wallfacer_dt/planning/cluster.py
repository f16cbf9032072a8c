"""What a plan must know of the machines: nodes, links between ranks on two levels, memory, and rates of kernels."""

import math
from dataclasses import asdict, dataclass
from numbers import Real
from typing import Any

from wallfacer_dt.layout import check_length
from wallfacer_dt.reading import make

_LONGEST = 100  # name of a kernel
_MOST_RANKS = 10**6 - 1  # as many as a cluster by name has at most


def check_number(value: float, what: str, *, zero: bool = False) -> None:
    """Refuse (TypeError, ValueError) what is no finite number above 0, or from 0 on."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{what} must be a number, got {value!r}")
    if not (0 < value < math.inf or (zero and value == 0)):
        raise ValueError(f"{what} must be {'at least 0' if zero else 'above 0'} and finite, got {value}")


def check_kind(value: object, kind: type, what: str) -> None:
    """Refuse (TypeError) what is of another type."""
    if not isinstance(value, kind):
        raise TypeError(f"{what} must be a {kind.__name__}, got {value!r}")


class PlanningError(ValueError):
    """There is no plan; all ranks that planned together have it.

    Args:
        message: why.
        about: name of what would have to be another.
    """

    def __init__(self, message: str, about: str) -> None:
        super().__init__(message, about)  # both, so that it can be pickled
        self.about = about

    def __str__(self) -> str:
        return self.args[0]


@dataclass(frozen=True, slots=True)
class Link:
    """A link, by the alpha-beta model: a message of n bytes takes ``latency + n / bandwidth``.

    Attributes:
        bandwidth: bytes per second, in one direction.
        latency: seconds.
    """

    bandwidth: float
    latency: float = 0.0

    def __post_init__(self) -> None:
        """Refuse (TypeError, ValueError) what is no link."""
        check_number(self.bandwidth, "a link's bandwidth")
        check_number(self.latency, "a link's latency", zero=True)


@dataclass(frozen=True, slots=True)
class Kernels:
    """What one rank computes, all ranks being at it.

    The defaults are an H100's in 16 bits: of torch's flash, measured with heads of 128, and else round numbers.

    Attributes:
        forward: of attention in blocks of many queries, floating point operations per second: 2 for every query, key
            and element of a head's key or value.
        backward: likewise of attention's backward, 6 of a key and 4 of a value.
        linear: of matrix products.
        overhead: seconds that a kernel call takes beyond them.
        merge: bytes per second at which partial results are read and written, and all that is elementwise.
        copy: seconds that a rank's processor is busy with a byte that it sends or receives; 0 where others do that.
        half_rows: of how many queries a block has half of these rates (Hockney's n1/2).
        attention: the kernel of attention that they are of, by name; it is what a plan's styles take.
        launch: seconds of the host for every operation of attention or METP; 0 where it is not what runs ahead.
        takes_segments: the kernel computes all segments of one window in a call, as those with cumulative lengths do;
            otherwise a call for each tile.
    """

    forward: float = 357e12
    backward: float = 322e12
    linear: float = 666e12
    overhead: float = 20e-6
    merge: float = 2.5e12
    copy: float = 0.0
    half_rows: float = 0.0
    attention: str = "auto"
    launch: float = 70e-6
    takes_segments: bool = True

    def __post_init__(self) -> None:
        """Refuse (TypeError, ValueError) what are no rates, or of no kernel."""
        if not isinstance(self.attention, str) or not 1 <= len(self.attention) <= _LONGEST:
            raise ValueError(
                f"kernels: attention must be a name of at most {_LONGEST} letters, got {self.attention!r:.80}"
            )
        check_kind(self.takes_segments, bool, "kernels: takes_segments")
        for name, value in asdict(self).items():
            if name not in ("attention", "takes_segments"):
                check_number(value, f"kernels: {name}", zero=name not in ("forward", "backward", "linear", "merge"))

    def in_blocks(self, queries: int) -> tuple[float, float]:
        """Rates of attention and of its backward in blocks of so many queries."""
        slower = 1 + self.half_rows / queries
        return self.forward / slower, self.backward / slower


@dataclass(frozen=True, slots=True)
class Cluster:
    """Ranks on nodes.

    Attributes:
        ranks: P, all of which share a sequence; rank r is on node r // ranks_per_node.
        ranks_per_node: how many share a node.
        intra: into one rank, from others of its node.
        inter: into one node, from other nodes; its ranks share it.
        nics: over how many interfaces a node's link is spread: one rank gets at most bandwidth / nics.
        memory: bytes of one rank, or None for as much as is needed.
        kernels: rates.
        striped_gathers: whether what a gather brings into a node comes over the interfaces of all its ranks there, as
            by NCCL's rings, or over one, as by gloo's.
        device_type: of its ranks, of which the code of a plan makes its mesh.
    """

    ranks: int
    ranks_per_node: int
    intra: Link
    inter: Link
    nics: int = 1
    memory: int | None = None
    kernels: Kernels = Kernels()
    striped_gathers: bool = True
    device_type: str = "cuda"

    def __post_init__(self) -> None:
        """Refuse (TypeError, ValueError) what is no cluster."""
        for name in ("ranks", "ranks_per_node", "nics"):
            check_length(getattr(self, name), name)
        for name in ("ranks", "nics"):
            if getattr(self, name) > _MOST_RANKS:
                raise ValueError(f"{name} must be at most {_MOST_RANKS}, got {getattr(self, name)}")
        kinds = {"intra": Link, "inter": Link, "kernels": Kernels, "striped_gathers": bool, "device_type": str}
        for name, kind in kinds.items():
            check_kind(getattr(self, name), kind, name)
        if self.memory is not None:
            check_number(self.memory, "memory")
            object.__setattr__(self, "memory", math.ceil(self.memory))  # 80e9 is a number of bytes, too
        if self.ranks > self.ranks_per_node and self.ranks % self.ranks_per_node:
            raise ValueError(f"ranks_per_node must divide ranks, got {self.ranks_per_node} and {self.ranks}")

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return -(-self.ranks // self.ranks_per_node)

    def as_json(self) -> dict[str, Any]:
        """For a file; :meth:`from_json` reads it."""
        return asdict(self)

    @classmethod
    def from_json(cls, given: dict[str, Any]) -> "Cluster":
        """The cluster that :meth:`as_json` wrote, or a refusal (ValueError)."""
        return make(cls, given)
