"""Every `wallfacer plan` and `wallfacer explain` that README, docs and help texts show runs as it stands."""

import re
import shlex
from pathlib import Path

import pytest

from wallfacer_dt import Cluster, Link, Profile
from wallfacer_dt.command.app import main
from wallfacer_dt.command.explain.command import explain
from wallfacer_dt.command.planning.plan import plan

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
    assert {"README.md", "launch.md", "planner.md", "plan", "explain"} == {name for name, text in TEXTS.items() if commands(text)}
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


@pytest.mark.slow
@pytest.mark.parametrize("command", SHOWN)
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
