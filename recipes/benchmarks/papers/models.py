"""Models and hardware that the two papers name; what they leave out is said where it is filled in."""

from dataclasses import dataclass, replace
from fractions import Fraction

GIB = 2**30
MIB = 2**20
K = 1024


@dataclass(frozen=True, slots=True)
class Model:
    """A Transformer.

    Attributes:
        name: as the paper has it.
        hidden: H.
        heads: of attention.
        layers: Y.
        ffn: units of the feed-forward's hidden layer.
        matrices: of a feed-forward, 3 with a gate and 2 without.
        vocab: tokens of the vocabulary, for the embedding and the output layer; 0 leaves both out.
    """

    name: str
    hidden: int
    heads: int
    layers: int
    ffn: int
    matrices: int = 2
    vocab: int = 0

    @property
    def head_dim(self) -> int:
        """Of the heads."""
        return self.hidden // self.heads

    @property
    def per_layer(self) -> int:
        """Weights of a layer's matrices."""
        return 4 * self.hidden**2 + self.matrices * self.hidden * self.ffn

    @property
    def parameters(self) -> int:
        """Weights, norms and biases aside."""
        return self.layers * self.per_layer + 2 * self.vocab * self.hidden


def _llama(name: str, hidden: int, heads: int, layers: int, ffn: int) -> Model:
    return Model(name, hidden, heads, layers, ffn, matrices=3, vocab=32000)


EXAMPLE = Model("llama 30B", 6656, 52, 64, 4 * 6656)
"""Model M of WallFacer section 3.2.2, with the 64 layers it is given there (LLaMA's own 30B has 60)."""

GPT_3B = Model("GPT 3B", 4096, 16, 16, 4 * 4096, vocab=50257)
"""WallFacer table 3, but for its 12 heads, which do not divide 4096; with 16 nothing that is sent differs but lse."""

GPT_7B = Model("GPT 7B", 4096, 32, 32, 4 * 4096, vocab=50257)
DIT_1B = Model("DiT 1B", 1536, 24, 24, 4 * 1536)
GPT_13B = Model("GPT 13B", 5120, 40, 40, 4 * 5120, vocab=50257)
"""Named in WallFacer table 4 only; the sizes are LLaMA 13B's, the feed-forward and the vocabulary GPT's."""

LLAMA_3B = _llama("3B", 3200, 32, 26, 8640)
LLAMA_7B = _llama("7B", 4096, 32, 32, 11008)
LLAMA_13B = _llama("13B", 5120, 40, 40, 13824)
LLAMA_30B = _llama("30B", 6656, 52, 60, 17920)
"""Ring Attention names sizes only: LLaMA's, and for 3B, which LLaMA has not, OpenLLaMA's."""


@dataclass(frozen=True, slots=True)
class Call:
    """An attention call on a mesh of ranks that do not exist.

    Attributes:
        ring: R.
        team: C.
        tokens: N.
        heads: of queries, keys and values alike.
        head_dim: of theirs.
        schedule: of the package's.
        dtype: name of the tensors' dtype.
    """

    ring: int
    team: int
    tokens: int
    heads: int
    head_dim: int
    schedule: str = "2d"
    dtype: str = "bfloat16"

    @property
    def ranks(self) -> int:
        """P."""
        return self.ring * self.team

    @property
    def activation(self) -> Fraction:
        """A of WallFacer's equation 5, in elements: BNH / P with B = 1."""
        return Fraction(self.tokens * self.heads * self.head_dim, self.ranks)

    def on(self, ranks: int, team: int, schedule: str = "2d") -> "Call":
        """The same call on another mesh."""
        return replace(self, ring=ranks // team, team=team, schedule=schedule)


def call_of(model: Model, tokens: int, ranks: int, team: int = 1, schedule: str = "2d") -> Call:
    """The attention of a model's layer.

    Args:
        model: whose.
        tokens: N.
        ranks: P.
        team: C.
        schedule: of the package's.

    Returns:
        The call.
    """
    return Call(ranks // team, team, tokens, model.heads, model.head_dim, schedule)
