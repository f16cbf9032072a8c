"""What ranks run to show that METP refuses bad input, on every rank and before anything is sent."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

import wallfacer_dt as w
from tests.cases import mesh_of
from tests.refusals import Communication

D, H = 6, 4


class FeedForward(nn.Module):
    def __init__(self, hidden: int = 8) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(D, hidden), nn.Linear(D, hidden), nn.Linear(hidden, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class OfEvaluation(FeedForward):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 if self.training else 3)


class GatedElsewhere(FeedForward):
    """By what is no parameter of its own, and is 1 as yet."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = [torch.ones((), requires_grad=True)]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gates[0]


class Attention(nn.Module):
    """Two query heads and one of keys; ``hidden``: what stands in its code and no style can see."""

    def __init__(self, hidden: str = "", kv_heads: int = 1) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(D, 2 * H), nn.Linear(D, kv_heads * H), nn.Linear(D, kv_heads * H)
        self.o, self.hidden = nn.Linear(2 * H, D), hidden

    def forward(self, x: Tensor, turn: Any = None) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, H)).transpose(1, 2) for p in (self.q, self.k, self.v))
        if self.hidden == "a norm":
            q = F.rms_norm(q, (H,))
        mask = None
        if self.hidden == "a window":
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril().triu(-1000)
        if self.hidden == "dropout":
            v = F.dropout(v, 0.1)
        scale = 0.3 if self.hidden == "a scale" else None
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
        )
        y = self.o(out.transpose(1, 2).flatten(2))
        return (y, y) if self.hidden == "a pair" else y


class Fused(nn.Module):
    """Four heads of each."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(D, 12 * H), nn.Linear(4 * H, D)


class Narrow(nn.Module):
    """A feed-forward with other things in it."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, 8), nn.Linear(8, D)
        for name, child in children.items():
            setattr(self, name, child)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def metp(**options: Any) -> ParallelStyle:
    return w.METPParallel(**({"up": "up", "gate": "gate", "down": "down", "activation": "silu"} | options))


def narrow(**options: Any) -> ParallelStyle:
    return w.METPParallel(**({"up": "up", "down": "down", "activation": "gelu"} | options))


def attention(**options: Any) -> ParallelStyle:
    given = {"query": "q", "key": "k", "value": "v", "output": "o", "head_dim": H, "attention": inner()} | options
    return w.METPAttentionParallel(**{name: value for name, value in given.items() if value != "absent"})


def attention_fused() -> ParallelStyle:
    return w.METPAttentionParallel(qkv="qkv", output="o", head_dim=H, attention=inner_beside_tp(), check=False)


def inner(**options: Any) -> ParallelStyle:
    order = w.TokenOrder("contiguous", mesh_of(2, 2)) if dist.is_initialized() and dist.get_world_size() == 4 else None
    return w.WallFacerParallel(**({"is_causal": True, "order": order} | options))


def inner_beside_tp() -> ParallelStyle:
    return inner(order=w.TokenOrder("contiguous", with_tp()["cp_ring"]))


def apply(module: nn.Module, style: ParallelStyle, mesh: Any = None) -> nn.Module:
    # torch distributes parameters, which is no business of a refusal: those come before.
    return parallelize_module(module, mesh_of(2, 2) if mesh is None else mesh, style, src_data_rank=None)


def x(*shape: int, **options: Any) -> Tensor:
    return torch.zeros(*(shape or (1, 2, D)), **options)


def feed_forward(given: Any, module: nn.Module | None = None, *args: Any, **kwargs: Any) -> None:
    applied = apply(FeedForward() if module is None else module, metp(check=False))
    called(applied, given, *args, **kwargs)


def with_options(*args: Any, **kwargs: Any) -> None:
    feed_forward(x(), WithOptions(), *args, **kwargs)


def attend_with_options(*args: Any, style: ParallelStyle | None = None, **kwargs: Any) -> None:
    called(apply(AttentionWithOptions(), attention(check=False) if style is None else style), x(), *args, **kwargs)


def attend(given: Any, *args: Any, style: ParallelStyle | None = None, **kwargs: Any) -> None:
    applied = apply(Attention(), attention(check=False) if style is None else style)
    called(applied, given, *args, **kwargs)


def called(module: nn.Module, *args: Any, **kwargs: Any) -> None:
    with mock.patch.object(dist, "broadcast"):
        module(*args, **kwargs)


def on_rank(rank: int, there: Callable[[], None], elsewhere: Callable[[], None]) -> None:
    (there if dist.get_rank() == rank else elsewhere)()


def sent(module: nn.Module, style: ParallelStyle, rank: int = 0) -> nn.Module:
    """A style applied with the parameters of a rank, which are sent."""
    return parallelize_module(module, mesh_of(2, 2), style, src_data_rank=rank)


def without_bias(module: nn.Module, name: str = "down") -> nn.Module:
    module.get_submodule(name).register_parameter("bias", None)
    return module


def shared_on_one_rank() -> None:
    one, two = FeedForward(), FeedForward()
    if dist.get_rank() == 1:
        two.up.weight = one.up.weight
    apply(one, metp(check=False))
    sent(two, metp(check=False))


def in_double(module: nn.Module, name: str) -> nn.Module:
    module.get_submodule(name).double()
    return module


def frozen(module: nn.Module, *names: str) -> nn.Module:
    """All parameters frozen, or the named."""
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(bool(names) and name not in names)
    return module


def wanting(rank: int, module: nn.Module, style: ParallelStyle, on: Any = None) -> None:
    """Forward and backward of a module of which one rank alone wants the gradient of x."""
    y = apply(module, style, on)(x(requires_grad=dist.get_rank() == rank))
    if y.requires_grad:
        y.sum().backward()


def frozen_bias(rank: int, module: nn.Module, style: ParallelStyle, name: str, on: Any = None) -> None:
    if dist.get_rank() == rank:
        frozen(module, name)
    apply(module, style, on)(x()).sum().backward()


def without_gradients(rank: int) -> None:
    with torch.set_grad_enabled(dist.get_rank() != rank):
        y = apply(FeedForward(), metp(check=False))(x())
    if y.requires_grad:
        y.sum().backward()


def with_other_weights(weights: str, module: nn.Module, style: ParallelStyle, *, in_a_graph: bool = False) -> None:
    """A call after weights or biases were put in the place of the DTensors that METP made."""
    applied = apply(module, style)
    others = dict(applied.named_parameters())
    if weights == "in another order":  # the same shards, of other ranks
        mesh = w.context_mesh("cpu", 2, 2, placement="ring_in_node")
        others = {name: on(mesh, p.to_local(), p.placements, p) for name, p in others.items()}
    elif weights == "replicated":
        others = {name: on(mesh_of(2, 2), torch.zeros(p.shape), [Replicate()] * 2, p) for name, p in others.items()}
    elif weights == "of other sizes":
        others = {
            name: on(mesh_of(2, 2), torch.cat([p.to_local()] * 2), p.placements, None) for name, p in others.items()
        }
    else:
        others = {name: torch.zeros(p.shape) for name, p in others.items()}
    if in_a_graph:
        torch._dynamo.reset()
        applied.load_state_dict(others, assign=True)
        called(torch.compile(applied, fullgraph=True, backend="aot_eager"), x())
    elif weights == "by functional_call":
        with mock.patch.object(dist, "broadcast"):
            torch.func.functional_call(applied, others, (x(),))
    else:
        for name, other in others.items():
            owner, _, last = name.rpartition(".")
            applied.get_submodule(owner).register_parameter(last, nn.Parameter(other))
        called(applied, x())


def on(mesh: DeviceMesh, shard: Tensor, placements: Any, like: DTensor | None) -> DTensor:
    whole = {} if like is None else {"shape": like.shape, "stride": like.stride()}
    return DTensor.from_local(shard, mesh, placements, run_check=False, **whole)


def with_another_bias(module: nn.Module, style: ParallelStyle, name: str, bias: Any) -> None:
    applied = apply(module, style)
    applied.get_submodule(name).register_parameter("bias", None if bias is None else nn.Parameter(bias))
    called(applied, x())


def with_a_hook(kind: str, module: nn.Module, style: ParallelStyle, name: str) -> None:
    applied = apply(module, style)
    getattr(applied.get_submodule(name), kind)(lambda *_: None)
    called(applied, x())


def swapped() -> Any:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp_team", "cp_ring"))


def with_tp() -> Any:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp_ring", "tp"))


def on_axes(names: tuple[str, str], ranks: list[list[int]], metps: str | None = None) -> None:
    """Attention of a sequence that is sharded over both axes, on METP's usual mesh or on this one's axis."""
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=names)
    mine = mesh[metps] if metps else mesh_of(2, 2)
    style = attention(attention=inner(order=w.TokenOrder("contiguous", mine)), check=False)
    called(apply(Attention(), style, mine), DTensor.from_local(x(), mesh, [Shard(1)] * 2, run_check=False))


def on_a_mesh_without_names() -> None:
    mesh = init_device_mesh("cpu", (4,))
    module = apply(FeedForward(), metp(check=False), mesh)
    called(module, DTensor.from_local(x(), mesh, [Shard(1)], run_check=False))


def distributed(*placements: Any) -> DTensor:
    return DTensor.from_local(x(), mesh_of(2, 2), placements, run_check=False)


class Scaled(nn.Linear):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.factor = nn.Parameter(torch.ones(()))


class Tied(FeedForward):
    def __init__(self) -> None:
        super().__init__()
        self.gate.weight = self.up.weight


class WithOptions(FeedForward):
    """A feed-forward whose calls may say more; ``factor`` is what a call without scale gets."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor, scale: float = 1.0, *, keep: Tensor | None = None) -> Tensor:
        y = super().forward(x) * scale * self.factor
        return y if keep is None else y * keep


class AttentionWithOptions(Attention):
    def forward(self, x: Tensor, turn: Any = None, mask: Any = None, *, scale: float = 1.0, **more: Any) -> Tensor:
        return super().forward(x) * scale


class Dropping(FeedForward):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.dropout(F.silu(self.gate(x)) * self.up(x), 0.5, self.training))


def tangent() -> None:
    with forward_ad.dual_level():
        feed_forward(forward_ad.make_dual(x(), x()))


def flattened_later() -> None:
    mesh = w.context_mesh("cpu", 2, 2)
    applied = apply(FeedForward(9), metp(check=False), mesh)
    mesh._flatten("later")
    called(applied, x())


def flattened_before() -> None:
    mesh = w.context_mesh("cpu", 2, 2, placement="ring_in_node")
    mesh._flatten("before")
    apply(FeedForward(), metp(check=False), mesh)


def beside_tp(given: Tensor, **options: Any) -> None:
    called(apply(FeedForward(), metp(check=False, **options), with_tp()), given)


def in_a_graph(given: Tensor, layout: Any = None, **options: Any) -> None:
    torch._dynamo.reset()
    module = apply(FeedForward(), metp(check=False, input_layouts=layout), with_tp())
    called(torch.compile(module, fullgraph=True, backend="aot_eager", **options), given)


REFUSALS: dict[str, Callable[[], object]] = {
    "an unknown activation": lambda: metp(activation="tanh"),
    "a name that is none": lambda: metp(up=None),
    "one submodule twice": lambda: metp(gate="up"),
    "check that is no bool": lambda: metp(check=1),
    "a layout that is a sum": lambda: metp(output_layouts=Partial()),
    "projections in part": lambda: attention(value="absent"),
    "projections twice": lambda: attention(qkv="qkv"),
    "a head dim that is none": lambda: attention(head_dim=0),
    "attention that is no style": lambda: attention(attention="ring"),
    "attention by heads": lambda: attention(attention=w.UlyssesParallel()),
    "a mask_mod": lambda: attention(attention=w.WallFacerParallel(mask_mod=lambda b, h, i, j: i >= j)),
    "replicated tokens": lambda: attention(attention=w.WallFacerParallel(replicated=2)),
    "unknown pairs": lambda: attention(rotary="quarter"),
    "a rotation of nothing": lambda: attention(rotation=lambda module, args, kwargs: args[0]),
    "a rotation without an example": lambda: attention(rotary="half", rotation=lambda module, args, kwargs: args[0]),
    "no mesh": lambda: metp()._apply(FeedForward(), "mesh"),
    "a mesh of other axes": lambda: apply(FeedForward(), metp(), swapped()),
    "a mesh in descending order": lambda: apply(
        FeedForward(), metp(), DeviceMesh("cpu", [3, 2, 1, 0], mesh_dim_names=("cp_ring",))
    ),
    "a submodule that is absent": lambda: apply(FeedForward(), metp(up="w1")),
    "a submodule that is no Linear": lambda: apply(Narrow(up=nn.Bilinear(D, D, 8)), narrow()),
    "a projection with a parameter of its own": lambda: apply(Narrow(up=Scaled(D, 8)), narrow()),
    "tied weights": lambda: apply(Tied(), metp(check=False)),
    "another parameter": lambda: apply(Narrow(norm=nn.RMSNorm(8)), narrow()),
    "a dropout": lambda: apply(Narrow(drop=nn.Dropout(0.1)), narrow()),
    "hidden units that differ": lambda: apply(Narrow(down=nn.Linear(9, D)), narrow()),
    "a DTensor already": lambda: apply(apply(FeedForward(), metp(check=False)), metp()),
    "another activation than the module's": lambda: apply(FeedForward(), metp(activation="gelu")),
    "dropout that the mode hides": lambda: apply(Dropping().eval(), metp()),
    "gate and up the wrong way round": lambda: apply(FeedForward(), metp(up="gate", gate="up")),
    "heads that are none": lambda: apply(Attention(), attention(head_dim=3)),
    "key heads that do not divide": lambda: apply(Attention(kv_heads=3), attention()),
    "key heads that are others": lambda: apply(Attention(), attention(kv_heads=2)),
    "heads that tp does not divide": lambda: apply(
        Attention(), attention(check=False, attention=inner_beside_tp()), with_tp()
    ),
    "a fused projection with tp": lambda: apply(Fused(), attention_fused(), with_tp()),
    "ulysses": lambda: apply(Attention(), attention(), mesh_of(1, 2, ulysses=2)),
    "another causality": lambda: apply(Attention(), attention(attention=w.WallFacerParallel())),
    "a norm in the code": lambda: apply(Attention("a norm"), attention()),
    "a window in the code": lambda: apply(Attention("a window"), attention()),
    "a scale in the code": lambda: apply(Attention("a scale"), attention()),
    "a dropout in the code": lambda: apply(Attention("dropout"), attention()),
    "a pair for an output": lambda: apply(Attention("a pair"), attention()),
    "a module that takes something else": lambda: apply(Attention(), attention(example=lambda n: ((1, 2), {}))),
    "no tensor": lambda: feed_forward([1.0]),
    "another model dim": lambda: feed_forward(x(1, 2, 5)),
    "one dim": lambda: feed_forward(x(D)),
    "another dtype": lambda: feed_forward(x(dtype=torch.float64)),
    "another device": lambda: feed_forward(x(device="meta")),
    "weights that were never loaded": lambda: called(
        apply(without_bias(FeedForward()).to("meta"), metp(check=False)), x()
    ),
    "attention's weights that were never loaded": lambda: called(
        apply(without_bias(Attention(), "o").to("meta"), attention(check=False)), x()
    ),
    "tokens that are replicated": lambda: feed_forward(distributed(Shard(1), Replicate())),
    "a sum": lambda: feed_forward(distributed(Shard(1), Partial())),
    "a DTensor by its last dim": lambda: feed_forward(
        DTensor.from_local(x(1, 2, D // 2), mesh_of(2, 2), (Shard(1), Shard(2)), run_check=False)
    ),
    "a DTensor where axes have no names": on_a_mesh_without_names,
    "one rank's model dim": lambda: on_rank(2, lambda: feed_forward(x(1, 2, 5)), lambda: feed_forward(x())),
    "one rank's hidden units": lambda: on_rank(
        2, lambda: feed_forward(x(), FeedForward(12)), lambda: feed_forward(x())
    ),
    "one rank's module": lambda: on_rank(
        1, lambda: apply(Narrow(), metp()), lambda: apply(FeedForward(), metp())
    ),
    "one rank's attention": lambda: on_rank(
        1, lambda: apply(Attention(), attention(head_dim=3)), lambda: apply(Attention(), attention())
    ),
    "one rank's batch": lambda: on_rank(1, lambda: attend(x(2, 2, D)), lambda: attend(x())),
    "one rank's rotation": lambda: on_rank(1, lambda: attend(x(), (x(2, H), x(2, H))), lambda: attend(x())),
    "two dims for attention": lambda: attend(x(2, D)),
    "an argument that is unknown": lambda: attend(x(), x(1, 1, 2, 2)),
    "no angles": lambda: attend(x(), style=attention(check=False, rotary="half")),
    "angles of other tokens": lambda: attend(
        x(), (x(8, H), x(8, H)), style=attention(check=False, rotary="half")
    ),
    "angles in another form": lambda: attend(
        x(), (x(2, H // 2), x(2, H // 2)), style=attention(
            check=False, rotary="half", example=lambda n: (((x(n, H), x(n, H)),), {})
        ),
    ),
    "angles of another head dim": lambda: attend(
        x(), (x(2, 3), x(2, 3)), style=attention(check=False, rotary="half")
    ),
    "angles of whole numbers": lambda: attend(
        x(), (x(2, H, dtype=torch.int64), x(2, H)), style=attention(check=False, rotary="half")
    ),
    "angles on another device": lambda: attend(
        x(), (x(2, H, device="meta"), x(2, H)), style=attention(check=False, rotary="half")
    ),
    "angles that are DTensors": lambda: attend(
        x(), (DTensor.from_local(x(2, H), mesh_of(2, 2), [Shard(0)] * 2, run_check=False),) * 2,
        style=attention(check=False, rotary="half"),
    ),
    "a rotation that gives no pair": lambda: attend(
        x(), x(2, H), style=attention(
            check=False, rotary="half", rotation=lambda module, args, kwargs: args[0].cos(),
            example=lambda n: ((x(n, H),), {}),
        ),
    ),
    "angles that want a gradient": lambda: attend(
        x(), (x(2, H, requires_grad=True), x(2, H)), style=attention(check=False, rotary="half")
    ),
    "an argument beside those of the example": lambda: attend_with_options(
        (x(2, H), x(2, H)), mask=x(1, 1, 2, 8), style=attention(
            check=False, rotary="half", rotation=lambda module, args, kwargs: args[0],
            example=lambda n: (((x(n, H), x(n, H)),), {}),
        ),
    ),
    "an argument of the example that no rotation reads": lambda: attend_with_options(
        (x(2, H), x(2, H)), mask=x(1, 1, 2, 8), style=attention(
            check=False, rotary="half", rotation=lambda module, args, kwargs: args[0],
            example=lambda n: (((x(n, H), x(n, H)), x(1, 1, n, n)), {}),
        ),
    ),
    "another number than the example's": lambda: attend_with_options(
        scale=3.0, style=attention(check=False, example=lambda n: ((), {"scale": 2.0}))
    ),
    "a default that is not the example's": lambda: attend_with_options(
        style=attention(check=False, example=lambda n: ((), {"scale": 2.0}))
    ),
    "a number for attention": lambda: attend_with_options(scale=0.5),
    "a switch for attention": lambda: attend_with_options(None, False),
    "an unknown keyword of attention": lambda: attend(x(), mask=None),
    "an unknown keyword that attention takes": lambda: attend_with_options(use_cache=True),
    "too many arguments of attention": lambda: attend(x(), None, None),
    "no x for attention": lambda: called(apply(Attention(), attention(check=False))),
    "a number for a feed-forward": lambda: with_options(scale=2.0),
    "a number by position": lambda: with_options(2.0),
    "a switch for a number": lambda: with_options(True),
    "a tensor for a feed-forward": lambda: with_options(keep=x(1, 2, 1)),
    "an unknown keyword of a feed-forward": lambda: with_options(keeps=None),
    "too many arguments of a feed-forward": lambda: with_options(1.0, None),
    "x twice": lambda: with_options(x=x()),
    "one argument twice": lambda: with_options(1.0, scale=1.0),
    "no x": lambda: called(apply(FeedForward(), metp(check=False))),
    "defaults that do something": lambda: apply(WithOptions(0.5), metp()),
    "one rank's number": lambda: on_rank(2, lambda: with_options(scale=2.0), lambda: with_options()),
    "one rank without x": lambda: on_rank(
        2, lambda: called(apply(FeedForward(), metp(check=False))), lambda: feed_forward(x())
    ),
    "one rank's bias": lambda: on_rank(
        1, lambda: sent(without_bias(FeedForward()), metp(check=False)),
        lambda: sent(FeedForward(), metp(check=False)),
    ),
    "one rank's bias of attention": lambda: on_rank(
        1, lambda: sent(without_bias(Attention(), "o"), attention(check=False)),
        lambda: sent(Attention(), attention(check=False)),
    ),
    "one rank's sizes": lambda: sent(FeedForward(8 + dist.get_rank() // 3), metp(check=False)),
    "one rank's heads": lambda: sent(Attention(kv_heads=1 + dist.get_rank() // 3), attention(check=False)),
    "one rank's precision": lambda: on_rank(
        3, lambda: sent(FeedForward().double(), metp(check=False)), lambda: sent(FeedForward(), metp(check=False))
    ),
    "one rank on the meta device": lambda: on_rank(
        3, lambda: sent(FeedForward().to("meta"), metp(check=False)), lambda: sent(FeedForward(), metp(check=False))
    ),
    "one rank's weight of another module": lambda: shared_on_one_rank(),
    "one rank's source": lambda: sent(FeedForward(), metp(check=False), dist.get_rank() // 3),
    "one rank's layout": lambda: apply(
        FeedForward(), metp(check=False, input_layouts=Shard(1) if dist.get_rank() else None), with_tp()
    ),
    "layouts without tp": lambda: apply(Attention(), attention(check=False, input_layouts=Shard(1))),
    "one rank's style": lambda: on_rank(
        3, lambda: sent(Attention(), attention(check=False)), lambda: sent(FeedForward(), metp(check=False))
    ),
    "a part in double": lambda: called(in_double(apply(FeedForward(), metp(check=False)), "gate"), x()),
    "one rank's part in double": lambda: on_rank(
        2, lambda: called(in_double(apply(FeedForward(), metp(check=False)), "down"), x()), lambda: feed_forward(x())
    ),
    "a gradient of x on one rank": lambda: wanting(1, frozen(FeedForward()), metp(check=False)),
    "a gradient of x on one rank of attention": lambda: wanting(1, frozen(Attention()), attention(check=False)),
    "a gradient of x on one rank of tp": lambda: wanting(1, FeedForward(), metp(check=False), with_tp()),
    "a frozen bias on one rank": lambda: frozen_bias(1, FeedForward(), metp(check=False), "down.bias"),
    "a frozen bias on one rank of attention": lambda: frozen_bias(1, Attention(), attention(check=False), "o.bias"),
    "a frozen bias on one rank of tp": lambda: frozen_bias(
        1, FeedForward(), metp(check=False), "down.bias", with_tp()
    ),
    "no gradients on one rank": lambda: without_gradients(2),
    "shapes that differ along one tp": lambda: beside_tp(x(1, 2 + (dist.get_rank() == 1), D)),
    "shapes that differ along tp": lambda: beside_tp(x(1, 2 + dist.get_rank() % 2, D)),
    "shapes that differ along tp, gathered in a graph": lambda: in_a_graph(x(1, 2 + dist.get_rank() % 2, D), Shard(1)),
    "shapes that differ along tp, in a graph": lambda: in_a_graph(x(1, 2 + dist.get_rank() % 2, D)),
    "shapes that differ along one tp, in a graph": lambda: in_a_graph(x(1, 2 + (dist.get_rank() == 1), D)),
    "one rank's model dim beside tp, in a graph": lambda: in_a_graph(x(1, 2, D - (dist.get_rank() == 0)), Shard(1)),
    "one rank's model dim, a symbol": lambda: in_a_graph(x(1, 2, D - (dist.get_rank() == 0)), dynamic=True),
    "a mesh that is flattened later": lambda: flattened_later(),
    "a mesh that is flattened": lambda: flattened_before(),
    "a tangent": lambda: tangent(),
    "a kernel of another device": lambda: attend(x(), style=attention(attention=inner(kernel="flash_attn"))),
    "a batch that the mesh shards": lambda: attend(distributed(Shard(1), Shard(0))),
    "axes in another order": lambda: on_axes(("cp_team", "cp_ring"), [[0, 2], [1, 3]]),
    "a tp that is not its own": lambda: on_axes(("cp_ring", "tp"), [[0, 1], [2, 3]], "cp_ring"),
    "a layout of the dim that is multiplied": lambda: beside_tp(x(1, 2, D), input_layouts=Shard(-1)),
    "a layout of a dim that is none": lambda: beside_tp(x(1, 2, D), output_layouts=Shard(3)),
    "one rank's model dim beside tp": lambda: beside_tp(x(1, 2, D - (dist.get_rank() == 0))),
    "whole weights": lambda: with_other_weights("whole", FeedForward(), metp(check=False)),
    "whole weights of attention": lambda: with_other_weights("whole", Attention(), attention(check=False)),
    "whole weights of one rank": lambda: on_rank(
        2, lambda: with_other_weights("whole", FeedForward(), metp(check=False)), lambda: feed_forward(x())
    ),
    "whole weights in a graph": lambda: with_other_weights(
        "whole", Attention(), attention(check=False), in_a_graph=True
    ),
    "whole weights by functional_call": lambda: with_other_weights(
        "by functional_call", Attention(), attention(check=False)
    ),
    "weights that are replicated": lambda: with_other_weights("replicated", Attention(), attention(check=False)),
    "weights in another order": lambda: with_other_weights(
        "in another order", Attention(), attention(check=False)
    ),
    "weights of other sizes": lambda: with_other_weights("of other sizes", Attention(), attention(check=False)),
    "a bias that is gone": lambda: with_another_bias(FeedForward(), metp(check=False), "up", None),
    "a bias that came later": lambda: with_another_bias(
        without_bias(Attention(), "o"), attention(check=False), "o", x(D)
    ),
    "a hook of a projection": lambda: with_a_hook("register_forward_hook", FeedForward(), metp(check=False), "up"),
    "a hook of an activation": lambda: with_a_hook(
        "register_forward_hook", Narrow(act=nn.SiLU()), narrow(check=False), "act"
    ),
    "another output in evaluation": lambda: apply(OfEvaluation(), metp()),
    "a gate that is learned elsewhere": lambda: apply(GatedElsewhere(), metp()),
    "a hook before a projection": lambda: with_a_hook(
        "register_forward_pre_hook", Attention(), attention(check=False), "q"
    ),
    "a hook of a projection's backward": lambda: with_a_hook(
        "register_full_backward_hook", FeedForward(), metp(check=False), "down"
    ),
    "a hook before a projection's backward": lambda: with_a_hook(
        "register_full_backward_pre_hook", Attention(), attention(check=False), "o"
    ),
    "documents of a shard": lambda: attend(x(), document_ids=torch.zeros(2, dtype=torch.int64)),
    "documents twice": lambda: attend(
        x(), document_ids=torch.zeros(8, dtype=torch.int64), cu_seqlens=torch.tensor([0, 8])
    ),
    "another length than the order's": lambda: attend(
        x(), style=attention(check=False, attention=inner(length=13))
    ),
}  # fmt: skip


def outcome(name: str) -> tuple[str, str, list[str]]:
    """Exception type, message and what was sent before a refusal, on this rank."""
    with Communication() as communication:
        try:
            REFUSALS[name]()
        except Exception as error:  # the type is what is tested
            return type(error).__name__, str(error), communication.sent
    return "nothing", "", communication.sent
