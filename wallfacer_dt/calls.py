"""One call of attention on one rank: what is compared before anything is sent, and what runs."""

# Those of functions within functions would be evaluated at every call.
from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from wallfacer_dt.agreement.agree import agree, hear_once, named, tell
from wallfacer_dt.agreement.worlds import is_lasting
from wallfacer_dt.algorithms.arithmetic import Backward, Forward, Operand, Scores
from wallfacer_dt.algorithms.blocks import Answers, check_mask
from wallfacer_dt.algorithms.execute import execute
from wallfacer_dt.algorithms.heads import HeadExchange, Heads, Kind, head_exchange, split_heads
from wallfacer_dt.algorithms.masks import Mask
from wallfacer_dt.algorithms.replicated import Replicated
from wallfacer_dt.algorithms.schedule import make_asked_schedule, make_schedule, needed_offsets
from wallfacer_dt.algorithms.sequences import Sequences, exchanged
from wallfacer_dt.algorithms.steps import Schedule, Side
from wallfacer_dt.algorithms.turns import Computing, completed, in_turn
from wallfacer_dt.collectives.functional import check_gather
from wallfacer_dt.collectives.groups import group_rank
from wallfacer_dt.documents import boundaries, digest
from wallfacer_dt.inputs import AttentionInputs
from wallfacer_dt.kernels.block import BlockKernel, Need
from wallfacer_dt.kernels.merge import output_factor, row_delta, sinks_gradient, with_sinks
from wallfacer_dt.kernels.registry import select_kernel
from wallfacer_dt.mesh import ContextGroups
from wallfacer_dt.options import Options


def agreed_call(
    what: str,
    options: Options,
    inputs: AttentionInputs,
    forward: Tensor | None = None,
    *,
    mesh: str = "",
    further: Mapping[str, Hashable] | None = None,
) -> tuple[Call, int]:
    """Make a call, or the backward of one, and compare it with the other ranks' calls, all of which must do so.

    The backward says what its ``forward`` gave, see :func:`said`. Calls are compared on the attention's own mesh, or on
    one of a name that is told, and ``further`` are things, by name, that must be the same, too. Gives the call, and its
    number on the mesh; raises a ValueError on every rank where calls differ, or one cannot be made.
    """
    setting, q = options.setting, inputs.q
    mesh = mesh or setting.mesh
    try:
        if forward is None and setting.mask_key:
            lengths = setting.seen_by_mask(q.shape, inputs.k.shape)
            check_mask(setting.mask_key, options.mask, options.captured, lengths, q.device.type)
        if forward is not None and options.captured and options.captured.contents != int(forward[1]):
            raise ValueError(
                "a tensor that mask_mod captures has been written into since the forward, whose mask is gone with it: "
                "write into it after the backward, or capture another tensor"
            )
        call = make_call(options, inputs)
        if forward is not None and call.plan.sequences.mask.documents and call.contents != int(forward[1]):
            raise ValueError(
                "documents in the backward are not those of the forward, which a checkpoint has computed again: pass "
                "them with the call, so that it keeps them, and write into them after the backward"
            )
        needed = {} if call.answers is None else call.needed()
    except Exception as error:  # a mask_mod may raise anything
        tell(error, mesh)
        raise

    def signature() -> Iterator[tuple[str, Hashable]]:
        yield from (further or {}).items()
        yield from _signature(options, inputs).items()
        bounds = call.plan.sequences.mask.documents
        yield "the documents", digest(np.concatenate(bounds) if bounds else None)
        yield "what mask_mod captures", options.captured.contents
        yield "the kernel that runs", f"{call.kernel.name}, {call.kernel.version}"

    if forward is None:
        number = agree(what, signature(), mesh, x=q)
    else:
        number = agree(f"the backward of {what}", (), mesh, x=q, forward=forward)
    return call.heard(inputs, needed) if needed else call, number


def said(number: int, contents: int) -> Tensor:
    """What a forward says to its backward: the call's number, and its contents (2,), int64, on the CPU.

    Torch makes a tensor of numbers in ten times the time that it makes zeros, of which one rank's are.
    """
    if number or contents:
        return torch.tensor([number, contents], device="cpu")
    return torch.zeros(2, dtype=torch.int64, device="cpu")


def make_call(options: Options, inputs: AttentionInputs) -> Call:
    """Make a call, or say (ValueError) why it cannot be made."""
    # What documents or a mask's answers may change is not kept, nor are these kept alive.
    is_kept = inputs.document_ids is None and inputs.cu_seqlens is None and not options.mask
    q, k, hidden = inputs.q.shape, inputs.k.shape, inputs.k_shared is None
    plan = _kept_plan(options, q, k, hidden) if is_kept else _plan(options, q, k, hidden, *inputs.documents)
    if is_lasting(options.setting.mesh):
        plan = replace(plan, groups=groups_here(options.setting.mesh, plan.groups))
    if inputs.q.is_cuda:  # all else can be gathered
        _check_gathers(plan, inputs.q.device)
    need = Need.of(inputs.q, inputs.v, masked=bool(options.mask), softcap=options.softcap)
    answers = None
    if options.mask:
        mine = [range(*some.q) for some in plan.heads]
        answers = Answers.of(options.mask, options.captured, q[0], mine, inputs.q.device)
    return Call(plan, select_kernel(options.setting.options.kernel, need), answers)


@dataclass(frozen=True)
class _Plan:
    """What follows from a call's options and shapes, and where its documents are."""

    options: Options
    groups: ContextGroups
    sequences: Sequences
    all_heads: tuple[tuple[Heads, ...], ...]
    schedules: dict[bool, Schedule] = field(default_factory=dict)

    @property
    def heads(self) -> tuple[Heads, ...]:
        """This rank's groups of heads."""
        return self.all_heads[self.groups.coordinate.ulysses_rank]

    @cached_property
    def exchange(self) -> HeadExchange:
        """Of tokens for heads."""
        place = self.groups.coordinate
        together = exchanged(self.sequences, "q", place), exchanged(self.sequences, "kv", place)
        return head_exchange(self.groups.names[0], place.ulysses_rank, self.all_heads, together)

    @cached_property
    def replicated(self) -> Replicated:
        """The tokens that every rank holds."""
        return Replicated(self.sequences.replicated, self.groups)

    def resident(self, *, backward: bool) -> Side:
        """The side that stays."""
        told = self.options.setting.options
        return "kv" if (told.rotate if backward else told.rotate_forward) == "q" else "q"


def _plan(
    options: Options, q: torch.Size, k: torch.Size, hidden: bool, packed: str = "", documents: Tensor | None = None
) -> _Plan:
    setting, place, told = options.setting, options.setting.place, options.setting.options
    setting.check_shards(q, k)
    q_length, k_length = setting.whole(q, k)
    left, right = (None if n < 0 else n for n in told.window)
    bounds = () if documents is None else boundaries(documents, packed, q_length)
    mask = Mask(left, right, told.prefix_length, bounds, bool(options.mask))
    heads = split_heads(q[1], k[1], place.ulysses, hidden=hidden)
    sequences = Sequences(q_length, k_length, setting.order, mask, told.replicated)
    return _Plan(options, setting.groups, sequences, heads)


_kept_plan = lru_cache(256)(_plan)


def _check_gathers(plan: _Plan, device: torch.device) -> None:
    """Refuse (ValueError) what is to be gathered where the backend cannot, before anything is sent."""
    groups, are_all = plan.groups, bool(plan.replicated.count)
    of_team = plan.options.setting.options.schedule != "rings"
    gathers = are_all, are_all, are_all or of_team
    for size, group, is_made in zip(groups.coordinate.axes, groups.names, gathers, strict=True):
        if size > 1 and is_made:
            check_gather(device, group)


def groups_here(mesh: str, groups: ContextGroups) -> ContextGroups:
    """With the names here of a mesh's process groups, for what was exported or pickled by a rank, perhaps in another
    world; ValueError if there is no such mesh, or this rank is not that one.
    """
    place, names = groups.coordinate, iter(named(mesh).groups)
    ulysses, ring, team = (next(names) if name else "" for name in groups.names)
    ranks = ((ulysses, place.ulysses_rank), (ring, place.ring_rank), (team, place.team_rank))
    if any(name and group_rank(name) != rank for name, rank in ranks):
        raise ValueError(
            f"this was exported or pickled by the rank with index {place.index} on a mesh {mesh}, which this one is "
            "not; every rank loads its own"
        )
    return groups._replace(names=(ulysses, ring, team))


def _signature(options: Options, inputs: AttentionInputs) -> dict[str, Hashable]:
    """What must be the same on all ranks; what follows from other things comes after them."""
    setting = options.setting

    def shape(x: Tensor | None) -> Hashable:
        # Shards of a sequence whose length is given need not be equal.
        return x if x is None else (*x.shape[:2], "L" if setting.lengths else x.shape[2], x.shape[3])

    untold = "" if setting.lengths else "without length=, "
    return {
        "cp_ulysses x cp_ring x cp_team": setting.place.axes,
        "length": setting.options.length,
        f"{untold}the shape of q": shape(inputs.q),
        f"{untold}the shape of k": shape(inputs.k),
        "the head dim of v": inputs.v.shape[-1],
        "the shape of k_shared": shape(inputs.k_shared),
        "the shape of sinks": None if inputs.sinks is None else tuple(inputs.sinks.shape),
        "the dtype of q": inputs.q.dtype,
        **options.compared,
        "code": options.code,
        "what says where documents are": inputs.documents[0] or "nothing",
        "whether q, k, v, k_shared or sinks need a gradient": options.gradients,
    }


class Call(NamedTuple):
    """A call that all ranks have agreed on; they make it together."""

    plan: _Plan  # what follows from its options and shapes
    kernel: BlockKernel  # what computes the scores
    answers: Answers | None = None  # of a mask that is asked
    # Under one, by side that stays, the distances round the ring at which some rank needs blocks.
    offsets: Mapping[Side, tuple[int, ...]] | None = None

    @property
    def contents(self) -> int:
        """A number of what its mask captures, or of where its documents are, by which its backward knows them; or 0."""
        captured, documents = self.plan.options.captured, self.plan.sequences.mask.documents
        if captured:
            return captured.contents
        return hash(documents) if documents else 0

    def needed(self) -> dict[Side, tuple[int, ...]]:
        """Under a mask that is asked: by side that stays, how far round the ring this rank needs blocks.

        It asks about all that this rank may have to compute, so that a mask that cannot answer is refused on all ranks.
        """
        found: dict[Side, set[int]] = {}
        for backward in (False, True)[: 1 + self.plan.options.gradients]:
            offsets = needed_offsets(self._schedule(backward=backward))
            found.setdefault(self.plan.resident(backward=backward), set()).update(offsets)
        return {side: tuple(sorted(offsets)) for side, offsets in found.items()}

    def heard(self, inputs: AttentionInputs, needed: dict[Side, tuple[int, ...]]) -> Call:
        """The call with the hops that some rank needs, which ranks tell each other once for the same question.

        Where nobody is heard (one rank, or ranks that are only imagined) all hops are made.
        """
        options = self.plan.options
        same = tuple((name, str(value)) for name, value in _signature(options, inputs).items())
        mesh = options.setting.mesh
        theirs = hear_once(inputs.q, (mesh, same, options.captured.contents), needed, mesh)
        if theirs is None:
            return self
        offsets = {side: {n for told in theirs.values() for n in told[side]} for side in needed}
        return self._replace(offsets={side: tuple(sorted(some)) for side, some in offsets.items()})

    def forward(self, q: Tensor, keys: Sequence[Tensor], sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The output and lse of one's own rows, from queries (B, N, L, H) and (k, v) or (k, v, k_shared)."""
        schedule = self._schedule(backward=False)
        value_dim = keys[1].shape[-1]

        def compute(heads: Heads, tensors: Sequence[Tensor]) -> Computing[Sequence[Tensor]]:
            queries, keys = Operand(tuple(tensors[:1])), Operand(tuple(tensors[1:]))
            del tensors
            arithmetic = Forward(self._scores(heads), value_dim, stays_wide=sinks is not None)
            partial, _ = yield from execute(schedule, arithmetic, self.plan.groups, queries, keys)
            if sinks is not None:
                out, lse = partial
                partial = with_sinks(out, lse, sinks[slice(*heads.q)])
            return arithmetic.outgoing(partial, q.dtype)

        replicated = self.plan.replicated
        out, lse = self._by_heads(
            replicated.own(q, *keys), ["q", *_KEY_KINDS[: len(keys)]], schedule, compute, ["q", "q"]
        )
        return replicated.everyone(out), replicated.placed(lse)[0]

    def backward(
        self, grad_out: Tensor, out: Tensor, lse: Tensor, q: Tensor, keys: Sequence[Tensor], sinks: Tensor | None = None
    ) -> tuple[Sequence[Tensor], Tensor | None]:
        """The gradients of q and of the keys' tensors, and that of the sinks which is due to one's own rows."""
        schedule = self._schedule(backward=True)
        replicated = self.plan.replicated
        grad_out = replicated.summed(_dense(grad_out))
        out, lse, own_q, *own_keys = replicated.own(out, lse, q, *keys)
        queries, own_out, delta = (own_q, grad_out, lse), out, None
        if self.plan.groups.coordinate.ulysses > 1:  # queries come from elsewhere
            delta = row_delta(grad_out, out, lse.dtype)
            queries, own_out = (*queries, output_factor(grad_out, delta)), None

        def compute(heads: Heads, tensors: Sequence[Tensor]) -> Computing[Sequence[Tensor]]:
            n = len(tensors) - len(own_keys)
            queries, keys = Operand(tuple(tensors[:n]), out=own_out), Operand(tuple(tensors[n:]))
            del tensors
            arithmetic = Backward(self._scores(heads))
            dq, dkeys = yield from execute(schedule, arithmetic, self.plan.groups, queries, keys)
            return arithmetic.outgoing((*dq, *dkeys), q.dtype)

        key_kinds = _KEY_KINDS[: len(keys)]
        kinds: list[Kind] = [*["q"] * len(queries), *key_kinds]
        grads = self._by_heads((*queries, *own_keys), kinds, schedule, compute, ["q", *key_kinds])
        dsinks = None
        if sinks is not None:
            dsinks = sinks_gradient(lse, row_delta(grad_out, out, lse.dtype) if delta is None else delta, sinks)
        return replicated.placed(*grads), dsinks

    def _schedule(self, *, backward: bool) -> Schedule:
        plan = self.plan
        if self.answers is None and backward in plan.schedules:
            return plan.schedules[backward]
        place, resident = plan.groups.coordinate, plan.resident(backward=backward)
        how: Any = {"schedule": plan.options.setting.options.schedule, "resident": resident, "backward": backward}
        if self.answers is not None:
            offsets = tuple(range(1, place.ring)) if self.offsets is None else self.offsets[resident]
            return make_asked_schedule(place, plan.sequences, self.answers, offsets, **how)
        return plan.schedules.setdefault(backward, make_schedule(place, plan.sequences, **how))

    def _by_heads(
        self,
        tensors: Sequence[Tensor],
        kinds: Sequence[Kind],
        schedule: Schedule,
        compute: Callable[[Heads, Sequence[Tensor]], Computing[Sequence[Tensor]]],
        result_kinds: Sequence[Kind],
    ) -> Sequence[Tensor]:
        """Compute all heads by a schedule, or exchange tokens for the heads that this rank computes and back."""
        plan, mine = self.plan, self.plan.heads
        if plan.groups.coordinate.ulysses == 1:
            return completed(compute(mine[0], tensors))
        turns = in_turn(len(mine), schedule.parts)
        return plan.exchange.run(tensors, kinds, turns, lambda group, given: compute(mine[group], given), result_kinds)

    def _scores(self, heads: Heads) -> Scores:
        options, answers = self.plan.options, self.answers
        asked = None if answers is None else partial(answers.block, range(*heads.q))
        return Scores(self.kernel, options.scale, options.softcap, asked)


def _dense(x: Tensor) -> Tensor:
    """x (B, N, L, H) without gaps, by heads or by tokens: every kernel would copy an expanded gradient, as of a sum."""
    return x if x.is_contiguous() or x.transpose(1, 2).is_contiguous() else x.contiguous()


_KEY_KINDS: list[Kind] = ["kv", "kv", "shared"]
