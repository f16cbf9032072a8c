"""The facts, from the schedules that the package itself would run; nothing is sent and no process group made."""

from collections.abc import Iterator, Mapping, Sequence

from wallfacer_dt.algorithms.flows import Content, Shape
from wallfacer_dt.algorithms.heads import Heads, split_heads
from wallfacer_dt.algorithms.holdings import index_of, peer_of
from wallfacer_dt.algorithms.schedule import make_schedule
from wallfacer_dt.algorithms.steps import Attend as AttendStep
from wallfacer_dt.algorithms.steps import Hop, Schedule, Side, Start, Wait
from wallfacer_dt.algorithms.steps import Transfer as AnyTransfer
from wallfacer_dt.algorithms.turns import Turn, in_turn
from wallfacer_dt.command.explain.facts import (
    Attend,
    Communicate,
    Facts,
    HeadGroup,
    Kind,
    Message,
    Rank,
    Step,
    Transfer,
)
from wallfacer_dt.command.explain.settings import DTYPES, Settings
from wallfacer_dt.layout import length_of
from wallfacer_dt.mesh import ULYSSES_AXIS, Coordinate


def make_facts(settings: Settings) -> Facts:
    """Who holds what, and who sends what to whom.

    Args:
        settings: of the call.

    Returns:
        The facts.

    Raises:
        OptionError: the settings do not go together.
    """
    settings.check()
    stays = settings.resident
    places = settings.places()
    # Ranks that exchange heads have one schedule.
    schedules = {p.inner_index: _schedule(settings, p) for p in places.values() if p.ulysses_rank == 0}
    ranks = tuple(_Maker(settings, schedules, rank, place).rank_facts() for rank, place in places.items())
    return Facts(settings, stays, "kv" if stays == "q" else "q", ranks)


def _schedule(settings: Settings, place: Coordinate) -> Schedule:
    return make_schedule(
        place, settings.sequences, schedule=settings.schedule,
        resident=settings.resident, backward=settings.backward,
    )  # fmt: skip


class _Maker:
    """One rank's facts."""

    def __init__(self, settings: Settings, schedules: Mapping[int, Schedule], rank: int, place: Coordinate) -> None:
        self.settings, self.rank, self.place = settings, rank, place
        self.schedule = schedules[place.inner_index]
        self.numbers: Mapping[AnyTransfer, int] = {t: i for i, t in enumerate(self.schedule.transfers)}
        dim = settings.head_dim
        self.shape = Shape(settings.batch, settings.heads, settings.kv_heads, dim, dim)
        # Without a mesh axis for them heads are not exchanged, and all of a rank's make one group.
        self.heads = split_heads(settings.heads, settings.kv_heads, place.ulysses, hidden=True)
        self.shards = settings.sequences.shards("q", place.axes)
        self.transfers: dict[int, Transfer] = {}

    def rank_facts(self) -> Rank:
        steps = tuple(self._steps())
        place, transfers = self.place, tuple(self.transfers[number] for number in sorted(self.transfers))
        arriving = [message for transfer in transfers for message in transfer.receives]
        return Rank(
            self.rank, self.settings.node(self.rank), place.ulysses_rank, place.ring_rank, place.team_rank,
            tuple((start, stop) for start, stop in self.shards[place.index].tolist()),
            tuple(HeadGroup(group.q, group.kv) for group in self._own_heads),
            transfers, steps, sum(message.bytes for message in arriving),
            sum(message.bytes for transfer in transfers for message in self._crossing(transfer)),
        )  # fmt: skip

    def _crossing(self, transfer: Transfer) -> Iterator[Message]:
        """What comes over a node's link; all that an all-gather brings comes from the neighbour, as it goes round."""
        place, node = self.place, self.settings.node
        neighbour = self._peer(place.inner_index - place.team_rank + (place.team_rank - 1) % place.team)
        for message in transfer.receives:
            if node(neighbour if transfer.kind == "gather" else message.rank) != node(self.rank):
                yield message

    @property
    def _own_heads(self) -> tuple[Heads, ...]:
        return self.heads[self.place.ulysses_rank]

    def _steps(self) -> Iterator[Step]:
        """As calls run."""
        exchanges, count = self.place.ulysses > 1, len(self._own_heads)
        if exchanges:
            yield self._exchange_heads("start", "heads", 0)
        for turn in in_turn(count, self.schedule.parts):
            group = turn.group
            if exchanges and turn.is_first:
                yield self._exchange_heads("wait", "heads", group)
                if group + 1 < count:
                    yield self._exchange_heads("start", "heads", group + 1)
            if not self._own_heads[group].is_empty:
                yield from self._part_steps(turn)
            if exchanges and turn.is_last:
                yield self._exchange_heads("start", "tokens", group)
        if exchanges:
            for group in range(count):
                yield self._exchange_heads("wait", "tokens", group)

    def _part_steps(self, turn: Turn) -> Iterator[Step]:
        for step in self.schedule.parts[turn.part]:
            match step:
                case AttendStep():
                    yield self._attend(step, turn.group)
                case Start(transfer):
                    yield Communicate("start", self._transfer(transfer, turn.group))
                case Wait(transfer):
                    yield Communicate("wait", self._transfer(transfer, turn.group))

    def _attend(self, step: AttendStep, group: int) -> Attend:
        stays, moves = step.stays, step.moves
        pairs = sum(segments.area for segments in step.work)
        return Attend(
            group, step.part, self._ranks(stays), step.block, self._ranks(moves), tuple(map(str, step.work)), pairs,
            self._rows(stays) * self._rows(moves),
        )  # fmt: skip

    def _ranks(self, inner: Sequence[int]) -> tuple[int, ...]:
        """All ranks whose tokens inner indices work on."""
        place = self.place
        found = (self.settings.rank(u, *divmod(i, place.team)) for i in inner for u in range(place.ulysses))
        return tuple(sorted(found))

    def _rows(self, inner: Sequence[int]) -> int:
        places = self.place.ring * self.place.team
        return sum(length_of(self.shards[u * places + i]) for i in inner for u in range(self.place.ulysses))

    def _peer(self, inner: int) -> int:
        return self.settings.rank(self.place.ulysses_rank, *divmod(inner, self.place.team))

    def _transfer(self, transfer: AnyTransfer, group: int) -> int:
        """The number of a schedule's transfer, whose facts are made at its start."""
        number = self._first(group) + self.numbers[transfer]
        if number not in self.transfers:
            heads, backward = self._own_heads[group].counts[transfer.side == "kv"], self.settings.backward
            content = self.shape.transferred(transfer, self.schedule.rows(transfer), heads, backward=backward)
            sends, receives = (
                tuple(self._message(rank, content) for rank in ranks if rank != self.rank)
                for ranks in self._peers(transfer)
            )
            block, way = None, "carry" if transfer.partial else "move"
            if isinstance(transfer, Hop) and transfer.side == self.schedule.rotating:
                block = transfer.into
            kind = way if isinstance(transfer, Hop) else transfer.kind
            self.transfers[number] = Transfer(
                number, kind, transfer.axis, self._names(transfer), group, block, sends, receives
            )
        return number

    def _first(self, group: int) -> int:
        """The number of a group's first transfer; before it the one that brings its heads, after them its results."""
        return group * (len(self.numbers) + 2) + 1 if self.place.ulysses > 1 else 0

    def _peers(self, transfer: AnyTransfer) -> tuple[list[int], list[int]]:
        """To whom it goes, and from whom it comes."""
        place = self.place
        if isinstance(transfer, Hop):
            to, source = (peer_of(place, transfer.axis, position) for position in (transfer.to, transfer.source))
            return [self._peer(to)], [self._peer(source)]
        mates = [self._peer(index_of(place, place.ring_rank, m)) for m in range(place.team)]
        return mates, mates

    def _names(self, transfer: AnyTransfer) -> str:
        return self._result(transfer.side) if transfer.partial else self._data(transfer.side)

    def _data(self, side: Side) -> str:
        if side == "kv":
            return "k, v"
        return "q, dO, lse, delta" if self.settings.backward else "q"

    def _result(self, side: Side) -> str:
        if not self.settings.backward:
            return "out, lse"
        return "dq" if side == "q" else "dk, dv"

    def _exchange_heads(self, do: str, kind: Kind, group: int) -> Communicate:
        number = self._first(group) + (-1 if kind == "heads" else len(self.numbers))
        if number not in self.transfers:
            self.transfers[number] = self._ulysses(number, kind, group)
        return Communicate("start" if do == "start" else "wait", number)

    def _ulysses(self, number: int, kind: Kind, group: int) -> Transfer:
        """Tokens for a group of heads, or their results for tokens, with the other ranks of the axis."""
        place, inner = self.place, self.place.inner_index
        sends, receives = [], []
        for other in range(place.ulysses):
            if other == place.ulysses_rank:
                continue
            # Whoever holds the tokens sends heads away, and gets results; whoever has the heads the other way round.
            theirs = length_of(self.shards[other * place.ring * place.team + inner])
            mine = length_of(self.shards[place.index])
            rank = self.settings.rank(other, *divmod(inner, place.team))
            away, here = (
                self._exchanged(rank, kind, rows, heads[group])
                for rows, heads in ((mine, self.heads[other]), (theirs, self._own_heads))
            )
            for messages, message in ((sends, away), (receives, here)) if kind == "heads" else (
                (sends, here), (receives, away),
            ):  # fmt: skip
                if message.elements:
                    messages.append(message)
        name = self._data if kind == "heads" else self._result
        sides: tuple[Side, ...] = ("q", "kv") if kind == "heads" or self.settings.backward else ("q",)
        what = ", ".join(map(name, sides))
        return Transfer(number, kind, ULYSSES_AXIS, what, group, None, tuple(sends), tuple(receives))

    def _exchanged(self, rank: int, kind: Kind, rows: int, heads: Heads) -> Message:
        backward = self.settings.backward
        return self._message(rank, self.shape.exchanged(f"to_{kind}", (rows, rows), heads.counts, backward=backward))

    def _message(self, rank: int, content: Content) -> Message:
        elements = content.payload + content.statistics
        return Message(rank, elements, content.nbytes(DTYPES[self.settings.dtype]))
