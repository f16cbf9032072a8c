"""Configurations that `--config` names: torchtitan's own, with what this recipe needs changed."""

from collections.abc import Callable
from dataclasses import fields

from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.models.deepseek_v3 import config_registry as deepseek_v3
from torchtitan.models.gpt_oss import config_registry as gpt_oss
from torchtitan.models.llama3 import config_registry as llama3
from torchtitan.models.muse_glimmer import config_registry as muse_glimmer
from torchtitan.models.qwen3 import config_registry as qwen3
from torchtitan.trainer import Trainer

from recipes.torchtitan.checkpointing import SelectiveACSavingAttention
from recipes.torchtitan.parallelize import parallelize
from recipes.torchtitan.settings import ContextParallelism
from recipes.torchtitan.shim import (
    draw_whole,
    fit_attention_to_cpu,
    fit_biases_to_tensor_parallelism,
    fit_experts_to_float32,
    fit_to_torch,
    is_cpu,
)
from recipes.torchtitan.text import ByteTokenizer, TextLoader
from recipes.torchtitan.trainer import ContextTrainer


def llama3_debugmodel() -> ContextTrainer.Config:
    """torchtitan's debug model on bytes of text: 20 steps of 2 sequences of 1024 bytes."""
    return _on_bytes(llama3.llama3_debugmodel)


def llama3_8b() -> ContextTrainer.Config:
    """torchtitan's Llama 3 8B in bfloat16, compiled, on a ring; `--hf_assets_path` has its tokenizer."""
    config = _with_context_parallelism(llama3.llama3_8b())
    config.compile.enable = True
    return config


def qwen3_debugmodel() -> ContextTrainer.Config:
    """Qwen3's debug model, likewise: norms of queries and keys, tied embeddings."""
    return _on_bytes(qwen3.qwen3_debugmodel)


def deepseek_v3_debugmodel() -> ContextTrainer.Config:
    """DeepSeek-V3's, likewise: multi-head latent attention and experts."""
    return _on_bytes(deepseek_v3.deepseek_v3_debugmodel)


def gpt_oss_debugmodel() -> ContextTrainer.Config:
    """GPT-OSS's, likewise: windows, sinks and experts."""
    return _on_bytes(gpt_oss.gpt_oss_debugmodel_flex)


def muse_glimmer_debugmodel() -> ContextTrainer.Config:
    """Muse Glimmer's, likewise, text alone: windows, and layers without rotary embeddings."""
    return _on_bytes(muse_glimmer.muse_glimmer_debugmodel)


def _on_bytes(stock: Callable[[], Trainer.Config]) -> ContextTrainer.Config:
    config = _with_context_parallelism(stock())
    config.tokenizer = ByteTokenizer.Config()
    config.hf_assets_path = "."  # bytes need none
    config.checkpoint = CheckpointManager.Config()
    config.training.local_batch_size = 2
    config.training.seq_len = 1024
    config.training.steps = 20
    config.debug.seed = 0
    return config


def _with_context_parallelism(config: Trainer.Config) -> ContextTrainer.Config:
    """One of torchtitan's configurations, with what this recipe changes in any."""
    assert config.model_spec is not None
    spec = config.model_spec
    spec.parallelize_fn = parallelize
    draw_whole(spec.model)
    fit_to_torch()
    fit_attention_to_cpu()
    fit_experts_to_float32()
    fit_biases_to_tensor_parallelism()
    config.training.disable_cuda_graphs = True
    if is_cpu():
        config.training.mixed_precision_param = "float32"
    config.validator.enable = False
    config.dump_folder = "runs/torchtitan"
    kept = {f.name: getattr(config, f.name) for f in fields(ContextTrainer.Config)}
    return ContextTrainer.Config(
        **kept
        | {
            "parallelism": ContextParallelism(),
            "activation_checkpoint": SelectiveACSavingAttention.Config(),
            "dataloader": TextLoader.Config(),
        }
    )
