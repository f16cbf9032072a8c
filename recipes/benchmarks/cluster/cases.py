"""What is measured: machines, one attention on them, and the ways to share it."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from recipes.benchmarks.ways import H100
from wallfacer_dt import Kernels, ModelShape, SequenceShape
from wallfacer_dt.algorithms.volume import resolve_rotations
from wallfacer_dt.mesh import Placement
from wallfacer_dt.planning.candidates import Candidate

DTYPE = torch.bfloat16
_MOST_RANKS = 2**16
METP, METP_ATTENTION = "METP's feed-forward", "METP's attention"
"""Figures of cases, of the first without attention, of the second with its projections."""


@dataclass(frozen=True, slots=True)
class Machines:
    """Nodes and links; ranks are numbered node by node."""

    nodes: int
    per_node: int  # ranks of a node
    # Mbit/s, by node, in each direction: of its link to other nodes, or of each of its adapters.
    rates: tuple[float, ...]
    has_adapters: bool = False  # whether every rank has an adapter of its own
    inside: float | None = None  # Mbit/s of what a rank sends to its node's others, or receives; None: no limit
    latency: float = 0.0  # ms that a packet takes longer between nodes

    def __post_init__(self) -> None:
        """Refuse (ValueError) what are no machines."""
        are_some = 1 <= self.nodes == len(self.rates) and 1 <= self.ranks <= _MOST_RANKS and self.latency >= 0
        if not are_some or not min(self.rates) > 0 or not (self.inside is None or self.inside > 0):
            raise ValueError(f"nodes, ranks, a rate above 0 for each node, and a latency at least 0 are needed: {self}")

    @property
    def ranks(self) -> int:
        """All ranks."""
        return self.nodes * self.per_node

    @property
    def name(self) -> str:
        """In words."""
        low, high = min(self.rates), max(self.rates)
        rate = f"{low:g}" if low == high else f"{low:g} to {high:g}"
        if self.per_node == 1:
            return f"{self.nodes} ranks, {rate} Mbit/s"
        return f"{self.nodes} x {self.per_node} ranks, {rate} Mbit/s a {'rank' if self.has_adapters else 'node'}"


@dataclass(frozen=True, slots=True)
class Case:
    """One call of attention of batch 1, forward and backward."""

    machines: Machines
    heads: int  # of queries
    kv_heads: int  # of keys and values
    mask: str  # ``"full"``, ``"causal"`` or ``"window"`` (causal, a quarter of the sequence)
    # Of the time in which a rank's keys and values, of as many heads as queries, come into it over its share of a link,
    # to the forward of a block of its queries and these, which sets how fast devices are; of METP's weights, to the
    # products of its tokens with these.
    ratio: float
    head_dim: int = 64
    figure: str = ""  # of a paper, which this is of
    stands_for: int = 0  # so many tokens of a rank its tokens stand for; 0: 256 times as many as there are

    def __post_init__(self) -> None:
        """Refuse (ValueError) what is no attention."""
        if self.mask not in ("full", "causal", "window"):
            raise ValueError(f"mask must be full, causal or window, got {self.mask!r}")
        if not self.ratio > 0 or self.stands_for < 0 or min(self.heads, self.kv_heads, self.head_dim) < 1:
            raise ValueError("a ratio, heads and a head dim must be above 0, and stands_for at least 0")
        if self.tokens < 1:
            raise ValueError(f"{self.heads} heads, with a ratio of {self.ratio}, leave a rank no tokens")
        _ = self.model, self.sequence, self.kernels  # which refuse the rest

    @property
    def tokens(self) -> int:
        """Of a rank: as many as make queries of 64 KiB, or where computing takes long, of less; even."""
        return int(256 * min(1.0, (1 + self.ratio) / 4)) // self.heads * 2

    @property
    def name(self) -> str:
        """In words."""
        named = f"{self.figure}: " * bool(self.figure)
        if self.figure == METP:
            return f"{named}{self.machines.name}; {self.model.hidden} x {self.model.ffn}, ratio {self.ratio:.3g}"
        return f"{named}{self.machines.name}; {self.heads}/{self.kv_heads} heads, {self.mask}, ratio {self.ratio:.3g}"

    @property
    def model(self) -> ModelShape:
        """The attention; or with it METP's feed-forward, of two projections, which alone is then measured."""
        hidden = self.heads * self.head_dim
        ffn = 4 * hidden * (self.figure == METP)
        return ModelShape(hidden, self.heads, self.kv_heads, self.head_dim, ffn=ffn, gated=not ffn)

    @property
    def sequence(self) -> SequenceShape:
        """What it attends."""
        length = self.tokens * self.machines.ranks
        window = (length // 4, 0) if self.mask == "window" else None
        return SequenceShape(length, is_causal=self.mask != "full", window_size=window, dtype=DTYPE)

    @property
    def kernels(self) -> Kernels:
        """Of devices as fast as the ratio has it; what else there is takes as much of that as on an H100."""
        machines, longer = self.machines, self.stands_for / self.tokens if self.stands_for else 256
        share = min(machines.rates) * 1e6 / 8 / (1 if machines.has_adapters else machines.per_node)
        token = self.heads * self.head_dim
        block = 2 * self.tokens * token * DTYPE.itemsize / share / self.ratio
        slower = block / (4 * (longer * self.tokens) ** 2 * token / H100.forward)
        forward = 4 * self.tokens**2 * token / block
        return Kernels(
            forward, forward * H100.backward / H100.forward, self.ratio * share * self.tokens,
            overhead=H100.overhead * slower, merge=H100.merge / slower / longer, launch=0.0, takes_segments=False,
        )  # fmt: skip


RING = "ring"
PLAIN = "ring, keys and values rotate"
ULYSSES = "Ulysses"
HYBRID = "Ulysses across nodes, ring in the node"
USP = "USP (Ulysses in the node, ring across)"
PUBLISHED = "WallFacer as published"


def contenders(case: Case) -> dict[str, Candidate]:
    """The ways that have a name and fit, the ring first; of a paper's cases on 16 ranks and more, those it compares."""
    nodes, inside, ranks = case.machines.nodes, case.machines.per_node, case.machines.ranks
    if case.figure == METP:
        return {METP: Candidate(ranks, feed_forward="metp")}
    if case.figure == METP_ATTENTION:
        return {METP_ATTENTION: Candidate(ranks, projections="metp")}
    found: dict[str, Candidate] = {}

    def add(name: str, ulysses: int, ring: int, team: int, placement: Placement = "team_in_node", how: str = "2d"):
        forward, backward = resolve_rotations(
            "auto", "auto", how, ring, team, ulysses=ulysses, heads=case.heads, kv_heads=case.kv_heads,
            head_dim=case.head_dim, value_dim=case.head_dim, shared_dim=0, lengths=(1, 1), dtype=DTYPE,
        )  # fmt: skip
        order = "head_tail" if case.sequence.is_causal else "contiguous"
        found[name] = Candidate(ring, team, ulysses, placement, how, backward, forward, order)

    add(RING, 1, ranks, 1)
    if case.figure:  # as the papers have it
        found[PLAIN] = replace(found[RING], rotate="kv", rotate_forward="kv")
    for team in (2, 4):
        if ranks % team == 0 and (not case.figure or ranks < 16):
            add(f"2d, C = {team}", 1, ranks // team, team)
        if ranks % team**2 == 0:
            add(f"{PUBLISHED}, C = {team}", 1, ranks // team, team, how="published")
    if case.heads >= ranks:
        add(ULYSSES, ranks, 1, 1)
    if inside > 1 and case.heads >= inside:
        add(USP, inside, nodes, 1, "ulysses_in_node")
    if inside > 1 and case.heads >= nodes and not case.figure:
        add(HYBRID, nodes, inside, 1)
    return found


def cases() -> Iterator[Case]:
    """The cases that the planner is held to: links, heads, masks and ratios."""
    for machines in MACHINES:
        for heads in ((16, 16), (16, 4), (2, 2)):
            for mask, ratio in (("full", 3.0), ("full", 0.5), ("causal", 1.0)):
                yield Case(machines, *heads, mask, ratio)
        yield from (Case(machines, *others) for others in _OTHERS.get(machines, ()))
    yield from (Case(_ADAPTERS, *others) for others in _CROSSED)
    # Calls that would take less than half a second, and one on a flat network: what a message costs a host weighs half.
    for machines, others in _SLOWER.items():
        yield from (Case(_slower(machines), *some) for some in others)


def _slower(machines: Machines) -> Machines:
    """The same with links half as fast."""
    rates = tuple(rate / 2 for rate in machines.rates)
    return replace(machines, rates=rates, inside=machines.inside and machines.inside / 2)


def number_cases() -> Iterator[Case]:
    """What real kernels compute, short."""
    for machines in (MACHINES[0], MACHINES[3]):
        for heads in ((16, 4), (2, 2)):
            for mask in ("full", "causal", "window"):
                yield Case(machines, *heads, mask, 1.0)


MACHINES = (
    Machines(2, 4, (25.0,) * 2, has_adapters=True, inside=200.0),
    Machines(8, 1, (25.0,) * 8),
    Machines(2, 4, (100.0, 50.0), inside=200.0),
    Machines(3, 4, (100.0,) * 3, inside=200.0),
    Machines(16, 1, (25.0,) * 16),
    Machines(4, 4, (100.0,) * 4, inside=200.0),
)
_ADAPTERS = Machines(4, 4, (25.0,) * 4, has_adapters=True, inside=200.0)
_ON_16 = ((1, 1, "full", 3.0), (32, 8, "causal", 3.0))
_WINDOWS = ((4, 4, "window", 3.0), (4, 4, "window", 0.5))
_CROSSED = ((16, 4, "full", 1.0), (16, 4, "causal", 0.5), (2, 2, "full", 3.0))
_OTHERS = {MACHINES[3]: _CROSSED[:2], MACHINES[4]: _ON_16, MACHINES[5]: _ON_16}
_SLOWER = {
    MACHINES[0]: _WINDOWS, MACHINES[3]: _WINDOWS, MACHINES[4]: ((2, 2, "full", 3.0), (4, 4, "window", 1.0)),
    MACHINES[5]: ((4, 4, "window", 1.0),),
}  # fmt: skip
"""Cases by machines so that every mask meets every ratio, and windows more than one cluster."""
