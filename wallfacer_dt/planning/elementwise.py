"""What a layer reads and writes beside matrix products and attention: bytes on a rank, or of all tensor ranks together.

Note [Elementwise work]
It takes the time in which these bytes move at the rate of merging, and is fused as torch.compile fuses it. Of a token,
in elements: a norm with the sum before it reads two rows and writes two, and its backward reads three and writes one;
positions (rotary ones, whatever the model has) read and write queries and keys, each way; a latent's norm reads one row
and writes one, and its backward reads two; an activation reads gate and up, or up alone, and writes one; its backward
reads these and a gradient, and writes theirs and what the activation gave, again. Four layers on an H200 took 3.5 ms
for what are 3.6 here, and 12 where nothing was compiled (docs/benchmarks/gpu_2026-11-26.md).

A mixture of experts reads and writes a row for each expert of a token, which takes it, reads what each gives, and
writes their weighted sum. Its backward does the same the other way round, and reads what they gave once more, for the
gradients of the weights. The router's scores, and adding what is shared, are not counted. Of experts that are dealt to
ranks rows come by rank, and are put into their experts' order and back, each read and written.

METP's operators are opaque to torch.compile: each of their operations reads and writes by itself. They add every
product to a sum in the accumulation dtype, of tokens once for each block of the ring (METP, algorithms 1 and 2), or
group of heads (algorithms 5 and 6).

Everywhere ``tokens`` are a context rank's, over the batch, and what is returned is of one layer.
"""

from functools import lru_cache
from typing import NamedTuple

from wallfacer_dt.algorithms.head_groups import OUT, head_groups
from wallfacer_dt.kernels.merge import accumulation_dtype
from wallfacer_dt.planning.candidates import Candidate
from wallfacer_dt.planning.model import ModelShape, SequenceShape

_ACTIVATIONS = {(False, True): (3, 6), (False, False): (2, 4), (True, True): (5, 14), (True, False): (2, 5)}
"""Elements that are read or written of a hidden unit, forward and backward, by whether it is METP's and has a gate."""


def norm_bytes(model: ModelShape, sequence: SequenceShape, tokens: int) -> int:
    """Of one norm, forward or backward."""
    return 4 * model.hidden * tokens * sequence.dtype.itemsize


def feed_forward_bytes(
    candidate: Candidate, model: ModelShape, sequence: SequenceShape, tokens: int, *, backward: bool,
    is_dealt: bool = False,
) -> int:  # fmt: skip
    """Of a feed-forward's activation; of METP's sums, too; of experts' tokens, which may be dealt to ranks.

    These are of tokens and, backward, of weights' gradients, which begin as zeros, are added to those that come and
    copied to be sent. Forward a rank copies its own weights, to send them.
    """
    is_metp, sizes = candidate.feed_forward == "metp", _Sizes.of(sequence)
    activation = _ACTIVATIONS[is_metp, model.gated][backward] * model.ffn_units * tokens * sizes.narrow
    if not is_metp:
        each = (4 if backward else 3) + 4 * is_dealt
        dispatched = each * model.experts_per_token + 1 if model.experts else 0
        return activation + dispatched * model.hidden * tokens * sizes.narrow
    sums = (2 if backward and model.gated else 1) * candidate.size + 1
    each = sizes.added + 4 * sizes.wide + sizes.narrow if backward else 2 * sizes.narrow / candidate.size
    return activation + sums * tokens * model.hidden * sizes.added + int(each * model.ffn_weights)


def attention_bytes(
    candidate: Candidate, model: ModelShape, sequence: SequenceShape, tokens: int, *, backward: bool
) -> int:
    """Of positions; of METP's sums and copies, too. METP turns in the accumulation dtype, and once more backward.

    It copies each group's output to that of all, and by tokens, and a rank its own weights, to send them; backward that
    output, gradients that were turned, and those of weights to be sent, of which it sums a part of all ranks'. Weights
    of a group that come from several ranks are put together, each way.
    """
    sizes, queries = _Sizes.of(sequence), model.heads * model.dim * tokens
    turned = queries + model.keys * model.dim * tokens
    if candidate.projections == "plain":
        normed = (3 if backward else 2) * (model.q_rank + model.kv_rank) * tokens
        return (2 * turned + normed) * sizes.narrow
    once = 2 * sizes.narrow + 7 * sizes.wide + sizes.cast
    turns, copied, added = (2, queries + turned, 3) if backward else (1, 2 * queries, 1)
    groups, rows = _groups(model.heads, model.keys, model.dim, candidate.size)
    sums = (added * groups + 1) * tokens * model.hidden
    each = 4 * sizes.narrow + sizes.cast + sizes.wide if backward else 2 * sizes.narrow / candidate.size
    moved = turns * turned * once + 2 * (copied + rows * model.hidden) * sizes.narrow + sums * sizes.added
    return moved + int(each * model.attention_weights)


@lru_cache(maxsize=64)
def _groups(heads: int, kv_heads: int, head_dim: int, ranks: int) -> tuple[int, int]:
    """How many groups of heads there are, and of how many rows of weights that several ranks hold a part."""
    groups = head_groups(heads, kv_heads, head_dim, (ranks,), fused=False)
    rows = 0
    for group in groups:
        for part in range(OUT + 1):
            lengths = [piece.length for piece in group.pieces if piece.part == part]
            rows += sum(lengths) * (len(lengths) > 1)
    return len(groups), rows


class _Sizes(NamedTuple):
    """Bytes of an element: in the sequence's dtype, in the accumulation dtype, and of making one of the other."""

    narrow: int
    wide: int
    cast: int

    @classmethod
    def of(cls, sequence: SequenceShape) -> "_Sizes":
        narrow, wide = sequence.dtype.itemsize, accumulation_dtype(sequence.dtype).itemsize
        return cls(narrow, wide, narrow + wide if narrow < wide else 0)

    @property
    def added(self) -> int:
        """Of a sum that a product is added to: in 16 bits by itself, else by the product, which reads it.

        Zeros at its beginning and the sequence's dtype at its end are as much once more.
        """
        return self.wide + self.cast
