"""One call of attention on one rank: what is compared before anything is sent, and what runs."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from wallfacer_dt.agreement import is_lasting, named, refusing_together
from wallfacer_dt.algorithms import (
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
    known_blocks,
    make_schedule,
    split_heads,
)
from wallfacer_dt.collectives import group_rank
from wallfacer_dt.compiler import as_text, from_text
from wallfacer_dt.documents import boundaries, digest
from wallfacer_dt.kernels import Need, select_kernel, sinks_gradient, with_sinks
from wallfacer_dt.layout import Spans
from wallfacer_dt.mesh import Coordinate

_COMPARED = (
    "replicated", "is_causal", "window", "prefix", "mask", "scale", "softcap", "order",
    "schedule", "rotate", "rotate_forward", "kernel", "code",
)  # fmt: skip


class Options(NamedTuple):
    """What an operator is told beside its tensors, as text: see Note [Options as text].

    Attributes:
        scale: of the scores.
        softcap: of the scores, 0 for none.
        place: this rank's coordinate: sizes of ring and team, its ranks on them, the same of ulysses.
        ulysses: name of the process group of axis ``cp_ulysses``, or empty.
        ring: name of the ring's process group, or empty.
        team: name of the team's process group, or empty.
        context: name of the ring's and team's common process group, or empty where the schedule does not use it.
        context_ranks: for every inner index its rank in ``context``.
        mesh: its name, by which ranks compare their calls; empty for none.
        lengths: of the whole sequence, queries and keys; empty where shards are equal.
        replicated: tokens before the shards that every rank holds.
        is_causal: mask keys that come later than the query.
        window: how far back and ahead a query sees, -1 for any distance.
        prefix: keys before this position are seen by all queries.
        mask: name of an arbitrary mask's answers, or empty.
        mask_key: in a compiled graph the mask's number in this process, by which it is asked whether it still gives
            them; otherwise 0.
        packed: what the tensor ``documents`` is: ``"ids"``, ``"cu_seqlens"``, or empty for none.
        order: token order.
        schedule: ``"2d"`` or ``"published"``.
        rotate: ``"kv"`` or ``"q"``, which side moves round the ring in the backward.
        rotate_forward: the same for the forward.
        kernel: of the blocks.
        code: :data:`wallfacer_dt.ops.CODE`.
        gradients: whether some of the tensors need one, so that there will be a backward; see :func:`needs_gradient`.
    """

    scale: float
    softcap: float
    place: Sequence[int]
    ulysses: str
    ring: str
    team: str
    context: str
    context_ranks: Sequence[int]
    mesh: str
    lengths: Sequence[int]
    replicated: int
    is_causal: bool
    window: Sequence[int]
    prefix: int
    mask: str
    mask_key: int
    packed: str
    order: str
    schedule: str
    rotate: str
    rotate_forward: str
    kernel: str
    code: str
    gradients: bool = False

    def told(self) -> tuple[float, float, str]:
        """As operators take them after their tensors: two floats and a text (:data:`SCHEMA`)."""
        return self.scale, self.softcap, as_text(self[2:])

    @classmethod
    def of(cls, scale: float, softcap: float, text: str) -> "Options":
        """What :meth:`told` gave."""
        return cls(scale, softcap, *from_text(text))


SCHEMA = "float scale, float softcap, str options"


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
    place = Coordinate(*options.place)
    names = (options.ulysses, options.ring, options.team)
    if is_lasting(options.mesh):
        names = groups_here(options.mesh, place, names)
    groups = Groups(place, *names, options.context, tuple(options.context_ranks))
    q_length, k_length = _lengths(options, q, k)
    mask = _mask(options, documents, q_length)
    hidden = place.ulysses > 1 and k_shared is None
    heads = split_heads(q.shape[1], k.shape[1], place.ulysses, hidden=hidden)
    sequences = Sequences(q_length, k_length, options.order, mask, options.replicated)
    need = Need.of(q, v, masked=mask.blocks is not None, softcap=options.softcap)
    kernel = select_kernel(options.kernel, need)
    scores = Scores(kernel, options.scale, options.softcap)
    published = options.schedule == "published"
    return Call(groups, sequences, scores, heads, published, options.rotate, options.rotate_forward)


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
) -> tuple["Call", Tensor]:
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
    mesh = options.mesh if mesh is None else mesh
    with refusing_together(mesh):
        if options.mask_key:
            check_mask(options.mask_key, options.mask, q.shape[0], q.shape[1], *_lengths(options, q, k), q.device.type)
        call = make_call(options, q, k, v, k_shared, documents)
    signature = {**(further or {}), **_signature(options, q, k, v, k_shared, sinks), "the documents": digest(documents)}
    signature["the kernel that runs"] = f"{call.scores.kernel.name}, {call.scores.kernel.version}"
    values = [str(value) for value in signature.values()]
    return call, torch.ops.wallfacer_dt.agree(q, what, list(signature), values, mesh, None)


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
    torch.ops.wallfacer_dt.agree(x, f"the backward of {what}", [], [], mesh, number)


def _lengths(options: Options, q: Tensor, k: Tensor) -> tuple[int, int]:
    """Queries and keys in the whole sequence."""
    if options.lengths:
        return options.lengths[0], options.lengths[1]
    ranks = Coordinate(*options.place).size
    return (q.shape[2] - options.replicated) * ranks, (k.shape[2] - options.replicated) * ranks


def _mask(options: Options, documents: Tensor | None, length: int) -> Mask:
    left, right = (None if n < 0 else n for n in options.window)
    return Mask(
        left,
        0 if options.is_causal else right,
        options.prefix,
        boundaries(documents, options.packed, length) if documents is not None else (),
        known_blocks(options.mask) if options.mask else None,
    )


def _signature(
    options: Options, q: Tensor, k: Tensor, v: Tensor, k_shared: Tensor | None, sinks: Tensor | None
) -> dict[str, Hashable]:
    """What must be the same on all ranks; what follows from other things comes after them."""

    def shape(x: Tensor | None) -> Hashable:
        # Shards of a sequence whose length is given need not be equal.
        return x if x is None else (*x.shape[:2], "L" if options.lengths else x.shape[2], x.shape[3])

    place = Coordinate(*options.place)
    return {
        "cp_ulysses x cp_ring x cp_team": place.axes,
        "length": tuple(options.lengths) or "not given",
        "the shape of q": shape(q),
        "the shape of k": shape(k),
        "the head dim of v": v.shape[-1],
        "the shape of k_shared": shape(k_shared),
        "the shape of sinks": None if sinks is None else tuple(sinks.shape),
        "the dtype of q": q.dtype,
        **{name: getattr(options, name) for name in _COMPARED},
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
        published: the published schedule.
        rotate: the side that moves in the backward.
        rotate_forward: the side that moves in the forward.
    """

    groups: Groups
    sequences: Sequences
    scores: Scores
    heads: tuple[tuple[Heads, ...], ...]
    published: bool
    rotate: str
    rotate_forward: str

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
        place, published = self.groups.place, self.published
        stationary: Side = "kv" if rotate == "q" else "q"
        return make_schedule(place, self.sequences, published=published, stationary=stationary, backward=backward)

    def _execute(
        self, schedule: Schedule, arithmetic: Arithmetic, queries: Operand, keys: Operand
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """What was computed for own queries and own keys."""
        if schedule.stationary == "q":
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
        (q_rows, queries), (k_rows, keys) = (exchanged(self.sequences, side, place) for side in ("q", "kv"))
        exchange = HeadExchange(self.groups.ulysses, place.ulysses_rank, self.heads, (q_rows, k_rows), (queries, keys))
        return exchange.run(tensors, kinds, lambda number, given: compute(mine[number], given), result_kinds)

    def _scores(self, heads: Heads) -> Scores:
        blocks = self.sequences.mask.blocks
        if blocks is None:
            return self.scores

        def visible(queries: Spans, keys: Spans, device: torch.device) -> Tensor:
            return blocks.visible(range(*heads.q), queries, keys).to(device)

        return Scores(self.scores.kernel, self.scores.scale, self.scores.softcap, visible)


_KEY_KINDS: list[Kind] = ["kv", "kv", "shared"]
