"""A call like one before it is not checked again; whatever may have changed since is seen."""

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from enum import StrEnum
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.func import vmap
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode

from tests.cases import Inner
from wallfacer_dt import TokenOrder, WallFacerParallel, attention, context_mesh, register_kernel
from wallfacer_dt.kernels.block import Need
from wallfacer_dt.kernels.registry import select_kernel
from wallfacer_dt.ops import BODIES
from wallfacer_dt.options import Options
from wallfacer_dt.testing import worst_error
from wallfacer_dt.testing.fake import fake_world

LENGTH, HEADS, DIM = 16, 4, 8


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    with fake_world(1):
        yield


def x(*shape: int, seed: int = 0, **options: Any) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*(shape or (1, HEADS, LENGTH, DIM)), generator=generator).to(**options)


def styled(module: nn.Module | None = None, **options: Any) -> nn.Module:
    style = WallFacerParallel(check=False, layout="BNLH", **options)
    return parallelize_module(Inner() if module is None else module, context_mesh("cpu"), style)


def known(module: nn.Module) -> dict[Any, Any]:
    return module.forward.__self__.attention.known


class Told(TorchDispatchMode):
    """What the operator was told last."""

    options: Options

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.ops.wallfacer_dt.attention.default:
            self.options = Options.of(*args[7:])
        return func(*args, **(kwargs or {}))


def told(module: nn.Module, *tensors: Tensor, **options: Any) -> Options:
    with Told() as seen:
        module(*tensors, **options)
    return seen.options


def test_a_call_like_one_before_is_not_checked_again() -> None:
    module, checks = styled(), mock.Mock(wraps=attention.check_call)
    with mock.patch.object(attention, "check_call", checks):
        outs = [module(x(), x(seed=seed), x()) for seed in (1, 1, 2)]
    assert checks.call_count == 1
    assert torch.equal(outs[0], outs[1])
    for seed, out in ((1, outs[1]), (2, outs[2])):
        assert worst_error([(out, F.scaled_dot_product_attention(x(), x(seed=seed), x()))]) < 1e-6


def test_what_is_remembered_is_bounded() -> None:
    module = styled()
    for length in range(1, attention._KINDS + 5):
        module(*[x(1, 1, length, 4)] * 3)
    assert 0 < len(known(module)) <= attention._KINDS


def test_nothing_that_is_remembered_outlives_the_process() -> None:
    """It names the mesh of a world."""
    module = styled()
    module(x(), x(), x())
    assert known(module)
    assert not known(pickle.loads(pickle.dumps(module)))
    assert worst_error([(copy.deepcopy(module)(x(), x(), x()), module(x(), x(), x()))]) == 0


class Holding(Inner):
    """A module whose attributes change."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 0.5
        self.drop = nn.Dropout(0.0)


def test_a_module_s_scale() -> None:
    module = styled(Holding())
    for scale in (0.5, 0.25, 1, 0.5):
        module.scale = scale
        wanted = F.scaled_dot_product_attention(x(), x(), x(), scale=scale)
        assert worst_error([(module(x(), x(), x()), wanted)]) < 1e-6
    assert told(module, x(), x(), x(), scale=0.125).scale == 0.125
    for scale in (True, "1", torch.tensor(0.5)):
        module.scale = scale
        with pytest.raises(TypeError, match="scale must be a float"):
            module(x(), x(), x())


def set_dropout(module: nn.Module) -> None:
    module.drop.p = 0.1


ATTRIBUTES: dict[str, tuple[Callable[[nn.Module], None], str]] = {
    "another scale than the style's": (lambda module: setattr(module, "scale", 0.125), "the style was given scale=0.5"),
    "a soft cap": (lambda module: setattr(module, "softcap", 2.0), "softcap=2.0, which this style does not implement"),
    "dropout": (set_dropout, "has drop: set its p to 0"),
    "a submodule": (lambda module: setattr(module, "proj", nn.Linear(2, 2)), "has proj: name the module"),
    "a causal flag": (lambda module: setattr(module, "is_causal", True), "the style was given is_causal=False"),
}


@pytest.mark.parametrize("change", ATTRIBUTES)
def test_a_module_s_attributes(change: str) -> None:
    module, (apply, text) = styled(Holding(), scale=0.5), ATTRIBUTES[change]
    module(x(), x(), x())
    apply(module)
    with pytest.raises(ValueError, match=text):
        module(x(), x(), x())


@pytest.mark.parametrize("base", [False, True])
def test_an_attribute_of_a_module_s_class(base: bool) -> None:
    kind = type("Kind", (type("Base", (Inner,), {}),), {})
    module = styled(kind())
    module(x(), x(), x())
    kind.__mro__[base].softcap = 2.0
    with pytest.raises(ValueError, match=r"has softcap=2\.0, which this style does not implement"):
        module(x(), x(), x())


class Seen(TorchDispatchMode):
    """The operators of this package that were called."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func.namespace == "wallfacer_dt":
            self.ops.append(func)
        return func(*args, **(kwargs or {}))


def test_what_the_dispatcher_does_on_its_way() -> None:
    """A call comes to the operator's body without it; not where a mode is to see it, or a view is to be negated."""
    module, q = styled(), x().requires_grad_()
    module(q, x(), x()).sum().backward()
    with Seen() as seen:
        module(q, x(), x()).sum().backward()
        with torch.no_grad():
            module(q, x(), x())
    forward, backward = BODIES
    assert seen.ops == [forward, backward, forward]
    negative = torch.complex(x(), x(seed=1)).conj().imag
    assert negative.is_neg()
    for grad in (False, True):
        given = [part.requires_grad_(grad) for part in (x(), x(seed=2))]
        found, wanted = (module(negative, *given), F.scaled_dot_product_attention(-x(seed=1), *given))
        assert worst_error([(found.detach(), wanted.detach())]) < 1e-6


def test_a_compiler_does_not_look_into_an_operator() -> None:
    """Where it has left a frame alone, it looks at what that calls."""
    torch._dynamo.reset()
    module, frames = styled(), []

    @torch._dynamo.disable(recursive=False)
    def alone(q: Tensor) -> Tensor:
        return torch.ops.wallfacer_dt.attention(q, *rest)[0] + probe(q)

    def probe(q: Tensor) -> Tensor:
        return q.sin()

    with Told() as seen:
        module(x(), x(), x())
    rest = [x(), x(), None, None, None, None, *seen.options.told()]

    def backend(graph: Any, inputs: Any) -> Any:
        frames.append([node.target for node in graph.graph.nodes if node.op in ("call_function", "call_method")])
        return graph

    wanted = alone(x())
    found = torch.compile(lambda q: alone(q) * 2, backend=backend)(x())
    assert worst_error([(found, wanted * 2)]) < 1e-6
    assert len(frames) == 2, frames  # of the probe and of the product


def dual() -> Tensor:
    return forward_ad.make_dual(x(), x())


def distributed() -> Tensor:
    return DTensor.from_local(x(), context_mesh("cpu"), [Shard(2), Shard(2)], run_check=False)


REFUSED: dict[str, tuple[Callable[[], list[Any]], dict[str, Any], str]] = {
    "keys of another length": (lambda: [x(), *[x(1, HEADS, 8, DIM)] * 2], {}, "under a mask q, k and v must agree"),
    "values of another length": (lambda: [x(), x(), x(1, HEADS, 8, DIM)], {}, "k and v must agree in all but"),
    "another batch": (lambda: [x(2, HEADS, LENGTH, DIM), x(), x()], {}, "must agree in batch and head dim"),
    "heads that do not divide": (lambda: [x(), *[x(1, 3, LENGTH, DIM)] * 2], {}, "query heads must be a multiple"),
    "fewer heads, as they are": (lambda: [x(), *[x(1, 2, LENGTH, DIM)] * 2], {"enable_gqa": False}, "enable_gqa=False"),
    "three dims": (lambda: [x(HEADS, LENGTH, DIM)] * 3, {}, "must have shape"),
    "an empty dim": (lambda: [x(1, HEADS, LENGTH, 0)] * 3, {}, "without empty dims"),
    "no tokens": (lambda: [x(1, HEADS, 0, DIM)] * 3, {}, "q must have tokens of this rank"),
    "another dtype": (lambda: [x(), x(dtype=torch.float64), x()], {}, "must have one dtype"),
    "integers": (lambda: [x(dtype=torch.int64)] * 3, {}, "must be floating point"),
    "another device": (lambda: [x(device="meta")] * 3, {}, "must be on the mesh's device type 'cpu'"),
    "one on another device": (lambda: [x(), x(device="meta"), x()], {}, "must be on one device"),
    "no keys": (lambda: [x(), None, x()], {}, "attention is called without k: pass q, k and v"),
    "no tensor": (lambda: [x(), 1.0, x()], {}, "k must be a tensor, got float"),
    "a DTensor": (lambda: [x(), distributed(), x()], {}, "must all be DTensors or all plain tensors"),
    "a tangent": (lambda: [x(), dual(), x()], {}, "has no forward-mode derivative, but k has a tangent"),
    "a mask": (lambda: [x()] * 3, {"attn_mask": x()}, "attn_mask=a tensor"),
    "dropout": (lambda: [x()] * 3, {"dropout_p": 0.5}, "dropout_p=0.5"),
    "sinks of other heads": (lambda: [x()] * 3, {"sinks": x(3)}, "one logit per query head"),
    "integers as sinks": (lambda: [x()] * 3, {"sinks": x(HEADS, dtype=torch.int64)}, "must be a floating point tensor"),
    "documents of another length": (
        lambda: [x()] * 3, {"document_ids": torch.zeros(8, dtype=torch.int64)}, "the whole sequence of 16 tokens",
    ),
    "shared keys of another width": (lambda: [x()] * 3, {"k_shared": x(1, 1, LENGTH, 3)}, "to which k_shared belongs"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # which tangents import
@pytest.mark.parametrize("change", REFUSED)
def test_what_a_call_brings(change: str) -> None:
    module, (tensors, options, text) = styled(is_causal=True), REFUSED[change]
    module(x(), x(), x())
    module(x(), x(), x(), sinks=x(HEADS))
    with (
        forward_ad.dual_level() if change == "a tangent" else nullcontext(),
        pytest.raises((ValueError, TypeError, NotImplementedError), match=text),
    ):
        module(*tensors(), **options)


def test_options_of_an_enum() -> None:
    """As frameworks read them from their configurations: equal to the text, and not written as it is."""

    class Schedule(StrEnum):
        TWO_DIMENSIONAL = "2d"

    told = [styled(schedule=schedule)(x(), x(), x()) for schedule in ("2d", Schedule.TWO_DIMENSIONAL)]
    assert told[0].equal(told[1])


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_sinks_with_a_tangent_and_mapped_over() -> None:
    """These are refused as they are for q, k and v, and not without what they ask for."""
    module = styled()
    module(x(), x(), x(), sinks=x(HEADS))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="but sinks has a tangent"):
        module(x(), x(), x(), sinks=forward_ad.make_dual(x(HEADS), x(HEADS)))
    q, k, v = x(), x(), x()
    with pytest.raises(NotImplementedError, match=r"sinks is mapped over by torch\.vmap"):
        vmap(lambda sinks: module(q, k, v, sinks=sinks))(x(2, HEADS))


def test_a_transform() -> None:
    module = styled()
    module(x(), x(), x())
    k, v = x(), x()
    with pytest.raises(NotImplementedError, match=r"q is mapped over by torch\.vmap"):
        vmap(lambda q: module(q, k, v))(x(2, 1, HEADS, LENGTH, DIM))
    grad = torch.func.grad(lambda q: module(q, k, v).sum())(x())
    wanted = torch.func.grad(lambda q: F.scaled_dot_product_attention(q, x(), x()).sum())(x())
    assert worst_error([(grad, wanted)]) < 1e-5


def test_a_mode_for_gradients() -> None:
    """Ranks compare whether there will be a backward."""
    module, q = styled(), x().requires_grad_()
    sinks = x(HEADS).requires_grad_()
    assert not told(module, x(), x(), x()).gradients
    assert told(module, q, x(), x()).gradients
    assert not told(module, x(), x(), x()).gradients
    assert told(module, x(), x(), x(), sinks=sinks).gradients
    assert not told(module, x(), x(), x(), sinks=sinks.detach()).gradients
    with torch.no_grad():
        assert not told(module, q, x(), x()).gradients
    assert told(module, nn.Parameter(x()), x(), x()).gradients


def test_autocast() -> None:
    module = styled()
    for _ in range(2):
        assert module(x(), x(), x()).dtype == torch.float32
        for dtype in (torch.bfloat16, torch.float16):
            with torch.autocast("cpu", dtype):
                assert module(x(), x(), x()).dtype == dtype
                assert module(x(), x(dtype=torch.bfloat16), x()).dtype == dtype
                assert module(*[x(dtype=torch.float64)] * 3).dtype == torch.float64


def by_documents(documents: Tensor) -> Tensor:
    same = documents.unsqueeze(-1) == documents.unsqueeze(-2)
    return F.scaled_dot_product_attention(x(), x(), x(), attn_mask=same)


def test_documents() -> None:
    """Of one shape, and one tensor written to."""
    module = styled()
    ids, alone = torch.zeros(1, LENGTH, dtype=torch.int64), F.scaled_dot_product_attention(x(), x(), x())
    for start in (8, 5):
        ids[:, start:] = 1
        assert worst_error([(module(x(), x(), x(), document_ids=ids), by_documents(ids))]) < 1e-6
        assert worst_error([(module(x(), x(), x()), alone)]) < 1e-6
    ends = torch.tensor([0, 8, LENGTH])
    module(x(), x(), x(), cu_seqlens=ends)
    ends[1] = 20
    with pytest.raises(ValueError, match="must ascend from 0"):
        module(x(), x(), x(), cu_seqlens=ends)


def test_a_mask_s_state() -> None:
    reach = torch.tensor(2)
    module = styled(mask_mod=lambda b, h, q, kv: q - kv < reach)
    rows = torch.arange(LENGTH)
    for n in (2, 3, 2):
        reach.fill_(n)
        seen = rows.unsqueeze(-1) - rows < n
        wanted = F.scaled_dot_product_attention(x(), x(), x(), attn_mask=seen)
        assert worst_error([(module(x(), x(), x()), wanted)]) < 1e-5


def causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q >= kv


def test_a_mask_of_the_call() -> None:
    module = styled(order=TokenOrder("contiguous", context_mesh("cpu")))
    mask: BlockMask = create_block_mask(causal, None, None, LENGTH, LENGTH, device="cpu")
    free, hidden = (F.scaled_dot_product_attention(x(), x(), x(), is_causal=is_causal) for is_causal in (False, True))
    for _ in range(2):
        assert worst_error([(module(x(), x(), x()), free)]) < 1e-6
        assert worst_error([(module(x(), x(), x(), block_mask=mask), hidden)]) < 1e-5


def test_what_a_kernel_says() -> None:
    """Of determinism, and of what it has come to know since."""
    kernel, tired = select_kernel("reference", Need("cpu", torch.float32, DIM, DIM)), []

    def supports(need: Need) -> bool | str:
        return "is not deterministic" if need.deterministic else "is tired" if tired else True

    register_kernel("changeable", kernel.forward, kernel.backward, supports)
    module = styled(kernel="changeable")
    module(x(), x(), x())
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(ValueError, match="is not deterministic"):
            module(x(), x(), x())
    finally:
        torch.use_deterministic_algorithms(False)
    module(x(), x(), x())
    tired.append(True)
    with pytest.raises(ValueError, match="is tired"):
        module(x(), x(), x())


def test_a_layout_in_memory() -> None:
    module = styled()
    wanted = module(x(), x(), x())
    by_tokens = x().transpose(1, 2).contiguous().transpose(1, 2)
    assert worst_error([(module(by_tokens, x(), x()), wanted)]) < 1e-6
    assert module(by_tokens, x(), x()).stride() == by_tokens.stride()


def test_a_world() -> None:
    module = styled()
    module(x(), x(), x())
    torch.distributed.destroy_process_group()
    with fake_world(1):
        context_mesh("cpu")
        with pytest.raises(ValueError, match="is of a process group that has been destroyed since"):
            module(x(), x(), x())
    torch.distributed.init_process_group("fake", rank=0, world_size=1, store=torch.distributed.HashStore())
