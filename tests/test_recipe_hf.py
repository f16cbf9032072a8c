"""Models of transformers on packed text: the run of one process under FSDP2, and documents that stay apart."""

import contextlib
import io
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

pytest.importorskip("transformers", reason="the extra `transformers` is not installed")

from safetensors import SafetensorError
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    AutoTokenizer,
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from recipes.finetune_hf.documents import Packed, PackedDocuments
from recipes.finetune_hf.settings import RANDOM, Settings, check_settings
from recipes.finetune_hf.train import IGNORED, PackedLoss, _check_model, _make_parallel, next_tokens
from recipes.training import manifest
from recipes.training.ranks import Ranks as TrainingRanks
from recipes.training.settings import Launch, RecipeError
from tests.recipes import check_trains_alike, losses, recipe_here, recipe_on_rank
from wallfacer_dt import TokenOrder, context_mesh
from wallfacer_dt.testing import RankPool, worst_error
from wallfacer_dt.testing.fake import fake_world

Ranks = Callable[[int], RankPool]

FEW = ["--sequence", "130", "--batch", "2", "--steps", "4"]
SMALL = [*FEW, "--dim", "16", "--heads", "2", "--kv-heads", "1"]


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
        check_trains_alike(tmp_path / name, tmp_path / "alone")
        assert (tmp_path / name / "curve.png").stat().st_size > 10_000
    assert recipe_here([*FEW, "--model", f"{first}/model", "--tokenizer", "bytes", "--out", then], "finetune_hf") == 0
    assert losses(tmp_path / "then")[0] < losses(tmp_path / "first")[-1]


def full(*_: object, **__: object) -> None:
    raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


def test_a_model_that_does_not_fit_on_the_disk_ends_in_a_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What fits is there."""
    monkeypatch.setattr(PreTrainedModel, "save_pretrained", full)
    assert recipe_here([*SMALL, "--out", str(tmp_path)], "finetune_hf") == 2
    said = capfd.readouterr().err.splitlines()[-1]
    assert said.startswith(f"finetune_hf: --out: {tmp_path / 'model'} cannot be written: Error while serializing")
    assert "No space left on device" in said
    assert len(losses(tmp_path)) == 4
    assert (tmp_path / "curve.png").stat().st_size > 10_000


@pytest.fixture
def words(tmp_path: Path) -> Path:
    """The folder of a tokenizer, of which a word of a text of three is a token; most numbers are of none."""
    vocabulary = {"one": 0, "two": 1, "three": 300, "[UNK]": 3}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(tmp_path / "words")
    return tmp_path / "words"


def test_a_vocabulary_that_is_cut_short_ends_in_a_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Which transformers raises a bare Exception of."""
    folder = tmp_path / "words"
    folder.mkdir()
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    (folder / "vocab.json").write_text('{"one": 0, "tw')
    (folder / "merges.txt").write_text("")
    assert recipe_here([*SMALL, "--tokenizer", str(folder), "--out", str(tmp_path)], "finetune_hf") == 2
    said = capfd.readouterr().err
    assert f"finetune_hf: --tokenizer: {folder} has no tokenizer that loads: " in said
    assert "Traceback" not in said


def test_training_goes_on_from_what_was_saved(tmp_path: Path, words: Path) -> None:
    """With the tokenizer that a model was trained on."""
    text, (first, then) = tmp_path / "text", (tmp_path / name for name in ("first", "then"))
    text.write_text("one two three " * 400)
    few = [*FEW, "--text", str(text)]
    assert recipe_here([*few, "--tokenizer", str(words), "--out", str(first)], "finetune_hf") == 0
    assert AutoTokenizer.from_pretrained(first / "model")("three one")["input_ids"] == [300, 0]
    assert recipe_here([*few, "--model", str(first / "model"), "--out", str(then)], "finetune_hf") == 0
    assert losses(then)[0] < losses(first)[-1]


def test_a_model_of_bytes_has_no_tokenizer_to_go_on_with(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], words: Path
) -> None:
    """Not one of another run in its folder either; some models have one that knows nothing."""
    out = tmp_path / "out"
    assert recipe_here([*SMALL, "--out", str(out)], "finetune_hf") == 0
    GPT2LMHeadModel(GPT2Config(vocab_size=256, n_embd=16, n_layer=1, n_head=2)).save_pretrained(tmp_path / "gpt")
    for model in (out / "model", tmp_path / "gpt"):
        capfd.readouterr()
        assert recipe_here(["--model", str(model), "--out", str(tmp_path / "then")], "finetune_hf") == 2
        said = capfd.readouterr().err
        assert f"--model: {model} has no tokenizer that loads: " in said
        assert said.endswith("; give --tokenizer, a folder or bytes\n")
    (tmp_path / "then").mkdir()
    words.rename(tmp_path / "then" / "model")
    told = ["--model", str(out / "model"), "--tokenizer", "bytes", "--out", str(tmp_path / "then")]
    assert recipe_here(told, "finetune_hf") == 2
    assert "has the tokenizer of another model, this one is of bytes" in capfd.readouterr().err


def test_sizes_are_compared_where_they_are_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Beside a model a checkpoint may have some that were not used, as of a version that took them."""
    llama().save_pretrained(tmp_path / "llama")
    kept = [*FEW, "--checkpoint", str(tmp_path / "kept"), "--out", str(tmp_path)]
    told = [*kept, "--model", str(tmp_path / "llama"), "--tokenizer", "bytes"]
    assert recipe_here(told, "finetune_hf") == 0
    step = tmp_path / "kept" / "step_4"
    fields, files = manifest.read(step)
    fields["settings"] |= RANDOM
    manifest.write(step, files, fields)
    assert recipe_here([*told, "--resume"], "finetune_hf") == 0
    assert "going on from step 4" in capfd.readouterr().err
    assert recipe_here([*kept, "--dim", "32", "--resume"], "finetune_hf") == 2
    assert "the checkpoint was made with --dim 64, this run has 32" in capfd.readouterr().err
    fields["settings"] |= dict.fromkeys(RANDOM)
    manifest.write(step, files, fields)
    assert recipe_here([*kept, "--dim", "32", "--resume"], "finetune_hf") == 2
    assert "step_4 cannot be loaded: Size mismatch" in capfd.readouterr().err


def test_a_file_in_place_of_the_model_is_refused_before_the_first_step(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """transformers would log it, after the last."""
    (tmp_path / "model").touch()
    assert recipe_here([*SMALL, "--out", str(tmp_path)], "finetune_hf") == 2
    assert capfd.readouterr().err == f"finetune_hf: --out: {tmp_path / 'model'} cannot be made: File exists\n"
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_model_that_was_not_saved_is_not_taken_for_one_that_was(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PreTrainedModel, "save_pretrained", lambda *_, **__: None)
    assert recipe_here([*SMALL, "--out", str(tmp_path)], "finetune_hf") == 2
    assert "no weights are there after it was saved" in capfd.readouterr().err


def masks_of_dropout(arguments: list[str]) -> list[torch.Tensor]:
    """What this rank's modules of dropout kept in training, in the order of their calls."""
    kept = []

    def forward(self: torch.nn.Dropout, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
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


OPT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 16, "word_embed_proj_dim": 16}
LLAMA = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
HERE = TrainingRanks(
    launch=Launch(rank=0, world=2, local_rank=0, local_world=2),
    device=torch.device("cpu"), ulysses=1, ring=1, team=1, dtype=torch.float32,
)  # fmt: skip


def test_layers_that_ranks_leave_out_at_random_are_refused() -> None:
    """Before ranks meet, also where they share no sequence."""
    model = OPTForCausalLM(OPTConfig(vocab_size=256, **OPT, layerdrop=0.1))
    with pytest.raises(RecipeError, match=r"layerdrop leaves layers out.*: set it to 0 in its config\.json"):
        _make_parallel(model, Settings(data_parallel=2), HERE)


def llama(eps: float = 1e-6, **rope: Any) -> LlamaForCausalLM:
    told = {"rms_norm_eps": eps, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, **rope}}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=64, **LLAMA, **told))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def widen(path: Path) -> None:
    path.write_text(path.read_text().replace('"intermediate_size": 16', '"intermediate_size": 32'))


@pytest.mark.parametrize(("file", "damage"), [("model.safetensors", cut), ("config.json", widen)])
def test_a_model_that_is_damaged_ends_in_a_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], file: str, damage: Callable[[Path], None]
) -> None:
    llama().save_pretrained(tmp_path)
    damage(tmp_path / file)
    told = ["--model", str(tmp_path), "--tokenizer", "bytes", "--text", __file__, "--out", str(tmp_path / "out")]
    assert recipe_here([*FEW, *told], "finetune_hf") == 2
    said = capfd.readouterr().err
    assert f"finetune_hf: --model: {tmp_path} has no model that loads: " in said
    assert "Traceback" not in said


def test_a_model_of_pictures_too_has_the_vocabulary_of_its_text(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], words: Path
) -> None:
    """Which its own config does not tell."""
    config = Gemma3Config(
        text_config={"vocab_size": 256, "num_key_value_heads": 1, "head_dim": 8, **LLAMA},
        vision_config={"image_size": 16, "patch_size": 8, **LLAMA},
        mm_tokens_per_image=4,
    )
    Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path / "gemma")
    told = [*FEW, "--model", str(tmp_path / "gemma"), "--out", str(tmp_path)]
    assert recipe_here([*told, "--text", __file__, "--tokenizer", "bytes"], "finetune_hf") == 0
    (tmp_path / "text").write_text("one two three " * 400)
    assert recipe_here([*told, "--text", str(tmp_path / "text"), "--tokenizer", str(words)], "finetune_hf") == 2
    assert "--tokenizer: the text has token 300, the model a vocabulary of 256" in capfd.readouterr().err


def one_step(folder: Path) -> list[str]:
    """Of a model, to beside it."""
    told = ["--model", str(folder), "--tokenizer", "bytes", "--text", __file__, "--steps", "1", "--sequence", "32"]
    return [*told, "--out", str(folder / "out")]


def said_of_attention(folder: Path, options: list[str]) -> tuple[int, str]:
    """The exit status of a run of this rank on a model, and what it says."""
    with mock.patch("recipes.training.command._PATIENCE", 0), contextlib.redirect_stderr(io.StringIO()) as said:
        status = recipe_on_rank([*one_step(folder), *options], "finetune_hf")
    return status, said.getvalue()


def test_what_a_model_asks_of_attention_is_refused_in_a_line(ranks: Ranks, tmp_path: Path) -> None:
    """In the first forward; soft caps, which torch has none of on the CPU, are as in one process."""
    GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=256)).save_pretrained(tmp_path / "dropout")
    llama().save_pretrained(tmp_path / "heads")
    for folder, options, message in (
        ("dropout", ["--ring", "2"], "dropout=0.1 of attention is not implemented"),
        ("heads", ["--ulysses", "4"], "cp_ulysses of 4 splits query heads, of which there are only 2"),
    ):
        for status, said in ranks(int(options[1])).run(said_of_attention, tmp_path / folder, options):
            assert status == 2, said
            assert message in said
            assert "Traceback" not in said
    config = Gemma2Config(vocab_size=256, num_key_value_heads=1, head_dim=8, **LLAMA)
    Gemma2ForCausalLM(config).save_pretrained(tmp_path / "soft caps")
    assert ranks(2).run(said_of_attention, tmp_path / "soft caps", ["--ring", "2"])[0][0] == 0
    found = losses(tmp_path / "soft caps" / "out")
    assert recipe_here(one_step(tmp_path / "soft caps"), "finetune_hf") == 0
    assert worst_error([(found, losses(tmp_path / "soft caps" / "out"))]) <= 1e-6


def said_of_models(folders: tuple[Path, Path], options: list[str]) -> str:
    """What a rank says whose model is in its own folder."""
    told = ["--model", str(folders[dist.get_rank()]), "--tokenizer", "bytes", "--text", __file__, "--steps", "1"]
    with mock.patch("recipes.training.command._PATIENCE", 0), contextlib.redirect_stderr(io.StringIO()) as said:
        recipe_on_rank([*told, "--sequence", "32", "--out", str(folders[0] / "out"), *options], "finetune_hf")
    return said.getvalue()


@pytest.mark.parametrize("options", [["--ring", "2"], ["--data-parallel", "2"]])
def test_ranks_with_other_models_are_refused(ranks: Ranks, tmp_path: Path, options: list[str]) -> None:
    """Of one of which FSDP would take half, and half of the other."""
    one, weights, config, broken = (tmp_path / name for name in ("one", "weights", "config", "broken"))
    for folder, seed, eps in ((one, 0, 1e-6), (weights, 1, 1e-6), (config, 0, 1e-5)):
        torch.manual_seed(seed)
        llama(eps).save_pretrained(folder)
    shutil.copytree(one, broken)
    cut(broken / "model.safetensors")
    for other in (weights, config):
        for said in ranks(2).run(said_of_models, (one, other), options):
            assert "rank 1 found other data than rank 0: all ranks need the same files" in said
    (one / "out" / "model").rename(tmp_path / "empty")
    (one / "out" / "model").touch()
    for said, whose in zip(ranks(2).run(said_of_models, (one, one), options), ("", "rank 0: "), strict=True):
        assert f"finetune_hf: {whose}--out: {one / 'out' / 'model'} cannot be made: File exists" in said
    (one / "out" / "model").unlink()
    for said, whose in zip(ranks(2).run(said_of_models, (one, broken), options), ("rank 1: ", ""), strict=True):
        assert f"finetune_hf: {whose}--model: {broken} has no model that loads" in said


@pytest.mark.parametrize(
    "model",
    [
        OPTForCausalLM(OPTConfig(vocab_size=256, **OPT)),
        BloomForCausalLM(BloomConfig(vocab_size=256, hidden_size=16, n_layer=1, n_head=2)),
    ],
)
def test_models_in_which_documents_see_each_other_are_refused(model: PreTrainedModel) -> None:
    """Unless there is one document, or attention is told where they begin."""
    with pytest.raises(RecipeError, match="ForCausalLM does not keep packed documents apart"):
        _check_model(model, Settings(sequence=64), HERE, [10, 20])
    _check_model(model, Settings(sequence=64), HERE, [30])
    _check_model(model, Settings(sequence=64), replace(HERE, context=mock.Mock()), [10, 20])
    _check_model(llama(), Settings(sequence=64), HERE, [10, 20])


def test_a_model_of_fewer_positions_is_refused() -> None:
    """As many as a document has tokens; those that are computed have no end, and remember none that is tried."""
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=64, n_embd=16, n_layer=1, n_head=2))
    with pytest.raises(RecipeError, match="--sequence 65 has more positions than GPT2LMHeadModel of --model"):
        _check_model(model, Settings(sequence=65), HERE, [10, 100])
    _check_model(model, Settings(sequence=64), HERE, [10, 100])
    _check_model(model, Settings(sequence=65), HERE, [10, 64])
    dynamic = llama(rope_type="dynamic", factor=2.0)
    before = dynamic.model.rotary_emb.inv_freq.clone()
    for model in (llama(), dynamic):
        _check_model(model, Settings(sequence=100), HERE, [10, 100])
    assert dynamic.model.rotary_emb.inv_freq.equal(before)


def test_models_that_no_mesh_can_run_get_one_line() -> None:
    model = BloomForCausalLM(BloomConfig(vocab_size=256, hidden_size=16, n_layer=1, n_head=2))
    with fake_world(2):
        mesh = context_mesh("cpu", 2)
        here = replace(HERE, context=mesh, order=TokenOrder("head_tail", mesh))
        with pytest.raises(RecipeError, match="BloomForCausalLM cannot be made context parallel"):
            _make_parallel(model, Settings(), here)


def test_a_step_without_labels_is_not_taken_for_one_that_diverges() -> None:
    alone = Packed(torch.tensor([[5, 6, 7]]), torch.tensor([[0, 1, 2]]))
    with pytest.raises(RecipeError, match="no token of a step has a label"):
        PackedLoss(llama(), HERE)(alone)


@pytest.mark.parametrize(("length", "refused"), [(3, True), (4, False), (5, True), (7, False), (9, True)])
def test_every_rank_has_a_token(length: int, refused: bool) -> None:
    message = f"--sequence {length} leaves one of the 4 ranks"
    with pytest.raises(RecipeError, match=message) if refused else contextlib.nullcontext():
        check_settings(Settings(sequence=length), 4)


@pytest.mark.whole
def test_data_parallel_ranks_count_all_tokens(ranks: Ranks, tmp_path: Path) -> None:
    alone, two = (str(tmp_path / name) for name in ("alone", "two"))
    run = (recipe_on_rank, [*SMALL, "--batch", "1", "--data-parallel", "2", "--out", two], "finetune_hf")
    assert ranks(4).run(*run) == [0] * 4
    assert recipe_here([*SMALL, "--out", alone], "finetune_hf") == 0
    check_trains_alike(tmp_path / "two", tmp_path / "alone")


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
        (["--model", "tests", "--layers", "7"], "--layers 7 is of the random model, but --model has sizes of its own"),
        (["--model", "tests", "--kv-heads", "2"], "--kv-heads 2 is of the random model"),
        (["--model", "tests", "--dim", "0"], "--dim must be at least 1, got 0"),
        (["--heads", "3", "--dim", "48"], "--heads 3 must be a multiple of --kv-heads 2"),
        (["--resume"], "--resume goes on from a checkpoint"),
        (["--save-every", "7"], "--save-every, --keep and --save-sync are of checkpoints: say where they are"),
        (["--save-sync"], "--save-every, --keep and --save-sync are of checkpoints: say where they are"),
        (["--sequence", "1"], "--sequence must be at least 2"),
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
