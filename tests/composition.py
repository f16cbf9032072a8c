"""Context parallelism together with torch's own parallelisms: the examples of docs/composition.md, word for word."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleDualPipeV, ScheduleZBVZeroBubble
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle, get_schedule_class
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from recipes.train_bytes.model import ByteGPT, rotations
from wallfacer_dt import TokenOrder, sequence_positions, shard_sequence

IGNORED = -100  # labels that do not count
MAX_NORM = 0.5


def token_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """All ranks that hold different tokens for the same parameters: every axis but tp and pp."""
    axes = tuple(axis for axis in mesh.mesh_dim_names if axis not in ("tp", "pp"))
    return mesh[axes]._flatten("tokens")


def context_of(mesh: DeviceMesh) -> DeviceMesh:
    """The axes along which ranks share a sequence: cp_ring and cp_team, or cp_ulysses and cp_ring, or all three."""
    return mesh[tuple(axis for axis in mesh.mesh_dim_names if axis.startswith("cp_"))]


def order_of(mesh: DeviceMesh) -> TokenOrder:
    """The order in which tokens are dealt out, which attention is told."""
    return TokenOrder("head_tail", context_of(mesh))


def deal(tokens_BN: Tensor, labels_BN: Tensor, mesh: DeviceMesh) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's tokens_BL, labels_BL and positions_L; data-parallel groups take different sequences."""
    order = order_of(mesh)
    if "dp" in mesh.mesh_dim_names:
        group, groups = mesh["dp"].get_local_rank(), mesh["dp"].size()
        tokens_BN, labels_BN = tokens_BN.chunk(groups)[group], labels_BN.chunk(groups)[group]
    tokens_BL, labels_BL = (shard_sequence(x_BN, order, dim=1) for x_BN in (tokens_BN, labels_BN))
    return tokens_BL, labels_BL, sequence_positions(tokens_BN.shape[1], order)


def sum_of_losses(logits_BLV: Tensor, labels_BL: Tensor) -> Tensor:
    loss = F.cross_entropy(logits_BLV.flatten(0, 1), labels_BL.flatten(), ignore_index=IGNORED, reduction="sum")
    return loss.full_tensor() if isinstance(loss, DTensor) else loss  # one under loss_parallel


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, tokens_BN: Tensor, labels_BN: Tensor, mesh: DeviceMesh
) -> tuple[float, float]:
    """One step of all ranks together: the mean loss over all counted tokens, and the norm before clipping."""
    everyone = token_mesh(mesh).get_group()
    tokens_BL, labels_BL, positions_L = deal(tokens_BN, labels_BN, mesh)
    counted = (labels_BL != IGNORED).sum()
    dist.all_reduce(counted, group=everyone)
    optimizer.zero_grad()
    loss = sum_of_losses(model(tokens_BL, positions_L), labels_BL) / counted
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    loss = loss.detach()
    dist.all_reduce(loss, group=everyone)
    return loss.item(), norm.full_tensor().item()


def shard_parameters(modules: Iterable[nn.Module], mesh: DeviceMesh, **options: Any) -> None:
    """FSDP2 that adds gradients up instead of averaging them."""
    for module in modules:
        fully_shard(module, mesh=mesh, **options)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no other reduction


def fsdp(model: ByteGPT, mesh: DeviceMesh, style: ParallelStyle) -> None:
    parallelize_module(model, context_of(mesh), {"layers.*.attention.inner": style})
    shard_parameters((*model.layers, model), token_mesh(mesh))


def zero2(model: ByteGPT, mesh: DeviceMesh, style: ParallelStyle) -> None:
    parallelize_module(model, context_of(mesh), {"layers.*.attention.inner": style})
    shard_parameters((*model.layers, model), token_mesh(mesh), reshard_after_forward=False)


def offloaded(model: ByteGPT, mesh: DeviceMesh, style: ParallelStyle) -> None:
    parallelize_module(model, context_of(mesh), {"layers.*.attention.inner": style})
    policy = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
    shard_parameters((*model.layers, model), token_mesh(mesh), offload_policy=policy)


def hsdp(model: ByteGPT, mesh: DeviceMesh, style: ParallelStyle) -> None:
    parallelize_module(model, context_of(mesh), {"layers.*.attention.inner": style})
    sizes = mesh["dp"].size(), context_of(mesh).size()
    replicate_shard = init_device_mesh(mesh.device_type, sizes, mesh_dim_names=("dp", "cp"))
    shard_parameters((*model.layers, model), replicate_shard)


def mixed_precision(model: ByteGPT, mesh: DeviceMesh, style: ParallelStyle) -> None:
    parallelize_module(model, context_of(mesh), {"layers.*.attention.inner": style})
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    shard_parameters(model.layers, token_mesh(mesh), mp_policy=policy)
    shard_parameters([model], token_mesh(mesh), mp_policy=replace(policy, output_dtype=torch.float32))


def share_weights(model: ByteGPT, mesh: DeviceMesh, *, logits_too: bool = False) -> None:
    """Tensor and sequence parallelism, along tp; ``logits_too``: each rank keeps its part of them."""
    logits = Shard(-1) if logits_too else Replicate()
    gather = {"input_layouts": (Shard(1), None), "desired_input_layouts": (Replicate(), None)}
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "layers.*.attention_norm": SequenceParallel(),
        "layers.*.attention": PrepareModuleInput(**gather),
        "layers.*.attention.query": ColwiseParallel(),
        "layers.*.attention.key": ColwiseParallel(),
        "layers.*.attention.value": ColwiseParallel(),
        "layers.*.attention.output": RowwiseParallel(output_layouts=Shard(1)),
        "layers.*.feed_forward_norm": SequenceParallel(),
        "layers.*.feed_forward": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "layers.*.feed_forward.gate": ColwiseParallel(),
        "layers.*.feed_forward.up": ColwiseParallel(),
        "layers.*.feed_forward.down": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=logits, use_local_output=not logits_too),
    }
    parallelize_module(model, mesh["tp"], plan)


def tensor_parallel(model: ByteGPT, mesh: DeviceMesh, style: ParallelStyle, **options: Any) -> None:
    share_weights(model, mesh, **options)
    parallelize_module(model, context_of(mesh), {"layers.*.attention.inner": style})
    shard_parameters((*model.layers, model), token_mesh(mesh))


class Stage(nn.Module):
    """Some layers of a ByteGPT, named as in the whole model."""

    def __init__(self, model: ByteGPT, layers: range, positions_L: Tensor) -> None:
        super().__init__()
        self.is_first, self.is_last = 0 in layers, len(model.layers) - 1 in layers
        self.config, self.positions_L = model.config, positions_L
        self.embedding = model.embedding if self.is_first else nn.Identity()
        self.layers = nn.ModuleDict({str(index): model.layers[index] for index in layers})
        self.norm, self.head = (model.norm, model.head) if self.is_last else (nn.Identity(), nn.Identity())

    def forward(self, x: Tensor) -> Tensor:
        """tokens_BL or x_BLD in, x_BLD or logits_BLV out."""
        turn = rotations(self.positions_L, self.config.head_dim, self.config.rope_base)
        x = self.embedding(x)
        for layer in self.layers.values():
            x = layer(x, turn)
        return self.head(self.norm(x))


def stages_of(place: int, ranks: int, schedule: str) -> list[int]:
    """The numbers of a rank's stages: one, or two, of which a V has one from either end."""
    kind = get_schedule_class(schedule)
    if issubclass(kind, PipelineScheduleSingle):
        return [place]
    return [place, 2 * ranks - 1 - place if kind in (ScheduleZBVZeroBubble, ScheduleDualPipeV) else ranks + place]


def pipeline(
    model: ByteGPT, mesh: DeviceMesh, style: ParallelStyle, positions_L: Tensor, counted: Tensor, schedule: str
) -> tuple[PipelineScheduleSingle | PipelineScheduleMulti, list[Stage]]:
    if "tp" in mesh.mesh_dim_names:
        share_weights(model, mesh)
    parallelize_module(model, context_of(mesh), {"layers.*.attention.inner": style})
    numbers = stages_of(mesh["pp"].get_local_rank(), mesh["pp"].size(), schedule)
    many = len(numbers) * mesh["pp"].size()
    each, over = divmod(len(model.layers), many)
    assert not over, "stages of as many layers"
    modules = [Stage(model, range(number * each, (number + 1) * each), positions_L) for number in numbers]
    for module in modules:
        shard_parameters((*module.layers.values(), module), token_mesh(mesh), reshard_after_forward=False)
    stages = [
        PipelineStage(module, number, many, positions_L.device, group=mesh["pp"].get_group())
        for number, module in zip(numbers, modules, strict=True)
    ]

    def loss(logits_BLV: Tensor, labels_BL: Tensor) -> Tensor:
        return sum_of_losses(logits_BLV, labels_BL) / counted

    given = stages if len(stages) > 1 else stages[0]
    run = get_schedule_class(schedule)(given, n_microbatches=4, loss_fn=loss, scale_grads=False)
    return run, modules


def pipeline_step(
    schedule: PipelineScheduleSingle | PipelineScheduleMulti,
    modules: list[Stage],
    optimizer: torch.optim.Optimizer,
    tokens_BL: Tensor,
    labels_BL: Tensor,
    mesh: DeviceMesh,
    counted: Tensor,
) -> tuple[float, float]:
    """What ``train_step`` does; ``counted`` is the tensor that the schedule's loss divides by."""
    everyone, stages = token_mesh(mesh).get_group(), mesh["pp"].get_group()
    first, last = any(module.is_first for module in modules), any(module.is_last for module in modules)
    counted.copy_((labels_BL != IGNORED).sum())
    dist.all_reduce(counted, group=everyone)
    optimizer.zero_grad()
    losses: list[Tensor] = []
    schedule.step(*([tokens_BL] if first else []), target=labels_BL if last else None, losses=losses)
    parameters = [p for module in modules for p in module.parameters()]
    squared = nn.utils.get_total_norm([p.grad for p in parameters]).full_tensor().square()
    dist.all_reduce(squared, group=stages)  # every stage has other parameters
    nn.utils.clip_grads_with_norm_(parameters, MAX_NORM, squared.sqrt())
    optimizer.step()
    loss = torch.stack(losses).sum().detach() if last else torch.zeros_like(squared)
    for group in (everyone, stages):
        dist.all_reduce(loss, group=group)
    return loss.item(), squared.sqrt().item()
