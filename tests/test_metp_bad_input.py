"""METP refuses bad input with what was expected, what came and the remedy: on all ranks, before anything is sent."""

from collections.abc import Callable

import pytest

from tests.metp_refusals import REFUSALS, outcome
from tests.pairwise import few
from wallfacer_dt.testing import RankPool

pytestmark = pytest.mark.ranks

MESSAGES = {
    "one rank's module": ("ValueError", "METPParallel: Narrow has no submodule 'gate'"),
    "one rank's attention": ("ValueError", "METPAttentionParallel: rows of q, k and v must be heads of 3"),
    "a kernel of another device": (
        "ValueError",
        "kernel='flash_attn' runs on cuda, in bfloat16 or float16; got cpu, torch.float32",
    ),
    "a mesh that is flattened later": ("ValueError", "up.weight is cut over axes ('cp_ring', 'cp_team') in turn"),
    "a mesh that is flattened": ("ValueError", "with which torch gathers such DTensors wrongly"),
    "a mesh in descending order": ("ValueError", "build the mesh with ascending ranks"),
    "a rotation without an example": ("ValueError", "rotation needs example"),
    "angles in another form": (
        "ValueError",
        "cos and sin come by pair of H = 4, where they were by element when the module was tried: pass example=",
    ),
    "angles of another head dim": ("ValueError", "B = 1, L = 2 and H = 4, got cos (2, 3)"),
    "angles of whole numbers": ("TypeError", "cos and sin must be floating point, got cos of torch.int64"),
    "angles on another device": ("ValueError", "cos and sin must be on x's device cpu, got meta"),
    "angles that are DTensors": ("TypeError", "plain tensors of this rank's tokens, got a DTensor: cos.to_local()"),
    "a rotation that gives no pair": ("TypeError", "rotation= must give cos and sin, a pair of tensors"),
    "angles that want a gradient": ("NotImplementedError", "METP has no gradient of cos and sin"),
    "an argument beside those of the example": (
        "ValueError",
        "attention was called with mask, a Tensor, where METPAttentionParallel knows of nothing but mask=None",
    ),
    "an argument of the example that no rotation reads": (
        "ValueError",
        "attention was called with mask, a Tensor, where METPAttentionParallel knows of nothing but mask, a Tensor",
    ),
    "another number than the example's": (
        "ValueError",
        "scale=3.0, where METPAttentionParallel knows of nothing but scale=2.0",
    ),
    "a default that is not the example's": (
        "ValueError",
        "scale=1.0, where METPAttentionParallel knows of nothing but scale=2.0",
    ),
    "a number for attention": (
        "ValueError",
        "attention was called with scale=0.5, where METPAttentionParallel knows "
        "of nothing but scale=1.0: a mask is for its style attention=",
    ),
    "a switch for attention": (
        "ValueError",
        "called with mask=False, where METPAttentionParallel knows of nothing but mask=None",
    ),
    "an unknown keyword of attention": ("TypeError", "called with an unexpected keyword argument 'mask'"),
    "an unknown keyword that attention takes": (
        "ValueError",
        "called with use_cache=True, where METPAttentionParallel knows of nothing: ",
    ),
    "too many arguments of attention": ("TypeError", "called with 3 positional arguments, of which it takes 2"),
    "no x for attention": ("TypeError", "called without x"),
    "a number for a feed-forward": (
        "ValueError",
        "a feed-forward under METPParallel was called with scale=2.0; it knows of nothing after x but scale=1.0: do "
        "outside of the module what scale asks for",
    ),
    "a number by position": ("ValueError", "was called with scale=2.0; it knows of nothing after x but scale=1.0"),
    "a switch for a number": ("ValueError", "was called with scale=True; it knows of nothing after x but scale=1.0"),
    "a tensor for a feed-forward": ("ValueError", "called with keep, a Tensor; it knows of nothing after x but keep="),
    "an unknown keyword of a feed-forward": ("TypeError", "called with an unexpected keyword argument 'keeps'"),
    "too many arguments of a feed-forward": ("TypeError", "called with 3 positional arguments, of which it takes 2"),
    "x twice": ("TypeError", "called with multiple values for argument 'x'"),
    "one argument twice": ("TypeError", "called with multiple values for argument 'scale'"),
    "no x": ("TypeError", "called without x"),
    "defaults that do something": (
        "EquivalenceError",
        "WithOptions is not what METPParallel computes: the output differs",
    ),
    "one rank's number": ("ValueError", "called with scale=2.0; it knows of nothing after x but scale=1.0"),
    "one rank without x": ("TypeError or ValueError", "called without x"),
    "one rank's bias": (
        "ValueError",
        "down.bias must be the same on every rank of the mesh, got rank 0: (6,) torch.float32 on cpu, rank 1: nothing",
    ),
    "one rank's bias of attention": (
        "ValueError",
        "o.bias must be the same on every rank of the mesh, got rank 0: (6,) torch.float32 on cpu, rank 1: nothing",
    ),
    "one rank's sizes": ("ValueError", "rank 2: (8, 6) torch.float32 on cpu, rank 3: (9, 6) torch.float32 on cpu"),
    "one rank's heads": (
        "ValueError",
        "k.weight must be the same on every rank of the mesh, got rank 0: (4, 6) torch.float32 on cpu, rank 1",
    ),
    "one rank's precision": ("ValueError", "rank 2: (8, 6) torch.float32 on cpu, rank 3: (8, 6) torch.float64 on cpu"),
    "one rank on the meta device": (
        "ValueError",
        "rank 2: (8, 6) torch.float32 on cpu, rank 3: (8, 6) torch.float32 on meta",
    ),
    "one rank's weight of another module": ("ValueError", "up.weight is a weight of another module under METP"),
    "one rank's source": (
        "ValueError",
        "src_data_rank must be the same on every rank of the mesh, got rank 0: 0, rank 1: 0, rank 2: 0, rank 3: 1",
    ),
    "one rank's layout": (
        "ValueError",
        "input_layouts and output_layouts must be the same on every rank of the mesh, got rank 0: (Replicate(), ",
    ),
    "layouts without tp": (
        "ValueError",
        "input_layouts and output_layouts are of the axis 'tp', and the mesh has ('cp_ring', 'cp_team'): slice it ",
    ),
    "one rank's style": (
        "ValueError",
        "got rank 0: METP applied, rank 1: METP applied, rank 2: METP applied, rank 3: attention of WallFacerParallel",
    ),
    "a part in double": ("TypeError", "one dtype, got torch.float32 and torch.float64 of gate.weight"),
    "one rank's part in double": (
        "TypeError or ValueError",
        "one dtype, got torch.float32 and torch.float64 of down.weight",
    ),
    "a gradient of x on one rank": (
        "ValueError",
        "what needs a gradient must be the same on every rank of the mesh, got rank 0: nothing, rank 1: x, rank 2: no",
    ),
    "a gradient of x on one rank of attention": (
        "ValueError",
        "what needs a gradient must be the same on every rank of the mesh, got rank 0: nothing, rank 1: x, rank 2: no",
    ),
    "a gradient of x on one rank of tp": ("ValueError", "what needs a gradient must be the same on every rank"),
    "a frozen bias on one rank": (
        "ValueError",
        "got rank 0: up.weight, up.bias, gate.weight, gate.bias, down.weight, down.bias, rank 1: up.weight, up.bias, "
        "gate.weight, gate.bias, down.weight, rank 2",
    ),
    "a frozen bias on one rank of attention": ("ValueError", "what needs a gradient must be the same on every rank"),
    "a frozen bias on one rank of tp": ("ValueError", "what needs a gradient must be the same on every rank"),
    "no gradients on one rank": ("ValueError", "what needs a gradient must be the same on every rank of the mesh"),
    "shapes that differ along one tp": ("ValueError", "the shape of x must be the same on every rank of the mesh"),
    "shapes that differ along tp": (
        "ValueError",
        "the shape of x must be the same on every rank of the mesh",
    ),
    "shapes that differ along tp, gathered in a graph": ("ValueError", "the shape of x must be the same on every rank"),
    "shapes that differ along tp, in a graph": ("ValueError", "the shape of x must be the same on every rank"),
    "shapes that differ along one tp, in a graph": ("ValueError", "the shape of x must be the same on every rank"),
    "one rank's model dim beside tp, in a graph": ("ValueError", "x must have shape (..., tokens, 6), got (1, 2, 5)"),
    "one rank's model dim, a symbol": ("ValueError", "x must have shape (..., tokens, 6), got (1, 2, 5)"),
    "a tangent": ("NotImplementedError", "METP has no forward-mode derivative, but x has a tangent"),
    "a batch that the mesh shards": (
        "ValueError",
        "x must have its sequence sharded, Shard(1), on the axes ('cp_ring', 'cp_team')",
    ),
    "axes in another order": ("ValueError", "x must be on a mesh that has the axes ['cp_ring', 'cp_team'] in"),
    "a tp that is not its own": ("ValueError", "on no other, got Shard(dim=1) on axis 'tp'"),
    "a layout of the dim that is multiplied": (
        "ValueError",
        "input_layouts must be Replicate() or a Shard of one of x's first 2 dims, got Shard(dim=-1) for x of shape (1",
    ),
    "a layout of a dim that is none": (
        "ValueError",
        "output_layouts must be Replicate() or a Shard of one of x's",
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
    "weights that were never loaded": (
        "ValueError",
        "up.weight must be on the mesh's device type 'cpu', got meta: load",
    ),
    "attention's weights that were never loaded": (
        "ValueError",
        "q.weight must be on the mesh's device type 'cpu', got meta: load",
    ),
    "tokens that are replicated": (
        "ValueError",
        "x must have its tokens sharded on axis 'cp_team', over which METP shards weights",
    ),
    "a sum": ("ValueError", "x must be sharded or replicated on axis 'cp_team', got Partial(sum)"),
    "a DTensor by its last dim": ("ValueError", "x must not be sharded by its last dim"),
    "a DTensor where axes have no names": ("ValueError", "has no names of axes to look for in x's: name them"),
    "one rank's model dim": ("ValueError", "x must have shape (..., tokens, 6), got (1, 2, 5)"),
    "one rank's hidden units": (
        "ValueError",
        "up.weight must be the same on every rank of the mesh, got rank 0: (8, 6) torch.float32 on cpu, rank 1: (8, 6)",
    ),
    "one rank's batch": ("ValueError", "the batch and tokens of attention must be the same on every rank of the mesh"),
    "one rank's rotation": (
        "ValueError",
        "attention was called with turn, by the looks of it cos and sin, of which rotary=None takes none",
    ),
    "two dims for attention": ("ValueError", "x must have shape (B, L, D), got (2, 6)"),
    "an argument that is unknown": (
        "ValueError",
        "attention was called with turn, a Tensor, where METPAttentionParallel knows of nothing but turn=None: a mask",
    ),
    "no angles": (
        "ValueError",
        "attention was called without cos and sin, which rotary='half' takes: pass them with the call, a pair of",
    ),
    "angles of other tokens": ("ValueError", "with B = 1, L = 2 and H = 4, got cos (8, 4)"),
    "whole weights": (
        "TypeError",
        "made of it on its mesh, got a plain tensor (8, 6): apply METP to a new module, and load",
    ),
    "whole weights of attention": ("TypeError", "q.weight must be the DTensor (8, 6) placed"),
    "whole weights of one rank": ("TypeError or ValueError", "up.weight must be the DTensor (8, 6) placed"),
    "whole weights in a graph": (
        "ValueError",
        "made of it on its mesh, got a plain tensor (8, 6): apply METP to a new module",
    ),
    "whole weights by functional_call": (
        "TypeError",
        "made of it on its mesh, got a plain tensor (8, 6): apply METP to a new module",
    ),
    "weights that are replicated": ("TypeError", "got a DTensor (8, 6) placed (Replicate(), Replicate()) on"),
    "weights in another order": ("TypeError", "got a DTensor (8, 6) placed (Shard(dim=0), Shard(dim=0)) on"),
    "weights of other sizes": ("TypeError", "got a DTensor (16, 6) placed (Shard(dim=0), Shard(dim=0)) on"),
    "a bias that is gone": ("TypeError", "up.bias must be the DTensor (8,) placed (Shard(dim=0), Shard(dim=0)) that"),
    "a bias that came later": ("TypeError", "o.bias was not there when METP was applied"),
    "a hook of a projection": (
        "ValueError",
        "up has hooks, which would not run, as METPParallel computes what up does",
    ),
    "a hook of an activation": ("ValueError", "act has hooks, which would not run"),
    "another output in evaluation": ("EquivalenceError", "the output in evaluation mode differs"),
    "a gate that is learned elsewhere": (
        "EquivalenceError",
        "has a gradient by a tensor of shape () beside x and its weights, which it finds outside",
    ),
    "a hook before a projection": ("ValueError", "q has hooks, which would not run"),
    "a hook of a projection's backward": ("ValueError", "down has hooks, which would not run"),
    "a hook before a projection's backward": ("ValueError", "o has hooks, which would not run"),
    "documents of a shard": (
        "ValueError",
        "document_ids must be those of the whole sequence of 8 tokens on every rank, got (2,)",
    ),
    "documents twice": ("ValueError", "pass document_ids or cu_seqlens"),
    "another length than the order's": ("ValueError", "of 13 tokens this rank holds "),
}


# These are refused in eager mode as well, and what another row compiles is refused there in the same way.
COMPILED = {"shapes that differ along one tp, in a graph", "one rank's model dim beside tp, in a graph"}


@pytest.mark.parametrize("name", few(REFUSALS, {*REFUSALS} - COMPILED))
def test_refused_on_all_ranks(ranks: Callable[[int], RankPool], name: str) -> None:
    kind, message = MESSAGES[name]
    for got, text, sent in ranks(4).run(outcome, name):
        assert got in kind.split(" or "), text  # where one rank's own error is no ValueError
        assert message in text
        assert not sent, "ranks tell each other of a refusal, and send nothing else"


def test_every_refusal_has_its_message() -> None:
    assert MESSAGES.keys() == REFUSALS.keys()
