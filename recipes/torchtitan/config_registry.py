"""Configurations that `--config` names: torchtitan's own for Llama 3, with what this recipe needs changed."""

from dataclasses import fields

from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import config_registry as stock
from torchtitan.trainer import Trainer

from recipes.torchtitan.checkpointing import SelectiveACSavingAttention
from recipes.torchtitan.parallelize import parallelize_llama
from recipes.torchtitan.settings import ContextParallelism
from recipes.torchtitan.shim import draw_whole, fit_to_torch, is_cpu
from recipes.torchtitan.text import ByteTokenizer, TextLoader
from recipes.torchtitan.trainer import ContextTrainer


def llama3_debugmodel() -> ContextTrainer.Config:
    """torchtitan's debug model on bytes of text: 20 steps of 2 sequences of 1024 bytes."""
    config = _with_context_parallelism(stock.llama3_debugmodel())
    config.tokenizer = ByteTokenizer.Config()
    config.hf_assets_path = "."  # bytes need none
    config.checkpoint = CheckpointManager.Config()
    config.training.local_batch_size = 2
    config.training.seq_len = 1024
    config.training.steps = 20
    config.debug.seed = 0
    return config


def llama3_8b() -> ContextTrainer.Config:
    """torchtitan's Llama 3 8B in bfloat16, compiled, on a ring; `--hf_assets_path` has its tokenizer."""
    config = _with_context_parallelism(stock.llama3_8b())
    config.compile.enable = True
    return config


def _with_context_parallelism(config: Trainer.Config) -> ContextTrainer.Config:
    """One of torchtitan's configurations, with what this recipe changes in any."""
    assert config.model_spec is not None
    spec = config.model_spec
    for layer in spec.model.layers:  # pyrefly: ignore[missing-attribute]
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    spec.parallelize_fn = parallelize_llama
    draw_whole(spec.model)
    fit_to_torch()
    config.training.disable_cuda_graphs = True
    if is_cpu():
        config.training.mixed_precision_param = "float32"
    config.validator.enable = False
    config.dump_folder = "runs/torchtitan"
    kept = {f.name: getattr(config, f.name) for f in fields(config)}
    return ContextTrainer.Config(
        **kept
        | {
            "parallelism": ContextParallelism(),
            "activation_checkpoint": SelectiveACSavingAttention.Config(),
            "dataloader": TextLoader.Config(),
        }
    )
