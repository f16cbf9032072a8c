"""What METP's styles make of modules as users have them, in one process."""

import copy
import weakref
from collections.abc import Callable
from functools import partial
from types import CodeType
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo import compiled_autograd, convert_frame
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.utils.checkpoint import checkpoint

from tests.metp_refusals import Attention, attention, inner
from wallfacer_dt import EquivalenceError, METPAttentionParallel, METPParallel, RingParallel, context_mesh
from wallfacer_dt.metp.proof import compare
from wallfacer_dt.testing import worst_error
from wallfacer_dt.testing.fake import fake_world


class FeedForward(nn.Module):
    """With what a module may have besides: dropout of nothing, and perhaps a buffer."""

    def __init__(self, dim: int = 6, hidden: int = 8, buffer: bool = True) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(dim, hidden), nn.Linear(hidden, dim), nn.Dropout(0.0)
        self.register_buffer("scale", torch.ones(()) if buffer else None)

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.down(F.gelu(self.up(x))))
        return y if self.scale is None else y * self.scale


def applied(module: nn.Module, style: ParallelStyle, ring: int = 1) -> nn.Module:
    return parallelize_module(module, context_mesh("cpu", ring), style, src_data_rank=None)


def metp(**options: Any) -> ParallelStyle:
    return METPParallel(**({"up": "up", "down": "down", "activation": "gelu"} | options))


def test_a_copy_has_weights_of_its_own() -> None:
    with fake_world(1, 0):
        module = applied(FeedForward(), metp())
        other = copy.deepcopy(module)
        with torch.no_grad():
            other.up.weight.to_local().zero_()
            other.up.bias.to_local().zero_()
        x = torch.randn(2, 3, 6)
        assert not torch.equal(module(x), other(x))
        assert worst_error([(other(x), other.down.bias.to_local().expand(2, 3, 6))]) <= 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_modules_of_any_dtype_are_tried(dtype: torch.dtype) -> None:
    with fake_world(1, 0):
        module = FeedForward().to(dtype)
        x = torch.randn(1, 3, 6, dtype=dtype)
        expected = module(x)
        eps = torch.finfo(dtype).eps
        assert worst_error([(applied(module, metp())(x), expected)]) <= 2 * eps


def test_modules_on_the_meta_device_are_tried_and_stay_there() -> None:
    with fake_world(4, 1):
        with torch.device("meta"):
            module, other = FeedForward(buffer=False), FeedForward(buffer=False)
        applied(module, metp(), 4)
        assert module.up.weight.is_meta
        assert isinstance(module.up.weight, DTensor)
        assert module.up.weight.to_local().shape == (2, 6)
        with pytest.raises(EquivalenceError, match="FeedForward is not what METPParallel computes"):
            applied(other, metp(activation="relu"), 4)


def test_a_module_in_training_is_left_as_it_was() -> None:
    with fake_world(1, 0):
        module = FeedForward()
        before = {name: x.clone() for name, x in module.state_dict().items()}
        state = torch.random.get_rng_state()
        applied(module, metp())
        assert torch.equal(torch.random.get_rng_state(), state)
        for name, x in module.state_dict().items():
            assert torch.equal(x.to_local() if isinstance(x, DTensor) else x, before[name])


class Torn(FeedForward):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (0 * x).sqrt()  # 0, with a gradient that is none


def test_a_gradient_that_is_no_number_is_refused() -> None:
    with fake_world(1, 0), pytest.raises(EquivalenceError, match=r"the gradient of x: .* in the module are not finite"):
        applied(Torn(), metp())


def test_what_is_no_number_on_both_sides_is_refused() -> None:
    """Though a formula may be no better."""
    module, inputs = nn.Linear(2, 2), {"": torch.tensor([[[0.0, -1.0]]], dtype=torch.float64)}
    module.forward = torch.log
    with pytest.raises(EquivalenceError, match=r"the output: 2 of 2 .* the first is -inf at \(0, 0, 0\)"):
        compare(module, "METPParallel", inputs, [((), {})], lambda x, args, kwargs: x[""].log())


def test_torchtitans_feed_forward() -> None:
    linear = pytest.importorskip("torchtitan.models.common.linear").Linear.Config
    config = pytest.importorskip("torchtitan.models.common.feed_forward").FeedForward.Config(
        w1=linear(in_features=6, out_features=9, bias=False), w2=linear(in_features=9, out_features=6, bias=False),
        w3=linear(in_features=6, out_features=9, bias=False),
    )  # fmt: skip
    with fake_world(1, 0):
        module = config.build()
        for parameter in module.parameters():
            nn.init.normal_(parameter)
        x = torch.randn(1, 3, 6)
        expected = module(x)
        style = METPParallel(up="w3", gate="w1", down="w2", activation="silu")
        assert worst_error([(applied(module, style)(x), expected)]) <= 1e-6


class Positioned(Attention):
    """Attention that is handed positions, and turns heads by them itself, as torchtitan's does."""

    def cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angle = positions.double()[:, None] * torch.tensor([1.0, 0.1], dtype=torch.float64)
        return angle.cos(), angle.sin()

    def forward(self, x: Tensor, positions: Tensor, mask: None = None) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, 4)).transpose(1, 2) for p in (self.q, self.k, self.v))
        cos, sin = self.cos_sin(positions)
        q, k = (
            torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2).to(x.dtype)
            for a, b in ((y[..., ::2].double(), y[..., 1::2].double()) for y in (q, k))
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(out.transpose(1, 2).flatten(2))


def test_positions_are_found_as_the_caller_says() -> None:
    """Once for a call."""
    found = []

    def rotation(module: nn.Module, args: Any, kwargs: Any) -> tuple[Tensor, Tensor]:
        found.append(kwargs)
        return module.cos_sin(args[0])

    style = METPAttentionParallel(
        query="q", key="k", value="v", output="o", head_dim=4, attention=inner(), rotary="interleaved",
        rotation=rotation,
        example=lambda length: ((torch.arange(length),), {"mask": None}),
    )  # fmt: skip
    with fake_world(1, 0):
        module = Positioned()
        x, positions = torch.randn(2, 5, 6), torch.tensor([7, 1, 2, 3, 11])
        expected = module(x, positions)
        styled = applied(module, style)
        found.clear()
        assert worst_error([(styled(x, positions, mask=None), expected)]) <= 1e-6
        assert len(found) == 1


def test_a_copy_of_attention_has_weights_of_its_own() -> None:
    with fake_world(1, 0):
        module = applied(Attention(), attention())
        other = copy.deepcopy(module)
        with torch.no_grad():
            other.o.weight.to_local().zero_()
        x = torch.randn(1, 3, 6)
        assert worst_error([(other(x), other.o.bias.to_local().expand(1, 3, 6))]) <= 1e-6


def test_autocast() -> None:
    """As its linear projections under autocast would, x and weights become bfloat16."""
    with fake_world(1, 0):
        module = FeedForward()
        x = torch.randn(2, 3, 6)
        with torch.autocast("cpu", torch.bfloat16):
            expected = module(x)
            got = applied(module, metp())(x)
        assert got.dtype == expected.dtype == torch.bfloat16
        assert worst_error([(got, expected)]) <= 2e-2
        got.float().sum().backward()
        assert module.up.weight.grad.dtype == torch.float32


def both_ways(module: nn.Module, x: Tensor) -> list[Tensor]:
    """The output, and the gradients of x and of the parameters in float32."""
    x = x.detach().requires_grad_()
    y = module(x)
    grads = torch.autograd.grad(y, [x, *module.parameters()], torch.linspace(-1, 1, y.numel()).view_as(y).to(y))
    return [y.detach(), *((g.to_local() if isinstance(g, DTensor) else g).float() for g in grads)]


@pytest.mark.parametrize("kernel", ["auto", "reference"])
@pytest.mark.parametrize("what", ["feed-forward", "attention"])
def test_autocast_is_the_same_as_casting_before(what: str, kernel: str) -> None:
    """To the bit: what METP accumulates, autocast leaves alone."""
    style = metp() if what == "feed-forward" else attention(attention=inner(kernel=kernel))
    module = FeedForward(buffer=False) if what == "feed-forward" else Attention()
    low = copy.deepcopy(module).bfloat16()
    with fake_world(1, 0):
        x = torch.randn(2, 3, 6)
        expected = both_ways(applied(low, style), x.bfloat16())
        with torch.autocast("cpu", torch.bfloat16):
            found = both_ways(applied(module, style), x)
        assert found[0].dtype == torch.bfloat16
        assert worst_error(list(zip(found, expected, strict=True))) == 0


class InFloat32(FeedForward):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return super().forward(x)


class ScaledUnderAutocast(Attention):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (0.5 if torch.is_autocast_enabled("cpu") else 1)


@pytest.mark.parametrize(
    ("module", "style", "text"),
    [
        (InFloat32, metp(), "the output is torch.float32 in the module, torch.bfloat16 under METP"),
        (ScaledUnderAutocast, attention(), "under autocast: the output differs"),
    ],
)
def test_what_differs_under_autocast_alone_is_refused_there(module: Any, style: ParallelStyle, text: str) -> None:
    with fake_world(1, 0):
        applied(module(), style)
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(EquivalenceError, match=text):
            applied(module(), style)


def test_x_by_its_name() -> None:
    with fake_world(1, 0):
        module, x = applied(FeedForward(), metp()), torch.randn(1, 3, 6)
        assert torch.equal(module(x=x), module(x))
        with pytest.raises(TypeError, match="called without x"):
            module(y=x)
        module = applied(Attention(), attention())
        assert torch.equal(module(x=x), module(x))


def test_weights_changed_before_the_backward_are_refused() -> None:
    for module, style in ((FeedForward(), metp()), (Attention(), attention())):
        with fake_world(1, 0):
            y = applied(module, style)(torch.randn(1, 3, 6))
            with torch.no_grad():
                next(module.parameters()).mul_(2)
            with pytest.raises(RuntimeError, match="changed between forward and backward"):
                y.sum().backward()


STEPS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "one by one": partial(torch.optim.AdamW, foreach=False),
    "foreach": partial(torch.optim.SGD, lr=0.1, foreach=True),
    "fused": partial(torch.optim.AdamW, fused=True),
}


@pytest.mark.parametrize("name", STEPS)
def test_so_are_weights_that_an_optimizer_has_changed(name: str) -> None:
    """Also where torch counts no change, as of several DTensors together; what it has left alone may be used."""
    with fake_world(1, 0):
        module, other = (applied(FeedForward(buffer=False), metp(check=False)) for _ in range(2))
        optimizer = STEPS[name]([*module.parameters(), *other.parameters()])
        x = torch.randn(1, 3, 6)
        module(x).sum().backward()
        y, of_other = module(x), other(x)
        optimizer.step()
        of_other.sum().backward()
        with pytest.raises(RuntimeError, match="changed between forward and backward"):
            y.sum().backward()
        module(x).sum().backward()


def test_a_second_derivative_is_refused() -> None:
    for module, style in ((FeedForward(), metp()), (Attention(), attention())):
        with fake_world(1, 0):
            x = torch.randn(1, 3, 6, requires_grad=True)
            (grad,) = torch.autograd.grad(applied(module, style)(x).square().sum(), x, create_graph=True)
            with pytest.raises(NotImplementedError, match=r"METP's [a-z-]+ has no second derivative"):
                grad.square().sum().backward()


def test_a_module_keeps_its_style_as_it_was() -> None:
    with fake_world(1, 0):
        style, x = metp(), torch.randn(1, 3, 6)
        module = applied(FeedForward(), style)
        y = module(x)
        style.up, style.down = style.down, style.up
        assert torch.equal(module(x), y)


def emptied(module: nn.Module) -> None:
    before = copy.deepcopy(module.state_dict())
    module.to_empty(device="cpu")
    for parameter in module.parameters():
        parameter.data.zero_()
    module.load_state_dict(before)


@pytest.mark.parametrize("move", [lambda m: m.to("cpu"), lambda m: m.double(), emptied])
def test_a_module_may_be_moved_after_a_step(move: Callable[[nn.Module], Any]) -> None:
    """Torch swaps its DTensors for others, which nobody may have a weak reference to, and which are those of calls."""
    with fake_world(1, 0):
        module, x = applied(FeedForward(), metp(check=False)), torch.randn(1, 3, 6)
        y = module(x).detach()
        module(x).sum().backward()
        move(module)
        again = module(x.to(module.up.weight.dtype))
        assert again.dtype == module.up.weight.dtype
        assert worst_error([(again.detach().to(y.dtype), y)]) < 1e-6


def test_x_may_be_on_a_mesh_that_is_equal() -> None:
    """Torch gives what it computes the first of all meshes that are equal, as of a model made before."""
    with fake_world(2, 0):
        for _ in range(2):
            mesh = context_mesh("cpu", 2)
            module = parallelize_module(FeedForward(), mesh, metp(check=False), src_data_rank=None)
            given = DTensor.from_local(torch.randn(2, 3, 6), mesh, [Shard(1)] * 2, run_check=False)
            assert module(given * 1).shape == given.shape
        assert (given * 1).device_mesh is not mesh
        unnamed = DTensor.from_local(torch.randn(2, 3, 6), DeviceMesh("cpu", [[0], [1]]), [Shard(1)] * 2)
        with pytest.raises(ValueError, match="does not hold the axes of METP's mesh"):
            module(unnamed)


def sharded(x: Tensor) -> DTensor:
    return DTensor.from_local(x, context_mesh("cpu", 1), [Shard(1)] * 2, run_check=False)


def test_a_dtensor_may_be_written_into_where_what_was_taken_of_it_is_a_copy() -> None:
    """As a plain tensor may: tokens that do not lie one behind the other are copied."""
    with fake_world(1, 0):
        module = applied(FeedForward(), metp(check=False))
        for turned in (False, True):
            x = torch.randn(3, 2, 6).transpose(0, 1) if turned else torch.randn(2, 3, 6)
            x = sharded(x)
            y = module(x).to_local()
            x.mul_(2)
            if turned:
                y.sum().backward()
            else:
                with pytest.raises(RuntimeError, match="x under METP was changed between forward and backward"):
                    y.sum().backward()


def test_what_looks_after_a_dtensor_does_not_hold_it() -> None:
    """Neither under a checkpoint, which computes it again, nor once the backward is done."""
    with fake_world(1, 0):
        module = applied(FeedForward(), metp(check=False))
        seen: list[weakref.ref[Tensor]] = []

        def layer(x: Tensor) -> Tensor:
            given = x * 2
            seen.append(weakref.ref(given))
            return module(given)

        x = sharded(torch.randn(2, 3, 6).requires_grad_())
        kept = layer(x).to_local().sum()
        again = checkpoint(layer, x, use_reentrant=False).to_local().sum()
        assert seen[1]() is None
        for loss in (kept, again):
            loss.backward()
        assert [ref() for ref in seen] == [None] * 3


def test_whoever_steps_where_gradients_come_gets_what_one_process_gets() -> None:
    for module, style in ((FeedForward(), metp()), (Attention(), attention())):
        with fake_world(1, 0):
            x, alone = torch.randn(1, 3, 6), copy.deepcopy(module)
            under = applied(module, style)
            for parameter in under.parameters():
                optimizer = torch.optim.SGD([parameter], lr=0.1)
                parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
            for each in (alone, under):
                each(x).square().sum().backward()
            torch.optim.SGD(alone.parameters(), lr=0.1).step()
            stepped = {name: (p.to_local(), alone.get_parameter(name)) for name, p in under.named_parameters()}
            assert worst_error(stepped) <= 1e-6


def test_weights_may_be_those_of_an_equal_mesh() -> None:
    """As a state dict of another module has them, and FSDP makes them."""
    with fake_world(1, 0):
        module, other = applied(Attention(), attention()), applied(Attention(), attention())
        module.load_state_dict(other.state_dict(), assign=True)
        x = torch.randn(1, 3, 6)
        assert torch.equal(module(x), other(x))


class Rigid(Attention):
    """Attention that names its sizes, as nanoGPT's does."""

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        assert dim == 6
        q = self.q(x).view(batch, length, 2, 4).transpose(1, 2)
        k, v = (p(x).view(batch, length, 1, 4).transpose(1, 2) for p in (self.k, self.v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(out.transpose(1, 2).contiguous().view(batch, length, 8))


def test_a_module_that_names_its_sizes_is_tried_as_it_is() -> None:
    with fake_world(1, 0):
        module, x = Rigid(), torch.randn(2, 3, 6)
        expected = module(x)
        assert worst_error([(applied(module, attention())(x), expected)]) <= 1e-6
        with pytest.raises(EquivalenceError, match="is not what METPAttentionParallel computes"):
            applied(Rigid(), attention(attention=inner(is_causal=False)))


class PartlyTurned(Attention):
    """Turns the first half of every head, whose angles are as many as those of pairs of the whole."""

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, 4)).transpose(1, 2) for p in (self.q, self.k, self.v))
        cos, sin = turn
        n = cos.shape[-1]

        def turned(y: Tensor) -> Tensor:
            low, high = y[..., :n].chunk(2, -1)
            return torch.cat([y[..., :n] * cos + torch.cat([-high, low], -1) * sin, y[..., n:]], -1).to(y.dtype)

        out = F.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True, enable_gqa=True)
        return self.o(out.transpose(1, 2).flatten(2))


def test_heads_that_are_turned_in_part_are_refused() -> None:
    angle = torch.rand(3, 2)
    with fake_world(1, 0):
        module = applied(PartlyTurned(), attention(rotary="half"))
        with pytest.raises(ValueError, match="cos and sin come by pair of H = 4, where they were by element when"):
            module(torch.randn(1, 3, 6), (angle.cos(), angle.sin()))


def test_weights_that_two_modules_share_are_refused() -> None:
    with fake_world(1, 0):
        one, two = FeedForward(), FeedForward()
        two.down.weight = one.down.weight
        applied(one, metp())
        with pytest.raises(
            ValueError, match=r"FeedForward.down.weight is a weight of another module under METP as well"
        ):
            applied(two, metp())
        assert not isinstance(two.up.weight, DTensor), "it is left as it was"
        applied(FeedForward(), metp())  # weights that are gone are forgotten


class Gated(nn.Module):
    """Silu with a gate; ``hidden``: what stands in its code and no style can see."""

    def __init__(self, hidden: str = "") -> None:
        super().__init__()
        self.gate, self.up, self.down, self.hidden = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 6), hidden

    def forward(self, x: Tensor) -> Tensor:
        shape, gate, up = x.shape, self.gate(x), self.up(x)
        if self.hidden == "limits":
            gate, up = gate.clamp(max=7), up.clamp(-7, 7)
        if self.hidden == "tokens before it":
            up = up + F.pad(up, (0, 0, 100, 0))[:, : x.shape[1]]
        if self.hidden == "its sizes":
            return self.down(F.silu(self.gate(x.view(-1, 6))) * self.up(x.view(-1, 6))).view(shape)
        return self.down(F.silu(gate) * up)


class Counted(FeedForward):
    calls = 0

    def __init__(self, factor: float = 1.0, hidden: int = 8) -> None:
        super().__init__(hidden=hidden)
        self.config = {"factor": factor}

    def forward(self, x: Tensor) -> Tensor:
        Counted.calls += 1
        return super().forward(x) * self.config["factor"]


def test_a_module_is_tried_once_for_all_that_are_like_it() -> None:
    style = metp()
    with fake_world(1, 0):
        applied(Counted(), style)
        tried, calls = Counted(), Counted.calls
        applied(tried, style)
        assert Counted.calls == calls
        applied(Counted(hidden=9), style)
        applied(Counted(), metp())
        with torch.autocast("cpu", torch.bfloat16):
            applied(Counted(), style)
        assert Counted.calls > 3 * calls
        with pytest.raises(EquivalenceError, match="Counted is not what METPParallel computes: the output differs"):
            applied(Counted(2.0), style)
        one, other = Counted(), Counted(2.0)
        one.function = other.function = lambda: 0  # which has no likeness
        applied(one, style)
        with pytest.raises(EquivalenceError, match="Counted is not what METPParallel computes: the output differs"):
            applied(other, style)
        style = attention()
        x, bare = torch.randn(1, 3, 6), [applied(Nones(), style) for _ in range(2)]
        assert [type(module(x)) for module in bare] == [tuple, tuple]


class Nones(Attention):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), None


def test_limits_and_other_tokens_of_a_feed_forward_are_seen() -> None:
    style = metp(gate="gate", activation="silu")
    with fake_world(1, 0):
        for hidden in ("limits", "tokens before it"):
            with pytest.raises(EquivalenceError, match="Gated is not what METPParallel computes: the output differs"):
                applied(Gated(hidden), style)
        with pytest.raises(EquivalenceError, match="FeedForward is not what METPParallel computes: the output differs"):
            applied(FeedForward(), metp(activation="relu"))
        module, x = Gated("its sizes"), torch.randn(2, 3, 6)
        expected = module(x)
        assert worst_error([(applied(module, style)(x), expected)]) <= 1e-6


class Hiding(Attention):
    """Attention with more in its code that no style can see."""

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (p(x).unflatten(-1, (-1, 4)).transpose(1, 2) for p in (self.q, self.k, self.v))
        mask = None
        if self.hidden == "limits":
            q, k, v = (y.clamp(-8, 8) for y in (q, k, v))
        if self.hidden == "limits of keys":
            k = k.clamp(-8, 8)
        if self.hidden == "limits of queries":
            q = q.clamp(-8, 8)
        if self.hidden == "other rows":
            k, v = (torch.cat([y, y.flip(0)], 2) for y in (k, v))
            mask = torch.ones(length, length, dtype=torch.bool).tril().repeat(1, 2)
            mask[:, length:] &= batch > 1
        if self.hidden == "all tokens":
            mask = torch.ones(length, length, dtype=torch.bool)
        if self.hidden == "256 tokens":
            mask = torch.ones(256, 256, dtype=torch.bool).tril()
        out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=True).transpose(1, 2)
        if self.hidden == "numbers of heads":
            out = out.reshape(batch, length, 2, -1).reshape(batch, length, 8)
        return self.o(out.flatten(2))


@pytest.mark.parametrize(
    ("hidden", "options"),
    [
        ("limits", {}),
        ("limits of keys", {}),
        ("limits of queries", {}),
        ("other rows", {}),
        ("", {"window_size": (2047, 0)}),
        ("all tokens", {"prefix_length": 1200}),
    ],
)
def test_what_stands_in_the_code_of_attention_is_seen(hidden: str, options: dict[str, Any]) -> None:
    style = attention(attention=inner(**options))
    with fake_world(1, 0), pytest.raises(EquivalenceError, match="is not what METPAttentionParallel computes"):
        applied(Hiding(hidden), style)


@pytest.mark.parametrize(("hidden", "options"), [("256 tokens", {"length": 256}), ("numbers of heads", {})])
def test_modules_that_know_their_sizes_are_tried_in_these(hidden: str, options: dict[str, Any]) -> None:
    with fake_world(1, 0):
        module, x = Hiding(hidden), torch.randn(2, 256, 6)
        expected = module(x)
        style = attention(attention=inner(**options))
        assert worst_error([(applied(module, style)(x), expected)]) <= 1e-5


def test_random_numbers_are_the_callers() -> None:
    """Of which the trial draws some, and ``example`` may."""

    def example(length: int) -> Any:
        angle = torch.rand(length, 2)
        return ((angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)),), {}

    with fake_world(1, 0):
        for options in ({}, {"example": example}):
            module, state = PartlyTurned(), torch.random.get_rng_state()
            applied(module, attention(rotary="half", **options))
            assert torch.equal(torch.random.get_rng_state(), state)


def test_parameters_whose_hooks_or_gradients_would_be_lost_are_refused() -> None:
    with fake_world(1, 0):
        for lost in ("hooks", "a gradient"):
            module = FeedForward()
            if lost == "hooks":
                module.up.weight.register_post_accumulate_grad_hook(lambda _: None)
            else:
                module(torch.randn(1, 3, 6)).sum().backward()
            with pytest.raises(ValueError, match=rf"FeedForward.up.weight has {lost}, which the DTensor"):
                applied(module, metp())
        module = FeedForward()
        module.down.bias.register_hook(lambda grad: grad)
        with pytest.raises(ValueError, match=r"FeedForward.down.bias has hooks, which the DTensor"):
            applied(module, metp())


def test_a_projection_in_whose_place_there_is_another_module_is_named() -> None:
    with fake_world(1, 0):
        for module, style, name in ((FeedForward(), metp(), "up"), (Attention(), attention(), "o")):
            applied(module, style)
            setattr(module, name, nn.Sequential(getattr(module, name)))
            with pytest.raises(ValueError, match=f"{name} was an nn.Linear when METP was applied, and is a Sequential"):
                module(torch.randn(1, 3, 6))


class Doubling(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_projection_that_computes_otherwise_later_is_named(compiled: bool) -> None:
    """As adapters of peft and of others that are an ``nn.Linear``, or put a forward into one."""
    x = torch.randn(1, 3, 6)

    def doubled(projection: nn.Module) -> None:
        projection.forward = lambda x: 2 * nn.Linear.forward(projection, x)

    def another(projection: nn.Module) -> None:
        projection.__class__ = Doubling

    with fake_world(1, 0):
        for made, style, name in ((FeedForward, metp(), "up"), (Attention, attention(), "o")):
            for change, kind in ((doubled, "Linear"), (another, "Doubling")):
                module = applied(made(), style)
                call = torch.compile(module, backend="eager", fullgraph=True) if compiled else module
                call(x)
                change(module.get_submodule(name))
                with pytest.raises(Exception, match=f"{name}, a {kind}, has another forward than when METP"):
                    call(x)
        module = FeedForward()
        doubled(module.up)
        with pytest.raises(ValueError, match="up has a forward of its own, which would not run"):
            applied(module, metp())


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_copy_computes_as_its_original() -> None:
    """Also where copies of submodules have forwards of their own, as torch.fx and TorchScript make them."""
    x = torch.randn(1, 3, 6)
    with fake_world(1, 0):
        for made in (torch.fx.symbolic_trace, torch.jit.script, nn.Identity):
            module = FeedForward()
            module.inside = made(nn.GELU())
            module = applied(module, metp())
            assert torch.equal(copy.deepcopy(module)(x), module(x))


def test_values_that_are_none_or_in_lists_are_looked_after() -> None:
    def one() -> nn.Module:
        module = FeedForward()
        module.factor, module.sizes, module.cache, module.config = None, [1, {"k": 2.0}], {}, object()
        module.mixed, module.itself = [1, object()], [1]
        module.itself.append(module.itself)
        return applied(module, metp())

    x = torch.randn(1, 3, 6)
    with fake_world(1, 0):
        module = one()
        module.factor, module.cache[3], module.config, module.mixed[0] = torch.ones(3), 1, object(), 2
        module(x)
        module.factor = 2.0
        with pytest.raises(ValueError, match=r"factor was None when METPParallel was applied, and now .* factor=2.0"):
            module(x)
        module = one()
        module.sizes[1]["k"] = 3.0
        with pytest.raises(ValueError, match="what sizes holds has changed since METPParallel was applied"):
            module(x)


class Guarded(Gated):
    def forward(self, x: Tensor) -> Tensor:
        hidden = F.silu(self.gate(x)) * self.up(x)
        return self.down(hidden.clamp(-65504, 65504))


def test_large_numbers_are_not_too_large() -> None:
    """For a guard against overflow, and not computed in 16 bits, in which they would be."""
    with fake_world(1, 0):
        applied(Guarded(), metp(gate="gate", activation="silu"))
        for dtype in (torch.float16, torch.bfloat16):
            with torch.autocast("cpu", dtype):
                applied(Gated(), metp(gate="gate", activation="silu"))
                applied(FeedForward(), metp())
                applied(Attention(), attention())


class Pair(NamedTuple):
    out: Tensor
    weights: None


class Named(Attention):
    def forward(self, x: Tensor) -> Any:
        return Pair(super().forward(x), None)


class OneOfTwo(Attention):
    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return y if self.training else (y, None)


def test_what_modules_return_is_a_tensor_or_a_tuple_in_both_modes() -> None:
    with fake_world(1, 0):
        with pytest.raises(EquivalenceError, match="Named returns a Pair, under METP it returns a tensor"):
            applied(Named(), attention())
        with pytest.raises(EquivalenceError, match="it returns a tuple in one mode, and in the other something else"):
            applied(OneOfTwo(), attention())


@pytest.mark.filterwarnings("ignore")  # torch's own, of what it cannot look into
def test_compiled_autograd_looks_into_no_hook() -> None:
    """Which compare calls by their numbers: of each it would make another graph."""
    compiled: list[str] = []
    compile_frame = convert_frame._compile

    def compile_and_tell(code: CodeType, *args: Any, **kwargs: Any) -> Any:
        compiled.append(code.co_filename)
        return compile_frame(code, *args, **kwargs)

    with fake_world(1, 0), mock.patch.object(convert_frame, "_compile", compile_and_tell):
        y = applied(FeedForward(), metp())(torch.randn(1, 4, 6))
        with compiled_autograd._enable(torch.compile(backend="eager")):
            y.sum().backward()
    assert compiled
    assert not [file for file in compiled if "wallfacer_dt" in file]


def test_a_module_is_tried_anew_with_a_style_that_has_become_another() -> None:
    style, inner = metp(), attention()
    with fake_world(1, 0):
        applied(Counted(), style)
        style.activation = "relu"
        with pytest.raises(EquivalenceError, match="Counted is not what METPParallel computes: the output differs"):
            applied(Counted(), style)
        applied(Attention(), inner)
        inner.attention = RingParallel(is_causal=True, window_size=(3, 0))
        with pytest.raises(EquivalenceError, match="Attention is not what METPAttentionParallel computes"):
            applied(Attention(), inner)


def test_what_could_not_be_sent_may_be_tried_again() -> None:
    module = FeedForward()
    with fake_world(1, 0):
        failing = mock.patch("wallfacer_dt.metp.holding.distribute_tensor", side_effect=RuntimeError("out of memory"))
        with failing, pytest.raises(RuntimeError, match="out of memory"):
            applied(module, metp())
        applied(module, metp())


class OfDocuments(Attention):
    """That wants to be told its documents."""

    def forward(self, x: Tensor, document_ids: Tensor) -> Tensor:
        return super().forward(x) + 0 * document_ids.sum()


@pytest.mark.parametrize(
    "options", [{"check": False}, {"example": lambda n: ((), {"document_ids": torch.zeros(1, n).long()})}]
)
def test_documents_are_told_by_name_where_a_module_wants_them(options: dict[str, Any]) -> None:
    with fake_world(1, 0):
        module = OfDocuments()
        x, ids = torch.randn(1, 5, 6), torch.tensor([[0, 0, 1, 1, 1]])
        expected = torch.cat([Attention.forward(module, part) for part in x.split([2, 3], 1)], 1)
        applied(module, attention(**options))
        assert worst_error([(module(x, document_ids=ids), expected)]) < 1e-6


class Returning(FeedForward):
    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return super().forward(x), None


def test_a_feed_forward_that_says_that_it_returns_a_tuple_is_refused() -> None:
    """Whose caller would unpack a batch of two."""
    with fake_world(1, 0), pytest.raises(ValueError, match=r"must return a tensor, and Returning says that it"):
        applied(Returning(), metp(check=False))
