"""Models by name, as the planner takes them: sizes from their public configurations, and what it leaves out of them."""

from dataclasses import dataclass

from wallfacer_dt.planning.model import ModelShape

YARN = "its scale of attention, YaRN's, which the style must be told"
MORE_TOKENS = "what predicts more than one token ahead"
LEARNED = "learned positions, for which the time of rotary ones is counted"


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model's sizes, and what they do not say.

    Attributes:
        shape: sizes.
        activation: of the feed-forward, as :class:`wallfacer_dt.METPParallel` names it.
        left_out: what the model has and the planner does not count.
        window: tokens back that layers with a window see; None where no layer has one.
    """

    shape: ModelShape
    activation: str = "silu"
    left_out: tuple[str, ...] = ()
    window: int | None = None


def _llama3(hidden: int, heads: int, ffn: int, layers: int) -> KnownModel:
    """Table 3 of "The Llama 3 Herd of Models", and the models' params.json."""
    return KnownModel(ModelShape(hidden, heads, 8, 128, ffn, layers=layers, vocab=128256))


def _qwen3(hidden: int, heads: int, ffn: int, layers: int) -> KnownModel:
    """The config.json of Qwen/Qwen3-8B and Qwen/Qwen3-32B."""
    shape = ModelShape(hidden, heads, 8, 128, ffn, layers=layers, vocab=151936)
    return KnownModel(shape, left_out=("norms of queries and keys",))


def _deepseek(heads: int, vocab: int, experts: int, dense: int, *left_out: str) -> KnownModel:
    shape = ModelShape(
        7168, heads, heads, 192, 2048, layers=61, vocab=vocab, experts=experts, experts_per_token=8, shared_ffn=2048,
        value_dim=128, kv_rank=512, q_rank=1536, rotary_dim=64, dense_layers=dense, dense_ffn=18432,
    )  # fmt: skip
    return KnownModel(shape, left_out=(YARN, *left_out))


def _gpt_oss(experts: int, layers: int) -> KnownModel:
    """The config.json of openai/gpt-oss-20b and openai/gpt-oss-120b."""
    shape = ModelShape(
        2880, 64, 8, 64, 2880, layers=layers, vocab=201088, experts=experts, experts_per_token=4,
        windowed_layers=layers // 2,
    )  # fmt: skip
    return KnownModel(shape, left_out=("biases", "sinks"), window=127)


MODELS = {
    "llama3-8b": _llama3(4096, 32, 14336, 32),
    "llama3-70b": _llama3(8192, 64, 28672, 80),
    "llama3.1-405b": _llama3(16384, 128, 53248, 126),
    "qwen3-8b": _qwen3(4096, 32, 12288, 36),
    "qwen3-32b": _qwen3(5120, 64, 25600, 64),
    # The config.json of Qwen/Qwen3-30B-A3B and mistralai/Mixtral-8x7B-v0.1.
    "qwen3-30b-a3b": KnownModel(
        ModelShape(2048, 32, 4, 128, 768, layers=48, vocab=151936, experts=128, experts_per_token=8),
        left_out=("norms of queries and keys",),
    ),
    "mixtral-8x7b": KnownModel(
        ModelShape(4096, 32, 8, 128, 14336, layers=32, vocab=32000, experts=8, experts_per_token=2)
    ),
    # The config.json of deepseek-ai/DeepSeek-V3 and moonshotai/Kimi-K2-Instruct.
    "deepseek-v3": _deepseek(128, 129280, 256, 3, MORE_TOKENS),
    "kimi-k2": _deepseek(64, 163840, 384, 1),
    "gpt-oss-20b": _gpt_oss(32, 24),
    "gpt-oss-120b": _gpt_oss(128, 36),
    # Table 2.1 of "Language Models are Few-Shot Learners".
    "gpt3-175b": KnownModel(
        ModelShape(12288, 96, ffn=49152, gated=False, layers=96, vocab=50257),
        "gelu",
        ("biases", LEARNED, "its locally banded layers, taken as dense", "shared embeddings, taken as two"),
    ),
    # Table 1 of "Scalable Diffusion Models with Transformers", and DiT_XL_2 of facebookresearch/DiT.
    "dit-xl/2": KnownModel(
        ModelShape(1152, 16, ffn=4608, gated=False, layers=28),
        "gelu_tanh",
        ("biases", LEARNED, "conditioning by adaLN (6 x hidden^2 weights a layer)", "patch embedding and final layer"),
    ),
}
