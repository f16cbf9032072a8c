"""Executing a schedule: a loop over its steps, and what each transfer packs and unpacks."""

from collections.abc import Sequence
from typing import ClassVar, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from wallfacer_dt.algorithms.arithmetic import SEQUENCE_DIM, Operand
from wallfacer_dt.algorithms.segments import Work
from wallfacer_dt.algorithms.steps import (
    CONTEXT,
    HOME,
    Attend,
    Carry,
    Exchange,
    Gather,
    Move,
    Part,
    Schedule,
    Start,
    Transfer,
    Wait,
)
from wallfacer_dt.collectives import (
    Field,
    all_gather,
    exchange,
    fields_of,
    pack,
    permute,
    unpack,
    wait,
)
from wallfacer_dt.mesh import RING_AXIS, TEAM_AXIS, Coordinate
from wallfacer_dt.rows import Members, joined


class Groups(NamedTuple):
    """Where a schedule runs: this rank's coordinate and its process groups by name.

    ``context`` and ``context_ranks`` (the rank in that group of every inner index) serve the published schedule.
    """

    place: Coordinate
    ulysses: str
    ring: str
    team: str
    context: str
    context_ranks: tuple[int, ...]

    def named(self, axis: str) -> str:
        """The name of the process group of an axis."""
        return {RING_AXIS: self.ring, TEAM_AXIS: self.team, CONTEXT: self.context}[axis]

    def rank(self, axis: str, number: int) -> int:
        """The rank, in an axis' process group, of a position on it."""
        return self.context_ranks[number] if axis == CONTEXT else number


class Arithmetic(Protocol):
    """What a schedule computes: on segments of queries and keys, with partial results that add up in some way.

    Attributes:
        gives_to_keys: whether something is computed for the keys, too, as a backward does.
    """

    gives_to_keys: ClassVar[bool]

    def attend(self, query: Operand, keys: Operand, work: Work) -> None:
        """Compute segments, and add what comes of them to the operands' partial results."""

    def nothing(self, operand: Operand) -> tuple[Tensor, ...]:
        """The partial result of an operand that has seen nothing."""

    def outgoing(self, partial: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
        """A partial result as it is sent to its owner, once; ``dtype`` is the inputs'."""

    def combine(self, partial: Sequence[Tensor], more: Sequence[Tensor]) -> None:
        """Add another partial result to one, in place."""


def execute(
    schedule: Schedule,
    arithmetic: Arithmetic,
    groups: Groups,
    resident: Operand,
    rotating: Operand,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Run a schedule on this rank's operands.

    Args:
        schedule: this rank's.
        arithmetic: what to compute, forward or backward.
        groups: the process groups, and this rank's coordinate.
        resident: own shard of the side that stays.
        rotating: own shard of the side that moves.

    Returns:
        What was computed for the own shard of the resident and of the rotating side: in the forward (out, lse) for
        queries and nothing for keys, gradients in the backward; in the accumulation dtype.
    """
    rows = [operand.data[0].shape[SEQUENCE_DIM] for operand in (resident, rotating)]
    padded_lengths = schedule.padded_lengths if schedule.resident == "q" else schedule.padded_lengths[::-1]
    padded = (
        _padded(operand, padded_length)
        for operand, padded_length in zip((resident, rotating), padded_lengths, strict=True)
    )
    run = _Run(schedule, arithmetic, groups, *padded)
    for step in schedule.steps:
        match step:
            case Start(transfer):
                run.start(transfer)
            case Wait(transfer):
                run.wait(transfer)
            case Attend(part, _, block, work):
                run.attend(part, block, work)
    results = run.results()
    return _cut(results[0], rows[0]), _cut(results[1], rows[1])


class _Run:
    """The operands of one execution while it is under way."""

    def __init__(
        self,
        schedule: Schedule,
        arithmetic: Arithmetic,
        groups: Groups,
        resident: Operand,
        rotating: Operand,
    ) -> None:
        self.schedule, self.arithmetic, self.groups = schedule, arithmetic, groups
        self.local = resident
        self.peers = Operand(())
        self.blocks = {0: rotating}
        self.home: tuple[Tensor, ...] = ()
        self.pending: dict[Transfer, tuple[Tensor, tuple[Field, ...]]] = {}

    def attend(self, part: Part, block: int, work: Work) -> None:
        """Attend a part of the resident side and a rotating block."""
        resident, rotating = self.local if part == "local" else self.peers, self.blocks[block]
        query, keys = (resident, rotating) if self.schedule.resident == "q" else (rotating, resident)
        self.arithmetic.attend(query, keys, work)

    def start(self, transfer: Transfer) -> None:
        """Start a transfer and remember its pending buffer with the fields of what it will bring."""
        match transfer:
            case Gather(side):
                data = (self.local if side == self.schedule.resident else self.blocks[0]).data
                pending = all_gather(pack(data), self.groups.team), fields_of(data)
            case Move(_, held, _, axis, to, source):
                operand = self.blocks[held]
                message = pack(operand.data) if operand.message is None else operand.message
                pending = self._permute(message, axis, to, source), fields_of(operand.data)
            case Carry(_, block, _, axis, to, source, _):
                partial = self._partial(self.blocks[block])
                pending = self._permute(pack(partial), axis, to, source), fields_of(partial)
            case Exchange():
                shares = self._shares(transfer)
                pending = exchange(joined([pack(x) for x in shares], 0), self.groups.team), fields_of(shares[0])
        self.pending[transfer] = pending

    def wait(self, transfer: Transfer) -> None:
        """Wait for a transfer and take up what it brought."""
        pending, fields = self.pending.pop(transfer)
        buffer = wait(pending)
        match transfer:
            case Gather(side) if side == self.schedule.resident:
                self.peers = Operand(self._assemble(buffer, fields, self.schedule.peers))
            case Gather():
                data = self._assemble(buffer, fields, self.schedule.everyone)
                self.blocks[0] = _padded(Operand(data), self.schedule.gathered)
            case Move(_, _, block, _, _, _):
                self._forget(block)
                self.blocks[block] = Operand(unpack(buffer, fields), message=buffer)
            case Carry(_, _, into) if into == HOME:
                self.home = unpack(buffer, fields)
            case Carry(_, _, into):
                self.arithmetic.combine(self._partial(self.blocks[into]), unpack(buffer, fields))
            case Exchange():
                mine = self._mine(transfer)
                for share in buffer.view(self.groups.place.team - 1, -1).unbind(0):
                    self.arithmetic.combine(mine, unpack(share, fields))

    def results(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """What was computed for the own shards of the resident and the rotating side."""
        both, queries_stay = self.arithmetic.gives_to_keys, self.schedule.resident == "q"
        own = self._partial(self.local) if both or queries_stay else ()
        if self.schedule.home == "exchange":
            return own, self.home
        return own, self._partial(self.blocks[0]) if both or not queries_stay else ()

    def _forget(self, arrived: int) -> None:
        """Let go of the blocks before one that has arrived, but for one's own, which what comes home is added to."""
        for block in list(self.blocks):
            if block < arrived and not (block == 0 and self.schedule.home == "block"):
                del self.blocks[block]

    def _permute(self, buffer: Tensor, axis: str, to: int, source: int) -> Tensor:
        rank = self.groups.rank
        return permute(buffer, rank(axis, to), rank(axis, source), self.groups.named(axis))

    def _assemble(self, buffer: Tensor, fields: Sequence[Field], team: Members) -> tuple[Tensor, ...]:
        """The rows of a team, of every field, from the messages of all its members."""
        members = [unpack(message, fields) for message in buffer.view(self.groups.place.team, -1).unbind(0)]
        return tuple(team.together.of(parts, SEQUENCE_DIM) for parts in zip(*members, strict=True))

    def _shares(self, transfer: Exchange) -> list[tuple[Tensor, ...]]:
        """What an exchange sends: for every other team member the partial result of its rows."""
        if transfer.side == self.schedule.resident:
            partial, rows = self._partial(self.peers), self.schedule.peers
            self.peers = Operand(())
        else:
            partial, rows = self.home, self.schedule.everyone
        me, team = self.groups.place.team_rank, self.groups.place.team
        padded_length = self._padded_length(transfer.side)
        return [
            self.arithmetic.outgoing(_rows_of(member, partial, rows, padded_length), self.local.data[0].dtype)
            for member in range(team)
            if member != me
        ]

    def _padded_length(self, side: str) -> int:
        return self.schedule.padded_lengths[0 if side == "q" else 1]

    def _mine(self, transfer: Exchange) -> tuple[Tensor, ...]:
        """One's own rows, to which an exchange adds what the others computed for them."""
        if transfer.side == self.schedule.resident:
            return self._partial(self.local)
        padded_length = self._padded_length(transfer.side)
        self.home = _rows_of(self.groups.place.team_rank, self.home, self.schedule.everyone, padded_length)
        return self.home

    def _partial(self, operand: Operand) -> tuple[Tensor, ...]:
        if not operand.partial:
            operand.partial = self.arithmetic.nothing(operand)
        return operand.partial


def _rows_of(member: int, tensors: Sequence[Tensor], team: Members, padded_length: int) -> tuple[Tensor, ...]:
    """The rows of one team member out of a team's tensors, as long as the padded length."""
    return tuple(_filled(team.of[member].of([x], SEQUENCE_DIM), padded_length) for x in tensors)


def _padded(operand: Operand, padded_length: int) -> Operand:
    """An operand whose data is as long as what is sent of it; nothing touches what is added."""
    if operand.data[0].shape[SEQUENCE_DIM] == padded_length:
        return operand
    out = None if operand.out is None else _filled(operand.out, padded_length)
    return Operand(tuple(_filled(x, padded_length) for x in operand.data), out=out)


def _cut(tensors: Sequence[Tensor], rows: int) -> tuple[Tensor, ...]:
    return tuple(x.narrow(SEQUENCE_DIM, 0, rows) if rows < x.shape[SEQUENCE_DIM] else x for x in tensors)


def _filled(x: Tensor, padded_length: int) -> Tensor:
    missing = padded_length - x.shape[SEQUENCE_DIM]
    return F.pad(x, (0, 0) * (x.ndim - SEQUENCE_DIM - 1) + (0, missing)) if missing else x
