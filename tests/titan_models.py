"""What models of torchtitan do on a mesh: run on ranks beside one process, a section of docs/models.md.

A model is torchtitan's own debug model with two or four layers, unedited. A cell is a mesh of four ranks, with rows
packed or not: loss and every parameter's gradient are those of one process that runs torchtitan's own masks, or the
model is refused, on every rank.
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from recipes.torchtitan.shim import fit_attention_to_cpu, fit_to_cpu, fit_to_torch
from tests.models import KEYS, MESHES, Key, Outcome, Outcomes, errors_of, gradients, summed, verdict
from wallfacer_dt import TokenOrder, context_mesh, sequence_positions, shard_sequence
from wallfacer_dt.testing import RankPool, worst_error

LENGTH, VOCAB, EXPERTS = 64, 96, 8
ORDERS = {"ring 4": "head_tail", "ring 2 x team 2": "head_tail", "Ulysses 2 x ring 2": "contiguous"}
# Positions as torchtitan's loaders count them; the first row begins in the middle of a document.
DOCUMENTS = ((23, 30, 11), (7, 57))


@dataclass(frozen=True)
class Model:
    """A model of torchtitan.

    Attributes:
        family: the module of `torchtitan.models`.
        flavor: of the family's registry.
        options: for the registry.
        layers: that are kept.
        has: what it, or its attention, has beside being causal.
        change: what is done to its config.
    """

    family: str
    flavor: str = "debugmodel"
    options: tuple[tuple[str, Any], ...] = ()
    layers: int = 2
    has: str = ""
    change: Callable[[Any], None] = lambda _: None

    def made(self) -> nn.Module:
        """The model, with the same random parameters everywhere, and sharp attention."""
        from importlib import import_module

        spec = import_module(f"torchtitan.models.{self.family}").model_registry(self.flavor, **dict(self.options))
        config = spec.model
        if self.layers and hasattr(config, "layers"):
            del config.layers[self.layers :]
        narrow(config)
        self.change(config)
        torch.manual_seed(0)
        model = config.build().to_empty(device="cpu")
        with torch.no_grad():
            model.init_weights(buffer_device=None)
            for name, p in model.named_parameters():
                if name.endswith("sinks"):
                    p.uniform_(-1, 1)
                elif any(what in name for what in ("wqkv.w", "wq.w")):
                    p.mul_(4)
        return model.train()


def narrow(config: Any) -> None:
    """Fewer entries and experts, and narrower feed-forwards, which take the time."""
    embeddings = getattr(config.tok_embeddings, "embedding", config.tok_embeddings)
    config.vocab_size = embeddings.num_embeddings = config.lm_head.out_features = VOCAB
    for layer in config.layers:
        moe, dense = layer.moe, [layer.feed_forward, getattr(layer.moe, "shared_experts", None)]
        for part in filter(None, dense):
            part.w1.out_features = part.w3.out_features = part.w2.in_features = 48
        if moe is not None:
            experts = moe.routed_experts
            experts.inner_experts.hidden_dim = 24
            for part in (moe, experts.inner_experts, experts.token_dispatcher, moe.router):
                part.num_experts = EXPERTS
            moe.router.gate.out_features = EXPERTS


def with_windows(config: Any) -> None:
    """Windows that end within 64 tokens, where the debug model has 128."""
    for layer in config.layers:
        attention = layer.attention
        for name in ("sliding_window_size", "window_size"):
            if getattr(attention, name, None) is not None:
                if name == "window_size" or not isinstance(getattr(type(attention), name, None), property):
                    setattr(attention, name, 13)
        if getattr(attention.inner_attention, "window_size", (-1, 0)) != (-1, 0):
            attention.inner_attention.window_size = (12, 0)


def of_text_alone(config: Any) -> None:
    """Without the vision encoder."""
    config.vision_encoder = None


def with_linear_attention(config: Any) -> None:
    """Nothing is changed: the first layers have it."""


FLEX, VARLEN = (("attn_backend", "flex"),), (("attn_backend", "varlen"),)
MOE = (("moe_comm_backend", "standard"),)
MODELS: dict[str, Model] = {
    "Llama 3": Model("llama3", options=FLEX),
    "Llama 3, varlen": Model("llama3", options=VARLEN),
    "Qwen3": Model("qwen3", options=FLEX, has="tied embeddings"),
    "Qwen3-MoE": Model("qwen3", "debugmodel_moe", FLEX + MOE, has="experts"),
    "DeepSeek-V3": Model("deepseek_v3", options=FLEX + MOE, has="MLA, scale, experts"),
    "DeepSeek-V3, multi-token prediction": Model("deepseek_v3", options=FLEX + MOE + (("num_mtp_layers", 1),)),
    "GPT-OSS": Model("gpt_oss", options=FLEX + MOE, change=with_windows, has="window, sinks, scale, experts"),
    "GPT-OSS, varlen": Model("gpt_oss", options=VARLEN + MOE, change=with_windows, has="window, sinks, scale, experts"),
    "Muse Glimmer": Model("muse_glimmer", options=FLEX, layers=4, change=with_windows, has="window, scale"),
    "Kimi K2, text": Model("kimi_k2_7", options=FLEX + MOE, change=of_text_alone, has="MLA, scale, experts"),
    "Kimi K2": Model("kimi_k2_7", options=FLEX + MOE),
    "Qwen3.5": Model("qwen3_5", options=FLEX),
}


def positions_of(packed: bool) -> Tensor:
    """(2, N), from 0 in every document."""
    if not packed:
        return torch.arange(LENGTH).expand(2, -1).contiguous()
    return torch.stack([torch.cat([torch.arange(n) for n in row]) for row in DOCUMENTS])


def tokens_of(vocab: int) -> tuple[Tensor, Tensor]:
    """Tokens (2, N) and labels, of which some do not count."""
    generator = torch.Generator().manual_seed(1)
    tokens, labels = torch.randint(vocab, (2, 2, LENGTH), generator=generator)
    return tokens, labels.masked_fill(torch.rand(2, LENGTH, generator=generator) < 0.2, -100)


def try_model(name: str, keys: list[Key], dropped: str = "") -> Outcomes:
    """On every rank: a model on meshes, beside one process. Something may be dropped of attention's options."""
    fit_to_torch()
    fit_to_cpu()
    fit_attention_to_cpu()
    from wallfacer_dt.integrations.torchtitan import InnerAttentionParallel, context_parallel

    model = MODELS[name].made()
    expected: dict[str, tuple[Tensor, dict[str, Tensor]]] = {}
    outcomes: Outcomes = {}
    translated = InnerAttentionParallel._translated

    def dropping(*args: Any) -> dict[str, Any]:
        return {key: value for key, value in translated(*args).items() if key != dropped}

    for mesh_name, packed in keys:
        mesh = context_mesh("cpu", **MESHES[mesh_name])
        order = TokenOrder(ORDERS[mesh_name], mesh)
        sharded = copy.deepcopy(model)
        try:
            with ExitStack() as stack:
                # Experts compute in bfloat16, whatever the model does.
                stack.enter_context(mock.patch.object(Tensor, "bfloat16", lambda x: x))
                stack.enter_context(mock.patch.object(InnerAttentionParallel, "_translated", dropping))
                context_parallel(sharded, mesh, order=order)
                if packed not in expected:
                    expected[packed] = by_itself(model, positions_of(bool(packed)))
                outcomes[mesh_name, packed] = compared(sharded, order, positions_of(bool(packed)), *expected[packed])
        except (ValueError, TypeError, NotImplementedError) as error:
            outcomes[mesh_name, packed] = Outcome(refused=f"{error}")
    return outcomes


def by_itself(model: nn.Module, positions: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of one process, whose masks torchtitan makes."""
    tokens, labels = tokens_of(model.config.vocab_size)
    logits = model(tokens, positions=positions, attention_masks=model.get_attention_masks(positions=positions))
    loss = summed(logits, labels) / (labels != -100).sum()
    loss.backward()
    return loss.detach(), gradients(model)


def compared(
    model: nn.Module, order: TokenOrder, positions: Tensor, loss: Tensor, expected: dict[str, Tensor]
) -> Outcome:
    """What differs on this mesh."""
    from wallfacer_dt.integrations.torchtitan import Documents

    whole = (*tokens_of(model.config.vocab_size), positions)
    tokens, labels, here = (shard_sequence(x, order, dim=1) for x in whole)
    logits = model(tokens, positions=here, attention_masks=Documents.of(positions))
    found = summed(logits, labels) / (whole[1] != -100).sum()
    found.backward()
    grads = gradients(model)
    for part in (found := found.detach(), *grads.values()):
        dist.all_reduce(part)
    errors = errors_of(grads, expected)
    worst = max(errors, key=lambda name: errors[name])
    return Outcome(worst_error([(found[None], loss[None])], relative_to="each"), errors[worst], worst)
