"""Executing a schedule: a loop over its steps, and what each transfer packs and unpacks."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from wallfacer_dt.agreement.progress import Waiting
from wallfacer_dt.algorithms.arithmetic import SEQUENCE_DIM, Arithmetic, Operand, Sent
from wallfacer_dt.algorithms.shares import Shares
from wallfacer_dt.algorithms.steps import (
    CONTEXT,
    HOME,
    Attend,
    Carry,
    Exchange,
    Gather,
    Hop,
    Move,
    Pass,
    Return,
    Schedule,
    Start,
    Transfer,
    Wait,
)
from wallfacer_dt.collectives.functional import all_gather, all_to_all, permute, received
from wallfacer_dt.collectives.groups import group_ranks
from wallfacer_dt.collectives.send_buffer import Layout, layout, pack
from wallfacer_dt.kernels import accumulation_dtype
from wallfacer_dt.mesh import RING_AXIS, TEAM_AXIS, Coordinate
from wallfacer_dt.rows import cut


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

    def permute(self, buffer: Tensor, way: Hop) -> Tensor:
        """Start to pass a buffer on along an axis, receiving as much: pending."""
        if way.axis == CONTEXT:
            to, source = self.context_ranks[way.to], self.context_ranks[way.source]
            return permute(buffer, to, source, len(self.context_ranks), self.context)
        size = self.place.ring if way.axis == RING_AXIS else self.place.team
        return permute(buffer, way.to, way.source, size, self.along(way))

    def along(self, transfer: Transfer) -> str:
        """The name of the process group of a transfer."""
        axis = transfer.axis
        return self.ring if axis == RING_AXIS else self.team if axis == TEAM_AXIS else self.context


def execute(
    schedule: Schedule, arithmetic: Arithmetic, groups: Groups, resident: Operand, rotating: Operand
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """What a schedule computes for this rank's own shards of the resident and of the rotating side.

    In the forward (out, lse) for queries and nothing for keys, in the backward gradients; as a kernel gave them, or in
    the accumulation dtype.
    """
    run = _Run(schedule, arithmetic, groups, resident, rotating)
    with Waiting(run, run.ranks):
        for step in schedule.steps:
            match step:
                case Attend():
                    run.attend(step)
                case Start():
                    run.start(step.transfer)
                case Wait():
                    run.wait(step.transfer)
    return run.results()


class _Run:
    """The operands of one execution while it is under way.

    Shards may differ in length: what is sent is padded with zeros, and an owner takes of what arrives what it has.
    """

    def __init__(
        self, schedule: Schedule, arithmetic: Arithmetic, groups: Groups, resident: Operand, rotating: Operand
    ) -> None:
        self.schedule, self.arithmetic, self.groups = schedule, arithmetic, groups
        self.local, self.peers, self.home = resident, Operand(()), Operand(rotating.data)
        self.blocks = {0: rotating}
        self.mates = {0: resident}  # by how far their rows have come round the team
        self.pending: dict[Transfer, Sent] = {}
        self.awaited: Transfer | None = None

    def __str__(self) -> str:
        transfer = self.awaited
        if not isinstance(transfer, Hop):
            return "" if transfer is None else str(transfer)
        source = self.groups.context_ranks[transfer.source] if transfer.axis == CONTEXT else transfer.source
        return f"{transfer}, rank {self._ranks_of(transfer)[source]}"

    def ranks(self) -> Sequence[int]:
        """Those that take part in what is waited for."""
        return () if self.awaited is None else self._ranks_of(self.awaited)

    def _ranks_of(self, transfer: Transfer) -> Sequence[int]:
        return group_ranks(self.groups.along(transfer))

    def attend(self, step: Attend) -> None:
        """Attend a part of the resident side and a rotating block."""
        is_whole = step.part == "peer" and not step.distance
        resident, rotating = self.peers if is_whole else self.mates[step.distance], self.blocks[step.block]
        query, keys = (resident, rotating) if self.schedule.resident == "q" else (rotating, resident)
        self.arithmetic.attend(query, keys, step.work)
        if step.frees:
            del self.blocks[step.block]

    def start(self, transfer: Transfer) -> None:
        """Start a transfer, and remember what is pending with the layout of what it will bring."""
        sent, place = self._outgoing(transfer), self.groups.place
        match transfer:
            case Gather():
                pending = all_gather(sent.buffer, self.groups.team)
            case Exchange():
                splits = [0 if rank == place.team_rank else sent.layout.size for rank in range(place.team)]
                pending = all_to_all(sent.buffer, splits, splits, self.groups.team)
            case _:
                pending = self.groups.permute(sent.buffer, transfer)
        self.pending[transfer] = Sent(pending, sent.layout)

    def _outgoing(self, transfer: Transfer) -> Sent:
        match transfer:
            case Move():
                return self._sent(self.blocks[transfer.held], transfer)
            case Carry():
                return self._sent_partial(self.blocks.pop(transfer.block), transfer)
            case Gather():
                return self._sent(self.local if transfer.side == self.schedule.resident else self.blocks[0], transfer)
            case Pass():
                return self._sent(self.mates[transfer.distance - 1], transfer)
            case Return():
                return self._sent_partial(self.mates.pop(transfer.distance), transfer)
            case Exchange():
                return self._shares(transfer)

    def wait(self, transfer: Transfer) -> None:
        """Wait for a transfer and take up what it brought."""
        pending, places = self.pending.pop(transfer)
        self.awaited = transfer
        buffer = received(pending)
        self.awaited = None
        match transfer:
            case Move():
                self.blocks[transfer.block] = Operand(places.views(buffer), sent=Sent(buffer, places))
            case Pass():
                self.mates[transfer.distance] = Operand(places.views(buffer), sent=Sent(buffer, places))
            case Carry() if transfer.into == HOME:
                self.home.partial = places.views(buffer)
            case Carry() if transfer.kind == "home":
                own = self.blocks[transfer.into]
                self.arithmetic.combine(own, _cut(places.views(buffer), own))
            case Carry():
                block = self.blocks[transfer.into]
                # What there is of it here is added to what arrives, which is wide and can be sent on as it is.
                arrived = _cut(places.views(buffer), block)
                if block.partial:
                    self.arithmetic.combine_(arrived, block.partial)
                block.partial, block.sent_partial = arrived, Sent(buffer, places)
            case Gather() if transfer.side == self.schedule.resident:
                by_tensor = zip(*_each(buffer, places), strict=True)
                self.peers = Operand(tuple([self.schedule.peers.together(x, SEQUENCE_DIM) for x in by_tensor]))
            case Gather():
                self.blocks[0] = self._everyone(_each(buffer, places))
            case Return():
                self.arithmetic.combine(self.local, _cut(places.views(buffer), self.local))
            case Exchange():
                operand = self.local
                if transfer.side != self.schedule.resident:
                    rows = self.schedule.everyone.rows[self.groups.place.team_rank]
                    operand = self.home
                    operand.partial = tuple(rows.of(x, SEQUENCE_DIM) for x in operand.partial)
                # One's own rows, to which is added what the others computed for them.
                for share in _each(buffer, places):
                    self.arithmetic.combine(operand, _cut(share, operand))

    def results(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """What was computed for the own shards of the resident and the rotating side."""
        both, queries_stay = self.arithmetic.gives_to_keys, self.schedule.resident == "q"
        own = self._partial(self.local) if both or queries_stay else ()
        if self.schedule.home == "exchange":
            return own, self.home.partial
        return own, self._partial(self.blocks[0]) if both or not queries_stay else ()

    def _sent(self, operand: Operand, transfer: Gather | Move | Pass) -> Sent:
        """An operand's data as it travels: as it came, or one's own shard, as long as the longest."""
        if operand.sent is not None:
            return operand.sent
        data = self.arithmetic.sent(operand)
        places = _layout(data, [x.dtype for x in data], self.schedule.rows(transfer))
        return Sent(pack(data, places), places)

    def _sent_partial(self, operand: Operand, transfer: Carry | Return) -> Sent:
        """What has been computed for rows of others as it travels: wide where it is added to on its way."""
        sent, partial = operand.sent_partial, self._partial(operand)
        if transfer.kind != "carry":
            places = self._home_layout(partial, transfer)
        elif sent is not None:  # it has come wide
            places = sent.layout
        else:
            places = _layout(partial, [accumulation_dtype(x.dtype) for x in partial], self.schedule.rows(transfer))
        if sent is None or sent.layout != places:
            return Sent(pack(partial, places), places)
        memory = {x.untyped_storage()._cdata for x in (sent.buffer, *partial)}
        assert len(memory) == 1, "what has been added is in what is sent on"
        return sent

    def _shares(self, transfer: Exchange) -> Sent:
        """What an exchange sends: to every other team member the partial result of its rows."""
        if transfer.side == self.schedule.resident:
            partial, members = self._partial(self.peers), self.schedule.peers
            self.peers = Operand(())
        else:
            partial, members = self.home.partial, self.schedule.everyone
        length, place = self.schedule.rows(transfer), self.groups.place
        places = self._home_layout(partial, transfer)
        shares = Shares([places] * place.team, place.team_rank)
        is_padded = any(n and rows.length < length for n, rows in zip(shares.splits, members.rows, strict=True))
        return Sent(shares.packed(partial, [members.rows] * len(partial), SEQUENCE_DIM, padded=is_padded), places)

    def _home_layout(self, partial: Sequence[Tensor], transfer: Exchange | Return | Carry) -> Layout:
        """Of a share of a partial result that its owner is sent."""
        dtypes = self.arithmetic.home_dtypes(len(partial), self.local.data[0].dtype)
        return _layout(partial, dtypes, self.schedule.rows(transfer))

    def _everyone(self, members: Sequence[tuple[Tensor, ...]]) -> Operand:
        """The rotating side of a whole team, put together where it is sent from."""
        everyone, length = self.schedule.everyone, self.schedule.gathered
        places = _layout(members[0], [x.dtype for x in members[0]], length)
        empty = members[0][0].new_empty if everyone.length == length else members[0][0].new_zeros
        buffer = empty(places.size, dtype=places.dtype)
        views = places.views(buffer)
        for view, parts in zip(views, zip(*members, strict=True), strict=True):
            everyone.together(parts, SEQUENCE_DIM, out=cut(view, SEQUENCE_DIM, 0, everyone.length))
        return Operand(views, sent=Sent(buffer, places))

    def _partial(self, operand: Operand) -> tuple[Tensor, ...]:
        return operand.partial or self.arithmetic.nothing(operand)


def _each(buffer: Tensor, places: Layout) -> list[tuple[Tensor, ...]]:
    """The tensors of every one who sent its share of a buffer."""
    return [places.views(buffer, start) for start in range(0, buffer.numel(), places.size)]


def _cut(tensors: Sequence[Tensor], own: Operand) -> tuple[Tensor, ...]:
    """As many rows as an operand has, of what has arrived for it."""
    rows = own.data[0].shape[SEQUENCE_DIM]
    return tuple([cut(x, SEQUENCE_DIM, 0, rows) for x in tensors])


def _layout(tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype], rows: int | None = None) -> Layout:
    """The layout of tensors like these, but for the number of rows."""
    shapes = [x.shape if rows is None else (*x.shape[:2], rows, *x.shape[3:]) for x in tensors]
    return layout(*zip(shapes, dtypes, strict=True))
