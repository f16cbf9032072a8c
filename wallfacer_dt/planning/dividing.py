"""The search over all ways to divide ranks among data, tensor, pipeline, context and expert parallelism.

Of every division that can be, at first the least that it can take is said, with attention that only computes, or that
this is no less than another's, which computes less again; then context ranks get their attentions, and last are
simulated, and asked for their memory, those whose turn comes. So of what is ranked nothing was left out that is faster,
but for this. For a division's context ranks attentions are ranked alone, one sequence at a time, and the best few of
different meshes or schedules are tried, each with the rotations that are fastest, or where these do not fit with
others. And a pipeline's last stage has as many layers less as make the least that a step can take the least, of those
that may fit the two quickest.
"""

import heapq
import math
from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, count, islice, product
from operator import itemgetter

from wallfacer_dt.layout import check_length
from wallfacer_dt.planning.attention import flops_of_pair
from wallfacer_dt.planning.candidates import Candidate, attentions, with_layers
from wallfacer_dt.planning.cluster import Cluster, PlanningError
from wallfacer_dt.planning.division import Division
from wallfacer_dt.planning.layer import Layer
from wallfacer_dt.planning.model import ModelShape, SequenceShape, kinds_of_layers, mean_of_layers
from wallfacer_dt.planning.only import ANY, Only, Values, has, refuse
from wallfacer_dt.planning.predict import (
    AttentionCost,
    Prediction,
    attention_costs,
    least_computing,
    least_projections,
    mean_spent,
    predict_division,
)
from wallfacer_dt.planning.reasons import longer
from wallfacer_dt.planning.stack import division_memory, least_memory
from wallfacer_dt.planning.step import Spent, by_kind, least_of_stages
from wallfacer_dt.planning.units import format_size, format_time

MOST_SEQUENCES = 2**20
"""Of a step, of which no training has a part: of every divisor there are divisions."""

LOSS_CHUNKS = 8
"""As torchtitan's models have it by default, for which plans of divided ranks are printed."""

INTERLEAVES = 1, 2
"""Stages of a pipeline's rank: those of 1F1B, and torchtitan's default of interleaved 1F1B."""

_OF_STEPS = "interleave", "microbatch"  # what divisions with the same groups of ranks have of their own
_TRIED = 6  # attentions of a division of each token order, of different meshes or schedules


@dataclass(frozen=True, slots=True)
class RankedDivision:
    """A division with what was predicted of it.

    Attributes:
        division: it.
        prediction: of a step.
        why: it is where it is, in one line.
    """

    division: Division
    prediction: Prediction
    why: str = ""

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.prediction.seconds


@dataclass(frozen=True, slots=True)
class DivisionPlan:
    """What was chosen, and among what.

    Attributes:
        model: that was planned for.
        sequence: one of those of a step.
        cluster: whose ranks are divided.
        sequences: of a step, over all ranks.
        ranked: what fits, fastest first; one for every number of data, tensor, pipeline and context ranks, and
            replicas, with the microbatches, expert ranks, layers and attention that suit it best. The first is chosen.
        by_context: the fastest for every number of context ranks of which something fits, ascending.
        contexts: all numbers of context ranks that there were to choose from, ascending.
        considered: how many divisions, of which attentions are not counted.
        only: what they all had to have, in words.
    """

    model: ModelShape
    sequence: SequenceShape
    cluster: Cluster
    sequences: int
    ranked: tuple[RankedDivision, ...]
    by_context: tuple[RankedDivision, ...]
    contexts: tuple[int, ...]
    considered: int
    only: str = ""

    @property
    def chosen(self) -> Division:
        """The first."""
        return self.ranked[0].division

    @property
    def prediction(self) -> Prediction:
        """Of the chosen."""
        return self.ranked[0].prediction

    def enough_context(self, gain: float = 0.01) -> int:
        """The fewest context ranks of which no more make a step shorter by more than ``gain``, a part of it.

        Args:
            gain: that more ranks must bring.

        Returns:
            Ranks.

        Raises:
            ValueError: ``gain`` is no such part.
        """
        if not 0 <= gain < 1:
            raise ValueError(f"gain must be at least 0 and below 1, got {gain}")
        times = [(one.division.context.size, one.seconds) for one in self.by_context]
        return next(
            size for i, (size, seconds) in enumerate(times) if all(seconds * (1 - gain) <= t for _, t in times[i + 1 :])
        )


def divide(
    model: ModelShape,
    sequence: SequenceShape,
    cluster: Cluster,
    sequences: int,
    *,
    only: Mapping[str, int | str] | None = None,
    keep: int = 10,
) -> DivisionPlan:
    """Choose how ranks are divided for steps of so many sequences.

    Args:
        model: sizes, with a feed-forward.
        sequence: one of the step's, with a batch of 1.
        cluster: whose ranks.
        sequences: of a step, over all ranks.
        only: values that divisions must have, by names of :class:`Division`'s attributes, of which ``context`` is how
            many ranks share a sequence, and of :class:`Candidate`'s, as ``{"tensor": 8, "checkpoint": "full"}``.
        keep: how many divisions to rank.

    Returns:
        The plan.

    Raises:
        PlanningError: nothing can be, has what ``only`` asks for or fits into memory, or there are more than 2^20
            sequences.
        TypeError: ``keep`` or ``sequences`` is no int.
        ValueError: ``keep``, ``sequences`` or the batch are none, or ``only`` has another name.
    """
    check_length(keep, "keep")
    check_length(sequences, "sequences")
    if sequence.batch != 1:
        raise ValueError(f"batch must be 1 where ranks are divided, which chooses microbatches, got {sequence.batch}")
    if sequences > MOST_SEQUENCES:
        raise PlanningError(f"must be at most {MOST_SEQUENCES}, got {sequences}", about="sequences")
    if not model.ffn:
        raise PlanningError("ranks are divided for whole layers, and there is no feed-forward", about="ffn")
    asked = Only.of(only, divides=True)
    more = (n for name, n in asked.groups if name == "interleave" and isinstance(n, int) and n > 0)
    interleaves, search = sorted({*INTERLEAVES, *more}), _Search(model, sequence, cluster, asked)
    some = divisions(model, sequence, cluster, sequences, interleaves, asked.groups)
    every = [one for one in some if search.is_asked(one)]
    if not every:
        there = list(divisions(model, sequence, cluster, sequences, interleaves))
        if there:
            raise refuse(asked, search.values(there))
        raise PlanningError(
            f"{cluster.ranks} ranks cannot be divided for {sequences} sequences of {sequence.length} tokens",
            about="sequences",
        )
    for some in _by_checkpoint(every):
        search.add(*some)
    search.run(keep)
    if not search.ranked:
        raise PlanningError(
            f"nothing fits: memory is {format_size(cluster.memory or 0)} a rank, and the least that any division "
            f"{f'with {asked} ' * bool(only)}needs is {format_size(search.least_needed())} or more; use more ranks, "
            "shorter sequences or fewer of them",
            about="memory",
        )
    first = search.ranked[0]
    ranked = tuple(replace(one, why=_why(one, first, search.layer)) for one in search.ranked[:keep])
    by_context = tuple(search.by_context[size] for size in sorted(search.by_context))
    contexts = tuple(sorted({division.context.size for division in every}))
    return DivisionPlan(model, sequence, cluster, sequences, ranked, by_context, contexts, len(every), str(asked))


def divisions(
    model: ModelShape,
    sequence: SequenceShape,
    cluster: Cluster,
    sequences: int,
    interleaves: Sequence[int] = INTERLEAVES,
    groups: Values = (),
) -> Iterator[Division]:
    """Every division, with layers of every kind; its context ranks are a ring, which stands for all their attentions.

    Tensor ranks are in one node, and divide heads, key heads, hidden units and a context rank's tokens; a model with
    experts or latents has none, and its experts are dealt to ranks that share weights, and divide them; where these are
    more than experts, others that share an expert divide its dims, as FSDP2 asks for. Replicas are whole nodes, or
    several. Sequences divide, every stage has a layer, and there are as many microbatches as a pipeline has ranks or
    more, as torch's 1F1B asks for; where ranks have several stages, microbatches go round evenly. Of how many layers
    less the last stage has nothing is said yet. No group lies across the edge of a node in one place and not in
    another.

    Args:
        model: sizes.
        sequence: one of the step's.
        cluster: whose ranks.
        sequences: of a step.
        interleaves: how many stages a pipeline's rank may have.
        groups: values, of which those that say how ranks are divided are looked at: others are passed over at once.

    Yields:
        The divisions.
    """
    ranks = tuple((name, value) for name, value in groups if name not in _OF_STEPS)
    per_node = min(cluster.ranks, cluster.ranks_per_node)
    for pipeline in _divisors(cluster.ranks):
        each = [n for n in interleaves if pipeline * n <= model.layers] if pipeline > 1 else [1]
        for tensor in _divisors(cluster.ranks // pipeline):
            if not each or not _splits(tensor, per_node, model):
                continue
            for data in _divisors(cluster.ranks // pipeline // tensor):
                context = cluster.ranks // pipeline // tensor // data
                if sequences % data or -(-sequence.length // context) % tensor:
                    continue
                for replicas in _divisors(data):
                    if replicas > 1 and cluster.ranks // pipeline // replicas % per_node:
                        continue
                    one = Division(
                        Candidate(context), tensor, data // replicas, replicas, pipeline, loss_chunks=LOSS_CHUNKS
                    )
                    for expert in _divisors(math.gcd(one.weight_ranks, model.experts) if model.experts else 1):
                        dealt = replace(one, expert=expert)
                        if has(dealt, ranks) and _shards_experts(dealt, model):
                            yield from _with_microbatches(dealt, each, model, cluster, sequences // data)


def _with_microbatches(
    division: Division, interleaves: Sequence[int], model: ModelShape, cluster: Cluster, each: int
) -> Iterator[Division]:
    if not all(group.is_aligned for group in division.groups(cluster).values()):
        return
    for microbatch in _divisors(each):
        microbatches = each // microbatch
        if microbatches < division.pipeline:
            continue
        goes_round = microbatches % max(1, microbatches // division.pipeline) == 0  # as torch asks for
        taken = {"microbatch": microbatch, "microbatches": microbatches}
        stages = [n for n in interleaves if n == 1 or goes_round]
        for context, interleave in product(with_layers(division.context, model), stages):
            if division.tensor == 1 or "metp" not in (context.feed_forward, context.projections):
                yield replace(division, context=context, interleave=interleave, **taken)


def _splits(tensor: int, per_node: int, model: ModelShape) -> bool:
    if tensor > 1 and (model.experts or model.kv_rank):
        return False
    return per_node % tensor == 0 and not any(n % tensor for n in (model.heads, model.keys, model.ffn))


def _shards_experts(division: Division, model: ModelShape) -> bool:
    """Whether FSDP2 can: a second dim must divide, which is hidden units or the model dim."""
    divide = not (model.ffn % division.expert_ranks or model.hidden % division.expert_ranks)
    return divide or not division.shards_by_second_dim(model)


@lru_cache(maxsize=1024)
def _divisors(number: int) -> tuple[int, ...]:
    """Ascending."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return tuple(sorted({*small, *(number // n for n in small)}))


def _by_checkpoint(some: Iterable[Division]) -> Iterable[list[Division]]:
    """Of :func:`divisions` those together that differ in what they compute again: first nothing, last most."""
    found: dict[Division, list[Division]] = {}
    for one in some:
        found.setdefault(replace(one, context=replace(one.context, checkpoint="none")), []).append(one)
    return found.values()


@dataclass(frozen=True, slots=True)
class _Choice:
    """A division in the queue: of all attentions, of one, and with what that takes; or what stands for others, none of
    which takes less.
    """

    division: Division
    costs: tuple[AttentionCost, ...] = ()
    prediction: Prediction | None = None
    later: tuple[Division, ...] = ()


class _Search:
    """The divisions, by the least that they can take."""

    def __init__(self, model: ModelShape, sequence: SequenceShape, cluster: Cluster, asked: Only = ANY) -> None:
        self.model, self.sequence, self.cluster, self.asked = model, sequence, cluster, asked
        self.queue: list[tuple[float, int, _Choice]] = []
        self.number = count()
        self.left: dict[int, int] = {}
        self.ranked: list[RankedDivision] = []
        self.by_context: dict[int, RankedDivision] = {}
        self.kinds: set[tuple[int, ...]] = set()
        self.turned: set[Division] = set()
        self.limit = math.inf if cluster.memory is None else cluster.memory
        self.refused: list[tuple[int, Division]] = []  # with what their first ranks need
        self.least = 0

    def is_asked(self, division: Division) -> bool:
        """Whether it has what is asked for, or some attention of its context ranks has."""
        asked = self.asked
        if not (has(division, asked.groups) and has(division.context, asked.layers)):
            return False
        if not asked.attention:
            return True
        model, cluster, _ = self._context(division)
        has_ulysses = division.context.projections == "plain"
        return _has_attention(model, cluster, self.sequence, has_ulysses, asked)

    def values(self, there: Sequence[Division]) -> Iterator[tuple[object, Values]]:
        """All that a refusal looks at."""
        asked = self.asked
        for division in there:
            yield division, asked.groups
            yield division.context, asked.layers
        for model, cluster in {self._context(one)[:2] for one in there}:
            yield from ((one, asked.attention) for one in attentions(model, self.sequence, cluster))

    def add(self, division: Division, *later: Division) -> None:
        """One of which the attention is to be chosen, unless it cannot fit; and others that compute more."""
        # Where a pipeline's last stage has less, the first has as much or more.
        first = least_memory(division, self.model, self._taken(division), of_first=True)
        if first > self.limit:
            self.refused.append((first, division))
        else:
            stages = sorted(least_of_stages(self.layer(division), lambda own: self._ideal(division, own)))
            for seconds, one in self._may_fit(division, stages):
                self._push(seconds, _Choice(one))
                if later:
                    self._push(stages[0][0], _Choice(one, later=later))
                return
        if later:
            self.add(*later)

    def _may_fit(self, division: Division, stages: Iterable[tuple[float, int]]) -> Iterator[tuple[float, Division]]:
        """With as many layers less as these of its last stage, where it is not known not to fit."""
        for seconds, less in stages:
            one = replace(division, last_less=less)
            if self._fits(least_memory(one, self.model, self._taken(one))):
                yield seconds, one

    def _fits(self, needed: int) -> bool:
        """Whether it does; of what does not the least is told where nothing does."""
        if needed > self.limit:
            self.least = min(self.least or needed, needed)
        return needed <= self.limit

    def least_needed(self) -> int:
        """Where nothing fits, of all divisions."""
        for first, division in sorted(self.refused, key=itemgetter(0)):
            if 0 < self.least <= first:
                break
            for less in range(self.model.layers if division.pipeline > 1 else 1):
                one, taken = replace(division, last_less=less), self._taken(division)
                if min(one.stage_layers(self.model)) < 1:
                    break
                if 0 < self.least <= least_memory(one, self.model, taken, of_first=True):
                    break  # with still less layers of the last stage the first has no fewer
                self._fits(least_memory(one, self.model, taken))
        return self.least

    def run(self, keep: int) -> None:
        """Rank so many, and find the fastest for every number of context ranks."""
        while self.queue and (len(self.ranked) < keep or self.left.keys() - self.by_context.keys()):
            _, _, choice = heapq.heappop(self.queue)
            size = choice.division.context.size
            self.left[size] -= 1
            if not self.left[size]:
                del self.left[size]
            if _kind(choice.division) in self.kinds or (len(self.ranked) >= keep and size in self.by_context):
                continue
            if choice.later:
                self.add(*choice.later)
            elif not choice.costs:
                self._expand(choice.division)
            elif choice.prediction is None:
                self._predict(choice.division, choice.costs)
            else:
                self._rank(choice.division, choice.prediction)

    def _expand(self, division: Division) -> None:
        self._offer(division, self._attentions(division))

    def _turn(self, division: Division) -> None:
        """Of a mesh whose fastest rotations do not fit the others, which hold other tensors."""
        mine = division.context
        alike = replace(division, context=replace(mine, rotate="kv", rotate_forward="kv"))
        if mine.ring * mine.team > 1 and mine.schedule != "published" and alike not in self.turned:
            self.turned.add(alike)
            ways = product(("kv", "q"), ("kv", "q"))
            turned = [replace(mine, rotate=one, rotate_forward=other) for one, other in ways]
            self._offer(division, [one for one in turned if one != mine and has(one, self.asked.attention)])

    def _offer(self, division: Division, offered: Iterable[Candidate]) -> None:
        heads, where, siblings = self._context(division)
        for attention in offered:
            one = replace(division, context=replace(attention, **division.context.layers))
            alone = replace(one.context, feed_forward="plain", checkpoint="none")  # as attention's time depends on
            costs = _costs(alone, heads, self._taken(division), where, siblings=siblings)
            stages = least_of_stages(self.layer(one), lambda own, of=costs: mean_spent(heads, self.sequence, of, own))
            may_fit = self._may_fit(one, sorted(stages))
            for seconds, it in islice(may_fit, 1 if self.cluster.memory is None else 2):  # one may fit alone
                self._push(seconds, _Choice(it, costs))

    def _predict(self, division: Division, costs: tuple[AttentionCost, ...]) -> None:
        prediction = predict_division(division, self.model, self._taken(division), self.cluster, *costs)
        self._push(prediction.seconds, _Choice(division, costs, prediction))

    def _rank(self, division: Division, prediction: Prediction) -> None:
        peak = division_memory(division, self.model, self._taken(division)).peak
        if not self._fits(peak):
            self._turn(division)
            return
        one = RankedDivision(division, replace(prediction, memory=peak))
        self.kinds.add(_kind(division))
        self.by_context.setdefault(division.context.size, one)
        self.ranked.append(one)

    def _push(self, seconds: float, choice: _Choice) -> None:
        size = choice.division.context.size
        self.left[size] = self.left.get(size, 0) + 1
        heapq.heappush(self.queue, (seconds, next(self.number), choice))

    def _taken(self, division: Division) -> SequenceShape:
        return replace(self.sequence, batch=division.microbatch)

    def layer(self, division: Division) -> Layer:
        """What all layers are."""
        return Layer(division, self.model, self._taken(division), self.cluster)

    def _ideal(self, division: Division, own: int) -> tuple[Spent, Spent]:
        """Attention that has nothing to wait for, whose ranks have equally much to do, in the mean of a rank's own
        layers; under METP its projections.
        """
        kernels, heads = self.cluster.kernels, division.heads_of(self.model)
        sees = [one.pairs() for _, one in kinds_of_layers(self.model, self.sequence)]
        seen = mean_of_layers(self.model, self.sequence, sees, own)
        pairs = division.microbatch * seen * heads.heads / division.context.size
        forward, backward = (
            pairs * flops_of_pair(*heads.dims, backward=way) / rate
            for way, rate in ((False, kernels.forward), (True, kernels.backward))
        )
        ideal = Spent(forward, forward), Spent(backward, backward)
        if division.context.projections == "plain":
            return ideal
        where = division.context_cluster(self.cluster)
        projections = least_projections(division.context, heads, self._taken(division), where)
        return ideal[0].between(projections[0]), ideal[1].between(projections[1])

    def _attentions(self, division: Division) -> list[Candidate]:
        has_ulysses = division.context.projections == "plain"
        return _best_attentions(*self._context(division), self.sequence, has_ulysses, self.asked)

    def _context(self, division: Division) -> tuple[ModelShape, Cluster, int]:
        """Heads of a tensor rank, the ranks of a context group, and how many of these groups share a node's link."""
        siblings = division.groups(self.cluster)["context"].siblings
        return division.heads_of(self.model), division.context_cluster(self.cluster), siblings


@lru_cache(maxsize=128)
def _has_attention(
    model: ModelShape, cluster: Cluster, sequence: SequenceShape, has_ulysses: bool, asked: Only
) -> bool:
    """Whether there is an attention of those asked for."""
    return any(has_ulysses or one.ulysses == 1 for one in attentions(model, sequence, cluster, asked))


@lru_cache(maxsize=128)
def _best_attentions(
    model: ModelShape, cluster: Cluster, siblings: int, sequence: SequenceShape, has_ulysses: bool, asked: Only
) -> list[Candidate]:
    """Of each token order the attentions to try, of different meshes or schedules the fastest alone; not to be changed.

    By turns on devices that never wait for a host, and on those that do: in a layer, or with more sequences at a time,
    it may be hidden or not.
    """
    kinds: dict[tuple, list[Candidate]] = {}
    for one in attentions(model, sequence, cluster, asked):
        if has_ulysses or one.ulysses == 1:
            kinds.setdefault((one.order, one.axes, one.schedule), []).append(one)
    told = model, cluster, siblings, sequence
    best: list[Candidate] = []
    for order in dict.fromkeys(order for order, *_ in kinds):
        alike = [tuple(some) for kind, some in kinds.items() if kind[0] == order]
        least = {some: least_computing(some, model, sequence, cluster.kernels, together=False) for some in alike}
        by_turns = zip(*(_fastest(least, *told, by_host) for by_host in (False, True)), strict=True)
        best += [*dict.fromkeys(chain(*by_turns))][:_TRIED]
    return best


_Alike = tuple[Candidate, ...]
"""Attentions that differ in placement and rotations."""


def _fastest(
    computing: Mapping[_Alike, list[Spent]], model: ModelShape, cluster: Cluster, siblings: int,
    sequence: SequenceShape, by_host: bool,
) -> list[Candidate]:  # fmt: skip
    """The fastest of as many of these as are tried, in order, by what they compute at least. No others are looked at
    than may be among them.
    """
    least = {
        alike: sum(max(way.seconds, way.host * by_host) for way in ways) * (1 - 1e-9)
        for alike, ways in computing.items()
    }
    found: list[tuple[tuple[float, ...], int, Candidate]] = []
    for number, alike in enumerate(sorted(least, key=least.__getitem__)):
        if number >= _TRIED and least[alike] > found[_TRIED - 1][0][0]:
            break
        seconds, one = _alone(alike, model, cluster, siblings, sequence)[by_host]
        insort(found, (seconds, number, one))
    return [one for *_, one in found[:_TRIED]]


@lru_cache(maxsize=1024)
def _alone(
    alike: _Alike, model: ModelShape, cluster: Cluster, siblings: int, sequence: SequenceShape
) -> list[tuple[tuple[float, ...], Candidate]]:
    """Of these the fastest, with its seconds: by devices that never wait for a host, and by those that do."""
    by_device, by_both = [], []
    for number, one in enumerate(alike):
        costs = attention_costs(one, model, sequence, cluster, siblings=siblings, together=False)
        alone = sum(way.seconds for way in mean_spent(model, sequence, costs))
        both = mean_of_layers(model, sequence, [cost.seconds for cost in costs])
        by_device.append(((alone,), number, one))
        by_both.append(((both, alone), number, one))
    return [(seconds, one) for seconds, _, one in map(min, (by_device, by_both))]


_costs = lru_cache(maxsize=1024)(attention_costs)


def _kind(division: Division) -> tuple[int, ...]:
    """Of divisions that differ in nothing else one is ranked."""
    return division.pipeline, division.replicas, division.shards, division.context.size, division.tensor


def _why(one: RankedDivision, first: RankedDivision, layer_of: Callable[[Division], Layer]) -> str:
    p, best = one.prediction, first.prediction
    if one is first:
        return f"fastest: {p.waiting}"
    slower = p.seconds / best.seconds - 1
    waits, computes = p.exposed - best.exposed, p.compute - best.compute
    if waits >= computes:
        bubble = f", a bubble of {one.division.bubble:.0%}" if one.division.pipeline > 1 else ""
        return f"{slower:+.1%}: waits {format_time(waits)} longer{bubble}"
    computed = [
        by_kind(layer_of(it.division), it.prediction.compute, it.prediction.pipeline_rank) for it in (one, first)
    ]
    causes = longer(one.division, first.division, *computed)
    return f"{slower:+.1%}: computes {format_time(computes)} longer ({causes})"
