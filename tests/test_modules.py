"""Modules whose attention takes x alone: what docs/modules.md does to them, and what a style says of them."""

import copy
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.parallel import parallelize_module

from wallfacer_dt import TokenOrder, WallFacerParallel, context_mesh
from wallfacer_dt.testing import RankPool, worst_error

Ranks = Callable[[int], RankPool]
PAGE = Path(__file__).parent.parent / "docs" / "modules.md"
(PROGRAM,) = re.findall(r"```python\n([^`]*)```", PAGE.read_text())


class Attention(nn.Module):
    """As timm's."""

    def __init__(self, dim: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.gate = heads, dim // heads, None
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.q_norm = self.k_norm = self.norm = self.proj_drop = nn.Identity()

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim)).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v, attn_mask, 0.0, is_causal).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(x)


class Embedding(nn.Module):
    """Patches of 4 x 4."""

    num_patches = 81

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(48, 32)

    def forward(self, images: Tensor) -> Tensor:
        return self.proj(F.unfold(images, 4, stride=4).transpose(1, 2))


class Classifier(nn.Module):
    """A vision transformer of plain modules, of as many patches as four ranks do not divide."""

    num_prefix_tokens = 1

    def __init__(self) -> None:
        super().__init__()
        self.patch_embed, self.blocks, self.head = Embedding(), nn.Sequential(Block(), Block()), nn.Linear(32, 10)
        self.token = nn.Parameter(torch.randn(1, 1, 32))

    def forward(self, images: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(images), -1, -1), self.patch_embed(images)], 1)
        return self.head(self.blocks(x)[:, 0])


def of_timm() -> nn.Module:
    import timm

    return timm.create_model("vit_tiny_patch16_224", depth=2, num_classes=10, img_size=36, patch_size=4)


def run(make: Callable[[], nn.Module]) -> float:
    """What the page does, beside one process."""
    torch.manual_seed(0)
    model = make().double()
    images, labels = torch.randn(2, 3, 36, 36, dtype=torch.float64), torch.tensor([3, 5])
    whole = copy.deepcopy(model)
    F.cross_entropy(whole(images), labels).backward()
    exec(PROGRAM, {"model": model, "images": images, "labels": labels})
    found = {name: p.grad for name, p in model.named_parameters()}
    for grad in found.values():
        dist.all_reduce(grad)
    return worst_error({n: (found[n], p.grad) for n, p in whole.named_parameters()}, relative_to="largest")


def test_a_plain_module(ranks: Ranks) -> None:
    assert max(ranks(4).run(run, Classifier)) < 1e-10


def test_timm(ranks: Ranks) -> None:
    pytest.importorskip("timm", reason="timm is not installed")
    assert max(ranks(4).run(run, of_timm)) < 1e-10


def refusal() -> str:
    mesh = context_mesh("cpu", 2, 2)
    model, style = Classifier(), WallFacerParallel(is_causal=True, order=TokenOrder("contiguous", mesh))
    try:
        parallelize_module(model, mesh, {"blocks.*.attn": style})
    except ValueError as error:
        return str(error)
    return ""


def test_a_style_on_such_a_module_shows_the_edit(ranks: Ranks) -> None:
    for told in ranks(4).run(refusal):
        assert "Attention projects its x by itself (qkv.weight" in told
        assert "give it one, self.inner = Inner()" in told
