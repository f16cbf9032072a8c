"""Who holds what and who sends what to whom, as frozen dataclasses, and as JSON.

Ranks are global ranks, positions those of the whole sequence; a pair (start, stop) leaves stop out.
"""

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

from wallfacer_dt.command.explain.settings import Settings

Pair = tuple[int, int]
Kind = Literal["heads", "gather", "move", "carry", "exchange", "tokens"]
"""Of a transfer: tokens for heads (Ulysses), all-gather in the team, a hop of a block or round the team, one of what is
computed for it, partial results to their owners in the team, heads for tokens."""


@dataclass(frozen=True, slots=True)
class Message:
    """What goes to one rank, or comes from it.

    Attributes:
        rank: the other.
        elements: how many numbers.
        bytes: of them.
    """

    rank: int
    elements: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """One collective as one rank sees it.

    Attributes:
        number: the same on all ranks that take part.
        kind: which collective.
        axis: of the mesh; ``"cp"`` for ring and team together.
        what: the tensors.
        group: which of the rank's groups of heads.
        block: as which the receiver knows what moves; -1 for a gradient that comes home; None where nothing hops.
        sends: by receiver. Nothing goes to oneself.
        receives: by sender.
    """

    number: int
    kind: Kind
    axis: str
    what: str
    group: int
    block: int | None
    sends: tuple[Message, ...]
    receives: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Attend:
    """A kernel's work: some rows of the side that stays against a block of the one that moves.

    Attributes:
        group: which of the rank's groups of heads.
        part: ``"local"`` rows or the ``"peer"`` of the team.
        stays: the ranks whose rows stay.
        block: the number of the rotating block.
        moves: the ranks whose rows that block holds.
        tiles: rows of queries x rows of keys of both as they are stored, and what is seen of them.
        pairs: how many (query, key) pairs are computed, per head and row of the batch.
        possible: how many there are of these rows and this block.
        kind: ``"attend"``.
    """

    group: int
    part: Literal["local", "peer"]
    stays: tuple[int, ...]
    block: int
    moves: tuple[int, ...]
    tiles: tuple[str, ...]
    pairs: int
    possible: int
    kind: Literal["attend"] = "attend"


@dataclass(frozen=True, slots=True)
class Communicate:
    """A transfer, by its number, is started or waited for."""

    kind: Literal["start", "wait"]
    transfer: int


Step = Communicate | Attend


@dataclass(frozen=True, slots=True)
class HeadGroup:
    """Query heads and key heads that are computed together."""

    q: Pair
    kv: Pair


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank: its place, what it holds, and its program.

    Attributes:
        rank: global rank.
        node: which it is in.
        ulysses_rank: position on ``cp_ulysses``.
        ring_rank: position on ``cp_ring``.
        team_rank: position on ``cp_team``.
        positions: of its tokens, as they are stored.
        heads: the groups of heads that it computes; an empty one is nothing to do.
        transfers: by number.
        steps: in program order.
        received: bytes.
        received_from_other_nodes: of these, by who hands it on: what an all-gather brings goes round.
    """

    rank: int
    node: int
    ulysses_rank: int
    ring_rank: int
    team_rank: int
    positions: tuple[Pair, ...]
    heads: tuple[HeadGroup, ...]
    transfers: tuple[Transfer, ...]
    steps: tuple[Step, ...]
    received: int
    received_from_other_nodes: int

    @property
    def attends(self) -> tuple[Attend, ...]:
        """Its work alone."""
        return tuple(step for step in self.steps if isinstance(step, Attend))

    def transfer_of(self, step: Communicate) -> Transfer:
        """What a step starts or waits for."""
        return next(transfer for transfer in self.transfers if transfer.number == step.transfer)


@dataclass(frozen=True, slots=True)
class Facts:
    """One call of attention, on all ranks.

    Attributes:
        settings: what was asked.
        stays: ``"q"`` or ``"kv"``, the side that is gathered in the team.
        moves: the other, which goes round the ring.
        ranks: ascending.
    """

    settings: Settings
    stays: str
    moves: str
    ranks: tuple[Rank, ...]


def as_json(facts: Facts) -> str:
    """The facts as one JSON document.

    Its keys are the attributes of :class:`Facts` and of what it is made of, tuples are lists, and ``version`` says
    which schema it is; within one nothing is renamed or taken away::

        version     1
        settings    ring, team, ulysses, schedule, rotate, rotate_forward, order, causal, window (null: none),
                    placement, ranks_per_node, length, heads, kv_heads, head_dim, batch, dtype, backward
        stays       "q" or "kv"
        moves       the other
        ranks[]     rank, node, ulysses_rank, ring_rank, team_rank, positions [[start, stop]], received and
                    received_from_other_nodes (bytes)
          heads[]       q [start, stop], kv [start, stop]
          transfers[]   number, kind, axis, what, group, block (or null), sends[] and receives[] of rank,
                        elements, bytes
          steps[]       kind "start" or "wait": transfer (a number); or kind "attend": group, part, stays[], block,
                        moves[], tiles[], pairs, possible

    Args:
        facts: the facts.

    Returns:
        The text.
    """
    document: dict[str, Any] = {"version": 1, **asdict(facts)}
    return json.dumps(document, indent=1)
