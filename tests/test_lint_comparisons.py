"""`make lint` refuses comparisons that let a NaN pass, in tests as well."""

import subprocess
import sys

import pytest

from tests.lint_comparisons import findings

BAD = [
    "max(float(x) for x in errors)",
    "max([1.0, *(float(x.max()) for x in errors)])",
    "min(x.item() for x in errors)",
    "max(map(float, errors))",
    "max(x.abs().max() for x in errors)",
    "max(abs(x) for x in errors)",
    "max(errors, key=abs)",
    "(a - b).abs().max()",
    "(a - b[0]).detach().abs().max()",
    "abs(a - b)",
    "np.abs(a - b)",
    "np.linalg.norm(a - b)",
    "a.allclose(b)",
    "a.isclose(b).all()",
    "sorted(map(float, errors))[-1]",
    "(a - b).square().max()",
    "torch.linalg.vector_norm(a - b)",
    "a.sub(b).abs()",
    "torch.sub(a, b).abs()",
    "F.mse_loss(a, b)",
    "torch.dist(a, b)",
]
GOOD = [
    "worst_error([(a, b)])",
    "max(ranks(4).run(error))",
    "max(len(x) for x in errors)",
    "(a.abs() - b.abs()).max()",
    "x[i - 1].abs()",
    "torch.stack(errors).max()",
    "max(0.0, a - b)",
    "math.isclose(a, b)",
    "torch.distributed.barrier()",
    "(q - kv).abs() <= 3  # no comparison: a mask",
    "max(\n    float(x) for x in counts  # no comparison: they are counted\n)",
]


@pytest.mark.parametrize("line", BAD)
def test_what_lets_a_nan_pass_is_found(line: str) -> None:
    ((number, what),) = findings(f"def f():\n    return {line}\n")
    assert number == 2
    assert "worst_error" in what


@pytest.mark.parametrize("line", GOOD)
def test_what_does_not_is_left(line: str) -> None:
    assert not list(findings(f"error = {line}\n"))


def test_an_exemption_says_why() -> None:
    assert list(findings("abs(a - b)  # no comparison\n"))
    assert list(findings("abs(a - b)  # no comparison:\n"))
    assert list(findings("# no comparison: of another line\nabs(a - b)\n"))


@pytest.mark.parametrize("path", ["tests/test_any.py", "recipes/any.py", "wallfacer_dt/any.py"])
@pytest.mark.parametrize(
    "name", ["torch.testing.assert_close", "torch.allclose", "numpy.testing.assert_allclose", "numpy.allclose"]
)
def test_ruff_bans_the_rest(name: str, path: str) -> None:
    module, _, function = name.rpartition(".")
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--select", "TID251", "--stdin-filename", path, "-"]
    for text in (f"import {module}\n{name}(1, 1)\n", f"from {module} import {function}\n"):
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert "wallfacer_dt.testing.worst_error" in done.stdout
