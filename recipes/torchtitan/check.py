"""Which configurations are refused, before any process group is made: what would be wrong, or has not been tried.

What depends on the model, its modules or the ranks is checked in `parallelize`.
"""

from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.config import TrainingConfig
from torchtitan.models.common.attention import FlexAttention, VarlenAttention
from torchtitan.models.common.decoder import Decoder
from torchtitan.trainer import Trainer

from recipes.torchtitan.checkpointing import FullACSavingAttention, SelectiveACSavingAttention
from recipes.torchtitan.settings import BY_DOCUMENT, ORDERS, ContextParallelism, context_sizes
from recipes.torchtitan.shim import is_cpu
from wallfacer_dt.kernels.registry import check_kernel

# torch's, by name as torch looks them up.
_SPLIT_BACKWARD = ("interleavedzerobubble", "zbvzerobubble", "dualpipev")


def check_config(config: Trainer.Config) -> None:
    """Refuse a configuration that this recipe does not implement.

    Raises:
        ValueError: names the option at fault and what would do.
    """
    parallelism = config.parallelism
    if not isinstance(parallelism, ContextParallelism):
        raise ValueError(f"parallelism must be a ContextParallelism, got {type(parallelism).__qualname__}")
    _check_parallelism(parallelism)
    context_sizes(parallelism)
    check_kernel(parallelism.context_parallel_kernel)
    _check_sizes(config.training)
    _check_length(config.training.seq_len, parallelism)
    _check_chunks(config)
    _check_documents(config)
    if config.training.enable_cpu_offload and is_cpu():
        raise ValueError("--training.enable_cpu_offload has no device to offload from here: leave it out")
    ac = config.activation_checkpoint
    if not isinstance(ac, SelectiveACSavingAttention.Config | FullACSavingAttention.Config | None):
        raise ValueError(
            "activation_checkpoint must be None, SelectiveACSavingAttention.Config or FullACSavingAttention.Config, "
            f"got {type(ac).__qualname__}: others run attention, and its ring, once more in the backward"
        )
    if config.validator.enable:
        raise ValueError("--validator.enable has no loader of whole sequences here: leave it out")
    if not config.training.disable_cuda_graphs and parallelism.context_parallel_degree > 1:
        raise ValueError(
            "context-parallel attention is not captured in CUDA graphs: set --training.disable_cuda_graphs"
        )


def inner_attentions(model: Decoder.Config) -> dict[str, bool]:
    """The classes of layers' inner attentions, by name: whether they are told documents."""
    found = (getattr(layer.attention, "inner_attention", None) for layer in model.layers)
    masked = FlexAttention.Config, VarlenAttention.Config
    return {type(one).__qualname__.partition(".")[0]: isinstance(one, masked) for one in found if one is not None}


def _check_documents(config: Trainer.Config) -> None:
    """Refuse what is about documents where attention is told none."""
    model = config.model_spec and config.model_spec.model
    kinds = inner_attentions(model) if isinstance(model, Decoder.Config) else {}
    untold = [kind for kind, is_told in kinds.items() if not is_told]
    balancer = config.parallelism.context_parallel_load_balancer
    asked = {
        "--dataloader.documents": getattr(config.dataloader, "documents", False),
        f"--parallelism.context_parallel_load_balancer {BY_DOCUMENT}": balancer == BY_DOCUMENT,
    }
    for option, is_set in asked.items():
        if is_set and untold:
            raise ValueError(
                f"{option} does not go with {untold[0]}, in which tokens see those of other documents: take "
                "FlexAttention or VarlenAttention, or leave it out"
            )


def _check_parallelism(parallelism: ContextParallelism) -> None:
    for name in ("context_parallel_degree", "tensor_parallel_degree", "pipeline_parallel_degree"):
        if getattr(parallelism, name) < 1:
            raise ValueError(f"--parallelism.{name} must be at least 1, got {getattr(parallelism, name)}")
    if parallelism.pipeline_parallel_degree > 1 and parallelism.pipeline_parallel_schedule.lower() in _SPLIT_BACKWARD:
        raise ValueError(
            f"--parallelism.pipeline_parallel_schedule {parallelism.pipeline_parallel_schedule} splits the backward, "
            "in which torchtitan's loss in chunks leaves the last norm without a gradient: take 1F1B, Interleaved1F1B, "
            "GPipe or LoopedBFS"
        )
    if parallelism.pipeline_parallel_schedule_csv:
        raise ValueError(
            "--parallelism.pipeline_parallel_schedule_csv may split the backward, in which torchtitan's loss in chunks "
            "leaves the last norm without a gradient: leave it out"
        )
    if parallelism.context_parallel_load_balancer not in ORDERS:
        raise ValueError(
            f"--parallelism.context_parallel_load_balancer must be one of {', '.join(map(str, ORDERS))}, got "
            f"{parallelism.context_parallel_load_balancer}: its token order is none of this package's"
        )
    if parallelism.spmd_backend != "partial_dtensor":
        raise ValueError(
            f"--parallelism.spmd_backend must be partial_dtensor, got {parallelism.spmd_backend}: the others declare "
            "that keys and values are gathered"
        )


def _check_sizes(training: TrainingConfig) -> None:
    """Of others torchtitan asserts, or divides by them, later."""
    for name in ("seq_len", "local_batch_size", "global_batch_size"):
        value = getattr(training, name)
        if value < 1 and (name, value) != ("global_batch_size", -1):
            raise ValueError(f"--training.{name} must be at least 1, got {value}")


def _check_length(length: int, parallelism: ContextParallelism) -> None:
    """Of other lengths ranks would hold different numbers of tokens; torchtitan's load balancer only asserts."""
    context, tensor = parallelism.context_parallel_degree, parallelism.tensor_parallel_degree
    divisor = context * tensor * 2
    if context > 1 and length % divisor:
        others = f", {tensor} of tensor parallelism" if tensor > 1 else ""
        raise ValueError(
            f"--training.seq_len must be a multiple of {divisor} ({context} ranks of context parallelism, of each of "
            f"which torchtitan wants two parts{others}), got {length}"
        )


def _check_chunks(config: Trainer.Config) -> None:
    """Of other lengths torchtitan's loss would refuse the first step."""
    length, context = config.training.seq_len, config.parallelism.context_parallel_degree
    chunks = config.loss.num_chunks if isinstance(config.loss, ChunkedLossWrapper.Config) else 1
    if chunks < 1:
        raise ValueError(f"--loss.num_chunks must be at least 1, got {chunks}")
    if length % (context * chunks):
        raise ValueError(
            f"--training.seq_len must be a multiple of {context * chunks} ({context} ranks of context parallelism, "
            f"whose tokens the loss takes in {chunks} chunks), got {length}"
        )
