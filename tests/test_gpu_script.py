"""That the script for a GPU has no mistakes of its own: its stages on the CPU, in small."""

from pathlib import Path

import pytest

from recipes.benchmarks.gpu.__main__ import page, record
from recipes.benchmarks.gpu.stages import STAGES, Place

QUICK = ["versions", "kernels", "segments", "merging", "waiting", "loops"]


@pytest.mark.parametrize("stage", [*QUICK, pytest.param("ranks", marks=pytest.mark.ranks)])
def test_a_stage(stage: str, tmp_path: Path) -> None:
    found = list(STAGES[stage][0](Place("cpu")))
    assert found
    assert [each for each in found if "error" in each] == []
    assert any("refused" not in each for each in found)
    for each in found:
        record(tmp_path, stage, each)
    text = page(tmp_path)
    assert f"## {stage}\n\n{len(found)} cases, 0 failed" in text
    assert "**" not in text


def test_what_fails_is_shown(tmp_path: Path) -> None:
    record(tmp_path, "ranks", {"case": "causal", "error": "ValueError: no"})
    assert "1 cases, 1 failed, 0 refused.\n\n- **causal**: ValueError: no" in page(tmp_path)
