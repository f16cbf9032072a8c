"""Several machines, each a network namespace, with torchrun: one run, and what becomes of it if one is lost."""

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from recipes.benchmarks.cluster.cases import Machines
from recipes.training.settings import RunSettings
from tests.machines import Site, needs_network, site
from tests.recipes import losses, recipe_here
from wallfacer_dt.testing import worst_error

pytestmark = [pytest.mark.ranks, pytest.mark.slow, needs_network]

STEPS, LOST_AT = 40, 8
MODEL = ["--sequence", "240", "--dim", "32", "--layers", "1", "--batch", "2", "--text", __file__]
LOSING = [*MODEL, "--steps", str(STEPS), "--save-every", "4", "--keep", str(STEPS)]
FIXED = ["--ring", "2", "--team", "2"]
# With which torch 2.13's torchrun lets a machine join that was not there at first; see docs/launch.md.
REPLACED = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


@pytest.fixture
def four(tmp_path: Path) -> Iterator[Site]:
    """Four machines."""
    with site(Machines(4, 1, (100.0,) * 4), "wflaunch", tmp_path) as made:
        yield made


def alone(folder: Path, options: list[str]) -> list[float]:
    """The losses of one process."""
    assert recipe_here([*options, "--out", str(folder / "alone")]) == 0
    return losses(folder / "alone")


@pytest.mark.whole
@pytest.mark.parametrize(("per_machine", "mesh"), [("1", FIXED), ("2", ["--ring", "4", "--team", "2"])])
def test_four_machines_train_as_one_process(four: Site, tmp_path: Path, per_machine: str, mesh: list[str]) -> None:
    options = [*MODEL, "--steps", "4"]
    for machine in range(4):
        command = ["recipes.train_bytes", *options, *mesh, "--out", str(tmp_path / "out")]
        four.torchrun(machine, ["--nproc-per-node", per_machine], command)
    assert four.ended() == dict.fromkeys(range(4), 0), four.said()
    assert worst_error([(losses(tmp_path / "out"), alone(tmp_path, options))]) <= 1e-6


def command(folder: Path, mesh: list[str]) -> list[str]:
    """What goes on from the newest checkpoint, if there is one."""
    kept = ["--checkpoint", str(folder / "kept"), "--resume", "--out", str(folder / "out")]
    return ["recipes.train_bytes", *LOSING, *mesh, *kept]


def has(folder: Path, step: int) -> bool:
    """Whether there is the checkpoint of a step."""
    return (folder / "kept" / f"step_{step}").exists()


def check_gone_on(folder: Path, said: str) -> None:
    """It has gone on from a checkpoint, and its losses are those of a run that nothing happened to."""
    assert "going on from step" in said
    assert worst_error([(losses(folder / "out"), alone(folder, LOSING))]) <= 1e-6


@pytest.mark.whole
@pytest.mark.parametrize("lost", [3, 0])
def test_without_restarts_torchrun_ends_everywhere_and_is_started_again(four: Site, tmp_path: Path, lost: int) -> None:
    """Whichever machine it is; the first has the rendezvous' store."""
    for machine in range(4):
        four.torchrun(machine, [], command(tmp_path, FIXED))
    four.wait_for(lambda: has(tmp_path, LOST_AT))
    four.lose(lost)
    assert all(four.ended().values()), four.said()
    assert not has(tmp_path, STEPS)
    for machine in range(4):
        four.torchrun(machine, [], command(tmp_path, FIXED))
    assert four.ended() == dict.fromkeys(range(4), 0), four.said()
    check_gone_on(tmp_path, four.said())


@pytest.mark.whole
def test_a_machine_without_a_network_is_waited_for_until_the_timeout(four: Site, tmp_path: Path) -> None:
    """Nothing closes its connections; the others then say whom they missed, and where it was last."""
    for machine in range(4):
        four.torchrun(machine, [], command(tmp_path, FIXED))
    four.wait_for(lambda: has(tmp_path, LOST_AT))
    four.cut(3)
    began = time.monotonic()
    four.lose(3)
    assert all(four.ended().values()), four.said()
    assert time.monotonic() - began > RunSettings.comm_timeout
    said = " ".join(re.sub(r"\[rank\d\]:", "", four.said(None)).split())
    # Of one whose record had come, and who could not be sent to any more, no number is known.
    assert re.search(r"(rank ([\d, ]+ or )?3|a rank) did not come within 0:02:00, or was lost", said), said
    assert re.search(
        r"rank 3 at step \d+, \w+, had come to call \d+ on the cpu mesh [^;]*, told [1-9]\d+ s ago", said
    ), said


@pytest.mark.whole
def test_a_machine_that_takes_the_place_of_another(four: Site, tmp_path: Path) -> None:
    """The others' torchruns wait for it, and all go on from a checkpoint."""
    for machine in range(4):
        four.torchrun(machine, ["--max-restarts", "3"], command(tmp_path, FIXED), **REPLACED)
    four.wait_for(lambda: has(tmp_path, LOST_AT))
    four.lose(3)
    four.torchrun(3, ["--max-restarts", "3"], command(tmp_path, FIXED), **REPLACED)
    assert four.ended() == dict.fromkeys(range(4), 0), four.said()
    check_gone_on(tmp_path, four.said())


@pytest.mark.whole
def test_three_machines_go_on_without_a_fourth(four: Site, tmp_path: Path) -> None:
    """In a ring of three, which is what the world leaves."""
    for machine in range(4):
        four.torchrun(machine, ["--nnodes", "3:4", "--max-restarts", "3"], command(tmp_path, []), **REPLACED)
    four.wait_for(lambda: has(tmp_path, LOST_AT))
    four.lose(3)
    assert four.ended() == dict.fromkeys(range(3), 0), four.said()
    assert "ring of 3" in four.said()
    check_gone_on(tmp_path, four.said())
