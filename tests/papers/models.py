"""Models that the two papers name, and their attention calls; what they leave out is said where it is filled in."""

from dataclasses import dataclass
from fractions import Fraction

from recipes.benchmarks.papers import clusters
from wallfacer_dt import ModelShape, SequenceShape
from wallfacer_dt.algorithms.volume import resolve_rotations
from wallfacer_dt.planning import Candidate


def _gpt(hidden: int, heads: int, layers: int, vocab: int = 50257) -> ModelShape:
    return ModelShape(hidden, heads, ffn=4 * hidden, gated=False, layers=layers, vocab=vocab)


def _llama(hidden: int, heads: int, layers: int, ffn: int) -> ModelShape:
    return ModelShape(hidden, heads, ffn=ffn, layers=layers, vocab=32000)


# WallFacer's section 3.2.2, with the 64 layers it is given there (LLaMA's own 30B has 60).
EXAMPLE = _gpt(6656, 52, 64, vocab=0)
# Named in its table 4 only; the sizes are LLaMA 13B's, the feed-forward and the vocabulary GPT's.
GPT_13B = _gpt(5120, 40, 40)
# Ring Attention names sizes only: LLaMA's, and for 3B, which LLaMA has not, OpenLLaMA's.
LLAMA_3B, LLAMA_7B = _llama(3200, 32, 26, 8640), _llama(4096, 32, 32, 11008)
LLAMA_13B, LLAMA_30B = _llama(5120, 40, 40, 13824), _llama(6656, 52, 60, 17920)

NAMES = {
    **clusters.NAMES, EXAMPLE: "llama 30B", GPT_13B: "GPT 13B", LLAMA_3B: "3B", LLAMA_7B: "7B", LLAMA_13B: "13B",
    LLAMA_30B: "30B",
}  # fmt: skip


def per_layer(model: ModelShape) -> int:
    """Weights of a layer's matrices."""
    return model.attention_weights + model.ffn_weights


def parameters(model: ModelShape) -> int:
    """Weights, norms and biases aside."""
    return model.layers * per_layer(model) + 2 * model.vocab * model.hidden


@dataclass(frozen=True, slots=True)
class Call:
    """The attention of a model's layer on P ranks in teams of C, of batch 1 in bfloat16 without a mask."""

    model: ModelShape
    tokens: int
    ranks: int
    team: int = 1
    schedule: str = "2d"

    @property
    def activation(self) -> Fraction:
        """A of WallFacer's equation 5, in elements: NH / P."""
        return Fraction(self.tokens * self.model.hidden, self.ranks)

    @property
    def sequence(self) -> SequenceShape:
        """N tokens."""
        return SequenceShape(self.tokens)

    @property
    def way(self) -> Candidate:
        """The mesh and schedule, with what rotates by default."""
        ring, model = self.ranks // self.team, self.model
        forward, backward = resolve_rotations(
            "auto", "auto", self.schedule, ring, self.team, ulysses=1, heads=model.heads, kv_heads=model.keys,
            head_dim=model.dim, value_dim=model.dim, shared_dim=0, lengths=(1, 1), dtype=self.sequence.dtype,
        )  # fmt: skip
        return Candidate(ring, self.team, 1, "team_in_node", self.schedule, backward, forward)

    def on(self, ranks: int, team: int, schedule: str = "2d") -> "Call":
        """The same call on other ranks."""
        return Call(self.model, self.tokens, ranks, team, schedule)

    def __str__(self) -> str:
        return f"{NAMES[self.model]}, N = {self.tokens:,}, P = {self.ranks}"
