"""Whole calls on one device: four processes that share it, one rank of NCCL, no waiting hosts, training."""

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from recipes.benchmarks.gpu.stages import Cases, Place, Record
from recipes.train_bytes.model import ByteGPT, ModelConfig
from tests.cases import rms
from tests.gpu.kernels import WORST
from wallfacer_dt import (
    METPAttentionParallel,
    METPParallel,
    TokenOrder,
    WallFacerParallel,
    context_mesh,
    context_parallel_attention,
    sequence_positions,
    shard_sequence,
)
from wallfacer_dt.kernels.block import HALF, Need
from wallfacer_dt.kernels.registry import select_kernel
from wallfacer_dt.testing import RankPool, attention_oracle
from wallfacer_dt.testing.fake import fake_world


def _mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx // 200 == kv_idx // 200) | ((q_idx + kv_idx) % 7 == 0)


CALLS: dict[str, Record] = {
    "full": {},
    "causal": {"is_causal": True},
    "causal, head_tail": {"is_causal": True, "order": "head_tail"},
    "window": {"window_size": (90, 30)},
    "documents": {"is_causal": True, "document_ids": True},
    "documents, window": {"is_causal": True, "document_ids": True, "window_size": (200, 0), "order": "head_tail"},
    "mask_mod": {"mask_mod": _mask_mod},
    "sinks": {"is_causal": True, "sinks": True},
    "queries rotate": {"rotate": "q", "rotate_forward": "q"},
    "published": {"schedule": "published"},
}
_HEAD_DIM = 64
KERNELS = ("cudnn", "flash_attn", "flash_attn_3", "flash_attn_4")
"""By name, where they are; all other calls leave the choice to ``auto``."""
MESHES = [{"ring": 4}, {"ring": 2, "team": 2}, {"team": 4}, {"ulysses": 2, "ring": 2}]


def ranks(place: Place) -> Cases:
    """Attention on four ranks that share the device, against one in float64; eager, and some compiled.

    Threads, and processes where no team gathers: gloo does not gather what is on a GPU.
    """
    for threads in (True, False):
        pool = RankPool(4, timeout=300, threads=threads)
        try:
            for axes in MESHES if place.is_gpu else MESHES[1:3]:
                for name in CALLS if threads or "team" not in axes else ():
                    if name != "published" or axes == MESHES[1]:
                        yield f"{axes} {name}", partial(_on_ranks, _on_rank, pool, place, axes, name, threads)
            for name in ("causal, head_tail", "window") if place.is_gpu and not threads else ():
                yield f"compiled {name}", partial(_on_ranks, _on_rank, pool, place, MESHES[3], name, False, True)
            if threads:
                for kernel in KERNELS:
                    for name in ("full", "causal, head_tail", "window", "documents", "documents, window"):
                        case = f"{MESHES[1]} {name}, by {kernel}"
                        yield case, partial(_by_kernel, pool, place, MESHES[1], name, kernel)
                yield "a model with METP", partial(_on_ranks, _model_on_rank, pool, place)
        finally:
            pool.close()


def _on_ranks(run: Callable[..., float], pool: RankPool, *case: Any) -> Record:
    worst = max(pool.run(run, *case))
    if worst > WORST:
        raise AssertionError(f"errors of {worst:.1f} where {WORST} are allowed")
    return {"worst": round(worst, 2)}


def _by_kernel(pool: RankPool, place: Place, axes: Record, name: str, kernel: str) -> Record:
    """On threads, unless it refuses such calls."""
    q = torch.empty(1, 1, 1, _HEAD_DIM, device=place.device, dtype=place.dtypes[0])
    try:
        select_kernel(kernel, Need.of(q, q, masked=False, softcap=0.0))
    except ValueError as refusal:
        return {"refused": str(refusal)}
    return _on_ranks(_on_rank, pool, place, axes, name, True, False, kernel)


def _on_rank(
    place: Place, axes: Record, name: str, threads: bool, compiled: bool = False, kernel: str = "auto"
) -> float:
    """The largest error of output and gradients, in roundings of a typical entry."""
    torch.manual_seed(0)
    dtype, length = place.dtypes[0], 1024 if place.is_gpu else 64
    q, k, v, grad_out = (torch.randn(2, n, length, _HEAD_DIM).to(dtype) for n in (8, 2, 2, 8))
    mesh = context_mesh(place.device, **axes)
    order, options = _options(name, mesh, length)
    options["kernel"] = kernel
    ways = {"rotate", "rotate_forward", "schedule", "kernel"}
    exact = attention_oracle(q, k, v, grad_out, **{key: x for key, x in options.items() if key not in ways})
    if "sinks" in options:
        options["sinks"] = options["sinks"].to(place.device)
    mine = [shard_sequence(x.to(place.device), order, dim=2).requires_grad_() for x in (q, k, v)]
    attend: Callable[..., Tensor] = partial(context_parallel_attention, mesh=mesh, order=order, **options)
    if compiled:
        style = WallFacerParallel(layout="BNLH", check=False, order=order, **options)
        attend = torch.compile(parallelize_module(_Inner(), mesh, style), fullgraph=True)
    out = attend(*mine)
    # Of a device autograd's own thread otherwise, which is no rank among threads.
    with torch.autograd.set_multithreading_enabled(not threads):
        out.backward(shard_sequence(grad_out.to(place.device), order, dim=2))
    unit = torch.finfo(dtype).eps if place.is_gpu else 1e-5
    found = (out.detach(), *(x.grad for x in mine if x.grad is not None))
    wanted = (shard_sequence(x, order, dim=2) for x in (exact.out, exact.dq, exact.dk, exact.dv))
    return max(_error(x.cpu().double(), want) / unit for x, want in zip(found, wanted, strict=True))


@torch.autograd.set_multithreading_enabled(False)
def _model_on_rank(place: Place) -> float:
    """The largest error of a gradient of a model with METP, over that of the model in one process."""
    exact, whole = _gradients(place, None), _gradients(place, place.dtypes[0])
    with_metp = _gradients(place, place.dtypes[0], mesh=context_mesh(place.device, 2, 2))
    assert with_metp.keys() == exact.keys()
    return max(_error(with_metp[name], x) / max(_error(whole[name], x), 1e-6) for name, x in exact.items())


def _gradients(place: Place, dtype: torch.dtype | None, mesh: DeviceMesh | None = None) -> dict[str, Tensor]:
    """Of the loss by every parameter, in float32 or, under autocast, in a dtype; styles prove themselves."""
    torch.manual_seed(0)
    model = ByteGPT(ModelConfig(dim=256, layers=2, heads=8, kv_heads=4)).to(place.device)
    tokens = torch.randint(256, (1, 513 if place.is_gpu else 65)).to(place.device)
    given, wanted, positions = tokens[:, :-1], tokens[:, 1:], torch.arange(tokens.shape[1] - 1, device=place.device)
    with torch.autocast(place.device, dtype or torch.bfloat16, enabled=dtype in HALF):
        if mesh is not None:
            order = TokenOrder("head_tail", mesh)
            inner = WallFacerParallel(is_causal=True, order=order)
            names = {name: name for name in ("query", "key", "value", "output")}
            attention = METPAttentionParallel(**names, head_dim=32, rotary="half", attention=inner)
            feed_forward = METPParallel(up="up", gate="gate", down="down", activation="silu")
            plan = {"layers.*.attention": attention, "layers.*.feed_forward": feed_forward}
            model = parallelize_module(model, mesh, plan, src_data_rank=None)
            given, wanted = (shard_sequence(x, order, dim=1) for x in (given, wanted))
            positions = sequence_positions(len(positions), order)
        logits = model(given, positions)
    logits.float().log_softmax(-1).gather(-1, wanted.unsqueeze(-1)).sum().backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    shared = {name for name, grad in grads.items() if isinstance(grad, DTensor)}
    assert len(shared) == (0 if mesh is None else 14), "two layers with seven weights of METP's each"
    for name, grad in grads.items():  # in one order on all ranks
        if mesh is not None and name not in shared:
            dist.all_reduce(grad)
    return {name: (grad.full_tensor() if name in shared else grad).double() for name, grad in grads.items()}


def _options(name: str, mesh: Any, length: int) -> tuple[TokenOrder, Record]:
    """The order and options of a call, tensors among them on the CPU."""
    options = dict(CALLS[name])
    order = TokenOrder(options.pop("order", "contiguous"), mesh)
    if "document_ids" in options:
        options["document_ids"] = torch.arange(length) * 1024 // length // torch.tensor([[300], [170]])
    if "sinks" in options:
        options["sinks"] = torch.randn(8)
    return order, options


class _Inner(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise AssertionError


def waiting(place: Place) -> Cases:
    """That the host waits for the device nowhere in the loop: torch raises at the first such place."""
    for name in CALLS:
        if name != "published":
            yield name, partial(_waiting, place, name)


def _waiting(place: Place, name: str) -> Record:
    with fake_world(8, 1):
        mesh, length = context_mesh(place.device, 4, 2), 256 if place.is_gpu else 8
        order, options = _options(name, mesh, 8 * length)
        if "sinks" in options:
            options["sinks"] = options["sinks"].to(place.device)
        q, k, v = (place.drawn(n, length).repeat(2, 1, 1, 1) for n in (8, 2, 2))
        # The first call may wait: it compiles kernels.
        for mode in ("default", "error"):
            if place.is_gpu:
                torch.cuda.set_sync_debug_mode(mode)
            try:
                out = context_parallel_attention(q, k, v, mesh, order=order, **options)
                out.backward(torch.ones_like(out))
            finally:
                if place.is_gpu:
                    torch.cuda.set_sync_debug_mode("default")
    return {}


def nccl(place: Place) -> Cases:
    """One rank of NCCL: whole calls, and what is sent when nobody else holds it any more."""
    if place.is_gpu:
        yield "one rank", partial(_one_rank, place)


def _one_rank(place: Place) -> Record:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
    try:
        q = place.drawn(8, 512)
        out = context_parallel_attention(q, q, q, context_mesh("cuda", 1, 1), is_causal=True)
        out.sum().backward()
        want = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        error = _error(out.detach().double(), want.detach().double())
        if error > 2**-7:
            raise AssertionError(f"error {error:.1e}")
        return {"worst": error}
    finally:
        dist.destroy_process_group()


def training(place: Place) -> Cases:
    """A few steps of the recipe that trains on bytes, where its command line can be read."""

    def run() -> Record:
        if find_spec("typer") is None:
            return {"refused": "the recipe needs typer, which is not installed"}
        sizes = ["--sequence", "16384", "--dim", "512"] if place.is_gpu else ["--sequence", "256", "--batch", "1"]
        command = [sys.executable, "-m", "recipes.train_bytes", "train", "--steps", "4", *sizes]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise AssertionError(done.stderr[-400:])
        return {"said": done.stdout.strip().splitlines()[-1]}

    yield "recipes.train_bytes, 4 steps", run


def _error(found: Tensor, want: Tensor) -> float:
    return rms(found, want) / rms(want)
