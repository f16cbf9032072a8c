"""Models of transformers on packed text: the run of one process under FSDP2, and documents that stay apart."""

from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("transformers", reason="the extra `transformers` is not installed")

from transformers import GPT2Config, GPT2LMHeadModel, OPTConfig, OPTForCausalLM

from recipes.finetune_hf.documents import PackedDocuments
from recipes.finetune_hf.settings import Settings
from recipes.finetune_hf.train import IGNORED, _make_parallel, next_tokens
from recipes.training.ranks import Ranks as TrainingRanks
from recipes.training.settings import Launch, RecipeError
from tests.recipes import losses, recipe_here, recipe_on_rank
from wallfacer_dt.testing import RankPool, worst_error

Ranks = Callable[[int], RankPool]

SMALL = ["--sequence", "130", "--dim", "16", "--heads", "2", "--kv-heads", "1", "--batch", "2", "--steps", "4"]


def test_ranks_train_as_one_process(ranks: Ranks, tmp_path: Path) -> None:
    """Also after a checkpoint of another mesh; what was trained is a model that goes on."""
    kept = ["--checkpoint", str(tmp_path / "kept"), "--save-every", "2"]
    alone, first, then = (str(tmp_path / name) for name in ("alone", "first", "then"))
    run = (recipe_on_rank, [*SMALL, *kept, "--ring", "2", "--team", "2", "--out", first], "finetune_hf")
    assert ranks(4).run(*run) == [0] * 4
    (tmp_path / "kept" / "step_4").rename(tmp_path / "newest")
    again = (run[0], [*run[1][:-1], str(tmp_path / "again"), "--resume"], run[2])
    assert ranks(4).run(*again) == [0] * 4
    assert losses(tmp_path / "again") == losses(tmp_path / "first")
    (tmp_path / "kept" / "step_4").rename(tmp_path / "again" / "newest")
    assert recipe_here([*SMALL, *kept, "--resume", "--out", then], "finetune_hf") == 0
    assert recipe_here([*SMALL, "--out", alone], "finetune_hf") == 0
    for name in ("first", "then"):
        assert worst_error([(losses(tmp_path / name), losses(tmp_path / "alone"))]) <= 1e-6
        assert (tmp_path / name / "curve.png").stat().st_size > 10_000
    assert recipe_here([*SMALL, "--model", f"{first}/model", "--tokenizer", "bytes", "--out", then], "finetune_hf") == 0
    assert losses(tmp_path / "then")[0] < losses(tmp_path / "first")[-1]


def masks_of_dropout(arguments: list[str]) -> list[torch.Tensor]:
    """What this rank's modules of dropout kept, in the order of their calls."""
    kept = []

    def forward(self: torch.nn.Dropout, x: torch.Tensor) -> torch.Tensor:
        kept.append(F.dropout(torch.ones_like(x), self.p, self.training).bool())
        return x * kept[-1] / (1 - self.p)

    with mock.patch.object(torch.nn.Dropout, "forward", forward):
        assert recipe_on_rank(arguments, "finetune_hf") == 0
    return kept


def test_ranks_drop_of_their_own(ranks: Ranks, tmp_path: Path) -> None:
    """Of a model with dropout, whose attention has none; the same again in another run."""
    config = GPT2Config(
        vocab_size=256, n_positions=128, n_embd=16, n_layer=1, n_head=2, attn_pdrop=0.0, resid_pdrop=0.5, embd_pdrop=0.5
    )
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "model")
    told = ["--model", str(tmp_path / "model"), "--tokenizer", "bytes", "--sequence", "128", "--batch", "1"]
    arguments = [*told, "--steps", "1", "--ring", "2", "--out", str(tmp_path)]
    first, second = ranks(2).run(masks_of_dropout, arguments)
    assert len(first) == len(second) == 3  # of embeddings, of what attention and the feed-forward give
    for mine, others in zip(first, second, strict=True):
        assert mine.shape == others.shape
        assert not mine.equal(others)
    again, _ = ranks(2).run(masks_of_dropout, arguments)
    assert all(map(torch.equal, first, again))


def test_layers_that_ranks_leave_out_at_random_are_refused() -> None:
    """Before ranks meet, also where they share no sequence."""
    small = {"vocab_size": 256, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 16}
    model = OPTForCausalLM(OPTConfig(**small, layerdrop=0.1))
    launch = Launch(rank=0, world=2, local_rank=0, local_world=2)
    here = TrainingRanks(launch=launch, device=torch.device("cpu"), ulysses=1, ring=1, team=1, dtype=torch.float32)
    with pytest.raises(RecipeError, match=r"layerdrop leaves layers out.*: set it to 0 in its config\.json"):
        _make_parallel(model, Settings(data_parallel=2), here)


@pytest.mark.whole
def test_data_parallel_ranks_count_all_tokens(ranks: Ranks, tmp_path: Path) -> None:
    alone, two = (str(tmp_path / name) for name in ("alone", "two"))
    run = (recipe_on_rank, [*SMALL, "--batch", "1", "--data-parallel", "2", "--out", two], "finetune_hf")
    assert ranks(4).run(*run) == [0] * 4
    assert recipe_here([*SMALL, "--out", alone], "finetune_hf") == 0
    assert worst_error([(losses(tmp_path / "two"), losses(tmp_path / "alone"))]) <= 1e-6


def test_the_last_token_of_a_document_predicts_nothing() -> None:
    tokens = torch.tensor([[5, 6, 7, 8], [1, 2, 3, 4]])
    documents = torch.tensor([[0, 0, 1, 1], [3, 3, 3, 4]])
    expected = [[6, IGNORED, 8, IGNORED], [2, 3, IGNORED, IGNORED]]
    assert next_tokens(tokens, documents).tolist() == expected


def test_documents_are_the_files_of_the_standard_library() -> None:
    packed = PackedDocuments(Settings(sequence=4096))
    numbers = [number for index in range(8) for number in packed[index].documents_N.unique().tolist()]
    assert len({*numbers}) > 2
    assert numbers == sorted(numbers)
    text = bytes(token for index in range(8) for token in packed[index].tokens_N.tolist())
    assert b"def " in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "nowhere"], "--model: nowhere is not a folder"),
        (["--tokenizer", "nowhere"], "--tokenizer: nowhere is not a folder"),
        (["--model", "tests"], "--model: tests has no tokenizer that loads"),
        (["--model", "tests", "--tokenizer", "bytes"], "--model: tests has no model that loads"),
        (["--text", __file__, "--sequence", "100000"], "holds 0 sequences of 100000 tokens"),
        (["--text", "nowhere"], "--text: nowhere is missing"),
        (["--heads", "3", "--dim", "48"], "--heads 3 must be a multiple of --kv-heads 2"),
        (["--resume"], "--resume goes on from a checkpoint"),
    ],
)
def test_bad_input_gets_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, options: list[str], message: str
) -> None:
    assert recipe_here([*options, "--out", str(tmp_path)], "finetune_hf") == 2
    said = capsys.readouterr().err
    assert message in said
    assert len(said.splitlines()) == 1, said


def test_tensorboard_is_refused_where_it_is_not_installed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "tensorboard" else name)
    assert recipe_here(["--tensorboard", "--out", str(tmp_path)], "finetune_hf") == 2
    assert "--tensorboard: the package tensorboard is not installed" in capsys.readouterr().err
