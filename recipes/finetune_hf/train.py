"""One rank's training: the model, FSDP2, the loss.

Shape suffixes: B = batch of one data-parallel group, N = tokens of a sequence, L = those that this rank holds,
V = vocabulary.
"""

from __future__ import annotations

import json
import zlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from transformers.utils import logging

from recipes.finetune_hf.documents import Packed, PackedDocuments
from recipes.finetune_hf.settings import Settings
from recipes.training.batches import Batches
from recipes.training.gradients import ShardedGradients, WholeGradients
from recipes.training.loop import train_steps
from recipes.training.picture import draw_curve
from recipes.training.ranks import Ranks, load_alike, sum_over_groups
from recipes.training.record import Run, make_folder, writing
from recipes.training.settings import Launch, Output, RecipeError, Saving, first_line
from recipes.training.styles import attention_kernel
from recipes.training.trainer import Trainer
from wallfacer_dt import shard_sequence
from wallfacer_dt.integrations.transformers import context_parallel, shard_inputs
from wallfacer_dt.integrations.transformers.refusals import leaves_layers_out
from wallfacer_dt.integrations.transformers.rope import largest_matters
from wallfacer_dt.integrations.transformers.sequence import positions_within

FOLDER = "model"  # of --out
IGNORED = -100  # labels that do not count


def train(settings: Settings, ranks: Ranks, documents: PackedDocuments, saving: Saving, output: Output) -> Run:
    """Train on this rank, with the others, leave the model, and return the record every rank has.

    Raises:
        RecipeError: a model or a checkpoint will not do.
    """
    load_alike(lambda: _make_folder(output, documents, ranks.launch), ranks.launch, "--out")
    source = "the random model" if settings.model is None else f"--model {settings.model}"
    model = load_alike(lambda: _load(settings, documents, ranks), ranks.launch, source)
    _make_parallel(model, settings, ranks)
    _draw_by_rank(settings, ranks)
    gradients = WholeGradients(model, ranks) if ranks.launch.world == 1 else ShardedGradients(model)
    run = train_steps(
        Trainer(settings, ranks, model, gradients, PackedLoss(model, ranks)),
        Batches(documents, settings, ranks, (*documents.fingerprint, _architecture(model))),
        saving,
        output,
        length=settings.sequence,
        data=documents.source,
        unit="nats per token",
    )
    _save(model, documents.tokenizer, output, ranks.launch)
    if ranks.launch.rank == 0:
        with writing(output, "curve.png"):
            draw_curve(output.out / "curve.png", run)
    return run


def _make_folder(output: Output, documents: PackedDocuments, launch: Launch) -> tuple[None, tuple[()]]:
    """Refuse (RecipeError), on rank 0, a folder in which the model cannot be saved, or would not be what it seems."""
    folder = output.out / FOLDER
    if launch.rank == 0:
        make_folder(folder)
        if documents.tokenizer is None and (folder / "tokenizer_config.json").exists():
            raise RecipeError(
                f"--out: {folder} has the tokenizer of another model, this one is of bytes: remove it, or name another"
                " folder"
            )
    return None, ()


def _load(settings: Settings, documents: PackedDocuments, ranks: Ranks) -> tuple[PreTrainedModel, tuple[int, ...]]:
    """The model in float32 on the CPU, and what must be alike on every rank, of which FSDP takes a part each."""
    torch.manual_seed(settings.seed)
    if settings.model is None:
        assert settings.dim is not None
        config = LlamaConfig(
            vocab_size=documents.vocabulary,
            hidden_size=settings.dim,
            intermediate_size=4 * settings.dim,
            num_hidden_layers=settings.layers,
            num_attention_heads=settings.heads,
            num_key_value_heads=settings.kv_heads,
            max_position_embeddings=settings.sequence,
        )
        model = AutoModelForCausalLM.from_config(config)
        return model, (_architecture(model),)  # processors may draw otherwise in the last digit
    try:
        model = AutoModelForCausalLM.from_pretrained(settings.model, local_files_only=True, dtype=torch.float32)
    except Exception as error:  # a file that is cut short, or weights of other sizes, raise others than OSError
        raise RecipeError(f"--model: {settings.model} has no model that loads: {first_line(error)}") from error
    largest, vocabulary = documents.largest, model.config.get_text_config().vocab_size
    if largest >= vocabulary:
        raise RecipeError(f"--tokenizer: the text has token {largest}, the model a vocabulary of {vocabulary}")
    _check_model(model, settings, ranks, documents.sizes)
    return model, (_architecture(model), _weights(model))


@torch.no_grad()
def _check_model(model: PreTrainedModel, settings: Settings, ranks: Ranks, sizes: list[int]) -> None:
    """Refuse (RecipeError) a model that has too few positions, or in which documents of these sizes see each other.

    On a mesh attention is told where documents begin; elsewhere models have to see it of positions, and many do not.
    """
    kind, half, vocabulary = type(model).__name__, 4, model.config.get_text_config().vocab_size
    last = max(half, min(settings.sequence, max(sizes)))
    if any(map(largest_matters, model.modules())):
        last = half  # RoPE that depends on the largest position has them all, and would remember this one
    positions = torch.cat([torch.arange(last - half, last), torch.arange(half)]).unsqueeze(0)
    tokens = torch.arange(2 * half).unsqueeze(0)
    others = tokens + (tokens < half)
    model.eval()
    try:
        one, other = (
            model(input_ids=x % vocabulary, position_ids=positions, use_cache=False).logits for x in (tokens, others)
        )
    except IndexError as error:
        raise RecipeError(
            f"--sequence {settings.sequence} has more positions than {kind} of --model: {error}"
        ) from error
    if not (one.isfinite().all() and other.isfinite().all()):
        raise RecipeError(f"--model: {kind} makes logits that are not finite")
    moved = (one - other)[:, half:].abs().max()
    if ranks.context is None and len(sizes) > 1 and moved > 1e-4 * one.abs().max():
        raise RecipeError(
            f"--model: {kind} does not keep packed documents apart, which it is told by positions alone where no"
            " sequence is shared: the logits of one move with the tokens of another; take a --text of one document"
        )


def _architecture(model: PreTrainedModel) -> int:
    """Of what shapes do not tell, such as the base of rotary positions; a folder may have moved."""
    said = model.config.to_dict()
    for name in ("_name_or_path", "transformers_version", "dtype"):
        said.pop(name, None)
    return zlib.crc32(json.dumps(said, sort_keys=True, default=str).encode())


def _weights(model: PreTrainedModel) -> int:
    """A digest of all parameters and buffers."""
    found = 0
    for name, x in (*model.named_parameters(), *model.named_buffers()):
        found = zlib.crc32(x.detach().contiguous().view(-1).view(torch.uint8).numpy(), zlib.crc32(name.encode(), found))
    return found


def _make_parallel(model: PreTrainedModel, settings: Settings, ranks: Ranks) -> None:
    """Attention on the mesh that shares sequences, weights on all ranks."""
    if ranks.launch.world > 1 and leaves_layers_out(model):  # also where no sequence is shared: FSDP gathers by layer
        raise RecipeError(
            "--model: layerdrop leaves layers out at random, other ones on every rank, which would take each other's "
            "weights for theirs: set it to 0 in its config.json"
        )
    model.to(ranks.device).train()
    if ranks.context is not None:
        has_softcap = getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None
        assert ranks.order is not None
        try:
            context_parallel(
                model,
                ranks.context,
                order=ranks.order,
                schedule=settings.schedule,
                rotate=settings.rotate,
                rotate_forward=settings.rotate_forward,
                # torch has no soft cap on the CPU.
                kernel="reference" if has_softcap and ranks.device.type == "cpu" else attention_kernel(ranks),
            )
        except ValueError as error:
            raise RecipeError(str(error)) from error
    if ranks.launch.world == 1:
        return
    mesh = init_device_mesh(ranks.device.type, (ranks.launch.world,))
    # What transformers itself would not put on two devices is a block.
    blocks = [module for module in model.modules() if type(module).__name__ in (model._no_split_modules or ())]
    for module in (*blocks, model):
        fully_shard(module, mesh=mesh)
        assert isinstance(module, FSDPModule)
        # gloo has no other reduction; the average is taken all the same.
        module.set_force_sum_reduction_for_comms(ranks.device.type == "cpu")


def _draw_by_rank(settings: Settings, ranks: Ranks) -> None:
    """Dropout of its own for each rank, whose tokens are others; weights have been drawn alike by then."""
    torch.manual_seed(((settings.seed << 20) + 1 + ranks.launch.rank) % 2**63)


class PackedLoss:
    """Cross entropy of the next token within its document, this rank's part of the mean over all that count."""

    def __init__(self, model: PreTrainedModel, ranks: Ranks) -> None:
        self.model, self.ranks = model, ranks

    def __call__(self, batch: Packed) -> Tensor:
        """Of whole sequences."""
        tokens_BN, documents_BN = batch.tokens_N.to(self.ranks.device), batch.documents_N
        labels_BN = next_tokens(batch.tokens_N, documents_BN).to(self.ranks.device)
        counted = (labels_BN != IGNORED).sum()
        sum_over_groups(counted, "how many tokens count", self.ranks)
        if not counted:
            raise RecipeError("no token of a step has a label: its documents are of a token each; raise --sequence")
        if self.ranks.context is None or self.ranks.order is None:
            positions_BN = positions_within(documents_BN, tokens_BN.shape[1]).to(self.ranks.device)
            inputs = {"input_ids": tokens_BN, "position_ids": positions_BN, "use_cache": False}
        else:
            order = self.ranks.order
            inputs = shard_inputs(self.ranks.context, tokens_BN, document_ids=documents_BN, order=order)
            labels_BN = shard_sequence(labels_BN, order, dim=1)
        logits_BLV = self.model(**inputs).logits
        losses = F.cross_entropy(
            logits_BLV.flatten(0, 1).float(), labels_BN.flatten(), ignore_index=IGNORED, reduction="none"
        )
        # In float64: float32 rounds a mean by more than runs on different meshes differ.
        return losses.double().sum() / counted


def next_tokens(tokens_BN: Tensor, documents_BN: Tensor) -> Tensor:
    """The label of each token: the next one, if it is of the same document and in the same sequence.

    >>> next_tokens(torch.tensor([[5, 6, 7]]), torch.tensor([[0, 0, 1]])).tolist()
    [[6, -100, -100]]
    """
    labels_BN = torch.full_like(tokens_BN, IGNORED)
    same = documents_BN[:, 1:] == documents_BN[:, :-1]
    labels_BN[:, :-1] = torch.where(same, tokens_BN[:, 1:], IGNORED)
    return labels_BN


def _save(model: PreTrainedModel, tokenizer: Any, output: Output, launch: Launch) -> None:
    """The trained model, as transformers saves models, with its tokenizer if there is one; all ranks call it."""
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if launch.rank == 0:
        logging.disable_progress_bar()
        with writing(output, FOLDER, Exception):  # safetensors and tokenizers raise others than OSError
            model.save_pretrained(output.out / FOLDER, state_dict=whole)
            if not any((output.out / FOLDER).glob("*.safetensors")):  # transformers may only log why not
                raise OSError("no weights are there after it was saved")
            if tokenizer is not None:
                tokenizer.save_pretrained(output.out / FOLDER)
