"""What attention does on CUDA, seen on fake tensors: shapes, strides, dtypes, devices and every op, but no contents.

The bodies of both operators run as on a GPU, on one rank of a world that does not exist, down to torch's fused kernels,
in whose place its meta functions answer. Missing are numbers; autograd's engine, which wants a stream of the device
(nodes are called here, one after the other); masks, which are written down on the device, and flex_attention, which is
given them; Triton's merge, in whose place the plain one runs.

The same on torch's CPU wheel and, where there is no GPU, on its CUDA wheels.
"""

import ctypes
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from tests.pairwise import tiers
from wallfacer_dt import TokenOrder, WallFacerParallel, context_mesh, context_parallel_attention, shard_sequence
from wallfacer_dt.collectives.functional import all_gather
from wallfacer_dt.ops import BODIES
from wallfacer_dt.testing import RankPool
from wallfacer_dt.testing.fake import fake_world

FUSED = ("_flash_attention_", "_scaled_dot_product_", "_efficient_attention_", "_cudnn_attention_")
# Where a program waits for the device. Fake tensors refuse what is read, but for constants.
WAITS = {"_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal", "masked_select", "_unique2", "unique_dim"}


@pytest.fixture(scope="module", autouse=True)
def _device_guard() -> Iterator[None]:
    """Indexing, and nodes of autograd, ask for CUDA's device guard, which a CPU wheel lacks: lend it the meta device's.

    A CUDA wheel has one, which fake tensors replace by such a one where there is no GPU.
    """
    if torch.version.cuda:
        yield
        return
    kinds = torch._C._autograd.DeviceType
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * (int(kinds.Meta) + 1)).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    assert guards[int(kinds.CUDA)] is None
    guards[int(kinds.CUDA)] = guards[int(kinds.Meta)]
    yield
    guards[int(kinds.CUDA)] = None


MODE = FakeTensorMode()  # one for all: what is remembered of a schedule is of it


def fake(x: Any) -> Any:
    """A tensor with contents as one without; anything else as it is."""
    return MODE.from_tensor(x) if isinstance(x, Tensor) and not isinstance(x, FakeTensor) else x


class Watch(TorchDispatchMode):
    """Runs the operators' bodies, with all that they do on CUDA.

    Attributes:
        faults: what should not be.
        fused: calls of attention kernels.
        sent: tensors that were copied from the host to the device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.faults: list[str] = []
        self.fused: Counter[str] = Counter()
        self.sent: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        fakes = tree_map(fake, (args, kwargs))
        if func in BODIES:
            stated = func(*fakes[0], **fakes[1])
            with self:
                found = BODIES[func](*args, **kwargs)
            self.faults += differences(func, found, stated)
            return found
        leaves = tree_leaves((args, kwargs))
        given = [x for x in leaves if isinstance(x, Tensor)]
        goes_to_cuda = any(isinstance(x, torch.device) and x.type == "cuda" for x in leaves)
        if given and not goes_to_cuda and not any(isinstance(x, FakeTensor) for x in given):
            with _disable_current_modes():  # documents, and what is made of them, have contents
                return func(*args, **kwargs)
        name = func.name().partition("::")[2].partition(".")[0]
        if name.startswith(FUSED):
            self.fused[name] += 1
            self.faults += operands(func, args, kwargs)
        result = func(*fakes[0], **fakes[1])
        results = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        # A mask becomes indices, but where it is filled with one number.
        is_read = name.startswith(("index", "_index_put")) and any(x.dtype == torch.bool for x in given[1:])
        is_read = is_read and given[-1].numel() > 1
        if any(x.is_cuda for x in given) and (name in WAITS or is_read or any(not x.is_cuda for x in results)):
            self.faults.append(f"{name} waits for the device")
        # A number among tensors is an argument of a kernel, but where it is copied.
        on_host = [x for x in given if not x.is_cuda and (x.ndim or goes_to_cuda or name == "copy_")]
        if on_host and any(x.is_cuda for x in (*given, *results)):
            self.sent.append(f"{name} of {[tuple(x.shape) for x in on_host]}")
        return result


def differences(func: Any, found: tuple[Tensor, ...], stated: tuple[Tensor, ...]) -> list[str]:
    """Of what a body returns from what the operator's fake kernel states, which a compiled graph relies on."""

    def described(x: Tensor) -> tuple[Any, ...]:
        return tuple(x.shape), x.stride(), x.dtype, x.device

    pairs = enumerate(zip(found, stated, strict=True))
    return [f"{func} {i}: {x}, stated {y}" for i, (a, b) in pairs if (x := described(a)) != (y := described(b))]


def operands(func: Any, args: tuple, kwargs: dict[str, Any]) -> list[str]:
    """What a kernel would not read right of a call: it takes 16 bytes at a time, and some of it as contiguous."""
    faults = []
    named = dict(zip((x.name for x in func._schema.arguments), args, strict=False)) | kwargs
    for name, x in ((name, x) for name, x in named.items() if isinstance(x, Tensor)):
        if not x.is_cuda:
            faults.append(f"{name} is on {x.device}")
        elif x.dtype not in (torch.bfloat16, torch.float16):
            faults += [] if x.is_contiguous() else [f"{name} is not contiguous: {x.stride()}"]
            faults += [f"{name} is {x.dtype}"] * (
                x.dtype not in (torch.float32, torch.int32, torch.uint64, torch.int64)
            )
        else:
            rows = [step for step, n in zip(x.stride()[:-1], x.shape, strict=False) if n > 1]
            if x.stride(-1) != 1:
                faults.append(f"{name}'s rows have stride {x.stride(-1)}")
            if any(start * x.itemsize % 16 for start in (x.storage_offset(), *rows)):
                faults.append(f"{name} is not aligned: offset {x.storage_offset()}, strides {x.stride()}")
            # What is added to scores has their columns.
            if name != "attn_bias" and (x.shape[-1] % 8 or x.shape[-1] > 256):
                faults.append(f"{name} has head dim {x.shape[-1]}")
    return [f"{func}: {fault}" for fault in faults]


def backward(out: Tensor, grad_out: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Leaves and their gradients, of a graph in which every tensor is used once, node by node."""
    todo, found = [(out.grad_fn, out.output_nr, grad_out)], []
    while todo:
        node, number, grad = todo.pop()
        if hasattr(node, "variable"):
            found.append((node.variable, grad))
            continue
        is_python = isinstance(node, torch.autograd.function.BackwardCFunction)
        assert number == 0
        grads = node.apply(grad, None, None) if is_python else node(grad)
        # A node written in Python has edges for tensors only, but gradients, which are None, for all that it was given.
        edges = [edge for edge in node.next_functions if edge[0] is not None]
        grads = [x for x in (grads if isinstance(grads, tuple) else (grads,)) if x is not None]
        todo += [(*edge, x) for edge, x in zip(edges, grads, strict=True)]
    return found


class Variant(NamedTuple):
    """Of a call, beside mesh and mask."""

    entry: str  # how attention is called, and how tensors lie
    dtype: torch.dtype = torch.bfloat16
    heads: tuple[int, int] = (8, 2)
    dims: tuple[int, int] = (64, 64)
    length: int = 192
    batch: int = 1
    rotate: str = "auto"
    kernel: str = "auto"
    rank: int = 0
    has_sinks: bool = False
    is_strided: bool = False  # last dims do not lie together


MESHES = {
    "one rank": {},
    "ring": {"ring": 4},
    "hybrid": {"ring": 2, "team": 2},
    "published": {"ring": 2, "team": 2},
    "ulysses": {"ring": 2, "ulysses": 2},
}
MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"is_causal": True},
    "window": {"is_causal": True, "window_size": (20, 0)},
    "documents": {"is_causal": True},
}
VARIANTS = {
    "plain": Variant("function BNLH", heads=(8, 8), batch=2),
    "odd": Variant("function BLNH", dims=(20, 20), length=151, rotate="kv", rank=-1),
    "other values": Variant("style BLNH", dims=(72, 36), length=151, batch=2, rotate="q", rank=1),
    "wide": Variant("style BNLH", dtype=torch.float16, heads=(4, 2), dims=(256, 250)),
    "sinks": Variant("function BNLH", dims=(100, 64), length=149, batch=2, rotate="q", rank=-1, has_sinks=True),
    "strided": Variant("function BNLH", length=151, rotate="kv", rank=2, is_strided=True),
    "no multiple": Variant("style BLNH", dtype=torch.float16, heads=(6, 2), dims=(12, 20), rotate="kv"),
    "efficient": Variant("function BLNH", dims=(20, 36), length=151, rotate="kv", rank=1, kernel="efficient"),
    "cudnn": Variant("style BLNH", dims=(20, 36), length=151, batch=2, rotate="q", rank=-1, kernel="cudnn"),
}


class Inner(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, document_ids: Tensor | None = None) -> Tensor:
        raise AssertionError("a style takes its place")


class Call:
    """One rank's call and its backward, to be made any number of times, in a world and under a mode of fake tensors."""

    def __init__(self, mesh: str, mask: str, variant: Variant) -> None:
        sizes, length = MESHES[mesh], variant.length
        device_mesh = context_mesh("cuda", **sizes)
        order = TokenOrder("contiguous" if mask == "none" else "head_tail", device_mesh)
        ids = (torch.arange(length) // 19).unsqueeze(0)
        self.tensors = {"document_ids": ids} if mask == "documents" else {}
        rows = shard_sequence(torch.arange(length), order, dim=0).numel()
        options = MASKS[mask] | {"order": order, "length": length, "kernel": variant.kernel}
        if mesh == "published":
            options["schedule"] = "published"
        elif variant.rotate != "auto":
            options |= {"rotate": variant.rotate, "rotate_forward": variant.rotate}
        entry, self.layout = variant.entry.split()
        if entry == "style":
            style = WallFacerParallel(layout=self.layout, check=False, **options)
            self.attend = parallelize_module(Inner(), device_mesh, style)
        else:
            self.attend = lambda *qkv, **more: self._in_layout(qkv, device_mesh, **more, **options)
        (n, n_kv), (h, h_v) = variant.heads, variant.dims
        self.shapes = [(variant.batch, heads, rows, dim) for heads, dim in ((n, h), (n_kv, h), (n_kv, h_v), (n, h_v))]
        self.variant = variant

    def _in_layout(self, qkv: tuple[Tensor, ...], *args: Any, **kwargs: Any) -> Tensor:
        if self.layout == "BNLH":
            return context_parallel_attention(*qkv, *args, **kwargs)
        return context_parallel_attention(*(x.transpose(1, 2) for x in qkv), *args, **kwargs).transpose(1, 2)

    def _made(self, shape: tuple[int, ...]) -> Tensor:
        b, n, length, h = shape
        shape = (b, length, n, h) if self.layout == "BLNH" else shape
        x = torch.empty(shape, dtype=self.variant.dtype, device="cuda")
        return x.mT.contiguous().mT if self.variant.is_strided else x

    def __call__(self) -> None:
        leaves = [self._made(shape).requires_grad_() for shape in self.shapes[:3]]
        more = dict(self.tensors)
        if self.variant.has_sinks:
            more["sinks"] = torch.empty(self.variant.heads[0], device="cuda").requires_grad_()
            leaves.append(more["sinks"])
        out = self.attend(*leaves[:3], **more)
        like = self._made(self.shapes[3])
        assert (out.shape, out.stride(), out.dtype, out.device) == (like.shape, like.stride(), like.dtype, like.device)
        found = backward(out, like)
        assert len(found) == len(leaves)
        for leaf in leaves:
            (grad,) = (grad for x, grad in found if x is leaf)
            assert (grad.shape, grad.stride(), grad.dtype) == (leaf.shape, leaf.stride(), leaf.dtype)
            assert grad.device == leaf.device


@pytest.mark.parametrize(("mesh", "mask", "variant"), tiers(product(MESHES, MASKS, VARIANTS)))
def test_calls_on_cuda(mesh: str, mask: str, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # What a schedule's segments are on a device, is remembered but for fake tensors, whose mode ends.
    monkeypatch.setattr("wallfacer_dt.algorithms.cumulative.FakeTensor", ())
    size = math.prod(MESHES[mesh].values())
    with fake_world(size, VARIANTS[variant].rank % size):
        call = Call(mesh, mask, VARIANTS[variant])
        with MODE, torch.autograd.set_multithreading_enabled(False):
            for has_been_called in (False, True):
                with Watch() as watch:
                    call()
                assert not watch.faults
                ways = {name.endswith("_backward") for name in watch.fused}
                # Of documents the published schedule may give a rank all its work in one of them.
                is_one_enough = (mesh, mask) == ("published", "documents")
                assert ways == {False, True} or (is_one_enough and len(ways) == 1)
                assert not (has_been_called and watch.sent)
                kernel = VARIANTS[variant].kernel
                assert all((kernel == "auto") or f"_{kernel}_" in name for name in watch.fused)


class Laid(Watch):
    """What kernels, or their adapters, have to copy since it has gaps, or lies in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.copied: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = func.name().partition("::")[2].partition(".")[0]
        read = {"contiguous": (0,), "_flash_attention_backward": (0, 4)}.get(name, ())  # grad_out and out
        copied = [args[i] for i in read if args[i].ndim == 4 and not args[i].is_contiguous()]
        # An lse is (B, N, L, 1) to cuDNN.
        self.copied += [f"{name} of {tuple(x.shape)}" for x in copied if x.shape[-1] > 1]
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.mark.parametrize("kernel", ["flash", "cudnn"])
@pytest.mark.parametrize("mesh", ["ring", "hybrid", "ulysses"])
def test_what_lies_by_tokens_is_not_copied_for_a_kernel(mesh: str, kernel: str) -> None:
    """Nor what is sent, gathered and exchanged of it."""
    with fake_world(4, 1):
        call = Call(mesh, "causal", Variant("function BLNH", kernel=kernel))
        with MODE, torch.autograd.set_multithreading_enabled(False), Laid() as watch:
            call()
        assert watch.fused
        assert not watch.copied


@pytest.mark.parametrize("mask", MASKS)
def test_a_compiled_forward_is_one_operator(mask: str) -> None:
    """For every mask, whole graphs; a backward is traced by autograd's engine, which wants a device."""
    graphs = []

    def kept(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    with fake_world(4, 1):
        call = Call("hybrid", mask, VARIANTS["wide"])
        attend = torch.compile(call.attend, fullgraph=True, backend=aot_autograd(fw_compiler=kept))
        more = {name: MODE.from_tensor(x) for name, x in call.tensors.items()}
        with MODE:
            q, k, v, like = (call._made(shape) for shape in call.shapes)
            out = attend(q, k, v, **more)
        assert (out.shape, out.stride(), out.dtype, out.device) == (like.shape, like.stride(), like.dtype, like.device)
    (graph,) = graphs
    calls = [node.target for node in graph.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    assert calls == [torch.ops.wallfacer_dt.attention.default]


def gathered() -> str:
    """On a rank of gloo: what gathering a tensor of a GPU says."""
    with MODE:
        buffer = torch.empty(4, device="cuda")
    try:
        all_gather(buffer, torch.distributed.group.WORLD.group_name)
    except ValueError as refusal:
        return str(refusal)
    return ""


@pytest.mark.parametrize(("mesh", "options"), [
    ({"team": 2, "ulysses": 2}, {}), ({"ring": 2, "team": 2}, {"schedule": "published"}),
    ({"ring": 2, "ulysses": 2}, {"replicated": 3}), ({"ring": 2, "team": 2}, {"schedule": "rings"}),
], ids=str)  # fmt: skip
def test_what_gloo_cannot_gather_is_refused_before_anything_is_sent(
    monkeypatch: pytest.MonkeyPatch, mesh: dict[str, int], options: dict[str, Any]
) -> None:
    """Two rings gather nothing."""
    sent = []

    class Sending(Watch):
        def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
            sent.extend([func.name()] * (func.namespace == "_c10d_functional"))
            return super().__torch_dispatch__(func, types, args, kwargs)

    monkeypatch.setattr("wallfacer_dt.collectives.functional.is_sent_by", lambda *_: True)
    with fake_world(4, 1):
        device_mesh = context_mesh("cuda", **mesh)
        order = TokenOrder("contiguous", device_mesh)
        with MODE, Sending():
            q = torch.empty(1, 4, 8, 8, dtype=torch.bfloat16, device="cuda")
            refused = pytest.raises(ValueError, match="gloo does not gather what is on cuda ")
            with nullcontext() if options.get("schedule") == "rings" else refused:
                context_parallel_attention(q, q, q, device_mesh, order=order, **options)
    assert bool(sent) == (options.get("schedule") == "rings")


def test_gloo_gathers_nothing_on_cuda(ranks: Callable[[int], RankPool]) -> None:
    """It reads a device's memory as the host's, and ends the process (torch 2.11.0 on an H200)."""
    assert all(text.startswith("gloo does not gather what is on cuda ") for text in ranks(2).run(gathered))
