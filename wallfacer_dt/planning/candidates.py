"""Every way the package has to share a sequence among ranks, as data."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, get_args

import numpy as np

from wallfacer_dt.algorithms.schedule import check_schedule
from wallfacer_dt.algorithms.volume import check_rotate
from wallfacer_dt.layout import BY_DOCUMENT, ORDERS, check_length
from wallfacer_dt.mesh import PLACEMENTS, Coordinate, Placement, placed_ranks
from wallfacer_dt.planning.cluster import Cluster
from wallfacer_dt.planning.model import ModelShape, SequenceShape
from wallfacer_dt.planning.only import ANY, Only, has

FEED_FORWARDS = ("plain", "metp")
PROJECTIONS = ("plain", "metp")
CHECKPOINTS = ("none", "attention", "full")


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way.

    Attributes:
        ring: size of axis ``cp_ring``.
        team: size of axis ``cp_team``.
        ulysses: size of axis ``cp_ulysses``.
        placement: which axis takes neighbouring ranks.
        schedule: ``"2d"``, ``"rings"`` or ``"published"``.
        rotate: which side moves in the backward, ``"kv"`` or ``"q"``.
        rotate_forward: which side moves in the forward.
        order: token order.
        feed_forward: ``"plain"`` (weights sharded by FSDP over all ranks) or ``"metp"``.
        projections: attention's, ``"plain"`` (FSDP's as well) or ``"metp"`` (by heads; without Ulysses).
        checkpoint: what of a layer is computed again: nothing (``"none"``), everything but attention
            (``"attention"``, :func:`wallfacer_dt.checkpoint.save_attention`), or all (``"full"``).
    """

    ring: int
    team: int = 1
    ulysses: int = 1
    placement: Placement = "team_in_node"
    schedule: str = "2d"
    rotate: str = "kv"
    rotate_forward: str = "kv"
    order: str = "contiguous"
    feed_forward: str = "plain"
    projections: str = "plain"
    checkpoint: str = "none"

    def __post_init__(self) -> None:
        """Refuse (TypeError, ValueError) what the package does not have."""
        known = {
            "placement": PLACEMENTS, "rotate": ("kv", "q"), "rotate_forward": ("kv", "q"),
            "order": ORDERS, "feed_forward": FEED_FORWARDS,
            "projections": PROJECTIONS, "checkpoint": CHECKPOINTS,
        }  # fmt: skip
        for name, values in known.items():
            if getattr(self, name) not in values:
                raise ValueError(f"{name} must be one of {values}, got {getattr(self, name)!r}")
        for name in ("ring", "team", "ulysses"):
            check_length(getattr(self, name), name)
        if self.projections == "metp" and self.ulysses > 1:
            raise ValueError(
                f"projections='metp' goes by heads already: ulysses must be 1, got {self.ulysses}; or say 'plain'"
            )
        check_schedule(self.schedule, self.ring, self.team)
        rotate = "q" if self.schedule == "published" else self.rotate
        check_rotate(rotate, self.rotate_forward, self.schedule)

    @property
    def size(self) -> int:
        """P."""
        return self.ring * self.team * self.ulysses

    @property
    def axes(self) -> tuple[int, int, int]:
        """Sizes of the axes, outermost first."""
        return self.ulysses, self.ring, self.team

    @property
    def layers(self) -> dict[str, Any]:
        """What says of layers what they are, by name."""
        return {name: getattr(self, name) for name in ("feed_forward", "projections", "checkpoint")}

    @property
    def hop(self) -> int:
        """How many ranks' shards travel together in a hop, before heads are split."""
        return self.team if self.schedule == "published" else 1

    @property
    def rotates(self) -> str:
        """Which sides move, in words."""
        same = self.rotate == self.rotate_forward
        return f"rotates {self.rotate}" if same else f"rotates {self.rotate_forward}, backward {self.rotate}"

    def place(self, index: int) -> Coordinate:
        """The coordinate of a sequence index."""
        inner = self.ring * self.team
        return Coordinate(self.ring, self.team, *divmod(index % inner, self.team), self.ulysses, index // inner)

    def __str__(self) -> str:
        sizes = {"ulysses": self.ulysses, "ring": self.ring, "team": self.team}
        named = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one rank"
        parts = [named]
        if sum(size > 1 for size in sizes.values()) > 1:
            parts.append(self.placement.replace("_", " "))
        if self.ring * self.team > 1:
            parts += [self.schedule] * (self.team > 1) + [self.rotates]
        parts += [self.order.replace("_", "-")] * (self.order != "contiguous")
        parts += ["METP"] * (self.feed_forward == "metp")
        parts += ["METP's attention"] * (self.projections == "metp")
        parts += [f"checkpoint {self.checkpoint}"] * (self.checkpoint != "none")
        return ", ".join(parts)


def attentions(model: ModelShape, sequence: SequenceShape, cluster: Cluster, asked: Only = ANY) -> Iterator[Candidate]:
    """Every mesh, placement, schedule and rotations of the ranks that attention can have; none twice.

    Ulysses takes at most as many ranks as there are query heads. Under a causal mask tokens are in ``head_tail`` order,
    which balances it; with a window or documents also contiguous ones, whose hops these can spare; with documents also
    in ``document_head_tail`` order, which balances these. Others than those asked for are left out; where a placement
    or what rotates makes no difference, it is as asked for.
    """
    orders = ["head_tail"] if sequence.is_causal else ["contiguous"]
    if sequence.is_causal and sequence.mask.spares_hops:
        orders.append("contiguous")
    if sequence.documents:
        orders.append(BY_DOCUMENT)
    wanted = dict(asked.attention)
    for ulysses, ring, team in _sizes(cluster.ranks):
        if ulysses > model.heads:
            continue
        first = Candidate(ring, team, ulysses)
        for placement, spreads in _placements(first, cluster, wanted.get("placement")):
            for order in orders:
                for schedule, rotate, rotate_forward in _ways(ring, team, spreads, wanted):
                    one = replace(
                        first,
                        placement=placement,
                        schedule=schedule,
                        rotate=rotate,
                        rotate_forward=rotate_forward,
                        order=order,
                    )
                    if has(one, asked.attention):
                        yield one


def node_of(candidate: Candidate, ranks_per_node: int) -> np.ndarray:
    """The node of every sequence index."""
    ranks = placed_ranks(candidate.ring, candidate.team, ulysses=candidate.ulysses, placement=candidate.placement)
    return ranks.flatten().numpy() // ranks_per_node


def as_usual(candidate: Candidate, cluster: Cluster) -> Candidate:
    """The same, called as where nothing is asked for."""
    nodes = node_of(candidate, cluster.ranks_per_node)
    for placement, _ in _placements(candidate, cluster, None):
        one = replace(candidate, placement=placement)
        if (node_of(one, cluster.ranks_per_node) == nodes).all():
            candidate = one
    return candidate if candidate.ring * candidate.team > 1 else replace(candidate, rotate="kv", rotate_forward="kv")


def with_layers(candidate: Candidate, model: ModelShape, asked: Only = ANY) -> Iterator[Candidate]:
    """The same attention in layers of every kind: METP's on several ranks, its attention where there is no Ulysses.

    METP's feed-forward has no experts, its attention no latents, and values as wide as keys. Without a feed-forward
    attention alone is planned, and nothing is METP's. Others than those asked for are left out.
    """
    may_be_metp = model.ffn and candidate.size > 1
    feed_forwards = FEED_FORWARDS if may_be_metp and not model.experts else FEED_FORWARDS[:1]
    has_two = model.kv_rank or model.value_dim is not None
    projections = PROJECTIONS if may_be_metp and candidate.ulysses == 1 and not has_two else PROJECTIONS[:1]
    for feed_forward, projected, checkpoint in product(feed_forwards, projections, CHECKPOINTS):
        one = replace(candidate, feed_forward=feed_forward, projections=projected, checkpoint=checkpoint)
        if has(one, asked.layers):
            yield one


def _sizes(ranks: int) -> Iterator[tuple[int, int, int]]:
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    for ulysses in divisors:
        for team in divisors:
            if ranks % (ulysses * team) == 0:
                yield ulysses, ranks // (ulysses * team), team


def _placements(candidate: Candidate, cluster: Cluster, wanted: str | int | None) -> list[tuple[Placement, bool]]:
    """The placements that put ranks on different nodes, of those that do not the one wanted or else the first; and
    whether they put a team on several.
    """
    differ: dict[bytes, tuple[Placement, bool]] = {}
    for placement in sorted(get_args(Placement), key=lambda one: one != wanted):
        nodes = node_of(replace(candidate, placement=placement), cluster.ranks_per_node)
        teams = nodes.reshape(-1, candidate.team)
        differ.setdefault(nodes.tobytes(), (placement, bool((teams != teams[:, :1]).any())))
    return list(differ.values())


def _ways(ring: int, team: int, spreads: bool, wanted: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Schedules with the rotations of their backward and forward; two rings only for teams on several nodes.

    Where nothing rotates it is what is wanted, if that can be.
    """
    if ring == team == 1:
        rotate, forward = ("q" if wanted.get(name) == "q" else "kv" for name in ("rotate", "rotate_forward"))
        return [("2d", rotate, forward)]
    published = [("published", "q", "kv")] if team > 1 and ring > 1 and ring % team == 0 else []
    names = ["2d"] + ["rings"] * (team > 1 and spreads)
    return [(name, *rotations) for name in names for rotations in product(("kv", "q"), ("kv", "q"))] + published
