"""That the scripts for a GPU have no mistakes of their own: their stages on the CPU, in small."""

from pathlib import Path

import pytest

from recipes.benchmarks.gpu.__main__ import STAGES
from recipes.benchmarks.gpu.stages import Place, attempted, page, record
from tests.gpu.__main__ import STAGES as CHECKS

EVERY = {**CHECKS, **STAGES}
QUICK = ["versions", "kernels", "segments", "merging", "waiting", "loops"]


def test_that_all_end_within_20_minutes() -> None:
    assert set(EVERY) == {*QUICK, "ranks", "nccl", "training"}
    assert sum(seconds for _, seconds in (*STAGES.values(), *CHECKS.values())) <= 20 * 60


@pytest.mark.parametrize(("stages", "stage"), [
    *((stages, stage) for stages in (STAGES, CHECKS) for stage in QUICK if stage in stages),
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
    assert f"## {stage}\n\n{len(found)} cases, 0 failed" in text
    assert "**" not in text


def test_what_fails_is_shown(tmp_path: Path) -> None:
    record(tmp_path / "records.jsonl", "ranks", {"case": "causal", "error": "ValueError: no"})
    shown = page(tmp_path / "records.jsonl", CHECKS)
    assert "1 cases, 1 failed, 0 refused.\n\n- **causal**: ValueError: no" in shown
