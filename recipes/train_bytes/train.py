"""One rank's training: the model, its plan, the batches, the loss.

Shape suffixes: B = batch of one data-parallel group, L = tokens of a sequence that this rank holds
(which differ by rank where the sequence does not divide), V = vocabulary.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor.parallel import ParallelStyle

from recipes.train_bytes.model import ByteGPT, ModelConfig
from recipes.train_bytes.settings import Settings
from recipes.training.batches import Batches
from recipes.training.gradients import WholeGradients
from recipes.training.loop import train_steps
from recipes.training.ranks import Ranks, positions
from recipes.training.record import Run
from recipes.training.settings import Output, Saving
from recipes.training.styles import attention_style, begin
from recipes.training.text import Text
from recipes.training.traffic import LayerSizes
from recipes.training.trainer import Trainer
from wallfacer_dt import METPAttentionParallel, METPParallel, SequenceDataset


def _config(settings: Settings) -> ModelConfig:
    return ModelConfig(
        dim=settings.dim,
        layers=settings.layers,
        heads=settings.heads,
        kv_heads=settings.kv_heads,
        tied=settings.tied,
    )


def _plan(settings: Settings, ranks: Ranks) -> dict[str, ParallelStyle]:
    inner = attention_style(settings, ranks, is_causal=True, length=settings.sequence)
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


def train(settings: Settings, ranks: Ranks, text: Text, saving: Saving, output: Output) -> Run:
    """Train on this rank, with the others, and return the record every rank has.

    Raises:
        RecipeError: a checkpoint will not do.
    """
    model = begin(lambda: ByteGPT(_config(settings)), lambda: _plan(settings, ranks), settings, ranks)
    tokens = settings.samples * settings.sequence
    loss = MeanLoss(model, positions(settings.sequence, ranks), tokens)
    dataset = SequenceDataset(text.bytes_S, settings.sequence, ranks.order)
    return train_steps(
        Trainer(settings, ranks, model, WholeGradients(model, ranks), loss),
        Batches(dataset, settings, ranks, text.fingerprint),
        saving,
        output,
        length=settings.sequence,
        data=text.source,
        unit="nats per byte",
        sizes=_sizes(settings),
    )


class MeanLoss:
    """Cross entropy of this rank's tokens, of which `positions_L` is where they stand, over the `tokens` of all."""

    def __init__(self, model: ByteGPT, positions_L: Tensor, tokens: int) -> None:
        self.model, self.positions_L, self.tokens = model, positions_L, tokens

    def __call__(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Of (inputs_BL, labels_BL), int64."""
        inputs_BL, labels_BL = (x.to(self.positions_L.device) for x in batch)
        logits_BLV = self.model(inputs_BL, self.positions_L)
        logits, labels = logits_BLV.flatten(0, 1).float(), labels_BL.flatten()
        # In float64: float32 rounds a mean by more than runs on different meshes differ.
        return F.cross_entropy(logits, labels, reduction="none").double().sum() / self.tokens


def _sizes(settings: Settings) -> LayerSizes:
    config = _config(settings)
    return LayerSizes(
        layers=settings.layers,
        length=settings.sequence,
        dim=settings.dim,
        heads=settings.heads,
        kv_heads=settings.kv_heads,
        hidden_dim=config.hidden_dim,
        gated=True,
        biases=0,
    )
