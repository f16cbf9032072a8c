"""Models of transformers on a mesh: each gives what docs/models.md says, and what a call brings is never swallowed."""

import copy
import functools
import math
import pickle
import re
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from wallfacer_dt import (
    EquivalenceError,
    METPAttentionParallel,
    METPParallel,
    TokenOrder,
    WallFacerParallel,
    check_model,
    context_mesh,
    dealing,
    sequence_positions,
    shard_sequence,
)
from wallfacer_dt.testing import RankPool, worst_error
from wallfacer_dt.testing.fake import fake_world

pytest.importorskip("transformers", reason="the extra `transformers` is not installed")

from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    CLIPTextConfig,
    CLIPTextModel,
    CsmDepthDecoderConfig,
    CsmDepthDecoderModel,
    Gemma4Config,
    Gemma4Model,
    Gemma4TextConfig,
    Gemma4VisionConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    LlamaModel,
    MobileBertConfig,
    MobileBertForMaskedLM,
    MoshiDepthConfig,
    OPTConfig,
    OPTForCausalLM,
    PhimoeConfig,
    PhimoeModel,
    masking_utils,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.moshi.modeling_moshi import MoshiDepthDecoder

from tests.models import (
    DOCUMENTS,
    KEYS,
    MODELS,
    RANKS,
    Key,
    Outcomes,
    add_up,
    document,
    errors_of,
    gradients,
    own_flag,
    summed,
    tokens_of,
    try_all,
    try_model,
    verdict,
)
from tests.pairwise import few
from wallfacer_dt.integrations.transformers import context_parallel, shard_inputs
from wallfacer_dt.integrations.transformers import model as integration
from wallfacer_dt.integrations.transformers.attend import AttentionOnMesh
from wallfacer_dt.integrations.transformers.inputs import SEQUENCE
from wallfacer_dt.integrations.transformers.masked_tokens import _ratios
from wallfacer_dt.integrations.transformers.masks import ShardedMask, read_mask
from wallfacer_dt.integrations.transformers.model import _checked_count
from wallfacer_dt.integrations.transformers.refusals import check_model_is_known
from wallfacer_dt.integrations.transformers.rope import largest_matters, tell_largest_position
from wallfacer_dt.integrations.transformers.sequence import ForwardPass, ShardedSequence, positions_within

Ranks = Callable[[int], RankPool]
PAGE = Path(__file__).parent.parent / "docs" / "models.md"
GUIDE = Path(__file__).parent.parent / "docs" / "transformers.md"
README = Path(__file__).parent.parent / "README.md"
OPT = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 64}

MOBILE = {
    "vocab_size": 97, "hidden_size": 32, "embedding_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 4, "intra_bottleneck_size": 32,
}  # fmt: skip


def page() -> str:
    """Its section of transformers, after which others follow."""
    return PAGE.read_text().split("\n# Models of ")[0]


def some(name: str) -> list[Key]:
    """A cell with packed rows and one without, by turns on other meshes."""
    turn = list(MODELS).index(name)
    plain, packed = (KEYS[2 * (turn % 3)], KEYS[2 * ((turn + 1) % 3) + 1])
    return [plain, packed]


def check_row(name: str, tried: Outcomes) -> None:
    row = next(line for line in page().splitlines() if line.startswith(f"| {name} |"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    notes = dict(re.findall(r"^(\d+)\. `(.*)`$", page(), re.MULTILINE))
    assert cells[-1] == own_flag(name)
    for key, outcome in tried.items():
        written = cells[2 + KEYS.index(key)]
        found = re.fullmatch(r"refused \((\d+)\)", written)
        assert (notes[found[1]] if found else written) == verdict(outcome), (key, outcome)
        own = re.fullmatch(r"refused \((\d+)\)", cells[-2])
        assert outcome.own_loss == (notes[own[1]] if own else ""), outcome


# Decoders that call attention as Llama, Mistral or Mixtral do.
LIKE_OTHERS = {
    "Qwen2", "Qwen3", "Qwen3-MoE", "Gemma", "Phi-3", "OLMo 2", "Cohere", "Cohere 2", "GLM-4", "StarCoder 2", "SmolLM 3",
}  # fmt: skip


@pytest.mark.parametrize("name", few(MODELS, {*MODELS} - LIKE_OTHERS))
def test_models(threads: Ranks, name: str) -> None:
    for _, tried in try_all(threads(RANKS), [name], some):
        check_row(name, tried)


@pytest.mark.whole
def test_models_on_all_meshes(ranks: Ranks) -> None:
    assert document(dict(try_all(ranks(RANKS), MODELS, lambda _: KEYS))) == page()


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("Mistral", "window_size"),
        ("ModernBERT", "window_size"),
        ("GPT-OSS", "sinks"),
        ("Gemma 2", "softcap"),
        ("Gemma 2", "scale"),
        ("Granite", "scale"),
        ("Llama 4", "document_ids"),
        ("Llama", "is_causal"),
    ],
)
def test_an_option_that_is_dropped_shows(ranks: Ranks, name: str, option: str) -> None:
    key = KEYS[0]
    for told in ranks(RANKS).run(try_model, name, [key], option):
        assert verdict(told[key]) == "WRONG"
        assert max(told[key].loss, told[key].gradient) > 1e-3


def llama(**options: Any) -> Any:
    model = MODELS["Llama"].made()
    for name, value in options.items():
        setattr(model.config, name, value)
    return model


def set_up(size: int = RANKS) -> tuple[Any, TokenOrder, Any]:
    mesh = context_mesh("cpu", ring=size // 2, team=2)
    return mesh, TokenOrder("head_tail", mesh), llama()


def refusal(call: Callable[[], Any]) -> str:
    try:
        call()
    except (ValueError, TypeError, KeyError, AttributeError, ImportError) as error:
        return f"{type(error).__name__}: {error}"
    return "went through"


def layer_of_peft(package: str, variant: str = "", **more: Any) -> torch.nn.Module:
    """What is looked at of one: where it is from, and its variant of LoRA."""
    layer = type("Linear", (torch.nn.Linear,), {"__module__": f"peft.tuners.{package}.layer"})(4, 4)
    layer.lora_variant = {"default": type(variant, (), {})()} if variant else {}
    layer.lora_velora_init_type = {"default": more.get("init")}
    return layer


ADAPTERS = {
    "LoRA": (("lora",), {}, "went through"),
    "aLoRA": (("lora", "ALoraLinearVariant"), {}, "set alora_offsets_are_told = True"),
    "VeLoRA": (("lora", "VeloraLinearVariant"), {"init": "batch_average"}, 'VeloraConfig(init_type="random")'),
    "VeLoRA at random": (("lora", "VeloraLinearVariant"), {"init": "random"}, "went through"),
    "AdaLoRA": (("adalora",), {}, "AdaLoRA adds the whole of its penalty"),
    "Lily": (("lily",), {}, "Lily's router takes the mean"),
    "SHADOW": (("shadow",), {}, "SHADOW's second model"),
}


def refused_adapters() -> dict[str, str]:
    """What a model says whose adapters came before context_parallel, after it, or on one rank alone."""
    mesh, order, model = set_up()
    handle = context_parallel(model, mesh, order=order)
    batch = shard_inputs(mesh, tokens_of(64)[0], order=order)
    said = {}
    for name, (kind, more, _) in ADAPTERS.items():
        model.adapter = layer_of_peft(*kind, **more)
        said[name] = refusal(lambda: model(**batch))
    model.adapter = layer_of_peft("lora", "ALoraLinearVariant")
    handle.alora_offsets_are_told = True
    said["aLoRA that is told"] = refusal(lambda: model(**batch))
    model.adapter = layer_of_peft("lily" if dist.get_rank() == 1 else "lora")
    said["Lily on a rank"] = refusal(lambda: model(**batch))
    model.adapter = layer_of_peft("shadow")
    said["SHADOW before"] = refusal(lambda: context_parallel(model, mesh, order=order))
    return said


def test_adapters_that_are_refused(ranks: Ranks) -> None:
    says = {name: what for name, (_, _, what) in ADAPTERS.items()}
    says |= {"aLoRA that is told": "went through", "Lily on a rank": "Lily's", "SHADOW before": "SHADOW's"}
    for told in ranks(RANKS).run(refused_adapters):
        assert told.keys() == says.keys()
        for name, what in says.items():
            assert what in told[name], (name, told[name])


def refused_calls() -> dict[str, str]:
    """On every rank: what a model says to calls that are not this rank's part of a sequence, or ask for more."""
    mesh, order, model = set_up()
    tokens, labels = tokens_of(64)
    handle = context_parallel(model, mesh, order=order)
    batch = shard_inputs(mesh, tokens, order=order, labels=labels)
    other = TokenOrder("contiguous", mesh)
    rank = dist.get_rank()
    bare = {name: batch[name] for name in ("input_ids", "position_ids")}
    embeds = {name: x for name, x in batch.items() if name != "input_ids"} | {
        "inputs_embeds": torch.zeros(2, 16, 32, dtype=torch.float64)
    }
    own = {**bare, "labels": batch["labels"], "shift_labels": batch["labels"]}
    many, some = (
        {**batch, SEQUENCE: type(batch[SEQUENCE])(**vars(batch[SEQUENCE]) | {"counted": counted})}
        for counted in (2**24 + 1, 2049)
    )
    calls = {
        "no positions": {"input_ids": batch["input_ids"]},
        "positions that count from 0": {**batch, "position_ids": torch.arange(16)[None]},
        "whole": {"input_ids": tokens, "position_ids": torch.arange(64)[None]},
        "another order": {
            **batch,
            **{k: shard_inputs(mesh, tokens, order=other)[k] for k in ("position_ids", SEQUENCE)},
        },
        "packed positions": {**bare, "position_ids": bare["position_ids"] % 20},
        "one rank's positions": {**bare, "position_ids": bare["position_ids"] + (rank == 1)},
        "padding": {**batch, "attention_mask": (batch["input_ids"] > 5).long()},
        "a mask of the whole": {**batch, "attention_mask": torch.ones(2, 64)},
        "4D mask": {**batch, "attention_mask": torch.zeros(2, 1, 16, 16)},
        "use_cache": {**batch, "use_cache": True},
        "past_key_values": {**batch, "past_key_values": [batch["input_ids"]]},
        "output_attentions": {**batch, "output_attentions": True},
        "logits_to_keep": {**batch, "logits_to_keep": 1},
        "cu_seq_lens_q": {**batch, "cu_seq_lens_q": torch.tensor([0, 16])},
        "an unknown keyword": {**batch, "alibi": 3.0},
        "labels that are not shifted": {**batch, "shift_labels": None},
        "labels without a count": {**batch, "num_items_in_batch": None},
        "no tokens": {"position_ids": batch["position_ids"]},
        "no tokens on a rank": embeds if rank == 1 else batch,
        "no count on a rank": {**batch, "num_items_in_batch": None if rank == 1 else batch["num_items_in_batch"]},
        "a count of a rank's own": {**batch, "num_items_in_batch": (batch["labels"] != -100).sum()},
        "no number for a count": {**batch, "num_items_in_batch": math.nan},
        "another count on a rank": {**batch, "num_items_in_batch": batch["num_items_in_batch"] + (rank == 1)},
        "a sum of counts": {**batch, "num_items_in_batch": 2 * int(batch["num_items_in_batch"])},
        "a loader of one's own": {**own, "num_items_in_batch": 97},
        "its count of a rank's own": {**own, "num_items_in_batch": 96},
        "its labels, none of which counts": {
            **{name: torch.full_like(x, -100) if "labels" in name else x for name, x in own.items()},
            "num_items_in_batch": 0,
        },
        "its labels on a rank": {**(own if rank == 1 else batch), "num_items_in_batch": 97},
        "labels put into a batch": {**shard_inputs(mesh, tokens, order=order), **own, "num_items_in_batch": 96},
        "a count that float32 rounds": {**many, "num_items_in_batch": torch.tensor(2.0**24)},
        "a count that float16 rounds": {**some, "num_items_in_batch": torch.tensor(2048.0, dtype=torch.float16)},
        "a count that it need not round": {**many, "num_items_in_batch": 2**24},
    }
    said = {name: refusal(lambda call=call: model(**call)) for name, call in calls.items()}
    said["all-ones mask"] = refusal(lambda: model(**{**batch, "attention_mask": torch.ones(2, 16)}))
    said["without what shard_inputs says"] = refusal(lambda: model(**bare))
    said["the model inside"] = refusal(lambda: model.model(**bare))
    said["past its hooks"] = refusal(lambda: model.forward(**batch))
    said["past its hooks, by hand"] = refusal(lambda: model.forward(**bare))
    said["a model around it"] = refusal(lambda: context_parallel(torch.nn.Sequential(model), mesh, order=order))
    said["pickled"] = refusal(lambda: pickle.dumps(model))
    said["another implementation"] = refusal(lambda: (model.set_attn_implementation("sdpa"), model(**batch)))
    model.set_attn_implementation(handle.name)
    said["a copy"] = refusal(lambda: copy.deepcopy(model)(**batch))
    said["a copy that is set up"] = refusal(lambda: context_parallel(copy.deepcopy(model), mesh, order=order))
    said["whose original is none the worse"] = refusal(lambda: model(**batch))
    said["another model of its config"] = refusal(lambda: type(model)(model.config).double()(**bare))
    model.config.attention_dropout = model.model.layers[1].self_attn.attention_dropout = 0.1
    said["dropout"] = refusal(lambda: model(**batch))
    model.model.layers[1].self_attn.attention_dropout = 0.0
    said["afterwards"] = refusal(lambda: model(**batch))
    model.config.output_router_logits = rank == 1
    said["the router's loss on a rank, set later"] = refusal(lambda: model(**batch))
    model.config.output_router_logits = True
    said["the router's loss, set later"] = refusal(lambda: model(**batch))
    model.config.output_router_logits = False
    model.model.layers[1].mlp.adapter = torch.nn.Conv1d(32, 32, 3)
    said["a convolution that came later"] = refusal(lambda: model(**batch))
    del model.model.layers[1].mlp.adapter
    rope, extended = model.model.rotary_emb, copy.deepcopy(model.config)
    extended.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    model.model.rotary_emb = type(rope)(extended)
    said["RoPE that came later"] = refusal(lambda: model(**batch))
    model.model.rotary_emb = rope
    said["as it was"] = refusal(lambda: model(**batch))
    skipping = OPTForCausalLM(OPTConfig(**OPT, layerdrop=0.1))
    said["layers that are left out"] = refusal(lambda: context_parallel(skipping, mesh, order=order))
    skipping.config.layerdrop = 0  # of which its decoder has a copy
    said["layers that are still left out"] = refusal(lambda: context_parallel(skipping, mesh, order=order))
    skipping = llama()
    skipping.config.layerdrop = 0.1
    said["layers that a config leaves out"] = refusal(lambda: context_parallel(skipping, mesh, order=order))
    said["as a whole by a kernel that is not there"] = refusal(lambda: handle.whole("flash_attention_2").__enter__())
    said["on the mesh again"] = refusal(lambda: model(**batch))
    layers, model.model.layers = model.model.layers, model.model.layers[:1]
    said["fewer layers than it says"] = refusal(lambda: model(**batch))
    model.model.layers = layers
    trigrams = MobileBertForMaskedLM(MobileBertConfig(**MOBILE))
    said["trigrams"] = refusal(lambda: context_parallel(trigrams, mesh, order=order))
    handle.remove()
    said["removed"] = refusal(lambda: model(input_ids=tokens, labels=labels))
    said["a batch after that"] = refusal(lambda: model(**batch))
    return said


SAYS = {
    "no positions": "use ContextParallelTrainer; peft's prompt, prefix and p-tuning put tokens before the sequence",
    "positions that count from 0": "must be this rank's",
    "whole": "must be this rank's",
    "another order": "dealt out in",
    "packed positions": "packed documents are told to shard_inputs",
    "one rank's positions": "must be this rank's",
    "padding": "tell shard_inputs attention_mask",
    "a mask of the whole": "tell shard_inputs attention_mask",
    "4D mask": "tell shard_inputs attention_mask",
    "use_cache": "rank's keys only: pass use_cache=False; generate() runs on whole tokens",
    "past_key_values": "with handle.whole():`; peft's prompt, prefix and p-tuning put tokens before the sequence",
    "output_attentions": "output_attentions: probabilities",
    "logits_to_keep": "logits_to_keep",
    "cu_seq_lens_q": "tell shard_inputs document_ids or cu_seqlens",
    "an unknown keyword": "alibi, which context_parallel does not implement",
    "labels that are not shifted": "labels without shift_labels",
    "labels without a count": "where the model's head does not hand it on, leave labels out",
    "no tokens": "must be called with input_ids",
    "no tokens on a rank": "whether input_ids are given must be the same on every rank",
    "no count on a rank": "whether num_items_in_batch are given must be the same on every rank",
    "a count of a rank's own": "num_items_in_batch must be that of the whole batch, of which 97 labels count, got",
    "no number for a count": "of which 97 labels count, got nan",
    "another count on a rank": "num_items_in_batch must be the same on every rank of the mesh, got",
    "a sum of counts": "went through",
    "a loader of one's own": "went through",
    "its count of a rank's own": "num_items_in_batch must be that of the whole batch, of which 97 labels count, got 96",
    "its labels, none of which counts": "num_items_in_batch must be more than 0, got 0",
    "its labels on a rank": "how many labels of the whole batch are known to count must be the same on every rank",
    "labels put into a batch": "of which 97 labels count, got 96",
    "a count that float32 rounds": "went through",
    "a count that float16 rounds": "went through",
    "a count that it need not round": "of which 16777217 labels count, got 16777216",
    "all-ones mask": "went through",
    "without what shard_inputs says": "went through",
    "the model inside": "outside a forward",
    "past its hooks": "if you have, its forward was called past its hooks",
    "past its hooks, by hand": "not a part or a copy of it; or its forward was called past its hooks",
    "a model around it": "peft_model.get_base_model()",
    "pickled": "TypeError: a model that context_parallel was given cannot be pickled: save its state_dict()",
    "another implementation": "which is 'sdpa' now",
    "a copy": "a copy of one",
    "a copy that is set up": "a copy of one",
    "whose original is none the worse": "went through",
    "another model of its config": "outside a forward",
    "dropout": "dropout=0.1",
    "afterwards": "went through",
    "the router's loss on a rank, set later": "set output_router_logits=False in its config",
    "the router's loss, set later": "SFTConfig has router_aux_loss_coef=0.0",
    "a convolution that came later": "model.layers.1.mlp.adapter (Conv1d) looks at several tokens, or at the largest",
    "RoPE that came later": "model.rotary_emb (LlamaRotaryEmbedding) looks at several tokens, or at the largest",
    "as it was": "went through",
    "layers that are left out": "set it to 0 in the config before the model is made",
    "layers that are still left out": "layerdrop leaves layers out at random",
    "layers that a config leaves out": "layerdrop leaves layers out at random",
    "as a whole by a kernel that is not there": "ImportError: ",
    "on the mesh again": "went through",
    "fewer layers than it says": "of 2 layers of LlamaForCausalLM 1 computed attention on the mesh",
    "trigrams": "trigram_input joins the embeddings of neighbouring tokens",
    "removed": "went through",
    "a batch after that": "give the model to context_parallel",
}


def test_calls_that_are_refused(ranks: Ranks) -> None:
    for told in ranks(RANKS).run(refused_calls):
        assert told.keys() == SAYS.keys()
        for name, what in SAYS.items():
            assert what in told[name], (name, told[name])
            assert (what == "went through") == (told[name] == "went through"), (name, told[name])


CLIP = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4
}  # fmt: skip


def gemma_with_eyes() -> Gemma4Model:
    """Of which the tower cuts pictures into patches without a convolution, and asks for a mask of its own."""
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "head_dim": 8,
    }
    text = Gemma4TextConfig(
        **sizes, vocab_size=97, num_key_value_heads=2, global_head_dim=8, hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=97, layer_types=["sliding_attention", "full_attention"], num_kv_shared_layers=0,
    )  # fmt: skip
    eyes = Gemma4VisionConfig(
        **sizes, num_key_value_heads=2, pooling_kernel_size=2, patch_size=2, position_embedding_size=64
    )
    tokens = {"image_token_id": 95, "video_token_id": 94, "audio_token_id": 93}
    return Gemma4Model(Gemma4Config(text_config=text, vision_config=eyes, audio_config=None, **tokens)).double()


def calls_with_pictures() -> tuple[dict[str, str], float]:
    """What is said to them, and of models that pool or count for themselves; how far text alone is from one process."""
    mesh, order, _ = set_up()
    (tokens, _), whole = tokens_of(64), gemma_with_eyes()
    text = tokens % 90
    expected = whole(input_ids=text, use_cache=False).last_hidden_state
    tokens[:, :4] = 95  # on rank 0
    context_parallel(whole, mesh, order=order)
    batch = shard_inputs(mesh, tokens, order=order)
    # As many patches as ranks have tokens.
    places = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij"), -1).reshape(1, 16, 2)
    picture = {
        "pixel_values": torch.rand(2, 16, 12, dtype=torch.float64), "image_position_ids": places.expand(2, -1, -1)
    }  # fmt: skip
    said = {"a picture": refusal(lambda: whole(**batch, **picture))}
    said["a picture on a rank"] = refusal(lambda: whole(**batch, **(picture if dist.get_rank() == 0 else {})))
    found = whole(**shard_inputs(mesh, text, order=order)).last_hidden_state
    with mock.patch.object(integration, "_OF_TOWERS", re.compile("nothing")):
        said["a tower's mask"] = refusal(lambda: whole(**batch, **picture))
        said["a tower's mask on a rank"] = refusal(lambda: whole(**batch, **(picture if dist.get_rank() == 0 else {})))
    pooling = CLIPTextModel(CLIPTextConfig(**CLIP)).double()
    said["a token that is pooled"] = refusal(lambda: context_parallel(pooling, mesh, order=order))
    sizes = {"num_codebooks": 4, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    deaf = CsmDepthDecoderModel(CsmDepthDecoderConfig(**sizes, num_attention_heads=4, head_dim=8, vocab_size=97))
    said["positions that a model ignores"] = refusal(lambda: context_parallel(deaf, mesh, order=order))
    speaking = MoshiDepthConfig(
        **sizes, vocab_size=97, num_attention_heads=4, head_dim=8, audio_vocab_size=50, ffn_dim=48
    )
    with torch.device("meta"):
        said["positions that another ignores"] = refusal(
            lambda: context_parallel(MoshiDepthDecoder(speaking), mesh, order=order)
        )
    bamba = MODELS["Llama"].made()
    two_heads = type("LlamaForTwoHeads", (LlamaModel,), {})(bamba.config)
    said["a head of no known kind"] = refusal(lambda: context_parallel(two_heads, mesh, order=order))
    bamba.config = copy.copy(bamba.config)
    bamba.config.z_loss_coefficient = 0.1
    said["a mean in the loss"] = refusal(lambda: context_parallel(bamba, mesh, order=order))
    return said, worst_error([(found, shard_sequence(expected, order, dim=1))])


def test_pictures_are_refused(ranks: Ranks) -> None:
    says = {
        "a picture": "the model was called with pixel_values: what another model makes of pictures or sound",
        "a picture on a rank": "the model was called with pixel_values",
        "a tower's mask": "a mask of 16 tokens for Gemma4VisionConfig, where this rank has 16 of Gemma4TextConfig",
        "a tower's mask on a rank": "a mask of 16 tokens for Gemma4VisionConfig",
        "a token that is pooled": "it pools tokens (pooler_output)",
        "positions that a model ignores": "it counts positions from 0 on every rank",
        "positions that another ignores": "it counts positions from 0 on every rank",
        "a head of no known kind": "a head of that kind is not known",
        "a mean in the loss": "z_loss_coefficient adds a mean over this rank's tokens",
    }
    for told, error in ranks(RANKS).run(calls_with_pictures):
        assert told.keys() == says.keys()
        for name, what in says.items():
            assert what in told[name], (name, told[name])
        assert error < 1e-12


def test_attention_of_what_is_not_a_ranks_tokens_is_refused() -> None:
    mask = mock.Mock(spec=ShardedMask, forward=mock.Mock())
    mask.forward.sequence.shard = 8
    x = torch.ones(1, 2, 9, 4)
    with fake_world(1):
        attend = AttentionOnMesh(context_mesh("cpu", 1), {})
        with pytest.raises(ValueError, match="Identity has 9 queries, of the sequence this rank has 8 tokens"):
            attend(torch.nn.Identity(), x, x, x, mask)


def heads_around() -> tuple[dict[str, str], float]:
    """What is said of heads around the model that was given, and how far the guide's is from that of one process."""
    mesh, order, _ = set_up()
    config, rank = llama().config, dist.get_rank()
    config.num_labels, config.pad_token_id = 3, 0
    tokens, labels = torch.randint(3, 97, (2, 64), generator=torch.Generator().manual_seed(1)), torch.tensor([0, 2])
    tokens[1, 50:] = 0  # padding, before which its token is
    last, seen = torch.tensor([63, 49]), (tokens != 0).long()
    of_tokens = tokens % 3
    said = {}
    for name, kind in (("tokens", LlamaForTokenClassification), ("the next token", LlamaForCausalLM)):
        model = kind(copy.deepcopy(config))
        context_parallel(model.model, mesh, order=order)
        batch = shard_inputs(mesh, tokens, order=order, labels=of_tokens, shift=name != "tokens")
        said[name] = refusal(lambda model=model, batch=batch: model(**batch))
    classifier = LlamaForSequenceClassification(config).double()
    classifier(input_ids=tokens, attention_mask=seen, labels=labels).loss.backward()
    expected = {name: p.grad.clone() for name, p in classifier.named_parameters()}
    classifier.zero_grad()
    said["it"] = refusal(lambda: context_parallel(classifier, mesh, order=order))
    handle = context_parallel(classifier.model, mesh, order=order)
    batch = shard_inputs(mesh, tokens, order=order, attention_mask=seen)
    said["a token"] = refusal(lambda: classifier(**batch, labels=labels))
    said["a token, on a rank"] = refusal(lambda: (classifier if rank == 1 else classifier.model)(**batch))
    with handle.whole():
        said["whole"] = refusal(lambda: classifier(input_ids=tokens))
    hidden = classifier.model(**batch).last_hidden_state
    rows, here = (batch["position_ids"] == last[:, None]).nonzero(as_tuple=True)
    loss = F.cross_entropy(classifier.score(hidden[rows, here]), labels[rows], reduction="sum") / len(labels)
    loss.backward()
    add_up([p.grad for p in classifier.parameters()])
    pairs = {name: (p.grad, expected[name]) for name, p in classifier.named_parameters()}
    return said, worst_error(pairs, relative_to="largest")


def test_heads_around_a_model(ranks: Ranks) -> None:
    says = {
        "tokens": "LlamaModel was called by LlamaForTokenClassification, whose head sees this rank's tokens only",
        "the next token": "give LlamaForCausalLM to context_parallel",
        "it": "call that by itself, and compute the head from what it gives, on the rank that has the token",
        "a token": "LlamaModel was called by LlamaForSequenceClassification",
        "a token, on a rank": "LlamaModel was called by LlamaForSequenceClassification",
        "whole": "went through",
    }
    for told, error in ranks(RANKS).run(heads_around):
        assert told.keys() == says.keys()
        for name, what in says.items():
            assert what in told[name], (name, told[name])
        assert error < 1e-6


def refused_inputs() -> dict[str, str]:
    mesh, order, _ = set_up()
    tokens, labels = tokens_of(64)
    rank = dist.get_rank()
    deal = partial(shard_inputs, mesh, order=order)
    gaps = torch.ones(2, 64).long().index_fill(1, torch.tensor([5]), 0)
    late = torch.ones(2, 64).long().index_fill(1, torch.arange(7), 0)
    first_left_out = tokens.masked_fill(torch.arange(64) < 8, -100)
    early = torch.ones(2, 64).long().index_fill(1, torch.arange(50, 64), 0)
    first_of_padding = tokens.masked_fill(torch.arange(64) > 50, -100)
    return {
        "other tokens on a rank": refusal(lambda: deal(tokens + (rank == 2))),
        "other labels on a rank": refusal(lambda: deal(tokens, labels=tokens + (rank == 1))),
        "other documents on a rank": refusal(lambda: deal(tokens, document_ids=torch.arange(64) // (8 + rank))),
        "no order": refusal(lambda: deal(tokens, order="head_tail")),
        "no order on a rank": refusal(lambda: deal(tokens, order=None if rank == 1 else order)),
        "a rank without tokens": refusal(lambda: deal(tokens[:, :3])),
        "a rank without tokens of its own": refusal(lambda: deal(tokens[:, :3], order=TokenOrder("contiguous", mesh))),
        "floats": refusal(lambda: deal(tokens.float())),
        "one row": refusal(lambda: deal(tokens[0])),
        "other labels": refusal(lambda: deal(tokens, labels=labels[:, 1:])),
        "nothing counts": refusal(lambda: deal(tokens, labels=labels * 0 - 100)),
        "two kinds of documents": refusal(
            lambda: deal(tokens, document_ids=torch.zeros(64).long(), cu_seqlens=torch.tensor([0, 64]))
        ),
        "a gap": refusal(lambda: deal(tokens, attention_mask=gaps)),
        "what padding predicts": refusal(
            lambda: deal(tokens, attention_mask=late, labels=tokens.masked_fill(late == 0, -100))
        ),
        "what none predicts": refusal(lambda: deal(tokens, attention_mask=late, labels=first_left_out)),
        "what is masked behind": refusal(
            lambda: deal(tokens, attention_mask=late, labels=tokens.masked_fill(late == 0, -100), shift=False)
        ),
        "padding that counts": refusal(lambda: deal(tokens, attention_mask=early, labels=tokens)),
        "padding that a token predicts": refusal(lambda: deal(tokens, attention_mask=early, labels=first_of_padding)),
        "padding that counts, of a masked model": refusal(
            lambda: deal(tokens, attention_mask=early, labels=first_of_padding, shift=False)
        ),
        "documents of a shard": refusal(lambda: deal(tokens, document_ids=torch.zeros(16).long())),
        "by document without": refusal(lambda: deal(tokens, order=TokenOrder("document_head_tail", mesh))),
    }


def test_inputs_that_are_refused(ranks: Ranks) -> None:
    says = {
        "other tokens on a rank": "the tokens must be the same",
        "other labels on a rank": "the labels must be the same",
        "other documents on a rank": "the documents must be the same",
        "no order": "order must be a TokenOrder",
        "no order on a rank": "order must be a TokenOrder",
        "a rank without tokens": "3 tokens in TokenOrder('head_tail', ranks 0, 1, 2, 3 in turn) leave a rank",
        "a rank without tokens of its own": "pad rows to a multiple of 4",
        "floats": "must be whole numbers",
        "one row": "must have shape (B, N)",
        "other labels": "must have the shape of input_ids",
        "nothing counts": "no label counts",
        "two kinds of documents": "give one of",
        "a gap": "one run of tokens",
        "what padding predicts": "set the labels of padding to -100, and that of the token behind it",
        "what none predicts": "went through",
        "what is masked behind": "went through",
        "padding that counts": "a label counts that padding would predict",
        "padding that a token predicts": "went through",
        "padding that counts, of a masked model": "a label counts that padding would predict",
        "documents of a shard": "the whole sequence",
        "by document without": "needs document_ids",
    }
    for told in ranks(RANKS).run(refused_inputs):
        for name, what in says.items():
            assert what in told[name], (name, told[name])


def summed_gradients(model: Any, **batch: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(**batch).loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    add_up(found.values())
    return found


def two_models() -> list[float]:
    """Models on other meshes take turns; checkpointed layers run again in a backward after the other's forward."""
    tokens, labels = tokens_of(61)
    errors = []
    model = llama()
    model(input_ids=tokens, labels=labels, use_cache=False).loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    runs = []
    for axes, name in (({"ring": 4}, "head_tail"), ({"ulysses": 2, "team": 2}, "contiguous")):
        mesh = context_mesh("cpu", **axes)
        order = TokenOrder(name, mesh)
        model = llama()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        context_parallel(model, mesh, order=order)
        batch = shard_inputs(mesh, tokens, order=order, labels=labels)
        runs.append((model, model(**batch).loss))
    for model, loss in reversed(runs):
        loss.backward()
        add_up([p.grad for p in model.parameters()])
        errors.append(
            worst_error({n: (p.grad, expected[n]) for n, p in model.named_parameters()}, relative_to="largest")
        )
    return errors


def test_models_on_other_meshes_take_turns(ranks: Ranks) -> None:
    for errors in ranks(RANKS).run(two_models):
        assert max(errors) < 1e-6  # transformers' loss is in float32


def padded(name: str, has_padding: bool) -> float:
    """Rows of which tokens end early, or begin late, or neither, beside one process that is told attention_mask."""
    mesh, _, model = set_up()
    order = TokenOrder(name, mesh)
    tokens, labels = tokens_of(64)
    seen = torch.ones(2, 64).long()
    if has_padding:
        seen[0, 50:] = 0
        seen[1, :9] = 0
    labels = labels.masked_fill(seen == 0, -100)
    labels[1, 9] = -100  # which padding would predict
    model(input_ids=tokens, labels=labels, attention_mask=seen, use_cache=False).loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    context_parallel(model, mesh, order=order)
    batch = shard_inputs(mesh, tokens, order=order, labels=labels, attention_mask=seen)
    found = summed_gradients(model, **batch)
    return worst_error({n: (found[n], its) for n, its in expected.items()}, relative_to="largest")


def padded_where_the_mask_counts(first: int) -> str:
    """What OPT, whose positions are those of the tokens that its mask does not hide, says of rows that begin there."""
    mesh, order, _ = set_up()
    model = MODELS["OPT"].made()
    tokens, labels = tokens_of(64)
    seen = torch.ones(2, 64).long()
    seen[1, :first], seen[1, 50:] = 0, 0
    labels = labels.masked_fill(seen == 0, -100)
    labels[1, first] = -100
    context_parallel(model, mesh, order=order)
    return refusal(lambda: model(**shard_inputs(mesh, tokens, order=order, labels=labels, attention_mask=seen)))


def test_padding_before_tokens_whose_positions_a_mask_counts(ranks: Ranks) -> None:
    for said in ranks(RANKS).run(padded_where_the_mask_counts, 3):
        assert 'pad behind the tokens (padding_side="right")' in said
    assert ranks(RANKS).run(padded_where_the_mask_counts, 0) == ["went through"] * RANKS


def in_another_state(implementation: str) -> list[str]:
    """What is said of backwards of checkpointed layers within whole() whose forward was outside, and the reverse."""
    mesh, order, model = set_up()
    tokens, labels = tokens_of(64)
    handle = context_parallel(model, mesh, order=order)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    loss = model(**shard_inputs(mesh, tokens, order=order, labels=labels)).loss
    with handle.whole(implementation):
        said = [refusal(loss.backward)]
        loss = model(input_ids=tokens, labels=labels).loss
    return [*said, refusal(loss.backward)]


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_layers_are_computed_again_in_the_state_of_their_forward(ranks: Ranks, implementation: str) -> None:
    for told in ranks(RANKS).run(in_another_state, implementation):
        assert all("run the backward in the state of its forward" in text for text in told), told


def written_to_meanwhile() -> float:
    """Gradients of checkpointed layers, whose documents a loader overwrites by those of its next batch."""
    mesh, order, model = set_up()
    tokens, labels = tokens_of(64)
    context_parallel(model, mesh, order=order)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    found = []
    for is_overwritten in (False, True):
        ids = torch.arange(64) // 16
        model.zero_grad()
        loss = model(**shard_inputs(mesh, tokens, order=order, labels=labels, document_ids=ids)).loss
        if is_overwritten:
            ids.div_(3, rounding_mode="floor")
        loss.backward()
        found.append([p.grad.clone() for p in model.parameters()])
    return worst_error(list(zip(*found, strict=True)))


def test_a_loader_may_write_into_its_documents(ranks: Ranks) -> None:
    assert ranks(RANKS).run(written_to_meanwhile) == [0.0] * RANKS


def packed_by_transformers(name: str) -> float:
    """Packed rows beside transformers' own way: positions that restart, of which RoPE may look for the largest."""
    mesh, order, _ = set_up()
    kind = MODELS[name]
    one_has_more = {"original_max_position_embeddings": 40}  # of longrope: tokens, of which one document has more
    model = replace(kind, options=kind.options | one_has_more).made()
    tokens, labels = tokens_of(61)
    positions = positions_within(DOCUMENTS, 61)
    model(input_ids=tokens, labels=labels, position_ids=positions, use_cache=False).loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    context_parallel(model, mesh, order=order)
    found = summed_gradients(model, **shard_inputs(mesh, tokens, order=order, labels=labels, document_ids=DOCUMENTS))
    return worst_error({n: (found[n], its) for n, its in expected.items()}, relative_to="largest")


@pytest.mark.parametrize(
    ("name", "has_padding"),
    few(
        product(["head_tail", "document_head_tail"], [True, False]),
        {("head_tail", True), ("document_head_tail", True), ("document_head_tail", False)},
    ),
)
def test_padding(ranks: Ranks, name: str, has_padding: bool) -> None:
    assert max(ranks(RANKS).run(padded, name, has_padding)) < 1e-6


def losses_of_bert() -> tuple[float, dict[str, str]]:
    """How far BERT's own loss, and its gradients, are from one process; and what is refused."""
    mesh, order, _ = set_up()
    model = MODELS["BERT"].made()
    tokens, labels = tokens_of(64)
    expected = model(input_ids=tokens, labels=labels)
    expected.loss.backward()
    grads = gradients(model)
    context_parallel(model, mesh, order=order)
    batch = shard_inputs(mesh, tokens, order=order, labels=labels, shift=False)
    found, listed = model(**batch), model(**batch, return_dict=False)
    found.loss.backward()
    assert list(found) == ["loss", "logits"]
    assert listed[0].equal(found.loss)
    assert listed[1].equal(found.logits)
    loss, its = found.loss.detach(), gradients(model)
    add_up([loss, *its.values()])
    error = max(worst_error([(loss[None], expected.loss.detach()[None])]), *errors_of(its, grads).values())
    shifted = shard_inputs(mesh, tokens, order=order, labels=labels)
    said = {
        "no count": refusal(lambda: model(**batch | {"num_items_in_batch": None})),
        "shifted labels": refusal(lambda: model(**shifted)),
    }
    forward = model.forward
    model.forward = lambda *args, **kwargs: forward(*args, **kwargs)
    said["a forward of one's own"] = refusal(lambda: model(**batch))
    model.forward = functools.wraps(forward)(lambda *args, **kwargs: forward(*args, **kwargs))
    said["one that looks like the model's"] = refusal(lambda: model(**batch))
    del model.forward
    smooth = partial(torch.nn.CrossEntropyLoss, label_smoothing=0.1)
    with mock.patch("transformers.models.bert.modeling_bert.CrossEntropyLoss", smooth):
        said["another loss"] = refusal(lambda: model(**batch))
    if dist.get_rank() == 1:
        model.forward = lambda *args, **kwargs: forward(*args, **kwargs)
    said["another forward on a rank"] = refusal(lambda: model(**batch))
    return error, said


def test_means_that_heads_take_are_sums_of_ranks(ranks: Ranks) -> None:
    says = {
        "no count": "labels without num_items_in_batch",
        "shifted labels": "BertForMaskedLM does not predict the next token",
        "a forward of one's own": "BertForMaskedLM computes its loss by itself",
        "one that looks like the model's": "BertForMaskedLM computes its loss by itself",
        "another loss": "BertForMaskedLM computes its loss by itself",
        "another forward on a rank": "whether the loss is the mean of logits must be the same on every rank",
    }
    for error, told in ranks(RANKS).run(losses_of_bert):
        assert error < 1e-12
        assert told.keys() == says.keys()
        for name, what in says.items():
            assert what in told[name], (name, told[name])


def masked(name: str, has_checkpoints: bool) -> float:
    """ESM-2, of padded rows of which masks lie on one rank, all of whose tokens they may be, beside one process."""
    mesh = context_mesh("cpu", ring=2, team=2)
    order, model = TokenOrder(name, mesh), MODELS["ESM-2"].made()
    if has_checkpoints:
        model.gradient_checkpointing_enable({"use_reentrant": True})
    tokens, labels = tokens_of(64)
    tokens[0, :16] = tokens[1, 20:24] = model.config.mask_token_id
    seen = torch.ones(2, 64).long()
    seen[0, 50:] = seen[1, :9] = 0
    tokens[seen == 0] = 0  # of what padding is one process would count, too
    labels = labels.masked_fill(seen == 0, -100)
    summed(model(input_ids=tokens, attention_mask=seen).logits, labels).backward()
    expected = gradients(model)
    context_parallel(model, mesh, order=order)
    batch = shard_inputs(mesh, tokens, order=order, labels=labels, shift=False, attention_mask=seen)
    wanted = batch.pop("labels")
    del batch["num_items_in_batch"]
    summed(model(**batch).logits, wanted).backward()
    found = gradients(model)
    add_up(found.values())
    return max(errors_of(found, expected).values())


def sharded_embeddings(comes_first: bool) -> tuple[float, str]:
    """ESM-2, whose embeddings FSDP2 makes a class of its own of, beside one process; what positions of another say."""
    from torch.distributed.fsdp import fully_shard

    mesh, order, _ = set_up()
    tokens, labels = tokens_of(64)
    kind = replace(MODELS["ESM-2"], options=MODELS["ESM-2"].options | {"tie_word_embeddings": False})
    model = kind.made()
    summed(model(input_ids=tokens).logits, labels).backward()
    expected = gradients(model)
    if not comes_first:
        context_parallel(model, mesh, order=order)
    for module in (model.esm.embeddings, *model.esm.encoder.layer, model):
        fully_shard(module, mesh=mesh._flatten("tokens"))
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    if comes_first:
        context_parallel(model, mesh, order=order)
    batch = shard_inputs(mesh, tokens, order=order, labels=labels, shift=False)
    wanted = batch.pop("labels")
    del batch["num_items_in_batch"]
    summed(model(**batch).logits, wanted).backward()
    found = {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}
    absolute = replace(kind, options=kind.options | {"position_embedding_type": "absolute"}).made()
    fully_shard(absolute.esm.embeddings, mesh=mesh._flatten("tokens"))
    said = refusal(lambda: context_parallel(absolute, mesh, order=order))
    return max(errors_of(found, {name: expected[name] for name in found}).values()), said


@pytest.mark.parametrize("comes_first", [True, False])
def test_masked_tokens_of_embeddings_that_are_sharded(ranks: Ranks, comes_first: bool) -> None:
    for error, said in ranks(RANKS).run(sharded_embeddings, comes_first):
        assert error < 1e-12
        assert "esm.embeddings counts positions from padding_idx + 1" in said


def dropped_later() -> tuple[str, str, float]:
    """What is said where ESM-2 is to drop masked tokens later, and how far outputs are where it no longer does."""
    mesh, order, _ = set_up()
    model = MODELS["ESM-2"].made().requires_grad_(False)
    tokens, _ = tokens_of(64)
    batch = shard_inputs(mesh, tokens, order=order)
    model.esm.embeddings.token_dropout = False
    expected = shard_sequence(model(input_ids=tokens).logits, order, dim=1)
    context_parallel(model, mesh, order=order)
    model.esm.embeddings.token_dropout = True
    said = refusal(lambda: model(**batch))
    context_parallel(model, mesh, order=order)
    model.esm.embeddings.token_dropout = dist.get_rank() != 1
    on_a_rank = refusal(lambda: model(**batch))
    model.esm.embeddings.token_dropout = False
    return said, on_a_rank, worst_error([(model(**batch).logits, expected)])


def test_token_dropout_may_be_set_later(ranks: Ranks) -> None:
    for said, on_a_rank, error in ranks(RANKS).run(dropped_later):
        assert "esm.embeddings (EsmEmbeddings) looks at several tokens" in said
        assert "how many modules count masked tokens must be the same on every rank" in on_a_rank
        assert error < 1e-12


@pytest.mark.parametrize("has_checkpoints", [False, True])
@pytest.mark.parametrize("name", ["contiguous", "document_head_tail"])
def test_masked_tokens_are_counted_over_ranks(ranks: Ranks, name: str, has_checkpoints: bool) -> None:
    assert max(ranks(RANKS).run(masked, name, has_checkpoints)) < 1e-12


def fully_sharded() -> float:
    """As docs/composition.md has FSDP2: gradients are added up, of parameters that are sharded."""
    from torch.distributed.fsdp import fully_shard

    mesh, order, model = set_up()
    tokens, labels = tokens_of(64)
    model(input_ids=tokens, labels=labels, use_cache=False).loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model = llama()
    context_parallel(model, mesh, order=order)
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh._flatten("tokens"))
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    model(**shard_inputs(mesh, tokens, order=order, labels=labels)).loss.backward()
    found = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    return worst_error({n: (found[n], its) for n, its in expected.items()}, relative_to="largest")


def test_fsdp(ranks: Ranks) -> None:
    assert max(ranks(RANKS).run(fully_sharded)) < 1e-6


def mixed() -> list[float]:
    """How far gradients are from float64's where FSDP2 casts what layers are given to bfloat16: alone, on a mesh."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh, order, whole = set_up()
    tokens, labels = tokens_of(64)
    whole.double()(input_ids=tokens, labels=labels, use_cache=False).loss.backward()
    expected = {name: p.grad for name, p in whole.named_parameters()}
    policy, errors = MixedPrecisionPolicy(torch.bfloat16, torch.float32), []
    for is_on_mesh in (False, True):
        model = llama()
        if is_on_mesh:
            context_parallel(model, mesh, order=order)
        for module in (*model.model.layers, model):
            fully_shard(module, mesh=mesh._flatten("tokens"), mp_policy=policy)
            module.set_gradient_divide_factor(1.0 if is_on_mesh else mesh.size())
            module.set_force_sum_reduction_for_comms(True)
        batch = {"input_ids": tokens, "labels": labels}
        model(**shard_inputs(mesh, tokens, order=order, labels=labels) if is_on_mesh else batch).loss.backward()
        found = {name: p.grad.full_tensor().double() for name, p in model.named_parameters()}
        errors.append(worst_error({n: (found[n], its) for n, its in expected.items()}, relative_to="largest"))
    return errors


def test_fsdp_may_cast(ranks: Ranks) -> None:
    for alone, on_mesh in ranks(RANKS).run(mixed):
        assert on_mesh < 2 * alone


def refused_under_fsdp() -> list[str]:
    """What is said of forwards that one rank alone refuses, and of others in between."""
    from torch.distributed.fsdp import fully_shard

    mesh, order, model = set_up()
    context_parallel(model, mesh, order=order)
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh._flatten("tokens"))
    batch = shard_inputs(mesh, tokens_of(64)[0], order=order)
    asked = {"output_attentions": True} if dist.get_rank() == 2 else {}
    return [refusal(lambda more=more: model(**batch, **more)) for more in ({}, asked, {}, asked)]


def test_all_ranks_hear_a_refusal_under_fsdp(ranks: Ranks) -> None:
    for told in ranks(RANKS).run(refused_under_fsdp):
        assert told[::2] == ["went through"] * 2
        assert all("output_attentions: probabilities" in text for text in told[1::2])


def warnings_of_undealt() -> int:
    """How often a model warns whose ranks have other tokens at positions that are this rank's, counted by hand."""
    with mock.patch.object(dealing, "_by_world", weakref.WeakKeyDictionary()):
        mesh = context_mesh("cpu", ring=RANKS)
        model = llama()
        context_parallel(model, mesh, order=TokenOrder("contiguous", mesh))
        rank, part = dist.get_rank(), 64 // RANKS
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                model(
                    input_ids=torch.full((2, part), rank),
                    position_ids=torch.arange(rank * part, (rank + 1) * part)[None],
                )
    return sum("to which no sequence was dealt out" in str(one.message) for one in caught)


def test_a_comparison_of_positions_does_not_count_as_dealing_out(ranks: Ranks) -> None:
    assert ranks(RANKS).run(warnings_of_undealt) == [1] * RANKS


def called_with(length: int) -> tuple[tuple[()], dict[str, Any]]:
    """What a layer of Llama calls its attention with after the hidden states; positions may be any."""
    angle = torch.rand(1, length, 4, dtype=torch.float64).repeat(1, 1, 2)
    embeddings = angle.cos(), angle.sin()
    return (), {"position_embeddings": embeddings, "position_ids": torch.arange(length)[None], "use_cache": False}


def metp() -> float:
    """Projections too are shared: METP takes the place of transformers' modules, whose results are tuples."""
    mesh, order, model = set_up()
    tokens, labels = tokens_of(64)
    model(input_ids=tokens, labels=labels, use_cache=False).loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model = llama()
    attention = METPAttentionParallel(
        query="q_proj", key="k_proj", value="v_proj", output="o_proj", head_dim=8, rotary="half", example=called_with,
        attention=WallFacerParallel(is_causal=True, order=order),
    )  # fmt: skip
    feed_forward = METPParallel(up="up_proj", gate="gate_proj", down="down_proj", activation="silu")
    plan = {"model.layers.*.self_attn": attention, "model.layers.*.mlp": feed_forward}
    attention.check = False
    with pytest.raises(ValueError, match=r"LlamaAttention says that it returns a tuple\[.*leave check=False out"):
        parallelize_module(model, mesh, plan)
    attention.check = True
    parallelize_module(model, mesh, plan)
    AttentionMaskInterface.register("without a mask", lambda **_: None)
    AttentionInterface.register("without a mask", sdpa_attention_forward)
    model.set_attn_implementation("without a mask")
    model.zero_grad()
    positions = sequence_positions(64, order)[None]
    labels = F.pad(labels, (0, 1), value=-100)[:, 1:]
    out = model(input_ids=shard_sequence(tokens, order, dim=1), position_ids=positions, use_cache=False)
    mine = shard_sequence(labels, order, dim=1)
    (summed(out.logits, mine) / (labels != -100).sum()).backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    add_up([grad for grad in grads.values() if not isinstance(grad, DTensor)])
    found = {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in grads.items()}
    return worst_error({n: (found[n], its) for n, its in expected.items()}, relative_to="largest")


def test_metp(ranks: Ranks) -> None:
    assert max(ranks(RANKS).run(metp)) < 1e-6


def compiled(whole: bool) -> tuple[int, list[float]]:
    """Layers, or all, compiled round attention, on batches of other documents; beside the same without a compiler.

    Returns how many graphs there are, and how far gradients of each batch are.
    """
    mesh, order, model = set_up()
    count = CompileCounter()
    context_parallel(model, mesh, order=order)
    other = llama()
    context_parallel(other, mesh, order=order)
    for module in [other] if whole else other.model.layers:
        module.compile(backend=count)
    tokens, labels = tokens_of(61)
    errors = []
    for documents in (None, DOCUMENTS, DOCUMENTS.flip(0)):
        batch = shard_inputs(mesh, tokens, order=order, labels=labels, document_ids=documents)
        found, expected = (summed_gradients(one, **batch) for one in (other, model))
        errors.append(worst_error({n: (found[n], its) for n, its in expected.items()}, relative_to="largest"))
    return count.frame_count, errors


@pytest.mark.whole
def test_compiled_round_attention(ranks: Ranks) -> None:
    for whole in (False, True):
        for graphs, errors in ranks(RANKS).run(compiled, whole):
            assert graphs > 1  # attention is between them
            assert max(errors) < 1e-6


@pytest.mark.parametrize("name", ["Llama", "Phi-3, longrope"])
def test_packed_rows_as_transformers_packs_them(ranks: Ranks, name: str) -> None:
    assert max(ranks(RANKS).run(packed_by_transformers, name)) < 1e-6


class Rope(torch.nn.Module):
    """RoPE that asks for the largest position, and gives ``made`` of what it is called with."""

    rope_type = "longrope"

    def __init__(self, made: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.made = made

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return self.made(position_ids)


def test_rope_sees_the_largest_position_and_gives_rows_of_a_shard_s() -> None:
    seen = []

    def made(positions: torch.Tensor) -> Any:
        seen.append(positions.tolist())
        return positions[..., None] + torch.zeros(3)

    def in_forward() -> Any:
        return mock.Mock(sequence=mock.Mock(largest_position=7))

    model = torch.nn.Sequential(Rope(made), Rope(lambda positions: (made(positions), positions.sum())))
    hooks = tell_largest_position(model, in_forward)
    x, positions = torch.zeros(1), torch.tensor([[0, 5]])
    assert model[0](x, position_ids=positions).tolist() == [[[0.0] * 3, [5.0] * 3]]
    assert model[0](x, positions.expand(2, 1, 2)).shape == (2, 1, 2, 3)
    assert seen == [[[0, 5, 7]], [[[0, 5, 7]]] * 2]
    with pytest.raises(ValueError, match="Rope must make a row of every position"):
        model[1](x, positions)
    for hook in hooks:
        hook.remove()
    assert model[0](x, positions).shape == (1, 2, 3)


def test_phimoes_scales_depend_on_the_largest_position() -> None:
    """Of every type of RoPE but the default, by a number of its config."""
    sizes = {
        "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "num_local_experts": 2,
    }  # fmt: skip
    scales = {"short_mscale": 1.1, "long_mscale": 1.4, "original_max_position_embeddings": 20, "rope_theta": 1e4}
    kinds = {
        "default": {"rope_theta": 1e4}, "linear": scales | {"factor": 2.0},
        "yarn": scales | {"factor": 2.0},
    }  # fmt: skip
    for kind, parameters in kinds.items():
        model = PhimoeModel(PhimoeConfig(**sizes, rope_parameters=parameters | {"rope_type": kind}))
        assert largest_matters(model.rotary_emb) == ("" if kind == "default" else kind)
    assert largest_matters(llama().model.rotary_emb) == ""


def test_rope_that_is_not_told_positions_is_refused() -> None:
    model = llama()
    model.model.rotary_emb = torch.nn.Identity()
    model.model.rotary_emb.rope_type = {"full_attention": "default", "sliding_attention": "dynamic"}
    with pytest.raises(ValueError, match=r"'dynamic' of model\.rotary_emb .* it takes no position_ids"):
        check_model_is_known(model)


def checked(mistake: str) -> str:
    """What check_model says of a model of transformers."""
    from unittest import mock

    from wallfacer_dt.integrations.transformers import attend

    mesh, order, _ = set_up()
    model = MODELS["Mistral"].made()
    tokens, labels = tokens_of(64)
    handle = context_parallel(model, mesh, order=order)
    attention = attend.context_parallel_attention

    def swallowing(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("window_size", None)
        return attention(*args, **kwargs)

    def whole(model: Any) -> Any:
        with handle.whole():
            return model(input_ids=tokens, labels=labels).loss

    def sharded(model: Any) -> Any:
        return model(**shard_inputs(mesh, tokens, order=order, labels=labels)).loss

    with mock.patch.object(attend, "context_parallel_attention", swallowing if mistake else attention):
        try:
            check_model(model, mesh, whole=whole, sharded=sharded, order=order)
        except EquivalenceError as error:
            return str(error)
    return "equal"


def test_check_model_finds_a_window_that_is_swallowed(ranks: Ranks) -> None:
    assert ranks(RANKS).run(checked, "") == ["equal"] * RANKS
    for told in ranks(RANKS).run(checked, "window"):
        assert "that of model.layers.0.self_attn.o_proj" in told


MASKS = {
    "or_masks": masking_utils.or_masks(masking_utils.causal_mask_function, masking_utils.causal_mask_function),
    "blockwise_overlay": masking_utils.and_masks(
        masking_utils.causal_mask_function, masking_utils.blockwise_overlay(torch.zeros(1, 4))
    ),
    "padding_mask_function": masking_utils.padding_mask_function(torch.ones(1, 4)),
    "tests.test_transformers.<lambda>": lambda b, h, q, k: k <= q,
}


@pytest.mark.parametrize("name", MASKS)
def test_unknown_parts_of_a_mask_are_named(name: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"does not know: {name};")):
        read_mask(MASKS[name], ForwardPass(None))  # type: ignore[arg-type]


def test_known_masks() -> None:
    window = masking_utils.sliding_window_causal_mask_function(5)
    both = read_mask(masking_utils.and_masks(window, masking_utils.sliding_window_overlay(3)), ForwardPass(None))
    assert (both.is_causal, both.left, both.right, both.chunk) == (True, 2, None, 0)
    sides = read_mask(masking_utils.sliding_window_bidirectional_mask_function(5), ForwardPass(None))
    assert (sides.is_causal, sides.left, sides.right) == (False, 5, 5)
    with pytest.raises(AttributeError, match=r"reads 'shape' .* is no tensor"):
        _ = both.shape
    assert both[:, :, slice(-0, None), :] is both[:] is both
    for part in (slice(-1, None), (slice(None), 0), slice(None, 4), slice(0, None, 2), None, ..., torch.tensor(0)):
        with pytest.raises(ValueError, match=r"reads a part .* is no tensor"):
            _ = both[part]


def run_page(program: str) -> float:
    found: dict[str, Any] = {}
    exec(program, found)
    return float(found["loss"])


def programs(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


def test_the_page_s_example_runs(ranks: Ranks) -> None:
    losses = ranks(RANKS).run(run_page, programs(GUIDE)[0])
    assert len(set(losses)) == 1
    assert 0 < losses[0] < 20


def run_readme(program: str) -> float:
    """The program as it stands, and how far what it leaves is from one process."""
    names: dict[str, Any] = {}
    torch.manual_seed(0)
    exec(program, names)
    model, tokens = names["model"], names["tokens"]
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    add_up(found.values())
    model.zero_grad()
    with names["context_parallel"](model, names["mesh"], order=names["order"]).whole():
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    return worst_error({n: (found[n], p.grad) for n, p in model.named_parameters()}, relative_to="largest")


def test_the_readme_s_lines_run(ranks: Ranks) -> None:
    (program,) = [text for text in programs(README) if "transformers" in text]
    assert len(program.strip().splitlines()) <= 11  # ten, and an empty one
    assert max(ranks(RANKS).run(run_readme, program)) < 1e-4


def test_masked_tokens_are_counted_in_whatever_the_default_dtype_is() -> None:
    """In bfloat16 1001 is 1000."""
    with fake_world(1):
        order = TokenOrder("contiguous", context_mesh("cpu"))
        sequence, masked = ShardedSequence.of_equal_shards(1001, order), torch.ones(1, 1001, dtype=torch.bool)
        torch.set_default_dtype(torch.bfloat16)
        try:
            found = _ratios(masked, sequence)
        finally:
            torch.set_default_dtype(torch.float32)
    assert found.unique().tolist() == [1.0]


@pytest.mark.parametrize("given", ["document_ids", "cu_seqlens", "attention_mask", ""])
def test_batches_are_dealt_out_whatever_the_default_device_is(given: str) -> None:
    tokens, documents = torch.arange(12).view(1, 12), torch.tensor([[0] * 5 + [1] * 7])
    told = {
        "document_ids": documents, "cu_seqlens": torch.tensor([0, 5, 12]),
        "attention_mask": torch.ones(1, 12, dtype=torch.int64),
    }  # fmt: skip
    with fake_world(1):
        order = TokenOrder("document_head_tail" if given else "head_tail", mesh := context_mesh("cpu"))
        options = {"order": order, "labels": tokens} | ({given: told[given]} if given else {})
        expected = shard_inputs(mesh, tokens, **options)
        with torch.device("meta"):
            found = shard_inputs(mesh, tokens, **options)
    for name in ("input_ids", "position_ids", "labels"):
        assert torch.equal(found[name], expected[name])
    assert str(found["attention_mask"].document_ids) == str(expected["attention_mask"].document_ids)


def test_a_count_that_is_not_finite_is_refused() -> None:
    """As one in float16 of more labels than it knows, by which all gradients would be 0."""
    count = torch.tensor(100_000, dtype=torch.float16)
    with pytest.raises(ValueError, match="of which 100000 labels count, got inf"):
        _checked_count(count, 100_000)
    assert _checked_count(torch.tensor(2049, dtype=torch.float16), 2049) == 2048


def test_a_loss_that_is_set_later_stays() -> None:
    """Within `whole()` and after it; on the mesh it is refused, as it is not known to add up."""

    def of_ours(logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
        return logits.sum() * 0 + 7

    with fake_world(1):
        order = TokenOrder("head_tail", mesh := context_mesh("cpu"))
        model, tokens = MODELS["Llama"].made(), torch.arange(16).view(1, 16)
        handle = context_parallel(model, mesh, order=order)
        model.loss_function = of_ours
        with handle.whole():
            assert model(input_ids=tokens, labels=tokens).loss.item() == 7
        with pytest.raises(ValueError, match="of the loss of_ours it is not known whether"):
            model(**shard_inputs(mesh, tokens, labels=tokens, order=order))
        handle.remove()
        assert model(input_ids=tokens, labels=tokens).loss.item() == 7
