"""What ranks run to show that bad input is refused, on every rank and before anything is sent."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

import wallfacer_dt as w
from tests.cases import mesh_of
from wallfacer_dt.metp import BODIES as METP_BODIES
from wallfacer_dt.ops import BODIES as ATTENTION_BODIES

BODIES = {**ATTENTION_BODIES, **METP_BODIES}


class Communication(TorchDispatchMode):
    """Names of the communicating ops that ran, of which those of this package are opaque: their bodies run instead."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # torch.compile does nothing, without a word, under a mode that does not say so

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.ran.append(str(func))
        if func in BODIES:
            with self:
                return BODIES[func](*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    @property
    def sent(self) -> list[str]:
        """Those that are not how ranks compare what they were asked for, and tell each other of a refusal."""
        return [op for op in self.ran if not op.startswith("c10d.allgather_")]


def outcome(name: str) -> tuple[str, str, list[str]]:
    """Exception type, message and what was sent before a refusal, on this rank."""
    with Communication() as communication:
        try:
            REFUSALS[name]()
        except Exception as error:  # the type is what is tested
            return type(error).__name__, str(error), communication.sent
    return "nothing", "", communication.sent


def mesh() -> DeviceMesh:
    return mesh_of(2, 2)


def x(batch: int = 1, heads: int = 2, length: int = 4, head_dim: int = 8, **kwargs: Any) -> Tensor:
    return torch.zeros(batch, heads, length, head_dim, **kwargs)


def attend(q: Any = None, k: Any = None, v: Any = None, on: Any = None, order: str = "", **options: Any) -> Tensor:
    """Under a mask in contiguous order, unless another is named."""
    q = x() if q is None else q
    k = x() if k is None else k
    on = mesh() if on is None else on
    if order or MASKS & options.keys():
        options["order"] = w.TokenOrder(order or "contiguous", on)
    return w.context_parallel_attention(q, k, k if v is None else v, on, **options)


MASKS = {"is_causal", "window_size", "prefix_length", "mask_mod", "document_ids", "cu_seqlens"}


def unordered(order: Any = None, **options: Any) -> Tensor:
    """With what is no token order."""
    return w.context_parallel_attention(x(), x(), x(), mesh(), order=order, **options)


class Inner(nn.Module):
    """An inner attention; what it computes does not matter here."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Tensor:
        return q


def unchecked(**options: Any) -> w.WallFacerParallel:
    """A style that does not ask what these stand-ins compute."""
    return w.WallFacerParallel(check=False, **options)


def styled(module: nn.Module | None = None, style: Any = None, on: Any = None) -> nn.Module:
    return parallelize_module(module or Inner(), on or mesh(), style or unchecked())


def called(style: Any = None, module: nn.Module | None = None, *extra: Any, **kwargs: Any) -> Tensor:
    return styled(module, style)(x(), x(), x(), *extra, **kwargs)


class WithMask(Inner):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, is_causal: bool = False) -> Tensor:
        return q


class AskedForGroups(Inner):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool = True) -> Tensor:
        return q


class CausalByDefault(Inner):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = True) -> Tensor:
        return q


class WindowByDefault(Inner):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, sliding_window: int = 128) -> Tensor:
        return q


class ScaleByDefault(Inner):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float = 0.5) -> Tensor:
        return q


def of_another_turn(name: str = "head_tail") -> w.TokenOrder:
    """An order of a mesh of the same ranks, on which they come in another turn."""
    return w.TokenOrder(name, w.context_mesh("cpu", 2, 2, placement="ring_in_node"))


def of_other_ranks() -> Tensor:
    """Of one of two meshes that these ranks make up."""
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp_ring"))
    return unordered(w.TokenOrder("contiguous", pairs["cp_ring"]), is_causal=True)


def another_turn_on_one_rank() -> w.TokenOrder:
    orders = [w.TokenOrder("head_tail", mesh()), of_another_turn()]
    return orders[dist.get_rank() == 1]


def another_name_on_one_rank() -> w.TokenOrder:
    return w.TokenOrder("head_tail" if dist.get_rank() == 1 else "contiguous", mesh())


def given_later(**held: Any) -> Tensor:
    """A module that is given a tensor after the style was, in place of what it holds."""
    module = styled(Holding(**held))
    module(x(), x(), x())
    for name in held:
        setattr(module, name, torch.zeros(4, 4, requires_grad=True))
    return module(x(), x(), x())


def styled_twice() -> None:
    styled(styled())


class Holding(Inner):
    """An inner attention with something in it."""

    def __init__(self, **held: Any) -> None:
        super().__init__()
        for name, thing in held.items():
            setattr(self, name, thing)


class WithSlots:
    __slots__ = ()

    def __call__(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i >= j


def branching(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j if h == 0 else i <= j


def with_a_mask_buffer() -> nn.Module:
    module = Inner()
    module.register_buffer("hidden", torch.ones(4, 4).triu())
    return styled(module)


def forward_mode() -> Tensor:
    with forward_ad.dual_level():
        return attend(forward_ad.make_dual(x(), x()))


def without_gradients() -> Tensor:
    with torch.set_grad_enabled(dist.get_rank() != 1):
        return called_with_gradients().sum().backward()


def called_with_gradients() -> Tensor:
    return styled()(*(x(requires_grad=True) for _ in range(3)))


def ring_of_a_team() -> Tensor:
    return attend(on=mesh()["cp_ring"])


def of_another_version() -> Tensor:
    """Ranks whose packages differ would follow different schedules."""
    with mock.patch("wallfacer_dt.attention.SOURCES", "old" if dist.get_rank() == 1 else "new"):
        return attend()


def seen_before() -> Tensor:
    for length in (5, 7):
        attend(x(length=length), x(length=length))
    length = 7 if dist.get_rank() == 2 else 5
    return attend(x(length=length), x(length=length))


REFUSALS: dict[str, Callable[[], Any]] = {
    "ring of the wrong size": lambda: w.context_mesh("cpu", 3, 1),
    "team that does not divide": lambda: w.context_mesh("cpu", 2, 3),
    "ring of no rank": lambda: w.context_mesh("cpu", 0, 4),
    "ring that is no int": lambda: w.context_mesh("cpu", 2.0, 2),
    "unknown placement": lambda: w.context_mesh("cpu", 2, 2, placement="anywhere"),
    "no mesh": lambda: attend(on="cpu"),
    "mesh of other axes": lambda: attend(on=init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))),
    "mesh without names": lambda: attend(on=init_device_mesh("cpu", (2, 2))),
    "mesh of more axes": lambda: attend(
        on=init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp", "cp_ring", "cp_team"))
    ),
    "mesh with swapped axes": lambda: attend(on=init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp_team", "cp_ring"))),
    "mesh partly in descending order": lambda: attend(
        on=DeviceMesh("cpu", torch.tensor([[0, 1], [3, 2]]), mesh_dim_names=("cp_ring", "cp_team"))
    ),
    "mesh in descending order": lambda: attend(
        on=DeviceMesh("cpu", torch.tensor([[3, 2], [1, 0]]), mesh_dim_names=("cp_ring", "cp_team"))
    ),
    "published with a team too large": lambda: attend(on=mesh_of(1, 4), schedule="published"),
    "published rotating kv": lambda: attend(schedule="published", rotate="kv"),
    "published rotating q forward": lambda: attend(schedule="published", rotate_forward="q"),
    "unknown schedule": lambda: attend(schedule="3d"),
    "unknown rotation": lambda: attend(rotate="k"),
    "unknown rotation forward": lambda: attend(rotate_forward="k"),
    "unknown order": lambda: attend(order="zigzag"),
    "a name for an order": lambda: unordered("head_tail", is_causal=True),
    "a name for an order in a style": lambda: unchecked(order="head_tail"),
    "a name for an order to the loader": lambda: w.shard_sequence(x(), "head_tail", dim=2),
    "a mesh for an order": lambda: w.sequence_positions(8, mesh()),
    "a mesh for an order of a stream": lambda: w.SequenceDataset(torch.arange(99), 8, mesh()),
    "a mask without an order": lambda: unordered(is_causal=True),
    "documents without an order": lambda: unordered(cu_seqlens=torch.tensor([0, 16])),
    "a style's mask without an order": lambda: styled(style=unchecked(window_size=(4, 4))),
    "a call's mask without an order": lambda: called(mask_mod=lambda b, h, i, j: i >= j),
    "an order of another turn": lambda: unordered(of_another_turn(), is_causal=True),
    "an order of another turn without a mask": lambda: unordered(of_another_turn()),
    "an order of another turn in a style": lambda: styled(style=unchecked(order=of_another_turn())),
    "an order of another turn, tried by document": lambda: w.check_equivalence(
        Inner(), unchecked(order=of_another_turn("document_head_tail")), mesh()
    ),
    "an order of other ranks": of_other_ranks,
    "unknown kernel": lambda: attend(kernel="fast"),
    "is_causal that is no bool": lambda: attend(is_causal=1),
    "scale that is no number": lambda: attend(scale="big"),
    "lengths of q and k under a mask": lambda: attend(x(length=4), x(length=6), is_causal=True),
    "another length than the order's": lambda: attend(*[x(length=3)] * 2, length=13),
    "a length without tokens": lambda: attend(length=0),
    "a length of keys under a mask": lambda: attend(is_causal=True, length=16, kv_length=24),
    "a length of keys alone": lambda: attend(kv_length=16),
    "a window that is no pair": lambda: attend(window_size=8),
    "a window of floats": lambda: attend(window_size=(8.0, 0)),
    "a window below zero": lambda: attend(window_size=(-2, 0)),
    "a causal window that looks ahead": lambda: attend(is_causal=True, window_size=(4, 4)),
    "a prefix without causality": lambda: attend(prefix_length=4),
    "a prefix with a window": lambda: attend(is_causal=True, prefix_length=4, window_size=(4, 0)),
    "a mask_mod beside another mask": lambda: attend(is_causal=True, mask_mod=lambda b, h, i, j: i >= j),
    "a mask_mod that is none": lambda: attend(mask_mod=torch.ones(16, 16)),
    "a mask_mod that answers with floats": lambda: attend(mask_mod=lambda b, h, i, j: (i >= j).float()),
    "a mask_mod that answers with numbers": lambda: attend(mask_mod=lambda b, h, i, j: (i - j).clamp(0, 1)),
    "a mask_mod that answers once for all": lambda: attend(mask_mod=lambda b, h, i, j: True),
    "a mask_mod that branches": lambda: attend(mask_mod=branching),
    "a mask_mod that indexes a list": lambda: attend(mask_mod=lambda b, h, i, j: i >= j + [0, 1, 2][h]),
    "a mask_mod that indexes an array": lambda: attend(mask_mod=lambda b, h, i, j: np.arange(16)[i] >= j),
    "a mask_mod that slices": lambda: attend(mask_mod=lambda b, h, i, j: torch.arange(16)[: i + 1].sum() >= j),
    "a mask_mod that draws": lambda: attend(mask_mod=lambda b, h, i, j: torch.rand(()) < 0.5),
    "a mask_mod that writes": lambda: attend(mask_mod=lambda b, h, i, j: i.add_(1) >= j),
    "a mask_mod that answers for many pairs": lambda: attend(mask_mod=lambda b, h, i, j: torch.arange(16) >= j),
    "a mask_mod of slots alone": lambda: attend(mask_mod=WithSlots()),
    "a style with a mask_mod that branches": lambda: styled(
        style=unchecked(mask_mod=branching, order=w.TokenOrder("contiguous", mesh()))
    ),
    "replicated tokens under a mask": lambda: attend(is_causal=True, replicated=2),
    "replicated tokens alone": lambda: attend(replicated=4),
    "replicated tokens in DTensors": lambda: attend(
        *[DTensor.from_local(x(), mesh(), [Shard(2), Shard(2)], run_check=False)] * 2, replicated=2
    ),
    "a soft cap in a kernel that has none": lambda: attend(softcap=30.0),
    "a soft cap of zero": lambda: attend(softcap=0.0),
    "flex on the CPU": lambda: attend(kernel="flex"),
    "documents of a shard": lambda: attend(document_ids=torch.zeros(1, 4, dtype=torch.int64)),
    "documents of another batch": lambda: attend(document_ids=torch.zeros(2, 16, dtype=torch.int64)),
    "documents that are no integers": lambda: attend(document_ids=torch.zeros(16)),
    "documents on a device": lambda: attend(document_ids=torch.zeros(16, dtype=torch.int64, device="meta")),
    "documents as a list": lambda: attend(cu_seqlens=[0, 16]),
    "documents twice": lambda: attend(
        document_ids=torch.zeros(16, dtype=torch.int64), cu_seqlens=torch.tensor([0, 16])
    ),
    "cumulative lengths of another sequence": lambda: attend(cu_seqlens=torch.tensor([0, 8, 20])),
    "cumulative lengths that descend": lambda: attend(cu_seqlens=torch.tensor([0, 8, 4, 16])),
    "documents with a prefix": lambda: attend(is_causal=True, prefix_length=2, cu_seqlens=torch.tensor([0, 16])),
    "documents with a mask_mod": lambda: attend(mask_mod=lambda b, h, i, j: i >= j, cu_seqlens=torch.tensor([0, 16])),
    "dealt out by document without documents": lambda: attend(order="document_head_tail"),
    "sharded by document without documents": lambda: w.shard_sequence(
        x(), w.TokenOrder("document_head_tail", mesh()), dim=2
    ),
    "a stream dealt out by document": lambda: w.SequenceDataset(
        torch.arange(99), 8, w.TokenOrder("document_head_tail", mesh())
    ),
    "sinks for other heads": lambda: attend(sinks=torch.zeros(3)),
    "sinks that are integers": lambda: attend(sinks=torch.zeros(2, dtype=torch.int64)),
    "sinks as a number": lambda: attend(sinks=0.5),
    "shared keys of several heads": lambda: attend(x(head_dim=12), k_shared=x(head_dim=4)),
    "shared keys too wide": lambda: attend(x(head_dim=12), k_shared=x(heads=1, head_dim=8)),
    "shared keys of another dtype": lambda: attend(
        x(head_dim=12), k_shared=x(heads=1, head_dim=4, dtype=torch.float64)
    ),
    "shared keys of another length": lambda: attend(x(head_dim=12), k_shared=x(heads=1, length=2, head_dim=4)),
    "fewer heads than ulysses": lambda: attend(on=mesh_of(1, 1, ulysses=4)),
    "mesh with ulysses inside": lambda: attend(
        on=init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp_ring", "cp_ulysses"))
    ),
    "a ring without its ulysses": lambda: attend(on=mesh_of(2, 1, ulysses=2)["cp_ring", "cp_team"]),
    "ulysses of the wrong size": lambda: w.context_mesh("cpu", 2, ulysses=3),
    "ring style on ulysses": lambda: styled(style=w.RingParallel(check=False), on=mesh_of(2, 1, ulysses=2)),
    "ulysses style on a ring": lambda: styled(style=w.UlyssesParallel(check=False), on=mesh_of(2, 1, ulysses=2)),
    "lengths of k and v": lambda: attend(v=x(length=6)),
    "batches": lambda: attend(x(batch=2)),
    "head dims": lambda: attend(x(head_dim=16)),
    "heads that do not divide": lambda: attend(x(heads=3)),
    "fewer query heads": lambda: attend(x(heads=1)),
    "dtypes": lambda: attend(x(dtype=torch.bfloat16)),
    "integers": lambda: attend(x(dtype=torch.int64), x(dtype=torch.int64)),
    "devices": lambda: attend(x(device="meta")),
    "device of the mesh": lambda: attend(x(device="meta"), x(device="meta")),
    "three dims": lambda: attend(torch.zeros(2, 4, 8)),
    "an empty shard": lambda: attend(x(length=0), x(length=0)),
    "no tensor": lambda: attend([1.0]),
    "a DTensor among tensors": lambda: attend(DTensor.from_local(x(), mesh(), [Shard(2), Shard(2)], run_check=False)),
    "a DTensor replicated in the team": lambda: attend(
        *[DTensor.from_local(x(), mesh(), [Shard(2), Replicate()], run_check=False)] * 2
    ),
    "an empty sequence": lambda: w.shard_sequence(x(length=0), w.TokenOrder("contiguous", mesh()), dim=2),
    "a length that is no int": lambda: w.sequence_positions(8.0, w.TokenOrder("contiguous", mesh())),
    "documents in a list": lambda: w.sequence_positions(
        8, w.TokenOrder("document_head_tail", mesh()), document_ids=[0] * 8
    ),
    "dim that is no int": lambda: w.shard_sequence(x(), w.TokenOrder("contiguous", mesh()), dim=0.5),
    "sharding a DTensor": lambda: w.shard_sequence(
        DTensor.from_local(x(), mesh(), [Replicate(), Replicate()], run_check=False),
        w.TokenOrder("contiguous", mesh()),
        dim=2,
    ),
    "dim out of range": lambda: w.shard_sequence(x(), w.TokenOrder("contiguous", mesh()), dim=4),
    "unsharding something that needs a gradient": lambda: w.unshard_sequence(
        x(requires_grad=True), w.TokenOrder("contiguous", mesh()), dim=2
    ),
    "too short a stream": lambda: w.SequenceDataset(torch.arange(8), 8, w.TokenOrder("contiguous", mesh())),
    "ring style on a team": lambda: styled(style=w.RingParallel(check=False)),
    "unknown layout": lambda: w.RingParallel(layout="BHLD"),
    "wallfacer style on one axis": lambda: styled(on=init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))),
    "style on a module with parameters": lambda: styled(nn.MultiheadAttention(8, 2)),
    "style on a module that is no attention": lambda: styled(nn.ReLU()),
    "style on a styled module": styled_twice,
    "module that is causal by default": lambda: called(None, CausalByDefault()),
    "module with a window by default": lambda: called(None, WindowByDefault()),
    "module with another scale by default": lambda: called(unchecked(scale=1.0), ScaleByDefault()),
    "module that holds is_causal": lambda: styled(Holding(is_causal=True)),
    "module that holds a window": lambda: styled(Holding(sliding_window=64)),
    "module that holds dropout": lambda: styled(Holding(drop=nn.Dropout(0.5))),
    "module that holds a mask": with_a_mask_buffer,
    "module that is given a bias later": lambda: given_later(bias=None),
    "module that is given another bias later": lambda: given_later(bias=torch.zeros(4, 4)),
    "unknown schedule of a style": lambda: w.WallFacerParallel(schedule="3d"),
    "unknown rotation of a style": lambda: w.RingParallel(rotate="k"),
    "forward-mode differentiation": forward_mode,
    "a ring without its team": ring_of_a_team,
    "called with a mask": lambda: called(attn_mask=torch.zeros(4, 4)),
    "called with a mask by position": lambda: called(None, WithMask(), torch.zeros(4, 4)),
    "called with dropout": lambda: called(dropout_p=0.1),
    "called with a window": lambda: called(sliding_window=8),
    "called with a flash window": lambda: called(window_size=(8, 0)),
    "called with sinks that are no tensor": lambda: called(sinks=0.5),
    "called with sinks twice": lambda: called(sinks=torch.zeros(4), s_aux=torch.zeros(4)),
    "called with a soft cap": lambda: called(softcap=30.0),
    "called with something unknown": lambda: called(temperature=None),
    "called as causal": lambda: called(is_causal=True),
    "called with another scale": lambda: called(unchecked(scale=1.0), scale=0.5),
    "called with two scales": lambda: called(scale=0.5, softmax_scale=0.25),
    "called with a learned scale": lambda: called(scale=torch.tensor(0.5, requires_grad=True)),
    "called with an infinite scale": lambda: called(scale=float("inf")),
    "called with grouped heads switched off": lambda: styled()(
        x(heads=4).transpose(1, 2), x().transpose(1, 2), x().transpose(1, 2), enable_gqa=False
    ),
    "called with grouped heads switched off by position": lambda: styled(AskedForGroups())(
        x(heads=4).transpose(1, 2), x().transpose(1, 2), x().transpose(1, 2), False
    ),
    "called with one option twice": lambda: called(None, WithMask(), torch.zeros(4, 4), attn_mask=None),
    "called with too many arguments": lambda: called(None, None, None, 0.0),
}

# These differ between ranks, so ranks have to compare before they can refuse.
DISAGREEMENTS: dict[str, Callable[[], Any]] = {
    "shards of different length": lambda: attend(*[x(length=3 + (dist.get_rank() == 3))] * 2),
    "an odd shard on one rank": lambda: attend(*[x(length=4 - (dist.get_rank() == 3))] * 2, order="head_tail"),
    "other documents on one rank": lambda: attend(cu_seqlens=torch.tensor([0, 8 + dist.get_rank() // 3, 16])),
    "bad documents on one rank": lambda: attend(cu_seqlens=torch.tensor([0, 8 + 9 * (dist.get_rank() == 3), 16])),
    "no documents on one rank": lambda: attend(cu_seqlens=torch.tensor([0, 16]) if dist.get_rank() else None),
    "another window on one rank": lambda: attend(window_size=(4 + dist.get_rank() // 3, 0)),
    "another mask_mod on one rank": lambda: attend(mask_mod=lambda b, h, i, j: i >= j + dist.get_rank() // 3),
    "shared keys on one rank": lambda: attend(
        x(head_dim=12),
        x(head_dim=12 if dist.get_rank() else 8),
        x(),
        k_shared=None if dist.get_rank() else x(heads=1, head_dim=4),
    ),
    "another width of values on one rank": lambda: attend(v=x(head_dim=8 + dist.get_rank() // 3)),
    "another number of replicated tokens on one rank": lambda: attend(replicated=1 + dist.get_rank() // 3),
    "sinks that do not fit on one rank": lambda: attend(sinks=torch.zeros(2 + dist.get_rank() // 3)),
    "an empty shard on one rank": lambda: attend(*[x(length=4 * (dist.get_rank() != 3))] * 2),
    "an integer on one rank": lambda: attend(*[x(dtype=torch.int64 if dist.get_rank() == 1 else None)] * 2),
    "shards to unshard of different length": lambda: w.unshard_sequence(
        x(length=3 + (dist.get_rank() == 3)), w.TokenOrder("contiguous", mesh()), dim=2
    ),
    "another length on one rank, each seen before": seen_before,
    "another scale on one rank": lambda: attend(scale=0.1 + 0.1 * (dist.get_rank() == 1)),
    "another kernel on one rank": lambda: attend(kernel="reference" if dist.get_rank() == 1 else "flash"),
    "another version on one rank": of_another_version,
    "another dtype on one rank": lambda: attend(
        *[x(dtype=torch.float32 if dist.get_rank() else torch.float64, head_dim=24)] * 2
    ),
    "a gradient on one rank": lambda: attend(x(requires_grad=dist.get_rank() == 1)).sum().backward(),
    "a gradient of sinks on one rank": lambda: (
        attend(sinks=torch.zeros(2, requires_grad=dist.get_rank() == 1)).sum().backward()
    ),
    "no gradients on one rank": without_gradients,
    "no values on one rank": lambda: styled()(x(), x(), *[x()] * (dist.get_rank() != 2)),
    "a mask on one rank": lambda: called(attn_mask=torch.ones(4, 4) if dist.get_rank() == 2 else None),
    "a learned scale on one rank": lambda: called(scale=torch.tensor(0.5) if dist.get_rank() == 2 else None),
    "another order on one rank": lambda: unordered(another_name_on_one_rank(), is_causal=True),
    "another order on one rank in a style": lambda: styled(style=unchecked(order=another_name_on_one_rank())),
    "another turn on one rank": lambda: unordered(another_turn_on_one_rank(), is_causal=True),
    "another turn on one rank in a style": lambda: styled(style=unchecked(order=another_turn_on_one_rank())),
    "no order on one rank": lambda: unordered(
        None if dist.get_rank() == 2 else w.TokenOrder("contiguous", mesh()), is_causal=True
    ),
    "shards to unshard in another order on one rank": lambda: w.unshard_sequence(
        x(), another_name_on_one_rank(), dim=2
    ),
    "another seed on one rank": lambda: w.SequenceSampler(range(9), mesh(), seed=dist.get_rank()),
}
REFUSALS |= DISAGREEMENTS
