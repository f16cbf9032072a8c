"""The blockwise feed-forward: the same numbers in less memory, and refusals."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from wallfacer_dt import BlockwiseFeedForward, EquivalenceError
from wallfacer_dt.testing import worst_error
from wallfacer_dt.testing.fake import fake_world


class FeedForward(nn.Sequential):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))


class TokenShift(FeedForward):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + x.roll(1, -2))


def applied(module: nn.Module, **options: object) -> nn.Module:
    with fake_world(1, 0):
        return parallelize_module(module, DeviceMesh("cpu", [0]), BlockwiseFeedForward(**options))


def results(module: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    out = module(x)
    return [out, *torch.autograd.grad(out.square().sum(), [x, *module.parameters()])]


@given(chunk=st.integers(1, 9), tokens=st.integers(1, 8), batch=st.integers(1, 2))
def test_equals_the_plain_module(chunk: int, tokens: int, batch: int) -> None:
    module = FeedForward(4, 6).double()
    x = torch.randn(batch, tokens, 4, dtype=torch.float64)
    expected = results(module, x)
    assert worst_error(zip(results(applied(module, chunk=chunk), x), expected, strict=True)) <= 1e-12


def test_one_graph_equal_to_eager() -> None:
    module = applied(FeedForward(4, 6), chunk=3)
    x = torch.randn(2, 8, 4)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert worst_error(zip(results(compiled, x), results(module, x), strict=True)) <= 1e-5


class Largest(TorchDispatchMode):
    """The largest tensor that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.elements = max(self.elements, out.numel())
        return out


def test_no_more_hidden_than_a_chunks() -> None:
    """Of 64 tokens with 512 hidden units, 8 at a time, in the backward as well."""
    module, x = FeedForward(8, 512), torch.randn(1, 64, 8)
    with Largest() as plain:
        results(module, x)
    with Largest() as blockwise:
        results(applied(module, chunk=8), x)
    assert plain.elements == 64 * 512
    assert blockwise.elements == 8 * 512


@pytest.mark.parametrize("last", [1.0, 0.0])
def test_a_module_that_mixes_tokens_is_refused(last: float) -> None:
    """Also where its last weights are 0 at first."""
    module = TokenShift(4, 6)
    weights = [p.detach().mul_(last).clone() for p in module[2].parameters()]
    with pytest.raises(EquivalenceError, match="TokenShift does not map every token by itself"):
        applied(module, chunk=2)
    assert all(torch.equal(*pair) for pair in zip(module[2].parameters(), weights, strict=True))


class Torn(FeedForward):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 0 * 0


def test_a_module_of_which_nothing_can_be_told_is_refused() -> None:
    with pytest.raises(EquivalenceError, match=r"as far as can be told: .* are not finite, the first is nan"):
        applied(Torn(4, 6), chunk=2)


def test_modules_that_cannot_be_tried() -> None:
    with pytest.raises(EquivalenceError, match=r"could not be tried on four tokens: it has no nn\.Linear"):
        applied(nn.GELU(), chunk=2)
    with torch.device("meta"):
        module = FeedForward(4, 6)
    with pytest.warns(UserWarning, match="FeedForward is on the meta device"):
        applied(module, chunk=2)


def test_random_numbers_are_those_of_the_cpu_whose_state_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    devices, randn = [], torch.randn
    monkeypatch.setattr(torch, "randn", lambda *sizes, **told: devices.append(told["device"]) or randn(*sizes, **told))
    module, state = FeedForward(4, 6), torch.get_rng_state()
    applied(module, chunk=3)
    assert devices == ["cpu"]
    assert torch.get_rng_state().equal(state)


def test_the_module_is_left_in_its_mode() -> None:
    module = FeedForward(4, 6)
    module[1].eval()
    applied(module, chunk=2)
    assert [child.training for child in module] == [True, False, True]


def test_a_copy_has_weights_of_its_own() -> None:
    module = applied(FeedForward(4, 6), chunk=2)
    other = copy.deepcopy(module)
    with torch.no_grad():
        other[0].weight.zero_()
        other[0].bias.zero_()
    x = torch.randn(1, 3, 4)
    assert not torch.equal(module(x), other(x))
    assert worst_error([(other(x), other[2].bias.expand(1, 3, 4))]) <= 1e-6


def test_a_second_style_is_refused() -> None:
    with pytest.raises(ValueError, match="the module FeedForward already has a style"):
        applied(applied(FeedForward(4, 6), chunk=2), chunk=2)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"chunk": 0}, "ValueError: chunk must be at least 1, got 0"),
        ({"chunk": 2.0}, "TypeError: chunk must be an int, got 2.0"),
        ({"chunk": True}, "TypeError: chunk must be an int, got True"),
        ({"chunk": 2, "check": None}, "TypeError: check must be a bool, got None"),
    ],
)
def test_bad_options(options: dict[str, object], error: str) -> None:
    with pytest.raises((TypeError, ValueError)) as refused:
        BlockwiseFeedForward(**options)
    assert f"{refused.type.__name__}: {refused.value}" == error


def test_what_is_no_tensor_of_tokens_is_refused() -> None:
    with pytest.raises(TypeError, match="a plain tensor, got list"):
        applied(FeedForward(4, 6), chunk=2)([1.0])
