"""What the papers say of memory: WallFacer's equations 6 and 7 and table 4, Ring Attention's tables 1 and 3.

Lengths are what fits by a model's states and by activations in the paper's own terms. Nothing is fitted.
"""

from fractions import Fraction
from functools import cache
from typing import Literal, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor.parallel import parallelize_module

from recipes.benchmarks.memory.layers import FeedForward, Inner
from recipes.benchmarks.memory.measure import measure
from recipes.benchmarks.papers.clusters import GPT_3B, GPT_7B
from recipes.benchmarks.report import GIB, MIB, K, Table
from tests.papers.communication import EXAMPLE_TOKENS, executed
from tests.papers.executed import held
from tests.papers.metp import longest
from tests.papers.models import (
    EXAMPLE,
    GPT_13B,
    LLAMA_3B,
    LLAMA_7B,
    LLAMA_13B,
    LLAMA_30B,
    NAMES,
    Call,
    parameters,
    per_layer,
)
from wallfacer_dt import BlockwiseFeedForward, ModelShape, context_mesh
from wallfacer_dt.planning.alive import Alive
from wallfacer_dt.testing.fake import fake_world


def activations(layers: int, team: int) -> int:
    """Equations 6 (C = 1) and 7: A's held beside the model's states, Y + 1 checkpoints and the team's q, k and v."""
    return layers + 1 + 3 * team


def ours_before(call: Call) -> int:
    """What the package's call holds when its first block is computed, in A.

    That is its own q, k and v; the others' queries of the team, alone (published), or, where that makes no copy or
    they have not arrived yet, everyone's; k and v that are computed with, where they are not its own; and those that
    arrive. What is sent is a copy at first.
    """
    team, ring = call.team, call.ranks // call.team
    if call.schedule == "2d" or team == 1:
        return 3 + (4 if ring > 1 else 0) + (team if team > 1 else 0)
    return 3 + max(2, team - 1) + 2 * team * (2 if ring > team else 1)


def peak_table() -> Table:
    """Equations 6 and 7, and what is measured."""
    rows = []
    for team, schedule in ((1, "2d"), *((team, how) for how in ("published", "2d") for team in (2, 4, 8))):
        call = Call(EXAMPLE, EXAMPLE_TOKENS, 64, team, schedule)
        before, *ours = (n / float(2 * call.activation) for n in held(call))
        printed = schedule == "published" or team == 1
        paper, total = (f"{n}" if printed else "-" for n in (3 * team, activations(EXAMPLE.layers, team)))
        name = "Ring Attention, C = 1" if team == 1 else f"{schedule}, C = {team}"
        cells = [paper, f"{before:.2f}", total, f"{EXAMPLE.layers + 1 + before:.2f}", *(f"{n:.2f}" for n in ours)]
        rows.append([name, *cells, executed(call)])
    head = [
        "A = 13 MiB", "q, k, v before attention, paper", "ours, before the first block", "with Y + 1 kept, paper",
        "ours", "ours, peak of forward", "ours, after forward", "ours, with backward", "how ours was got",
    ]  # fmt: skip
    return Table("WallFacer, equations 6 and 7: peak memory of the llama 30B example", head, rows)


class States(NamedTuple):
    """Bytes of a parameter's weight, its gradient and its optimizer; weights are sharded in FSDP, not in ZeRO-2."""

    weights: int
    gradients: int
    optimizer: int
    are_weights_shared: bool

    def of(self, model: ModelShape, devices: int) -> Fraction:
        """Bytes on one device, with one layer's weights gathered where they are sharded."""
        shared = self.gradients + self.optimizer + (self.weights if self.are_weights_shared else 0)
        whole = per_layer(model) if self.are_weights_shared else parameters(model)
        return Fraction(shared * parameters(model), devices) + self.weights * whole


ZERO_2 = States(2, 2, 12, are_weights_shared=False)
"""WallFacer: Adam, bfloat16, ZeRO-2; the wide copy and the moments are taken to be in float32."""
FSDP = States(4, 4, 8, are_weights_shared=True)
"""Ring Attention: weights in float32 on GPUs and TPUs alike (its appendix B.1), Adam."""


def power_of_two(tokens: int) -> int:
    """The most K tokens, in powers of two, as the papers' tables go; 0 for fewer than 1 K."""
    return 2 ** ((tokens // K).bit_length() - 1) if tokens >= K else 0


def equation_bytes(model: ModelShape, tokens: int, gpus: int, team: int) -> Fraction:
    """Equation 6 (``team`` 1) or 7 in bytes on one GPU, with the states of ZeRO-2."""
    return ZERO_2.of(model, gpus) + activations(model.layers, team) * Fraction(2 * tokens * model.hidden, gpus)


def measured_bytes(model: ModelShape, tokens: int, gpus: int, team: int) -> Fraction:
    """The same with what an attention call of this package holds in forward and backward instead of q, k and v."""
    # What is held is proportional to the tokens, so it is measured once.
    attention = Fraction(held(Call(model, 128 * K, gpus, team, "published" if team > 1 else "2d")).step_peak, 128 * K)
    return equation_bytes(model, tokens, gpus, 0) + attention * tokens


def logits_bytes(model: ModelShape, tokens: int, gpus: int, team: int) -> Fraction:
    """The same, and logits with their gradient in float32, which neither equation has."""
    return measured_bytes(model, tokens, gpus, team) + Fraction(8 * tokens * model.vocab, gpus)


def lengths_table(gpus: int = 8) -> Table:
    """WallFacer's table 4: the longest length with a tick (both methods have the same), and what fits into 80 GiB."""
    rows = []
    for model, printed in ((GPT_3B, 512), (GPT_7B, 256), (GPT_13B, 128)):
        for team in (1, 2):
            one = longest(lambda n: equation_bytes(model, n, 1, 1), 80 * GIB)  # noqa: B023  (called at once)
            cells = [f"{printed}", f"{one // K}"]
            for needed in (equation_bytes, measured_bytes, logits_bytes):
                tokens = longest(lambda n: needed(model, n, gpus, team), 80 * GIB)  # noqa: B023
                cells += [f"{tokens / K:,.0f}", f"{tokens / K / printed:.2f}", f"{power_of_two(tokens)}"]
            name = f"{NAMES[model]}, {'Ring Attention' if team == 1 else f'WallFacer, C = {team}'}"
            states, how = float(ZERO_2.of(model, gpus)) / GIB, f"formula; attention executed, {gpus} fake ranks"
            rows.append([name, *cells, f"{states:.1f}", how])
    head = [
        "K tokens", "paper, of 128, 256, 512", "ours on one GPU", f"equations 6 and 7 on {gpus} GPUs", "/ paper",
        "as a power of 2", "attention as measured", "/ paper", "as a power of 2", "and logits", "/ paper",
        "as a power of 2", "states, GiB", "how ours was got",
    ]  # fmt: skip
    return Table("WallFacer, table 4: supported sequence lengths", head, rows)


Architecture = Literal["vanilla", "attention", "blockwise", "ring"]
ARCHITECTURES: dict[Architecture, str] = {
    "vanilla": "vanilla", "attention": "memory efficient attention", "blockwise": "and feed-forward", "ring": "ring",
}  # fmt: skip
LAYER = ModelShape(4096, 32, ffn=4 * 4096, gated=False)
TOKENS, BLOCK = 16 * K, 4 * K
"""s; and c of Ring Attention, a rank's tokens."""


def attention_formula(architecture: Architecture, model: ModelShape, tokens: Fraction | int) -> Fraction:
    """Table 1's column "Self-Attention" in bytes of bfloat16; the tile of memory efficient attention is left out."""
    if architecture == "vanilla":
        return Fraction(2 * model.heads) * tokens**2
    return (6 if architecture == "ring" else 2) * Fraction(tokens) * model.hidden


def feed_forward_formula(architecture: Architecture, model: ModelShape, tokens: Fraction | int) -> Fraction:
    """The column "FeedForward", likewise."""
    return (8 if architecture in ("vanilla", "attention") else 2) * Fraction(tokens) * model.hidden


def formula(architecture: Architecture, model: ModelShape, tokens: Fraction | int) -> Fraction:
    """The column "Total": the greater of the two. Vanilla's is printed 2bhs^2, for 2bns^2."""
    return max(part(architecture, model, tokens) for part in (attention_formula, feed_forward_formula))


class Peak(NamedTuple):
    """Bytes on one device without weights: the inputs, the most in the forward, and in both with all gradients."""

    given: int
    forward: int
    step: int


@cache
def attention_peak(architecture: Architecture, ranks: int = 4) -> Peak:
    """Measure attention; with Ring Attention of ``ranks * BLOCK`` tokens."""
    if architecture == "ring":
        seen = held(Call(LAYER, ranks * BLOCK, ranks))
        return Peak(3 * 2 * BLOCK * LAYER.hidden, seen.peak, seen.step_peak)
    with FakeTensorMode():
        shape = (1, TOKENS, LAYER.heads, LAYER.dim)
        q, k, v = (torch.empty(shape, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        with Alive(q, k, v) as alive:
            given = alive.now
            out = Inner(flash=architecture != "vanilla")(q, k, v)
            forward = alive.peak
            out.backward(torch.empty_like(out))
            return Peak(given, forward, alive.peak)


@cache
def feed_forward_peak(architecture: Architecture) -> Peak:
    """Measure a feed-forward of s tokens, or with Ring Attention of c, in chunks of 1,024 where it is blockwise."""
    with fake_world(1):
        mesh = context_mesh("cpu")
        with FakeTensorMode():
            module: nn.Module = FeedForward(LAYER.hidden, torch.bfloat16)
            if architecture in ("blockwise", "ring"):
                style = BlockwiseFeedForward(chunk=K, check=False)
                module = parallelize_module(module, mesh, style, src_data_rank=None)
            tokens = BLOCK if architecture == "ring" else TOKENS
            x = torch.empty(1, tokens, LAYER.hidden, dtype=torch.bfloat16, requires_grad=True)
            seen = measure(module, x)
    return Peak(x.nbytes, seen.peak, seen.step_peak)


def activations_table() -> Table:
    """Ring Attention's table 1: formulas beside what is measured."""
    parts = [(it, part, 4) for it in ARCHITECTURES for part in ("attention", "feed-forward")]
    rows = []
    for architecture, part, ranks in (*parts, ("ring", "attention", 64)):
        is_ring, is_attention = architecture == "ring", part == "attention"
        tokens, letters = (BLOCK, "bch") if is_ring else (TOKENS, "bsh")
        paper = (attention_formula if is_attention else feed_forward_formula)(architecture, LAYER, tokens)
        seen = attention_peak(architecture, ranks) if is_attention else feed_forward_peak(architecture)
        unit = tokens * LAYER.hidden
        if architecture == "vanilla" and is_attention:
            unit, letters = LAYER.heads * tokens**2, "bns^2"
        cells = [f"{paper / unit} {letters}", f"{float(paper) / MIB:,.1f}"]
        for nbytes in (seen.forward - seen.given, seen.forward):
            cells += [f"{nbytes / MIB:,.1f}", f"{nbytes / unit:.2f} {letters}"]
        who = f"s = {ranks * tokens:,} on {ranks} ranks" if is_ring else f"s = {tokens:,}"
        how = f"executed, {ranks} fake ranks" if is_ring and is_attention else "executed, fake tensors"
        rows.append([f"{ARCHITECTURES[architecture]}, {part}, {who}", *cells, f"{seen.step / MIB:,.1f}", how])
    head = [
        "", "paper", "paper, MiB", "ours, forward beyond inputs, MiB", "in the paper's unit", "with inputs, MiB",
        "in the paper's unit", "forward and backward, MiB", "how ours was got",
    ]  # fmt: skip
    return Table("Ring Attention, table 1: activations of a layer", head, rows)


class Devices(NamedTuple):
    """Hardware of Ring Attention's table 3: devices that share the model, and the bytes of one by its table 2."""

    name: str
    devices: int
    memory: int


A100_8, A100_32 = Devices("8x A100 NVLink", 8, 80 * GIB), Devices("32x A100 InfiniBand", 32, 80 * GIB)
TPU_V3, TPU_V4 = Devices("TPUv3-512", 256, 16 * GIB), Devices("TPUv4-1024", 512, 32 * GIB)
TPU_V5E = Devices("TPUv5e-256", 256, 16 * GIB)
CONTEXTS: tuple[tuple[Devices, ModelShape, tuple[int, int, int, int]], ...] = (
    (A100_8, LLAMA_3B, (4, 32, 64, 512)), (A100_8, LLAMA_7B, (2, 16, 32, 256)), (A100_8, LLAMA_13B, (2, 4, 16, 128)),
    (A100_32, LLAMA_7B, (4, 64, 128, 4096)), (A100_32, LLAMA_13B, (4, 32, 64, 2048)),
    (TPU_V3, LLAMA_7B, (1, 4, 8, 2048)), (TPU_V3, LLAMA_13B, (1, 2, 8, 1024)),
    (TPU_V4, LLAMA_3B, (8, 16, 32, 16384)), (TPU_V4, LLAMA_7B, (4, 8, 16, 8192)),
    (TPU_V4, LLAMA_13B, (4, 8, 16, 4096)), (TPU_V4, LLAMA_30B, (2, 4, 8, 2048)),
    (TPU_V5E, LLAMA_3B, (4, 8, 32, 4096)), (TPU_V5E, LLAMA_7B, (2, 8, 16, 2048)),
)  # fmt: skip
"""As printed, K tokens by architecture."""


def needed(cluster: Devices, model: ModelShape, architecture: Architecture, tokens: int) -> Fraction:
    """Bytes on one device, in full precision (section 4; appendix B.1's bfloat16 on TPUs is that of products).

    The model's states, shared by all devices, and one layer's weights gathered; of every layer the inputs of attention
    and of the feed-forward (both are checkpointed); and the most that table 1 has for a layer while it runs.
    """
    shard = Fraction(tokens, cluster.devices if architecture == "ring" else 1)
    checkpoints = 4 * 2 * model.layers * shard * model.hidden
    return FSDP.of(model, cluster.devices) + checkpoints + 2 * formula(architecture, model, shard)  # table 1: 2 bytes


def contexts_table() -> Table:
    """Ring Attention's table 3: the longest context with FSDP, and how many times the paper's it is."""
    rows = []
    for cluster, model, printed in CONTEXTS:
        cells, ours = [], []
        for architecture, paper in zip(ARCHITECTURES, printed, strict=True):
            tokens = longest(lambda n: needed(cluster, model, architecture, n), cluster.memory)  # noqa: B023
            ours.append(tokens)
            cells += [f"{paper:,}", f"{tokens / K:,.1f}", f"{power_of_two(tokens):,}", f"{tokens / K / paper:.2f}"]
        gain = [f"{printed[3] // printed[2]}", f"{ours[3] / ours[2]:.0f}", f"formula, {cluster.devices} devices"]
        rows.append([f"{cluster.name}, {NAMES[model]}", *cells, *gain])
    names = [*list(ARCHITECTURES.values())[:3], "Ring Attention"]
    head = ["K tokens", *(x for name in names for x in (f"{name}, paper", "ours", "power of 2", "/ paper"))]
    head += ["ring / next best, paper", "ours", "how ours was got"]
    return Table("Ring Attention, table 3: longest context", head, rows)
