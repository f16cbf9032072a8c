"""Stages on one GPU, one after the other: records, their page, the timer, and short stages.

Each runs in a process of its own, since an error of CUDA spoils a process. Records are written as they come, so that
what was cut off keeps what it had; ``--device cpu`` tries a script itself.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import date
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from recipes.benchmarks.report import commit, machine
from wallfacer_dt.kernels.merge import accumulation_dtype, merge_

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
        taken = []
        for _ in range(23 if self.is_gpu else 6):
            self.wait()
            start = time.perf_counter()
            run()
            self.wait()
            taken.append(1e3 * (time.perf_counter() - start))
        return statistics.median(taken[3:])

    def wait(self) -> None:
        """Until the device has nothing left to do."""
        if self.is_gpu:
            torch.cuda.synchronize()

    def drawn(self, heads: int, length: int, dim: int = 64) -> Tensor:
        """One (1, heads, length, dim) that needs a gradient."""
        return torch.randn(1, heads, length, dim, device=self.device).to(self.dtypes[0]).requires_grad_()


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
    parser = argparse.ArgumentParser(prog=f"python -m {module}")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="Folder of what is found.")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try the script.")
    parser.add_argument("--stage", default="", help="Only this one, in this process.")
    given = parser.parse_args()
    file = given.out / f"{module}.jsonl"
    if given.stage:
        for case in stages[given.stage][0](Place(given.device)):
            record(file, given.stage, attempted(*case))
        return 0
    given.out.mkdir(parents=True, exist_ok=True)
    file.write_text("")
    for name, (_, seconds) in stages.items():
        command = [sys.executable, "-m", module, "--stage", name, "--out", str(given.out), "--device", given.device]
        try:
            if code := subprocess.run(command, timeout=seconds, check=False).returncode:
                record(file, name, {"case": "the stage", "error": f"ended with {code}"})
        except subprocess.TimeoutExpired:
            record(file, name, {"case": "the stage", "error": f"cut off after {seconds:.0f} s"})
        file.with_suffix(".md").write_text(page(file, stages))
    print(text := page(file, stages))
    return int("**" in text)


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
        lines.append(f"## {stage}\n\n{len(mine)} cases, {len(failed)} failed, {len(refused)} refused.\n")
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
    packages = ("torch", "triton", "flash-attn", "flash_attn_3", "flash-attn-4")
    found: Record = {}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    if place.is_gpu:
        found |= {"gpu": torch.cuda.get_device_name(), "capability": torch.cuda.get_device_capability()}
        found |= {"cuda": torch.version.cuda, "nccl": torch.cuda.nccl.version()}
    yield "versions", lambda: found


def merging(place: Place) -> Cases:
    """The merge of a partial result, beside plain operations."""
    rows = 8192 if place.is_gpu else 64
    for dtype in place.dtypes:
        yield f"{dtype} (1, 32, {rows}, 128)", partial(_merging, place, dtype, rows)


def _merging(place: Place, dtype: torch.dtype, rows: int) -> Record:
    out, lse = (
        torch.randn(1, 32, rows, *dim, device=place.device, dtype=accumulation_dtype(dtype)) for dim in ((128,), ())
    )
    more = torch.randn(1, rows, 32, 128, device=place.device).to(dtype).transpose(1, 2), torch.randn_like(lse)
    found = {"ms": place.milliseconds(lambda: merge_(out, lse, *more))}
    with mock.patch("wallfacer_dt.kernels.merge._has_triton", return_value=False):
        return found | {"plain ms": place.milliseconds(lambda: merge_(out, lse, *more))}


def training(place: Place) -> Cases:
    """A few steps of the recipe that trains on bytes."""

    def run() -> Record:
        sizes = ["--sequence", "16384", "--dim", "512"] if place.is_gpu else ["--sequence", "256", "--batch", "1"]
        command = [sys.executable, "-m", "recipes.train_bytes", "train", "--steps", "4", *sizes]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        if done.returncode:
            raise AssertionError(done.stderr[-400:])
        return {"said": done.stdout.strip().splitlines()[-1]}

    yield "recipes.train_bytes, 4 steps", run
