"""One call of attention on one rank: what is compared before anything is sent, and what runs."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from wallfacer_dt.agreement import agree_on, hear_once, is_lasting, named, refusing_together
from wallfacer_dt.algorithms import (
    Answers,
    Arithmetic,
    Backward,
    Forward,
    Groups,
    HeadExchange,
    Heads,
    Kind,
    Mask,
    Operand,
    Replicated,
    Schedule,
    Scores,
    Sequences,
    Side,
    check_mask,
    exchanged,
    execute,
    make_asked_schedule,
    make_schedule,
    needed_offsets,
    split_heads,
)
from wallfacer_dt.collectives import group_rank
from wallfacer_dt.documents import boundaries, digest
from wallfacer_dt.kernels import Need, select_kernel, sinks_gradient, with_sinks
from wallfacer_dt.mesh import Coordinate
from wallfacer_dt.options import Options, Setting


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Whether a call of these tensors will have a backward, which all ranks then make together."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def make_call(
    options: Options,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_shared: Tensor | None,
    documents: Tensor | None,
) -> "Call":
    """Make a call from an operator's arguments.

    Args:
        options: the operators' options.
        q: queries (B, N, L, H).
        k: keys (B, Nkv, L, H).
        v: values (B, Nkv, L, Hv).
        k_shared: the end of every head's key (B, 1, L, Hs), or None.
        documents: what ``options.packed`` says, or None.

    Returns:
        The call.

    Raises:
        ValueError: it cannot be made.
    """
    told = options.setting.options
    # What documents, a mask's answers or another world may change is not kept, nor are these kept alive.
    is_kept = documents is None and not options.mask and not is_lasting(options.setting.mesh)
    parts = _parts if is_kept else _parts.__wrapped__
    groups, sequences, heads = parts(options, q.shape, k.shape, k_shared is None, documents)
    need = Need.of(q, v, masked=sequences.mask.asked, softcap=options.softcap)
    scores = Scores(select_kernel(told.kernel, need), options.scale, options.softcap)
    answers = None
    if options.mask:
        mine = [range(*some.q) for some in heads[groups.place.ulysses_rank]]
        answers = Answers.of(options.mask, options.captured, q.shape[0], mine, q.device)
    return Call(groups, sequences, scores, heads, told.schedule, told.rotate, told.rotate_forward, answers)


@lru_cache(256)
def _parts(
    options: Options, q: torch.Size, k: torch.Size, hidden: bool, documents: Tensor | None
) -> tuple[Groups, Sequences, tuple[tuple[Heads, ...], ...]]:
    """The groups, what is attended, and the heads of a call on shapes q and k."""
    setting = options.setting
    place, names = setting.place, setting.groups
    if is_lasting(setting.mesh):
        names = groups_here(setting.mesh, place, names)
    groups = Groups(place, *names, setting.context, setting.context_ranks)
    q_length, k_length = _lengths(setting, q, k)
    mask = _mask(options, documents, q_length)
    heads = split_heads(q[1], k[1], place.ulysses, hidden=place.ulysses > 1 and hidden)
    return groups, Sequences(q_length, k_length, setting.order, mask, setting.options.replicated), heads


def agreed_call(
    what: str,
    options: Options,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_shared: Tensor | None,
    sinks: Tensor | None,
    documents: Tensor | None,
    *,
    mesh: str | None = None,
    further: Mapping[str, Hashable] | None = None,
) -> tuple["Call", int]:
    """Make a call and compare it with the other ranks' calls, all of which must do so.

    Args:
        what: the kind of call.
        options: as for :func:`make_call`, as is all that follows.
        q: (B, N, L, H).
        k: (B, Nkv, L, H).
        v: (B, Nkv, L, Hv).
        k_shared: (B, 1, L, Hs) or None.
        sinks: for every head a logit without a value (N,), or None.
        documents: what ``options.packed`` says, or None.
        mesh: name of the mesh on which it is compared, the attention's own by default.
        further: by name, what else must be the same.

    Returns:
        The call, and its number on the mesh.

    Raises:
        ValueError: on every rank: calls differ, or one cannot be made.
    """
    setting = options.setting
    mesh = setting.mesh if mesh is None else mesh
    with refusing_together(mesh):
        if setting.mask_key:
            lengths = _lengths(setting, q.shape, k.shape)
            check_mask(setting.mask_key, options.mask, options.captured, lengths, q.device.type)
        call = make_call(options, q, k, v, k_shared, documents)
        needed = call.needed(options)

    def signature() -> Iterator[tuple[str, Hashable]]:
        yield from (further or {}).items()
        yield from _signature(options, q, k, v, k_shared, sinks).items()
        yield "the documents", digest(documents)
        yield "what mask_mod captures", options.captured.contents
        yield "the kernel that runs", f"{call.scores.kernel.name}, {call.scores.kernel.version}"

    number = agree_on(q, what, signature(), mesh)
    return call.heard(options, q, k, v, k_shared, sinks, needed), number


def groups_here(mesh: str, place: Coordinate, groups: tuple[str, str, str]) -> tuple[str, str, str]:
    """The process groups of a mesh for what was exported or pickled, perhaps in another world.

    Args:
        mesh: its lasting name.
        place: of the rank there.
        groups: names there of the process groups of axes ulysses, ring and team, or empty.

    Returns:
        Their names here.

    Raises:
        ValueError: there is no such mesh, or this is another rank of it.
    """
    names = iter(named(mesh).groups)
    ulysses, ring, team = (next(names) if name else "" for name in groups)
    ranks = ((ulysses, place.ulysses_rank), (ring, place.ring_rank), (team, place.team_rank))
    if any(name and group_rank(name) != rank for name, rank in ranks):
        raise ValueError(
            f"this was exported or pickled by the rank with index {place.index} on a mesh {mesh}, which this one is "
            "not; every rank loads its own"
        )
    return ulysses, ring, team


def agree_on_backward(what: str, x: Tensor, mesh: str, number: Tensor) -> None:
    """Compare that ranks are at the backward of the same call.

    Args:
        what: the kind of the forward call.
        x: a tensor of the call.
        mesh: its name.
        number: of the forward call ().
    """
    agree_on(x, f"the backward of {what}", (), mesh, number)


def _lengths(setting: Setting, q: torch.Size, k: torch.Size) -> tuple[int, int]:
    """Queries and keys in the whole sequence."""
    if setting.lengths:
        return setting.lengths[0], setting.lengths[1]
    ranks, replicated = setting.place.size, setting.options.replicated
    return (q[2] - replicated) * ranks, (k[2] - replicated) * ranks


def _mask(options: Options, documents: Tensor | None, length: int) -> Mask:
    told = options.setting.options
    left, right = (None if n < 0 else n for n in told.window)
    return Mask(
        left,
        right,
        told.prefix_length,
        boundaries(documents, options.packed, length) if documents is not None else (),
        bool(options.mask),
    )


def _signature(
    options: Options, q: Tensor, k: Tensor, v: Tensor, k_shared: Tensor | None, sinks: Tensor | None
) -> dict[str, Hashable]:
    """What must be the same on all ranks; what follows from other things comes after them."""
    setting = options.setting

    def shape(x: Tensor | None) -> Hashable:
        # Shards of a sequence whose length is given need not be equal.
        return x if x is None else (*x.shape[:2], "L" if setting.lengths else x.shape[2], x.shape[3])

    return {
        "cp_ulysses x cp_ring x cp_team": setting.place.axes,
        "length": setting.options.length,
        "the shape of q": shape(q),
        "the shape of k": shape(k),
        "the head dim of v": v.shape[-1],
        "the shape of k_shared": shape(k_shared),
        "the shape of sinks": None if sinks is None else tuple(sinks.shape),
        "the dtype of q": q.dtype,
        **options.compared,
        "code": options.code,
        "what says where documents are": options.packed or "nothing",
        "whether q, k, v, k_shared or sinks need a gradient": options.gradients,
    }


@dataclass(frozen=True, slots=True)
class Call:
    """A call that all ranks have agreed on; they make it together.

    Attributes:
        groups: the process groups, and this rank's coordinate.
        sequences: what is attended, by whom it is held.
        scores: what becomes of q k^T; without its mask, which depends on the heads.
        heads: by rank of ``cp_ulysses``, its groups of heads.
        schedule: its name.
        rotate: the side that moves in the backward.
        rotate_forward: the side that moves in the forward.
        answers: of a mask that is asked.
        offsets: under one, by side that stays, the distances round the ring at which some rank needs blocks.
    """

    groups: Groups
    sequences: Sequences
    scores: Scores
    heads: tuple[tuple[Heads, ...], ...]
    schedule: str
    rotate: str
    rotate_forward: str
    answers: Answers | None = None
    offsets: Mapping[Side, tuple[int, ...]] | None = None

    def needed(self, options: Options) -> dict[Side, tuple[int, ...]]:
        """Under a mask that is asked: by side that stays, how far round the ring this rank needs blocks.

        It asks about all that this rank may have to compute, so that a mask that cannot answer is refused on all ranks.
        """
        if self.answers is None:
            return {}
        ways = [(self.rotate_forward, False)] + [(self.rotate, True)] * options.gradients
        found: dict[Side, set[int]] = {}
        for rotate, backward in ways:
            offsets = needed_offsets(self._schedule(rotate, backward=backward))
            found.setdefault(_resident(rotate), set()).update(offsets)
        return {side: tuple(sorted(offsets)) for side, offsets in found.items()}

    def heard(
        self,
        options: Options,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_shared: Tensor | None,
        sinks: Tensor | None,
        needed: dict[Side, tuple[int, ...]],
    ) -> "Call":
        """The call with the hops that some rank needs, which ranks tell each other once for the same question.

        Args:
            options: as for :func:`make_call`, as is all that follows.
            q: (B, N, L, H).
            k: (B, Nkv, L, H).
            v: (B, Nkv, L, Hv).
            k_shared: (B, 1, L, Hs) or None.
            sinks: (N,) or None.
            needed: by this rank, see :meth:`needed`.

        Returns:
            The call. Where nobody is heard (one rank, or ranks that are only imagined) all hops are made.
        """
        if self.answers is None:
            return self
        mesh = options.setting.mesh
        same = tuple((name, str(value)) for name, value in _signature(options, q, k, v, k_shared, sinks).items())
        theirs = hear_once(q, (mesh, same, options.captured.contents), needed, mesh)
        if theirs is None:
            return self
        offsets = {side: {n for told in theirs.values() for n in told[side]} for side in needed}
        return replace(self, offsets={side: tuple(sorted(some)) for side, some in offsets.items()})

    def forward(self, q: Tensor, keys: Sequence[Tensor], sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """The output and lse of one's own rows, from queries (B, N, L, H) and (k, v) or (k, v, k_shared)."""
        schedule = self._schedule(self.rotate_forward, backward=False)
        value_dim = keys[1].shape[-1]

        def compute(heads: Heads, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
            queries, keys = Operand(tuple(tensors[:1])), Operand(tuple(tensors[1:]))
            arithmetic = Forward(self._scores(heads), value_dim)
            if heads.is_empty:
                partial = arithmetic.nothing(queries)
            else:
                partial, _ = self._execute(schedule, arithmetic, queries, keys)
            if sinks is not None:
                out, lse = partial
                partial = with_sinks(out, lse, sinks[slice(*heads.q)])
            return arithmetic.outgoing(partial, q.dtype)

        own = [self._replicated.own(x) for x in (q, *keys)]
        out, lse = self._by_heads(own, ["q", *_KEY_KINDS[: len(keys)]], compute, ["q", "q"])
        return self._replicated.everyone(out), self._replicated.placed(lse)

    def backward(
        self, grad_out: Tensor, out: Tensor, lse: Tensor, q: Tensor, keys: Sequence[Tensor], sinks: Tensor | None
    ) -> tuple[list[Tensor], Tensor | None]:
        """The gradients of q and of the keys' tensors, and that of the sinks which is due to one's own rows."""
        schedule = self._schedule(self.rotate, backward=True)
        replicated = self._replicated
        out, lse = replicated.own(out), replicated.own(lse)
        grad_out = replicated.summed(grad_out.contiguous())
        delta = (grad_out.to(lse.dtype) * out).sum(-1)
        # One's own output is here: only queries that arrive from elsewhere need a stand-in.
        own_out = out if self.groups.place.ulysses == 1 else None

        def compute(heads: Heads, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
            queries, keys = Operand(tuple(tensors[:4]), out=own_out), Operand(tuple(tensors[4:]))
            arithmetic = Backward(self._scores(heads))
            if heads.is_empty:
                dq, dkeys = arithmetic.nothing(queries), arithmetic.nothing(keys)
            else:
                dq, dkeys = self._execute(schedule, arithmetic, queries, keys)
            return arithmetic.outgoing((*dq, *dkeys), q.dtype)

        key_kinds = _KEY_KINDS[: len(keys)]
        own_q, *own_keys = [replicated.own(x) for x in (q, *keys)]
        tensors = (own_q, grad_out, lse, delta, *own_keys)
        grads = self._by_heads(tensors, ["q", "q", "q", "q", *key_kinds], compute, ["q", *key_kinds])
        dsinks = None if sinks is None else sinks_gradient(lse, delta, sinks)
        return [replicated.placed(grad) for grad in grads], dsinks

    @property
    def _replicated(self) -> Replicated:
        return Replicated(self.sequences.replicated, self.groups)

    def _schedule(self, rotate: str, *, backward: bool) -> Schedule:
        place, resident = self.groups.place, _resident(rotate)
        how: Any = {"schedule": self.schedule, "resident": resident, "backward": backward}
        if self.answers is None:
            return make_schedule(place, self.sequences, **how)
        offsets = tuple(range(1, place.ring)) if self.offsets is None else self.offsets[resident]
        return make_asked_schedule(place, self.sequences, self.answers, offsets, **how)

    def _execute(
        self, schedule: Schedule, arithmetic: Arithmetic, queries: Operand, keys: Operand
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """What was computed for own queries and own keys."""
        if schedule.resident == "q":
            return execute(schedule, arithmetic, self.groups, queries, keys)
        for_keys, for_queries = execute(schedule, arithmetic, self.groups, keys, queries)
        return for_queries, for_keys

    def _by_heads(
        self,
        tensors: Sequence[Tensor],
        kinds: Sequence[Kind],
        compute: Callable[[Heads, Sequence[Tensor]], Sequence[Tensor]],
        result_kinds: Sequence[Kind],
    ) -> Sequence[Tensor]:
        """Compute all heads, or exchange tokens for the heads that this rank computes and back."""
        place = self.groups.place
        mine = self.heads[place.ulysses_rank]
        if place.ulysses == 1:
            return compute(mine[0], tensors)
        together = exchanged(self.sequences, "q", place), exchanged(self.sequences, "kv", place)
        exchange = HeadExchange(self.groups.ulysses, place.ulysses_rank, self.heads, together)
        return exchange.run(tensors, kinds, lambda number, given: compute(mine[number], given), result_kinds)

    def _scores(self, heads: Heads) -> Scores:
        if self.answers is None:
            return self.scores
        return replace(self.scores, asked=partial(self.answers.block, range(*heads.q)))


_KEY_KINDS: list[Kind] = ["kv", "kv", "shared"]


def _resident(rotate: str) -> Side:
    return "kv" if rotate == "q" else "q"
