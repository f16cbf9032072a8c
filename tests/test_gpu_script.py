"""That the scripts for a GPU have no mistakes of their own: their stages on the CPU, in small."""

import json
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recipes.benchmarks.gpu.__main__ import STAGES
from recipes.benchmarks.gpu.stages import Place, attempted, page, record, versions
from tests.gpu.__main__ import STAGES as CHECKS

EVERY = {**CHECKS, **STAGES}
QUICK = ["kernels", "segments", "merging", "waiting", "host", "loops"]


def test_that_all_end_within_20_minutes() -> None:
    assert set(EVERY) == {*QUICK, "ranks", "nccl", "memory", "training"}
    assert sum(seconds for _, seconds in (*STAGES.values(), *CHECKS.values())) + 2 * 30 <= 20 * 60


@pytest.mark.parametrize(("stages", "stage"), [
    *((stages, stage) for stages in (STAGES, CHECKS) for stage in QUICK if stage in stages and stage != "kernels"),
    pytest.param(CHECKS, "kernels", marks=pytest.mark.whole),
    pytest.param(CHECKS, "ranks", marks=pytest.mark.ranks),
])  # fmt: skip
def test_a_stage(stages: dict, stage: str, tmp_path: Path) -> None:
    found = [attempted(*case) for case in stages[stage][0](Place("cpu"))]
    assert found
    assert [each for each in found if "error" in each] == []
    assert any("refused" not in each for each in found)
    for each in found:
        record(tmp_path / "records.jsonl", stage, each)
    text = page(tmp_path / "records.jsonl", stages)
    assert f"## {stage}\n\n{stages[stage][0].__doc__}\n\n{len(found)} cases, 0 failed" in text
    assert "**" not in text


def test_what_fails_is_shown(tmp_path: Path) -> None:
    record(tmp_path / "records.jsonl", "ranks", {"case": "causal", "error": "ValueError: no"})
    shown = page(tmp_path / "records.jsonl", CHECKS)
    assert "1 cases, 1 failed, 0 refused.\n\n- **causal**: ValueError: no" in shown


def test_that_kernels_which_take_long_to_compile_come_last() -> None:
    names = [case.split()[0] for case, _ in CHECKS["kernels"][0](Place("cpu"))]
    assert set(names[names.index("flex") :]) == {"flex"}
    assert {"flash", "flash_attn", "flash_attn_3", "flash_attn_4", "reference"} < set(names)


@pytest.mark.parametrize(("module", "stages"), [("tests.gpu", CHECKS), ("recipes.benchmarks.gpu", STAGES)])
def test_that_what_no_time_is_left_for_is_named(
    module: str, stages: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is tried, too: what all is found on comes first."""
    monkeypatch.setattr(sys, "argv", [module, "--device", "cpu", "--out", str(tmp_path), "--seconds", "0"])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.delitem(sys.modules, f"{module}.__main__")
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(module, run_name="__main__")
    assert ended.value.code == 1
    lines = (tmp_path / f"{module}.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"stage": name, "case": "the stage", "error": "not run, for want of time"} for name in ("versions", *stages)
    ]
    assert capsys.readouterr().out.count("**: not run") == len(stages) + 1


def test_what_all_is_found_on() -> None:
    ((_, run),) = versions(Place("cpu"))
    found = run()
    assert list(found)[:2] == ["commit", "machine"]
    assert {"torch", "numpy"} < set(found)


MEETING = """
import sys, time
from pathlib import Path
from recipes.benchmarks.gpu.stages import main

def meets(mine, other):
    def run():
        Path({out!r}, mine).touch()
        while not Path({out!r}, other).exists():
            time.sleep(0.05)
        return {{}}
    return lambda _: iter([("met", run)])

if __name__ == "__main__":
    sys.exit(main("meeting", {{"first": (meets("a", "b"), 300), "second": (meets("b", "a"), 300)}}))
"""


@pytest.mark.whole
def test_stages_at_once(tmp_path: Path) -> None:
    (tmp_path / "meeting.py").write_text(MEETING.format(out=str(tmp_path)))
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[1])])
    command = [sys.executable, "-m", "meeting", "--device", "cpu", "--out", str(tmp_path), "--at-once"]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    found = [json.loads(line) for line in (tmp_path / "meeting.jsonl").read_text().splitlines()]
    assert sorted((each["stage"], each["case"]) for each in found) == [
        ("first", "met"), ("second", "met"), ("versions", "versions"),
    ]  # fmt: skip


SLOW = """
import subprocess, sys, time
from pathlib import Path
from recipes.benchmarks.gpu.stages import main

def slow(place):
    def run():
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path({out!r}, "child").write_text(str(child.pid))
        child.wait()
    yield "quick", lambda: {{}}
    yield "slow", run

if __name__ == "__main__":
    sys.exit(main("slow", {{"slow": (slow, 500), "next": (slow, 0)}}))
"""


def test_that_what_is_cut_off_ends_with_all_that_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits, end = [], time.monotonic() + 120

    class Hasty(subprocess.Popen):
        """Its time is over once it has started something."""

        def wait(self, timeout: float | None = None) -> int:
            if timeout is None:
                return super().wait()
            limits.append(timeout)
            while self.poll() is None and not started(tmp_path) and time.monotonic() < end:
                time.sleep(0.1)
            return super().wait(0)

    command = ready(tmp_path, monkeypatch)
    monkeypatch.setattr(sys, "argv", command[2:])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(subprocess, "Popen", Hasty)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(tmp_path / "slow.py"), run_name="__main__")
    assert ended.value.code == 1
    check_ended(tmp_path, end)
    assert limits == pytest.approx([30, 500], abs=10)
    *_, first, second, third = map(json.loads, (tmp_path / "slow.jsonl").read_text().splitlines())
    assert first == {"stage": "slow", "case": "quick"}
    assert second["error"] == "cut off after 500 s; what would follow was not run"
    assert third["error"] == "not run, for want of time"


@pytest.mark.whole
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGHUP])
def test_that_what_is_ended_ends_with_all_that_it_started(
    how: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = time.monotonic() + 120
    process = subprocess.Popen(ready(tmp_path, monkeypatch), stdout=subprocess.DEVNULL)
    try:
        while not started(tmp_path) and process.poll() is None and time.monotonic() < end:
            time.sleep(0.1)
        process.send_signal(how)
        assert process.wait(120) == 143
    finally:
        process.kill()
        process.wait()
    check_ended(tmp_path, end)


def ready(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command that runs slow stages."""
    (folder / "slow.py").write_text(SLOW.format(out=str(folder)))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), str(Path(__file__).parents[1])]))
    return [sys.executable, "-m", "slow", "--device", "cpu", "--out", str(folder)]


def started(folder: Path) -> int:
    """The process that the slow stage has started, or 0."""
    child = folder / "child"
    return int((child.exists() and child.read_text()) or 0)


def check_ended(folder: Path, end: float) -> None:
    """What the slow stage has started, until then."""
    pid = started(folder)
    assert pid
    try:
        while _is_running(pid) and time.monotonic() < end:
            time.sleep(0.1)
        assert not _is_running(pid)
    finally:
        if _is_running(pid):
            os.kill(pid, signal.SIGKILL)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
