"""The diffusion transformer: the run of one process on any mesh, with its pictures; and sheets of digits."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from matplotlib.image import imread

pytest.importorskip("sklearn", reason="scikit-learn is not installed")

from recipes.train_dit.model import DiT, ModelConfig
from recipes.train_dit.settings import Settings
from recipes.train_dit.sheets import Sheets, to_images, to_patches
from recipes.training import ranks as joining
from recipes.training.record import read_run
from tests.recipes import check_trains_alike, losses, recipe_here, recipe_on_rank
from wallfacer_dt.testing import RankPool, worst_error

Ranks = Callable[[int], RankPool]

SMALL = ["--sheet", "1", "--patch", "2", "--dim", "16", "--heads", "2", "--layers", "2", "--batch", "2", "--steps", "6"]
SMALL += ["--sample-steps", "3"]


def test_ranks_train_and_draw_as_one_process(ranks: Ranks, tmp_path: Path) -> None:
    """Also after a checkpoint of another mesh, and with METP; 25 patches do not divide by 4."""
    common = [*SMALL, "--checkpoint", str(tmp_path / "kept"), "--save-every", "3", "--out"]
    assert ranks(1).run(recipe_on_rank, [*SMALL, "--out", str(tmp_path / "alone")], "train_dit") == [0]
    first = [*common, str(tmp_path / "first"), "--ulysses", "2", "--team", "2"]
    assert ranks(4).run(recipe_on_rank, first, "train_dit") == [0] * 4
    (tmp_path / "kept" / "step_6").rename(tmp_path / "newest")
    again = [*common, str(tmp_path / "again"), "--ulysses", "2", "--team", "2", "--resume"]
    assert ranks(4).run(recipe_on_rank, again, "train_dit") == [0] * 4
    assert losses(tmp_path / "again") == losses(tmp_path / "first")
    (tmp_path / "kept" / "step_6").rename(tmp_path / "again" / "newest")
    then = [*common, str(tmp_path / "then"), "--ring", "4", "--ffn", "metp", "--resume"]
    assert ranks(4).run(recipe_on_rank, then, "train_dit") == [0] * 4
    for name in ("first", "then"):
        check_trains_alike(tmp_path / name, tmp_path / "alone")
        run = read_run(tmp_path / name / "run.json")
        for traffic in (run.forward, run.backward):
            assert traffic is not None
            assert traffic.as_formula, (name, traffic)
        # Of 255 levels of grey a rounding may move one.
        assert worst_error([(picture(tmp_path / name), picture(tmp_path / "alone"))]) <= 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pictures_are_made_in_the_precision_of_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """That of GPUs is refused on a CPU, so ranks are told of it behind the options' check."""
    join, forward, computed = joining.join_ranks, DiT.forward, []

    def counting(self: DiT, *inputs: torch.Tensor) -> torch.Tensor:
        velocity_BLP = forward(self, *inputs)
        computed.append((torch.is_grad_enabled(), inputs[0].dtype, velocity_BLP.dtype))
        return velocity_BLP

    monkeypatch.setattr(joining, "join_ranks", lambda *told: replace(join(*told), dtype=dtype))
    monkeypatch.setattr(DiT, "forward", counting)
    assert recipe_here([*SMALL, "--out", str(tmp_path)], "train_dit") == 0
    # Six steps of training, then three that call the model twice, on pictures that stay float32.
    assert computed == [(True, torch.float32, dtype)] * 6 + [(False, torch.float32, dtype)] * 6
    assert (tmp_path / "samples.png").exists()


def picture(folder: Path) -> torch.Tensor:
    return torch.from_numpy(imread(folder / "samples.png"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--patch", "3"], "--patch 3 must divide the 10 pixels of a digit"),
        (["--sheet", "0"], "--sheet must be at least 1, got 0"),
        (["--batch", "65537"], "--batch x --data-parallel must be at most 65536, the sheets of an epoch, got 65537"),
        (["--dim", "20"], "--dim 20 must be a multiple of twice --heads 4"),
        (["--ulysses", "8"], "--ulysses 8 gives every rank of its axis some of the heads"),
        (["--ffn", "metp"], "--ffn metp shares weights among the ranks of a sequence, of which there is one"),
    ],
)
def test_bad_input_gets_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, options: list[str], message: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8" if "--ulysses" in options else "1")
    assert recipe_here([*options, "--out", "nowhere"], "train_dit") == 2
    said = capsys.readouterr().err
    assert message in said
    assert len(said.splitlines()) == 1


def test_patches_are_a_picture_in_reading_order() -> None:
    image = torch.arange(36.0).view(1, 6, 6)
    patches = to_patches(image, 2)
    assert patches[0, 0].tolist() == [0, 1, 6, 7]
    assert patches[0, 1].tolist() == [2, 3, 8, 9]
    assert patches[0, 3].tolist() == [12, 13, 18, 19]
    assert torch.equal(to_images(patches, 2), image)


def test_a_sheet_depends_on_its_number_and_the_seed() -> None:
    sheets, others, large = (Sheets(Settings(sheet=2, seed=seed)) for seed in (0, 1, 2**63 - 1))
    assert not others[7].noise_NP.equal(large[7].noise_NP)
    assert all(torch.equal(a, b) for a, b in zip(sheets[5], sheets[5], strict=True))
    for other in (sheets[6], others[5]):
        assert not torch.equal(other.noise_NP, sheets[5].noise_NP)
    assert sheets[5].pixels_NP.shape == (100, 4)
    assert -1 == sheets[5].pixels_NP.min() < sheets[5].pixels_NP.max() <= 1


def test_at_first_the_model_gives_zero_and_every_layer_is_the_identity() -> None:
    model = DiT(ModelConfig(dim=16, layers=2, heads=2, side=3, pixels=4, classes=10))
    x_BLD, condition_BD = torch.randn(2, 9, 16), torch.randn(2, 16)
    assert torch.equal(model.layers[0](x_BLD, condition_BD), x_BLD)
    velocity = model(torch.randn(2, 9, 4), torch.arange(9), torch.rand(2), torch.tensor([1, 2]))
    assert not velocity.any()
    assert velocity.shape == (2, 9, 4)
