"""python -m tests.faults: provoke every fault of every recipe, and write the table below docs/faults.md's line.

Needs root, for links and a disk that is full. Takes about twenty minutes.
"""

import argparse
import re
import sys
import tempfile
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path

import torch

from tests.faults.faulty import FAULTS, FROM_THE_START
from tests.faults.run import RECIPES, ROOT, Outcome, cut_a_link, fill_the_disk, provoke, slow_a_link
from wallfacer_dt.testing import worst_error

PAGE = ROOT / "docs" / "faults.md"
LINE = "<!-- What follows is made by python -m tests.faults -->"


def _provoked(fault: str, recipe: str, folder: Path) -> Outcome:
    return provoke(recipe, fault, folder)


def _of_the_first(fault: str, recipe: str, folder: Path) -> Outcome:
    return provoke(recipe, fault, folder, rank=0)


FAULTS_BY_NAME: dict[str, Callable[[str, Path], Outcome]] = {
    **{
        name: partial(_provoked, name)
        for name in (*FAULTS, *FROM_THE_START)
        if name not in ("begins", "the disk fills up")
    },
    # Which speaks for its machine, and has the store that others tell where they are.
    "rank 0 is killed in the backward": partial(_of_the_first, "killed in the backward"),
    "rank 0 is stopped in a save": partial(_of_the_first, "stopped in a save"),
    "the disk fills up": fill_the_disk,
    "a link is cut": cut_a_link,
    "a link slows to a hundredth": slow_a_link,
}


def judged(outcome: Outcome, whole: tuple[float, ...]) -> tuple[str, str]:
    """Whether a run ended as it should, "hangs" or "wrong" if not, and the largest difference of its losses."""
    if outcome.status is None:
        return "hangs", "-"
    if outcome.status or len(outcome.losses) != len(whole):
        return "wrong: it did not end well", "-"
    difference = worst_error([(outcome.losses, whole)])
    return "wrong: other losses" if difference > 1e-6 else "", f"{difference:.0e}" if difference else "0"


def row(fault: str, recipe: str, outcome: Outcome, whole: tuple[float, ...]) -> str:
    """Of the table."""
    wrong, difference = judged(outcome, whole)
    seconds = "-" if outcome.seconds is None else f"{outcome.seconds:.1f}"
    resumed = ", ".join(map(str, outcome.resumed)) or "-"
    message = f"`{short(outcome.message)}`" if outcome.message else "none"
    return f"| {fault} | {recipe} | {wrong or message} | {seconds} | {resumed} | {difference} |"


def short(message: str) -> str:
    """A message without what is the same in all."""
    message = re.sub(r" on the cpu mesh cp_ring \d x cp_team \d of ranks [\d, ]*\d", "", message)
    message = re.sub(r"\[/__w/[^]]*\] | ?This is typically .*?(?=;| \(rank |$)", "", message)
    message = re.sub(r"^.* tokens/s [\d:]+", "", message)  # a bar that rank 0 has drawn before it
    # Without where all the others were.
    cut = re.split(r"; (?=rank [\d, ]+ (?:at|had) )", message.replace("|", "/"))[0]
    return cut + ")" * (cut.count("(") - cut.count(")"))


def main(argv: list[str] | None = None) -> int:
    """Provoke them all, or some; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", allow_abbrev=False, description=__doc__)
    parser.add_argument("--only", metavar="WORDS", default="", help='those with these in "FAULT RECIPE"; no table')
    only = parser.parse_args(argv).only
    wanted = {recipe: [fault for fault in FAULTS_BY_NAME if only in f"{fault} {recipe}"] for recipe in RECIPES}
    if not any(wanted.values()):
        parser.error(f"--only: {only!r} is in none of {', '.join(FAULTS_BY_NAME)} and {', '.join(RECIPES)}")
    rows: list[str] = []
    for recipe, faults in wanted.items():
        if not faults:
            continue
        with tempfile.TemporaryDirectory() as folder:
            whole = provoke(recipe, "none", Path(folder)).losses
        for fault in faults:
            with tempfile.TemporaryDirectory() as folder:
                rows.append(row(fault, recipe, FAULTS_BY_NAME[fault](recipe, Path(folder)), whole))
            print(rows[-1], flush=True)
    odd = sum("hangs" in each or "wrong" in each for each in rows)
    if not only:
        head = ["| fault | recipe | message | seconds until it | went on from step | largest difference of a loss |"]
        head.append("| --- | --- | --- | --- | --- | --- |")
        told = f"{date.today()}, torch {torch.__version__}, gloo, CPU: {len(rows)} runs, {odd} hang or are wrong."
        kept = PAGE.read_text().partition(LINE)[0]
        PAGE.write_text("\n".join([kept + LINE, "", told, "", *head, *rows, ""]))
    return 1 if odd else 0


if __name__ == "__main__":
    sys.exit(main())
