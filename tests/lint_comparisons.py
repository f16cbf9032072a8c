"""Refuses comparisons of numbers that let a NaN pass: `python -m tests.lint_comparisons`, as `make lint` runs it.

What ruff's banned-api cannot see, since it is no import: the builtin max and min of differences or of what came out of
tensors, which drop a NaN that is not first; and absolute or squared differences, which broadcast and are below no
tolerance where there are none. It reads lines, not values: an error that got a name first it does not know for one. A
line that compares nothing says so in a comment, "no comparison: " and why.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

FOLDERS = ("tests", "recipes", "wallfacer_dt")
_SIZES = {"abs", "norm", "square", "pow", "vector_norm"}
_CLOSE = {"allclose", "isclose", "mse_loss", "l1_loss", "dist", "cdist"}
_EXEMPT = re.compile(r"# no comparison: \w")
_REMEDY = 'compare by wallfacer_dt.testing.worst_error, or say "# no comparison: " and why'


def findings(source: str) -> Iterator[tuple[int, str]]:
    """(line, what is wrong) of each comparison that is not worst_error's."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not (what := _wrong(node)):
            continue
        if not any(map(_EXEMPT.search, lines[node.lineno - 1 : node.end_lineno])):
            yield node.lineno, f"{what}: {_REMEDY}"


def _wrong(call: ast.Call) -> str:
    if isinstance(call.func, ast.Name) and call.func.id in ("max", "min", "sorted"):
        named = {_name(inner) for x in (*call.args, *call.keywords) for inner in ast.walk(x)}
        if found := sorted(named & {"float", "abs", "item"}):
            return f"{call.func.id}() of {found[0]}() drops a NaN that is not first"
    name = _name(call.func)
    if name in _SIZES and any(map(_is_difference, (call.func, *call.args))):
        return f"{name}() of a difference takes what broadcasts, and what is empty"
    of_numbers = isinstance(call.func, ast.Attribute) and _name(call.func.value) == "math"
    return f"{name}() takes what is empty, or broadcasts" if name in _CLOSE and not of_numbers else ""


def _name(node: ast.AST) -> str:
    """The last part of a name, as what is called has one."""
    return getattr(node, "attr", None) or getattr(node, "id", "")


def _is_difference(node: ast.AST) -> bool:
    """Whether it is a - b or a.sub(b), a method of that, or a method of what such a method returns."""
    while isinstance(node, ast.Attribute | ast.Call):
        if isinstance(node, ast.Call) and _name(node.func) in ("sub", "subtract", "diff"):
            return True
        node = node.value if isinstance(node, ast.Attribute) else node.func
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub)


def main() -> int:
    """Print what is wrong; 1 if anything is."""
    status = 0
    for path in (path for folder in FOLDERS for path in sorted(Path(folder).rglob("*.py"))):
        for line, what in findings(path.read_text()):
            print(f"{path}:{line}: {what}")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
