"""torchtitan's parallelisms for its decoders, with context-parallel attention put in by a plan.

The order is that of torchtitan's own `parallelize_*` functions: context parallelism, tensor and expert parallelism,
activation checkpointing, compilation, FSDP or HSDP. Pipelines call it for each of their stages.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.config import TORCH_DTYPE_MAP, CompileConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing
from torchtitan.distributed.compile import apply_compile
from torchtitan.distributed.context_parallel import cp_shard
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
from torchtitan.models.common.decoder import Decoder
from torchtitan.tools.logging import logger

from recipes.torchtitan.check import inner_attentions
from recipes.torchtitan.settings import BY_DOCUMENT, ORDERS, ContextParallelism, context_sizes
from recipes.torchtitan.shim import fit_fsdp_to_gloo
from wallfacer_dt import TokenOrder, sequence_positions
from wallfacer_dt.integrations.torchtitan import context_parallel
from wallfacer_dt.mesh import split_context_axis


def parallelize(
    model: Decoder,
    *,
    parallel_dims: ParallelDims,
    training: TrainingConfig,
    parallelism: ContextParallelism,
    compile_config: CompileConfig,
    ac_config: ActivationCheckpointing.Config | None,
    dump_folder: str,
) -> Decoder:
    """Make a decoder on the meta device parallel, or a stage's part of one; a model spec's `parallelize_fn`.

    Raises:
        ValueError: model, mesh or token order is not what context-parallel attention needs.
    """
    if parallel_dims.cp_enabled:
        apply_context_parallel(model, parallel_dims.get_mesh("cp"), parallelism, training.seq_len)
    if parallel_dims.tp_enabled or parallel_dims.ep_enabled:
        model.parallelize(parallel_dims)
    if ac_config is not None:
        ac_config.build(dump_folder=dump_folder).apply(model)
    if compile_config.enable and "model" in compile_config.components:
        apply_compile(model, compile_config=compile_config, parallel_dims=parallel_dims)
    replicas = ["dp_replicate"] if parallel_dims.dp_replicate_enabled else []
    apply_fsdp_to_decoder(
        model,
        parallel_dims.get_mesh([*replicas, "fsdp"]),
        param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
        reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
        pp_enabled=parallel_dims.pp_enabled,
        cpu_offload=training.enable_cpu_offload,
        reshard_after_forward_policy=parallelism.fsdp_reshard_after_forward,
        ep_degree=parallel_dims.ep,
        edp_mesh=parallel_dims.get_optional_mesh([*replicas, "efsdp"]) if parallel_dims.ep_enabled else None,
        enable_symm_mem=parallelism.enable_fsdp_symm_mem,
    )
    fit_fsdp_to_gloo(model)
    return model


def apply_context_parallel(model: Decoder, cp: DeviceMesh, parallelism: ContextParallelism, length: int) -> None:
    """Replace the model's attention by context-parallel attention over torchtitan's axis `cp`, and give it its order.

    Before tensor parallelism, whose wrapper then hands attention the local heads as plain tensors.

    Args:
        model: the model.
        cp: torchtitan's mesh of one axis.
        parallelism: says what of.
        length: tokens of a sequence.

    Raises:
        ValueError: as for :func:`parallelize`.
    """
    kinds = inner_attentions(model.config)
    if len({*kinds.values()}) > 1:
        raise ValueError(f"layers have {' and '.join(kinds)}, not all of which are told documents: take one of them")
    sizes = context_sizes(parallelism)
    balancer = parallelism.context_parallel_load_balancer
    mesh = context_mesh_of(cp, sizes, balancer)
    order = TokenOrder(ORDERS[balancer], mesh)
    if balancer != BY_DOCUMENT:
        check_token_order(cp, order, length, balancer)
    context_parallel(
        model,
        mesh,
        order=order,
        schedule=parallelism.context_parallel_schedule,
        rotate=parallelism.context_parallel_rotate,
        rotate_forward=parallelism.context_parallel_rotate_forward,
        kernel=parallelism.context_parallel_kernel,
    )
    # For the Trainer, which deals tokens out.
    model.token_order = order  # pyrefly: ignore[bad-argument-type]
    ulysses, ring, team = sizes
    logger.info(f"Applied context parallelism: ulysses {ulysses} x ring {ring} x team {team}, order {order.name}")


def context_mesh_of(cp: DeviceMesh, sizes: tuple[int, int, int], balancer: str | None) -> DeviceMesh:
    """The context mesh of the ranks of torchtitan's axis `cp`, so that each holds what torchtitan deals it.

    A balancer deals to `cp` in turn, and this package's head-tail order to the ranks that exchange heads in turn.
    """
    ulysses, ring, team = sizes
    placement = "team_in_node" if balancer is None else "ulysses_in_node"
    return split_context_axis(cp, ring, team, ulysses=ulysses, placement=placement)


def check_token_order(cp: DeviceMesh, order: TokenOrder, length: int, balancer: str | None) -> None:
    """Refuse, on every rank if on one, tokens dealt out by torchtitan in another order than attention is told.

    A wrong order shows in no shape and raises nowhere, it only trains something else. So torchtitan deals the positions
    of a sequence out once, as it will deal out the tokens.

    Args:
        cp: torchtitan's mesh of one axis.
        order: what attention is told.
        length: tokens of a sequence.
        balancer: torchtitan's load balancer.

    Raises:
        ValueError: a rank's positions are others than in this package's order.
    """
    everything = torch.arange(length, device=cp.device_type).unsqueeze(0)
    (dealt,), _ = cp_shard(cp, (everything,), None, balancer)
    expected = sequence_positions(length, order).unsqueeze(0)
    same = torch.tensor(int(torch.equal(dealt, expected)), device=cp.device_type)
    dist.all_reduce(same, dist.ReduceOp.MIN, cp.get_group())
    if not same:
        raise ValueError(
            f"torchtitan's load balancer {balancer} deals tokens out in another order than {order.name!r} of "
            "this package: attention would be wrong"
        )
