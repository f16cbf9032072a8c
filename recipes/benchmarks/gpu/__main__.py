"""Everything that only a GPU can show, on one of them, in at most 20 minutes.

    python -m recipes.benchmarks.gpu --out runs/gpu

Stages run one after the other, each in a process of its own, since an error of CUDA spoils a process. Records are
written as they come, so that what was cut off keeps what it had; ``--device cpu`` tries the script itself.
"""

import json
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import torch
import typer

from recipes.benchmarks.attention import commit
from recipes.benchmarks.gpu.stages import STAGES, Place, Record

SECONDS = 20 * 60


def record(out: Path, stage: str, found: Record) -> None:
    """Append a record."""
    with (out / "records.jsonl").open("a") as file:
        file.write(json.dumps({"stage": stage, **found}, default=str) + "\n")


def shown_as(x: object) -> str:
    """A value for the page."""
    return f"{x:.3g}" if isinstance(x, float) else str(x)


def page(out: Path) -> str:
    """The records as a page in Markdown."""
    records = [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]
    lines = [f"# One GPU\n\n{datetime.now(UTC):%Y-%m-%d}, commit {commit()}, torch {torch.__version__}.\n"]
    for stage in STAGES:
        mine = [found for found in records if found["stage"] == stage]
        failed = [found for found in mine if "error" in found]
        refused = sum("refused" in found for found in mine)
        lines.append(f"## {stage}\n\n{len(mine)} cases, {len(failed)} failed, {refused} refused.\n")
        lines += [f"- **{found['case']}**: {found['error']}" for found in failed]
        shown = [found for found in mine if "error" not in found and "refused" not in found]
        if stage in ("kernels", "segments"):
            shown = sorted(shown, key=lambda found: -found["worst"])[:5]
        for found in shown:
            values = ", ".join(f"{name} {shown_as(x)}" for name, x in found.items() if name not in ("stage", "case"))
            lines.append(f"- {found['case']}: {values or 'right'}")
        lines.append("")
    return "\n".join(lines)


def main(
    out: Annotated[Path, typer.Option(help="Folder of what is found.")] = Path("runs/gpu"),
    device: Annotated[str, typer.Option(help="cuda, or cpu to try the script.")] = "cuda",
    stage: Annotated[str, typer.Option(help="Only this one, in this process.")] = "",
) -> None:
    """Run the stages, write records and a page, and fail if a case did."""
    out.mkdir(parents=True, exist_ok=True)
    if stage:
        for found in STAGES[stage][0](Place(device)):
            record(out, stage, found)
        return
    (out / "records.jsonl").unlink(missing_ok=True)
    end = time.monotonic() + SECONDS
    for name, (_, limit) in STAGES.items():
        seconds = min(limit, end - time.monotonic())
        command = [sys.executable, "-m", "recipes.benchmarks.gpu"]
        command += ["--out", str(out), "--device", device, "--stage", name]
        try:
            code = subprocess.run(command, timeout=max(1.0, seconds), check=False).returncode
            if code:
                record(out, name, {"case": "the stage", "error": f"ended with {code}"})
        except subprocess.TimeoutExpired:
            record(out, name, {"case": "the stage", "error": f"cut off after {seconds:.0f} s"})
        (out / "page.md").write_text(page(out))
    text = (out / "page.md").read_text()
    print(text)
    raise typer.Exit(int("**" in text))


if __name__ == "__main__":
    typer.run(main)
