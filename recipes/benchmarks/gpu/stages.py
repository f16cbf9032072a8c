"""Stages on one GPU, one after the other or at once: records, their page, the timer, and versions.

Each runs in a process of its own, since an error of CUDA spoils a process. Records are written as they come, so that
what was cut off keeps what it had; ``--device cpu`` tries a script itself. Only torch and numpy need be there.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recipes.benchmarks.report import commit, machine

Record = dict[str, Any]


class Place(NamedTuple):
    """The device; on the CPU everything is small, so that a script itself can be tried where there is no GPU."""

    device: str

    @property
    def is_gpu(self) -> bool:
        """Whether it is one."""
        return self.device == "cuda"

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """That kernels are tried in."""
        return (torch.bfloat16, torch.float16) if self.is_gpu else (torch.float32,)

    def milliseconds(self, run: Callable[[], object]) -> float:
        """Median of some runs after three that do not count."""
        taken, wait = [], torch.cuda.synchronize if self.is_gpu else int
        for _ in range(23 if self.is_gpu else 6):
            wait()
            start = time.perf_counter()
            run()
            wait()
            taken.append(1e3 * (time.perf_counter() - start))
        return statistics.median(taken[3:])

    def drawn(self, heads: int, length: int, dim: int = 64) -> Tensor:
        """One (1, heads, length, dim) that needs a gradient, in memory by tokens as a projection leaves it."""
        x = torch.randn(1, length, heads, dim, device=self.device).to(self.dtypes[0])
        return x.transpose(1, 2).requires_grad_()


Cases = Iterator[tuple[str, Callable[[], Record]]]
"""Names, and what is done; an error is what it raises."""
Stages = Mapping[str, tuple[Callable[[Place], Cases], int]]
"""In their order, with the seconds after which each is cut off."""


def attempted(case: str, run: Callable[[], Record]) -> Record:
    """A record of what a case gave, or of what it raised."""
    try:
        return {"case": case} | run()
    except Exception as error:  # whatever it is, the next case is tried
        return {"case": case, "error": f"{type(error).__name__}: {str(error)[:500]}"}


def main(module: str, stages: Stages) -> int:
    """Run a module's stages from its command line, write records and a page; 1 if a case failed."""
    stages = {"versions": (versions, 30), **stages}  # what all that follows was found on
    parser = argparse.ArgumentParser(prog=f"python -m {module}")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="Folder of what is found.")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try the script.")
    parser.add_argument("--seconds", type=float, default=1200, help="All stages end within so many.")
    parser.add_argument("--at-once", action="store_true", help="All stages beside each other: numbers, no times.")
    parser.add_argument("--stage", choices=stages, help="Only this one, in this process, beside earlier records.")
    given = parser.parse_args()
    end = time.monotonic() + given.seconds
    given.out.mkdir(parents=True, exist_ok=True)
    file = given.out / f"{module}.jsonl"
    if given.stage:
        for case in stages[given.stage][0](Place(given.device)):
            record(file, given.stage, attempted(*case))
        file.with_suffix(".md").write_text(page(file, stages))
        return 0
    file.write_text("")
    for ended in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ended, lambda *_: sys.exit(143))  # so that its stage ends with it
    command = [sys.executable, "-m", module, "--out", str(given.out), "--device", given.device, "--stage"]
    for names in [[*stages]] if given.at_once else [[name] for name in stages]:
        limits = {name: min(stages[name][1], end - time.monotonic()) for name in names}
        for name, error in _ended(command, limits):
            record(file, name, {"case": "the stage", "error": error})
        file.with_suffix(".md").write_text(page(file, stages))
    print(text := page(file, stages))
    return int("**" in text)


def _ended(command: list[str], limits: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    """Run stages beside each other, and end each with all that it started; what is to be said of how they ended."""
    start, running = time.monotonic(), {}
    try:
        for name, seconds in limits.items():
            if seconds > 0:
                running[name] = subprocess.Popen([*command, name], start_new_session=True)
            else:
                yield name, "not run, for want of time"
        for name, seconds in [(name, limits[name]) for name in running]:
            try:
                if code := running[name].wait(max(0, start + seconds - time.monotonic())):
                    yield name, f"ended with {code}"
            except subprocess.TimeoutExpired:
                yield name, f"cut off after {seconds:.0f} s; what would follow was not run"
            _end(running.pop(name))
    finally:
        for process in running.values():
            _end(process)


def _end(process: subprocess.Popen) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def record(file: Path, stage: str, found: Record) -> None:
    """Append a record."""
    with file.open("a") as lines:
        lines.write(json.dumps({"stage": stage, **found}, default=str) + "\n")


def page(file: Path, stages: Stages) -> str:
    """The records as a page in Markdown; of very many cases the worst."""
    records = [json.loads(line) for line in file.read_text().splitlines()]
    lines = [f"# One GPU\n\n{date.today()}, commit {commit()}, {machine()}.\n"]
    for stage in stages:
        mine = [found for found in records if found["stage"] == stage]
        failed = [found for found in mine if "error" in found]
        refused = [found for found in mine if "refused" in found]
        lines.append(f"## {stage}\n\n{stages[stage][0].__doc__}\n")
        lines.append(f"{len(mine)} cases, {len(failed)} failed, {len(refused)} refused.\n")
        lines += [f"- **{found['case']}**: {found['error']}" for found in failed]
        shown = [found for found in mine if found not in failed and found not in refused]
        if len(shown) > 50:
            shown = sorted(shown, key=lambda found: -found["worst"])[:5]
        for found in shown:
            named = [(name, x) for name, x in found.items() if name not in ("stage", "case")]
            values = (f"{name} {f'{x:.3g}' if isinstance(x, float) else x}" for name, x in named)
            lines.append(f"- {found['case']}: {', '.join(values) or 'right'}")
        lines.append("")
    return "\n".join(lines)


def versions(place: Place) -> Cases:
    """Of everything that computes."""
    found: Record = {"commit": commit(), "machine": machine()}
    if place.is_gpu:
        driver = Path("/proc/driver/nvidia/version")
        found |= {"gpu": torch.cuda.get_device_name(), "capability": torch.cuda.get_device_capability()}
        found |= {"driver": driver.read_text().split("\n")[0] if driver.exists() else "?", "cuda": torch.version.cuda}
    names = ("torch", "triton", "numpy", "flash", "nvidia")  # cuDNN and NCCL are NVIDIA's
    found |= {x.name: x.version for x in metadata.distributions() if str(x.name).lower().startswith(names)}
    yield "versions", lambda: found
