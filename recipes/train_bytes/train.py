"""One rank's training: the model, the batches, the loop.

Shape suffixes: B = batch of one data-parallel group, L = tokens of a sequence that this rank holds
(which differ by rank where the sequence does not divide), V = vocabulary.

Note [Two kinds of weights]: most weights are whole on every rank, plain tensors whose gradients DistributedDataParallel
averages over all ranks. METP's are DTensors, a part on every rank of a sequence, whose gradients are sums over these
ranks already; those of groups with other sequences are still to be added. Torch's foreach kernels, of clipping and of
AdamW, take tensors of one kind at a time.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from recipes.train_bytes.model import ByteGPT, ModelConfig
from recipes.train_bytes.progress import Bar
from recipes.train_bytes.ranks import Ranks, check_same_text, device_name, join_ranks
from recipes.train_bytes.record import Run, Traffic, run_name
from recipes.train_bytes.settings import Launch, Settings, check_settings
from recipes.train_bytes.text import Text, check_long_enough
from wallfacer_dt import (
    METPAttentionParallel,
    METPParallel,
    SequenceDataset,
    SequenceSampler,
    WallFacerParallel,
    attention_volume,
    feed_forward_volume,
    metp_attention_volume,
    sequence_positions,
)
from wallfacer_dt.mesh import context_groups
from wallfacer_dt.testing import Received, count_collectives

CLIP_NORM = 1.0

Batch = tuple[Tensor, Tensor]


def train(settings: Settings, launch: Launch, text: Text) -> Run:
    """Train on this rank, with the others of the launch, and return the record every rank has.

    Raises:
        RecipeError: sizes, text or device do not fit, raised before anything is communicated; or
            ranks found different texts.
    """
    check_settings(settings, launch.world)
    check_long_enough(text, settings.sequence, settings.batch * settings.data_parallel)
    ranks = join_ranks(settings, launch)
    check_same_text(text, launch)
    run = _train(settings, ranks, text)
    # Not in a `finally`: after an error on one rank, waiting for the others' groups could hang.
    if dist.is_initialized():
        dist.destroy_process_group()
    return run


def build_model(settings: Settings, ranks: Ranks) -> ByteGPT:
    """The model, begun alike on every rank, its attention and METP's layers replaced where ranks share a sequence."""
    # On the CPU whatever the device, so that the start depends on the seed alone.
    torch.manual_seed(settings.seed)
    model = ByteGPT(_config(settings)).to(ranks.device)
    if ranks.context is not None:
        # All have the same whole weights, of which each keeps its part: nothing is sent.
        parallelize_module(model, ranks.context, _plan(settings, ranks), src_data_rank=None)
    return model


def _config(settings: Settings) -> ModelConfig:
    return ModelConfig(
        dim=settings.dim,
        layers=settings.layers,
        heads=settings.heads,
        kv_heads=settings.kv_heads,
        tied=settings.tied,
    )


def _plan(settings: Settings, ranks: Ranks) -> dict[str, ParallelStyle]:
    inner = WallFacerParallel(
        is_causal=True,
        order=ranks.order,
        schedule=settings.schedule,
        rotate=settings.rotate,
        rotate_forward=settings.rotate_forward,
        length=settings.sequence,
        # torch has no flash attention in float32 on GPUs.
        kernel="reference" if ranks.device.type == "cuda" and ranks.dtype == torch.float32 else "auto",
        layout="BLNH",
    )
    plan: dict[str, ParallelStyle] = {"layers.*.attention.inner": inner}
    if settings.attention == "metp":
        whole = METPAttentionParallel(
            query="query",
            key="key",
            value="value",
            output="output",
            head_dim=settings.head_dim,
            rotary="half",
            attention=inner,
        )
        plan = {"layers.*.attention": whole}
    if settings.ffn == "metp":
        plan["layers.*.feed_forward"] = METPParallel(up="up", gate="gate", down="down", activation="silu")
    return plan


def batches(settings: Settings, ranks: Ranks, text: Text) -> Iterator[Batch]:
    """This rank's (inputs_BL, labels_BL), int64 on its device, without end."""
    dataset = SequenceDataset(text.bytes_S, settings.sequence, ranks.order)
    sampler = SequenceSampler(dataset, ranks.context, data_parallel=ranks.data_parallel, seed=settings.seed)
    loader = DataLoader(dataset, batch_size=settings.batch, sampler=sampler, drop_last=True)
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        for inputs_BL, labels_BL in loader:
            yield inputs_BL.to(ranks.device), labels_BL.to(ranks.device)


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Up in a line over the first eighth of the steps, then down a cosine to a tenth of `peak`."""
    warmup = max(1, steps // 8)
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (0.55 + 0.45 * math.cos(math.pi * progress))


def _train(settings: Settings, ranks: Ranks, text: Text) -> Run:
    model = build_model(settings, ranks)
    trainer = Trainer(settings, ranks, model)
    data = batches(settings, ranks, text)
    name = run_name(ranks.ulysses, ranks.ring, ranks.team, settings.data_parallel, settings.metp)
    losses, norms, seconds = [], [], []
    traffic: tuple[Traffic, Traffic] | tuple[None, None] = (None, None)
    with Bar(name, settings.steps, shown=ranks.launch.rank == 0) as bar:
        for step in range(settings.steps):
            start = time.perf_counter()
            batch = next(data)
            if step == 0 and ranks.context is not None:
                (loss, norm), traffic = _counted_step(trainer, batch)
            else:
                loss, norm = trainer.step(step, batch)
            losses.append(loss)
            norms.append(norm)
            seconds.append(time.perf_counter() - start)
            bar.advance(loss, trainer.tokens / seconds[-1])
    return Run(
        name=name,
        ulysses=ranks.ulysses,
        ring=ranks.ring,
        team=ranks.team,
        data_parallel=settings.data_parallel,
        device=device_name(ranks.device),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        tokens=trainer.tokens,
        text=text.source,
        losses=tuple(losses),
        grad_norms=tuple(norms),
        seconds=tuple(seconds),
        forward=traffic[0],
        backward=traffic[1],
        options=asdict(settings),
    )


class Trainer:
    """Model, optimiser and positions of one rank; `step` makes one step of all ranks together."""

    def __init__(self, settings: Settings, ranks: Ranks, model: ByteGPT) -> None:
        self.settings = settings
        self.ranks = ranks
        self.tokens = settings.batch * settings.sequence * settings.data_parallel
        self.positions_L = _positions(settings, ranks)
        self.whole, self.shared = _by_kind(model)
        self.kinds = [kind for kind in (self.whole, self.shared) if kind]
        self.model = _averaging(model, ranks)
        groups = [{"params": kind} for kind in self.kinds]
        self.optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.01)

    def step(self, step: int, batch: Batch) -> tuple[float, float]:
        """Make one step; returns the mean loss over all ranks and the norm before clipping."""
        inputs_BL, labels_BL = batch
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, self.settings.steps, self.settings.lr)
        self.optimizer.zero_grad(set_to_none=True)
        with self._precision():
            logits_BLV = self.model(inputs_BL, self.positions_L)
            logits, labels = logits_BLV.flatten(0, 1).float(), labels_BL.flatten()
            # This rank's part of the mean over all tokens; ranks need not have equally many.
            # In float64: float32 rounds a mean by more than runs on different meshes differ.
            loss = F.cross_entropy(logits, labels, reduction="none").double().sum() / self.tokens
        # Gradients are averaged over the ranks, which makes the parts' sum of this.
        (loss * self.ranks.launch.world).backward()
        shared = self._average_shared()
        norm = self._norm(shared)
        for kind in self.kinds:
            nn.utils.clip_grads_with_norm_(kind, CLIP_NORM, norm)
        self.optimizer.step()
        return _sum_over_ranks(loss.detach()), norm.item()

    @torch.no_grad()
    def _average_shared(self) -> list[Tensor]:
        """Average METP's gradients over all ranks; returns this rank's part of them."""
        grads = [parameter.grad.to_local() for parameter in self.shared if isinstance(parameter.grad, DTensor)]
        for grad in grads:
            if self.ranks.data_parallel is not None:
                dist.all_reduce(grad, group=self.ranks.data_parallel.get_group())
            grad /= self.ranks.launch.world
        return grads

    def _norm(self, shared: list[Tensor]) -> Tensor:
        """The norm of the whole gradient, the same on every rank; `shared` is this rank's part of METP's."""
        norm = nn.utils.get_total_norm([p.grad for p in self.whole if p.grad is not None])
        if not shared:
            return norm
        # Over all ranks, so that all clip alike; every data-parallel group has the same parts.
        square = nn.utils.get_total_norm(shared) ** 2 / self.settings.data_parallel
        dist.all_reduce(square)
        return torch.hypot(norm, square.sqrt())

    def _precision(self) -> torch.autocast | nullcontext[None]:
        if self.ranks.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.ranks.device.type, self.ranks.dtype)


def _sum_over_ranks(loss: Tensor) -> float:
    if dist.is_initialized():
        dist.all_reduce(loss)
    return loss.item()


def _counted_step(trainer: Trainer, batch: Batch) -> tuple[tuple[float, float], tuple[Traffic, Traffic]]:
    """The first step, with the bytes that attention and METP received on every rank."""
    settings, ranks = trainer.settings, trainer.ranks
    assert ranks.context is not None
    with count_collectives(ranks.context) as traffic:
        result = trainer.step(0, batch)
    forward, backward = _layer_bytes(settings, ranks, ranks.context)
    return result, (
        _gather_traffic(settings, traffic.forward, forward),
        _gather_traffic(settings, traffic.backward, backward),
    )


def _layer_bytes(settings: Settings, ranks: Ranks, context: DeviceMesh) -> tuple[int, int]:
    """What this rank should receive in one layer, forward and backward."""
    config = _config(settings)
    volume_of = partial(attention_volume, ulysses=ranks.ulysses)
    if settings.attention == "metp":
        volume_of = partial(metp_attention_volume, model_dim=config.dim)
    attention = volume_of(
        ranks.ring,
        ranks.team,
        batch=settings.batch,
        length=settings.sequence,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        dtype=ranks.dtype,
        schedule=settings.schedule,
        rotate=settings.rotate,
        rotate_forward=settings.rotate_forward,
        index=context_groups(context).coordinate.index,
    )
    forward, backward = attention.forward.bytes, attention.backward.bytes
    if settings.ffn == "metp":
        weights = feed_forward_volume(
            tuple(context.shape), model_dim=config.dim, hidden=config.hidden_dim, dtype=ranks.dtype, gated=True
        )
        forward, backward = forward + weights[0].bytes, backward + weights[1].bytes
    return forward, backward


def _gather_traffic(settings: Settings, counted: Received, formula: int) -> Traffic:
    counts: list[tuple[int, int, int]] = [(0, 0, 0)] * dist.get_world_size()
    dist.all_gather_object(counts, (counted.received_bytes, counted.calls, formula))
    received_by_rank, calls_by_rank, formula_by_rank = zip(*counts, strict=True)
    return Traffic(
        received=received_by_rank,
        calls=calls_by_rank,
        # Of every layer attention and, as METP, the feed-forward.
        expected_calls=settings.layers * (2 if settings.ffn == "metp" else 1),
        layers=settings.layers,
        formula=formula_by_rank,
    )


def _positions(settings: Settings, ranks: Ranks) -> Tensor:
    if ranks.order is None:
        return torch.arange(settings.sequence, device=ranks.device)
    positions_L = sequence_positions(settings.sequence, ranks.order)
    return positions_L.to(ranks.device)


def _by_kind(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Weights that are whole on every rank, and METP's; see Note [Two kinds of weights]."""
    parameters = list(model.parameters())
    whole = [parameter for parameter in parameters if not isinstance(parameter, DTensor)]
    return whole, [parameter for parameter in parameters if isinstance(parameter, DTensor)]


def _averaging(model: ByteGPT, ranks: Ranks) -> nn.Module:
    """The model, its whole weights' gradients averaged over all ranks, those that share a sequence included."""
    if ranks.launch.world == 1:
        return model
    shared = [name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)]
    # Private, though torch's own way to say it; run with torch 2.13.0.
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, shared)
    return DistributedDataParallel(model, device_ids=[ranks.device.index] if ranks.device.type == "cuda" else None)
