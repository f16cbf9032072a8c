"""Who takes part: every mesh and schedule by name, and who could not."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from recipes.benchmarks.cluster.cases import Nodes
from wallfacer_dt.mesh import Placement

Kind = Literal["context", "gather", "whole"]

FLOOR = "one process, all cores"
RING = "ring"
HEAD_TAIL_RING = "ring, head-tail"
GATHER = "all-gather of keys and values"
ULYSSES = "ulysses"
PUBLISHED = "WallFacer as published"
USP = "USP: ulysses in the node x ring across"
PLANNED = "planned"
PREDICTED = "predicted"


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to compute the same attention.

    Attributes:
        name: in tables.
        ulysses: ranks that split the heads.
        ring: ranks in a ring.
        team: ranks in a team.
        placement: which axis takes neighbouring ranks, see ``context_mesh``.
        schedule: ``"2d"`` or ``"published"``.
        rotate: what moves round the ring in the backward.
        rotate_forward: the same in the forward.
        order: of tokens.
        kind: ``"context"`` for ``context_parallel_attention``, ``"gather"`` for keys and values gathered on every rank,
            ``"whole"`` for one process while others wait.
    """

    name: str
    ulysses: int = 1
    ring: int = 1
    team: int = 1
    placement: Placement = "team_in_node"
    schedule: str = "2d"
    rotate: str = "auto"
    rotate_forward: str = "auto"
    order: str = "contiguous"
    kind: Kind = "context"

    @property
    def what(self) -> str:
        """Its mesh and schedule in words."""
        parts = f"{self.ulysses} x {self.ring} x {self.team}", self.placement, self.schedule
        return ", ".join((*parts, f"rotates {self.rotate_forward}, backward {self.rotate}"))


def contenders(cluster: Nodes, heads: int, *, is_causal: bool) -> list[Contender]:
    """All that fit a cluster and a number of query heads, the floor first.

    Under a mask tokens are in head-tail order for all but the plain ring.
    """
    order = "head_tail" if is_causal else "contiguous"
    every = [Contender(FLOOR, kind="whole"), Contender(RING, ring=cluster.ranks)]
    if is_causal:
        every.append(Contender(HEAD_TAIL_RING, ring=cluster.ranks, order=order))
    shared = [
        *_teams(cluster.ranks),
        *_with_heads(cluster, heads),
        Contender(GATHER, ring=cluster.ranks, kind="gather"),
    ]
    return [*every, *(replace(contender, order=order) for contender in shared)]


def _teams(ranks: int) -> Iterator[Contender]:
    for team in (2, 4):
        if ranks % team**2 == 0:
            name = f"{PUBLISHED}, C = {team}"
            yield Contender(name, ring=ranks // team, team=team, schedule="published")
    for team in (2, 4, 8, 16):
        if ranks % team == 0:
            yield Contender(f"2d, ring {ranks // team} x team {team}", ring=ranks // team, team=team)


def _with_heads(cluster: Nodes, heads: int) -> Iterator[Contender]:
    nodes, inside = cluster.nodes, cluster.per_node
    if heads >= cluster.ranks > 1:
        yield Contender(ULYSSES, ulysses=cluster.ranks)
    if min(nodes, inside) == 1:
        return
    if heads >= nodes:
        yield Contender(f"{ULYSSES} across nodes x ring in the node", ulysses=nodes, ring=inside)
        if inside % 2 == 0 and inside > 2:
            name = f"{ULYSSES} across nodes x 2d {inside // 2} x 2 in the node"
            yield Contender(name, ulysses=nodes, ring=inside // 2, team=2)
    if heads >= inside:
        yield Contender(USP, ulysses=inside, ring=nodes, placement="ulysses_in_node")


NOT_RUN = (
    (
        "`torch.distributed.tensor.experimental.context_parallel`",
        "torch 2.13.0",
        "NotImplementedError: Operator aten._scaled_dot_product_flash_attention_for_cpu_backward.default does not have "
        "a sharding strategy registered.",
    ),
    ("ring-flash-attn", "0.1.8", "at import: ModuleNotFoundError: No module named 'flash_attn'"),
    (
        "yunchang, `LongContextAttention(ring_impl_type='basic_pytorch')`",
        "0.6.4",
        "Could not run 'aten::_scaled_dot_product_flash_attention' with arguments from the 'CPU' backend.",
    ),
)
"""Name, version, and the error seen on CPU ranks with gloo."""
