"""Memory of a stack of layers on one device, one rank of a world that does not exist, beside the planner's."""

from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.utils.checkpoint import checkpoint

from recipes.benchmarks.gpu.stages import Cases, Place, Record
from recipes.train_bytes.model import VOCABULARY, ByteGPT, ModelConfig
from wallfacer_dt import (
    METPAttentionParallel,
    METPParallel,
    ModelShape,
    SequenceShape,
    TokenOrder,
    WallFacerParallel,
    context_mesh,
    sequence_positions,
)
from wallfacer_dt.checkpoint import save_attention
from wallfacer_dt.planning import Candidate
from wallfacer_dt.planning.stack import stack_memory
from wallfacer_dt.testing.fake import fake_world

_BEYOND = 0.05
"""Of what was held, that the planner may be above it or below."""


STACKS = {
    f"{layers} layers, ring 8, checkpoint {how}": (layers, Candidate(8, order="head_tail", checkpoint=how))
    for how, layers in product(("none", "attention", "full"), (2, 4))
} | {
    f"4 layers, ring 4 x team 2, metp and {how}": (
        4, Candidate(4, 2, order="head_tail", feed_forward="metp", projections=how)
    )
    for how in ("plain", "metp")
}  # fmt: skip
"""How many layers, and how eight ranks share them."""


def memory(place: Place) -> Cases:
    """What layers hold after the forward, and at most in either way, beyond weights and their gradients."""
    if place.is_gpu:
        for case, (layers, candidate) in STACKS.items():
            yield case, partial(_held, candidate, layers)


def _held(candidate: Candidate, layers: int) -> Record:
    tokens = 8192
    with fake_world(candidate.size, 1):
        config = ModelConfig(dim=4096, layers=layers, heads=32, kv_heads=8)
        with torch.device("cuda"):
            model = ByteGPT(config).bfloat16()
        mesh = context_mesh("cuda", candidate.ring, candidate.team)
        order = TokenOrder(candidate.order, mesh)
        parallelize_module(model, mesh, _styles(candidate, order), src_data_rank=None)
        if candidate.checkpoint != "none":
            model.layers = nn.ModuleList(_Again(layer, candidate.checkpoint) for layer in model.layers)
        positions = sequence_positions(tokens * candidate.size, order).cuda()
        given, wanted = (torch.randint(VOCABULARY, (1, tokens), device="cuda") for _ in range(2))
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for _ in range(2):  # the first one makes workspaces
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            loss = F.cross_entropy(model(given, positions).flatten(0, 1), wanted.flatten())
            kept = torch.cuda.memory_allocated() - before
            loss.backward()
            peak = torch.cuda.max_memory_allocated() - before
            del loss
    shape = ModelShape(4096, 32, 8, ffn=config.hidden_dim, layers=layers, vocab=VOCABULARY)
    said = stack_memory(candidate, shape, SequenceShape(tokens * candidate.size, is_causal=True))
    found = {"kept MiB": kept, "peak MiB": peak, "planner, kept MiB": said.kept}
    found |= {"planner, peak MiB": said.kept + said.working}
    found = {name: round(nbytes / 2**20) for name, nbytes in found.items()}
    for name in ("kept MiB", "peak MiB"):
        if not 1 - _BEYOND <= found[f"planner, {name}"] / found[name] <= 1 + _BEYOND:
            raise AssertionError(f"the planner is off by more than {_BEYOND:.0%}: {found}")
    return found


def _styles(candidate: Candidate, order: TokenOrder) -> dict[str, ParallelStyle]:
    inner = WallFacerParallel(is_causal=True, order=order, check=False)
    styles: dict[str, ParallelStyle] = {"layers.*.attention.inner": inner}
    if candidate.projections == "metp":
        names = {name: name for name in ("query", "key", "value", "output")}
        block = METPAttentionParallel(**names, head_dim=128, rotary="half", attention=inner, check=False)
        styles = {"layers.*.attention": block}
    if candidate.feed_forward == "metp":
        styles["layers.*.feed_forward"] = METPParallel(
            up="up", gate="gate", down="down", activation="silu", check=False
        )
    return styles


class _Again(nn.Module):
    """A layer that is computed again in the backward, all of it or all but attention."""

    def __init__(self, layer: nn.Module, how: str) -> None:
        super().__init__()
        self.layer, self.how = layer, how

    def forward(self, x: Tensor, turn: Any) -> Tensor:
        context = {"context_fn": save_attention()} if self.how == "attention" else {}
        return checkpoint(self.layer, x, turn, use_reentrant=False, **context)
