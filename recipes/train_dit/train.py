"""One rank's training: the model, its plan, the loss.

Rectified flow: pictures move from noise to what was drawn along straight lines, at a velocity that the model predicts
(Liu et al. 2022). Shape suffixes: as in `sheets` and `model`.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor.parallel import ParallelStyle

from recipes.train_dit.model import DiT, ModelConfig
from recipes.train_dit.sample import draw_samples, sample
from recipes.train_dit.settings import Settings
from recipes.train_dit.sheets import CLASSES, Sheet, Sheets
from recipes.training.batches import Batches
from recipes.training.gradients import WholeGradients
from recipes.training.loop import train_steps
from recipes.training.ranks import Ranks, positions
from recipes.training.record import Run, writing
from recipes.training.settings import Output, Saving
from recipes.training.styles import attention_style, begin
from recipes.training.traffic import LayerSizes
from recipes.training.trainer import Trainer
from wallfacer_dt import METPParallel, shard_sequence


def train(settings: Settings, ranks: Ranks, sheets: Sheets, saving: Saving, output: Output) -> Run:
    """Train on this rank, with the others, leave pictures, and return the record every rank has.

    Raises:
        RecipeError: a checkpoint will not do.
    """
    model = begin(lambda: DiT(_config(settings)), lambda: _plan(settings, ranks), settings, ranks)
    run = train_steps(
        Trainer(settings, ranks, model, WholeGradients(model, ranks), FlowLoss(model, settings, ranks)),
        Batches(sheets, settings, ranks, sheets.fingerprint),
        saving,
        output,
        length=settings.sequence,
        data=sheets.source,
        unit="squared error of a pixel",
        sizes=_sizes(settings),
    )
    made = sample(model, settings, ranks)
    if ranks.launch.rank == 0:
        with writing(output, "samples.png"):
            draw_samples(output.out / "samples.png", made, sheets, settings)
    return run


def _plan(settings: Settings, ranks: Ranks) -> dict[str, ParallelStyle]:
    inner = attention_style(settings, ranks, is_causal=False, length=settings.sequence)
    plan: dict[str, ParallelStyle] = {"layers.*.attention.inner": inner}
    if settings.ffn == "metp":
        plan["layers.*.feed_forward"] = METPParallel(up="up", down="down", activation="gelu_tanh")
    return plan


class FlowLoss:
    """Squared error of the velocity, of this rank's patches, over all pixels of a step."""

    def __init__(self, model: DiT, settings: Settings, ranks: Ranks) -> None:
        self.model, self.ranks = model, ranks
        self.positions_L = positions(settings.sequence, ranks)
        self.pixels = settings.samples * settings.sequence * settings.patch**2

    def __call__(self, batch: Sheet) -> Tensor:
        """Of whole sheets."""
        pixels_BLP, noise_BLP = (self._mine(x) for x in (batch.pixels_NP, batch.noise_NP))
        time_B, label_B = batch.time.to(self.ranks.device), batch.label.to(self.ranks.device)
        time_B11 = time_B.view(-1, 1, 1)
        noisy_BLP = time_B11 * pixels_BLP + (1 - time_B11) * noise_BLP
        velocity_BLP = self.model(noisy_BLP, self.positions_L, time_B, label_B)
        # In float64: float32 rounds a mean by more than runs on different meshes differ.
        errors = (velocity_BLP.float() - (pixels_BLP - noise_BLP)).square()  # no comparison: the loss
        return errors.double().sum() / self.pixels

    def _mine(self, x_BNP: Tensor) -> Tensor:
        order = self.ranks.order
        return (x_BNP if order is None else shard_sequence(x_BNP, order, dim=1)).to(self.ranks.device)


def _config(settings: Settings) -> ModelConfig:
    return ModelConfig(
        dim=settings.dim,
        layers=settings.layers,
        heads=settings.heads,
        side=settings.side,
        pixels=settings.patch**2,
        classes=CLASSES,
    )


def _sizes(settings: Settings) -> LayerSizes:
    return LayerSizes(
        layers=settings.layers,
        length=settings.sequence,
        dim=settings.dim,
        heads=settings.heads,
        kv_heads=settings.heads,
        hidden_dim=_config(settings).hidden_dim,
        gated=False,
        biases=1,
    )
