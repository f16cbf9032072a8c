"""The byte-level recipe: bad input in one line, runs that agree, and a comparison that can fail."""

import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from recipes.finetune_hf.settings import Settings as FineTuning
from recipes.train_bytes.__main__ import main
from recipes.train_bytes.model import ByteGPT, ModelConfig
from recipes.train_bytes.settings import Settings, check_settings
from recipes.training.command import spelled
from recipes.training.compare import compare
from recipes.training.demo import RunError
from recipes.training.gradients import WholeGradients
from recipes.training.ranks import Ranks as TrainingRanks
from recipes.training.ranks import make_meshes, sum_over_groups
from recipes.training.record import Run, Traffic, run_name
from recipes.training.settings import Launch, Placement, RecipeError
from tests.recipes import SMALL, check_trains_alike, recipe_on_rank, run_in
from wallfacer_dt import WaitError, context_mesh
from wallfacer_dt.agreement.whereabouts import Whereabouts
from wallfacer_dt.testing import RankPool
from wallfacer_dt.testing.fake import fake_world

Ranks = Callable[[int], RankPool]

ROOT = Path(__file__).parents[1]


def recipe(*arguments: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """In processes of its own."""
    command = [sys.executable, *launcher, "-m", "recipes.train_bytes", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=1800, cwd=ROOT, check=False)


@pytest.mark.parametrize("command", ["train", "demo"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "nowhere.txt"], "--text: nowhere.txt is missing"),
        (["--text", "{empty}"], "is empty"),
        (["--text", "{short}"], "has 5 bytes, but one sequence and the byte after it need 4097"),
        (["--text", "."], "is not a file"),
        (["--sequence", "0"], "--sequence must be at least 1, got 0"),
        (["--heads", "3", "--kv-heads", "3"], "--dim 128 must be a multiple of --heads 3"),
        (["--kv-heads", "3"], "--heads 4 must be a multiple of --kv-heads 3"),
        (["--order", "zigzag"], "zigzag"),
        (["--seed", "9223372036854775808"], "--seed must be from 0 to 2**63 - 1, got 9223372036854775808"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_bad_input_gets_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, arguments: list[str], message: str
) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "short").write_text("bytes")
    paths = {name: str(tmp_path / name) for name in ("empty", "short")}
    assert main([command, *(a.format(**paths) for a in arguments), "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert len(said.splitlines()) == 1, said


@pytest.mark.parametrize(
    ("sizes", "world", "message"),
    [
        ({"ring": 4, "team": 2}, 4, "--ulysses 1 x --ring 4 x --team 2 x --data-parallel 1 = 8 ranks, but there are 4"),
        ({"ulysses": 2, "ring": 4}, 4, "--ulysses 2 x --ring 4 x --team 1 x --data-parallel 1 = 8 ranks"),
        ({"team": 3}, 8, "--ulysses 1 x --team 3 x --data-parallel 1 must divide the number of ranks, which is 8"),
        ({"ulysses": 3}, 8, "--ulysses 3 x --team 1 x --data-parallel 1 must divide the number of ranks, which is 8"),
        ({"ulysses": 0}, 8, "--ulysses must be at least 1, got 0"),
        ({"ulysses": 8}, 8, "--ulysses 8 gives every rank of its axis some of the heads, of which --heads has 4"),
        ({"ring": 2, "team": 4, "schedule": "published"}, 8, "--ring that is a multiple of --team"),
        ({"ring": 4, "schedule": "published", "rotate": "kv"}, 4, "rotates queries"),
        (
            {"ulysses": 2, "attention": "metp"},
            4,
            "--attention metp goes by groups of heads already: --ulysses must be 1",
        ),
        (
            {"attention": "metp"},
            1,
            "--attention metp shares weights among the ranks of a sequence, of which there is one",
        ),
        ({"data_parallel": 4, "ffn": "metp"}, 4, "--ffn metp shares weights among the ranks of a sequence"),
    ],
)
def test_sizes_that_do_not_fit_the_ranks(sizes: dict, world: int, message: str) -> None:
    with pytest.raises(RecipeError) as refusal:
        check_settings(Settings(**sizes), world)
    assert message in str(refusal.value)


@pytest.mark.parametrize("sizes", [{"ulysses": 2, "ffn": "metp"}, {"team": 2, "ffn": "metp", "attention": "metp"}])
def test_metp_needs_no_more_than_ranks_that_share_a_sequence(sizes: dict) -> None:
    check_settings(Settings(**sizes), 4)


def test_metp_with_ulysses_is_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # There are no other ranks: waiting for them would take minutes.
    for name, value in {"RANK": 0, "WORLD_SIZE": 4, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 4}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: pytest.fail("waited for others"))
    assert main(["--ulysses", "2", "--attention", "metp"]) == 2
    assert capsys.readouterr() == (
        "",
        "train_bytes: --attention metp goes by groups of heads already: --ulysses must be 1, got 2;"
        " choose --ring and --team, or --attention plain\n",
    )


@pytest.mark.parametrize("placement", ["team_in_node", "ring_in_node", "ulysses_in_node"])
@pytest.mark.parametrize("sizes", [(1, 2, 2), (2, 2, 1), (2, 2, 3)])
def test_every_data_parallel_group_is_placed_as_one_is(placement: Placement, sizes: tuple[int, int, int]) -> None:
    ulysses, ring, team = sizes
    settings = Settings(ulysses=ulysses, ring=ring, team=team, data_parallel=2, placement=placement)
    world = 2 * math.prod(sizes)
    with fake_world(world):
        mesh, data_parallel = make_meshes(settings, "cpu", sizes)
        whole = mesh._get_root_mesh().mesh
    with fake_world(world // 2):
        one = context_mesh("cpu", ring, team, ulysses=ulysses, placement=placement)
    assert mesh.mesh_dim_names == one.mesh_dim_names
    assert data_parallel is not None
    assert [group.tolist() for group in whole] == [one.mesh.tolist(), (one.mesh + world // 2).tolist()]


@pytest.mark.parametrize(
    ("sizes", "name"),
    [
        ((1, 1, 1, 1), "one process"),
        ((1, 1, 1, 4), "4 data-parallel ranks"),
        ((1, 4, 1, 1), "ring of 4"),
        ((4, 1, 1, 1), "ulysses of 4"),
        ((1, 2, 2, 1), "ring 2 x team 2"),
        ((1, 1, 4, 1), "ring 1 x team 4"),
        ((2, 2, 1, 1), "ulysses 2 x ring 2"),
        ((2, 2, 2, 1), "ulysses 2 x ring 2 x team 2"),
        ((2, 2, 1, 3), "ulysses 2 x ring 2 x 3 data-parallel"),
    ],
)
def test_what_a_run_is_called(sizes: tuple[int, int, int, int], name: str) -> None:
    assert run_name(*sizes) == name


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"ffn": "metp", "attention": "metp"}, "ring of 4, METP"),
        ({"ffn": "metp"}, "ring of 4, METP ffn"),
        ({"attention": "metp"}, "ring of 4, METP attention"),
    ],
)
def test_what_a_run_with_metp_is_called(options: dict, name: str) -> None:
    assert run_name(1, 4, 1, 1, Settings(**options).metp) == name


def test_the_demo_wants_enough_steps_to_compare(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recipes.training.demo._start", lambda _: pytest.fail("started a run"))
    assert main(["demo", "--steps", "19"]) == 2
    assert capsys.readouterr() == ("", "train_bytes: --steps must be at least 20 for runs to be compared, got 19\n")


@pytest.mark.parametrize("seconds", ["nan", "0", "-1", "inf"])
def test_the_demo_wants_a_time_that_ends(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seconds: str
) -> None:
    monkeypatch.setattr("recipes.training.demo._start", lambda _: pytest.fail("started a run"))
    assert main(["demo", "--out", str(tmp_path / "out"), "--timeout", seconds]) == 2
    assert capsys.readouterr().err == f"train_bytes: --timeout must be finite and above 0, got {float(seconds)}\n"
    assert not [*tmp_path.iterdir()]


def test_what_a_demo_that_fails_says_and_leaves(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Paths are no markup, and what an earlier demo left is gone, of runs that were not begun, too."""
    text = tmp_path / "[red]a.txt"
    text.write_bytes(bytes(200) * 100)

    left = [tmp_path / "out" / name for name in ("run.json", "curves.png", "ulysses1_ring4_team1/run.json")]
    for path in left:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()

    def fail(*_: object) -> None:
        raise RunError("no run")

    monkeypatch.setattr("recipes.training.demo._run", fail)
    assert main(["demo", "--out", str(tmp_path / "out"), "--text", str(text), "--sequence", "64"]) == 1
    assert capsys.readouterr().out.startswith(f"Training on {text}: 5 runs of ")
    assert not [path for path in left if path.exists()]


def run(**changes: object) -> Run:
    traffic = Traffic(received=(20, 20), calls=(2, 2), expected_calls=2, layers=2, formula=(10, 10))
    same = Run(
        name="a run",
        ulysses=1,
        ring=2,
        team=1,
        data_parallel=1,
        device="cpu",
        parameters=1,
        tokens=1,
        text="none",
        losses=(3.0, 2.0, 1.0),
        grad_norms=(1.0, 1.0, 1.0),
        seconds=(1.0, 1.0, 1.0),
        forward=traffic,
        backward=traffic,
    )
    return replace(same, **changes)


@pytest.mark.parametrize(
    ("change", "failure"),
    [
        ({"losses": (3.0, 2.0, 1.00011)}, "losses differ by 1.10e-04 at step 3"),
        ({"losses": (3.0, math.nan, 1.0)}, "losses differ by inf at step 2"),
        (
            {"forward": Traffic(received=(20, 21), calls=(2, 2), expected_calls=2, layers=2, formula=(10, 10))},
            "forward",
        ),
        (
            {"forward": Traffic(received=(20, 20), calls=(2, 1), expected_calls=2, layers=2, formula=(10, 10))},
            "forward",
        ),
        (
            {"backward": Traffic(received=(0, 0), calls=(0, 0), expected_calls=2, layers=2, formula=(10, 10))},
            "backward",
        ),
    ],
)
def test_the_comparison_fails_on_what_is_wrong(change: dict, failure: str) -> None:
    assert compare([run(), run()]).failures == ()
    (found,) = compare([run(), run(**change)]).failures
    assert failure in found


def test_bytes_are_compared_by_layer_however_many_calls_it_makes() -> None:
    traffic = Traffic(received=(30, 30), calls=(4, 4), expected_calls=4, layers=2, formula=(15, 15))
    assert traffic.per_layer == (15, 15)
    assert compare([run(), run(forward=traffic)]).failures == ()
    assert Traffic.from_dict(json.loads(json.dumps(asdict(traffic)))) == traffic


def test_small_differences_pass() -> None:
    comparison = compare([run(), run(losses=(3.0, 2.00009, 1.0), grad_norms=(1.0, 1.005, 1.0))])
    assert comparison.failures == ()
    assert comparison.largest_loss_difference == pytest.approx(9e-5)
    assert comparison.largest_grad_norm_difference == pytest.approx(0.005)


def test_gradients_of_another_scale_do_not_pass() -> None:
    found = compare([run(), run(grad_norms=(1.0, 4.0, 1.0))])
    assert found.failures == ("gradient norms differ by 3.0e+00 of themselves at step 2",)


def test_a_norm_that_is_none_is_infinitely_wrong() -> None:
    """Wherever it stands: neither of the steps, nor of the runs, need it be the first."""
    for runs in ((run(), run(grad_norms=(1.0, math.nan, 1.0))), (run(grad_norms=(1.0, math.nan, 1.0)), run())):
        assert compare(runs).largest_grad_norm_difference == math.inf
        assert compare(runs).failures == ("a gradient norm at step 2 is not finite, or 0 in one run alone",)


def test_the_seconds_of_a_step_are_of_those_that_were_made_here() -> None:
    assert run(seconds=(9.0, 4.0, 4.0, 7.0, 1.0, 1.0), first=3).step_seconds == 1.0
    assert run(seconds=(9.0, 4.0, 4.0, 1.0), first=3).step_seconds == 1.0
    assert run(seconds=(9.0, 4.0, 4.0), first=3).step_seconds == run(seconds=(9.0, 4.0, 4.0)).step_seconds == 4.0


def test_a_keyword_is_no_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bytes").mkdir()
    options = {each.partition("=")[0]: each for each in spelled(FineTuning(tokenizer="bytes"))}
    assert options["--tokenizer"] == "--tokenizer=bytes"


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_is_tied_or_not(tied: bool) -> None:
    model = ByteGPT(ModelConfig(dim=32, layers=1, heads=4, kv_heads=2, tied=tied))
    assert (model.head.weight is model.embedding.weight) == tied
    assert model(torch.zeros(1, 5, dtype=torch.int64), torch.arange(5)).shape == (1, 5, 256)


def check_demo(folder: Path, shown: str) -> None:
    """What a demo of 20 steps has said and written."""
    assert "RIGHT" in shown
    assert "[/]" not in shown  # but colours
    written = json.loads((folder / "run.json").read_text())
    meshes = [(r["ulysses"], r["ring"], r["team"]) for r in written["runs"]]
    assert meshes == [(1, 2, 2), (1, 1, 1), (1, 4, 1), (2, 2, 1), (1, 2, 2)]
    options = [(r["options"]["ffn"], r["options"]["attention"]) for r in written["runs"]]
    assert options == [("plain", "plain")] * 4 + [("metp", "metp")]
    assert {len(r["losses"]) for r in written["runs"]} == {20}
    assert written["comparison"]["largest_loss_difference"] < 1e-4
    assert written["runs"][0]["losses"][-1] < written["runs"][0]["losses"][0]
    assert (folder / "curves.png").stat().st_size > 10_000


@pytest.mark.ranks
@pytest.mark.parametrize("head", ["--untied", pytest.param("--tied", marks=pytest.mark.whole)])
def test_the_demo_compares_runs(
    ranks: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, head: str
) -> None:
    """Each on a pool's ranks, where the demo would start processes."""

    def start(command: list[str]) -> subprocess.CompletedProcess[str]:
        if command[2] == "recipes.training.launch":
            recipe, size, *options = command[3:]
        else:
            recipe, size, options = command[2].removeprefix("recipes."), 1, command[4:]
        assert (command[1], recipe) == ("-m", "train_bytes")
        status = max(ranks(int(size)).run(recipe_on_rank, ["train", *options]))
        return subprocess.CompletedProcess(command, status)

    monkeypatch.setattr("recipes.training.demo._start", start)
    monkeypatch.setattr("recipes.training.demo._finish", lambda process, _: process.returncode)
    assert main(["demo", *SMALL, head, "--text", __file__, "--out", str(tmp_path)]) == 0
    check_demo(tmp_path, capsys.readouterr().out)


@pytest.mark.whole
@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("head", ["--tied", "--untied"])
def test_the_demo_on_a_text_of_ones_own(tmp_path: Path, head: str) -> None:
    text = tmp_path / "text.py"
    text.write_bytes(Path(__file__).read_bytes())
    done = recipe("demo", *SMALL, head, "--text", str(text), "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    check_demo(tmp_path, done.stdout)


COMMON = [*SMALL, "--steps", "3", "--batch", "2", "--text", __file__]


@pytest.fixture(scope="module")
def alone(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The folder of a run of one process with these options."""

    @cache
    def folder(*options: str) -> Path:
        made = tmp_path_factory.mktemp("alone")
        assert ranks(1).run(recipe_on_rank, [*COMMON, *options, "--out", str(made)]) == [0]
        return made

    return folder


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("size", "options"),
    [
        (8, ["--ring", "4", "--team", "2"]),
        (8, ["--ulysses", "2", "--ring", "2", "--team", "2", "--placement", "ulysses_in_node"]),
        # 129 tokens do not divide by 4.
        (8, ["--ulysses", "2", "--ring", "2", "--data-parallel", "2", "--batch", "1", "--sequence", "129"]),
        (4, ["--ring", "2", "--team", "2", "--ffn", "metp", "--attention", "metp", "--tied"]),
        # 96 units do not divide by 5, nor rows of whole heads.
        (5, ["--ring", "5", "--ffn", "metp", "--attention", "metp"]),
        (4, ["--ulysses", "2", "--data-parallel", "2", "--batch", "1", "--ffn", "metp"]),
    ],
)
def test_ranks_train_as_one_process(
    ranks: Ranks, alone: Callable[..., Path], tmp_path: Path, size: int, options: list[str]
) -> None:
    same = options[options.index("--sequence") :] if "--sequence" in options else []
    if "--tied" in options:
        same = ["--tied"]
    assert ranks(size).run(recipe_on_rank, [*COMMON, *options, "--out", str(tmp_path)]) == [0] * size
    check_alike(tmp_path, alone(*same))


@pytest.mark.whole
@pytest.mark.slow
@pytest.mark.ranks
def test_the_long_form_is_the_run_of_one_process(ranks: Ranks, tmp_path: Path) -> None:
    """With torch's launcher."""
    common = [*SMALL, "--steps", "3", "--text", __file__]
    assert ranks(1).run(recipe_on_rank, [*common, "--out", str(tmp_path / "alone")]) == [0]
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = recipe(*common, "--team", "2", "--ffn", "metp", "--out", str(tmp_path), launcher=launcher)
    assert done.returncode == 0, done.stderr
    check_alike(tmp_path, tmp_path / "alone")


def check_alike(folder: Path, of_one: Path) -> None:
    """The run in a folder is that of one process in another, and received what the formula says."""
    check_trains_alike(folder, of_one)
    record = run_in(folder)
    for direction in ("forward", "backward"):
        assert record[direction]["received"] == record[direction]["formula"]
        assert set(record[direction]["calls"]) == {record[direction]["expected_calls"]}


def averaged() -> tuple[dict[str, float | None], float]:
    """Gradients of weights that all ranks, one rank and no rank use, and of one that is frozen; and their norm."""
    model = nn.ParameterDict({name: torch.ones(1) for name in ("all", "one", "none", "frozen")})
    model["frozen"].requires_grad_(False)
    rank = dist.get_rank()
    launch = Launch(rank=rank, world=2, local_rank=rank, local_world=2)
    (model["all"] * (rank + 1) + (model["one"] * 4 if rank else 0)).sum().backward()
    sizes = {"ulysses": 1, "ring": 1, "team": 1}
    where = TrainingRanks(launch=launch, device=torch.device("cpu"), dtype=torch.float32, **sizes)
    norm = WholeGradients(model, where).average()
    return {name: None if p.grad is None else p.grad.item() for name, p in model.items()}, norm.item()


def test_gradients_of_weights_that_not_all_ranks_use(ranks: Ranks) -> None:
    for found, norm in ranks(2).run(averaged):
        assert found == {"all": 1.5, "one": 2.0, "none": None, "frozen": None}
        assert norm == pytest.approx(2.5)


def clipped_part(size: int, *, is_whole: bool) -> tuple[list[int], float]:
    """What a rank has of a gradient whose columns do not divide, which came whole or in parts; and its norm."""
    rank = dist.get_rank()
    model = nn.Linear(size + 2, 3, bias=False)
    mesh = context_mesh("cpu", size)
    columns = [Shard(1)] * mesh.ndim
    model.weight = nn.Parameter(distribute_tensor(torch.zeros(3, size + 2), mesh, columns))
    grad = distribute_tensor(torch.ones(3, size + 2), mesh, [Replicate()] * mesh.ndim if is_whole else columns)
    model.weight.grad = grad * 1  # of its own memory
    launch = Launch(rank=rank, world=size, local_rank=rank, local_world=size)
    sizes = {"ulysses": 1, "ring": size, "team": 1}
    where = TrainingRanks(launch=launch, device=torch.device("cpu"), dtype=torch.float32, **sizes)
    norm = WholeGradients(model, where).average()
    return [*model.weight.grad.to_local().shape], norm.item()


@pytest.mark.parametrize("is_whole", [False, True])
def test_a_gradient_that_comes_whole_counts_once(ranks: Ranks, is_whole: bool) -> None:
    """As torch 2.11 gives it."""
    found = ranks(3).run(partial(clipped_part, 3, is_whole=is_whole))
    assert [shape for shape, _ in found] == [[3, 2], [3, 2], [3, 1]]
    assert [norm for _, norm in found] == pytest.approx([15**0.5 / 3] * 3)


def summed_over_groups() -> tuple[float, str]:
    """Over two groups of two ranks: the sum of ranks' numbers, and what a wait in vain says."""
    rank = dist.get_rank()
    launch = Launch(rank=rank, world=4, local_rank=rank, local_world=4)
    settings, sizes = Settings(ring=2, data_parallel=2), (1, 2, 1)
    context, groups = make_meshes(settings, "cpu", sizes)
    where = TrainingRanks(
        launch=launch, device=torch.device("cpu"), ulysses=1, ring=2, team=1, dtype=torch.float32,
        context=context, data_parallel=groups,
    )  # fmt: skip
    number = torch.tensor(float(rank))
    sum_over_groups(number, "numbers", where)
    with (
        mock.patch.object(dist, "all_reduce", side_effect=RuntimeError("lost")),
        mock.patch.object(Whereabouts, "of", lambda _, ranks: f"ranks {sorted(ranks)}"),
        pytest.raises(WaitError) as said,
    ):
        sum_over_groups(number, "numbers", where)
    return number.item(), str(said.value)


def test_a_wait_for_groups_is_for_their_ranks(ranks: Ranks) -> None:
    for rank, (number, said) in enumerate(ranks(4).run(summed_over_groups)):
        others = [0, 2] if rank % 2 == 0 else [1, 3]
        assert number == sum(others)
        assert "waited for all_reduce of numbers along dp in vain: lost" in said
        assert said.endswith(f"ranks {others}")
