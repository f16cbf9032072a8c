"""A diffusion transformer: full attention, and time and class by adaptive layer norms (adaLN-Zero,
Peebles and Xie 2023).

The model knows nothing of ranks. It takes the patches it is given and where they stand; the one place where patches
meet is `Attention.inner`, a module without parameters for a `ParallelStyle` to replace.

Shape suffixes: B = batch, L = patches at hand, P = pixels of a patch, D = model dim, N = heads, H = head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes of a `DiT`; `side` is patches in a row, and in a column, of a picture, `pixels` those of a patch."""

    dim: int
    layers: int
    heads: int
    side: int
    pixels: int
    classes: int

    @property
    def hidden_dim(self) -> int:
        """Units of a feed-forward part."""
        return 4 * self.dim


class InnerAttention(nn.Module):
    """Scaled dot-product attention of the patches at hand, each to each: no parameters, no projections."""

    def forward(self, q_BLNH: Tensor, k_BLNH: Tensor, v_BLNH: Tensor) -> Tensor:
        """Attend; returns out_BLNH."""
        q_BNLH, k_BNLH, v_BNLH = (x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH))
        return F.scaled_dot_product_attention(q_BNLH, k_BNLH, v_BNLH).transpose(1, 2)


class Attention(nn.Module):
    """Projections round `inner`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.dim, 3 * config.dim)
        self.output = nn.Linear(config.dim, config.dim)
        self.inner = InnerAttention()

    def forward(self, x_BLD: Tensor) -> Tensor:
        """Mix x_BLD over the picture."""
        q_BLNH, k_BLNH, v_BLNH = self.qkv(x_BLD).unflatten(-1, (3, self.heads, -1)).unbind(2)
        return self.output(self.inner(q_BLNH, k_BLNH, v_BLNH).flatten(2))


class FeedForward(nn.Module):
    """Two layers with a GELU between."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.dim, config.hidden_dim)
        self.down = nn.Linear(config.hidden_dim, config.dim)

    def forward(self, x_BLD: Tensor) -> Tensor:
        """Map every patch by itself, x_BLD to x_BLD."""
        return self.down(F.gelu(self.up(x_BLD), approximate="tanh"))


class Modulation(nn.Module):
    """What a layer norm is shifted and scaled by, and a layer's output weighted with, from time and class."""

    def __init__(self, dim: int, parts: int) -> None:
        super().__init__()
        self.parts = parts
        self.project = nn.Linear(dim, parts * dim)

    def forward(self, condition_BD: Tensor) -> tuple[Tensor, ...]:
        """(B, 1, D) each."""
        return self.project(F.silu(condition_BD)).unsqueeze(1).chunk(self.parts, dim=-1)


class Block(nn.Module):
    """Attention, then the feed-forward part, each after a norm that time and class set."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.dim, elementwise_affine=False)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.LayerNorm(config.dim, elementwise_affine=False)
        self.feed_forward = FeedForward(config)
        self.modulation = Modulation(config.dim, 6)

    def forward(self, x_BLD: Tensor, condition_BD: Tensor) -> Tensor:
        """One layer, x_BLD to x_BLD."""
        shift, scale, weight, ff_shift, ff_scale, ff_weight = self.modulation(condition_BD)
        x_BLD = x_BLD + weight * self.attention(self.attention_norm(x_BLD) * (1 + scale) + shift)
        return x_BLD + ff_weight * self.feed_forward(self.feed_forward_norm(x_BLD) * (1 + ff_scale) + ff_shift)


class DiT(nn.Module):
    """The whole model: noisy patches, their places, time and class in, velocity out."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.input = nn.Linear(config.pixels, config.dim)
        self.row = nn.Embedding(config.side, config.dim)
        self.column = nn.Embedding(config.side, config.dim)
        self.label = nn.Embedding(config.classes, config.dim)
        self.time = nn.Sequential(nn.Linear(config.dim, config.dim), nn.SiLU(), nn.Linear(config.dim, config.dim))
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.dim, elementwise_affine=False)
        self.modulation = Modulation(config.dim, 2)
        self.output = nn.Linear(config.dim, config.pixels)
        self._initialise()

    def _initialise(self) -> None:
        for table in (self.row, self.column, self.label):
            nn.init.normal_(table.weight, std=0.2)
        # At first every layer is the identity, and the model gives zero.
        zero = [module.project for module in self.modules() if isinstance(module, Modulation)]
        for layer in (*zero, self.output):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, noisy_BLP: Tensor, positions_L: Tensor, time_B: Tensor, label_B: Tensor) -> Tensor:
        """Predict where noisy pictures are to move.

        Args:
            noisy_BLP: patches, those of the picture this process holds.
            positions_L: int64, where each of those stands in the whole picture, in reading order.
            time_B: from 0 (noise) to 1 (picture).
            label_B: int64, the class of each picture.

        Returns:
            velocity_BLP, of pixels per time.
        """
        rows_L, columns_L = positions_L // self.config.side, positions_L % self.config.side
        condition_BD = self.time(waves(time_B, self.config.dim)) + self.label(label_B)
        x_BLD = self.input(noisy_BLP) + self.row(rows_L) + self.column(columns_L)
        for layer in self.layers:
            x_BLD = layer(x_BLD, condition_BD)
        shift, scale = self.modulation(condition_BD)
        return self.output(self.norm(x_BLD) * (1 + scale) + shift)


def waves(time_B: Tensor, dim: int) -> Tensor:
    """(B, dim): cosines and sines of a time, from slow to fast."""
    frequencies = torch.exp(torch.linspace(0, 6, dim // 2, device=time_B.device))
    angles = time_B.unsqueeze(-1) * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1)
