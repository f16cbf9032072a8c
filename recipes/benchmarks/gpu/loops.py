"""One rank's loop on one device: how long it takes with hops that are copies, beside one call of as much work."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel import _attention as torch_cp

from recipes.benchmarks.gpu.stages import Cases, Place, Record
from wallfacer_dt import ModelShape, SequenceShape, TokenOrder, context_mesh, context_parallel_attention
from wallfacer_dt.kernels.block import FULL, BlockKernel, How, Need
from wallfacer_dt.kernels.registry import select_kernel
from wallfacer_dt.planning import Candidate
from wallfacer_dt.planning.dry_run import attention_peaks
from wallfacer_dt.testing.fake import fake_world

_KERNELS = "flash", "cudnn", "flash_attn", "flash_attn_3", "flash_attn_4"


def loops(place: Place) -> Cases:
    """One rank of a larger mesh, hops at a rate or, as in torch's own ring, for nothing; beside one kernel call."""
    meshes = [(4, 1), (8, 1), (4, 2), (2, 4), (16, 4)] if place.is_gpu else [(2, 2)]
    for kernel in _KERNELS if place.is_gpu else _KERNELS[:1]:
        for ring, team in meshes if kernel == "flash" else meshes[1:3]:
            for rate in (None, 400, 100, 40) if place.is_gpu and kernel == "flash" else (None,):
                for priority in (0, -1) if rate and ring == 8 else (0,):
                    case = f"{kernel}, ring {ring} x team {team}, hops at {rate} GB/s" + ", first" * -priority
                    yield case, partial(_loop, place, kernel, ring, team, rate, priority)
    for ring in (4, 8) if place.is_gpu else ():
        yield f"torch's ring of {ring}", partial(_torch_ring, place, ring)


def _loop(place: Place, kernel: str, ring: int, team: int, rate: float | None, priority: int) -> Record:
    size, tokens = ring * team, 8192 if place.is_gpu else 16
    q, k, v = (place.drawn(n, tokens, 128) for n in (32, 8, 8))
    try:
        one = select_kernel(kernel, Need.of(q, v, masked=False, softcap=0.0))
    except ValueError as refusal:
        return {"refused": str(refusal)}
    grad_out = torch.randn_like(q)
    with fake_world(size, 1):
        mesh = context_mesh(place.device, ring, team)
        order = TokenOrder("head_tail", mesh)
        attend = partial(context_parallel_attention, q, k, v, mesh, is_causal=True, order=order, kernel=kernel)

        def both() -> None:
            attend().backward(grad_out)

        with _copying(rate, priority) if place.is_gpu and rate else nullcontext():
            found = {"forward ms": place.milliseconds(attend), "ms": place.milliseconds(both)}
        if place.is_gpu and rate is None:
            found |= _launches_and_memory(both, ring, team, size * tokens, sum(x.nbytes for x in (q, k, v, grad_out)))
    return {name: round(x, 3) for name, x in (found | _one_call(place, one, size * tokens // 2, tokens)).items()}


@cache
def _one_call(place: Place, kernel: BlockKernel, length: int, rows: int) -> Record:
    """As many pairs: head-tail's tokens see half of the sequence."""
    q, k, v = (place.drawn(n, max(1, size), 128).detach() for n, size in ((32, rows), (8, length), (8, length)))
    grad_out, how = torch.randn_like(q), How(FULL, 128**-0.5)

    def both() -> None:
        out, lse = kernel.forward(q, k, v, how)
        kernel.backward(grad_out, q, k, v, out, lse, how)

    forward = place.milliseconds(lambda: kernel.forward(q, k, v, how))
    return {"one call, forward ms": forward, "one call, ms": place.milliseconds(both)}


def _launches_and_memory(both: Callable[[], None], ring: int, team: int, length: int, given: int) -> Record:
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
    ways = {rotate: Candidate(ring, team, order="head_tail", rotate=rotate) for rotate in ("kv", "q")}
    peaks = {rotate: attention_peaks(way, shape, sequence, 1, by_tokens=True).most for rotate, way in ways.items()}
    return {
        "host ms": host,
        "launches": len([event for event in profile.events() or () if event.device_type.name == "CUDA"]),
        "peak MiB": peak / 2**20,
        **{f"planner, {rotate} rotates, MiB": (most - given) / 2**20 for rotate, most in peaks.items()},
    }


@contextmanager
def _copying(rate: float, priority: int) -> Iterator[None]:
    """Collectives as copies on a stream of their own, with as long a sleep as they would take at GB/s."""
    side, pending = torch.cuda.Stream(priority=priority), {}
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


def _torch_ring(place: Place, size: int) -> Record:
    """Torch's own causal ring attention, head and tail dealt out, hop by hop; private, run on torch 2.11.0."""
    torch_cp.set_rotate_method("alltoall")
    torch_cp._cp_options.enable_load_balance = True
    q, k, v = (place.drawn(n, 8192, 128).detach() for n in (32, 8, 8))
    grad_out = torch.randn_like(q)

    @torch.no_grad()
    def forward() -> Any:
        return torch_cp._scaled_dot_product_ring_flash_attention(mesh, q, k, v, is_causal=True)

    @torch.no_grad()
    def both() -> object:
        out, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = forward()
        return torch_cp._scaled_dot_product_ring_flash_attention_backward(
            mesh, grad_out, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, 0.0, True, seed, offset
        )

    with fake_world(size, 1):
        mesh = context_mesh(place.device, size, 1)["cp_ring"]
        return {"forward ms": round(place.milliseconds(forward), 3), "ms": round(place.milliseconds(both), 3)}
