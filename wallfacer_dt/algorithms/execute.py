"""Executing a schedule: a loop over its steps, and what each transfer packs and unpacks."""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from wallfacer_dt.algorithms.arithmetic import SEQUENCE_DIM, Backward, Forward, Operand
from wallfacer_dt.algorithms.schedule import (
    CONTEXT,
    HOME,
    Attend,
    Carry,
    Exchange,
    Gather,
    Move,
    Part,
    Schedule,
    Slice,
    Start,
    Transfer,
    Wait,
)
from wallfacer_dt.algorithms.tiles import Tile
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


class Groups(NamedTuple):
    """Where a schedule runs: this rank's coordinate and its process groups by name.

    ``context`` and ``context_ranks`` (the rank in that group of every sequence index) serve the published schedule.
    """

    place: Coordinate
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


def execute(
    schedule: Schedule,
    arithmetic: Forward | Backward,
    groups: Groups,
    stationary: Operand,
    moving: Operand,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Run a schedule on this rank's operands.

    Args:
        schedule: this rank's.
        arithmetic: what to compute, forward or backward.
        groups: the process groups, and this rank's coordinate.
        stationary: own shard of the side that stays.
        moving: own shard of the side that moves.

    Returns:
        What was computed for the own shard of the stationary and of the moving side: (out, lse) or nothing in the
        forward, gradients in the backward; in the accumulation dtype.
    """
    run = _Run(schedule, arithmetic, groups, stationary, moving)
    for step in schedule.steps:
        match step:
            case Start(transfer):
                run.start(transfer)
            case Wait(transfer):
                run.wait(transfer)
            case Attend(part, _, block, tiles):
                run.attend(part, block, tiles)
    return run.results()


class _Run:
    """The operands of one execution while it is under way."""

    def __init__(
        self,
        schedule: Schedule,
        arithmetic: Forward | Backward,
        groups: Groups,
        stationary: Operand,
        moving: Operand,
    ) -> None:
        self.schedule, self.arithmetic, self.groups = schedule, arithmetic, groups
        self.own = stationary
        self.others = Operand(())
        self.blocks = {0: moving}
        self.home: tuple[Tensor, ...] = ()
        self.pending: dict[Transfer, tuple[Tensor, tuple[Field, ...]]] = {}

    def attend(self, part: Part, block: int, tiles: Sequence[Tile]) -> None:
        """Compute tiles of a part of the stationary side against a moving block."""
        stationary, moving = self.own if part == "own" else self.others, self.blocks[block]
        query, keys = (stationary, moving) if self.schedule.stationary == "q" else (moving, stationary)
        self.arithmetic.attend(query, keys, tiles)

    def start(self, transfer: Transfer) -> None:
        """Start a transfer and remember its pending buffer with the fields of what it will bring."""
        match transfer:
            case Gather(side):
                data = (self.own if side == self.schedule.stationary else self.blocks[0]).data
                pending = all_gather(pack(data), self.groups.team), fields_of(data)
            case Move(_, block, axis, to, source):
                operand = self.blocks[max(block - 1, 0)]
                message = pack(operand.data) if operand.message is None else operand.message
                pending = self._permute(message, axis, to, source), fields_of(operand.data)
            case Carry(_, block, _, axis, to, source):
                partial = self._partial(self.blocks[block])
                pending = self._permute(pack(partial), axis, to, source), fields_of(partial)
            case Exchange():
                shares = self._shares(transfer)
                pending = exchange(_joined([pack(x) for x in shares], 0), self.groups.team), fields_of(shares[0])
        self.pending[transfer] = pending

    def wait(self, transfer: Transfer) -> None:
        """Wait for a transfer and take up what it brought."""
        pending, fields = self.pending.pop(transfer)
        buffer = wait(pending)
        match transfer:
            case Gather(side) if side == self.schedule.stationary:
                self.others = Operand(self._assemble(buffer, fields, self.schedule.others))
            case Gather():
                self.blocks[0] = Operand(self._assemble(buffer, fields, self.schedule.everyone))
            case Move(_, block, _, _, _):
                self.blocks[block] = Operand(unpack(buffer, fields), message=buffer)
                if block > (1 if self.schedule.home == "block" else 0):
                    del self.blocks[block - 1]
            case Carry(_, _, into, _, _, _) if into == HOME:
                self.home = unpack(buffer, fields)
            case Carry(_, _, into, _, _, _):
                self.arithmetic.combine(self._partial(self.blocks[into]), unpack(buffer, fields))
            case Exchange():
                mine = self._mine(transfer)
                for share in buffer.view(self.groups.place.team - 1, -1).unbind(0):
                    self.arithmetic.combine(mine, unpack(share, fields))

    def results(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """What was computed for the own shards of the stationary and the moving side."""
        return self.own.partial, self.blocks[0].partial if self.schedule.home == "block" else self.home

    def _permute(self, buffer: Tensor, axis: str, to: int, source: int) -> Tensor:
        rank = self.groups.rank
        return permute(buffer, rank(axis, to), rank(axis, source), self.groups.named(axis))

    def _assemble(self, buffer: Tensor, fields: Sequence[Field], slices: Sequence[Slice]) -> tuple[Tensor, ...]:
        """The rows of ``slices``, of every field, from the messages of the whole team."""
        members = [unpack(message, fields) for message in buffer.view(self.groups.place.team, -1).unbind(0)]
        return tuple(
            _joined([members[s.member][i].narrow(SEQUENCE_DIM, s.start, s.span.length) for s in slices], SEQUENCE_DIM)
            for i in range(len(fields))
        )

    def _shares(self, transfer: Exchange) -> list[tuple[Tensor, ...]]:
        """What an exchange sends: for every other team member the partial result of its rows."""
        if transfer.side == self.schedule.stationary:
            partial, slices = self._partial(self.others), self.schedule.others
            self.others = Operand(())
        else:
            partial, slices = self.home, self.schedule.everyone
        me, team = self.groups.place.team_rank, self.groups.place.team
        return [
            self.arithmetic.outgoing(_rows_of(member, partial, slices), self.own.data[0].dtype)
            for member in range(team)
            if member != me
        ]

    def _mine(self, transfer: Exchange) -> tuple[Tensor, ...]:
        """One's own rows, to which an exchange adds what the others computed for them."""
        if transfer.side == self.schedule.stationary:
            return self._partial(self.own)
        self.home = _rows_of(self.groups.place.team_rank, self.home, self.schedule.everyone)
        return self.home

    def _partial(self, operand: Operand) -> tuple[Tensor, ...]:
        if not operand.partial:
            operand.partial = self.arithmetic.nothing(operand)
        return operand.partial


def _rows_of(member: int, tensors: Sequence[Tensor], slices: Sequence[Slice]) -> tuple[Tensor, ...]:
    """The rows of one team member out of tensors assembled from ``slices``."""
    # Slices and a member's own rows both ascend in position, so the member's order is kept.
    offsets = accumulate((s.span.length for s in slices), initial=0)
    rows = [(offset, s.span.length) for s, offset in zip(slices, offsets, strict=False) if s.member == member]
    return tuple(_joined([x.narrow(SEQUENCE_DIM, *row) for row in rows], SEQUENCE_DIM) for x in tensors)


def _joined(pieces: Sequence[Tensor], dim: int) -> Tensor:
    # torch.cat copies even a single piece.
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces), dim)
