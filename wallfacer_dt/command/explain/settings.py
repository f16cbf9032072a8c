"""What is asked: one attention call on one mesh, and how its ranks are numbered and stand in nodes."""

from dataclasses import dataclass
from functools import lru_cache, partial

import torch

from wallfacer_dt.algorithms.masks import Mask
from wallfacer_dt.algorithms.schedule import check_schedule
from wallfacer_dt.algorithms.sequences import Sequences
from wallfacer_dt.algorithms.steps import Side
from wallfacer_dt.algorithms.volume import check_rotate, resolve_rotations
from wallfacer_dt.command.options import OptionError, check_least, naming
from wallfacer_dt.layout import check_order
from wallfacer_dt.mesh import PLACEMENTS, Coordinate, placed_ranks
from wallfacer_dt.planning.model import MOST_HEADS

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
MOST_RANKS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One call of attention, forward or backward.

    Attributes:
        ring: R, ranks in a ring.
        team: C, ranks in a team.
        ulysses: ranks that split the heads.
        schedule: ``"2d"``, ``"rings"`` or ``"published"``.
        rotate: which side moves in the backward; ``"auto"`` for the fewest bytes.
        rotate_forward: the same for the forward.
        order: token order, ``"contiguous"`` or ``"head_tail"``.
        causal: a query sees the keys up to its own position.
        window: how many tokens back, and without ``causal`` ahead, a query sees; None for any.
        placement: which axis takes neighbouring ranks.
        ranks_per_node: of one node; the last may have fewer.
        length: N, tokens in the sequence.
        heads: query heads.
        kv_heads: key and value heads.
        head_dim: H.
        batch: B.
        dtype: of q, k and v.
        backward: the backward instead of the forward.
    """

    ring: int
    team: int = 1
    ulysses: int = 1
    schedule: str = "2d"
    rotate: str = "auto"
    rotate_forward: str = "auto"
    order: str = "contiguous"
    causal: bool = False
    window: int | None = None
    placement: str = "team_in_node"
    ranks_per_node: int = 4
    length: int = 32
    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 64
    batch: int = 1
    dtype: str = "bfloat16"
    backward: bool = False

    def check(self) -> None:
        """Refuse (OptionError) what does not exist or go together, naming the option."""
        sizes = ("ring", "team", "ulysses", "ranks_per_node", "heads", "kv_heads", "head_dim", "batch")
        for name in sizes:
            check_least(f"--{name.replace('_', '-')}", getattr(self, name))
        check_least("--seq", self.length)
        if self.window is not None:
            check_least("--window", self.window, 0)
        for option, value, known in (("placement", self.placement, PLACEMENTS), ("dtype", self.dtype, DTYPES)):
            if value not in known:
                raise OptionError(f"--{option} must be one of {tuple(known)}, got {value!r}")
        with naming("--order"):
            check_order(self.order)
        if self.order not in ("contiguous", "head_tail"):
            raise OptionError(f"--order must be contiguous or head_tail, as there are no documents, got {self.order!r}")
        self._check_together()

    def _check_together(self) -> None:
        if self.ranks > MOST_RANKS:
            raise OptionError(
                f"--ulysses {self.ulysses} x --ring {self.ring} x --team {self.team} are {self.ranks} ranks, of which "
                f"at most {MOST_RANKS} can be shown"
            )
        if self.heads > MOST_HEADS:
            raise OptionError(f"--heads must be at most {MOST_HEADS}, got {self.heads}")
        if self.heads % self.kv_heads:
            raise OptionError(f"--heads must be a multiple of --kv-heads {self.kv_heads}, got {self.heads}")
        if self.heads < self.ulysses:
            raise OptionError(f"--ulysses {self.ulysses} splits query heads, of which there are only {self.heads}")
        with naming("--schedule"):
            check_schedule(self.schedule, self.ring, self.team)
        with naming("--rotate"):
            check_rotate(self.rotate, "auto", self.schedule)
        with naming("--rotate-forward"):
            check_rotate("auto", self.rotate_forward, self.schedule)

    @property
    def ranks(self) -> int:
        """P, the number of ranks."""
        return self.ulysses * self.ring * self.team

    @property
    def sequences(self) -> Sequences:
        """What is attended, and who holds it."""
        ahead = 0 if self.causal else self.window
        return Sequences(self.length, self.length, self.order, Mask(self.window, ahead))

    @property
    def rotation(self) -> str:
        """``"kv"`` or ``"q"``: the side that moves."""
        forward, backward = resolve_rotations(
            self.rotate, self.rotate_forward, self.schedule, self.ring, self.team, ulysses=self.ulysses,
            heads=self.heads, kv_heads=self.kv_heads, head_dim=self.head_dim, value_dim=self.head_dim, shared_dim=0,
            lengths=(1, 1), dtype=DTYPES[self.dtype],
        )  # fmt: skip
        return backward if self.backward else forward

    @property
    def resident(self) -> Side:
        """The side that is gathered in the team and stays."""
        return "kv" if self.rotation == "q" else "q"

    def rank(self, ulysses_rank: int, ring_rank: int, team_rank: int) -> int:
        """The global rank at a coordinate, as ``context_mesh`` numbers them."""
        return _placed(self.ring, self.team, self.ulysses, self.placement)[ulysses_rank][ring_rank][team_rank]

    def places(self) -> dict[int, Coordinate]:
        """By global rank, its coordinate."""
        place = partial(Coordinate, self.ring, self.team, ulysses=self.ulysses)
        found = {
            self.rank(u, r, m): place(ring_rank=r, team_rank=m, ulysses_rank=u)
            for u in range(self.ulysses)
            for r in range(self.ring)
            for m in range(self.team)
        }
        return dict(sorted(found.items()))

    def node(self, rank: int) -> int:
        """The node of a global rank."""
        return rank // self.ranks_per_node


@lru_cache(maxsize=8)
def _placed(ring: int, team: int, ulysses: int, placement: str) -> list[list[list[int]]]:
    """Global ranks by (ulysses, ring, team)."""
    return placed_ranks(ring, team, ulysses=ulysses, placement=placement).tolist()
