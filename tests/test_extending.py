"""The examples of docs/extending.md: applied to a copy of the package, and compared with the oracle there."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from wallfacer_dt import TokenOrder, context_mesh, shard_sequence
from wallfacer_dt.testing import RankPool, worst_error

Ranks = Callable[[int], RankPool]

HERE = Path(__file__).parent
PAGE = (HERE.parent / "docs" / "extending.md").read_text()
DIFFS = re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL)


CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"is_causal": True, "chunk_size": 20}, {"mask_mod": "of_20"}),
    *(({"is_causal": True, "schedule": "serial", "rotate": side}, {"is_causal": True}) for side in ("q", "kv")),
]


def test_the_examples_do_what_they_say(tmp_path: Path) -> None:
    """A kind of mask and a schedule, in files of their own each."""
    shutil.copytree(
        HERE.parent / "wallfacer_dt", tmp_path / "wallfacer_dt", ignore=shutil.ignore_patterns("__pycache__")
    )
    files = [re.findall(r"^\+\+\+ (\S+)", diff, re.MULTILINE) for diff in DIFFS]
    assert [len({*some}) for some in files] == [2, 2]
    assert not {*files[0]} & {*files[1]}
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    for diff in DIFFS:
        subprocess.run(["git", "apply", "-"], cwd=tmp_path, input=diff, text=True, check=True)
    command = [sys.executable, "-P", str(HERE / "extended.py"), repr(CASES)]
    ran = subprocess.run(
        command, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=120
    )
    assert not ran.returncode, ran.stderr
    where, *errors = ran.stdout.split()
    assert Path(where).is_relative_to(tmp_path)
    assert len(errors) == len(CASES)
    assert all(float(error) < 1e-12 for error in errors)


def packed() -> float:
    shown: dict[str, Any] = {}
    exec(PAGE.partition("```python\n")[2].partition("```")[0], shown)
    mesh = context_mesh("cpu", ring=2, team=2)
    order = TokenOrder("head_tail", mesh)
    torch.manual_seed(0)
    whole = torch.randn(3, 1, 2, 32, 8, dtype=torch.float64)
    module = shown["PackedParallel"](order=order)._apply(nn.Module(), mesh)
    out = torch.compile(module.forward, fullgraph=True, backend="eager")(shard_sequence(whole, order, dim=3))
    want = F.scaled_dot_product_attention(*whole, is_causal=True)
    return worst_error([(out, shard_sequence(want, order, dim=2))])


def test_the_style_of_the_docs(ranks: Ranks) -> None:
    assert max(ranks(4).run(packed)) < 1e-12
