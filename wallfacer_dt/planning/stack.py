"""Peak memory of a stack of layers on one rank: weights, what autograd keeps, and the most a step needs beyond that.

A layer is x + attention(norm(x)), then x + ffn(norm(x)), of ``torch.nn.RMSNorm`` and projections without biases. The
most is held in the backward, of the last layer or of the loss: so only these are written out. Bytes are those of
torch's CPU kernels, whose RMSNorm keeps its input and its result in the accumulation dtype; fused ones keep less.
"""

from dataclasses import dataclass
from functools import lru_cache

from wallfacer_dt.kernels import accumulation_dtype
from wallfacer_dt.layout import shard_sizes
from wallfacer_dt.planning.candidates import Candidate
from wallfacer_dt.planning.dry_run import feed_forward_peak
from wallfacer_dt.planning.memory import attention_memory
from wallfacer_dt.planning.model import ModelShape, SequenceShape

_MOMENTS, _MASTER = 2 * 4, 4  # Adam's two in float32; of weights in 16 bits, what it updates


@dataclass(frozen=True, slots=True)
class StackMemory:
    """Bytes on one rank in a step of training.

    Attributes:
        weights: this rank's shards, in the sequence's dtype.
        gradients: of these, likewise.
        optimizer: Adam's moments and, of weights in 16 bits, master weights, all in float32.
        gathered: FSDP's whole weights of a layer and of the next, and the layer's whole gradient.
        kept: after the forward, what the backward needs: of all layers and, with a vocabulary, of the loss.
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
    """What a stack of ``model.layers`` layers holds in a step of training.

    Weights are FSDP's, sharded over all ranks, but for those of feed-forwards under METP. Without a vocabulary there is
    no loss, and the output is the caller's and not counted.

    Args:
        candidate: how ranks share the sequence, what a layer's feed-forward is, and what is computed again.
        model: whose layers.
        sequence: what a step trains on; weights have its dtype.

    Returns:
        The bytes.
    """
    layer = _Layer(candidate, model, sequence)
    stack = layer.kept * model.layers
    loss = layer.loss
    kept = stack + (layer.x + loss + layer.tokens if model.vocab else 0)
    # Logits' gradient, and the gradient of what the loss keeps; later, what it kept and the output are gone.
    peaks = [kept + 2 * loss, stack - layer.kept + layer.backward + layer.tokens * bool(model.vocab)]
    mine, itemsize = _elements(candidate, model), sequence.dtype.itemsize
    optimizer = mine * (_MOMENTS + _MASTER * (itemsize < _MASTER))
    return StackMemory(
        mine * itemsize, mine * itemsize, optimizer, _gathered(candidate, model, sequence), kept, max(peaks) - kept
    )


def _elements(candidate: Candidate, model: ModelShape) -> int:
    """Of all weights, that a rank has."""
    units = shard_sizes(model.ffn, candidate.axes)[0]
    whole = model.layers * (model.attention_weights + 2 * model.hidden) + 2 * model.vocab * model.hidden
    if candidate.feed_forward == "metp":
        mine = model.layers * units * (model.ffn_weights // max(1, model.ffn))
    else:
        whole, mine = whole + model.layers * model.ffn_weights, 0
    return -(-whole // candidate.size) + mine


def _gathered(candidate: Candidate, model: ModelShape, sequence: SequenceShape) -> int:
    if candidate.size == 1:
        return 0
    layer = model.attention_weights + 2 * model.hidden
    layer += 0 if candidate.feed_forward == "metp" else model.ffn_weights
    # One is the next to be used; with the output projection and its gradient only that one is there.
    of_layer = (2 + (model.layers > 1)) * layer
    of_loss = 2 * model.vocab * model.hidden + layer if model.vocab else 0
    return max(of_layer, of_loss) * sequence.dtype.itemsize


class _Layer:
    """Bytes of a layer's tensors by name; ``x`` is a rank's tokens, in the inputs' dtype."""

    def __init__(self, candidate: Candidate, model: ModelShape, sequence: SequenceShape) -> None:
        self.candidate, self.model, self.sequence = candidate, model, sequence
        self.rows = shard_sizes(sequence.length, candidate.axes)[0] * sequence.batch
        itemsize, wide = sequence.dtype.itemsize, accumulation_dtype(sequence.dtype).itemsize
        self.x = self.rows * model.hidden * itemsize
        self.wide_x = self.rows * model.hidden * wide
        self.is_narrow = itemsize != wide
        self.hidden = self.rows * model.ffn * itemsize
        self.loss = self.rows * model.vocab * itemsize
        self.tokens = 2 * self.rows * 8  # and the targets
        self.scale = self.rows * wide  # of every token, in a norm
        self.attention = attention_memory(candidate, model, sequence, by_tokens=True)

    @property
    def result(self) -> int:
        """Attention's output and lse, which :func:`wallfacer_dt.checkpoint.save_attention` keeps."""
        wide = accumulation_dtype(self.sequence.dtype).itemsize
        token = self.model.dim * self.sequence.dtype.itemsize + wide
        return self.rows * self.model.heads * token

    @property
    def norm(self) -> int:
        """What a norm keeps: its input in the wide dtype, that scaled, the scale; and its output, for projections."""
        return (self.wide_x if self.is_narrow else self.x) + self.wide_x + self.scale + self.x

    @property
    def feed_forward(self) -> int:
        """What a feed-forward keeps of its hidden units: gate, up, silu(gate), their product; or up and gelu(up)."""
        return 0 if self.candidate.feed_forward == "metp" else self.hidden * (4 if self.model.gated else 2)

    @property
    def whole(self) -> int:
        """What is kept without a checkpoint, or there once a checkpoint has computed it again."""
        return self.norm * (2 if self.model.ffn else 1) + self.attention.kept + self.feed_forward

    @property
    def kept(self) -> int:
        """What is kept of a layer after the forward."""
        return {"none": self.whole, "attention": self.x + self.result, "full": self.x}[self.candidate.checkpoint]

    @property
    def backward(self) -> int:
        """The most that there is of the last layer in its backward, with the gradient that comes to it."""
        # A checkpoint has the input besides the wide copy of it.
        there = self.whole + self.x * (self.is_narrow and self.candidate.checkpoint != "none")
        before_ffn = there - self.feed_forward - self.norm if self.model.ffn else there
        attending = before_ffn - self.attention.kept + self.attention.backward + self.x
        if not self.model.ffn:
            return attending
        norming = before_ffn + 6 * self.wide_x + self.x
        return max(self._feeding(there) + self.x, norming, attending)

    def _feeding(self, there: int) -> int:
        if self.candidate.feed_forward == "metp":
            return there + _feed_forward_peak(self.candidate.size, self.model, self.sequence)
        # Where both factors of the product have their gradients, it is gone, and its own gradient there.
        return there + self.hidden * (2 if self.model.gated else 1)


@lru_cache(maxsize=64)
def _feed_forward_peak(ranks: int, model: ModelShape, sequence: SequenceShape) -> int:
    return feed_forward_peak(Candidate(ranks), model, sequence)
