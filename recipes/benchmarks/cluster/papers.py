"""Cases of the two papers: their GPUs and links in proportion, on as many emulated ranks.

A hop's time and that of a block's forward are to each other as on the paper's cluster: what is assumed of it is the
planner's, and stands in ``wallfacer_dt.planning.gpus``. Links within a node are as much faster than those between nodes
as there. What else a device does (a backward, merging, a launch) takes as much of a forward as on an H100.
"""

from collections.abc import Iterator

from recipes.benchmarks.cluster.cases import METP, Case, Machines
from wallfacer_dt.planning.gpus import GPUS

K = 1024
STRONG, WEAK, OVERLAP = "figure 9", "figure 10", "table 2"
"""WallFacer's, and Ring Attention's: what hides a hop."""

PRINTED_DIT = 114.33
"""WallFacer's improvement over the ring in percent, strong scaling on 32 GPUs; of how many nodes its text has not."""

_ETHERNET = 12.5e9  # bytes per second into a node (WallFacer, table 2)
_NODE, _ADAPTER, _OF_MANY = 40.0, 12.5, 0.4  # Mbit/s here; and of 32 ranks, whose cores are as few, such a part


def paper_cases() -> Iterator[Case]:
    """WallFacer's figures 9 and 10 (DiT 1B on A100s, GPT 7B on H100s), Ring Attention's table 2, METP's figure 7.

    WallFacer's figure 7 has the same models on the most GPUs.
    """
    for per_node in (4, 8, 16):
        yield _dit(2, per_node, 128 * K, STRONG)
    for per_node in (4, 8):
        yield _dit(4, per_node, 128 * K, STRONG)
    for nodes, per_node in ((2, 8), (4, 4)):
        yield _dit(nodes, per_node, 16 * K * nodes * per_node, WEAK)
    for nodes in (2, 4):
        for adapter in (50e9, 25e9):
            yield _gpt(nodes, 128 * K, adapter)
    flat = Machines(8, 1, (_ADAPTER,) * 8)
    for ratio in (3.0, 2.0, 1.5, 1.0, 0.75, 0.5):
        yield Case(flat, 16, 16, "full", ratio, figure=OVERLAP)
    for ratio in (3.0, 2.0, 1.5, 1.0, 0.75, 0.5):
        yield Case(flat, 1, 1, "full", ratio, 256, METP)


def _dit(nodes: int, per_node: int, tokens: int, figure: str) -> Case:
    """DiT 1B: 24 heads of 64, no mask; nodes of A100s share 100 Gbit/s of Ethernet each."""
    gpu = GPUS["a100"]
    rate = _NODE * (_OF_MANY if nodes * per_node > 16 else 1)
    machines = Machines(nodes, per_node, (rate,) * nodes, inside=rate * gpu.intra / _ETHERNET)
    own = tokens // machines.ranks
    ratio = _ratio(gpu.attention[64][0], _ETHERNET / per_node, own)
    return Case(machines, 24, 24, "full", ratio, 64, f"{figure}, DiT, {tokens // K}K", own)


def _gpt(nodes: int, tokens: int, adapter: float) -> Case:
    """GPT 7B: 32 heads of 128, causal; eight H100s a node, an InfiniBand adapter for each."""
    gpu = GPUS["h100"]
    rate = _ADAPTER * (_OF_MANY if nodes > 2 else 1)
    machines = Machines(nodes, 8, (rate,) * nodes, has_adapters=True, inside=rate * gpu.intra / adapter)
    own = tokens // machines.ranks
    ratio = _ratio(gpu.attention[128][0], adapter, own)
    name = f"{STRONG}, GPT, {adapter * 8e-9:.0f} Gbit/s, {tokens // K}K"
    return Case(machines, 32, 32, "causal", ratio, 128, name, own)


def _ratio(rate: float, share: float, tokens: int) -> float:
    """Of a hop, 2 c d elements of two bytes over a rank's share of a link, to a block, 4 c^2 d operations."""
    return rate / (share * tokens)
