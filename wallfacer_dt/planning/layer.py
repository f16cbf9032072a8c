"""A Transformer layer as a rank's events: everything that computes and everything that is sent, on the same links.

Note [What travels while a layer computes]
FSDP2 gathers the weights of the next layer while one computes, and reduces the gradients of the layer before (see
``fsdp``). Each layer begins as the last transfer of that kind ends: nothing else is under way, and one layer run by
itself, from there to where its own end, takes what each takes. Where a pipeline has stages torchtitan gathers once in a
step, and reduces once (``get_fsdp_reshard_after_forward_policy``).

Tensor ranks gather tokens before attention's and the feed-forward's projections, and reduce-scatter what these
give; the backward does the same the other way round (Megatron-LM with sequence parallelism, Korthikanti et al. 2022,
figure 5). As DTensor does it: what was gathered is kept, and all of it is waited for.

Under expert parallelism ranks send each token to those that have its experts, after the counts of tokens (dispatch),
and get back what experts gave (combine; GShard, Lepikhin et al. 2020, section 3.2); the backward does the same the
other way round. All experts are taken to be sent equally many tokens, by all ranks. It is waited for, too (torchtitan's
``AllToAllTokenDispatcher``).

These transfers, attention's, METP's and FSDP's share the links.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from wallfacer_dt.kernels.merge import accumulation_dtype
from wallfacer_dt.planning.cluster import Cluster
from wallfacer_dt.planning.division import Division
from wallfacer_dt.planning.elementwise import attention_bytes, feed_forward_bytes, norm_bytes
from wallfacer_dt.planning.fsdp import Sent, Weights, copied_in, copied_out
from wallfacer_dt.planning.model import LayerKind, ModelShape, SequenceShape
from wallfacer_dt.planning.timeline import Begin, Compute, End, Event
from wallfacer_dt.planning.traffic import Wire
from wallfacer_dt.planning.weights_ring import feed_forward_events

ELEMENTWISE, COPIES = "norms, positions, activation", "FSDP's copies"
_NOTHING = Sent()


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer of a division's ranks.

    Attributes:
        division: whose.
        model: sizes, of all ranks together.
        sequence: of which ``batch`` are taken at a time.
        cluster: where.
        has_ring: whether METP's ring of weights is among the events.
        kind: of the layer.
    """

    division: Division
    model: ModelShape
    sequence: SequenceShape
    cluster: Cluster
    has_ring: bool = True
    kind: LayerKind = "layer"

    def of(self, kind: LayerKind) -> "Layer":
        """A layer of a kind."""
        return self if kind == self.kind else replace(self, kind=kind)

    @property
    def own(self) -> ModelShape:
        """Sizes of such a layer."""
        return self.model.of(self.kind)

    def forward(self, attention: Sequence[Event], sent: Sent = _NOTHING) -> Iterator[Event]:
        """One layer's forward, with what FSDP copies of it.

        Args:
            attention: events of the forward's call.
            sent: by FSDP meanwhile.

        Yields:
            The events.
        """
        shared = self.transfers(sent)
        yield from _beginning(shared)
        yield from self._copied(copied_out)
        yield from self._forward(attention)
        yield from _ending(shared)

    def backward(self, attention: Sequence[Event], again: Sequence[Event], sent: Sent = _NOTHING) -> Iterator[Event]:
        """One layer's backward, and before it what a checkpoint computes again.

        Args:
            attention: events of the backward's call.
            again: those of the forward's, which a full checkpoint repeats.
            sent: by FSDP meanwhile.

        Yields:
            The events.
        """
        shared = self.transfers(sent)
        yield from _beginning(shared)
        yield from self._copied(copied_out)
        checkpoint = self.division.context.checkpoint
        if checkpoint != "none":
            yield from self._forward(again if checkpoint == "full" else (), is_saved=checkpoint == "attention")
        yield from self._backward(attention)
        yield from self._copied(copied_in)
        yield from _ending(shared)

    def _forward(self, attention: Sequence[Event], *, is_saved: bool = False) -> Iterator[Event]:
        if not self.model.ffn:
            yield from attention
            return
        yield self._elementwise(backward=False, is_saved=is_saved)
        yield from self._exchanged()
        yield from self._projected("projections", self._inward)
        yield from attention
        yield from self._projected("output projection", self.model.out_weights)
        yield from self._exchanged()
        yield from self._exchanged()
        yield from self._feed_forward(backward=False)
        yield from self._exchanged()

    def _backward(self, attention: Sequence[Event]) -> Iterator[Event]:
        if not self.model.ffn:
            yield from attention
            return
        yield self._elementwise(backward=True)
        yield from self._exchanged()
        yield from self._feed_forward(backward=True)
        yield from self._exchanged()
        yield from self._exchanged()
        # By inputs and by weights.
        yield from self._projected("output projection", 2 * self.model.out_weights)
        yield from attention
        yield from self._projected("projections", 2 * self._inward)
        yield from self._exchanged()

    def _projected(self, what: str, weights: int) -> Iterator[Event]:
        """Attention's projections, which METP's attention has among its own events."""
        if self.division.context.projections == "plain":
            yield self._compute(what, weights)

    def _feed_forward(self, *, backward: bool) -> Iterator[Event]:
        if self.division.context.feed_forward == "metp":
            yield from self.ring(backward=backward) if self.has_ring else ()
            return
        if not backward:
            yield from self._dealt("counts", 8 * self.own.experts // self.division.expert)
        yield from self._dealt("dispatch", self.dealt)
        yield self._compute("feed-forward", (2 if backward else 1) * self.own.ffn_products)
        yield from self._dealt("combine", self.dealt)

    def ring(self, *, backward: bool) -> Iterator[Event]:
        """METP's ring of weights in one call of the feed-forward."""
        return feed_forward_events(
            self.division.context.axes, self.rows, self.model, self.sequence, self.cluster, backward=backward
        )

    def _dealt(self, what: str, part: int) -> Iterator[Event]:
        """Ranks that have other experts send each other so many bytes."""
        if self.division.expert > 1 and self.own.experts:
            yield Begin(what, self.division.groups(self.cluster)["expert"].exchange(part))
            yield End(what)

    def _exchanged(self) -> Iterator[Event]:
        """Tensor ranks gather tokens, or reduce what they have of them; as many bytes."""
        if self.division.tensor > 1:
            yield Begin("tokens", self.tokens)
            yield End("tokens")

    def _compute(self, what: str, weights: int) -> Compute:
        """A product of the rank's tokens with weights that tensor ranks share."""
        return Compute(2 * self.rows * weights / self.division.tensor / self.cluster.kernels.linear, what)

    def _elementwise(self, *, backward: bool, is_saved: bool = False) -> Compute:
        """See ``elementwise``; METP's attention is not run again where its result was saved."""
        context, sizes = self.division.context, (self.own, self.sequence, self.rows)
        is_dealt = self.division.expert > 1
        nbytes = 2 * norm_bytes(*sizes) + feed_forward_bytes(context, *sizes, backward=backward, is_dealt=is_dealt)
        if not is_saved or context.projections == "plain":
            nbytes += attention_bytes(context, *sizes, backward=backward)
        return Compute(self.touching(nbytes), ELEMENTWISE)

    def _copied(self, each: Callable[..., int]) -> Iterator[Event]:
        """FSDP copies the layer's weights or gradients, so many bytes of an element; in a pipeline once in a step."""
        nbytes = self.copied(each)
        if self.division.pipeline == 1 and nbytes:
            yield Compute(nbytes / self.cluster.kernels.merge, COPIES)

    def touching(self, nbytes: int) -> float:
        """Seconds in which a tensor rank reads or writes its part of so many bytes."""
        return nbytes / self.division.tensor / self.cluster.kernels.merge

    @property
    def rows(self) -> int:
        """Tokens of a context rank, over the batch."""
        return self.sequence.batch * -(-self.sequence.length // self.division.context.size)

    @property
    def _inward(self) -> int:
        """Elements of the projections to queries, keys and values."""
        return self.model.attention_weights - self.model.out_weights

    @property
    def dealt(self) -> int:
        """Bytes of tokens that a rank sends to every other that has experts."""
        tokens = -(-self.rows * self.own.experts_per_token // self.division.expert)
        return tokens * self.model.hidden * self.sequence.dtype.itemsize

    @property
    def weights(self) -> tuple[int, int, int]:
        """Elements of a layer's weights that are FSDP's: of a tensor rank; of experts that are dealt out, and of METP,
        a rank's own.

        None where nobody trains them, and of METP none where no others have them.
        """
        if not self.model.ffn:
            return 0, 0, 0
        division, model = self.division, self.own
        context, dealt = division.context, division.dealt_weights(model)
        attention = 0 if context.projections == "metp" else model.attention_weights
        ffn = 0 if context.feed_forward == "metp" else model.ffn_weights - dealt * division.expert
        return (attention + ffn) // division.tensor, dealt, division.metp_weights(model) * (division.data > 1)

    @property
    def vocabulary(self) -> int:
        """Elements of the embedding, or of the output projection, likewise."""
        return self.model.vocab * self.model.hidden // self.division.tensor if self.model.ffn else 0

    def copied(self, each: Callable[..., int]) -> int:
        """Bytes of a layer's weights that FSDP reads and writes where of one it does so many, as of ``copied_out``."""
        division, dtype, (own, dealt, metp) = self.division, self.sequence.dtype, self.weights
        if division.weight_ranks == 1:
            return 0
        experts = dealt or self.own.expert_weights
        again = 2 * dtype.itemsize * experts * division.shards_by_second_dim(self.own)
        others = each(dtype, alone=division.expert_ranks == 1) * dealt + each(dtype, alone=division.shards == 1) * metp
        return each(dtype) * own + others + again

    def transfers(self, sent: Sent) -> list[tuple[str, Wire]]:
        """What FSDP sends, by name: first what it began to send first.

        Weights are gathered; gradients reduce-scattered, and their shards all-reduced among replicas (HSDP), in the
        accumulation dtype, as torchtitan does (``mixed_precision_reduce``).
        """
        groups, striped = self.division.groups(self.cluster), self.cluster.striped_gathers
        narrow, wide = (dtype.itemsize for dtype in (self.sequence.dtype, accumulation_dtype(self.sequence.dtype)))
        sharing = {"": groups["weights"], "experts' ": groups["expert_weights"], "METP's ": groups["metp_weights"]}

        def parts(weights: Weights) -> list[int]:
            others = {"": (0, 0, 0), "vocabulary": (self.vocabulary, 0, 0)}
            elements = others[weights] if weights in others else self.of(weights).weights
            return [-(-some // group.size) for some, group in zip(elements, sharing.values(), strict=True)]

        def gathered(what: str, weights: Weights, itemsize: int) -> list[tuple[str, Wire]]:
            named = zip(sharing.items(), parts(weights), strict=True)
            return [(whose + what, group.gather(n * itemsize, is_striped=striped)) for (whose, group), n in named]

        replicated = [
            (whose + "replicas", groups["replicas"].all_reduce(n * wide, is_striped=striped))
            for whose, n in zip(sharing, parts(sent.replicated), strict=True)
        ]
        return [*replicated, *gathered("gradients", sent.reduced, wide), *gathered("weights", sent.gathered, narrow)]

    @property
    def tokens(self) -> Wire:
        """Tensor ranks' all-gather of tokens, or reduce-scatter."""
        group = self.division.groups(self.cluster)["tensor"]
        part = -(-self.rows // group.size) * self.model.hidden * self.sequence.dtype.itemsize
        return group.gather(part, is_striped=self.cluster.striped_gathers)

    @property
    def activations(self) -> Wire:
        """What a stage of a pipeline sends to the next, or back: a tensor rank's part of the tokens."""
        own = -(-self.rows // self.division.tensor)
        nbytes = own * self.model.hidden * self.sequence.dtype.itemsize
        return self.division.groups(self.cluster)["pipeline"].send(nbytes)


def _beginning(some: Sequence[tuple[str, Wire]]) -> Iterator[Event]:
    return (Begin(name, wire) for name, wire in some if wire.nbytes)


def _ending(some: Sequence[tuple[str, Wire]]) -> Iterator[Event]:
    return (End(name) for name, wire in some if wire.nbytes)


def alone(some: Sequence[tuple[str, Wire]]) -> list[Event]:
    """Transfers that are begun together, and waited for."""
    return [*_beginning(some), *_ending(some)]
