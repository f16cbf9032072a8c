"""Sheets of handwritten digits as sequences of patches, with the noise and time of each.

Shape suffixes: N = patches of a sheet, P = pixels of a patch, B = sheets, R and C = rows and columns of patches,
r and c = those of pixels in a patch.
"""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from recipes.train_dit.settings import CELL, SHEETS, Settings
from recipes.training.settings import RecipeError

CLASSES = 10


class Sheet(NamedTuple):
    """A sheet, or a batch of them: what the model is to make of noise at a time between 0 (noise) and 1 (picture)."""

    pixels_NP: Tensor
    noise_NP: Tensor
    time: Tensor
    label: Tensor


class Sheets(Dataset[Sheet]):
    """Sheets that each show one digit in several handwritings, drawn at random by their number alone.

    So they are the same on every mesh, and after a restart.

    Args:
        settings: sizes, and the seed.
    """

    source = "the digits of scikit-learn"

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        images, labels = _digits()
        self._by_class = [images[labels == label] for label in range(CLASSES)]
        self.fingerprint = (len(images), zlib.crc32(images.numpy().tobytes()), settings.sheet, settings.patch)

    def __len__(self) -> int:
        """Sheets of an epoch."""
        return SHEETS

    def __getitem__(self, index: int) -> Sheet:
        """Sheet `index`: float32 pixels_NP from -1 to 1, noise_NP, time and int64 label."""
        generator = torch.Generator().manual_seed(((self._settings.seed << 20) + index) % 2**63)
        label = torch.randint(CLASSES, (), generator=generator)
        pixels_NP = self.of_class(int(label), generator)
        noise_NP = torch.randn(pixels_NP.shape, generator=generator)
        # Times in the middle, where most is to be learnt (Esser et al. 2024, section 3.1).
        return Sheet(pixels_NP, noise_NP, torch.randn((), generator=generator).sigmoid(), label)

    def of_class(self, label: int, generator: torch.Generator) -> Tensor:
        """pixels_NP of a sheet of real digits of a class."""
        images, sheet = self._by_class[label], self._settings.sheet
        chosen = images[torch.randint(len(images), (sheet * sheet,), generator=generator)]
        rows = chosen.view(sheet, sheet, CELL, CELL).transpose(1, 2)
        return to_patches(rows.reshape(1, sheet * CELL, sheet * CELL), self._settings.patch)[0]


def to_patches(images: Tensor, patch: int) -> Tensor:
    """Square pictures (B, pixels, pixels) as their patches in reading order, BNP."""
    side = images.shape[-1] // patch
    images_BRrCc = images.view(-1, side, patch, side, patch)
    return images_BRrCc.transpose(2, 3).reshape(-1, side * side, patch * patch)


def to_images(patches_BNP: Tensor, patch: int) -> Tensor:
    """The inverse of `to_patches`."""
    side = round(patches_BNP.shape[1] ** 0.5)
    patches_BRCrc = patches_BNP.view(-1, side, side, patch, patch)
    return patches_BRCrc.transpose(2, 3).reshape(-1, side * patch, side * patch)


def _digits() -> tuple[Tensor, Tensor]:
    """Pictures from -1 (paper) to 1 (ink), each with a border of paper, and what they show."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise RecipeError(
            "train_dit trains on pictures of scikit-learn, which is not installed: pip install scikit-learn"
        ) from error
    digits: Any = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32) / 8 - 1
    border = (CELL - images.shape[-1]) // 2
    return F.pad(images, (border,) * 4, value=-1.0), torch.tensor(digits.target)
