"""Cases of the two papers: their GPUs and links in proportion, on as many emulated ranks.

A hop's time and a block's forward are to each other as on the paper's cluster (``recipes.benchmarks.papers``; on A100s
with heads of 64), and so are links in a node and between them. What else a device does takes as much of a forward as on
an H100.
"""

from collections.abc import Iterator

from recipes.benchmarks.cluster.cases import METP, METP_ATTENTION, Case, Machines
from recipes.benchmarks.papers.clusters import DIT_1B, ETHERNET, GPT_3B, GPT_7B, NVLINK_OF_A100, NVLINK_OF_H100
from recipes.benchmarks.report import K
from recipes.benchmarks.ways import H100
from wallfacer_dt import ModelShape

STRONG, WEAK, LONG, OVERLAP = "figure 9", "figure 10", "figure 7", "table 2"
"""WallFacer's, and Ring Attention's: what hides a hop."""

_NODE, _ADAPTER, _OF_MANY = 80.0, 25.0, 0.4  # Mbit/s here; and of 32 ranks, whose cores are as few, such a part


def paper_cases() -> Iterator[Case]:
    """WallFacer's figures 9, 10 and 7 (DiT 1B on A100s, GPTs on H100s), Ring Attention's table 2, METP's figure 7."""
    for per_node in (4, 8, 16):
        yield _dit(2, per_node, 128 * K, STRONG)
    for per_node in (4, 8):
        yield _dit(4, per_node, 128 * K, STRONG)
    for nodes, per_node in ((2, 8), (4, 4), (2, 16), (4, 8)):
        yield _dit(nodes, per_node, 16 * K * nodes * per_node, WEAK)
    for nodes in (2, 4):
        for adapter in (50e9, 25e9):
            yield _gpt(nodes, 128 * K, adapter, STRONG)
    yield _gpt(4, 256 * K, 50e9, WEAK)
    yield _gpt(4, 512 * K, 50e9, LONG)
    yield from (_gpt(4, tokens * K, 50e9, LONG, GPT_3B) for tokens in (128, 256, 512))
    flat, ratios = Machines(8, 1, (_ADAPTER,) * 8), (3.0, 2.0, 1.5, 1.0, 0.75, 0.5)
    yield from (Case(flat, 16, 16, "full", ratio, figure=OVERLAP) for ratio in ratios)
    yield from (Case(flat, 1, 1, "full", ratio, 256, METP) for ratio in ratios)
    yield from (Case(flat, 8, 8, "full", ratio, figure=METP_ATTENTION) for ratio in ratios)


def _dit(nodes: int, per_node: int, tokens: int, figure: str) -> Case:
    """DiT 1B: 24 heads of 64, no mask; nodes of A100s share 100 Gbit/s of Ethernet each."""
    rate = _NODE * (_OF_MANY if nodes * per_node > 16 else 1)
    machines = Machines(nodes, per_node, (rate,) * nodes, inside=rate * NVLINK_OF_A100.bandwidth / ETHERNET.bandwidth)
    return _case(machines, DIT_1B, 150e12, ETHERNET.bandwidth / per_node, tokens, f"{figure}, DiT")


def _gpt(nodes: int, tokens: int, adapter: float, figure: str, model: ModelShape = GPT_7B) -> Case:
    """Causal, 32 heads of 128 or, GPT 3B, 16 of 256; eight H100s a node, an InfiniBand adapter for each."""
    rate = _ADAPTER * (2 * _OF_MANY if nodes > 2 else 1)  # at the DiTs' part a call takes ten seconds
    machines = Machines(nodes, 8, (rate,) * nodes, has_adapters=True, inside=rate * NVLINK_OF_H100.bandwidth / adapter)
    figure += f", GPT{' 3B' * (model is GPT_3B)}, {adapter * 8e-9:.0f} Gbit/s"
    return _case(machines, model, H100.forward, adapter, tokens, figure)


def _case(machines: Machines, model: ModelShape, speed: float, share: float, tokens: int, figure: str) -> Case:
    """The ratio is of a hop, 2 c d elements of two bytes over a share of a link, to a block, 4 c^2 d operations."""
    own, mask = tokens // machines.ranks, "full" if model is DIT_1B else "causal"
    ratio = speed / (share * own)
    return Case(machines, model.heads, model.keys, mask, ratio, model.dim, f"{figure}, {tokens // K}K", own)
