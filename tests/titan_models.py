"""What models of torchtitan do on a mesh: run on ranks beside one process, a section of docs/models.md.

A model is torchtitan's own debug model with two or four layers, unedited. A cell is a mesh of four ranks, with rows
packed or not: loss and every parameter's gradient are those of one process that runs torchtitan's own masks, or the
model is refused, on every rank.
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from importlib.metadata import version
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from recipes.torchtitan.shim import fit_attention_to_cpu, fit_to_cpu, fit_to_torch
from tests.models import KEYS, MESHES, RANKS, Key, Outcome, Outcomes, add_up, errors_of, gradients, summed, verdict
from wallfacer_dt import TokenOrder, context_mesh, shard_sequence
from wallfacer_dt.testing import RankPool, worst_error

NOT_RUN = "not run"
LENGTH, VOCAB, EXPERTS, WINDOW = 64, 96, 8, 13
ORDERS = {"ring 4": "head_tail", "ring 2 x team 2": "document_head_tail", "Ulysses 2 x ring 2": "contiguous"}
# Positions as torchtitan's loaders count them; the first row begins in the middle of a document.
DOCUMENTS = ((23, 30, 11), (7, 57))
FLUX = "not causal, text and image"


@dataclass(frozen=True)
class Model:
    """A model of torchtitan.

    Attributes:
        family: the module of `torchtitan.models`.
        options: for the family's registry, beside that attention is FlexAttention.
        flavor: of the registry.
        layers: that are kept.
        has: what it, or its attention, has beside being causal.
        change: what is done to its config, beside `narrow`.
        dtype: of parameters; experts compute in none above float32.
    """

    family: str
    options: dict[str, Any] = field(default_factory=dict)
    flavor: str = "debugmodel"
    layers: int = 2
    has: str = ""
    change: Callable[[Any], None] = lambda _: None
    dtype: torch.dtype = torch.float32

    def made(self) -> nn.Module:
        """The model, with the same random parameters everywhere, and sharp attention."""
        registry = import_module(f"torchtitan.models.{self.family}").model_registry
        config = registry(self.flavor, **({"attn_backend": "flex"} if self.has != FLUX else {}) | self.options).model
        if self.has == FLUX:
            narrow_flux(config)
        else:
            del config.layers[self.layers :]
            narrow(config)
        self.change(config)
        torch.manual_seed(0)
        model = config.build().to_empty(device="cpu")
        with torch.no_grad():
            model.init_weights(buffer_device=None)
            for name, p in model.named_parameters():
                if self.has == FLUX:
                    p.normal_(std=0.05)
                elif bool((p == p.view(-1)[0]).all()):  # norms, and what would keep gradients from others
                    p.add_(torch.randn_like(p), alpha=0.1)
                elif name.endswith("sinks"):
                    p.uniform_(-1, 1)
                elif any(what in name for what in ("wqkv.w", "wq.w")):
                    p.mul_(4)
        return model.to(self.dtype).train()


def narrow(config: Any, vocab: int = VOCAB) -> None:
    """Fewer entries and experts, and narrower feed-forwards, which take the time."""
    embeddings = getattr(config.tok_embeddings, "embedding", config.tok_embeddings)
    config.vocab_size = embeddings.num_embeddings = config.lm_head.out_features = vocab
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
        attention, fields = layer.attention, layer.attention.__dataclass_fields__
        for name in fields.keys() & {"sliding_window_size", "window_size"}:
            if getattr(attention, name) is not None:
                setattr(attention, name, WINDOW)
        if getattr(attention.inner_attention, "window_size", (-1, 0)) != (-1, 0):
            attention.inner_attention.window_size = (WINDOW - 1, 0)


def of_text_alone(config: Any) -> None:
    """Without the vision encoder."""
    config.vision_encoder = None


def narrow_flux(config: Any) -> None:
    """Of the debug model's width a third, in one block of each kind."""
    from torchtitan.protocols.module import Module

    del config.double_blocks[1:], config.single_blocks[1:]
    parts = [part for _, part, _, _ in config.traverse(Module.Config, recurse=True)]
    for part in parts:
        for name in part.__dataclass_fields__:
            value = getattr(part, name)
            if name == "num_heads" or (isinstance(value, int) and value and value % 1536 == 0):
                setattr(part, name, value // 3)


MOE = {"moe_comm_backend": "standard"}
VARLEN = {"attn_backend": "varlen"}
MODELS: dict[str, Model] = {
    "Llama 3": Model("llama3"),
    "Llama 3, varlen": Model("llama3", VARLEN),
    "Qwen3": Model("qwen3", has="tied embeddings"),
    "Qwen3-MoE": Model("qwen3", MOE, "debugmodel_moe", has="experts"),
    "Qwen3.5": Model("qwen3_5"),
    "DeepSeek-V3": Model("deepseek_v3", MOE, has="MLA, scale, experts"),
    "DeepSeek-V3, multi-token prediction": Model("deepseek_v3", {**MOE, "num_mtp_layers": 1}),
    "Kimi K2": Model("kimi_k2_7", MOE),
    "Kimi K2, text": Model("kimi_k2_7", MOE, change=of_text_alone, has="MLA, scale, experts"),
    "GPT-OSS": Model("gpt_oss", MOE, change=with_windows, has="window, sinks, scale, experts"),
    "GPT-OSS, varlen": Model("gpt_oss", MOE | VARLEN, change=with_windows, has="window, sinks, scale, experts"),
    "Muse Glimmer": Model("muse_glimmer", layers=4, change=with_windows, has="window, scale", dtype=torch.float64),
    "Flux": Model("flux", flavor="flux-debug", has=FLUX),
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


class Batch(NamedTuple):
    """Of whole sequences: what a model is called with, and labels, or numbers to come near to."""

    inputs: dict[str, Tensor]
    target: Tensor

    @property
    def count(self) -> Tensor | int:
        """By which a sum over tokens is divided."""
        return self.target.numel() if self.target.is_floating_point() else (self.target != -100).sum()


def flux_batch(model: nn.Module) -> dict[str, Tensor]:
    """What Flux is called with; its sequences are of texts, ids of texts, latents and ids of latents."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.zeros(2, LENGTH, 3)
    ids[..., 1] = torch.arange(LENGTH)
    return {
        "img": torch.randn(2, LENGTH, model.in_channels, generator=draw),
        "img_ids": ids,
        "txt": torch.randn(2, LENGTH // 2, model.txt_in.in_features, generator=draw),
        "txt_ids": torch.zeros(2, LENGTH // 2, 3),
        "timesteps": torch.rand(2, generator=draw),
        "y": torch.randn(2, model.vector_in.in_layer.in_features, generator=draw),
    }


def try_model(name: str, keys: list[Key], dropped: str = "", metp: bool = False) -> Outcomes:
    """On every rank: a model on meshes, beside one process; perhaps with METP for its feed-forwards.

    Something may be dropped of what attention is told.
    """
    fit_to_torch()
    fit_to_cpu()
    fit_attention_to_cpu()
    from torchtitan.distributed.utils import set_spmd_backend

    from wallfacer_dt.integrations.torchtitan import (
        InnerAttentionParallel,
        context_parallel,
        feed_forward_plan,
        upstream,
    )

    set_spmd_backend("partial_dtensor")
    try:
        model = MODELS[name].made()
    except ModuleNotFoundError as error:
        return {key: Outcome(refused=f"{NOT_RUN}: {error}") for key in keys}
    expected: dict[str, tuple[Tensor, dict[str, Tensor]]] = {}
    outcomes: Outcomes = {}
    translated = InnerAttentionParallel._translated

    def dropping(*args: Any) -> dict[str, Any]:
        return {key: value for key, value in translated(*args).items() if key != dropped}

    for mesh_name, packed in keys:
        mesh = context_mesh("cpu", **MESHES[mesh_name])
        order = TokenOrder(ORDERS[mesh_name] if packed else ORDERS[mesh_name].removeprefix("document_"), mesh)
        batch = batch_of(model, bool(packed))
        sharded = copy.deepcopy(model)
        with (
            # Experts compute in bfloat16, whatever the model does.
            mock.patch.object(Tensor, "bfloat16", lambda x: x),
            mock.patch.object(InnerAttentionParallel, "_translated", dropping),
            mock.patch.object(upstream, "window_of", no_window) if dropped == "window_size" else nullcontext(),
        ):
            try:
                context_parallel(sharded, mesh, order=order)
                if metp:
                    plan = feed_forward_plan(sharded)
                    assert plan
                    parallelize_module(sharded, mesh, plan)
                if packed not in expected:
                    expected[packed] = by_itself(model, batch)
                outcomes[mesh_name, packed] = compared(sharded, order, batch, *expected[packed])
            except (ValueError, TypeError, NotImplementedError) as error:
                outcomes[mesh_name, packed] = Outcome(refused=f"{error}")
    return outcomes


def no_window(*_: Any) -> None:
    """Takes the place of what finds a layer's."""


def batch_of(model: nn.Module, packed: bool) -> Batch:
    """What the model is called with, of whole sequences, and what its output is compared with."""
    if not hasattr(model, "get_attention_masks"):
        batch = flux_batch(model)
        return Batch(batch, torch.roll(batch["img"], 1, 0))
    tokens, labels = tokens_of(model.config.vocab_size)
    return Batch({"tokens": tokens, "positions": positions_of(packed)}, labels)


def loss_of(model: nn.Module, inputs: dict[str, Any], target: Tensor) -> Tensor:
    """Summed over tokens."""
    out = model(**inputs)
    if not target.is_floating_point():
        return summed(out, target)
    assert out.shape == target.shape
    return (out - target).square().sum()  # no comparison: a loss


def by_itself(model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of one process, whose masks torchtitan makes."""
    inputs = dict(batch.inputs)
    if "positions" in inputs:
        inputs["attention_masks"] = model.get_attention_masks(positions=inputs["positions"])
    loss = loss_of(model, inputs, batch.target) / batch.count
    loss.backward()
    return loss.detach(), gradients(model)


def compared(model: nn.Module, order: TokenOrder, batch: Batch, loss: Tensor, expected: dict[str, Tensor]) -> Outcome:
    """What differs on this mesh."""
    from wallfacer_dt.integrations.torchtitan import Documents

    documents = Documents.of(batch.inputs["positions"]) if "positions" in batch.inputs else None
    deal = partial(shard_sequence, order=order, dim=1, document_ids=documents and documents.ids)
    inputs: dict[str, Any] = {name: x if name in ("timesteps", "y") else deal(x) for name, x in batch.inputs.items()}
    if documents:
        inputs["attention_masks"] = documents
    found = loss_of(model, inputs, deal(batch.target)) / batch.count
    found.backward()
    grads = gradients(model)
    add_up([found := found.detach(), *(g for g in grads.values() if not isinstance(g, DTensor))])
    # METP has summed its own.
    grads = {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in grads.items()}
    errors = errors_of(grads, expected)
    worst = max(errors, key=lambda name: errors[name])
    return Outcome(worst_error([(found[None], loss[None])], relative_to="each"), errors[worst], worst)


def keys_of(name: str) -> list[Key]:
    """Flux packs nothing."""
    return [key for key in KEYS if not (key[1] and MODELS[name].has == FLUX)]


def try_all(pool: RankPool, names: Iterable[str]) -> Iterator[tuple[str, Outcomes]]:
    """What models give on meshes. What one rank refuses, all have refused."""
    for name in names:
        told = pool.run(try_model, name, keys_of(name))
        for key in keys_of(name):
            assert len({bool(its[key].refused) for its in told}) == 1, [its[key] for its in told]
        yield name, told[0]


def section(outcomes: dict[str, Outcomes]) -> str:
    """The section of docs/models.md."""
    notes: list[str] = []

    def cell(tried: Outcomes, key: Key) -> str:
        what = verdict(tried[key]) if key in tried else "–"
        if what in ("equal", "WRONG", "–"):
            return what
        if what not in notes:
            notes.append(what)
        return f"{NOT_RUN if what.startswith(NOT_RUN) else 'refused'} ({notes.index(what) + 1})"

    rows = [
        f"| {' | '.join([name, MODELS[name].has, *(cell(tried, key) for key in KEYS)])} |"
        for name, tried in outcomes.items()
    ]
    columns = [f"{mesh}{', packed' if packed else ''}" for mesh, packed in KEYS]
    head = f"| {' | '.join(['model', 'has', *columns])} |\n|{' --- |' * (len(KEYS) + 2)}"
    said = "\n".join(f"{n}. `{text}`" for n, text in enumerate(notes, 1))
    return SECTION.format(version=version("torchtitan"), head=head, lines="\n".join(rows), notes=said)


SECTION = """
# Models of torchtitan

Generated by `python -m tests.titan_models`, with torchtitan {version}; `tests/test_torchtitan.py` fails when it is out
of date. All models of that version are here; it has no Llama 4.

**equal**: on four ranks of gloo, loss and every parameter's gradient were those of one process within 1e-5, relative
to its largest element, in float32. Models are torchtitan's debug models with two layers (Muse Glimmer: four), fewer
experts and narrower feed-forwards (Muse Glimmer is in float64, since rounding alone moves some of its gradients by 4e-5
in float32), with 64 tokens in each of two rows; windows see 13. One process runs the masks that
torchtitan makes (`BlockMask`, `VarlenMetadata`), written out. Experts, which torchtitan rounds to bfloat16, compute in
float32 on both sides. **packed**: documents of 23, 30 and 11 and of 7 and 57 tokens. **refused** was run too: every
rank raised what is quoted below; **not run** needs a package whose kernels are CUDA's.

Orders of tokens are `head_tail` on a ring, `head_tail` and packed `document_head_tail` on rings and teams, and
`contiguous` with Ulysses.

{head}
{lines}

{notes}
"""


if __name__ == "__main__":
    ranks = RankPool(RANKS, timeout=300)
    print(section(dict(try_all(ranks, MODELS))), end="")
    ranks.close()
