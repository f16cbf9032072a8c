"""What is noticed where tokens are dealt out: plans that match nothing, and ranks to which nobody deals."""

import gc
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from tests.metp_refusals import Attention, attention
from wallfacer_dt import (
    RingParallel,
    TokenOrder,
    WallFacerParallel,
    context_mesh,
    context_parallel_attention,
    sequence_positions,
    shard_sequence,
    split_context_axis,
)
from wallfacer_dt.dealing import _noticed, notice_missed
from wallfacer_dt.testing import RankPool

pytestmark = pytest.mark.ranks


class Inner(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


class Layer(nn.Module):
    def __init__(self, *, attends: bool = True) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({"inner": Inner()} if attends else {})


@dataclass
class OfParts(ParallelStyle):
    """A style of others, which applies a plan to the parts of a module."""

    plan: dict[str, ParallelStyle]

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return parallelize_module(module, device_mesh, self.plan)


def model() -> nn.Module:
    """Of two layers, one of which has no attention."""
    return nn.ModuleDict({"layers": nn.ModuleList([Layer(), Layer(attends=False)])})


def said(call: Callable[[], Any]) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            call()
        except ValueError as error:
            return str(error)
    return "; ".join(str(one.message).partition(" in module")[0] for one in caught)


def plans() -> dict[str, str]:
    """On every rank: what is said of plans, before anything is dealt out and after; in each case as for the first."""
    mesh = context_mesh("cpu", ring=2, team=2)
    order, tokens = TokenOrder("head_tail", mesh), torch.arange(16)

    def forgotten(call: Callable[[], Any]) -> str:
        """What is said, and that tokens were dealt out is not known any more."""
        found = said(call)
        _noticed(order.dealt).are_dealt = False
        return found

    def apply(path: str, on: Any = mesh, to: nn.Module | None = None) -> str:
        style = WallFacerParallel(order=order, layout="BNLH", check=False)
        return said(lambda: parallelize_module(to or model(), on, {path: style}))

    def deal() -> str:
        return forgotten(lambda: shard_sequence(tokens, order, dim=0))

    def afterwards(plan: dict[str, Any], to: nn.Module | None = None, on: Any = mesh) -> str:
        """Applied when tokens have been dealt out."""
        shard_sequence(tokens, order, dim=0)
        return forgotten(lambda: parallelize_module(to or model(), on, plan))

    pair = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp_ring", "dp"))["cp_ring"]
    found = {"first": apply("blocks.*.attention.inner"), "dealt out": deal(), "dealt out again": deal()}
    style = WallFacerParallel(order=order, layout="BNLH", check=False)
    found["of no layer"] = apply("layers.*.self_attn.inner")
    found["of no layer, then"] = forgotten(lambda: sequence_positions(16, order))
    found["of no layer, at once"] = afterwards({"layers.*.self_attn.inner": style})
    found |= {"of one layer": apply("layers.*.attention.inner"), "then": deal()}
    found["of one layer, afterwards"] = afterwards({"layers.*.attention.inner": style})
    stage = nn.ModuleDict({"layers": nn.ModuleDict(), "norm": nn.Identity()})
    found["of a stage without layers"] = afterwards({"layers.*.attention.inner": style}, to=stage)
    found["of a stage without layers, then"] = deal()
    found["of another stage's layer"] = afterwards({"layers.7.attention.inner": style})
    found["of another stage's layer, then"] = deal()
    found["within another style"] = afterwards({"layers.*": OfParts({"attn.inner": style})})
    found["of the other layer"] = afterwards({"layers.1.attention.inner": style})
    found["of nothing"] = afterwards({"blocks.*.attention.inner": style})
    found["on another mesh"] = afterwards({"blocks.*.attention.inner": style}, on=pair)
    tried = model()
    for path in ("layers.*.self_attn.inner", "layers.*.attention.inner"):
        apply(path, to=tried)
    found["made up for"] = deal()
    both = {"blocks.*.attention.inner": style, "layers.0.attention.inner": style}
    found["one of two"] = afterwards(both)
    deep = {"layers.0.attention.inner": style, "layers.1.att.inner": style}
    said(lambda: parallelize_module(model(), mesh, deep))
    found["one of two, deep"] = deal()
    said(lambda: parallelize_module(model(), mesh, dict(reversed(deep.items()))))
    found["one of two, deep, the first"] = deal()
    metp = attention(check=False)
    found["METP's attention"] = afterwards({"blocks.*.attention": metp})
    projected = nn.ModuleDict({"layers": nn.ModuleList([nn.Identity(), nn.ModuleDict({"own": Attention()})])})
    said(lambda: parallelize_module(projected, mesh, {"layers.*.own": metp}))
    found["METP's attention, of which some match"] = deal()
    encoder, decoder, other = model(), model(), model()
    apply("layers.*.self_attn.inner", to=encoder)
    apply("layers.*.attention.inner", to=decoder)
    found["an encoder's, then a decoder's"] = deal()
    for one in (decoder, encoder):
        apply("layers.*.self_attn.inner", to=one)
    apply("layers.0.attention.inner", to=other)
    apply("layers.0.attention.inner", to=encoder)
    found["one of two models made up for"] = deal()
    apply("layers.*.self_attn.inner", to=(decoder := model()))
    apply("attention.inner", to=decoder["layers"][0])  # pyrefly: ignore[bad-index, bad-argument-type]
    found["made up for layer by layer"] = deal()
    twice = {"layers.*.attention.inner": style}
    said(lambda: parallelize_module(model(), mesh, twice))
    empty = nn.ModuleDict({"layers": nn.ModuleList([Layer(attends=False)])})
    said(lambda: parallelize_module(empty, mesh, twice))
    found["one plan of two models, in one of which it matches"] = deal()
    tried = model()
    mended: dict[str, Any] = {"layers.*.self_attn.inner": WallFacerParallel(order=order, layout="BNLH", check=False)}
    said(lambda: parallelize_module(tried, mesh, mended))
    mended["layers.*.attention.inner"] = mended.pop("layers.*.self_attn.inner")
    said(lambda: parallelize_module(tried, mesh, mended))
    found["a plan mended where it is"] = deal()
    apply("layers.*.self_attn.inner")  # to a model that nobody keeps
    if dist.get_rank() == 0:
        gc.collect()
    apply("layers.*.attention.inner")
    found |= {"a model that was given up": deal(), "a model that was given up, again": deal()}
    notice_missed((0, 1, 2, 3), "of a model that is not known", None, at_once=False)
    found["of a model that is not known"] = deal()
    notice_missed((0, 1, 2, 3), "of a model that is not known", None, at_once=False)
    apply("layers.*.attention.inner")
    found["of a model that is not known, made up for"] = deal()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        others = {"layers.*.self_attn.inner": nn.Identity()}
        found["a style of others"] = said(lambda: parallelize_module(model(), mesh, others))
    return found


TORCHS = "Parallelize plan key '{}' could not be resolved: no submodule matching token '{}'"
REFUSED = "WallFacerParallel was to be applied to '{}', which matches no module of {}, so that every rank would attend"
MISSING = TORCHS.format("self_attn.inner", "self_attn")
NOWHERE = REFUSED.format("layers.*.self_attn.inner", "ModuleDict")
PLANS = {
    "first": TORCHS.format("blocks.*.attention.inner", "blocks"),
    "dealt out": REFUSED.format("blocks.*.attention.inner", "ModuleDict"),
    "dealt out again": "",
    "of no layer": f"{MISSING}; {MISSING}",
    "of no layer, then": NOWHERE,
    "of no layer, at once": NOWHERE,
    "of one layer": TORCHS.format("inner", "inner"),
    "then": "",
    "of one layer, afterwards": TORCHS.format("inner", "inner"),
    "of a stage without layers": TORCHS.format("*.attention.inner", "*"),
    "of a stage without layers, then": "",
    "of another stage's layer": TORCHS.format("7.attention.inner", "7"),
    "of another stage's layer, then": REFUSED.format("layers.7.attention.inner", "ModuleDict"),
    "within another style": "WallFacerParallel was to be applied to 'attn.inner', which matches no module, so that",
    "of the other layer": REFUSED.format("layers.1.attention.inner", "ModuleDict"),
    "of nothing": REFUSED.format("blocks.*.attention.inner", "ModuleDict"),
    "on another mesh": TORCHS.format("blocks.*.attention.inner", "blocks"),
    "made up for": "",
    "one of two": REFUSED.format("blocks.*.attention.inner", "ModuleDict"),
    "one of two, deep": REFUSED.format("layers.1.att.inner", "ModuleDict"),
    "one of two, deep, the first": REFUSED.format("layers.1.att.inner", "ModuleDict"),
    "METP's attention": REFUSED.format("blocks.*.attention", "ModuleDict").replace(
        "WallFacerParallel", "METPAttentionParallel"
    ),
    "METP's attention, of which some match": "",
    "an encoder's, then a decoder's": NOWHERE,
    "one of two models made up for": NOWHERE,
    "made up for layer by layer": "",
    "one plan of two models, in one of which it matches": REFUSED.format("layers.*.attention.inner", "ModuleDict"),
    "a plan mended where it is": "",
    "a model that was given up": NOWHERE,
    "a model that was given up, again": "",
    "of a model that is not known": "of a model that is not known",
    "of a model that is not known, made up for": "",
    "a style of others": f"{MISSING}; {MISSING}",
}


def attending() -> list[str]:
    """On every rank: what is said of attention on meshes to which nothing has been dealt out, and others."""
    mesh = context_mesh("cpu", ring=2, team=2)
    order, x = TokenOrder("head_tail", mesh), torch.randn(1, 2, 4, 8)

    def attend(x: Tensor = x, on: Any = mesh) -> str:
        return said(lambda: context_parallel_attention(x, x, x, on))

    whole = DTensor.from_local(x, mesh, [Shard(2), Shard(2)], run_check=False)
    checked = nn.ModuleDict({"inner": Inner()})
    style = WallFacerParallel(order=order, layout="BNLH")
    proved = said(lambda: parallelize_module(checked, mesh, {"inner": style}))
    found = [proved, attend(whole), attend(), attend()]
    pair = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp_ring"))["cp_ring"]
    shard_sequence(torch.arange(16), TokenOrder("contiguous", pair), dim=0)
    found.append(attend(on=pair))
    across = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp_ring", "dp"))["cp_ring"]
    inner = RingParallel(order=TokenOrder("contiguous", across), check=False)
    projected = parallelize_module(Attention(), across, attention(check=False, attention=inner))
    return [*found, *(said(lambda: projected(torch.randn(1, 2, 6))) for _ in range(2))]


def by_others() -> list[str]:
    """A mesh along whose axis others deal tokens out."""
    mesh = split_context_axis(init_device_mesh("cpu", (4,), mesh_dim_names=("cp",)), ring=2, team=2)
    x, style = torch.randn(1, 2, 4, 8), WallFacerParallel(check=False)
    attended = said(lambda: context_parallel_attention(x, x, x, mesh))
    paths = "blocks.*.attention.inner", "layers.*.self_attn.inner", "layers.1.attention.inner"
    return [attended, *(said(partial(parallelize_module, model(), mesh, {path: style})) for path in paths)]


def test_attention_on_ranks_to_which_others_deal(threads: Callable[[int], RankPool]) -> None:
    for attended, nothing, of_no_layer, of_the_other in threads(4).run(by_others):
        assert attended == ""
        assert nothing.startswith(REFUSED.format("blocks.*.attention.inner", "ModuleDict"))
        assert of_no_layer.startswith(NOWHERE)
        assert of_the_other.startswith(REFUSED.format("layers.1.attention.inner", "ModuleDict"))


def test_what_is_noticed() -> None:
    """In a world of its own, in which nothing has been noticed; on processes, since warnings are caught."""
    pool = RankPool(4)
    for proved, whole, first, again, dealt, projected, anew in pool.run(attending):
        assert (proved, whole, again, dealt, anew) == ("", "", "", "", "")
        assert projected.startswith("attention on 2 ranks, to which no sequence was dealt out in this process")
        assert first.startswith("attention on 4 ranks, to which no sequence was dealt out in this process")
    for told in pool.run(plans):
        assert told.keys() == PLANS.keys()
        for name, what in PLANS.items():
            assert told[name].startswith(what), (name, told[name])
            assert bool(told[name]) == bool(what), (name, told[name])
    pool.close()
