"""One call of attention as a rank's events: its schedule's steps, with what they cost.

Note [Launches]
A call of a kernel comes with a merge, in a backward it is three kernels, and three gradients are added up; a hop is its
start and its wait; of what goes to or comes from all ranks of a team, or of Ulysses, something is copied for each. With
these numbers the operations of a forward and of a backward are told within a quarter, on every rank
(``tests/test_plan_host.py`` counts them). What a call checks and compares takes as long as some more. By operation the
host of one H200 so took 50 to 59 microseconds, of another 77 to 126 (docs/benchmarks/gpu_2026-11-26.md).
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import chain

import numpy as np
import torch

from wallfacer_dt.algorithms.heads import split_heads
from wallfacer_dt.algorithms.masks import Mask
from wallfacer_dt.algorithms.segments import Work, pairs_seen
from wallfacer_dt.algorithms.sequences import Sequences
from wallfacer_dt.algorithms.steps import SIDES, Side
from wallfacer_dt.algorithms.turns import in_turn
from wallfacer_dt.kernels.merge import accumulation_dtype
from wallfacer_dt.layout import BY_DOCUMENT
from wallfacer_dt.planning.candidates import Candidate
from wallfacer_dt.planning.cluster import Kernels
from wallfacer_dt.planning.model import ModelShape, SequenceShape
from wallfacer_dt.planning.programs import (
    Attended,
    Awaited,
    Call,
    Program,
    Sent,
    area_of,
    attended,
    calls_of,
    program_of,
)
from wallfacer_dt.planning.timeline import Begin, Compute, End, Event, Settle
from wallfacer_dt.planning.traffic import Key, Wire

Groups = tuple[tuple[int, int], ...]
HOP = 2  # operations, see Note [Launches]


def attention_events(
    program: Program,
    candidate: Candidate,
    model: ModelShape,
    sequence: SequenceShape,
    kernels: Kernels,
    wires: Mapping[Key, Wire],
    groups: Groups,
    *,
    backward: bool,
) -> Iterator[Event]:
    """The events of a rank.

    Args:
        program: its schedule.
        candidate: how ranks share the sequence.
        model: whose heads.
        sequence: what is attended.
        kernels: rates.
        wires: of the call's transfers.
        groups: of heads that the rank computes, one of :func:`head_patterns`.
        backward: those of the backward.

    Yields:
        The events in program order.
    """

    def wire(sent: Sent, group: int) -> Wire:
        return wires[Key(backward, sent.kind, sent.side, group, sent.shift)]

    def exchange(kind: str, group: int) -> Begin:
        return Begin(
            f"{kind} {group}", wires[Key(backward, kind, "", group)], launches=launched.of_all(candidate.ulysses)
        )

    launched = _Launches(candidate, kernels, backward=backward)
    others = launched.others
    costs = [Costs.of_heads(heads, kernels, model, sequence, backward=backward) for heads in groups]
    has_exchange = candidate.ulysses > 1
    if has_exchange:
        yield exchange("to_heads", 0)
    for turn in in_turn(len(groups), program):
        group = turn.group
        if has_exchange and turn.is_first:
            yield End(f"to_heads {group}")
            if group + 1 < len(groups):
                yield exchange("to_heads", group + 1)
        for step in program[turn.part] if groups[group][0] else ():
            match step:
                case Sent(name):
                    yield Begin(f"{name} {group}", wire(step, group), step.sources, launches=launched.of(step))
                case Awaited(name):
                    yield End(f"{name} {group}")
                case Attended(name, work):
                    yield Compute(costs[group].of(work), name, launched.of(step) + others)
                    others = 0
        if has_exchange and turn.is_last:
            yield exchange("to_tokens", group)
    if has_exchange:
        for group in range(len(groups)):
            yield End(f"to_tokens {group}")
    if sequence.mask.spares_hops:
        yield Settle()


class _Launches:
    """How many operations the host launches, see Note [Launches]."""

    def __init__(self, candidate: Candidate, kernels: Kernels, *, backward: bool) -> None:
        self.candidate, self.takes_segments = candidate, kernels.takes_segments
        # Of a call of a kernel, for every two ranks of a collective, and of whatever is attended.
        self.of_call, self.of_rank, self.others = (8, 6, 7) if backward else (2, 3, 14)

    def of_all(self, ranks: int) -> int:
        """For what goes to or comes from all of so many ranks."""
        return 4 + self.of_rank * ranks // 2

    def of(self, step: Sent | Awaited | Attended) -> int:
        """For a step."""
        match step:
            case Sent():
                return self.of_all(self.candidate.team) if step.kind in ("gather", "exchange") else HOP
            case Attended():
                return self.of_call * len(calls_of(step.work, takes_segments=self.takes_segments))
        return 0

    def of_program(self, program: Program, groups: Groups) -> int:
        """For all of :func:`attention_events`."""
        exchanges = 2 * len(groups) * self.of_all(self.candidate.ulysses) if self.candidate.ulysses > 1 else 0
        attending = sum(heads > 0 for heads, _ in groups)
        return exchanges + attending * sum(map(self.of, chain(*program))) + self.others * (attending > 0)


def compute_seconds(
    candidate: Candidate, model: ModelShape, sequence: SequenceShape, kernels: Kernels, *, backward: bool,
    together: bool = False,
) -> float:  # fmt: skip
    """Seconds of computing in :func:`attention_events`, most of all ranks of :func:`programs_of`, told the same.

    They do not depend on the placement.
    """
    programs = programs_of(candidate, sequence, together=together, backward=backward).values()
    return max(_seconds(program, candidate, model, sequence, kernels, backward=backward) for program in programs)


def least_seconds(
    candidate: Candidate, model: ModelShape, sequence: SequenceShape, kernels: Kernels, *, backward: bool,
    together: bool = True,
) -> tuple[float, float]:  # fmt: skip
    """Seconds in which the rank that stands for all computes, and in which its host launches that; of ranks that are
    to be run together the last one's, which are sooner told. Attention takes no less.
    """
    if together and runs_together(candidate, sequence) and not sequence.documents:
        (program,) = _programs(candidate, sequence, [candidate.ring * candidate.team - 1], backward).values()
    else:
        (program,) = programs_of(candidate, sequence, together=False, backward=backward).values()
    launched = _Launches(candidate, kernels, backward=backward)
    most = max(launched.of_program(program, groups) for groups in head_patterns(candidate, model))
    return _seconds(program, candidate, model, sequence, kernels, backward=backward), most * kernels.launch


def _seconds(
    program: Program, candidate: Candidate, model: ModelShape, sequence: SequenceShape, kernels: Kernels, *,
    backward: bool,
) -> float:  # fmt: skip
    """Of computing, with the heads that take longest."""
    times = Counter(attended(program))
    patterns = (
        [Costs.of_heads(heads, kernels, model, sequence, backward=backward) for heads in groups if heads[0]]
        for groups in head_patterns(candidate, model)
    )
    return max(sum(n * one.of(work) for one in costs for work, n in times.items()) for costs in patterns)


def head_patterns(candidate: Candidate, model: ModelShape) -> dict[Groups, int]:
    """How many query and key heads every group has, as ranks of Ulysses differ in that, and the first that has them."""
    ranks = split_heads(model.heads, model.keys, candidate.ulysses, hidden=True)
    patterns = [tuple(some.counts for some in groups) for groups in ranks]
    return {pattern: patterns.index(pattern) for pattern in patterns}


def programs_of(candidate: Candidate, sequence: SequenceShape, *, together: bool, backward: bool) -> dict[int, Program]:
    """By inner index the programs of ranks that are to be run together, in order, or that of one that stands for all.

    If not asked for, and where ranks need not be, it is one that has as much to do as any: of a sequence that divides,
    no shorter one. Masks that spare hops depend on how long shards are; there it is of the sequence itself, and the one
    with most to do of three.
    """
    if together and runs_together(candidate, sequence):
        return _programs(candidate, sequence, range(candidate.ring * candidate.team), backward)
    index, program = _program_of_most(candidate, sequence, backward=backward)
    return {index: program}


def runs_together(candidate: Candidate, sequence: SequenceShape) -> bool:
    """Whether it takes all ranks to say how long one takes, and they are not too many.

    Under masks that spare hops ranks with much to do and with little wait for each other by turns; where documents are
    dealt out one by one, all have as much to do.
    """
    return sequence.mask.spares_hops and candidate.order != BY_DOCUMENT and candidate.size <= _MOST_TOGETHER


_MOST_TOGETHER = 64


def _program_of_most(candidate: Candidate, sequence: SequenceShape, *, backward: bool) -> tuple[int, Program]:
    inner = candidate.ring * candidate.team
    is_even = -(-sequence.length // candidate.size) % 2 == 0
    is_balanced = candidate.order == "head_tail" and is_even if sequence.is_causal else True
    if (is_balanced and not sequence.mask.spares_hops) or candidate.order == BY_DOCUMENT:
        some = [inner - 1]
    elif sequence.documents:
        some = [_busiest(candidate, sequence, backward)]
    else:  # ends and middle of the sequence have more or less to do
        some = sorted({0, inner // 2, inner - 1})
    programs = _programs(candidate, sequence, some, backward)
    return max(programs.items(), key=lambda one: area_of(one[1]) if len(some) > 1 else 0)


@lru_cache(maxsize=64)
def _pairs(axes: tuple[int, int, int], order: str, sequence: SequenceShape, side: Side) -> np.ndarray:
    """(ring, team): how many pairs a rank's queries, or keys, have; not to be changed."""
    mask = sequence.mask
    (shards,) = Sequences(sequence.length, sequence.length, order, mask).inner("q", axes)
    if side == "kv":
        mask = Mask(mask.right, mask.left, documents=mask.documents)
    return np.reshape([pairs_seen(shard, mask, sequence.length) for shard in shards], axes[1:])


def _busiest(candidate: Candidate, sequence: SequenceShape, backward: bool) -> int:
    """The inner index of a rank with much to do, where there are no teams as much as any: in the team whose resident
    tokens have most pairs the member whose rotating ones, of all teams together, have most.
    """
    sides = SIDES if _resident(candidate, backward) == "q" else SIDES[::-1]
    resident, rotating = (_pairs(candidate.axes, candidate.order, sequence, side) for side in sides)
    return int(resident.sum(1).argmax()) * candidate.team + int(rotating.sum(0).argmax())


def _resident(candidate: Candidate, backward: bool) -> Side:
    return "kv" if (candidate.rotate if backward else candidate.rotate_forward) == "q" else "q"


def _programs(
    candidate: Candidate, sequence: SequenceShape, indices: Iterable[int], backward: bool
) -> dict[int, Program]:
    length = sequence.length if sequence.mask.spares_hops else candidate.size * -(-sequence.length // candidate.size)
    sequences, resident = Sequences(length, length, candidate.order, sequence.mask), _resident(candidate, backward)
    return {
        index: program_of(candidate.place(index), sequences, candidate.schedule, resident, backward)
        for index in indices
    }


def flops_of_pair(dim: int, value_dim: int, *, backward: bool) -> int:
    """Floating point operations of a query head for a pair that is seen: two products forward, and five backward."""
    return 6 * dim + 4 * value_dim if backward else 2 * (dim + value_dim)


class Costs:
    """What calls for a group of heads cost, by the rates of kernels.

    Args:
        kernels: rates.
        batch: B.
        heads: query heads.
        kv_heads: key and value heads.
        dims: H of keys, and of values.
        dtype: of q, k and v.
        backward: whether it is the backward's.
    """

    def __init__(
        self, kernels: Kernels, batch: int, heads: int, kv_heads: int, dims: tuple[int, int], dtype: torch.dtype, *,
        backward: bool,
    ) -> None:  # fmt: skip
        rate, (dim, value_dim) = kernels.backward if backward else kernels.forward, dims
        self.kernels = kernels
        self.pair = batch * heads * flops_of_pair(*dims, backward=backward) / rate
        # A partial result is read, and read and written where it is added to. The first of a block is added to nothing;
        # what it is charged stands for adding what arrives of that block's rows in the end.
        touched = 3 * batch * accumulation_dtype(dtype).itemsize / kernels.merge
        self.query = heads * (dim if backward else value_dim) * touched
        self.key = kv_heads * (dim + value_dim) * touched * backward
        self.known: dict[Work, float] = {}

    @classmethod
    def of_heads(
        cls, heads: tuple[int, int], kernels: Kernels, model: ModelShape, sequence: SequenceShape, *, backward: bool
    ) -> "Costs":
        """Of so many of a model's query and key heads."""
        return cls(kernels, sequence.batch, *heads, model.dims, sequence.dtype, backward=backward)

    def of(self, work: Work) -> float:
        """Seconds of a step, of which most in a ring are alike."""
        if work not in self.known:
            calls = calls_of(work, takes_segments=self.kernels.takes_segments)
            self.known[work] = sum(map(self.of_call, calls))
        return self.known[work]

    def of_call(self, call: Call) -> float:
        """Seconds of one."""
        busy = (call.pairs + call.depth * self.kernels.half_rows) * self.pair
        return self.kernels.overhead + busy + call.rows * self.query + call.columns * self.key
