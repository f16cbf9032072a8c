"""docs/troubleshooting.md quotes messages that exist, and has a row for each that does not say itself what to do.

A message says itself what to do where it names what was expected (``must``) and what came (``got``), or has a remedy
after a colon or semicolon.
Whatever else the package raises with words of its own must match a row. ``…`` stands for what is filled in, here and
there. Of a message that is put together from several strings each is looked at by itself.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
QUOTED = re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
ANY = "…"


def words(node: ast.AST) -> str:
    """What an expression of strings says, with ``…`` for all else."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(map(words, parts))
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return words(left) + words(right)
    return ANY


def matches(pattern: str, text: str) -> bool:
    return bool(re.search(".*".join(map(re.escape, pattern.split(ANY))), text, re.DOTALL))


def says_what_to_do(text: str) -> bool:
    return bool(re.search(r"\b(must|got)\b|[a-z]{2}.*[:;] [a-z]", text))


def modules() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted((ROOT / "wallfacer_dt").rglob("*.py")):
        yield path, ast.parse(path.read_text())


def raised() -> Iterator[tuple[str, str]]:
    """Where something is raised, and with which words."""
    for path, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                for argument in node.exc.args:
                    text = words(argument)
                    if re.search("[a-z]{3}", text):
                        yield f"{path.relative_to(ROOT)}:{node.lineno}", text


def strings() -> set[str]:
    """All that the sources say, docstrings left out."""
    said = set()
    for _, tree in modules():
        loose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        said |= {
            words(node)
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp) and id(node) not in loose
        }
    return said


def test_a_quoted_message_exists() -> None:
    said = strings()
    assert QUOTED
    assert not [quoted for quoted in QUOTED if not any(matches(quoted, text) for text in said)]


def test_what_is_quoted_is_quoted_once_and_has_words() -> None:
    assert len(QUOTED) == len(set(QUOTED))
    assert not [quoted for quoted in QUOTED if not re.search("[A-Za-z]{4}|--[a-z]+", quoted)]


def test_what_does_not_say_what_to_do_has_a_row() -> None:
    found = list(raised())
    assert found
    assert not [
        f"{where}: {text}"
        for where, text in found
        if not says_what_to_do(text) and not any(matches(quoted, text) for quoted in QUOTED)
    ]
