"""Adapters of peft on a mesh: LoRA is that of one process, before context_parallel or after it; others are refused."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from wallfacer_dt import TokenOrder, context_mesh
from wallfacer_dt.testing import RankPool, worst_error

pytest.importorskip("peft", reason="peft is not installed")

import peft

from tests.models import MODELS, add_up, tokens_of
from wallfacer_dt.integrations import adapters
from wallfacer_dt.integrations.transformers import context_parallel, shard_inputs

LORA = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}
REFUSED: dict[str, Callable[[], Any]] = {
    "aLoRA looks": lambda: peft.LoraConfig(**LORA, alora_invocation_tokens=[7, 8]),
    "VeLoRA takes": lambda: peft.LoraConfig(**LORA, velora_config=peft.VeloraConfig(num_groups=4)),
    "Lily's router": lambda: peft.LilyConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"]),
    "SHADOW's second model": lambda: peft.ShadowConfig(task_type="CAUSAL_LM"),
    "MonteCLoRA draws": lambda: peft.LoraConfig(
        **LORA, monteclora_config=peft.MontecloraConfig(num_samples=2, buffer_size=1)
    ),
    "AdaLoRA adds": lambda: peft.AdaLoraConfig(task_type="CAUSAL_LM", total_step=9, target_modules=["q_proj"]),
    "tokens before": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
}


def gradients(config: Any, batch: dict[str, Any], before: Any = id, after: Any = id) -> dict[str, Any]:
    """Of an adapter, the same everywhere, with what is done to the model before it comes, or after."""
    before(model := MODELS["Llama"].made())
    torch.manual_seed(1)
    adapted = peft.get_peft_model(model, config).double()
    after(model)
    adapted(**batch).loss.backward()
    return {name: p.grad for name, p in adapted.named_parameters() if p.requires_grad}


def tried() -> list[float]:
    """How far LoRA is from one process, in both orders; others are refused."""
    mesh, (tokens, labels) = context_mesh("cpu", ring=2, team=2), tokens_of(61)
    order, errors = TokenOrder("head_tail", mesh), []
    batch = shard_inputs(mesh, tokens, labels=labels, order=order)
    expected = gradients(peft.LoraConfig(**LORA), {"input_ids": tokens, "labels": labels})
    for turn in ("before", "after"):
        found = gradients(peft.LoraConfig(**LORA), batch, **{turn: lambda x: context_parallel(x, mesh, order=order)})
        add_up(found.values())
        errors.append(worst_error({n: (found[n], its) for n, its in expected.items()}, relative_to="largest"))
    for text, config in REFUSED.items():
        with pytest.raises((ValueError, AttributeError), match=text):
            gradients(config(), batch, after=lambda x: context_parallel(x, mesh, order=order))
    return errors


def test_adapters(ranks: Callable[[int], RankPool]) -> None:
    assert max(max(errors) for errors in ranks(4).run(tried)) < 1e-12


COPIES = {
    "attention": {"modules_to_save": ["self_attn"]},
    "layers": {"layer_replication": [[0, 2], [1, 2]]},
}


def adapted(model: Any, options: dict[str, Any]) -> Any:
    torch.manual_seed(1)
    options = LORA | {"target_modules": ["down_proj"]} | options
    return peft.get_peft_model(model, peft.LoraConfig(**options)).double()


def trained(model: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """Gradients, of which the model has none then."""
    model(**batch).loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    model.zero_grad()
    return found


def copied(options: dict[str, Any]) -> list[float]:
    """Of layers that peft copies, with configs of their own: in both orders, set up anew, whole, and undone."""
    mesh, (tokens, labels) = context_mesh("cpu", ring=2), tokens_of(60)
    plain, errors = {"input_ids": tokens, "labels": labels, "use_cache": False}, []
    expected = trained(adapted(MODELS["Llama"].made(), options), plain)

    def compare(found: dict[str, Any], sharded: bool) -> None:
        if sharded:
            add_up(found.values())
        errors.append(worst_error({n: (found[n], its) for n, its in expected.items()}, relative_to="largest"))

    for is_before in (True, False):
        model = MODELS["Llama"].made()
        model = adapted(model, options) if is_before else model
        inner = model.get_base_model() if is_before else model
        for kind in ("head_tail", "contiguous"):
            order = TokenOrder(kind, mesh)
            handle = context_parallel(inner, mesh, order=order)
            if kind == "head_tail" and not is_before:
                model = adapted(inner, options)
            compare(trained(model, shard_inputs(mesh, tokens, labels=labels, order=order)), sharded=True)
            with handle.whole():
                compare(trained(model, plain), sharded=False)
        handle.remove()
        compare(trained(model, plain), sharded=False)
    return errors


@pytest.mark.parametrize("what", COPIES)
def test_layers_that_peft_copies_attend_as_those_that_they_are_of(ranks: Callable[[int], RankPool], what: str) -> None:
    assert max(max(errors) for errors in ranks(2).run(copied, COPIES[what])) < 1e-12


def dropped(options: dict[str, Any], seed: int) -> None:
    """A step of an adapter that drops or mixes parts of weights, for all tokens at once."""
    mesh, (tokens, labels) = context_mesh("cpu", ring=2), tokens_of(60)
    order = TokenOrder("head_tail", mesh)
    batch = shard_inputs(mesh, tokens, labels=labels, order=order)
    model = MODELS["Llama"].made()
    context_parallel(model, mesh, order=order)
    model = peft.get_peft_model(model, getattr(peft, options["kind"])(target_modules=["q_proj"], **options["more"]))
    if options["kind"] == "PolyConfig":
        batch["task_ids"] = torch.zeros(2, dtype=torch.int64)
    torch.manual_seed(dist.get_rank() * seed)
    model.double().train()(**batch)
    torch.manual_seed(dist.get_rank())
    model.eval()(**batch)


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("LoKrConfig", {"rank_dropout": 0.5}),
        ("LoHaConfig", {"module_dropout": 0.5}),
        ("BOFTConfig", {"boft_dropout": 0.5, "boft_block_size": 4}),
        ("PolyConfig", {"task_type": "CAUSAL_LM"}),
    ],
)
def test_what_is_drawn_for_all_tokens_is_the_same_on_all_ranks(
    ranks: Callable[[int], RankPool], kind: str, more: dict[str, Any]
) -> None:
    ranks(2).run(dropped, {"kind": kind, "more": more}, 0)
    with pytest.raises(RuntimeError, match="the random state, of which adapters draw once"):
        ranks(2).run(dropped, {"kind": kind, "more": more}, 1)


def test_what_is_drawn_on_a_device_is_of_its_random_state() -> None:
    def said(state: int) -> str:
        device = SimpleNamespace(get_rng_state=lambda: torch.tensor([state], dtype=torch.uint8))
        with mock.patch.object(torch, "get_device_module", {"cuda": device}.__getitem__):
            return adapters.random_state("cuda")

    assert said(1) == said(1) != said(2)
    assert adapters.random_state("cpu") == adapters.random_state("cpu") != said(1)
