"""What METP receives, counted from the collectives that run, equals the closed formulas to the byte."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module

from tests.strategies import examples, meshes, schedules
from wallfacer_dt import (
    METPAttentionParallel,
    METPParallel,
    WallFacerParallel,
    attention_volume,
    context_mesh,
    feed_forward_volume,
    metp_attention_volume,
)
from wallfacer_dt.testing import RankPool, count_collectives


class Layer(NamedTuple):
    """Sizes of a feed-forward and of attention, and where they run."""

    ring: int
    team: int
    dtype: str
    dim: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    bias: bool
    fused: bool
    schedule: str
    rotate: str
    rotate_forward: str
    shard: int = 2
    batch: int = 2


class FeedForward(nn.Module):
    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.up = nn.Linear(layer.dim, layer.hidden, bias=layer.bias)
        self.down = nn.Linear(layer.hidden, layer.dim, bias=False)


class Attention(nn.Module):
    def __init__(self, layer: Layer) -> None:
        super().__init__()
        rows = [n * layer.head_dim for n in (layer.heads, layer.kv_heads, layer.kv_heads)]
        for name, n in [("qkv", sum(rows))] if layer.fused else zip("qkv", rows, strict=True):
            setattr(self, name, nn.Linear(layer.dim, n, bias=layer.bias))
        self.out = nn.Linear(rows[0], layer.dim, bias=False)


@st.composite
def layers(draw: st.DrawFn, size: int) -> Layer:
    ring, team = draw(st.sampled_from(meshes(size)))
    schedule = draw(st.sampled_from(schedules(ring, team)))
    published = schedule == "published"
    kv_heads = draw(st.integers(1, 5))
    return Layer(
        ring, team, draw(st.sampled_from(["float64", "float32", "bfloat16"])), draw(st.integers(1, 9)),
        draw(st.integers(1, 40)), kv_heads * draw(st.integers(1, 3)), kv_heads, 2 * draw(st.integers(1, 3)),
        draw(st.booleans()), draw(st.booleans()), schedule,
        "q" if published else draw(st.sampled_from(["kv", "q", "auto"])),
        "kv" if published else draw(st.sampled_from(["kv", "q", "auto"])),
    )  # fmt: skip


def count(layer: Layer) -> tuple[int, list[tuple[int, int]], list[tuple[int, int]]]:
    """This rank's index, and bytes forward and backward of the feed-forward and of attention."""
    mesh = context_mesh("cpu", layer.ring, layer.team)
    dtype = getattr(torch, layer.dtype)
    attention = WallFacerParallel(
        schedule=layer.schedule, rotate=layer.rotate, rotate_forward=layer.rotate_forward, kernel="reference"
    )
    names = {"qkv": "qkv", "kv_heads": layer.kv_heads} if layer.fused else {"query": "q", "key": "k", "value": "v"}
    styles = [
        (FeedForward(layer), METPParallel(up="up", down="down", activation="relu", check=False)),
        (
            Attention(layer),
            METPAttentionParallel(**names, output="out", head_dim=layer.head_dim, attention=attention, check=False),
        ),
    ]
    counted, formula = [], []
    index = mesh.get_coordinate()[0] * layer.team + mesh.get_coordinate()[1]
    for module, style in styles:
        parallelize_module(module.to(dtype), mesh, style)
        x = torch.randn(layer.batch, layer.shard, layer.dim, dtype=dtype, requires_grad=True)
        with count_collectives(mesh) as traffic:
            module(x).sum().backward()
        counted.append((traffic.forward.received_bytes, traffic.backward.received_bytes))
    formula = [(one.bytes, two.bytes) for one, two in (of_feed_forward(layer), of_attention(layer, index))]
    return index, counted, formula


def of_feed_forward(layer: Layer):
    return feed_forward_volume(
        (layer.ring, layer.team), model_dim=layer.dim, hidden=layer.hidden, dtype=getattr(torch, layer.dtype),
        biases=int(layer.bias),
    )  # fmt: skip


def of_attention(layer: Layer, index: int):
    volume = metp_attention_volume(
        layer.ring, layer.team, batch=layer.batch, length=layer.shard * layer.ring * layer.team, model_dim=layer.dim,
        heads=layer.heads, kv_heads=layer.kv_heads, head_dim=layer.head_dim, dtype=getattr(torch, layer.dtype),
        bias=layer.bias, fused=layer.fused, schedule=layer.schedule, rotate=layer.rotate,
        rotate_forward=layer.rotate_forward, index=index,
    )  # fmt: skip
    return volume.forward, volume.backward


@pytest.mark.ranks
@pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
@examples(12, today=8)
@given(data=st.data())
def test_counted_on_ranks(threads: Callable[[int], RankPool], size: int, data: st.DataObject) -> None:
    for _, counted, formula in threads(size).run(count, data.draw(layers(size))):
        assert counted == formula


@given(p=st.integers(1, 16), h=st.integers(1, 8))
def test_table_1(p: int, h: int) -> None:
    """24 (p-1)/p h^2 elements of a feed-forward with four times as many hidden units."""
    h *= p
    forward, backward = feed_forward_volume((p,), model_dim=h, hidden=4 * h, dtype=torch.float32)
    assert (forward.payload + backward.payload) * p == 24 * (p - 1) * h * h


@given(p=st.integers(2, 16), n=st.integers(1, 3), tokens=st.integers(1, 64))
def test_table_2(p: int, n: int, tokens: int) -> None:
    """6 (p-1)/p bsh for keys, values and their gradients, and weights three times, instead of 3 log2(p) times."""
    heads, head_dim = n * p, 2 * p
    h, s = heads * head_dim, tokens * p
    volume = metp_attention_volume(
        p, 1, batch=1, length=s, model_dim=h, heads=heads, kv_heads=heads, head_dim=head_dim, dtype=torch.float32,
        rotate="kv",
    )  # fmt: skip
    inner = attention_volume(
        p, 1, batch=1, length=s, heads=heads, kv_heads=heads, head_dim=head_dim, dtype=torch.float32, rotate="kv"
    )
    assert inner.forward.payload + inner.backward.payload == 6 * (p - 1) * s * h // p
    weights = volume.forward.payload + volume.backward.payload - 6 * (p - 1) * s * h // p
    assert weights == 12 * (p - 1) * h * h // p + 4 * (p - 1) * h * h // p**2


@pytest.mark.parametrize(
    ("sizes", "kind", "said"),
    [
        ({"model_dim": 4.5}, TypeError, r"model_dim must be an int, got 4\.5"),
        ({"model_dim": 0}, ValueError, "model_dim must be at least 1, got 0"),
        ({"out_dim": -8}, ValueError, "out_dim must be at least 1, got -8"),
        ({"hidden": -4}, ValueError, "hidden must be at least 1, got -4"),
        ({"axes": (2, 0)}, ValueError, "an axis must be at least 1, got 0"),
        ({"biases": -1}, ValueError, "biases must be at least 0, got -1"),
    ],
)
def test_sizes_that_there_are_not(sizes: dict, kind: type[Exception], said: str) -> None:
    given = {"axes": (2,), "model_dim": 8, "hidden": 8} | sizes
    with pytest.raises(kind, match=said):
        feed_forward_volume(**given, dtype=torch.float32)


@pytest.mark.parametrize(
    ("sizes", "kind", "said"),
    [
        ({"model_dim": 4.5}, TypeError, r"model_dim must be an int, got 4\.5"),
        ({"model_dim": -1}, ValueError, "model_dim must be at least 0, got -1"),
        ({"ring": 0}, ValueError, "ring must be at least 1, got 0"),
        ({"ring": 2.0}, TypeError, r"ring must be an int, got 2\.0"),
        ({"team": -1}, ValueError, "team must be at least 1, got -1"),
        ({"head_dim": 0}, ValueError, "head_dim must be at least 1, got 0"),
    ],
)
def test_attention_of_sizes_that_there_are_not(sizes: dict, kind: type[Exception], said: str) -> None:
    shape = {"batch": 1, "length": 8, "model_dim": 8, "heads": 2, "kv_heads": 1, "head_dim": 4}
    with pytest.raises(kind, match=said):
        metp_attention_volume(**({"ring": 2, "team": 1} | shape | sizes), dtype=torch.float32)
