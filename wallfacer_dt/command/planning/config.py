"""A model's sizes from the config.json of Hugging Face's transformers, which is not needed for it, nor trusted."""

from collections.abc import Mapping
from typing import Any

from wallfacer_dt.planning import ModelShape
from wallfacer_dt.planning.known_models import LEARNED, MORE_TOKENS, YARN, KnownModel
from wallfacer_dt.reading import read_json, shown

_MOST_BYTES = 2**20
_MOST = 10**7  # of any size
_LATENT = ("deepseek_v2", "deepseek_v3", "kimi_k2")
# Of how many first layers without experts, where nothing is said; others beside them have what takes all tokens.
_DENSE = {"deepseek_v2": 0, "deepseek_v3": 3, "glm4_moe": 1, "kimi_k2": 3}
_EXPERTS = ("gpt_oss", "mixtral", "olmoe", "qwen3_moe", *_DENSE)
_GATED = (
    "gemma", "gemma2", "gemma3_text", "glm4", "granite", "llama", "ministral", "mistral", "olmo2", "olmo3", "phi3",
    "qwen2", "qwen3", "seed_oss", "smollm3", *_EXPERTS,
)  # fmt: skip
TYPES = (*_GATED, "gpt2")
_KEYS = {
    "hidden": ("hidden_size", "n_embd"),
    "heads": ("num_attention_heads", "n_head"),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "ffn": ("intermediate_size", "n_inner"),
    "layers": ("num_hidden_layers", "n_layer"),
    "vocab": ("vocab_size",),
}
_KEYS_OF_EXPERTS = {
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "experts_per_token": ("num_experts_per_tok",),
}
_KEYS_OF_LATENTS = {"kv_rank": "kv_lora_rank", "rotary_dim": "qk_rope_head_dim", "value_dim": "v_head_dim"}
# As many key heads as query heads, and hidden / heads; other types have numbers of their own where nothing is said.
_MAY_BE_MISSING = {
    "kv_heads": ("gpt2", "granite", "llama", "olmo2", "olmo3", "olmoe", "phi3"),
    "head_dim": (
        "glm4_moe", "gpt2", "granite", "llama", "ministral", "mistral", "mixtral", "olmo2", "olmo3", "olmoe", "phi3",
        "qwen2", "qwen3_moe", "smollm3",
    ),
}  # fmt: skip
# The same where null is said, which of other types transformers refuses.
_MAY_BE_NULL = {"kv_heads": ("qwen2", "qwen3", "seed_oss", "smollm3"), "head_dim": ("seed_oss",)}
# Which types have a window, and of how many tokens, itself among them, where nothing is said.
_WINDOWS = {
    "gemma2": 4096, "gemma3_text": 4096, "gpt_oss": 128, "ministral": 4096, "mistral": 4096, "mixtral": None,
    "olmo3": 4096, "phi3": None, "qwen2": 4096, "qwen3": 4096, "qwen3_moe": 4096, "smollm3": None,
}  # fmt: skip
_MAY_WINDOW = ("qwen2", "qwen3", "qwen3_moe", "smollm3")  # if use_sliding_window says so
_ALL_WINDOWED = ("mistral", "mixtral", "phi3", "qwen3_moe")  # whatever layer_types say
_EVERY = {"gemma2": 2, "gpt_oss": 2, "gemma3_text": 6, "olmo3": 4}  # of which layers the last has no window
_LAYER_TYPES = {"full_attention", "sliding_attention"}
# Keys that transformers' models of these types pass over.
_NOT_THEIRS = {"gpt2": ("intermediate_size", "num_key_value_heads", "head_dim")} | dict.fromkeys(
    _LATENT, ("num_key_value_heads", "head_dim")
)
_ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "relu": "relu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}  # fmt: skip
# Gemma's configs name what they compute under a key of its own, and under the usual one something else.
_ACTIVATION_KEYS = ("hidden_activation", "hidden_act", "activation_function")
_LEFT_OUT = {
    "final_logit_softcapping": "its soft cap of {} of the logits",
    "attn_logit_softcapping": "its soft cap of {}, which the style must be told",
    "query_pre_attn_scalar": "its scale of attention, {}^-0.5, which the style must be told",
    "attention_multiplier": "its scale of attention, {}, which the style must be told",
    "attention_dropout": "its dropout of {} in attention, which styles refuse",
    "attn_pdrop": "its dropout of {} in attention, which styles refuse",
    "scale_attn_by_inverse_layer_idx": "its scale of attention by layers, which styles must be told",
    "tie_word_embeddings": "shared embeddings, taken as two",
    "attention_bias": "biases of attention",
    "mlp_bias": "biases of the feed-forward",
    "add_cross_attention": "attention to another sequence, with its projections",
}


def read_config(path: str) -> KnownModel:
    """Read a model's sizes.

    Args:
        path: of the file.

    Returns:
        The model.

    Raises:
        ValueError: it cannot be read, is no config of a model that is known, or lacks something.
    """
    config = read_json(path, _MOST_BYTES)
    kind = config.get("model_type")
    if kind not in TYPES:
        said = "is missing" if kind is None else f"is {shown(kind)}"
        raise ValueError(f"{path}: model_type {said}, known are {', '.join(TYPES)}; give sizes as options instead")
    config = {key: value for key, value in config.items() if key not in _NOT_THEIRS.get(kind, ())}
    asked = dict(_KEYS | _KEYS_OF_EXPERTS if kind in _EXPERTS else _KEYS)
    if kind == "qwen3_moe":
        _check_all_have_experts(path, config)
    if kind == "qwen3_moe" or kind in _DENSE:
        asked["ffn"] = ("moe_intermediate_size",)
    sizes: dict[str, int] = {}
    if kind in _LATENT:
        del asked["kv_heads"], asked["head_dim"]
        sizes |= _latents(path, config)
    for name, keys in asked.items():
        key, value = next(((key, config[key]) for key in keys if config.get(key) is not None), (keys[0], None))
        if value is None and name == "ffn" and kind == "gpt2":
            value = 4 * sizes["hidden"]
        if value is None and kind in _MAY_BE_MISSING.get(name, ()):
            continue
        if value is None and key in config and kind in _MAY_BE_NULL.get(name, ()):
            continue
        if value is None:
            raise ValueError(f"{path}: {' or '.join(keys)} is missing")
        sizes[name] = _whole(path, key, value)
    key, said = next(((key, config[key]) for key in _ACTIVATION_KEYS if config.get(key) is not None), ("", None))
    if not key:
        raise ValueError(f"{path}: {' or '.join(_ACTIVATION_KEYS[1:])} is missing")
    if not isinstance(said, str) or said not in _ACTIVATIONS:
        raise ValueError(f"{path}: {key} must be one of {', '.join(_ACTIVATIONS)}, got {shown(said)}")
    if (kind, key, said) == ("gemma", "hidden_act", "gelu"):  # what the first releases said, and did not mean
        said = "gelu_pytorch_tanh"
    if kind in _DENSE:
        sizes["shared_ffn"] = _whole_or_none(path, "n_shared_experts", config) * sizes["ffn"]
        sizes |= _dense(path, kind, config, sizes["layers"])
    window, windowed = _windows(path, kind, config, sizes["layers"])
    try:
        shape = ModelShape(**sizes, gated=kind in _GATED, windowed_layers=windowed)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return KnownModel(shape, _ACTIVATIONS[said], tuple(_left_out(kind, config, shape)), window)


def _latents(path: str, config: Mapping[str, Any]) -> dict[str, int]:
    """Sizes of multi-head latent attention."""
    found = {name: _whole(path, key, config.get(key)) for name, key in _KEYS_OF_LATENTS.items()}
    found["q_rank"] = _whole_or_none(path, "q_lora_rank", config)
    own = _whole(path, "qk_nope_head_dim", config.get("qk_nope_head_dim"))
    return found | {"head_dim": own + found["rotary_dim"]}


def _dense(path: str, kind: str, config: Mapping[str, Any], layers: int) -> dict[str, int]:
    """Sizes of the first layers that have no experts."""
    if config.get("moe_layer_freq", 1) != 1:
        said = shown(config["moe_layer_freq"])
        raise ValueError(f"{path}: layers without experts among others are not planned: moe_layer_freq is {said}")
    dense = _whole(path, "first_k_dense_replace", config.get("first_k_dense_replace", _DENSE[kind]), least=0)
    if dense >= layers:
        raise ValueError(f"{path}: first_k_dense_replace must be below the {layers} layers, got {dense}")
    if not dense:
        return {}
    ffn = _whole(path, "intermediate_size", config.get("intermediate_size"))
    return {"dense_layers": dense, "dense_ffn": ffn}


def _windows(path: str, kind: str, config: Mapping[str, Any], layers: int) -> tuple[int | None, int | None]:
    """How many tokens back layers with a window see, and how many layers these are; None where no layer is one."""
    if kind not in _WINDOWS:
        return None, None
    size = config.get("sliding_window", _WINDOWS[kind])
    if size is None or (kind in _MAY_WINDOW and not config.get("use_sliding_window", False)):
        return None, None
    _whole(path, "sliding_window", size)
    if kind == "gemma3_text" and config.get("use_bidirectional_attention", False):
        size = size // 2 + 1
    kinds = config.get("layer_types")
    if kinds is not None and kind not in _ALL_WINDOWED:
        if not isinstance(kinds, list) or len(kinds) != layers or not {*map(str, kinds)} <= _LAYER_TYPES:
            raise ValueError(f"{path}: layer_types must be {layers} of {', '.join(sorted(_LAYER_TYPES))}")
        windowed = kinds.count("sliding_attention")
    elif kind in _ALL_WINDOWED or kind == "ministral":
        windowed = layers
    elif kind == "smollm3":
        raise ValueError(f"{path}: layer_types is missing, which says which layers have the window")
    elif kind.startswith("qwen"):
        windowed = max(0, layers - _whole(path, "max_window_layers", config.get("max_window_layers", 28), least=0))
    else:
        said = config.get("sliding_window_pattern", _EVERY[kind]) if kind == "gemma3_text" else _EVERY[kind]
        windowed = layers - layers // _whole(path, "sliding_window_pattern", said)
    return (size - 1, windowed) if windowed else (None, None)


def _whole(path: str, key: str, value: Any, least: int = 1) -> int:
    if type(value) is not int or not least <= value <= _MOST:  # a bool is no size
        raise ValueError(f"{path}: {key} must be a whole number from {least} to {_MOST}, got {shown(value)}")
    return value


def _whole_or_none(path: str, key: str, config: Mapping[str, Any]) -> int:
    """A number that must be there; null is 0."""
    if key not in config:
        raise ValueError(f"{path}: {key} is missing")
    return 0 if config[key] is None else _whole(path, key, config[key], least=0)


def _check_all_have_experts(path: str, config: Mapping[str, Any]) -> None:
    for key, every in (("decoder_sparse_step", (1,)), ("mlp_only_layers", ([], None))):
        if config.get(key, every[0]) not in every:
            raise ValueError(
                f"{path}: layers without experts among others are not planned: {key} is {shown(config[key])}"
            )


def _left_out(kind: str, config: Mapping[str, Any], shape: ModelShape) -> list[str]:
    """What the config says and the planner does not count."""
    # What transformers takes unless it is said.
    said = {"tie_word_embeddings": kind.startswith(("gemma", "gpt2", "smollm3"))}
    said |= {"attn_pdrop": 0.1 * (kind == "gpt2"), "attention_dropout": 0.1 * (kind == "seed_oss")}
    said |= {
        "attention_bias": kind in ("glm4", "seed_oss"),
        "attention_multiplier": 1.0 if kind == "granite" else 0,
    } | dict(config)
    if said.get("query_pre_attn_scalar") == shape.dim:
        said.pop("query_pre_attn_scalar")
    found = [text.format(shown(said[key])) for key, text in _LEFT_OUT.items() if said.get(key)]
    rope = said.get("rope_scaling") or said.get("rope_parameters")
    if kind in _LATENT and isinstance(rope, dict) and rope.get("mscale_all_dim"):
        found.append(YARN)
    if kind in ("qwen3", "qwen3_moe", "gemma3_text", "olmo2", "olmo3", "olmoe"):
        found.append("norms of queries and keys")
    if kind in ("gemma2", "gemma3_text", "glm4"):
        found.append("two more norms of a layer, and what is kept of them")
    if kind == "gpt_oss":
        found.append("sinks, which the style must be told")
    if kind == "glm4_moe" and said.get("use_qk_norm"):
        found.append("norms of queries and keys")
    if kind in _DENSE and said.get("num_nextn_predict_layers"):
        found.append(MORE_TOKENS)
    if kind in ("gpt2", "gpt_oss", "qwen2"):
        found.append("biases")
    if kind == "gpt2":
        found.append(LEARNED)
        if not said.get("scale_attn_weights", True):
            found.append("its scale of attention, 1, which the style must be told")
    return found
