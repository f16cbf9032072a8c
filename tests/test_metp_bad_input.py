"""METP refuses bad input with what was expected, what came and the remedy: on all ranks, before anything is sent."""

from collections.abc import Callable

import pytest

from tests.metp_refusals import REFUSALS, outcome
from wallfacer_dt.testing import RankPool

pytestmark = pytest.mark.ranks

MESSAGES = {
    "one rank's module": ("ValueError", "METPParallel: Narrow has no submodule 'gate'"),
    "one rank's attention": ("ValueError", "METPAttentionParallel: rows of q, k and v must be heads of 3"),
    "a mesh that is flattened later": ("ValueError", "up.weight is cut over axes ('cp_ring', 'cp_team') in turn"),
    "a mesh that is flattened": ("ValueError", "with which torch gathers such DTensors wrongly"),
    "a mesh in descending order": ("ValueError", "build the mesh with ascending ranks"),
    "a rotation without an example": ("ValueError", "rotation needs example"),
    "angles in another form": (
        "ValueError",
        "cos and sin come by pair of H = 4, where they were complex or by element when",
    ),
    "angles that want a gradient": ("NotImplementedError", "METP has no gradient of cos and sin"),
    "an argument beside those of the example": (
        "ValueError",
        "attention was called with mask, a Tensor, which example= does not give it",
    ),
    "shapes that differ along tp": (
        "ValueError",
        "the shape of x must be the same on every rank of the mesh",
    ),
    "a tangent": ("NotImplementedError", "METP has no forward-mode derivative, but x has a tangent"),
    "a batch that the mesh shards": (
        "ValueError",
        "x must have its sequence sharded, Shard(1), on the axes ('cp_ring', 'cp_team')",
    ),
    "one rank's model dim beside tp": ("ValueError", "x must have shape (..., tokens, 6), got (1, 2, 5)"),
    "a projection with a parameter of its own": (
        "ValueError",
        "METPParallel knows of up, down, but Narrow has up.factor as well",
    ),
    "tied weights": ("ValueError", "gate.weight is another parameter as well, and METP would untie them"),
    "dropout that the mode hides": (
        "EquivalenceError",
        "Dropping is not what METPParallel computes: the output differs",
    ),
    "an unknown activation": (
        "ValueError",
        "activation must be one of ('gelu', 'gelu_tanh', 'relu', 'silu'), got 'tanh'",
    ),
    "a name that is none": ("TypeError", "up must be the name of a submodule, got None"),
    "one submodule twice": ("ValueError", "up, down, gate must be different submodules, got up, down, up"),
    "check that is no bool": ("TypeError", "check must be a bool, got 1"),
    "a layout that is a sum": ("ValueError", "output_layouts must be Replicate() or a Shard, got Partial(sum)"),
    "projections in part": ("ValueError", "projections are query, key and value, or qkv, got query, key"),
    "projections twice": ("ValueError", "projections are query, key and value, or qkv, got query, key, value, qkv"),
    "a head dim that is none": ("ValueError", "head_dim must be a positive int, got 0"),
    "attention that is no style": ("TypeError", "attention must be RingParallel or WallFacerParallel, got str"),
    "attention by heads": ("TypeError", "attention must be RingParallel or WallFacerParallel, got UlyssesParallel"),
    "a mask_mod": ("ValueError", "METPAttentionParallel does not implement mask_mod"),
    "replicated tokens": ("ValueError", "METPAttentionParallel does not implement replicated"),
    "unknown pairs": (
        "ValueError",
        "rotary must be None or one of ('interleaved', 'half'), with an even head_dim, got 'quarter' and 4",
    ),
    "a rotation of nothing": ("ValueError", "rotation is given, but not rotary: which elements does it turn together?"),
    "no mesh": ("TypeError", "mesh must be a DeviceMesh, got str"),
    "a mesh of other axes": ("ValueError", "and may have 'tp' after them; got ('cp_team', 'cp_ring')"),
    "a submodule that is absent": ("ValueError", "METPParallel: FeedForward has no submodule 'w1'"),
    "a submodule that is no Linear": ("ValueError", "METPParallel: 'up' must be an nn.Linear, got Bilinear"),
    "another parameter": ("ValueError", "METPParallel knows of up, down, but Narrow has norm.weight as well"),
    "a dropout": (
        "ValueError",
        "METPParallel does not implement dropout, which must not differ when computed anew: drop",
    ),
    "hidden units that differ": ("ValueError", "METPParallel: up, down must have as many hidden units, got [8, 9]"),
    "a DTensor already": ("ValueError", "tensor parallelism is an axis 'tp' of its mesh"),
    "another activation than the module's": (
        "EquivalenceError",
        "FeedForward is not what METPParallel computes: the output differs",
    ),
    "gate and up the wrong way round": (
        "EquivalenceError",
        "FeedForward is not what METPParallel computes: the output differs",
    ),
    "heads that are none": (
        "ValueError",
        "rows of q, k and v must be heads of 3, as many of v as of k and a multiple of q",
    ),
    "key heads that do not divide": ("ValueError", "got [8, 12, 12] and 8"),
    "key heads that are others": ("ValueError", "METPAttentionParallel was given kv_heads=2, the weights have 1"),
    "heads that tp does not divide": (
        "ValueError",
        "every rank must hold whole heads, got 1 key and value heads on 2 x 2 ranks",
    ),
    "a fused projection with tp": ("ValueError", "projections must be query, key and value, not one qkv"),
    "ulysses": ("ValueError", "cp_ulysses must be 1, got 2"),
    "another causality": (
        "EquivalenceError",
        "Attention is not what METPAttentionParallel computes: the output differs",
    ),
    "a norm in the code": (
        "EquivalenceError",
        "Attention is not what METPAttentionParallel computes: the output differs",
    ),
    "a window in the code": (
        "EquivalenceError",
        "Attention is not what METPAttentionParallel computes: the output differs",
    ),
    "a scale in the code": (
        "EquivalenceError",
        "Attention is not what METPAttentionParallel computes: the output differs",
    ),
    "a dropout in the code": (
        "EquivalenceError",
        "Attention is not what METPAttentionParallel computes: the output differs",
    ),
    "a pair for an output": ("EquivalenceError", "Attention returns a tuple, under METP it returns a tensor"),
    "a module that takes something else": (
        "CouldNotRunError",
        "Attention could not be run on x (1, 1152, 6) and small weights: TypeError",
    ),
    "no tensor": ("TypeError", "x must be a tensor, got list"),
    "another model dim": ("ValueError", "x must have shape (..., tokens, 6), got (1, 2, 5)"),
    "one dim": ("ValueError", "x must have shape (..., tokens, 6), got (6,)"),
    "another dtype": ("TypeError", "x and the weights must have one dtype, got torch.float64 and torch.float32"),
    "another device": ("ValueError", "x must be on the mesh's device type 'cpu', got meta"),
    "tokens that are replicated": (
        "ValueError",
        "x must have its tokens sharded on axis 'cp_team', over which METP shards weights",
    ),
    "a sum": ("ValueError", "x must be sharded or replicated on axis 'cp_team', got Partial(sum)"),
    "a DTensor by its last dim": ("ValueError", "x must not be sharded by its last dim"),
    "one rank's model dim": ("ValueError", "x must have shape (..., tokens, 6), got (1, 2, 5)"),
    "one rank's hidden units": (
        "ValueError",
        "the hidden units of a feed-forward must be the same on every rank of the mesh, got rank 0: 8, rank 1: 8, ",
    ),
    "one rank's batch": ("ValueError", "the batch and tokens of attention must be the same on every rank of the mesh"),
    "one rank's rotation": (
        "ValueError",
        "attention was called with 1 pairs of cos and sin, METPAttentionParallel was given rotary=None",
    ),
    "two dims for attention": ("ValueError", "x must have shape (B, L, D), got (2, 6)"),
    "an argument that is unknown": (
        "ValueError",
        "called with turn, a Tensor, which METP does not implement without rotation=",
    ),
    "no angles": (
        "ValueError",
        "attention was called with 0 pairs of cos and sin, METPAttentionParallel was given rotary='half'",
    ),
    "angles of other tokens": ("ValueError", "(L, H / 2) or (B, L, H / 2) with L = 2 and H = 4, got (1, 8, 2)"),
    "documents of a shard": (
        "ValueError",
        "document_ids must be those of the whole sequence of 8 tokens on every rank, got (2,)",
    ),
    "documents twice": ("ValueError", "pass document_ids or cu_seqlens"),
    "another length than the order's": ("ValueError", "of 13 tokens this rank holds "),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refused_on_all_ranks(ranks: Callable[[int], RankPool], name: str) -> None:
    kind, message = MESSAGES[name]
    for got, text, communication in ranks(4).run(outcome, name):
        assert (got, message in text) == (kind, True), text
        sent = [op for op in communication if not op.startswith(("wallfacer_dt.", "c10d.allgather_"))]
        assert not sent, "ranks tell each other of a refusal, and send nothing else"


def test_every_refusal_has_its_message() -> None:
    assert MESSAGES.keys() == REFUSALS.keys()
