"""Checkpoints of recipes: the curve of a run that was never interrupted, on any mesh, and none that is not whole."""

import contextlib
import errno
import io
import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from recipes.train_bytes.model import ByteGPT, ModelConfig
from recipes.train_bytes.train import MeanLoss
from recipes.training import manifest
from recipes.training import ranks as joining
from recipes.training.checkpoint import Checkpoints
from recipes.training.record import remove_earlier
from recipes.training.settings import RecipeError
from tests.recipes import SMALL, losses, recipe_here, recipe_on_rank
from wallfacer_dt.testing import RankPool, worst_error

Ranks = Callable[[int], RankPool]

STEPS = 12
RUN = [*SMALL, "--batch", "2", "--steps", str(STEPS), "--text", __file__]
MESHES = (
    ["--ring", "4"],
    ["--ring", "2", "--team", "2", "--save-sync"],
    ["--ulysses", "2", "--ring", "2"],
    [],  # one process
    ["--ring", "2", "--team", "2", "--ffn", "metp", "--attention", "metp"],
    ["--ring", "4", "--order", "contiguous"],
)


def keeping(folder: Path, *options: str, every: int = 2, keep: int = 9) -> list[str]:
    """Options of a run that keeps checkpoints."""
    out = [f"--out={folder / 'out'}", f"--checkpoint={folder / 'kept'}"]
    return [*RUN, *out, f"--save-every={every}", f"--keep={keep}", *options]


def end_at(folder: Path, step: int) -> None:
    """Leave what a run would have left that ended there."""
    for kept in (folder / "kept").iterdir():
        if int(kept.name.removeprefix("step_")) > step:
            shutil.rmtree(kept)


@pytest.mark.parametrize("meshes", [MESHES[1:5], pytest.param(MESHES, marks=pytest.mark.whole)], ids=len)
def test_a_run_goes_on_on_another_mesh(ranks: Ranks, tmp_path: Path, meshes: Sequence[list[str]]) -> None:
    """From one to the next of these, two steps each; every one of them goes on to the end."""
    uninterrupted: list[float] = []
    for number, mesh in enumerate(meshes):
        size = 4 if mesh else 1
        arguments = keeping(tmp_path, "--seed", "3", *mesh, *(["--resume"] if number else []))
        assert ranks(size).run(recipe_on_rank, arguments) == [0] * size
        found = losses(tmp_path / "out")
        uninterrupted = uninterrupted or found
        assert worst_error([(found, uninterrupted)]) <= 1e-6, mesh
        assert steps_in(tmp_path / "out" / "metrics.jsonl") == [*range(1, STEPS + 1)]
        end_at(tmp_path, 2 * number + 2)


def test_on_the_same_mesh_it_is_the_same_run(ranks: Ranks, tmp_path: Path) -> None:
    """To the bit, from the newest checkpoint of which no rank's file is cut short or changed."""
    assert ranks(4).run(recipe_on_rank, keeping(tmp_path, "--ring", "4")) == [0] * 4
    uninterrupted = losses(tmp_path / "out")
    cut(tmp_path / "kept" / "step_12" / "__3_0.distcp")
    flip(tmp_path / "kept" / "step_10" / "__2_0.distcp")
    assert ranks(4).run(recipe_on_rank, keeping(tmp_path, "--ring", "4", "--resume", keep=2)) == [0] * 4
    assert losses(tmp_path / "out") == uninterrupted
    assert names(tmp_path) == ["step_10", "step_10.broken", "step_12", "step_12.broken"]


def steps_in(metrics: Path) -> list[int]:
    """Those of which a file has lines, or a folder what tensorboard shows."""
    if metrics.is_file():
        return [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(str(metrics))
    shown.Reload()
    return [event.step for event in shown.Scalars("loss")]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "kept").iterdir())


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 2] ^= 1
    path.write_bytes(whole)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process, with checkpoints of steps 4, 8 and 12."""
    folder = tmp_path_factory.mktemp("whole")
    assert recipe_here(keeping(folder, every=4)) == 0
    return folder


@pytest.fixture
def copied(kept: Path, tmp_path: Path) -> Path:
    """A copy, to be damaged."""
    return shutil.copytree(kept, tmp_path / "copy")


@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata", manifest.NAME])
@pytest.mark.parametrize(("damage", "why"), [(cut, ""), (flip, ""), (Path.unlink, "is missing")])
def test_what_is_not_whole_is_not_loaded(
    copied: Path, capfd: pytest.CaptureFixture[str], file: str, damage: Callable[[Path], None], why: str
) -> None:
    uninterrupted = losses(copied / "out")
    damage(copied / "kept" / "step_12" / file)
    assert recipe_here(keeping(copied, "--resume", every=4)) == 0
    said = capfd.readouterr().err
    assert f"step_12 is not loaded: {file} {why}" in said
    assert "going on from step 8" in said
    assert losses(copied / "out") == uninterrupted
    assert names(copied) == ["step_12", "step_12.broken", "step_4", "step_8"]


class WithUnused(ByteGPT):
    """A weight that nothing is computed with."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.unused = nn.Parameter(torch.ones(3))


def test_a_weight_that_is_never_used_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though an optimizer has no state of it."""
    monkeypatch.setattr("recipes.train_bytes.train.ByteGPT", WithUnused)
    assert recipe_here(keeping(tmp_path, every=4)) == 0
    uninterrupted = losses(tmp_path / "out")
    end_at(tmp_path, 4)
    without, load = [], Checkpoints._load

    def loaded(checkpoints: Checkpoints, *args: Any) -> Any:
        history, state = load(checkpoints, *args), checkpoints._trainer.optimizer.state
        without.append([name for name, p in checkpoints._trainer.model.named_parameters() if p not in state])
        return history

    monkeypatch.setattr(Checkpoints, "_load", loaded)
    assert recipe_here(keeping(tmp_path, "--resume", every=4)) == 0
    assert losses(tmp_path / "out") == uninterrupted
    assert without == [["unused"]]  # of whose first step AdamW is to know of no other


def test_what_is_no_folder_of_its_own_is_no_checkpoint(copied: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A link to one is, and goes when it is old, but not what it leads to; what cannot be removed stays."""
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "step_4"
    end_at(copied, 8)
    (copied / "kept" / "step_4").rename(elsewhere)
    (copied / "kept" / "step_4").symlink_to(elsewhere)
    (copied / "kept" / "step_11").write_bytes(b"")
    with mock.patch("shutil.rmtree", side_effect=PermissionError(13, "Permission denied")) as removing:
        assert recipe_here(keeping(copied, "--resume", every=4, keep=1)) == 0
    assert removing.called
    assert names(copied) == ["step_11.broken", "step_12", "step_8"]
    assert elsewhere.is_dir()


def test_a_link_that_leads_nowhere_is_a_checkpoint_that_is_broken(
    copied: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As one on a disk that is not mounted: nothing begins anew."""
    end_at(copied, 0)
    (copied / "kept" / "step_4").symlink_to(copied / "not mounted")
    assert recipe_here(keeping(copied, "--resume", every=4)) == 2
    assert "--resume: of 1 checkpoints" in capfd.readouterr().err


def test_what_was_cut_off_while_it_was_written_is_removed(copied: Path) -> None:
    end_at(copied, 4)
    (copied / "kept" / ".step_6.partial").mkdir()
    (copied / "kept" / ".step_6.partial" / "__0_0.distcp").write_bytes(b"half")
    assert recipe_here(keeping(copied, "--resume", every=4)) == 0
    assert names(copied) == ["step_12", "step_4", "step_8"]


def test_what_another_run_writes_is_left_alone(copied: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It may be going on; without a whole one too."""
    end_at(copied, 0)
    (copied / "kept" / ".step_6.partial").mkdir()
    assert recipe_here(keeping(copied)) == 2
    assert "has checkpoints already, none whole: --resume goes on from them" in capfd.readouterr().err
    assert names(copied) == [".step_6.partial"]


def test_what_cannot_be_loaded_ends_in_a_line(
    copied: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object, **__: object) -> None:
        raise ValueError("missing key in checkpoint")

    monkeypatch.setattr(dcp, "load", load)
    assert recipe_here(keeping(copied, "--resume")) == 2
    assert "step_12 cannot be loaded: missing key in checkpoint" in capfd.readouterr().err


def said_of_ranks_lost_in_loading(arguments: list[str]) -> tuple[int, str]:
    """A rank's exit status, and what it says."""
    lost = mock.patch.object(dcp, "load", side_effect=RuntimeError("Connection closed by peer"))
    with lost, contextlib.redirect_stderr(io.StringIO()) as said:
        status = recipe_on_rank(arguments)
    return status, said.getvalue()


def test_a_rank_that_is_lost_is_not_taken_for_a_checkpoint_that_cannot_be_loaded(ranks: Ranks, copied: Path) -> None:
    found = ranks(2).run(said_of_ranks_lost_in_loading, keeping(copied, "--ring", "2", "--resume"))
    for rank, (status, said) in enumerate(found):
        waited = f"rank {rank} of 2: waited for other ranks' part in a checkpoint: Connection closed by peer"
        assert (status, said.splitlines()[-1]) == (1, f"train_bytes: {waited}")


def test_metrics_have_every_step(copied: Path) -> None:
    """Also where their file was damaged, and in another folder."""
    end_at(copied, 4)
    metrics = copied / "out" / "metrics.jsonl"
    first = metrics.read_text().splitlines()[:4]
    metrics.write_text("\n".join([first[0], '{"loss": 1}', "[]", first[2], first[3][:9]]))
    for out in (copied / "out", copied / "other"):
        assert recipe_here(keeping(copied, "--resume", f"--out={out}", every=4)) == 0
        assert (out / "metrics.jsonl").read_text().splitlines()[:4] == first
        assert steps_in(out / "metrics.jsonl") == [*range(1, STEPS + 1)]
        end_at(copied, 4)


def test_what_an_earlier_run_left_does_not_pass_for_this_one_s(tmp_path: Path) -> None:
    left = ["run.json", "curve.png", "curves.png", "samples.png"]
    others = ["model/model.safetensors", "mine.png", "metrics.jsonl"]
    for name in (*left, *others):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for _ in range(2):
        remove_earlier(tmp_path)
        assert [name for name in (*left, *others) if (tmp_path / name).exists()] == others
    (tmp_path / "run.json").mkdir()
    with pytest.raises(RecipeError, match=r"--out: .*run\.json of an earlier run cannot be removed: Is a directory"):
        remove_earlier(tmp_path)


def test_where_none_is_whole_nothing_starts(copied: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for step in (4, 8, 12):
        cut(copied / "kept" / f"step_{step}" / ".metadata")
    for _ in range(2):  # a restart does not begin anew either
        assert recipe_here(keeping(copied, "--resume")) == 2
        assert "--resume: of 3 checkpoints" in capfd.readouterr().err


def test_what_cannot_be_read_is_not_called_broken(
    copied: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stale(*_: object) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(manifest, "fingerprints", stale)
    assert recipe_here(keeping(copied, "--resume")) == 2
    assert "Stale file handle" in capfd.readouterr().err
    assert (copied / "kept" / "step_12").is_dir()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "has checkpoints already: --resume goes on from them"),
        (["--resume", "--lr", "0.001"], "was made with --lr 0.004, this run has 0.001"),
        (["--resume", "--steps", "13"], "was made with --steps 12, this run has 13"),
        (["--resume", "--tied"], "was made with --tied False, this run has True"),
        (["--resume", "--text", str(Path(__file__).with_name("test_recipe.py"))], "was made of other data"),
        (["--resume", "--keep", "0"], "--keep must be at least 1, got 0"),
    ],
)
def test_what_is_no_continuation_is_refused(
    kept: Path, capfd: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert recipe_here(keeping(kept, *options)) == 2
    assert message in capfd.readouterr().err
    assert names(kept) == ["step_12", "step_4", "step_8"]
    assert len(losses(kept / "out")) == STEPS


def test_the_precision_is_compared_as_it_was_computed_in(
    copied: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not as it was told: without --dtype a GPU computes in another than a CPU."""
    uninterrupted = losses(copied / "out")
    end_at(copied, 4)
    # A rank with a GPU, as far as the precision goes.
    join = joining.join_ranks
    with monkeypatch.context() as patch:
        patch.setattr(joining, "join_ranks", lambda *told: replace(join(*told), dtype=torch.bfloat16))
        assert recipe_here(keeping(copied, "--resume", every=4)) == 2
    said = capfd.readouterr().err
    assert "--resume: the checkpoint was made with --dtype float32, this run has bfloat16" in said
    assert names(copied) == ["step_4"]
    assert recipe_here(keeping(copied, "--resume", "--dtype", "float32", every=4)) == 0
    assert losses(copied / "out") == uninterrupted


def test_resume_needs_a_folder(capfd: pytest.CaptureFixture[str]) -> None:
    assert recipe_here([*RUN, "--resume"]) == 2
    assert "--resume goes on from a checkpoint: say where they are" in capfd.readouterr().err


@pytest.mark.parametrize("when", ["--save-async", "--save-sync"])
def test_a_full_disk_ends_in_a_message_and_leaves_what_was_there(
    copied: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    end_at(copied, 4)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", full)
    assert recipe_here(keeping(copied, "--resume", when, every=4)) == 2
    said = capfd.readouterr().err
    assert "--checkpoint: that of step 8 could not be written: [Errno 28] No space left on device" in said
    assert names(copied) == [".step_8.partial", "step_4"]
    monkeypatch.undo()
    # What it left is no checkpoint, and not in the way.
    assert recipe_here(keeping(copied, "--resume", when, every=4, keep=2)) == 0
    assert names(copied) == ["step_12", "step_8"]


def said_with_metrics_on_a_full_disk(out: Path, options: list[str]) -> tuple[int, str]:
    """A rank's exit status, and what it says."""
    with mock.patch("recipes.training.command._PATIENCE", 0), contextlib.redirect_stderr(io.StringIO()) as said:
        status = recipe_on_rank([*RUN, "--out", str(out), *options])
    return status, said.getvalue()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_metrics_on_a_full_disk_end_in_a_line_after_the_run(ranks: Ranks, tmp_path: Path) -> None:
    """Of the rank that writes; others hear of nothing, and do not take it for lost."""
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    (status, said), other = ranks(2).run(said_with_metrics_on_a_full_disk, tmp_path, ["--ring", "2"])
    trouble = f"--out: {tmp_path / 'metrics.jsonl'} cannot be written: No space left on device"
    assert status == 2
    assert said.startswith(f"{trouble}; training goes on without it\n")
    assert said.endswith(f"train_bytes: {trouble}\n")
    assert "Traceback" not in said
    assert other == (0, "")
    assert len(losses(tmp_path)) == STEPS


@pytest.mark.parametrize(("name", "other"), [("metrics.jsonl", "tensorboard"), ("tensorboard", "metrics.jsonl")])
def test_metrics_that_cannot_be_made_end_in_a_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str, other: str
) -> None:
    """And keep no others from being written."""
    pytest.importorskip("tensorboard")
    if name == "metrics.jsonl":
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).touch()
    assert recipe_here([*RUN, "--tensorboard", "--out", str(tmp_path)]) == 2
    said = capfd.readouterr().err
    trouble = f"--out: {tmp_path / name} cannot be written: "
    assert said.count(trouble) == 2  # at once, and in the end
    assert f"train_bytes: {trouble}" in said
    assert "Traceback" not in said
    assert len(losses(tmp_path)) == STEPS
    assert steps_in(tmp_path / other) == [*range(1, STEPS + 1)]


def test_one_process_waits_for_nobody(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(*_: object, **__: object) -> None:
        raise RuntimeError("no memory for a copy")

    monkeypatch.setattr(dcp, "save", save)
    assert recipe_here(keeping(tmp_path, "--save-sync")) == 2
    assert "--checkpoint: that of step 2 could not be written: no memory for a copy" in capfd.readouterr().err


def test_what_is_written_while_training_goes_on_is_of_the_step_that_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a disk slower than the steps after it, and a loss that draws from the random generator."""
    write, plain = dcp.FileSystemWriter.write_data, MeanLoss.__call__

    def slow(*args: object) -> object:
        time.sleep(0.5)
        return write(*args)

    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", slow)
    monkeypatch.setattr(MeanLoss, "__call__", lambda self, batch: plain(self, batch) * (1 + torch.rand(())))
    assert recipe_here(keeping(tmp_path, every=5)) == 0
    uninterrupted = losses(tmp_path / "out")
    end_at(tmp_path, 5)
    assert recipe_here(keeping(tmp_path, "--resume", every=5)) == 0
    assert losses(tmp_path / "out") == uninterrupted


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is not as it was written"),
        ("[" * 100_000, "is not as it was written"),
        ("[1]", "is not as it was written"),
        ('{"format": 1, "fields": {}, "files": {}}', "is not as it was written"),
    ],
)
def test_what_is_no_manifest_is_refused(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / manifest.NAME).write_text(text)
    with pytest.raises(manifest.BrokenError, match=why):
        manifest.read(tmp_path)


def test_a_manifest_of_another_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "FORMAT", 2)
    manifest.write(tmp_path, {}, {})
    monkeypatch.undo()
    with pytest.raises(ValueError, match="is of format 2, this is format 1"):  # and not called broken
        manifest.read(tmp_path)


def test_what_is_no_number_ends_the_run_before_it_is_kept(
    copied: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    end_at(copied, 4)
    plain = MeanLoss.__call__
    monkeypatch.setattr(MeanLoss, "__call__", lambda self, batch: plain(self, batch) * float("nan"))
    assert recipe_here(keeping(copied, "--resume")) == 2
    assert "step 5: loss nan, gradient norm nan; " in capfd.readouterr().err
    assert names(copied) == ["step_4"]
    assert not (copied / "out" / "run.json").exists()


def test_tensorboard_shows_every_step_once(copied: Path) -> None:
    """Also those made before it was asked for, and those that are gone over again."""
    pytest.importorskip("tensorboard")
    for _ in range(2):
        end_at(copied, 8)
        assert recipe_here(keeping(copied, "--resume", "--tensorboard", every=4)) == 0
        assert steps_in(copied / "out" / "tensorboard") == [*range(1, STEPS + 1)]
