"""Ring Attention's table 1: the most bytes of a layer's activations, by formula and measured on fake tensors."""

from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor.parallel import parallelize_module

from recipes.benchmarks.memory.baselines import FeedForward, Inner
from recipes.benchmarks.memory.measure import measure
from recipes.benchmarks.memory.run import fake_world
from recipes.benchmarks.memory.tables import Table
from recipes.benchmarks.papers.models import MIB, K, Model, call_of
from recipes.benchmarks.papers.run import held
from wallfacer_dt import BlockwiseFeedForward, context_mesh
from wallfacer_dt.planning.alive import Alive

Architecture = Literal["vanilla", "attention", "blockwise", "ring"]
NAMES: dict[Architecture, str] = {
    "vanilla": "vanilla", "attention": "memory efficient attention", "blockwise": "and feed-forward", "ring": "ring",
}  # fmt: skip
LAYER = Model("h = 4,096, 32 heads", 4096, 32, 1, 4 * 4096)
TOKENS = 16 * K
BLOCK = 4 * K
CHUNK = 1 * K
"""s; c of Ring Attention, a rank's tokens; and of the blockwise feed-forward, the tokens of a chunk."""


def attention_formula(architecture: Architecture, model: Model, tokens: Fraction | int) -> Fraction:
    """The column "Self-Attention" in bytes of bfloat16; memory efficient attention's tile of 4bch is left out.

    Args:
        architecture: the row.
        model: has h and n.
        tokens: s, or c of Ring Attention.

    Returns:
        Bytes.
    """
    bsh = Fraction(tokens) * model.hidden
    match architecture:
        case "vanilla":
            return Fraction(2 * model.heads) * tokens**2
        case "attention" | "blockwise":
            return 2 * bsh
        case "ring":
            return 6 * bsh


def feed_forward_formula(architecture: Architecture, model: Model, tokens: Fraction | int) -> Fraction:
    """The column "FeedForward", likewise."""
    return (8 if architecture in ("vanilla", "attention") else 2) * Fraction(tokens) * model.hidden


def formula(architecture: Architecture, model: Model, tokens: Fraction | int) -> Fraction:
    """The column "Total": the greater of the two. Vanilla's is printed 2bhs^2, for 2bns^2."""
    return max(f(architecture, model, tokens) for f in (attention_formula, feed_forward_formula))


@dataclass(frozen=True, slots=True)
class Peak:
    """Bytes on one device, weights left out.

    Attributes:
        given: the inputs.
        forward: the most in the forward, the inputs among it.
        step: the most in forward and backward, gradients among it, those of weights too.
    """

    given: int
    forward: int
    step: int


@cache
def attention_peak(architecture: Architecture, ranks: int = 4) -> Peak:
    """Measure attention; with Ring Attention of ``ranks * BLOCK`` tokens."""
    if architecture == "ring":
        seen = held(call_of(LAYER, ranks * BLOCK, ranks))
        return Peak(3 * 2 * BLOCK * LAYER.hidden, seen.peak, seen.step_peak)
    with FakeTensorMode():
        shape = (1, TOKENS, LAYER.heads, LAYER.head_dim)
        q, k, v = (torch.empty(shape, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        with Alive(q, k, v) as alive:
            given = alive.now
            out = Inner(flash=architecture != "vanilla")(q, k, v)
            forward = alive.peak
            out.backward(torch.empty_like(out))
            return Peak(given, forward, alive.peak)


@cache
def feed_forward_peak(architecture: Architecture) -> Peak:
    """Measure a feed-forward of s tokens, or with Ring Attention of c."""
    tokens = BLOCK if architecture == "ring" else TOKENS
    with fake_world(1):
        mesh = context_mesh("cpu")
        with FakeTensorMode():
            module: nn.Module = FeedForward(LAYER.hidden, torch.bfloat16)
            if architecture in ("blockwise", "ring"):
                style = BlockwiseFeedForward(chunk=CHUNK, check=False)
                module = parallelize_module(module, mesh, style, src_data_rank=None)
            x: Tensor = torch.empty(1, tokens, LAYER.hidden, dtype=torch.bfloat16, requires_grad=True)
            seen = measure(module, x)
    return Peak(x.nbytes, seen.peak, seen.step_peak)


def table() -> Table:
    """Formulas beside what is measured."""
    rows = []
    for architecture in NAMES:
        tokens = BLOCK if architecture == "ring" else TOKENS
        for part in ("attention", "feed-forward"):
            paper = (attention_formula if part == "attention" else feed_forward_formula)(architecture, LAYER, tokens)
            seen = attention_peak(architecture) if part == "attention" else feed_forward_peak(architecture)
            rows.append(_row(architecture, part, paper, seen, tokens, 4 if architecture == "ring" else 1))
    far = attention_peak("ring", 64)
    rows.append(_row("ring", "attention", attention_formula("ring", LAYER, BLOCK), far, BLOCK, 64))
    head = [
        "", "paper", "paper, MiB", "ours, forward beyond inputs, MiB", "in the paper's unit", "with inputs, MiB",
        "in the paper's unit", "forward and backward, MiB", "how ours was got",
    ]  # fmt: skip
    return Table("Ring Attention, table 1: activations of a layer", head, rows, _NOTE)


def _row(architecture: Architecture, part: str, paper: Fraction, seen: Peak, tokens: int, ranks: int) -> list[str]:
    square = architecture == "vanilla" and part == "attention"
    unit = LAYER.heads * tokens**2 if square else tokens * LAYER.hidden
    letters = "bns^2" if square else "bch" if architecture == "ring" else "bsh"
    beyond = seen.forward - seen.given
    cells = [f"{paper / unit} {letters}", _mib(paper), _mib(beyond), f"{beyond / unit:.2f} {letters}"]
    cells += [_mib(seen.forward), f"{seen.forward / unit:.2f} {letters}", _mib(seen.step)]
    who = f"s = {ranks * tokens:,} on {ranks} ranks" if architecture == "ring" else f"s = {tokens:,}"
    how = (
        f"executed, {ranks} fake ranks" if architecture == "ring" and part == "attention" else "executed, fake tensors"
    )
    return [f"{NAMES[architecture]}, {part}, {who}", *cells, how]


def _mib(number: float | Fraction) -> str:
    return f"{float(number) / MIB:,.1f}"


_NOTE = (
    f"Batch 1, {LAYER.name}, bfloat16, feed-forward h to 4h to h with GELU, chunks of {CHUNK:,} tokens where it is "
    "blockwise; weights are left out, their gradients count in the last column of numbers. The paper counts one "
    "tensor: vanilla the scores, where torch has softmax's argument and its result; a feed-forward the hidden layer, "
    "of which autograd keeps GELU's argument and result (16 bsh), and the output (2 bsh) comes on top. Memory "
    "efficient attention comes out: the output, and lse. The paper's 4bch for it is a tile inside the kernel, which "
    "is not seen here. Blockwise, the output exists twice for a moment, in chunks and as a whole; of four chunks, as "
    "with Ring Attention here, one's hidden layer is more (4 bch). Ring Attention's six blocks (q, k, v, two that "
    "arrive, the output) are 6bch elements, which is 12bch bytes in bfloat16, not the printed 6bch bytes. Ours has "
    "24: a copy of k and v that is sent (4), the output in float32 instead of bfloat16 (2 more), and a block's output "
    "in both (6). As in the paper it is the same on 4 and on 64 ranks, however long the sequence is. The printed "
    "total of vanilla, 2bhs^2, should be 2bns^2."
)
