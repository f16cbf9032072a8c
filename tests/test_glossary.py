"""Names in the package are the glossary's: what it lists in italics is used for nothing."""

import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).parent.parent


def words(name: str) -> set[str]:
    """Of a name in snake or camel case."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}


def test_no_name_has_a_word_that_the_glossary_rules_out() -> None:
    ruled_out = set(re.findall(r"\*(\w+)\*", (ROOT / "docs/glossary.md").read_text()))
    assert {"stationary", "moving", "slot"} <= ruled_out
    found = []
    for path in sorted((ROOT / "wallfacer_dt").rglob("*.py")):
        with path.open("rb") as file:
            for token in tokenize.tokenize(file.readline):
                if token.type == tokenize.NAME and words(token.string) & ruled_out:
                    found.append(f"{path.relative_to(ROOT)}:{token.start[0]} {token.string}")
    assert not found
