"""transformers' Trainer on shards: what it trains is what one process trains on whole batches; others are refused."""

import os
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import Dataset, IterableDataset, Subset

from wallfacer_dt import TokenOrder, context_mesh
from wallfacer_dt.testing import RankPool, worst_error
from wallfacer_dt.testing.fake import fake_world

pytest.importorskip("transformers", reason="the extra `transformers` is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

from accelerate.big_modeling import _attach_context_parallel_hooks
from accelerate.parallelism_config import ParallelismConfig
from transformers import DataCollatorWithFlattening, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_pt_utils import LabelSmoother

from tests.models import MODELS
from wallfacer_dt.integrations.transformers import context_parallel, shard_inputs
from wallfacer_dt.integrations.transformers.inputs import IGNORED
from wallfacer_dt.integrations.transformers.trainer import ContextParallelTrainer

Ranks = Callable[[int], RankPool]
RANKS = 4
LENGTH, LR, CLIP_NORM = 61, 0.05, 0.5  # of a length that ranks do not divide
FOR_KERNELS = ("cu_seq_lens_k", "cu_seq_lens_q", "max_length_k", "max_length_q", "seq_idx")


class Rows(Dataset):
    """Rows of tokens, of which some labels do not count; remembers which were asked for.

    Some end early or, packed, are of two documents, which positions say. Masked, labels are of tokens that are hidden.
    """

    def __init__(self, *, packed: bool = False, masked: bool = False) -> None:
        generator = torch.Generator().manual_seed(5)
        self.tokens = torch.randint(3, 97, (16, LENGTH), generator=generator)
        self.labels = self.tokens.masked_fill(torch.rand(16, LENGTH, generator=generator) < 0.3, -100)
        self.mask = torch.ones_like(self.tokens)
        self.mask[::3, 40:] = 0
        self.labels[self.mask == 0] = -100
        self.said = {"attention_mask": self.mask}
        if packed:
            positions = torch.arange(LENGTH).expand(16, -1).clone()
            positions[::3, 40:] -= 40
            self.labels[::3, 40] = -100  # which the other document would predict
            self.said = {"position_ids": positions}
            self.labels[:7] = -100  # whole batches of a step, of which others count
        self.shift = not masked
        if masked:
            self.labels[torch.rand(16, LENGTH, generator=generator) < 0.6] = -100
            self.tokens[self.mask == 0] = 0  # of what padding is one process would count, too
            self.tokens[self.labels != -100] = MODELS["ESM-2"].options["mask_token_id"]
        self.asked: list[int] = []

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.asked.append(index)
        return {name: x[index] for name, x in {"input_ids": self.tokens, "labels": self.labels, **self.said}.items()}


def of_torchrun() -> Any:
    """What torchrun tells a process, from which accelerate knows that there are others."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    return mock.patch.dict(os.environ, {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size})


def arguments(**options: Any) -> TrainingArguments:
    return TrainingArguments(
        tempfile.mkdtemp(), use_cpu=True, max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        optim="sgd", learning_rate=LR, lr_scheduler_type="constant", max_grad_norm=CLIP_NORM,
        logging_steps=1, report_to=[], save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False,
        **{"prediction_loss_only": True, "per_device_eval_batch_size": 5} | options,
    )  # fmt: skip


def counted(rows: Rows, some: list[int]) -> Tensor:
    return (rows.labels[some][:, int(rows.shift) :] != -100).sum()


def loss_of(model: Any, rows: Rows, some: list[int]) -> Tensor:
    """The mean over all counted labels, of one process and whole rows."""
    said = {name: x[some] for name, x in rows.said.items()}
    if rows.shift:
        said["use_cache"] = False
    logits = model(input_ids=rows.tokens[some], **said).logits
    last = -1 if rows.shift else None
    wanted = rows.labels[some][:, int(rows.shift) :]
    summed = F.cross_entropy(logits[:, :last].flatten(0, 1), wanted.flatten(), reduction="sum")
    return summed / counted(rows, some)


def one_process(name: str, rows: Rows, steps: list[list[int]]) -> tuple[Any, list[float], list[float]]:
    """The model, and its losses in steps of these rows, and norms of gradients before they are clipped."""
    model = MODELS[name].made()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    losses, norms = [], []
    for some in steps:
        loss = loss_of(model, rows, some)
        losses.append(loss.item())
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    return model, losses, norms


def evaluated(model: Any, rows: Rows, many: int, batch: int) -> float:
    """As Trainer has it: by batch of all meshes, each as much as it has rows; of the first so many."""
    parts = [list(range(many))[first : first + batch] for first in range(0, many, batch)]
    with torch.no_grad():
        return sum(loss_of(model, rows, part).item() * len(part) for part in parts) / many


def trained(name: str, groups: int, order: str, evaluates_first: bool) -> tuple[list[int], float, float]:
    """Which rows this rank read (packed, on two meshes), and how far parameters and losses are from one process."""
    masked, world = not MODELS[name].shift, dist.get_world_size()
    rows = Rows(packed=groups == 2 and not masked, masked=masked)
    whole = init_device_mesh("cpu", (groups, world // groups, 1), mesh_dim_names=("dp", "cp_ring", "cp_team"))
    mesh = whole["cp_ring", "cp_team"]
    model, held_out = MODELS[name].made(), Rows(masked=masked)
    context_parallel(model, mesh, order=TokenOrder(order, mesh))
    with of_torchrun():
        trainer = ContextParallelTrainer(model, arguments(), train_dataset=rows, eval_dataset=held_out)
        if evaluates_first:
            trainer.evaluate()
        trainer.train()
        asked: list[Any] = [None] * world
        dist.all_gather_object(asked, rows.asked)
        logged = [line["loss"] for line in trainer.state.log_history if "loss" in line]
        norms = [line["grad_norm"] for line in trainer.state.log_history if "loss" in line]
        # On two meshes accelerate repeats rows, in the last batch of one mesh or of both.
        sizes = (16, 13)[:groups]
        logged += [trainer.evaluate(Subset(held_out, range(many)))["eval_loss"] for many in sizes]
        divided = arguments(accelerator_config={"split_batches": True}, per_device_eval_batch_size=4)
        trainer = ContextParallelTrainer(model, divided)
        last = trainer.evaluate(Subset(held_out, range(13)))
        logged.append(last["eval_loss"])
        assert (
            round(last["eval_runtime"] * last["eval_steps_per_second"]) == 4
        )  # of 4 rows, whatever they are split into
    by_group = asked[:: world // groups]
    steps = [[row for group in by_group for row in group[4 * step :][:4]] for step in range(3)]
    expected, losses, unclipped = one_process(name, rows, steps)
    assert min(unclipped) > CLIP_NORM  # which hides from losses how gradients scale
    assert worst_error([(norms, unclipped)], relative_to="each") < 1e-5
    losses += [evaluated(expected, held_out, many, 5 * groups) for many in sizes]
    losses.append(evaluated(expected, held_out, 13, 4))
    found = dict(trainer.model.named_parameters())
    pairs = {name: (found[name].detach(), p.detach()) for name, p in expected.named_parameters()}
    told = torch.tensor(logged), torch.tensor(losses)
    return asked[dist.get_rank()], worst_error(pairs, relative_to="largest"), worst_error([told])


@pytest.mark.parametrize(
    ("name", "groups", "order", "evaluates_first"),
    [
        ("Mistral", 1, "head_tail", False),
        pytest.param("Mistral", 1, "head_tail", True, marks=pytest.mark.whole),
        ("Mistral", 2, "head_tail", True),
        ("Mistral", 2, "document_head_tail", False),
        ("ESM-2", 2, "head_tail", False),
    ],
)
def test_trainer(ranks: Ranks, name: str, groups: int, order: str, evaluates_first: bool) -> None:
    told = ranks(RANKS).run(trained, name, groups, order, evaluates_first)
    assert len({tuple(asked) for asked, _, _ in told}) == groups
    for _, parameters, losses in told:
        assert parameters < 1e-6
        assert losses < 1e-4


def dealt_by_document() -> dict[str, str]:
    """Into which documents batches are taken apart that are dealt out by document, whatever says that there is one."""
    mesh, model = context_mesh("cpu", ring=2), MODELS["Llama"].made()
    context_parallel(model, mesh, order=TokenOrder("document_head_tail", mesh))
    positions, seen = torch.arange(8).expand(2, -1), torch.ones(2, 8).long()
    within = positions - 5 * (positions >= 5)
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    flat = collate([{"input_ids": [1] * 5}, {"input_ids": [2] * 3}])
    batches: dict[str, dict[str, Tensor]] = {
        "positions": {"position_ids": positions},
        "a mask": {"attention_mask": seen},
        "positions and a mask": {"position_ids": positions, "attention_mask": seen},
        "positions and padding": {"position_ids": positions, "attention_mask": seen.index_fill(1, positions[0, 6:], 0)},
        "packed and a mask": {"position_ids": within, "attention_mask": seen},
        "packed and padding": {"position_ids": within, "attention_mask": seen.index_fill(1, positions[0, 6:], 0)},
        "three of each": {"position_ids": positions.expand(3, -1, -1)},
        "nothing of all": dict.fromkeys(FOR_KERNELS) | {"position_ids": within, "attention_mask": None},
        "positions and lengths": {"position_ids": within, "cu_seqlens": torch.tensor([0, 5, 8])},
        "positions and ids": {"position_ids": within, "document_ids": torch.tensor([[3] * 5 + [1] * 3] * 2)},
        "positions across lengths": {"position_ids": positions, "cu_seqlens": torch.tensor([0, 5, 8])},
        "positions across ids": {"position_ids": positions, "document_ids": torch.tensor([[0] * 4 + [1] * 4] * 2)},
        "flattened": flat,
        **{
            f"{name} across": {"position_ids": positions[:1], "input_ids": flat["input_ids"], name: flat[name]}
            for name in FOR_KERNELS
        },
        "nothing": {},
    }
    said = {}
    with of_torchrun():
        trainer = ContextParallelTrainer(model, arguments())
        for name, batch in batches.items():
            try:
                part = trainer._shard({"input_ids": torch.arange(16).view(2, 8), **batch})[0]
                said[name] = "".join(map(str, part["attention_mask"].document_ids.view(-1, 8)[0].tolist()))
            except ValueError as error:
                said[name] = f"{error}"
    return said


def test_batches_of_one_document_are_dealt_out_by_document(ranks: Ranks) -> None:
    one = "00000000"
    for said in ranks(2).run(dealt_by_document):
        for name in ("lengths", "ids"):
            across = said.pop(f"positions across {name}")
            assert across.startswith("position_ids must count from 0 in every document that document_ids or cu_seqlens")
        for name in FOR_KERNELS:
            across = said.pop(f"{name} across")
            assert across.startswith(f"{name} of a batch tells other documents than its position_ids")
        assert said.pop("packed and padding").startswith(
            "position_ids of a batch whose attention_mask has padding must"
        )
        assert said.pop("three of each") == "position_ids of a batch must have shape (B, N) or (N,), got (3, 2, 8)"
        assert said.pop("nothing") == "order='document_head_tail' needs document_ids or cu_seqlens"
        assert said == {
            "positions": one, "a mask": one, "positions and a mask": one, "positions and padding": "00000011",
            "packed and a mask": "11111222", "nothing of all": "11111222",
            "positions and lengths": "00000111", "positions and ids": "33333111",
            "flattened": "11111222",
        }  # fmt: skip


def refusal(call: Callable[[], Any]) -> str:
    try:
        call()
    except (ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "went through"


class Other(Rows):
    """Other rows on one rank, as a loader would have them that was shuffled by a seed of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = self.tokens + (dist.get_rank() == 1)


class Whole(Rows):
    """As a loader gives them that pads nothing."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: x for name, x in super().__getitem__(index).items() if name != "attention_mask"}


class Mean(ContextParallelTrainer):
    """With a loss as examples have it."""

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Tensor:
        logits = model(**inputs).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten())


class OfAnother(Trainer):
    """A trainer of others, as TRL's are."""

    compute_loss = Mean.compute_loss


class Mixed(ContextParallelTrainer, OfAnother):
    pass


class Behind(OfAnother, ContextParallelTrainer):
    pass


class Smoothing(TrainerCallback):
    """Sets another loss when everything has been checked."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.trainer.label_smoother = LabelSmoother(0.1)


class WithMore(Rows):
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {**super().__getitem__(index), "cu_seq_lens_q": torch.tensor([0, LENGTH])}


def refused() -> dict[str, str]:
    """On every rank: what is said of trainers that would take whole sequences for shards, and of what is no sum."""
    mesh = context_mesh("cpu", ring=2, team=2)
    model = MODELS["Llama"].made()
    said = {"a model that is not set up": refusal(lambda: ContextParallelTrainer(model, arguments()))}
    order = TokenOrder("head_tail", mesh)
    context_parallel(model, mesh, order=order)
    one = MODELS["Llama"].made() if dist.get_rank() == 1 else model
    with of_torchrun():
        said["one that is not on a rank"] = refusal(lambda: ContextParallelTrainer(one, arguments()))

    def train(kind: type[Trainer] = ContextParallelTrainer, rows: Any = None, **options: Any) -> str:
        told = arguments(remove_unused_columns=False)
        return refusal(lambda: kind(model, told, train_dataset=rows or Rows(), **options).train())

    def later(name: str, value: Any, on: range = range(4)) -> str:
        trainer = ContextParallelTrainer(model, arguments(), train_dataset=Rows(), eval_dataset=Rows())
        if dist.get_rank() in on:
            *path, name = name.split(".")
            setattr(trainer.args if path else trainer, name, value)
        trained, evaluated = refusal(trainer.train), refusal(trainer.evaluate)
        assert trained.split("call ")[0] == evaluated.split("call ")[0]
        assert not model.get_input_embeddings()._forward_hooks, "no noise"
        return trained

    def predict() -> str:
        trainer = ContextParallelTrainer(model, arguments(prediction_loss_only=False))
        return refusal(lambda: trainer.predict(Rows()))

    def smoothed_by_a_callback() -> str:
        callback = Smoothing()
        callback.trainer = ContextParallelTrainer(model, arguments(), train_dataset=Rows(), callbacks=[callback])
        return refusal(callback.trainer.train)

    with of_torchrun():
        said["label smoothing that a callback sets"] = smoothed_by_a_callback()
        told = arguments(train_sampling_strategy="batch_rebalance")
        said["rows by length"] = refusal(lambda: ContextParallelTrainer(model, told, train_dataset=Rows()))
        with mock.patch.object(type(model), "is_distributed_loading_by_transformers", True):
            said["a model of distributed_config"] = refusal(lambda: ContextParallelTrainer(model, arguments()))
        said["transformers' own Trainer"] = train(Trainer)
        said["transformers' own Trainer, without padding"] = train(Trainer, Whole())
        said["other rows on a rank"] = train(rows=Other())
        said["a column that is not dealt out"] = train(rows=WithMore())
        said["a loss of one's own"] = train(compute_loss_func=lambda *_, **__: None)
        said["a mean of one's own"] = train(Mean)
        said["a mean of another trainer"] = train(Mixed)
        said["another trainer before it"] = train(Behind)
        said["metrics of logits"] = train(compute_metrics=lambda _: {})
        said["logits"] = predict()
        smoothed = arguments(label_smoothing_factor=0.1)
        said["label smoothing"] = refusal(lambda: ContextParallelTrainer(model, smoothed))
        told = arguments()
        told.loss_type = "dft"  # as TRL's arguments have it
        said["a loss of TRL"] = refusal(lambda: ContextParallelTrainer(model, told))
        noisy = arguments(neftune_noise_alpha=5.0)
        said["noise"] = refusal(lambda: ContextParallelTrainer(model, noisy))
        for seen in ("non_padding", "all", "no", True, False):
            counting = arguments(include_num_input_tokens_seen=seen)
            said[f"counted tokens: {seen}"] = refusal(lambda told=counting: ContextParallelTrainer(model, told))
        divided = arguments(parallelism_config=ParallelismConfig(cp_size=4))
        said["accelerate's context parallelism in Trainer"] = refusal(lambda: ContextParallelTrainer(model, divided))
        launched = ContextParallelTrainer(model, arguments())
        launched.accelerator.state.parallelism_config = ParallelismConfig(tp_size=2)
        said["accelerate's tensor parallelism, by its launcher"] = refusal(launched._check_settings)
        launched.accelerator.state.parallelism_config = None
        for name, value in LATER.items():
            said |= {f"{name}, set later": later(name, value), f"{name}, on a rank": later(name, value, range(1, 2))}
        said["what was refused has left nothing behind"] = train()
        unnamed = ContextParallelTrainer(model, arguments(label_names=[]), eval_dataset=Rows())
        said["no names of labels"] = refusal(unnamed.evaluate)
        sharded = MODELS["Llama"].made()
        context_parallel(sharded, mesh, order=order)
        fully_shard(sharded)
        trainer = ContextParallelTrainer(sharded, arguments(), train_dataset=Rows(), eval_dataset=Rows())
        said["DTensors"], said["DTensors, evaluated"] = refusal(trainer.train), refusal(trainer.evaluate)
    # What accelerate does to a model under ParallelismConfig(cp_size=4): masks are dropped. Not to be had on the CPU.
    _attach_context_parallel_hooks(model)
    tokens = Rows().tokens[:2]
    batch = shard_inputs(mesh, tokens, labels=tokens, order=order)
    said["accelerate's context parallelism"] = refusal(lambda: model(**batch))
    return said


LATER = {
    "compute_loss": lambda *_, **__: None, "compute_loss_func": lambda *_, **__: None, "compute_metrics": lambda _: {},
    "label_smoother": LabelSmoother(0.1), "neftune_noise_alpha": 5.0, "args.average_tokens_across_devices": False,
    "model_accepts_loss_kwargs": False, "args.include_for_metrics": ["inputs"], "label_names": ["labels", "others"],
}  # fmt: skip
REFUSED = {
    **{
        f"{name}, {when}": {
            "label_smoother": "does not go with label_smoothing_factor",
            "compute_loss": "has a compute_loss that is not Trainer's",
            "model_accepts_loss_kwargs": "computes its loss by itself",
        }.get(name, f"does not go with {name.removeprefix('args.')}")
        for name in LATER
        for when in ("set later", "on a rank")
    },
    "what was refused has left nothing behind": "went through",
    "no names of labels": 'label_names must have "labels"',
    "DTensors": "is a DTensor already, and Trainer would put the model into DDP: leave fully_shard out",
    "DTensors, evaluated": "went through",
    "label smoothing that a callback sets": "does not go with label_smoothing_factor",
    "a model that is not set up": "was not given to context_parallel",
    "one that is not on a rank": "was not given to context_parallel",
    "transformers' own Trainer": "instead of transformers' Trainer, whose ranks read other sequences, use Context",
    "transformers' own Trainer, without padding": "position_ids are missing",
    "other rows on a rank": "the tokens must be the same on every rank",
    "a column that is not dealt out": "a batch has cu_seq_lens_q",
    "a loss of one's own": "does not go with compute_loss_func",
    "a mean of one's own": "Mean has a compute_loss that is not Trainer's",
    "a mean of another trainer": "Mixed has a compute_loss that is not Trainer's",
    "another trainer before it": "Behind must have ContextParallelTrainer before OfAnother among its bases",
    "metrics of logits": "does not go with compute_metrics",
    "logits": "set prediction_loss_only=True, and give it labels",
    "a loss of TRL": "does not go with loss_type of TRL",
    "noise": "does not go with neftune_noise_alpha",
    "label smoothing": "does not go with label_smoothing_factor",
    "rows by length": 'does not go with train_sampling_strategy="batch_rebalance"',
    "a model of distributed_config": "does not go with distributed_config",
    "counted tokens: non_padding": 'does not go with include_num_input_tokens_seen="non_padding" (',
    **{f"counted tokens: {seen}": "went through" for seen in ("all", "no", True, False)},
    "accelerate's context parallelism": "cp_size=...) takes away: leave parallelism_config out, and train with Context",
    "accelerate's context parallelism in Trainer": "not go with parallelism_config of cp_size=4: leave it out",
    "accelerate's tensor parallelism, by its launcher": "does not go with parallelism_config of tp_size=2",
}


class Unwrapping(TrainerCallback):
    """Takes the model out of DDP as training begins, on one rank."""

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        if dist.get_rank() == 1:
            self.trainer.model_wrapped = self.trainer.model


def unwrapped() -> str:
    mesh, model, callback = context_mesh("cpu", ring=2, team=2), MODELS["Llama"].made(), Unwrapping()
    context_parallel(model, mesh, order=TokenOrder("head_tail", mesh))
    with of_torchrun():
        callback.trainer = ContextParallelTrainer(model, arguments(), train_dataset=Rows(), callbacks=[callback])
        return refusal(callback.trainer.train)


def test_a_model_that_nothing_averages_is_refused(ranks: Ranks) -> None:
    for said in ranks(RANKS).run(unwrapped):
        assert "the model is in no DistributedDataParallel, got LlamaForCausalLM" in said


def reported() -> tuple[list[float], list[float], list[int]]:
    """The loss that a trainer says it has trained with, and that of its parameters then, beside one process; and steps
    of evaluation and prediction. It logs nothing meanwhile.
    """
    size, rows, held_out = dist.get_world_size(), Rows(), Rows()
    mesh, model = context_mesh("cpu", ring=size), MODELS["Llama"].made()
    context_parallel(model, mesh, order=TokenOrder("head_tail", mesh))
    with of_torchrun() if size > 1 else nullcontext():  # one rank as on CUDA, where accelerate puts it into no DDP
        told = arguments(logging_strategy="no")
        trainer = ContextParallelTrainer(model, told, train_dataset=rows, eval_dataset=held_out)
        said = trainer.train()
        steps = [rows.asked[4 * step :][:4] for step in range(3)]
        losses = [said.training_loss, said.metrics["train_loss"], trainer.state.log_history[-1]["train_loss"]]
        evaluated_as, predicted = trainer.evaluate(), trainer.predict(held_out).metrics
    expected, of_steps, _ = one_process("Llama", rows, steps)
    wanted = [sum(of_steps) / 3] * 3 + [evaluated(expected, held_out, 16, 5)]
    speeds = {**evaluated_as, **predicted, **trainer.state.log_history[-1]}
    many = [round(speeds[f"{name}_runtime"] * speeds[f"{name}_steps_per_second"]) for name in ("eval", "test")]
    return [*losses, evaluated_as["eval_loss"]], wanted, many


def check_reported(told: tuple[list[float], list[float], list[int]]) -> None:
    losses, wanted, steps = told
    assert worst_error([(torch.tensor(losses), torch.tensor(wanted))]) < 1e-4
    assert steps == [4, 4]


def test_what_is_reported_is_that_of_one_process(ranks: Ranks) -> None:
    for told in ranks(2).run(reported):
        check_reported(told)


def test_one_rank_trains_without_ddp() -> None:
    with fake_world(1):
        check_reported(reported())


def test_trainers_that_are_refused(ranks: Ranks) -> None:
    for told in ranks(RANKS).run(refused):
        assert told.keys() == REFUSED.keys()
        for name, what in REFUSED.items():
            assert what in told[name], (name, told[name])


class Summed(ContextParallelTrainer):
    """With a loss of its own that adds up: this rank's part, times the ranks, by whose number DDP divides."""

    own_loss_adds_up = True

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels, _ = inputs.pop("shift_labels"), inputs.pop("labels")
        out = model(**inputs)
        summed = F.cross_entropy(out.logits.flatten(0, 1), labels.flatten(), reduction="sum")
        loss = summed / num_items_in_batch * dist.get_world_size()
        return (loss, out) if return_outputs else loss


class Meaning(Trainer):
    """Whose evaluation is of no use to shards, as TRL's is."""

    def prediction_step(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        return model(**inputs).logits.mean().detach(), None, None


class SummedAgain(Summed, Meaning):
    pass


def losses_of(kind: type[Trainer]) -> list[float]:
    """Of three steps, and of an evaluation."""
    mesh, model = context_mesh("cpu", ring=2, team=2), MODELS["Mistral"].made()
    context_parallel(model, mesh, order=TokenOrder("head_tail", mesh))
    with of_torchrun():
        trainer = kind(model, arguments(), train_dataset=Rows(), eval_dataset=Rows())
        trainer.train()
        return [line["loss"] for line in trainer.state.log_history if "loss" in line] + [
            trainer.evaluate()["eval_loss"]
        ]


def test_a_loss_of_one_s_own_that_adds_up(ranks: Ranks) -> None:
    (expected,), (found,) = (
        set(map(tuple, ranks(RANKS).run(losses_of, kind))) for kind in (ContextParallelTrainer, SummedAgain)
    )
    assert worst_error([(torch.tensor(found), torch.tensor(expected))]) < 1e-6


class InDocuments(Rows):
    """Of two documents each, or of one, which a column of that name says."""

    def __init__(self, column: str) -> None:
        super().__init__()
        whole = torch.arange(LENGTH).expand(16, -1)
        ids = (whole >= 30).long()
        said = {"document_ids": ids, "position_ids": whole - 30 * ids, "attention_mask": torch.ones_like(ids)}
        self.said = {column: said[column]}
        self.labels = self.tokens.clone()
        self.labels[:, 30] = -100  # which the other document would predict


def first_losses(column: str) -> list[float]:
    """Of three steps and an evaluation of rows in documents, where a column says so."""
    mesh, model = context_mesh("cpu", ring=2), MODELS["Llama"].made()
    context_parallel(model, mesh, order=TokenOrder("head_tail", mesh))
    rows = InDocuments(column)
    with of_torchrun():
        trainer = ContextParallelTrainer(model, arguments(), train_dataset=rows, eval_dataset=rows)
        trainer.train()
        logged = [line["loss"] for line in trainer.state.log_history if "loss" in line]
        return [*logged, trainer.evaluate()["eval_loss"]]


def test_columns_that_say_documents_are_kept(ranks: Ranks) -> None:
    (expected,) = set(map(tuple, ranks(2).run(first_losses, "position_ids")))
    (found,) = set(map(tuple, ranks(2).run(first_losses, "document_ids")))
    (of_one,) = set(map(tuple, ranks(2).run(first_losses, "attention_mask")))
    assert found == expected
    assert all(worst_error([pair]) > 1e-5 for pair in zip(torch.tensor(found), torch.tensor(of_one), strict=True))


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        rows = Rows()
        return (rows[index] for index in range(13))


class Counted(Stream):
    """Of a length, as some loaders' are."""

    def __len__(self) -> int:
        return 13


class Endless(Dataset):
    """Whose rows are asked for by number, of which it does not say how many there are."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return Rows()[index]


class Unlabelled(Rows):
    """Without labels in what one of two meshes evaluates first, or one rank of a mesh reads."""

    def __init__(self, rows: range, ranks: range) -> None:
        super().__init__()
        self.bare = rows if dist.get_rank() in ranks else range(0)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: x for name, x in super().__getitem__(index).items() if name != "labels" or index not in self.bare}


class Broken(Rows):
    """Of which one rank of a mesh cannot read any."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if dist.get_rank() == 1:
            raise ValueError("by chance, no row")
        return super().__getitem__(index)


class Unsetting(TrainerCallback):
    """Sets, on one rank of a mesh, what goes with shards as little as it does at construction."""

    def on_train_begin(self, args: TrainingArguments, *_: Any, **__: Any) -> None:
        if dist.get_rank() == 1:
            args.prediction_loss_only = False
            self.trainer.label_smoother = LabelSmoother(0.1)


def merged(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A batch of one row, of a document for each."""
    told = {name: torch.cat([row[name] for row in rows])[None] for name in ("input_ids", "labels")}
    return told | {"position_ids": torch.arange(LENGTH).repeat(len(rows))[None]}


def refused_on_two_meshes() -> dict[str, str]:
    """What is said of evaluation in which it is not known which rows accelerate repeats, and of ranks that differ."""
    whole = init_device_mesh("cpu", (2, dist.get_world_size() // 2, 1), mesh_dim_names=("dp", "cp_ring", "cp_team"))
    mesh = whole["cp_ring", "cp_team"]
    model = MODELS["Llama"].made()
    context_parallel(model, mesh, order=TokenOrder("head_tail", mesh))

    def evaluate(rows: Any, collate: Any = None, **options: Any) -> str:
        told = arguments(remove_unused_columns=False, **options)
        return refusal(ContextParallelTrainer(model, told, eval_dataset=rows, data_collator=collate).evaluate)

    def loss(rows: Rows, many: int) -> float:
        told = arguments(remove_unused_columns=False)
        return ContextParallelTrainer(model, told, eval_dataset=Subset(rows, range(many))).evaluate()["eval_loss"]

    def said_of_loss(rows: Rows) -> str:
        found, wanted = loss(rows, 10), evaluated(MODELS["Llama"].made(), rows, 10, 10)
        return "the loss" if worst_error([(torch.tensor(found), torch.tensor(wanted))]) < 1e-6 else f"{found}, {wanted}"

    def says_of_rest(rows: Rows) -> str:
        """Of the second batch alone, where in the first nothing counts."""
        found, wanted = loss(rows, 16), loss_of(MODELS["Llama"].made(), rows, [*range(10, 16)]).item()
        return "the loss" if worst_error([(torch.tensor(found), torch.tensor(wanted))]) < 1e-6 else f"{found}, {wanted}"

    def train(rows: Rows, *callbacks: Any) -> str:
        told = arguments(remove_unused_columns=False)
        trainer = ContextParallelTrainer(model, told, train_dataset=rows, callbacks=[*callbacks])
        for callback in callbacks:
            callback.trainer = trainer
        return refusal(trainer.train)

    def evaluate_unnamed() -> str:
        trainer = ContextParallelTrainer(model, arguments(remove_unused_columns=False), eval_dataset=Rows())
        if dist.get_rank() == 1:
            trainer.label_names = []
        return refusal(trainer.evaluate)

    few, fewer, none = Rows(), Rows(), Rows()
    few.labels[5:10] = IGNORED  # all that the second mesh evaluates
    fewer.labels[:10], none.labels[:] = IGNORED, IGNORED
    with of_torchrun():
        return {
            "nothing counts on a mesh": said_of_loss(few),
            "nothing counts in a batch": says_of_rest(fewer),
            "nothing counts": str(loss(none, 10)),
            "no length": evaluate(Stream()),
            "iterable": evaluate(Counted()),
            "endless": evaluate(Endless()),
            "no labels on a mesh": evaluate(Unlabelled(range(5, 10), range(4))),
            "no labels on a rank": evaluate(Unlabelled(range(16), range(1, 2))),
            "uneven": evaluate(Rows(), accelerator_config={"even_batches": False}),
            "merged": evaluate(Subset(Rows(), range(13)), merged),
            "merged, a multiple": evaluate(Subset(Rows(), range(10)), merged),
            "no label names on a rank": evaluate_unnamed(),
            "rows that a rank cannot read": train(Broken()),
            "a setting on a rank": train(Rows(), Unsetting()),
            "trained without labels on a mesh": train(Unlabelled(range(16), range(2, 4))),
        }


def test_what_is_refused_on_several_meshes(ranks: Ranks) -> None:
    for told in ranks(RANKS).run(refused_on_two_meshes):
        assert told["nothing counts on a mesh"] == "the loss"
        assert told["nothing counts in a batch"] == "the loss"
        assert told["nothing counts"] == "nan"
        assert "of an iterable dataset" in told["no length"]
        assert "of an iterable dataset" in told["iterable"]
        assert "or one without a length" in told["endless"]
        assert "and give it labels" in told["no labels on a mesh"]
        assert "and give it labels" in told["no labels on a rank"]
        assert "even_batches=False" in told["uneven"]
        assert "a collator that makes 1 rows of 5" in told["merged"]
        assert told["merged, a multiple"] == "went through"
        assert "label_names must have" in told["no label names on a rank"]
        assert "by chance, no row" in told["rows that a rank cannot read"]
        assert "label_smoothing_factor" in told["a setting on a rank"]
        assert "which have labels must be the same" in told["trained without labels on a mesh"]


def asked_first(seed: int | None, apart: bool = False) -> list[int]:
    """The rows of an epoch, as a trainer with this data_seed asks for them; perhaps ranks have seeds of their own."""
    mesh, rows = context_mesh("cpu", ring=2), Rows()
    model = MODELS["Llama"].made()
    context_parallel(model, mesh, order=TokenOrder("head_tail", mesh))
    with of_torchrun():
        trainer = ContextParallelTrainer(model, arguments(data_seed=seed), train_dataset=rows)
        if apart:
            torch.manual_seed(1000 + dist.get_rank())
        list(trainer.get_train_dataloader())
    return rows.asked


def test_the_seed_of_the_data_is_told(ranks: Ranks) -> None:
    first, again, other = (ranks(2).run(asked_first, seed) for seed in (1, 1, 2))
    assert first[0] == first[1] == again[0]
    assert sorted(first[0]) == sorted(other[0])
    assert first[0] != other[0]


def test_ranks_with_seeds_of_their_own_read_the_same_rows(ranks: Ranks) -> None:
    together, apart = (ranks(2).run(asked_first, None, is_apart) for is_apart in (False, True))
    assert apart == together
    assert together[0] == together[1] != sorted(together[0])


def seed_of_a_worker() -> int:
    """By which a loader's worker draws for this rank, one of two meshes', what it augments or masks."""
    whole = init_device_mesh("cpu", (2, dist.get_world_size() // 2, 1), mesh_dim_names=("dp", "cp_ring", "cp_team"))
    mesh, model = whole["cp_ring", "cp_team"], MODELS["Llama"].made()
    context_parallel(model, mesh, order=TokenOrder("head_tail", mesh))
    with of_torchrun():
        trainer = ContextParallelTrainer(model, arguments(dataloader_num_workers=2), train_dataset=Rows())
        begin = trainer.get_train_dataloader().base_dataloader.worker_init_fn
    torch.manual_seed(100)
    begin(0)
    return torch.initial_seed()


def test_workers_of_a_mesh_draw_alike(ranks: Ranks) -> None:
    one, same, other, like_it = ranks(RANKS).run(seed_of_a_worker)
    assert one == same
    assert other == like_it
    assert one != other


def dropped(apart: bool) -> tuple[list[bool], float]:
    """What is left out of this rank's first tokens, and the loss of three steps."""
    mesh = context_mesh("cpu", ring=2)
    kind = MODELS["GPT-2"]
    model = replace(kind, options=kind.options | {"embd_pdrop": 0.5}).made()
    context_parallel(model, mesh, order=TokenOrder("head_tail", mesh))
    seen = []
    model.transformer.drop.register_forward_hook(lambda _, __, out: seen.append(out.detach().flatten()[:64] == 0))
    with of_torchrun():
        trainer = ContextParallelTrainer(model, arguments(), train_dataset=Rows())
        if apart:
            torch.manual_seed(1000 + dist.get_rank())
        loss = trainer.train().training_loss
    return seen[0].tolist(), loss


def test_ranks_with_seeds_of_their_own_drop_other_parts(ranks: Ranks) -> None:
    for apart in (False, True):
        (one, loss), (other, again) = ranks(2).run(dropped, apart)
        assert (one != other) == apart
        assert loss == again
