"""What models of transformers do on a mesh: run on ranks beside one process, and written down in docs/models.md.

``(for what in models diffusion_models titan_models; do python -m tests.$what; done) > docs/models.md`` writes the
document. A model is a row: tiny, random, made of its config. A cell is a mesh of four ranks, with rows packed or not:
loss and every parameter's gradient are those of one process, or the model is refused, on every rank. Packed documents
are compared with each of them run by itself.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from wallfacer_dt import TokenOrder, context_mesh
from wallfacer_dt.testing import RankPool, worst_error

RANKS = 4
VOCAB = 97
LENGTHS = {"": 64, "packed": 61}  # of which the second does not divide
DOCUMENTS = torch.tensor([[0] * 23 + [1] * 30 + [2] * 8, [4] * 7 + [5] * 54])
MESHES: dict[str, dict[str, int]] = {
    "ring 4": {"ring": 4},
    "ring 2 x team 2": {"ring": 2, "team": 2},
    "Ulysses 2 x ring 2": {"ulysses": 2, "ring": 2},
}
ORDERS = {"ring 4": "head_tail", "ring 2 x team 2": "document_head_tail", "Ulysses 2 x ring 2": "contiguous"}
BASE = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
MLA = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
    "v_head_dim": 6,
}  # fmt: skip
ESM = NO_DROPOUT | {"position_embedding_type": "rotary", "token_dropout": True, "mask_token_id": 14}
TWO_KINDS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 13}


@dataclass(frozen=True)
class Model:
    """A model of transformers.

    Attributes:
        head: class of the model.
        options: of its config, beside those that all have.
        eager: whether one process runs transformers' eager attention, since its sdpa lacks something.
        kernel: of attention on the mesh.
        shift: whether it predicts the next token.
        has: what its attention, or it, has beside being causal.
    """

    head: str
    options: dict[str, Any] = field(default_factory=dict)
    eager: bool = False
    kernel: str = "auto"
    shift: bool = True
    has: str = ""

    def made(self) -> nn.Module:
        """The model, with the same random parameters everywhere, of which some are large enough for errors to show."""
        import transformers

        kind = getattr(transformers, self.head)
        torch.manual_seed(0)
        config = kind.config_class(**BASE | self.options)
        model = kind(config).double().train()
        if hasattr(config, "num_experts_per_tok"):
            model.set_experts_implementation("eager")
        with torch.no_grad():
            for name, p in model.named_parameters():
                if name.endswith("sinks") or not bool(p.isfinite().all()):
                    p.uniform_(-1, 1)
                elif any(
                    what in name for what in ("q_proj.w", "q_b_proj.w", "query.w", "qkv", "c_attn.w", "query_key")
                ):
                    p.mul_(8)
                elif "lm_head" in name or "embed" in name or "wte" in name:
                    p.mul_(4)
        return model


SOFTCAP = {"attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 24, "head_dim": 16}
MODELS: dict[str, Model] = {
    "Llama": Model("LlamaForCausalLM"),
    "Llama, dynamic RoPE": Model(
        "LlamaForCausalLM",
        {
            "max_position_embeddings": 56,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        },
    ),
    "Mistral": Model("MistralForCausalLM", {"sliding_window": 13}, has="window"),
    "Mixtral": Model("MixtralForCausalLM", {"sliding_window": None, "num_local_experts": 4}, has="experts"),
    "Qwen2": Model(
        "Qwen2ForCausalLM", {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 13}, has="window"
    ),
    "Qwen3": Model("Qwen3ForCausalLM", {"head_dim": 16}),
    "Qwen3-MoE": Model("Qwen3MoeForCausalLM", {"head_dim": 16, "num_experts": 4, **MOE}, has="experts"),
    "Gemma": Model("GemmaForCausalLM", {"head_dim": 16}),
    "Gemma 2": Model(
        "Gemma2ForCausalLM", {**TWO_KINDS, **SOFTCAP}, eager=True, kernel="reference", has="window, soft cap, scale"
    ),
    "Gemma 3": Model(
        "Gemma3ForCausalLM", {**TWO_KINDS, "head_dim": 16, "query_pre_attn_scalar": 24}, has="window, scale"
    ),
    "Gemma 4": Model(
        "Gemma4ForCausalLM",
        {
            "num_hidden_layers": 4, "layer_types": TWO_KINDS["layer_types"] * 2, "sliding_window": 13,
            "num_kv_shared_layers": 2, "head_dim": 16, "global_head_dim": 16, "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB,
        },
        has="window, scale, shared keys",
    ),
    "GPT-OSS": Model(
        "GptOssForCausalLM",
        {**TWO_KINDS, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}, eager=True,
        has="window, sinks, experts",
    ),
    "DeepSeek-V3": Model(
        "DeepseekV3ForCausalLM",
        {**MLA, **MOE, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
        has="MLA, experts",
    ),
    "Phi-3": Model("Phi3ForCausalLM", {"sliding_window": None}),
    "Phi-3, longrope": Model(
        "Phi3ForCausalLM",
        {
            "sliding_window": None,
            "original_max_position_embeddings": 56,
            "rope_parameters": {
                "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
            },
        },
    ),
    "OLMo 2": Model("Olmo2ForCausalLM"),
    "Cohere": Model("CohereForCausalLM"),
    "Cohere 2": Model("Cohere2ForCausalLM", TWO_KINDS, has="window"),
    "GLM-4": Model("Glm4ForCausalLM", {"head_dim": 8}),
    "Granite": Model("GraniteForCausalLM", {"attention_multiplier": 0.2}, has="scale"),
    "StarCoder 2": Model("Starcoder2ForCausalLM", {"sliding_window": 13, "residual_dropout": 0.0}, has="window"),
    "SmolLM 3": Model("SmolLM3ForCausalLM"),
    "Llama 4": Model(
        "Llama4ForCausalLM",
        {
            "head_dim": 8, "layer_types": ["chunked_attention", "full_attention"], "attention_chunk_size": 16,
            "no_rope_layers": [1, 0], "num_local_experts": 2, "intermediate_size_mlp": 48, "moe_layers": [],
            "attn_temperature_tuning": False,
        },
        has="chunks",
    ),
    "Llama 4, temperature tuning": Model(
        "Llama4ForCausalLM",
        {
            "head_dim": 8, "no_rope_layers": [1, 0], "num_local_experts": 2, "intermediate_size_mlp": 48,
            "moe_layers": [],
        },
    ),
    "GPT-2": Model("GPT2LMHeadModel", {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "GPT-NeoX": Model("GPTNeoXForCausalLM"),
    "OPT": Model("OPTForCausalLM", {"dropout": 0.0, "word_embed_proj_dim": 32, "ffn_dim": 48}),
    "BERT": Model("BertForMaskedLM", NO_DROPOUT, shift=False, has="not causal"),
    "BERT, with dropout": Model("BertForMaskedLM", shift=False),
    "ModernBERT": Model(
        "ModernBertForMaskedLM",
        {"local_attention": 26, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2}, shift=False,
        has="not causal, window",
    ),
    "ESM-2": Model("EsmForMaskedLM", ESM, shift=False, has="not causal, masked tokens"),
    "ESM C": Model("EsmcForMaskedLM", {"num_key_value_heads": 4}, shift=False, has="not causal"),
    "RoBERTa": Model("RobertaForMaskedLM", NO_DROPOUT, shift=False, has="not causal"),
    "Falcon": Model("FalconForCausalLM"),
    "Bloom": Model("BloomForCausalLM"),
    "Qwen3-Next": Model("Qwen3NextForCausalLM", {"num_experts": 4, **MOE, "head_dim": 16}),
    "Mamba 2": Model("Mamba2ForCausalLM", {"num_heads": 8, "head_dim": 8, "n_groups": 1, "state_size": 8}),
    "FNet": Model("FNetForMaskedLM", {"hidden_dropout_prob": 0.0}, shift=False),
    "ViT": Model("ViTModel", {"image_size": 32, "patch_size": 8}),
    "Whisper": Model(
        "WhisperModel",
        {"d_model": 32, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "decoder_start_token_id": 1},
    ),
    "T5": Model("T5ForConditionalGeneration", {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}),
    "BERT, one class for a sequence": Model("BertForSequenceClassification", NO_DROPOUT),
}  # fmt: skip


class Outcome(NamedTuple):
    """What came of a model on a mesh: how far loss and gradients are from one process, why the loss that it computes
    itself was refused, or why all was.
    """

    loss: float = 0.0
    gradient: float = 0.0
    worst: str = ""
    own_loss: str = ""
    refused: str = ""


Key = tuple[str, str]  # mesh, and "packed" or nothing
Outcomes = dict[Key, Outcome]


def tokens_of(length: int) -> tuple[Tensor, Tensor]:
    """Tokens (2, N), and labels, of which some do not count."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, VOCAB, (2, length), generator=generator)
    ignored = torch.rand(2, length, generator=generator) < 0.2
    return tokens, tokens.masked_fill(ignored, -100)


def summed(logits: Tensor, labels: Tensor) -> Tensor:
    """In the logits' dtype, where transformers has float32."""
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-100, reduction="sum")


def by_itself(model: nn.Module, tokens: Tensor, labels: Tensor, shift: bool, packed: bool) -> Tensor:
    """The loss of one process; of packed documents each is run by itself."""
    wanted = F.pad(labels, (0, 1), value=-100)[:, 1:] if shift else labels
    if not packed:
        loss = summed(model(input_ids=tokens, use_cache=False).logits, wanted)
    else:
        parts = [
            summed(model(input_ids=row[ids == document][None], use_cache=False).logits, want[ids == document][None])
            for row, want, ids in zip(tokens, wanted, DOCUMENTS, strict=True)
            for document in ids.unique()
        ]
        loss = torch.stack(parts).sum()
    return loss / (wanted != -100).sum()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Of every parameter; and the model's are gone."""
    found = {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return found


def add_up(parts: Iterable[Tensor]) -> None:
    """In place, over ranks: all of a dtype at once, since a collective costs more than such tensors do."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for part in parts:
        by_dtype.setdefault(part.dtype, []).append(part.detach())
    for alike in by_dtype.values():
        flat = torch.cat([part.flatten() for part in alike])
        dist.all_reduce(flat)
        for part, total in zip(alike, flat.split([part.numel() for part in alike]), strict=True):
            part.copy_(total.view(part.shape))


def try_model(name: str, keys: list[Key], dropped: str = "") -> Outcomes:
    """On every rank: a model on meshes, beside one process. Something may be dropped of attention's options."""
    from wallfacer_dt.integrations.transformers import attend, context_parallel

    kind = MODELS[name]
    model = kind.made()
    outcomes: Outcomes = {}
    expected: dict[str, tuple[Tensor, dict[str, Tensor]]] = {}
    attention = attend.context_parallel_attention

    def dropping(*args: Any, **kwargs: Any) -> Tensor:
        return attention(*args, **{key: value for key, value in kwargs.items() if key != dropped})

    for mesh_name, packed in keys:
        mesh = context_mesh("cpu", **MESHES[mesh_name])
        order = TokenOrder(ORDERS[mesh_name] if packed else ORDERS[mesh_name].removeprefix("document_"), mesh)
        tokens, labels = tokens_of(LENGTHS[packed])
        try:
            handle = context_parallel(model, mesh, order=order, kernel=kind.kernel)
            if packed not in expected:
                with handle.whole("eager" if kind.eager else None):
                    loss = by_itself(model, tokens, labels, kind.shift, bool(packed))
                    loss.backward()
                expected[packed] = loss.detach(), gradients(model)
            with mock.patch.object(attend, "context_parallel_attention", dropping) if dropped else nullcontext():
                outcomes[mesh_name, packed] = _compared(
                    model, kind, mesh, order, tokens, labels, bool(packed), *expected[packed]
                )
        except (ValueError, TypeError, NotImplementedError) as error:
            outcomes[mesh_name, packed] = Outcome(refused=f"{error}")
            model.zero_grad()
    return outcomes


def _compared(
    model: nn.Module,
    kind: Model,
    mesh: Any,
    order: Any,
    tokens: Tensor,
    labels: Tensor,
    packed: bool,
    loss: Tensor,
    expected: dict[str, Tensor],
) -> Outcome:
    from wallfacer_dt.integrations.transformers import shard_inputs

    documents = DOCUMENTS if packed else None
    batch = shard_inputs(mesh, tokens, order=order, labels=labels, shift=kind.shift, document_ids=documents)
    mine, count = batch["labels"], batch["num_items_in_batch"]
    plain = {key: value for key, value in batch.items() if key not in ("labels", "shift_labels", "num_items_in_batch")}
    found = summed(model(**plain).logits, mine) / count
    found.backward()
    grads = gradients(model)
    add_up([found := found.detach(), *grads.values()])
    errors = errors_of(grads, expected)
    worst = max(errors, key=lambda name: errors[name])
    own = own_loss(model, batch)
    if isinstance(own, Tensor):
        own = "" if worst_error([(own[None].to(loss.dtype), loss[None])], relative_to="each") < 1e-6 else "WRONG"
    return Outcome(worst_error([(found[None], loss[None])], relative_to="each"), errors[worst], worst, own)


def errors_of(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """By parameter, relative to its largest element; of those that are 0 but for rounding (a key's bias moves all
    scores of a row alike), to the largest of all.
    """
    sizes = {name: float(torch.linalg.vector_norm(its, torch.inf)) for name, its in expected.items()}
    largest = max(sizes.values())
    nothing = {name for name, size in sizes.items() if size < 1e-10 * largest}
    assert len(nothing) < len(expected) // 2, "most parameters have a gradient"
    return {
        name: worst_error([(found[name] / largest, its / largest)])
        if name in nothing
        else worst_error([(found[name], its)], relative_to="largest")
        for name, its in expected.items()
    }


def own_loss(model: nn.Module, batch: dict[str, Any]) -> Tensor | str:
    """What ``model(**batch).loss`` gives, summed over ranks, or why it is refused."""
    try:
        with torch.no_grad():
            loss = model(**batch).loss
    except ValueError as error:
        return str(error)
    dist.all_reduce(loss)
    return loss


KEYS: list[Key] = [(mesh, packed) for mesh in MESHES for packed in LENGTHS]
TOLERANCE = 1e-5  # relative to the largest element; norms and softmax of transformers are in float32


def try_all(pool: RankPool, names: Iterable[str], keys: Callable[[str], list[Key]]) -> Iterator[tuple[str, Outcomes]]:
    """What models give on meshes. What one rank refuses, all have refused."""
    for name in names:
        told = pool.run(try_model, name, keys(name))
        for key in keys(name):
            refused = [bool(its[key].refused) for its in told]
            assert len(set(refused)) == 1, [its[key] for its in told]
        yield name, told[0]


def verdict(outcome: Outcome) -> str:
    """In one word, but for why a model is refused."""
    if outcome.refused:
        return outcome.refused
    return "equal" if max(outcome.loss, outcome.gradient) <= TOLERANCE else "WRONG"


def own_flag(name: str) -> str:
    """What transformers says of its own context parallelism of a model."""
    return "yes" if MODELS[name].made().supports_context_parallel else "no"


def document(outcomes: dict[str, Outcomes]) -> str:
    """docs/models.md."""
    import transformers

    notes: list[str] = []

    def noted(text: str) -> int:
        if text not in notes:
            notes.append(text)
        return notes.index(text) + 1

    lines = []
    for name, tried in outcomes.items():
        cells = []
        for key in KEYS:
            what = verdict(tried[key])
            cells.append(what if what in ("equal", "WRONG") else f"refused ({noted(what)})")
        own = {outcome.own_loss for outcome in tried.values() if not outcome.refused}
        losses = [f"refused ({noted(text)})" if text else "equal" for text in sorted(own)]
        lines.append(f"| {' | '.join([name, MODELS[name].has, *cells, ', '.join(losses) or '–', own_flag(name)])} |")
    columns = [f"{mesh}{', packed' if packed else ''}" for mesh, packed in KEYS]
    last = "`model(**batch).loss`", "transformers' flag"
    head = f"| {' | '.join(['model', 'has', *columns, *last])} |\n|{' --- |' * (len(KEYS) + 4)}"
    said = "\n".join(f"{n}. `{text}`" for n, text in enumerate(notes, 1))
    return DOCUMENT.format(version=transformers.__version__, head=head, lines="\n".join(lines), notes=said)


DOCUMENT = """# Models of transformers

Generated by `python -m tests.models`, with transformers {version}; `tests/test_transformers.py` fails
when it is out of date.

**equal**: on four ranks of gloo, loss and every parameter's gradient were those of one process, relative to its largest
element within 1e-5, in a float64 model (most are within 1e-14; some norms, routers and eager attention of transformers
compute in float32). Models are tiny and random, of two layers (Gemma 4 of four), with 64 tokens in each of two rows;
projections of queries are made large, so that attention is sharp. **packed**: 61 tokens a row, which four ranks do not
divide, of two and three documents; one process runs each document by itself. **refused** was run too: every rank raised
what is quoted below. The last column but one is the loss that the model computes itself, summed over ranks.

The last is what transformers says of its own context parallelism (`model.supports_context_parallel`). As accelerate's
code has it, masks are dropped in layers' `self_attn`, which are told to be causal. So packed rows are not for it, and
accelerate refuses layers of other types than `full_attention`. The flag does not ask whether a model is causal (BERT),
adds biases to scores (T5, Bloom) or looks at tokens otherwise (FNet).

Orders of tokens are `head_tail` on a ring, `head_tail` and packed `document_head_tail` on rings and teams, and
`contiguous` with Ulysses.

{head}
{lines}

{notes}
"""


if __name__ == "__main__":
    ranks = RankPool(RANKS, timeout=300)
    print(document(dict(try_all(ranks, MODELS, lambda _: KEYS))), end="")
    ranks.close()
