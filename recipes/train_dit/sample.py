"""Pictures that a trained model makes, one of each class, beside real ones.

Shape suffixes: as in `sheets`, with L = patches of a sheet that this rank holds.
"""

from __future__ import annotations

from pathlib import Path

import torch
from matplotlib.axes import Axes
from torch import Tensor

from recipes.train_dit.model import DiT
from recipes.train_dit.settings import Settings
from recipes.train_dit.sheets import CLASSES, Sheets, to_images
from recipes.training.picture import new_figure, save_figure
from recipes.training.ranks import Ranks, positions
from recipes.training.trainer import precision
from wallfacer_dt import shard_sequence, unshard_sequence


@torch.no_grad()
def sample(model: DiT, settings: Settings, ranks: Ranks) -> Tensor:
    """One sheet of each class from noise, (classes, pixels, pixels) on the CPU of every rank; all ranks call it.

    By Heun's rule: the velocity is the mean of that at a step's beginning and that at its end. The model computes in
    the precision of training, pictures are moved in float32.
    """
    generator = torch.Generator().manual_seed(settings.seed)
    x_BNP = torch.randn((CLASSES, settings.sequence, settings.patch**2), generator=generator)
    order, positions_L = ranks.order, positions(settings.sequence, ranks)
    x_BLP = (x_BNP if order is None else shard_sequence(x_BNP, order, dim=1)).to(ranks.device)
    label_B, steps = torch.arange(CLASSES, device=ranks.device), settings.sample_steps

    def velocity(x_BLP: Tensor, step: int) -> Tensor:
        time_B = torch.full((CLASSES,), step / steps, device=ranks.device)
        with precision(ranks):
            return model(x_BLP, positions_L, time_B, label_B).float()

    for step in range(steps):
        first = velocity(x_BLP, step)
        second = velocity(x_BLP + first / steps, step + 1)
        x_BLP = x_BLP + (first + second) / (2 * steps)
    whole_BNP = x_BLP if order is None else unshard_sequence(x_BLP, order, dim=1)
    return to_images(whole_BNP.cpu(), settings.patch)


def draw_samples(path: Path, made: Tensor, sheets: Sheets, settings: Settings) -> None:
    """Write made pictures, and real ones below them, as a PNG."""
    generator = torch.Generator().manual_seed(settings.seed)
    real = torch.stack([sheets.of_class(label, generator) for label in range(CLASSES)])
    figure = new_figure(1.5 * CLASSES, 3.5)
    rows = figure.subplots(2, CLASSES)
    for row, images, title in zip(rows, (made, to_images(real, settings.patch)), ("made", "real"), strict=True):
        for label, (axes, image) in enumerate(zip(row, images, strict=True)):
            _show(axes, image, f"{title}: {label}")
    save_figure(figure, path)


def _show(axes: Axes, image: Tensor, title: str) -> None:
    axes.imshow(image.numpy(), cmap="gray_r", vmin=-1, vmax=1, interpolation="nearest")
    axes.set_title(title, fontsize=10)
    axes.set_axis_off()
