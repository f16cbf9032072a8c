"""What is looked at on one GPU, a stage at a time: every one gives records, of which none must have an error.

On the CPU everything is small, so that the script itself can be tried where there is no GPU.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention.flex_attention import create_block_mask

from recipes.benchmarks.gpu.torch_ring import torch_ring
from recipes.benchmarks.memory.run import fake_world
from wallfacer_dt import TokenOrder, WallFacerParallel, context_mesh, context_parallel_attention, shard_sequence
from wallfacer_dt.algorithms.arithmetic import Backward, Forward, Operand, Scores
from wallfacer_dt.algorithms.masks import Mask
from wallfacer_dt.algorithms.segments import Work, plan_work
from wallfacer_dt.kernels import (
    CAUSAL,
    FULL,
    Band,
    BlockKernel,
    How,
    Need,
    accumulation_dtype,
    merge_,
    reference,
    select_kernel,
)
from wallfacer_dt.kernels.registry import names
from wallfacer_dt.layout import length_of
from wallfacer_dt.planning import Candidate, ModelShape, SequenceShape
from wallfacer_dt.planning.dry_run import attention_peaks
from wallfacer_dt.testing import RankPool, attention_oracle, worst_error

Record = dict[str, Any]
WORST = 4.0  # times the error of the reference kernel, which rounds once


@dataclass(frozen=True)
class Place:
    """Where it runs."""

    device: str

    @property
    def is_gpu(self) -> bool:
        """Whether it is a GPU; otherwise everything is small."""
        return self.device == "cuda"

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """That kernels are tried in."""
        return (torch.bfloat16, torch.float16) if self.is_gpu else (torch.float32,)

    def milliseconds(self, run: Callable[[], object], repeats: int = 20) -> float:
        """Median of some runs after three that do not count."""
        for _ in range(3):
            run()
        taken = []
        for _ in range(repeats if self.is_gpu else 3):
            self.wait()
            start = time.perf_counter()
            run()
            self.wait()
            taken.append(1e3 * (time.perf_counter() - start))
        return sorted(taken)[len(taken) // 2]

    def wait(self) -> None:
        """Until the device has nothing left to do."""
        if self.is_gpu:
            torch.cuda.synchronize()


def attempted(case: str, run: Callable[[], Record]) -> Record:
    """A record of what a case gave, or of what it raised."""
    try:
        return {"case": case} | run()
    except Exception as error:  # whatever it is, the next case is tried
        return {"case": case, "error": f"{type(error).__name__}: {str(error)[:500]}"}


def versions(place: Place) -> Iterator[Record]:
    """Of everything that computes."""
    packages = ("torch", "triton", "flash-attn", "flash_attn_3", "flash-attn-4")
    found: Record = {"case": "versions"}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    if place.is_gpu:
        found |= {
            "gpu": torch.cuda.get_device_name(),
            "capability": torch.cuda.get_device_capability(),
            "cuda": torch.version.cuda,
            "nccl": torch.cuda.nccl.version(),
        }
    yield found


SHAPES = [
    (256, 256, 4, 4, 128, 128), (200, 200, 8, 2, 64, 64), (333, 777, 6, 2, 80, 80), (129, 129, 4, 1, 20, 24),
    (1, 77, 8, 2, 64, 64), (300, 100, 4, 4, 64, 64), (128, 128, 3, 3, 192, 128), (65, 65, 2, 1, 256, 256),
]  # fmt: skip
BANDS = [FULL, CAUSAL, Band(0, None), Band(-40, 7), Band(-40, 0), Band(5, None), Band(None, -9), Band(0, 99)]


def kernels(place: Place) -> Iterator[Record]:
    """Every kernel that runs here, forward and backward, against float64; operands that are not aligned among them."""
    shapes, bands = (SHAPES, BANDS) if place.is_gpu else (SHAPES[1:6:3], BANDS[1:4])
    for name in names():
        for dtype in place.dtypes:
            for shape in shapes:
                for band in bands:
                    for masked, softcap in ((False, 0.0), (False, 5.0), (True, 0.0)):
                        case = f"{name} {dtype} {shape} {tuple(band)}{' mask' * masked}{' softcap' * bool(softcap)}"
                        yield attempted(
                            case, partial(_against_float64, place, name, dtype, shape, band, masked, softcap)
                        )


def _against_float64(
    place: Place, name: str, dtype: torch.dtype, shape: tuple[int, ...], band: Band, masked: bool, softcap: float
) -> Record:
    rows, columns, heads, kv_heads, head_dim, value_dim = shape
    torch.manual_seed(0)

    def drawn(n: int, length: int, dim: int) -> Tensor:
        room = torch.randn(2 * n * length * dim + 1, dtype=torch.float64).to(place.device, dtype)
        return room[1:].view(2, n, length, dim)  # at no multiple of 16 bytes

    q, grad_out = drawn(heads, rows, head_dim), drawn(heads, rows, value_dim)
    k, v = drawn(kv_heads, columns, head_dim), drawn(kv_heads, columns, value_dim)
    need = Need.of(q, v, masked=masked, softcap=softcap)
    try:
        kernel = select_kernel(name, need)
    except ValueError as refusal:
        return {"refused": str(refusal)}
    seen = torch.rand(rows, columns, device=place.device) < 0.7

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:  # noqa: ARG001  (as torch calls it)
        return seen[i, j]

    mask = create_block_mask(mask_mod, None, None, rows, columns, device=place.device) if masked else None
    how = How(band, 0.1, mask, softcap)
    q_64, k_64, v_64, grad_64 = (x.double() for x in (q, k, v, grad_out))
    out, lse = reference.forward(q_64, k_64, v_64, how)
    # Of the whole rows, which see more than this block.
    whole_lse = torch.logaddexp(lse, torch.randn_like(lse))
    whole_out = torch.randn_like(out).to(dtype)
    grads = reference.backward(grad_64, q_64, k_64, v_64, whole_out.double(), whole_lse, how)
    want = (out, lse, *grads)
    found = {}
    for each in (kernel, reference.KERNEL):
        given = whole_out, whole_lse.to(accumulation_dtype(dtype))
        found[each.name] = (
            *each.forward(q, k, v, how),
            *each.backward(grad_out, q, k, v, *given, how),
        )
    return _compared(found[kernel.name], found["reference"], want, dtype)


def segments(place: Place) -> Iterator[Record]:
    """Many segments in one call, of kernels that take them: documents, windows, rows of the batch that differ."""
    for name in names():
        for dtype in place.dtypes:
            for case, work, rows, columns in _works(900 if place.is_gpu else 60):
                for dim in (64, 128) if place.is_gpu else (8,):
                    yield attempted(
                        f"{name} {dtype} {case} {dim}",
                        partial(_segments, place, name, dtype, work, (rows, columns, dim)),
                    )


def _works(n: int) -> Iterator[tuple[str, Work, int, int]]:
    """What is computed, and of how many queries and keys."""
    short = (0, n // 9, n // 9 + 1, n // 2, n)
    whole, middle, around = np.array([[0, n]]), np.array([[n // 3, n // 2]]), np.array([[0, n // 3], [n // 2, n]])
    yield "documents", plan_work([whole], [whole], Mask(right=0, documents=(short,))), n, n
    rows = ((0, n // 5, n), (0, n // 2, n // 2 + 3, n))
    yield "rows that differ", plan_work([whole], [whole], Mask(right=0, documents=rows)), n, n
    window = Mask(left=n // 20, right=0, documents=(short,))
    yield "windows in documents", plan_work([whole], [whole], window), n, n
    yield "two sides", plan_work([whole], [whole], Mask(n // 20, n // 30, 0, (short,))), n, n
    full = Mask(documents=((0, n // 3 + 4, n // 2 + 4, n),))
    yield "others than these", plan_work([around], [middle], full), length_of(around), length_of(middle)
    yield "these of others", plan_work([middle], [around], full), length_of(middle), length_of(around)


def _segments(place: Place, name: str, dtype: torch.dtype, work: Work, sizes: tuple[int, int, int]) -> Record:
    rows, columns, dim = sizes
    torch.manual_seed(0)
    shapes = [(4, rows, dim), (2, columns, dim), (2, columns, dim), (4, rows, dim)]
    q, k, v, grad_out = (torch.randn(2, *shape).to(place.device, dtype) for shape in shapes)
    try:
        kernel = select_kernel(name, Need.of(q, v, masked=False, softcap=0.0))
    except ValueError as refusal:
        return {"refused": str(refusal)}
    want = _attended(reference.KERNEL, work, *(x.double() for x in (q, k, v, grad_out)))
    given = [x.to(accumulation_dtype(dtype)) for x in want[:2]]
    found = [_attended(each, work, q, k, v, grad_out, *given) for each in (kernel, reference.KERNEL)]
    calls = sum(call.calls if kernel.takes_segments else len(call.bands) for call in work)
    return _compared(found[0], found[1], want, dtype) | {"calls": calls}


def _attended(
    kernel: BlockKernel,
    work: Work,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_out: Tensor,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """out, lse, dq, dk and dv; the gradients from what is given of the first two."""
    scores, query = Scores(kernel, 0.1), Operand((q,))
    Forward(scores, v.shape[-1]).attend(query, Operand((k, v)), work)
    whole_out, whole_lse = (mine if x is None else x for mine, x in zip(query.partial, (out, lse), strict=True))
    behind = Operand((q, grad_out, whole_lse, (grad_out * whole_out).sum(-1)), out=whole_out.to(q.dtype))
    keys = Operand((k, v))
    Backward(scores).attend(behind, keys, work)
    return (*query.partial, *behind.partial, *keys.partial)


def _compared(
    got: tuple[Tensor, ...], best: tuple[Tensor, ...], want: tuple[Tensor, ...], dtype: torch.dtype
) -> Record:
    ratios = {}
    for name, *three in zip(("out", "lse", "dq", "dk", "dv"), got, best, want, strict=True):
        unseen = three[2] == -torch.inf
        if not unseen.equal(three[0] == -torch.inf):
            raise AssertionError(f"{name}: other rows see nothing")
        mine, its, exact = (x.double().masked_fill(unseen, 0) for x in three)
        worst_error([(mine, exact), (its, exact)])  # of one shape, and finite
        allowed = max(_rms(its - exact), torch.finfo(dtype).eps * max(_rms(exact), 0.1))
        ratios[name] = round(_rms(mine - exact) / allowed, 2)
    worst = max(ratios.values())
    if worst > WORST:
        raise AssertionError(f"errors of {ratios} times the reference's")
    return {"worst": worst}


def _error(found: Tensor, want: Tensor) -> float:
    """Root mean square of the difference over that of what is expected, of numbers that are finite."""
    worst_error([(found, want)])
    return _rms(found - want) / _rms(want)


def _rms(x: Tensor) -> float:
    return x.square().mean().sqrt().item()


def merging(place: Place) -> Iterator[Record]:
    """The merge of a partial result: right, and how long it takes beside plain operations."""
    rows = 8192 if place.is_gpu else 64
    for dtype in place.dtypes:
        yield attempted(f"{dtype} (1, 32, {rows}, 128)", partial(_merging, place, dtype, rows))


def _merging(place: Place, dtype: torch.dtype, rows: int) -> Record:
    torch.manual_seed(0)
    wide = accumulation_dtype(dtype)
    out, lse = (torch.randn(1, 32, rows, *more, device=place.device, dtype=wide) for more in ((128,), ()))
    more_out = torch.randn(1, rows, 32, 128, device=place.device).to(dtype).transpose(1, 2)
    more_lse = torch.randn_like(lse)
    more_lse[..., :7] = -torch.inf
    want_lse = torch.logaddexp(lse.double(), more_lse.double())
    parts = ((out, lse), (more_out, more_lse))
    want = sum((x.double() * (its.double() - want_lse).exp().unsqueeze(-1) for x, its in parts), torch.zeros(()))
    mine = out.clone(), lse.clone()
    merge_(*mine, more_out, more_lse)
    error = worst_error([(mine[0].double(), want)])
    if error > 64 * torch.finfo(wide).eps:
        raise AssertionError(f"error {error:.1e}")
    found = {"worst": error, "ms": place.milliseconds(lambda: merge_(*mine, more_out, more_lse))}
    with mock.patch("wallfacer_dt.kernels.merge._has_triton", return_value=False):
        found["plain ms"] = place.milliseconds(lambda: merge_(*mine, more_out, more_lse))
    return found


def _mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:  # noqa: ARG001
    return (q_idx // 200 == kv_idx // 200) | ((q_idx + kv_idx) % 7 == 0)


CALLS: dict[str, Record] = {
    "full": {},
    "causal": {"is_causal": True},
    "causal, head_tail": {"is_causal": True, "order": "head_tail"},
    "window": {"window_size": (90, 30)},
    "documents": {"is_causal": True, "document_ids": True},
    "mask_mod": {"mask_mod": _mask_mod},
    "sinks": {"is_causal": True, "sinks": True},
    "queries rotate": {"rotate": "q", "rotate_forward": "q"},
    "published": {"schedule": "published"},
}
MESHES = [{"ring": 4}, {"ring": 2, "team": 2}, {"team": 4}, {"ulysses": 2, "ring": 2}]


def ranks(place: Place) -> Iterator[Record]:
    """Attention on four processes that share the device, against one in float64; eager, and some compiled."""
    pool = RankPool(4, timeout=300)
    try:
        for axes in MESHES if place.is_gpu else MESHES[1:2]:
            for name in CALLS:
                if name != "published" or axes == MESHES[1]:
                    yield attempted(f"{axes} {name}", partial(_on_ranks, pool, place, axes, name, False))
        for name in ("causal, head_tail", "window") if place.is_gpu else ():
            yield attempted(f"compiled {name}", partial(_on_ranks, pool, place, MESHES[1], name, True))
    finally:
        pool.close()


def _on_ranks(pool: RankPool, place: Place, axes: Record, name: str, compiled: bool) -> Record:
    worst = max(pool.run(_on_rank, place, axes, name, compiled))
    if worst > 4:
        raise AssertionError(f"errors of {worst:.1f} roundings of a typical entry")
    return {"worst": round(worst, 2)}


def _on_rank(place: Place, axes: Record, name: str, compiled: bool) -> float:
    """The largest error of output and gradients, in roundings of a typical entry."""
    torch.manual_seed(0)
    dtype, length = place.dtypes[0], 1024 if place.is_gpu else 64
    q, k, v, grad_out = (torch.randn(1, n, length, 64).to(dtype) for n in (8, 2, 2, 8))
    options = dict(CALLS[name])
    mesh = context_mesh(place.device, **axes)
    order = TokenOrder(options.pop("order", "contiguous"), mesh)
    if "document_ids" in options:
        options["document_ids"] = (torch.arange(length) // 300).view(1, -1)
    if "sinks" in options:
        options["sinks"] = torch.randn(8)
    ways = {"rotate", "rotate_forward", "schedule"}
    exact = attention_oracle(q, k, v, grad_out, **{key: x for key, x in options.items() if key not in ways})
    if "sinks" in options:
        options["sinks"] = options["sinks"].to(place.device)
    mine = [shard_sequence(x.to(place.device), order, dim=2).requires_grad_() for x in (q, k, v)]
    attend: Callable[..., Tensor] = partial(context_parallel_attention, mesh=mesh, order=order, **options)
    if compiled:
        style = WallFacerParallel(layout="BNLH", check=False, order=order, **options)
        attend = torch.compile(parallelize_module(_Inner(), mesh, style), fullgraph=True)
    out = attend(*mine)
    out.backward(shard_sequence(grad_out.to(place.device), order, dim=2))
    unit = torch.finfo(dtype).eps if place.is_gpu else 1e-5
    grads = [x.grad for x in mine if x.grad is not None]
    found = (out.detach(), *grads)
    wanted = (shard_sequence(x, order, dim=2) for x in (exact.out, exact.dq, exact.dk, exact.dv))
    return max(_error(x.cpu().double(), want) / unit for x, want in zip(found, wanted, strict=True))


class _Inner(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # noqa: ARG002  (a style replaces it)
        raise AssertionError


def waiting(place: Place) -> Iterator[Record]:
    """That the host waits for the device nowhere in the loop: torch raises at the first such place."""
    for name in CALLS:
        if name not in ("published", "mask_mod"):
            yield attempted(name, partial(_waiting, place, name))


def _waiting(place: Place, name: str) -> Record:
    with fake_world(8, 1):
        mesh = context_mesh(place.device, 4, 2)
        options, length = dict(CALLS[name]), 256 if place.is_gpu else 8
        order = TokenOrder(options.pop("order", "contiguous"), mesh)
        if "document_ids" in options:
            options["document_ids"] = (torch.arange(8 * length) // 300).view(1, -1)
        if "sinks" in options:
            options["sinks"] = torch.randn(8, device=place.device)
        q, k, v = (_drawn(place, n, length).requires_grad_() for n in (8, 2, 2))

        def call() -> None:
            out = context_parallel_attention(q, k, v, mesh, order=order, **options)
            out.backward(torch.ones_like(out))

        call()
        if place.is_gpu:
            torch.cuda.set_sync_debug_mode("error")
        try:
            call()
        finally:
            if place.is_gpu:
                torch.cuda.set_sync_debug_mode("default")
    return {}


def loops(place: Place) -> Iterator[Record]:
    """One rank of a larger mesh, hops being copies at a given rate, beside one flash call of as much work."""
    rates = (None, 400, 100, 40) if place.is_gpu else (None,)
    meshes = [(4, 1), (8, 1), (4, 2), (2, 4), (16, 4)] if place.is_gpu else [(2, 2)]
    for ring, team in meshes:
        for rate in rates:
            yield attempted(f"ring {ring} x team {team}, hops at {rate} GB/s", partial(_loop, place, ring, team, rate))


def _loop(place: Place, ring: int, team: int, rate: float | None) -> Record:
    size, tokens = ring * team, 8192 if place.is_gpu else 16
    heads, kv_heads, dim = 32, 8, 128
    q, k, v = (_drawn(place, n, tokens, dim).requires_grad_() for n in (heads, kv_heads, kv_heads))
    grad_out = torch.randn_like(q)
    with fake_world(size, 1):
        mesh = context_mesh(place.device, ring, team)
        order = TokenOrder("head_tail", mesh)
        attend = partial(context_parallel_attention, q, k, v, mesh, is_causal=True, order=order)

        def both() -> None:
            attend().backward(grad_out)

        with _copying(rate) if place.is_gpu and rate else nullcontext():
            found = {"forward ms": place.milliseconds(attend), "ms": place.milliseconds(both)}
            if place.is_gpu and rate is None:
                found |= _launches_and_memory(both, ring, team, size * tokens)
            if place.is_gpu and rate is None and team == 1:
                theirs = torch_ring(q.detach(), k.detach(), v.detach(), grad_out, mesh["cp_ring"])
                found |= {
                    f"torch's ring, {name}": place.milliseconds(run)
                    for name, run in zip(("forward ms", "ms"), theirs, strict=True)
                }
    # As many pairs: head-tail's tokens see half of the sequence.
    half = max(1, size * tokens // 2)
    key, value = (_drawn(place, kv_heads, half, dim).requires_grad_() for _ in range(2))

    def alone() -> Tensor:
        return F.scaled_dot_product_attention(q, key, value, enable_gqa=True)

    found["one call, forward ms"] = place.milliseconds(alone)
    found["one call, ms"] = place.milliseconds(lambda: alone().backward(grad_out))
    return {name: round(x, 3) for name, x in found.items()}


def _launches_and_memory(both: Callable[[], None], ring: int, team: int, length: int) -> Record:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    both()
    host = 1e3 * (time.perf_counter() - start)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        both()
        torch.cuda.synchronize()
    shape, sequence = ModelShape(32 * 128, 32, 8), SequenceShape(length, is_causal=True)
    ways = [Candidate(ring, team, order="head_tail", rotate=rotate) for rotate in ("kv", "q")]
    peaks = [attention_peaks(way, shape, sequence, 1, by_tokens=False) for way in ways]
    return {
        "host ms": host,
        "launches": len([event for event in profile.events() or () if event.device_type.name == "CUDA"]),
        "peak MiB": peak / 2**20,
        "planner, MiB": min(peak.backward for peak in peaks) / 2**20,
    }


@contextmanager
def _copying(rate: float) -> Iterator[None]:
    """Collectives as copies on a stream of their own, with as long a sleep as they would take at GB/s."""
    side, pending = torch.cuda.Stream(), {}
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(10**6)  # the first one loads it
    begin.record()
    torch.cuda._sleep(10**8)
    end.record()
    torch.cuda.synchronize()
    cycles = 10**8 / begin.elapsed_time(end)  # of a millisecond

    def start(buffer: Tensor, elements: int) -> Tensor:
        out = buffer.new_empty(elements)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(int(elements * buffer.itemsize / rate / 1e6 * cycles))
            out.copy_(buffer[:1].expand(elements) if elements > buffer.numel() else buffer[:elements])
            done = torch.cuda.Event()
            done.record()
        for x in (buffer, out):
            x.record_stream(side)
        pending[out.data_ptr()] = done
        return out

    def wait(x: Tensor) -> Tensor:
        torch.cuda.current_stream().wait_event(pending.pop(x.data_ptr()))
        return x

    copies = SimpleNamespace(
        all_gather_into_tensor=lambda buffer, size, _: start(buffer, buffer.numel() * size),
        all_to_all_single=lambda buffer, received, *_: start(buffer, sum(received)),
        wait_tensor=wait,
    )
    with mock.patch("wallfacer_dt.collectives.functional._ops", copies):
        yield


def training(place: Place) -> Iterator[Record]:
    """A few steps of the recipe that trains on bytes."""

    def run() -> Record:
        sizes = ["--sequence", "16384", "--dim", "512"] if place.is_gpu else ["--sequence", "256", "--batch", "1"]
        command = [sys.executable, "-m", "recipes.train_bytes", "train", "--steps", "4", *sizes]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        if done.returncode:
            raise AssertionError(done.stderr[-400:])
        return {"said": done.stdout.strip().splitlines()[-1]}

    yield attempted("recipes.train_bytes, 4 steps", run)


def _drawn(place: Place, heads: int, length: int, dim: int = 64) -> Tensor:
    return torch.randn(1, heads, length, dim, device=place.device).to(place.dtypes[0])


def nccl(place: Place) -> Iterator[Record]:
    """One rank of NCCL: whole calls, and what is sent when nobody else holds it any more."""
    if not place.is_gpu:
        return

    def run() -> Record:
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
        try:
            mesh = context_mesh("cuda", 1, 1)
            q = _drawn(place, 8, 512).requires_grad_()
            out = context_parallel_attention(q, q, q, mesh, is_causal=True)
            out.sum().backward()
            want = F.scaled_dot_product_attention(q, q, q, is_causal=True)
            error = _error(out.detach().double(), want.detach().double())
            if error > 2**-7:
                raise AssertionError(f"error {error:.1e}")
            return {"worst": error}
        finally:
            dist.destroy_process_group()

    yield attempted("one rank", run)


STAGES: dict[str, tuple[Callable[[Place], Iterator[Record]], int]] = {
    "versions": (versions, 60),
    "kernels": (kernels, 240),
    "segments": (segments, 90),
    "merging": (merging, 90),
    "ranks": (ranks, 240),
    "waiting": (waiting, 90),
    "nccl": (nccl, 60),
    "loops": (loops, 180),
    "training": (training, 150),
}
"""In this order, with seconds."""
