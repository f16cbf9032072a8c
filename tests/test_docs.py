"""Commands and programs that README, docs and help texts show run as they stand, and print what is shown.

A program with a title is a file, which `torchrun` in a block of its own runs on ranks.
"""

import io
import re
import shlex
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from itertools import takewhile
from pathlib import Path
from unittest import mock

import pytest

import wallfacer_dt
import wallfacer_dt.testing
from wallfacer_dt import Cluster, Link, Profile
from wallfacer_dt.command.app import main
from wallfacer_dt.command.explain.command import explain
from wallfacer_dt.command.planning.plan import plan
from wallfacer_dt.testing import RankPool

Ranks = Callable[[int], RankPool]

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands(text: str) -> list[str]:
    """All that begin a line, with what continues them, and all in a sentence."""
    joined = re.sub(r"\\\n\s*", "", text)
    lines = [line.strip() for line in joined.splitlines() if re.match(r"\s*wallfacer (plan|explain) -", line)]
    return lines + [" ".join(one.split()) for one in re.findall(r"`(wallfacer\s+(?:plan|explain)\s+-[^`]*)`", text)]


TEXTS = {page.name: page.read_text() for page in PAGES} | {it.__name__: it.__doc__ or "" for it in (plan, explain)}
SHOWN = sorted({command for text in TEXTS.values() for command in commands(text)})


def test_commands_are_found() -> None:
    text = (
        "a wallfacer plan --x\n  wallfacer plan --a \\\n   --b\nwallfacer explain\nand `wallfacer\nexplain --c` too\n"
    )
    assert commands(text) == ["wallfacer plan --a --b", "wallfacer explain --c"]
    known = {"README.md", "launch.md", "planner.md", "tutorial.md", "plan", "explain"}
    assert known <= {name for name, text in TEXTS.items() if commands(text)}
    for name, text in TEXTS.items():
        # However they are written, or started.
        shown = re.findall(r"(?:wallfacer|wallfacer_dt\.command)\s+(?:plan|explain)\s+-", text)
        assert len(commands(text)) == len(shown), name


PRINTED = re.findall(r"```python\n([^`]*)```\n\n```text\n([^`]*)```", "".join(TEXTS.values()))


def test_a_program_prints_what_is_shown_below_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert PRINTED
    for program, text in PRINTED:
        exec(program, {})
        assert capsys.readouterr().out == text


FILES = dict(re.findall(r'```python title="(\w+\.py)"\n([^`]*)```', "".join(TEXTS.values())))
LAUNCHED = re.findall(
    r"```sh\ntorchrun --nproc-per-node (\d+) (\w+\.py)(.*)\n```\n\n```text\n([^`]*)```", "".join(TEXTS.values())
)


def launched(program: str, *arguments: str) -> str:
    """What a rank prints."""
    printed = io.StringIO()
    with mock.patch.object(sys, "argv", ["", *arguments]), redirect_stdout(printed):
        exec(program, {"__name__": "__main__"})
    return printed.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize(("size", "name", "arguments", "text"), LAUNCHED)
def test_ranks_print_what_is_shown_below_them(ranks: Ranks, size: str, name: str, arguments: str, text: str) -> None:
    printed = ranks(int(size)).run(launched, FILES[name], *arguments.split())
    assert "".join(printed) == text


def test_every_program_with_a_name_is_launched() -> None:
    assert FILES
    assert FILES.keys() == {name for _, name, _, _ in LAUNCHED}


def test_a_picture_is_of_a_command_that_is_shown() -> None:
    tutorial = TEXTS["tutorial.md"]
    shown = re.findall(r"!\[[^\]]*\]\((\S+)\)", tutorial)
    assert shown == re.findall(r"--picture (\S+)", tutorial)
    for name in shown:
        assert (ROOT / "docs" / name).read_bytes().startswith(b"\x89PNG")


def test_every_public_name_is_on_a_page_of_the_api() -> None:
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    listed = re.findall(r"^::: (wallfacer_dt(?:\.testing)?\.\w+)$", pages, re.MULTILINE)
    public = {f"{it.__name__}.{name}" for it in (wallfacer_dt, wallfacer_dt.testing) for name in it.__all__}
    assert len(listed) == len(set(listed))
    assert set(listed) == public


def rows(text: str, after: str) -> list[list[str]]:
    """The cells of the first table below a heading, without the line under its head."""
    below = text.partition(f"{after}\n")[2].splitlines()
    first = next(number for number, line in enumerate(below) if line.startswith("|"))
    table = takewhile(lambda line: line.startswith("|"), below[first:])
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table]
    return [lines[0], *lines[2:]]


def test_readme_compares_as_the_page_does() -> None:
    head, *shown = rows(TEXTS["README.md"], "## Beside others")
    names, *known = rows(TEXTS["comparison.md"], "# Beside others")
    page = [dict(zip(names, row, strict=True)) for row in known]
    assert shown
    for row in shown:
        assert dict(zip(head, row, strict=True)) in [{name: cells[name] for name in head} for cells in page]


def test_figures_of_readme_stand_on_the_page_that_they_are_of() -> None:
    _, *shown = rows(TEXTS["README.md"], "## What was measured")
    assert shown
    page = ""
    for what, result, bound, _ in shown:
        if link := re.search(r"\]\((docs/benchmarks/\S+\.md)\)", what):
            page = (ROOT / link[1]).read_text()
        figures = re.findall(r"\d+\.\d+|\d+%", f"{result} {bound}")
        assert figures
        assert not [figure for figure in figures if not re.search(rf"(?<![\d.]){re.escape(figure)}(?!\d)", page)], what


@pytest.mark.slow
@pytest.mark.parametrize("command", [
    # Which take longest, and are tested in smaller sizes.
    pytest.param(one, marks=pytest.mark.whole if re.search("--sequences 8|--seq longest", one) else ())
    for one in SHOWN
])  # fmt: skip
def test_a_command_that_is_shown_runs(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    # What the commands before it leave behind.
    Profile(Cluster(8, 8, Link(300e9, 5e-6), Link(300e9, 5e-6))).save("profile.json")
    name, *arguments = shlex.split(command, comments=True)
    assert main(arguments) == 0, capsys.readouterr().err
    printed = capsys.readouterr()
    assert name == "wallfacer"
    assert printed.out
    for picture in re.findall(r"--picture (\S+)", command):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")
