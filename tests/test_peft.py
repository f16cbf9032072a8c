"""Adapters of peft on a mesh: LoRA is that of one process, before context_parallel or after it; others are refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from wallfacer_dt import TokenOrder, context_mesh
from wallfacer_dt.testing import RankPool, worst_error

pytest.importorskip("peft", reason="peft is not installed")

import peft

from tests.models import MODELS, tokens_of
from wallfacer_dt.integrations.transformers import context_parallel, shard_inputs

LORA = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}
REFUSED: dict[str, Callable[[], Any]] = {
    "aLoRA looks": lambda: peft.LoraConfig(**LORA, alora_invocation_tokens=[7, 8]),
    "VeLoRA takes": lambda: peft.LoraConfig(**LORA, velora_config=peft.VeloraConfig(num_groups=4)),
    "Lily's router": lambda: peft.LilyConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"]),
    "SHADOW's second model": lambda: peft.ShadowConfig(task_type="CAUSAL_LM"),
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
        for x in found.values():
            dist.all_reduce(x)
        errors.append(worst_error({n: (found[n], its) for n, its in expected.items()}, relative_to="largest"))
    for text, config in REFUSED.items():
        with pytest.raises((ValueError, AttributeError), match=text):
            gradients(config(), batch, after=lambda x: context_parallel(x, mesh, order=order))
    return errors


def test_adapters(ranks: Callable[[int], RankPool]) -> None:
    assert max(max(errors) for errors in ranks(4).run(tried)) < 1e-12
