"""The search: every candidate predicted, what does not fit dropped, the rest ranked, each with a line that says why.

Note [What predictions do not tell apart]
Predicted times are right to a few percent. A team's rank gathers, merges and exchanges more than one of a ring or of
Ulysses alone, and is right where that saves time on links. So it is ranked behind what is predicted of it by 3% of its
attention's time, forward and backward. On emulated clusters a predicted choice was slower than a ring or USP by up to
3.6% without this, and always had a team (docs/benchmarks/cluster.md).
"""

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from wallfacer_dt.layout import check_length
from wallfacer_dt.mesh import context_mesh
from wallfacer_dt.metp import METPAttentionParallel, METPParallel
from wallfacer_dt.order import TokenOrder
from wallfacer_dt.planning.candidates import Candidate, as_usual, attentions, with_layers
from wallfacer_dt.planning.cluster import Cluster, PlanningError
from wallfacer_dt.planning.division import Division
from wallfacer_dt.planning.layer import Layer
from wallfacer_dt.planning.model import ModelShape, SequenceShape, kinds_of_layers, mean_of_layers
from wallfacer_dt.planning.only import ANY, Only, refuse
from wallfacer_dt.planning.predict import (
    AttentionCost,
    Prediction,
    attention_costs,
    least_attention,
    least_computing,
    least_node_bytes,
    least_projections,
    mean_spent,
    predict,
    step_bytes,
)
from wallfacer_dt.planning.reasons import longer
from wallfacer_dt.planning.stack import least_memory, stack_memory
from wallfacer_dt.planning.step import Spent, by_kind, least_step
from wallfacer_dt.planning.units import format_size, format_time
from wallfacer_dt.styles import WallFacerParallel

if TYPE_CHECKING:
    from wallfacer_dt.planning.profiling import Profile


@dataclass(frozen=True, slots=True)
class Ranked:
    """A candidate with what was predicted of it.

    Attributes:
        candidate: it.
        prediction: of a step.
        why: it is where it is, in one line.
        measured: seconds of a step, where they were measured.
        handicap: seconds by which a team is ranked behind what is predicted of it.
    """

    candidate: Candidate
    prediction: Prediction
    why: str
    measured: float | None = None
    handicap: float = 0.0

    @property
    def seconds(self) -> float:
        """Measured, or else predicted."""
        return self.prediction.seconds if self.measured is None else self.measured


@dataclass(frozen=True, slots=True)
class Plan:
    """What was chosen, and among what.

    Attributes:
        model: that was planned for.
        sequence: likewise.
        cluster: likewise.
        ranked: what was measured, fastest first, then what is predicted, likewise, but that a team must save more: see
            Note [What predictions do not tell apart]. As many as were asked for; the first is chosen. Of a mesh,
            placement and schedule one, with the rotations and layers that suit it best.
        dropped: those of which nothing fits into memory, as far as the search came, each with what holds least.
        considered: how many attentions there were to choose from.
        only: what all plans had to have, in words.
    """

    model: ModelShape
    sequence: SequenceShape
    cluster: Cluster
    ranked: tuple[Ranked, ...]
    dropped: tuple[Ranked, ...] = ()
    considered: int = 0
    only: str = ""

    @property
    def chosen(self) -> Candidate:
        """The first."""
        return self.ranked[0].candidate

    @property
    def prediction(self) -> Prediction:
        """Of the chosen."""
        return self.ranked[0].prediction

    def mesh(self, device_type: str) -> DeviceMesh:
        """The chosen context mesh; all ranks call it together.

        Args:
            device_type: ``"cpu"``, ``"cuda"``, ...

        Returns:
            A mesh over all ranks, see :func:`wallfacer_dt.context_mesh`.

        Raises:
            ValueError: there are other ranks than were planned for.
        """
        it = self.chosen
        return context_mesh(device_type, it.ring, it.team, ulysses=it.ulysses, placement=it.placement)

    @property
    def has_two_masks(self) -> bool:
        """Whether some layers alone have the sequence's window."""
        return len(kinds_of_layers(self.model, self.sequence)) > 1

    @property
    def attention_options(self) -> dict[str, Any]:
        """Arguments of :class:`wallfacer_dt.WallFacerParallel` that say what was chosen; all but the order.

        Where some layers alone have the window, of these.
        """
        it, sequence = self.chosen, self.sequence
        return {
            "is_causal": sequence.is_causal,
            "schedule": it.schedule,
            "rotate": it.rotate,
            "rotate_forward": it.rotate_forward,
            "window_size": kinds_of_layers(self.model, sequence)[-1][1].window_size,
            "length": sequence.length if sequence.length % it.size else None,
            "kernel": self.cluster.kernels.attention,
        }

    def order(self, mesh: DeviceMesh) -> TokenOrder:
        """The chosen token order, to deal sequences out in and for :meth:`styles`.

        Args:
            mesh: what :meth:`mesh` makes.

        Returns:
            The order.
        """
        return TokenOrder(self.chosen.order, mesh)

    def styles(
        self,
        order: TokenOrder,
        *,
        attention: str = "layers.*.attention.inner_attention",
        projections: str = "layers.*.attention",
        query: str = "wq",
        key: str = "wk",
        value: str = "wv",
        output: str = "wo",
        rotary: str | None = "interleaved",
        feed_forward: str = "layers.*.feed_forward",
        up: str | None = None,
        down: str = "w2",
        gate: str | None = None,
        activation: str = "silu",
        scale: float | None = None,
        kernel: str | None = None,
        layout: str = "BLNH",
        check: bool = True,
        windowed: bool | None = None,
    ) -> dict[str, ParallelStyle]:
        """The chosen plan for ``parallelize_module``; names are by default those of torchtitan's Llama 3.

        But for those of attention with its projections, which are Llama's own: METP takes no masks, as torchtitan's
        attention is called with.

        A checkpoint (``plan.chosen.checkpoint``) is the model's to place.

        Args:
            order: in which sequences are dealt out: what :meth:`order` makes.
            attention: the inner attention's fully qualified name, used where METP's attention was not chosen.
            projections: that of attention with its projections, used where it was.
            query: the projection to queries, likewise.
            key: to keys.
            value: to values.
            output: the one back.
            rotary: see :class:`wallfacer_dt.METPAttentionParallel`.
            feed_forward: the feed-forward's, used only where METP was chosen for it.
            up: its projection to the hidden units; None: ``"w3"`` beside a gate, otherwise ``"w1"``.
            down: the one back.
            gate: the one that the activation is applied to; None: ``"w1"`` if the model is gated.
            activation: see :class:`wallfacer_dt.METPParallel`.
            scale: see :class:`wallfacer_dt.WallFacerParallel`.
            kernel: likewise; None: that of the cluster's rates.
            layout: likewise.
            check: compare modules with their styles first.
            windowed: names are those of layers that have the window; False: of the others. Said where some layers
                alone have one (``plan.model.windowed_layers``), and there only: call it for both.

        Returns:
            ``{fully qualified name: style}``.

        Raises:
            ValueError: ``windowed`` was not said where it must be, or where it must not.
        """
        if (windowed is not None) != self.has_two_masks:
            raise ValueError(
                "windowed must be said where some layers alone have a window, and there only, got "
                f"{windowed} of {self.model.windowed_layers} of {self.model.layers} layers"
            )
        told: dict[str, Any] = self.attention_options | ({} if kernel is None else {"kernel": kernel})
        told |= {"window_size": None} if windowed is False else {}
        inner = WallFacerParallel(**told, order=order, scale=scale, layout=layout, check=check)
        styles: dict[str, ParallelStyle] = {attention: inner}
        if self.chosen.projections == "metp":
            outer = METPAttentionParallel(
                query=query, key=key, value=value, output=output, head_dim=self.model.dim, rotary=rotary,
                attention=inner, check=check,
            )  # fmt: skip
            styles = {projections: outer}
        if self.chosen.feed_forward == "metp":
            gate = gate or ("w1" if self.model.gated else None)
            up = up or ("w3" if gate else "w1")
            styles[feed_forward] = METPParallel(up=up, down=down, gate=gate, activation=activation, check=check)
        return styles


def plan(
    model: ModelShape,
    sequence: SequenceShape,
    cluster: Cluster,
    *,
    only: Mapping[str, int | str] | None = None,
    profile: "Profile | None" = None,
    keep: int | None = 5,
    margin: float = 0.03,
) -> Plan:
    """Choose how the ranks of a cluster share sequences (WallFacer section 3.4, with more to choose from).

    Every size of Ulysses, ring and team, placement, schedule and rotations are predicted: what it receives to the byte,
    its time by its own schedule on links of two levels, and its memory. Layers are added where the model has a
    feed-forward: METP or not, and what is checkpointed; of a mesh's rotations and layers the fastest that fits is kept.

    Args:
        model: sizes; without a feed-forward attention alone is planned.
        sequence: what a step takes.
        cluster: where.
        only: values that plans must have, by names of :class:`Candidate`'s attributes, as ``{"ring": 8}``.
        profile: what was measured; it goes before what is predicted.
        keep: how many plans to rank, None for all, which takes longer: memory is predicted for no more than that takes.
        margin: a team is ranked as if its attention took longer by this part, see Note [What predictions do not tell
            apart].

    Returns:
        The plan.

    Raises:
        PlanningError: nothing fits into memory, or has what ``only`` asks for.
        TypeError: ``keep`` is no int.
        ValueError: ``profile`` is of other ranks, ``only`` has another name, ``keep`` is below 1, or ``margin`` below 0
            or infinite.
    """
    if keep is not None:
        check_length(keep, "keep")
    if not 0 <= margin < float("inf"):
        raise ValueError(f"margin must be at least 0, and a number, got {margin}")
    if profile is not None:
        profile.check_is_of(cluster)
    asked = Only.of(only)
    some = [one for one in attentions(model, sequence, cluster, asked) if any(with_layers(one, model, asked))]
    if not some:
        every = [*attentions(model, sequence, cluster)]
        layers = chain.from_iterable(with_layers(one, model) for one in every)
        raise refuse(asked, chain(((one, asked.attention) for one in every), ((one, asked.layers) for one in layers)))
    search = _Search(model, sequence, cluster, profile, margin, asked)
    search.add(some)
    ranked, dropped = search.run(keep)
    if not ranked:
        least = min(dropped, key=lambda one: one.prediction.memory)
        raise PlanningError(
            f"nothing fits: memory is {format_size(cluster.memory or 0)} a rank, and the least that any plan "
            f"{f'with {asked} ' * bool(only)}needs is "
            f"{format_size(least.prediction.memory)} ({least.candidate}); use more ranks, or shorter sequences",
            about="memory",
        )
    explained = tuple(_because(one, ranked[0], search.layer) for one in ranked)
    too_large = tuple(
        replace(one, why=f"needs {format_size(one.prediction.memory)}, a rank has {format_size(cluster.memory or 0)}")
        for one in sorted(dropped, key=lambda one: one.prediction.memory)
    )
    return Plan(model, sequence, cluster, explained, too_large, len(some), str(asked))


_UNKNOWN = -1  # bytes, so that they are asked for before those that are as fast are looked at


@dataclass(frozen=True, slots=True)
class _Choice:
    """A candidate in the queue, with the least that it can take and receive until it has been predicted."""

    ranked: Ranked
    costs: tuple[AttentionCost, ...] = ()  # of attention, as if its projections were plain, where that is known
    is_predicted: bool = False


_KEPT: dict[str, Any] = {"rotate": "kv", "rotate_forward": "kv"}

_Meshes = dict[int, list[Candidate]]
"""Attentions that differ in their rotations, by the number of their mesh."""


def _by_mesh(attentions: Sequence[Candidate]) -> dict[Candidate, list[Candidate]]:
    """Those that differ in nothing but what rotates."""
    groups: dict[Candidate, list[Candidate]] = {}
    for one in attentions:
        groups.setdefault(replace(one, **_KEPT), []).append(one)
    return groups


class _Search:
    """The choices of every mesh and schedule, fastest first.

    What takes longer to say is asked only of those whose turn comes: at first, of attentions that differ in placement
    and rotations, the least that they compute and launch; then of each choice the least that it takes, what it takes,
    its memory.
    """

    def __init__(
        self,
        model: ModelShape,
        sequence: SequenceShape,
        cluster: Cluster,
        profile: "Profile | None",
        margin: float,
        asked: Only = ANY,
    ) -> None:
        self.model, self.sequence, self.cluster, self.profile, self.margin = model, sequence, cluster, profile, margin
        self.asked = asked
        self.queue: list[tuple[tuple, int, int, _Choice | _Meshes]] = []
        self.left: list[int] = []

    def add(self, attentions: Sequence[Candidate]) -> None:
        """All there are to choose from, each with layers of every kind."""
        placements: dict[tuple, _Meshes] = {}
        for mesh, alike in enumerate(_by_mesh(attentions).values()):
            placements.setdefault((alike[0].axes, alike[0].schedule, alike[0].order), {})[mesh] = alike
            self.left.append(0)
        for meshes in placements.values():
            # Of any some may have been measured, which go first, however long they take.
            least = (True, 0.0, self._least(meshes), _UNKNOWN) if self.profile is None else (False, 0.0, 0.0, 0)
            self.queue.append((least, min(meshes), _UNKNOWN, meshes))

    def _least(self, meshes: "_Meshes") -> float:
        """Seconds below which no choice of meshes that differ in their placement is: what it computes, and launches."""
        alike = [*chain.from_iterable(meshes.values())]
        spent = least_computing(alike, self.model, self.sequence, self.cluster.kernels)
        every = with_layers(alike[0], self.model, self.asked)
        return _rounded(min(self._least_step(one, spent) for one in every) * (1 - 1e-9))

    def _least_node_bytes(self, meshes: "_Meshes") -> int:
        """Bytes into a node below which none of them is."""
        some = chain.from_iterable(meshes.values())
        return least_node_bytes(some, self.model, self.sequence, self.cluster)

    def _open(self, meshes: "_Meshes") -> None:
        """Have the choices of some meshes wait for their turn."""
        for mesh, alike in meshes.items():
            choices = [one for attention in alike for one in self._choices(attention)]
            self.left[mesh] = len(choices)
            for turn, one in enumerate(choices):
                heapq.heappush(self.queue, (_order(one.ranked), mesh, turn, one))

    def _choices(self, attention: Candidate) -> Iterator["_Choice"]:
        model, sequence, profile = self.model, self.sequence, self.profile
        least = [least_attention(attention, model, one, self.cluster) for _, one in kinds_of_layers(model, sequence)]
        ways = zip(*[one.spent for one in least], strict=True)
        ideal = [mean_of_layers(model, sequence, way) for way in ways]
        exact = tuple(one.cost for one in least if one.cost is not None)
        handicap = self._handicap(attention, sum(spent.seconds for spent in ideal) * (1 - 1e-9))
        for candidate in with_layers(attention, model, self.asked):
            usual = as_usual(candidate, self.cluster) if profile and self.asked.attention else candidate
            measured = profile.seconds(usual, model, sequence) if profile else None
            seconds = self._least_step(candidate, ideal) * (1 - 1e-9)
            received = step_bytes(self._division(candidate), model, sequence, *least)
            no_more = Prediction(seconds, 0.0, 0.0, 0.0, *received, 0)
            yield _Choice(Ranked(candidate, no_more, "", measured, handicap), exact if len(exact) == len(least) else ())

    def _least_step(self, candidate: Candidate, attention: Sequence[Spent]) -> float:
        """Seconds that no step of a candidate is below if attention takes this at least."""
        return least_step(self.layer(candidate), *self._with_projections(candidate, attention))

    def _with_projections(self, candidate: Candidate, attention: Sequence[Spent]) -> Sequence[Spent]:
        """What attention takes at least; under METP what it would take of all heads at once, and its projections.

        A group of heads takes no less than its part of all heads does: work goes by heads, and latencies do not.
        """
        if candidate.projections == "plain":
            return attention
        projections = least_projections(candidate, self.model, self.sequence, self.cluster)
        return [one.between(other) for one, other in zip(attention, projections, strict=True)]

    def _handicap(self, attention: Candidate, seconds: float) -> float:
        """See Note [What predictions do not tell apart]; ``seconds``: of its forward and backward in a layer."""
        return self.margin * self.model.layers * seconds if attention.team > 1 else 0.0

    def _predicted(self, choice: "_Choice") -> Ranked:
        candidate, told = choice.ranked.candidate, (self.model, self.sequence, self.cluster)
        plain = choice.costs or attention_costs(replace(candidate, projections="plain"), *told)
        costs = plain if candidate.projections == "plain" else attention_costs(candidate, *told)
        seconds = sum(spent.seconds for spent in mean_spent(self.model, self.sequence, plain))
        handicap = self._handicap(candidate, seconds)
        return replace(choice.ranked, prediction=predict(candidate, *told, *costs), handicap=handicap)

    def run(self, keep: int | None) -> tuple[list[Ranked], list[Ranked]]:
        """Those that fit, best first, of every mesh one; and, as small as can be, of those of which no choice fits.

        If nothing fits, of the latter only the smallest.
        """
        limit = self.cluster.memory
        ranked: list[Ranked] = []
        too_large: dict[int, list[tuple[int, _Choice]]] = {}
        is_done = [False] * len(self.left)
        heapq.heapify(self.queue)
        while self.queue and len(ranked) != keep:
            order, mesh, turn, choice = heapq.heappop(self.queue)
            if isinstance(choice, dict):
                if order[-1] == _UNKNOWN and self.queue and self.queue[0][0][2] == order[2]:
                    # As fast as another, as where it is FSDP that is waited for: bytes may say that neither is opened.
                    heapq.heappush(self.queue, ((*order[:-1], self._least_node_bytes(choice)), mesh, turn, choice))
                else:
                    self._open(choice)
                continue
            if is_done[mesh]:
                continue
            # What it holds at least is quick to say; what it holds takes longest.
            candidate = choice.ranked.candidate
            memory = self._memory(candidate) if choice.is_predicted else self._least_memory(candidate)
            if limit is not None and memory > limit:
                too_large.setdefault(mesh, []).append((memory, choice))
                self.left[mesh] -= 1
            elif not choice.is_predicted:
                one = self._ranked(choice)
                heapq.heappush(self.queue, (_order(one), mesh, turn, replace(choice, ranked=one, is_predicted=True)))
            else:
                ranked.append(_with_memory(choice.ranked, memory))
                is_done[mesh] = True
        dropped = [some for mesh, some in too_large.items() if not self.left[mesh]]
        # Where nothing fits, only the least of all is asked for: what each mesh holds takes longest to say.
        asked = dropped if ranked else [[*chain.from_iterable(dropped)]]
        return ranked, [self._smallest(some) for some in asked]

    def _smallest(self, some: list[tuple[int, _Choice]]) -> Ranked:
        """Of choices, by what they hold at least, the one that holds the least."""
        smallest: int | None = None
        alike: list[_Choice] = []
        for least, choice in sorted(some, key=lambda one: one[0]):
            if smallest is not None and smallest <= least:
                break
            memory = self._memory(choice.ranked.candidate)
            if smallest is None or memory < smallest:
                smallest, alike = memory, []
            alike += [choice] * (memory == smallest)
        assert smallest is not None, "a mesh has choices"
        return _with_memory(min(map(self._ranked, alike), key=_order), smallest)

    def _ranked(self, choice: _Choice) -> Ranked:
        return choice.ranked if choice.is_predicted else self._predicted(choice)

    def _memory(self, candidate: Candidate) -> int:
        return stack_memory(candidate, self.model, self.sequence).peak

    def _least_memory(self, candidate: Candidate) -> int:
        return least_memory(self._division(candidate), self.model, self.sequence)

    def layer(self, candidate: Candidate) -> Layer:
        """What all layers are."""
        return Layer(self._division(candidate), self.model, self.sequence, self.cluster)

    def _division(self, candidate: Candidate) -> Division:
        return Division(candidate, microbatch=self.sequence.batch)


def _with_memory(one: Ranked, memory: int) -> Ranked:
    return replace(one, prediction=replace(one.prediction, memory=memory))


def _order(one: Ranked) -> tuple:
    """What was measured first, then the fastest; of equally fast ones the one that sends less."""
    p, it = one.prediction, one.candidate
    axes = sum(size > 1 for size in it.axes)
    predicted = _rounded(p.seconds + one.handicap), p.node_bytes, p.rank_bytes, axes, it.schedule != "2d", p.seconds
    return one.measured is None, one.measured or 0.0, *predicted


def _rounded(seconds: float) -> float:
    """To four digits: what is that close is equally fast."""
    return float(f"{seconds:.4g}")


def _because(one: Ranked, first: Ranked, layer_of: Callable[[Candidate], Layer]) -> Ranked:
    p, best = one.prediction, first.prediction
    if one is first:
        how = "measured fastest" if one.measured is not None else "best"
        into_node = f", {format_size(p.node_bytes)} come into a node" if p.node_bytes else ""
        return replace(one, why=f"{how}: {p.waiting}{into_node}")
    slower = one.seconds / first.seconds - 1 if first.seconds else 0.0
    if one.measured is not None:
        return replace(one, why=f"measured {slower:+.0%}")
    if first.measured is not None:
        return replace(one, why="not measured")
    is_as_fast = _rounded(p.seconds) == _rounded(best.seconds)
    is_ranked_as_fast = _rounded(p.seconds + one.handicap) == _rounded(best.seconds + first.handicap)
    if one.handicap > first.handicap and not is_ranked_as_fast and (is_as_fast or p.seconds < best.seconds):
        how, more = "as fast" if is_as_fast else f"{slower:+.1%}", format_time(one.handicap - first.handicap)
        return replace(one, why=f"{how}: a team goes first where it saves {more}")
    if is_as_fast or is_ranked_as_fast:
        return replace(one, why=_as_fast(p, best))
    waits, computes = p.exposed - best.exposed, p.compute - best.compute
    if waits >= computes:
        return replace(one, why=f"{slower:+.0%}: waits {format_time(waits)} longer{_more_bytes(p, best)}")
    mine, others = layer_of(one.candidate), layer_of(first.candidate)
    why = longer(mine.division, others.division, by_kind(mine, p.compute), by_kind(others, best.compute))
    return replace(one, why=f"{slower:+.0%}: computes {format_time(computes)} longer ({why})")


def _as_fast(p: Prediction, best: Prediction) -> str:
    if p.node_bytes > best.node_bytes:
        return "as fast, but more bytes cross nodes"
    if p.rank_bytes > best.rank_bytes:
        return "as fast, but receives more"
    return "as fast, and receives as much"


def _more_bytes(p: Prediction, best: Prediction) -> str:
    if best.node_bytes and p.node_bytes > 1.005 * best.node_bytes:
        return f", {p.node_bytes / best.node_bytes:.2g} times the bytes into a node"
    if best.rank_bytes and p.rank_bytes > 1.005 * best.rank_bytes:
        return f", receives {p.rank_bytes / best.rank_bytes:.2g} times as much"
    return ", less of it hidden"
