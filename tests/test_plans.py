"""Plans name the modules that they should, with the options that they were given."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.parallel import parallelize_module

from wallfacer_dt import TokenOrder, WallFacerParallel, context_mesh, shard_sequence, unshard_sequence
from wallfacer_dt.plans import llama3_plan
from wallfacer_dt.testing import worst_error
from wallfacer_dt.testing.fake import fake_world


class InnerAttention(nn.Module):
    """Called as torchtitan calls its own, on tensors in (B, L, N, H)."""

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: Any = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        is_causal: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
        return out.transpose(1, 2)


def llama(layers: int) -> nn.Module:
    """The names of torchtitan's Llama 3, and of its modules those that matter here."""
    model = nn.Module()
    model.layers = nn.ModuleDict()
    for layer in range(layers):
        block = model.layers[str(layer)] = nn.Module()
        block.attention = nn.Module()
        block.attention.inner_attention = InnerAttention()
    return model


def difference_by_layer(name: str, options: dict[str, str]) -> list[float]:
    """How far each layer's attention on two ranks of a ring is from that of one process."""
    mesh = context_mesh("cpu", 2)
    order = TokenOrder(name, mesh)
    model = llama(2)
    parallelize_module(model, mesh, llama3_plan(order=order, **options))
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    qkv = draw(2, 8, 4, 16), draw(2, 8, 2, 16), draw(2, 8, 2, 16)
    expected = InnerAttention()(*qkv, enable_gqa=True)
    shards = [shard_sequence(x, order, dim=1) for x in qkv]
    differences = []
    for block in model.layers.values():
        out = block.attention.inner_attention(*shards, attention_masks=None, scale=None, enable_gqa=True)
        differences.append(worst_error([(unshard_sequence(out, order, dim=1), expected)]))
    return differences


@pytest.mark.ranks
@pytest.mark.parametrize("order", ["head_tail", "contiguous"])
@pytest.mark.parametrize("options", [{}, {"kernel": "reference", "rotate": "q", "rotate_forward": "q"}])
def test_every_layer_has_the_style(ranks, order: str, options: dict[str, str]) -> None:
    for differences in ranks(2).run(difference_by_layer, order, options):
        assert len(differences) == 2
        assert max(differences) < 1e-12


def test_options_arrive() -> None:
    with fake_world(4):
        order = TokenOrder("head_tail", context_mesh("cpu", 2, 2))
        (style,) = llama3_plan(
            order=order, schedule="published", rotate="q", rotate_forward="kv", kernel="reference"
        ).values()
    assert isinstance(style, WallFacerParallel)
    told = style.options
    got = told.is_causal, told.order, told.schedule, told.rotate, told.rotate_forward, told.kernel, style.layout
    assert got == (True, order, "published", "q", "kv", "reference", "BLNH")


def test_there_is_no_default_order() -> None:
    with pytest.raises(TypeError, match="order"):
        llama3_plan()
    with pytest.raises(TypeError, match="order must be a TokenOrder, got 'head_tail'"):
        llama3_plan(order="head_tail")
