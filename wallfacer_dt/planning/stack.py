"""Peak memory of a stack of layers on one rank: weights, what autograd keeps, and the most a step needs beyond that.

Of tensor ranks each has a part of heads, hidden units and vocabulary, and between these of the tokens; what they gather
before a projection is kept, as DTensor keeps it (Korthikanti et al. 2022, section 4.2.2, would gather it once more).

A layer is x + attention(norm(x)), then x + ffn(norm(x)), of ``torch.nn.RMSNorm`` and projections without biases; before
a vocabulary's output projection there is one more norm. The loss is of logits that are made float32, as torchtitan and
transformers make them, of all tokens or of one chunk of them after the other. The most is held in the backward, of the
last layer or of the loss: so only these are written out. (In a norm's backward it is less, unless a model has next to
no heads.)

Note [Norms]
RMSNorm is torch's fused one, which CUDA has for weights of the input's dtype: it keeps its input, and what it gives is
kept by the projections after it. Others keep more. In units of the input, with what they give: the fused one 2, torch's
on the CPU, or with float32 weights under autocast, which is put together of other ops, 5 in 16 bits and 3 in float32,
transformers' own 4 and 3.

Note [Between stages]
Until torch 2.15 a pipeline's stages have tensors for what comes of all microbatches of a step, activations and
gradients, and what they gave until its backward. Since then what comes is made when it is due, and is gone when it was
used. What there is beside layers' own is: of one stage a rank, the gradient that was sent last; of several, what they
gave until its backward, and all gradients that they sent, for which torch's schedule waits at the end of the step; and
of the last stage what came to it of all microbatches, as losses lead to it, which are kept until then.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from wallfacer_dt.kernels.merge import accumulation_dtype
from wallfacer_dt.planning.candidates import Candidate
from wallfacer_dt.planning.division import Division
from wallfacer_dt.planning.dry_run import Peaks, feed_forward_peak
from wallfacer_dt.planning.memory import attention_memory, projected_memory
from wallfacer_dt.planning.model import LayerKind, ModelShape, SequenceShape, in_short, kinds_of_layers
from wallfacer_dt.versions import PIPELINES_KEEP_BUFFERS

_MOMENTS = 2  # of Adam


@dataclass(frozen=True, slots=True)
class StackMemory:
    """Bytes on one rank in a step of training.

    Attributes:
        weights: this rank's shards, in the sequence's dtype.
        gradients: of these, likewise.
        optimizer: Adam's moments and, of weights in 16 bits, master weights, all in the accumulation
            dtype, which is float32, of float64 itself.
        gathered: FSDP's whole weights and gradients in use, and those that are reduced, when the most is held.
        kept: after the forward, what the backward needs: of all layers and, with a vocabulary, of the loss; of a
            pipeline what its stages send each other, too.
        working: the most beyond all that.
    """

    weights: int
    gradients: int
    optimizer: int
    gathered: int
    kept: int
    working: int

    @property
    def states(self) -> int:
        """What there is between steps, and gradients."""
        return self.weights + self.gradients + self.optimizer

    @property
    def peak(self) -> int:
        """The most at a time."""
        return self.states + self.gathered + self.kept + self.working


def stack_memory(candidate: Candidate, model: ModelShape, sequence: SequenceShape) -> StackMemory:
    """What a stack of ``model.layers`` layers holds in a step of training, all ranks sharing each sequence.

    Weights are FSDP's, sharded over all ranks, but for those that are METP's. Without a vocabulary there is
    no loss, and the output is the caller's and not counted.

    Args:
        candidate: how ranks share the sequence, what a layer's feed-forward is, and what is computed again.
        model: whose layers.
        sequence: what a step trains on; weights have its dtype.

    Returns:
        The bytes.
    """
    return division_memory(Division(candidate, microbatch=sequence.batch), model, sequence)


def division_memory(division: Division, model: ModelShape, sequence: SequenceShape) -> StackMemory:
    """The same on a rank of the stage that holds most.

    Under 1F1B the first stage holds what up to p microbatches keep, the second one less, the last that of one, and what
    the loss keeps (Narayanan et al. 2021, section 2.2.1). The first has the embedding, the last the output projection.
    What stages send each other comes, until torch 2.15, into tensors of all microbatches of a step, of which those
    between others have most: they receive activations and gradients. See Note [Between stages].

    Args:
        division: how ranks are divided.
        model: whose layers, of all ranks together.
        sequence: what a context group takes at a time; weights have its dtype.

    Returns:
        The bytes.
    """
    return _most(_layers(division, model, sequence))


def least_memory(division: Division, model: ModelShape, sequence: SequenceShape, *, of_first: bool = False) -> int:
    """The same, but for what computing takes beside: quick to say, and never more than :func:`division_memory`'s peak.

    Args:
        division: how ranks are divided.
        model: whose layers.
        sequence: what a context group takes at a time.
        of_first: of the ranks of a pipeline's first stage alone, which has no less where the last has less layers.

    Returns:
        The bytes.
    """
    layers = _layers(division, model, sequence, is_least=True)
    return (_of_rank(layers, 0) if of_first else _most(layers)).peak


_Layers = Mapping[LayerKind, "_Layer"]


def _layers(division: Division, model: ModelShape, sequence: SequenceShape, *, is_least: bool = False) -> _Layers:
    return {kind: _Layer(division, model, sequence, kind, is_least=is_least) for kind, _ in model.kinds}


def _most(layers: _Layers) -> StackMemory:
    division, model = layers["layer"].division, layers["layer"].model
    last = division.pipeline - 1
    some = {0, min(1, last), *division.fullest_ranks(model), last}
    return max((_of_rank(layers, rank) for rank in some), key=lambda memory: memory.peak)


def _of_rank(layers: _Layers, rank: int) -> StackMemory:
    """Of a pipeline's rank, which has a stage or several."""
    layer = layers["layer"]  # of which what is beside layers is
    division, model = layer.division, layer.model
    each = {kind: one.kept for kind, one in layers.items()}
    stages = [
        sum(own * each[kind] for kind, own in kinds) for kinds in division.stage_kinds(model)[rank :: division.pipeline]
    ]
    stack, alive = sum(stages), division.in_flight(rank, tuple(stages))
    in_flight = division.in_flight(rank, (1,) * division.interleave)
    has_tokens = bool(model.vocab) and rank in (0, division.pipeline - 1)
    before, whole = stack + layer.tokens * has_tokens, _Whole.of(layers, rank)
    peaks = [*zip(_in_backwards(layers, rank, before), whole.layers, strict=True)]
    kept, of_loss = before, []
    if _has_loss(division, model, rank):
        kept, of_loss = _of_loss(layer, before + layer.norm, whole)
    peaks += of_loss
    most, gathered = max(peaks, key=sum)
    # What is kept beside layers, as a loss, is taken to be there as often as these.
    others = (alive - stack) * kept // stack + _between_stages(layer, rank, in_flight)
    return StackMemory(*_states(layer, rank), gathered, others + kept, max(0, most - kept))


def _in_backwards(layers: _Layers, rank: int, before: int) -> Iterator[int]:
    """Bytes that there are at most in the backward of each of a rank's layers, the last first, and after it, beside
    FSDP's.
    """
    for kind, times in reversed(in_short(layers["layer"].division.rank_kinds(layers["layer"].model)[rank])):
        one = layers[kind]
        yield before - one.kept + one.backward
        yield before - one.kept + one.x
        before -= times * one.kept


def _of_loss(layer: "_Layer", before: int, whole: "_Whole") -> tuple[int, list[tuple[int, int]]]:
    """Bytes that there are after a loss, and the most until its backward is over, with whole weights and gradients.

    Of logits the gradient, and the gradient of what the loss keeps; and the output projection's, when what it kept is
    gone. A chunk has its backward at once, and keeps its logits and its tokens' gradient; what the norm gave is there,
    and of all chunks its gradients in float32, until the last one is through, then one gradient in its place
    (torchtitan's ``ChunkedLossWrapper``).
    """
    if layer.division.loss_chunks == 1:
        own, after = whole.of_head
        most = [(before + 3 * layer.loss, whole.head), (before + layer.logits, own), (before, after)]
        return before + layer.loss, most
    # Without FSDP the weight's gradient of one chunk is beside its sum, which is the weight's own.
    one = layer.head * (layer.division.weight_ranks == 1)
    last = before + layer.summed + layer.whole_x // layer.division.loss_chunks + layer.logits
    in_loss, own = whole.chunks
    return before, [(last + 3 * layer.loss, in_loss), (last + layer.logits + one, own), (last, whole.summed)]


def _between_stages(layer: "_Layer", rank: int, in_flight: int) -> int:
    """Bytes of what stages receive and give, but for what layers keep of it. See Note [Between stages]."""
    division, each = layer.division, layer.division.interleave
    before, following = each - (rank == 0), each - (rank == division.pipeline - 1)
    if PIPELINES_KEEP_BUFFERS:
        return layer.x * (division.microbatches * (before + following) + in_flight * (following - before) // each)
    is_last = rank == division.pipeline - 1 > 0
    # When for the last time as many are in flight, one of them is the last stage's.
    given, sent_back = in_flight - is_last, before * (each * division.microbatches - in_flight) // each
    if each == 1:
        given, sent_back = 0, before
    return layer.x * (given + sent_back + is_last * (division.microbatches - 1))


def _states(layer: "_Layer", rank: int) -> tuple[int, int, int]:
    """Bytes of a rank's weights, of their gradients and of the optimizer's states."""
    mine, narrow = rank_weights(layer.division, layer.model, rank), layer.sequence.dtype.itemsize
    wide = accumulation_dtype(layer.sequence.dtype).itemsize
    return mine * narrow, mine * narrow, mine * wide * (_MOMENTS + (narrow < wide))  # of 16 bits what it updates, too


def _has_loss(division: Division, model: ModelShape, rank: int) -> bool:
    """Whether a pipeline's rank has the output projection, and the norm before it."""
    return bool(model.vocab) and rank == division.pipeline - 1


def _ends(division: Division, rank: int) -> int:
    """How many of embedding and output projection a pipeline's rank has."""
    return (rank == 0) + (rank == division.pipeline - 1)


def _norms(model: ModelShape) -> int:
    """Elements of a layer's norms, which tensor ranks all have."""
    return 2 * model.hidden + model.q_rank + model.kv_rank


def rank_weights(division: Division, model: ModelShape, rank: int) -> int:
    """Of all elements of the weights of a pipeline's rank, those that one of those who share them has between steps."""
    context, tensor = division.context, division.tensor
    layers = division.rank_layers(model)[rank]
    split = sum(own * _shared(context, model.of(kind)) for kind, own in division.rank_kinds(model)[rank])
    split += _ends(division, rank) * model.vocab * model.hidden
    metp = layers * -(-division.metp_weights(model) // division.shards)
    norms = layers * _norms(model) + model.hidden * _has_loss(division, model, rank)
    return -(-(-(-split // tensor) + norms) // division.weight_ranks) + metp


def _shared(context: Candidate, model: ModelShape) -> int:
    """Elements of a layer's weights that FSDP has, but for norms."""
    attention = 0 if context.projections == "metp" else model.attention_weights
    return attention + (0 if context.feed_forward == "metp" else model.ffn_weights)


class _Whole(NamedTuple):
    """Bytes of whole weights and gradients that a rank has of FSDP, and of those that are reduced.

    Attributes:
        head: when the loss has its backward: the output projection's weights.
        of_head: when this has its own: its gradient, and the weights of the last layer, too; and after it, as it is
            reduced.
        layers: in the backward of each, the last first, its weights and gradient, the next one's weights, and what is
            reduced of the one before, or of the output projection; and after it its gradient, as it was and as it is
            reduced, and the next one's weights. Of many as ``in_short`` has them.
        chunks: while the loss takes one chunk after the other: the output projection's weights, also as they came,
            which FSDP has until others come, and the sum of gradients before, in float32; and with a chunk's gradient.
        summed: after the last one: instead of that gradient the sum twice, as FSDP copies it to be reduced, and a
            rank's part of it.
    """

    head: int
    of_head: tuple[int, int]
    layers: tuple[int, ...]
    chunks: tuple[int, int]
    summed: int

    @classmethod
    def of(cls, layers: _Layers, rank: int) -> "_Whole":
        layer = layers["layer"]
        division, model, narrow = layer.division, layer.model, layer.sequence.dtype.itemsize
        kinds = division.rank_kinds(model)[rank]
        row = [layers[kind].whole_weights for kind, _ in reversed(in_short(kinds))]
        if division.weight_ranks == 1:
            return cls(0, (0, 0), (0,) * 2 * len(row), (0, 0), 0)
        wide = accumulation_dtype(layer.sequence.dtype).itemsize
        head = -(-model.vocab * model.hidden // division.tensor) + bool(model.vocab) * model.hidden  # with its norm
        if division.pipeline > 1:
            # Gathered until the step ends, torchtitan's default; gradients are added up in float32 until it does.
            every = sum(own * layers[kind].whole_weights for kind, own in kinds) + _ends(division, rank) * head
            most = every * (narrow + wide)
            chunks = most, most + head * narrow
            return cls(most, (most, most), (most,) * 2 * len(row), chunks, most + head * wide)
        last, *others = row
        in_chunks, part = division.loss_chunks > 1, -(-head // division.weight_ranks)
        # The embedding comes for its backward, too, which holds less than the output projection's; without one a layer
        # is one of many. After a loss in chunks, whose backwards were before, nothing comes in time, and the output
        # projection's weights stay.
        following = [0] * len(row) if in_chunks else [*others, head or row[-1] * bool(others)]
        in_turn, kept = zip(row, following, [head, *row], strict=False), in_chunks * head * narrow
        each = tuple(
            kept + whole
            for own, comes, goes in in_turn
            for whole in ((2 * own + comes) * narrow + goes * wide, (own + comes) * narrow + own * wide)
        )
        sums, summed = 2 * head * narrow + head * wide, 2 * head * narrow + (2 * head + part) * wide
        of_head = (2 * head + last) * narrow, (head + last) * narrow + (head + part) * wide
        return cls(head * narrow, of_head, each, (sums, sums + head * narrow), summed)


class _Layer:
    """Bytes of the tensors of a layer of a kind by name; ``x`` is a rank's tokens, in the inputs' dtype.

    ``rows`` are those of the context rank, which its tensor ranks have together between projections.
    """

    def __init__(
        self, division: Division, model: ModelShape, sequence: SequenceShape, kind: LayerKind = "layer", *,
        is_least: bool = False,
    ) -> None:  # fmt: skip
        candidate, tensor = division.context, division.tensor
        kinds = [one for _, one in kinds_of_layers(model, sequence)]
        self.division, self.candidate, self.model, self.sequence = division, candidate, model, sequence
        self.own = model.of(kind)
        self.rows = -(-sequence.length // candidate.size) * sequence.batch
        tokens = -(-self.rows // tensor)
        itemsize, wide = sequence.dtype.itemsize, accumulation_dtype(sequence.dtype).itemsize
        self.x = tokens * model.hidden * itemsize
        self.whole_x = self.rows * model.hidden * itemsize
        self.hidden = self.rows * -(-self.own.ffn_units // tensor) * itemsize
        self.shared = self.rows * self.own.shared_ffn * itemsize
        self.dispatched = self.rows * self.own.experts_per_token * model.hidden * itemsize
        logits = -(-self.rows // division.loss_chunks) * -(-model.vocab // tensor)
        # In chunks: gradients of what the norm gave, and of several sequences a copy of that by chunk.
        self.summed = self.rows * model.hidden * (wide + itemsize * (sequence.batch > 1))
        self.head = -(-model.vocab * model.hidden // tensor) * itemsize
        self.logits, self.loss = logits * itemsize, logits * wide
        self.tokens = 2 * self.rows * 8  # and the targets
        self.scale = tokens * wide  # of every token, in a norm
        self.is_least = is_least
        own_heads = division.heads_of(model)
        if candidate.projections == "metp":
            # x is the norm's, and y's gradient what comes to the layer.
            most = self.result if is_least else max(projected_memory(candidate, model, one) for one in kinds)
            self.attention = Peaks(self.result, most)
        elif is_least:
            # Inputs, output and lse are kept, whatever the schedule.
            each = sum(own_heads.dims) * itemsize
            token = (own_heads.heads + own_heads.keys) * each + own_heads.heads * wide
            self.attention = Peaks(self.rows * token, self.rows * token)
        else:
            of_kinds = [attention_memory(candidate, own_heads, one, by_tokens=True) for one in kinds]
            self.attention = Peaks(*map(max, zip(*of_kinds, strict=True)))

    @cached_property
    def whole_weights(self) -> int:
        """Elements of its weights that a rank has of FSDP when they are whole."""
        division, model = self.division, self.own
        dealt = division.dealt_weights(model)
        shared = -(-(_shared(division.context, model) - dealt * division.expert) // division.tensor)
        return shared + _norms(model) + dealt + division.metp_weights(model) * (division.data > 1)

    @property
    def result(self) -> int:
        """Attention's output and lse, which :func:`wallfacer_dt.checkpoint.save_attention` keeps."""
        wide = accumulation_dtype(self.sequence.dtype).itemsize
        token = self.model.dim_of_values * self.sequence.dtype.itemsize + wide
        return self.rows * self.model.heads // self.division.tensor * token

    @property
    def latents(self) -> int:
        """What is kept of latents: what their norms take, and give, with scales; and of what keys and values are
        projected to, keys, beside those that attention takes, as values are a view of it.
        """
        model, wide = self.model, accumulation_dtype(self.sequence.dtype).itemsize
        if not model.kv_rank:
            return 0
        elements = 2 * (model.q_rank + model.kv_rank) + model.rotary_dim + model.heads * (model.dim - model.rotary_dim)
        return self.rows * (elements * self.sequence.dtype.itemsize + (1 + bool(model.q_rank)) * wide)

    @property
    def norm(self) -> int:
        """What a norm keeps: its input and the scale; and its output, for projections. See Note [Norms]."""
        return self.x + self.scale + self.whole_x

    @property
    def feed_forward(self) -> int:
        """What a feed-forward keeps of its hidden units: gate, up, silu(gate), their product; or up and gelu(up).

        And what experts took and what they gave (but not where it belongs, a few integers a token).
        """
        if self.candidate.feed_forward == "metp":
            return 0
        return self.hidden * (4 if self.model.gated else 2) + 2 * self.dispatched

    @property
    def whole(self) -> int:
        """What is kept without a checkpoint, or there once a checkpoint has computed it again."""
        return self.norm * (2 if self.model.ffn else 1) + self.latents + self.attention.kept + self.feed_forward

    @property
    def kept(self) -> int:
        """What is kept of a layer after the forward."""
        # Of METP's attention its result is kept as well.
        saved = self.result + self.x * (self.candidate.projections == "metp")
        return {"none": self.whole, "attention": self.x + saved, "full": self.x}[self.candidate.checkpoint]

    @property
    def backward(self) -> int:
        """The most that there is of the last layer in its backward, with the gradient that comes to it."""
        there = self.whole
        before_ffn = there - self.feed_forward - self.norm if self.model.ffn else there
        attending = before_ffn - self.attention.kept + self.attention.most + self.x
        if not self.model.ffn:
            return attending
        # Tensor ranks gather the gradient of what they have given, which projections of the feed-forward need whole.
        gathered = self.whole_x * (self.division.tensor > 1)
        return max(self._feeding(there) + self.x + gathered, attending)

    def _feeding(self, there: int) -> int:
        if self.candidate.feed_forward == "metp" and self.is_least:
            return there
        if self.candidate.feed_forward == "metp":
            return there + _feed_forward_peak(Candidate(self.candidate.size), self.model, self.sequence)
        # Where both factors of the product have their gradients, it is gone, and its own gradient there. So is what
        # experts gave, of which before there are gradients in both orders, and products for those of their weights.
        # What all tokens go through beside experts has its backward first, as it comes last.
        factors, own = 2 if self.model.gated else 1, self.hidden - self.shared
        experts = max(factors * own - self.dispatched, own, 3 * self.dispatched)
        return there + max(factors * self.shared, experts - 2 * factors * self.shared)


_feed_forward_peak = lru_cache(maxsize=64)(feed_forward_peak)
