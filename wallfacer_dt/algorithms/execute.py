"""Executing a schedule: a loop over its steps, and what each transfer packs and unpacks."""

from collections.abc import Sequence

import torch
from torch import Tensor

from wallfacer_dt.agreement.progress import Waiting
from wallfacer_dt.algorithms.arithmetic import HEADS_DIM, SEQUENCE_DIM, Arithmetic, Operand, Sent
from wallfacer_dt.algorithms.steps import (
    CONTEXT,
    SIDES,
    TEAM,
    Attend,
    Exchange,
    Gather,
    Hop,
    Parts,
    Schedule,
    Side,
    Start,
    Transfer,
    Wait,
)
from wallfacer_dt.algorithms.turns import Computing
from wallfacer_dt.collectives.functional import all_gather, all_to_all, permute, received
from wallfacer_dt.collectives.groups import group_ranks
from wallfacer_dt.collectives.send_buffer import Layout, Shares, layout, pack
from wallfacer_dt.kernels.merge import accumulation_dtype
from wallfacer_dt.mesh import RING_AXIS, TEAM_AXIS, ContextGroups
from wallfacer_dt.rows import cut

Computed = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
"""What comes of own queries and of own keys."""


def execute(
    schedule: Schedule, arithmetic: Arithmetic, groups: ContextGroups, queries: Operand, keys: Operand
) -> Computing[Computed]:
    """What a schedule computes for this rank's own queries and keys.

    In the forward (out, lse) for queries and nothing for keys, in the backward gradients; as a kernel gave them, in the
    accumulation dtype, or rounded to the inputs'. Of no heads nothing is sent.
    """
    run = _Run(schedule, arithmetic, groups, {"q": queries, "kv": keys})
    has_heads = queries.data[0].shape[HEADS_DIM] > 0
    for part, steps in zip(Parts._fields, schedule.parts, strict=True):
        if steps and has_heads:
            with Waiting(run, run.ranks):
                for step in steps:
                    match step:
                        case Attend():
                            run.attend(step)
                        case Start():
                            run.start(step.transfer)
                        case Wait():
                            run.wait(step)
        if part == "computes" and groups.coordinate.ulysses > 1:
            run.let_go()
        if part != "ends":
            yield
    return run.result("q"), run.result("kv") if arithmetic.gives_to_keys else ()


class _Run:
    """The operands of one execution while it is under way, by side and number of a block.

    Shards may differ in length: what is sent is padded with zeros, and an owner takes of what arrives what it has.
    """

    def __init__(
        self, schedule: Schedule, arithmetic: Arithmetic, groups: ContextGroups, own: dict[Side, Operand]
    ) -> None:
        self.schedule, self.arithmetic, self.place = schedule, arithmetic, groups.coordinate
        _, ring, team = groups.names
        # By axis its process group, and by position on it the rank in that.
        self.axes: dict[str, tuple[str, Sequence[int]]] = {
            RING_AXIS: (ring, range(self.place.ring)),
            TEAM_AXIS: (team, range(self.place.team)),
            CONTEXT: (groups.context, groups.context_ranks),
        }
        self.blocks = {side: {0: operand} for side, operand in own.items()}
        self.rotating = self.blocks[schedule.rotating]
        self.rotating[TEAM] = Operand(own[schedule.rotating].data)
        self.dtype = own["q"].data[0].dtype
        self.pending: dict[Transfer, Sent] = {}
        self.awaited: Transfer | None = None

    def __str__(self) -> str:
        transfer = self.awaited
        if not isinstance(transfer, Hop):
            return "" if transfer is None else str(transfer)
        group, ranks = self.axes[transfer.axis]
        return f"{transfer}, rank {group_ranks(group)[ranks[transfer.source]]}"

    def ranks(self) -> Sequence[int]:
        """Those that take part in what is waited for."""
        awaited = self.awaited
        return () if awaited is None else group_ranks(self.axes[awaited.axis][0])

    def attend(self, step: Attend) -> None:
        """Attend a block of the resident side and a rotating block."""
        resident, rotating = self.blocks[step.resident][step.rows], self.rotating[step.block]
        query, keys = (resident, rotating) if step.resident == "q" else (rotating, resident)
        self.arithmetic.attend(query, keys, step.work, step.completes)
        if step.frees:
            del self.rotating[step.block]

    def start(self, transfer: Transfer) -> None:
        """Start a transfer, and remember what is pending with the layout of what it will bring."""
        blocks, (group, ranks) = self.blocks[transfer.side], self.axes[transfer.axis]
        match transfer:
            case Hop(block=block, partial=partial):
                sent = (
                    self._sent_partial(blocks.pop(block), transfer) if partial else self._sent(blocks[block], transfer)
                )
                pending = permute(sent.buffer, ranks[transfer.to], ranks[transfer.source], len(ranks), group)
            case Gather():
                sent = self._sent(blocks[0], transfer)
                pending = all_gather(sent.buffer, group)
            case Exchange():
                sent = self._shares(transfer)
                splits = [0 if rank == self.place.team_rank else sent.layout.size for rank in ranks]
                pending = all_to_all(sent.buffer, splits, splits, group)
        self.pending[transfer] = Sent(pending, sent.layout)

    def wait(self, step: Wait) -> None:
        """Wait for a transfer and take up what it brought."""
        transfer, is_last = step.transfer, bool(step.completes)
        pending, places = self.pending.pop(transfer)
        self.awaited = transfer
        buffer = received(pending)
        self.awaited = None
        blocks = self.blocks[transfer.side]
        match transfer:
            case Hop(partial=False):
                blocks[transfer.into] = Operand(places.views(buffer), sent=Sent(buffer, places))
            case Hop() if transfer.into > 0:
                block = blocks[transfer.into]
                # What there is of it here is added to what arrives, which is wide and can be sent on as it is.
                arrived = _cut(places.views(buffer), block)
                if block.partial:
                    self.arithmetic.combine_(arrived, block.partial)
                block.partial, block.sent_partial = arrived, Sent(buffer, places)
            case Hop(into=0):
                self.arithmetic.combine(blocks[0], _cut(places.views(buffer), blocks[0]), last=is_last)
            case Hop():
                blocks[TEAM].partial = places.views(buffer)
            case Gather() if transfer.side == self.schedule.resident:
                by_tensor, peers = zip(*_each(buffer, places), strict=True), self.schedule.members[transfer.side]
                blocks[TEAM] = Operand(tuple([peers.together(x, SEQUENCE_DIM) for x in by_tensor]))
            case Gather():
                blocks[0] = self._everyone(_each(buffer, places))
            case Exchange():
                # One's own rows, to which is added what the others computed for them.
                own = self._own(transfer.side)
                for share in (shares := _each(buffer, places)):
                    self.arithmetic.combine(own, _cut(share, own), last=is_last and share is shares[-1])

    def let_go(self) -> None:
        """Nothing more is attended: of data only shapes and dtypes are kept, but where a result is to be made of them.

        Which is of own ones that have seen nothing.
        """
        given = [self._own(side) for side in SIDES if side == "q" or self.arithmetic.gives_to_keys]
        for operand in [operand for some in self.blocks.values() for operand in some.values()]:
            if operand.partial or not any(operand is one for one in given):
                shapes = [torch.empty((), dtype=x.dtype, device="meta").expand(x.shape) for x in operand.data]
                operand.data = tuple(shapes)
                operand.out = operand.sent = None

    def result(self, side: Side) -> tuple[Tensor, ...]:
        """What was computed for the own shard of a side."""
        return self._partial(self._own(side))

    def _own(self, side: Side) -> Operand:
        """Where that comes together: of a side that has been placed elsewhere not where its shard was."""
        return self.blocks[side][0 if self.schedule.gathered is None or side == self.schedule.resident else TEAM]

    def _sent(self, operand: Operand, transfer: Transfer) -> Sent:
        """An operand's data as it travels: as it came, or one's own shard, as long as the longest."""
        if operand.sent is not None:
            return operand.sent
        data = self.arithmetic.sent(operand)
        places = _layout(data, [x.dtype for x in data], self.schedule.rows(transfer))
        return Sent(pack(data, places), places)

    def _sent_partial(self, operand: Operand, transfer: Hop) -> Sent:
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
        schedule, place, blocks = self.schedule, self.place, self.blocks[transfer.side]
        partial, rows = self._partial(blocks[TEAM]), schedule.members[transfer.side].rows
        if transfer.side == schedule.resident:
            del blocks[TEAM]
        else:
            blocks[TEAM].partial = tuple(rows[place.team_rank].of(x, SEQUENCE_DIM) for x in partial)
        places = self._home_layout(partial, transfer)
        shares, length = Shares([places] * place.team, place.team_rank), schedule.rows(transfer)
        is_padded = any(n and some.length < length for n, some in zip(shares.splits, rows, strict=True))
        return Sent(shares.packed(partial, [rows] * len(partial), SEQUENCE_DIM, padded=is_padded), places)

    def _home_layout(self, partial: Sequence[Tensor], transfer: Transfer) -> Layout:
        """Of a share of a partial result that its owner is sent."""
        dtypes = self.arithmetic.home_dtypes(len(partial), self.dtype)
        return _layout(partial, dtypes, self.schedule.rows(transfer))

    def _everyone(self, members: Sequence[tuple[Tensor, ...]]) -> Operand:
        """The rotating side of a whole team, put together where it is sent from."""
        everyone, length = self.schedule.members[self.schedule.rotating], self.schedule.gathered
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
