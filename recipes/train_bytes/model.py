"""A byte-level GPT: rotary positions, grouped-query causal attention, RMSNorm, SwiGLU.

The model knows nothing of ranks. It takes the tokens it is given and their positions in the
sequence; the one place where tokens meet is `Attention.inner`, a module without parameters for a
`ParallelStyle` to replace.

Shape suffixes: B = batch, L = tokens at hand, D = model dim, N = query heads, G = key and value
heads, H = head dim, V = vocabulary (256 bytes).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes of a `ByteGPT`. `tied` uses the embedding as the output head too."""

    dim: int
    layers: int
    heads: int
    kv_heads: int
    tied: bool = False
    rope_base: float = 10_000.0

    @property
    def head_dim(self) -> int:
        """Elements of one attention head."""
        return self.dim // self.heads

    @property
    def hidden_dim(self) -> int:
        """Units of a feed-forward part: 8/3 of the model's dim, rounded up to a multiple of 32."""
        return 32 * -(-8 * self.dim // 96)


class InnerAttention(nn.Module):
    """Causal scaled dot-product attention of the tokens at hand: no parameters, no projections."""

    def forward(self, q_BLNH: Tensor, k_BLGH: Tensor, v_BLGH: Tensor) -> Tensor:
        """Attend from each token to itself and those before it; returns out_BLNH."""
        q_BNLH, k_BGLH, v_BGLH = (x.transpose(1, 2) for x in (q_BLNH, k_BLGH, v_BLGH))
        out_BNLH = F.scaled_dot_product_attention(q_BNLH, k_BGLH, v_BGLH, is_causal=True, enable_gqa=True)
        return out_BNLH.transpose(1, 2)


class Attention(nn.Module):
    """Projections and rotary positions round `inner`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.query = nn.Linear(config.dim, config.heads * config.head_dim, bias=False)
        self.key = nn.Linear(config.dim, config.kv_heads * config.head_dim, bias=False)
        self.value = nn.Linear(config.dim, config.kv_heads * config.head_dim, bias=False)
        self.output = nn.Linear(config.heads * config.head_dim, config.dim, bias=False)
        self.inner = InnerAttention()

    def forward(self, x_BLD: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        """Mix x_BLD over the sequence; `turn` is the (cos_LH, sin_LH) of `rotations`."""
        q_BLNH = self.query(x_BLD).unflatten(-1, (-1, self.head_dim))
        k_BLGH = self.key(x_BLD).unflatten(-1, (-1, self.head_dim))
        v_BLGH = self.value(x_BLD).unflatten(-1, (-1, self.head_dim))
        out_BLNH = self.inner(rotate(q_BLNH, turn), rotate(k_BLGH, turn), v_BLGH)
        return self.output(out_BLNH.flatten(2))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.up = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.down = nn.Linear(config.hidden_dim, config.dim, bias=False)

    def forward(self, x_BLD: Tensor) -> Tensor:
        """Map every token by itself, x_BLD to x_BLD."""
        return self.down(F.silu(self.gate(x_BLD)) * self.up(x_BLD))


class Block(nn.Module):
    """Attention, then the feed-forward part, each after a norm and added to its input."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.dim)
        self.feed_forward = FeedForward(config)

    def forward(self, x_BLD: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        """One layer, x_BLD to x_BLD."""
        x_BLD = x_BLD + self.attention(self.attention_norm(x_BLD), turn)
        return x_BLD + self.feed_forward(self.feed_forward_norm(x_BLD))


class ByteGPT(nn.Module):
    """The whole model: bytes and their positions in, logits of each next byte out."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(VOCABULARY, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim)
        self.head = nn.Linear(config.dim, VOCABULARY, bias=False)
        self._initialise()
        if config.tied:
            self.head.weight = self.embedding.weight

    def _initialise(self) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            # What is added to the residual stream shrinks with the number of additions.
            ends = name.endswith(("output.weight", "down.weight"))
            nn.init.normal_(parameter, std=0.02 / (2 * self.config.layers) ** 0.5 if ends else 0.02)

    def forward(self, tokens_BL: Tensor, positions_L: Tensor) -> Tensor:
        """Predict the byte after each token.

        Args:
            tokens_BL: int64 bytes, those of the sequence this process holds.
            positions_L: int64, where each of those stands in the whole sequence.

        Returns:
            logits_BLV.
        """
        turn = rotations(positions_L, self.config.head_dim, self.config.rope_base)
        x_BLD = self.embedding(tokens_BL)
        for layer in self.layers:
            x_BLD = layer(x_BLD, turn)
        return self.head(self.norm(x_BLD))


def rotations(positions_L: Tensor, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    """The (cos_LH, sin_LH), float32, that turn a head at each of these positions."""
    # In float64: at a position of a million, float32 keeps too few digits of the fast angles.
    steps = torch.arange(0, head_dim, 2, device=positions_L.device, dtype=torch.float64)
    angles = positions_L.double().unsqueeze(-1) * base ** (-steps / head_dim)
    angles_LH = torch.cat((angles, angles), dim=-1)
    return angles_LH.cos().float(), angles_LH.sin().float()


def rotate(x_BLNH: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Turn every head of x_BLNH by its position (RoPE, halves as pairs); keeps the dtype."""
    cos_L1H, sin_L1H = (part.unsqueeze(1) for part in turn)
    low, high = x_BLNH.float().chunk(2, dim=-1)
    turned = torch.cat((-high, low), dim=-1)
    return (x_BLNH.float() * cos_L1H + turned * sin_L1H).to(x_BLNH.dtype)
