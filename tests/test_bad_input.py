"""Bad input is refused with what was expected, what came and the remedy: on all ranks, before anything is sent."""

import re
from collections.abc import Callable

import pytest

from tests.refusals import REFUSALS, outcome
from wallfacer_dt.testing import RankPool

pytestmark = pytest.mark.ranks
Ranks = Callable[[int], RankPool]

MESSAGES = {
    "ring of the wrong size": ("ValueError", "ring * team must be the number of ranks, got 3 * 1 = 3 on 4 ranks"),
    "team that does not divide": ("ValueError", "ring * team must be the number of ranks, got 2 * 3 = 6 on 4 ranks"),
    "ring of no rank": ("ValueError", "ring must be at least 1, got 0"),
    "ring that is no int": ("TypeError", "ring must be an int, got 2.0"),
    "unknown placement": ("ValueError", "placement must be 'team_in_node' or 'ring_in_node', got 'anywhere'"),
    "no mesh": ("TypeError", "mesh must be a DeviceMesh, got str"),
    "mesh of other axes": ("ValueError", "mesh must have axes ('cp_ring', 'cp_team'), got ('tp',); make one with"),
    "mesh without names": ("ValueError", "mesh must have axes ('cp_ring', 'cp_team'), got None; make one with"),
    "mesh of more axes": ("ValueError", "slice it first: mesh['cp_ring', 'cp_team']"),
    "mesh with swapped axes": ("ValueError", "mesh must have axes ('cp_ring', 'cp_team'), got ('cp_team', 'cp_ring')"),
    "mesh in descending order": ("ValueError", "build the mesh with ascending ranks"),
    "published with a team too large": ("ValueError", "team * team to divide the ranks, got team 4 on 4 ranks"),
    "published rotating kv": ("ValueError", "rotates queries in its backward: pass rotate='q' or 'auto'"),
    "unknown schedule": ("ValueError", "schedule must be one of ('2d', 'published'), got '3d'"),
    "unknown rotation": ("ValueError", "rotate must be one of ('auto', 'kv', 'q'), got 'k'"),
    "unknown order": ("ValueError", "order must be one of ('contiguous', 'head_tail'), got 'zigzag'"),
    "unknown kernel": ("ValueError", "kernel must be one of ('auto', 'flash', 'reference'), got 'fast'"),
    "is_causal that is no bool": ("TypeError", "is_causal must be a bool, got 1"),
    "scale that is no number": ("TypeError", "scale must be a float or None, got 'big'"),
    "odd shard in head_tail": ("ValueError", "must be a positive multiple of 8 (order='head_tail' on 4 ranks), got 12"),
    "lengths of q and k": ("ValueError", "q, k and v must agree in batch, length and head dim"),
    "lengths of k and v": ("ValueError", "k and v must have one shape"),
    "batches": ("ValueError", "q, k and v must agree in batch"),
    "head dims": ("ValueError", "q, k and v must agree in batch"),
    "heads that do not divide": ("ValueError", "query heads must be a multiple of key and value heads"),
    "fewer query heads": ("ValueError", "query heads must be a multiple of key and value heads"),
    "dtypes": ("TypeError", "q, k and v must have one dtype, got torch.bfloat16"),
    "integers": ("TypeError", "q, k and v must be floating point, got torch.int64"),
    "devices": ("ValueError", "q, k and v must be on one device, got meta"),
    "device of the mesh": ("ValueError", "q, k and v must be on the mesh's device type 'cpu', got meta"),
    "three dims": ("ValueError", "q must have shape (B, N, L, H) without empty dims, got (2, 4, 8)"),
    "an empty shard": ("ValueError", "without empty dims, got (1, 2, 0, 8)"),
    "no tensor": ("TypeError", "q must be a tensor, got list"),
    "a DTensor among tensors": (
        "TypeError",
        "q, k and v must all be DTensors or all plain tensors, but q and k differ",
    ),
    "a DTensor replicated in the team": ("ValueError", "q must have its sequence sharded on axis 'cp_team'"),
    "sharded in another order": ("ValueError", "causal attention was given order='contiguous', but on this mesh"),
    "positions in another order": ("ValueError", "tokens were sharded in order='head_tail'"),
    "dataset in another order": ("ValueError", "SequenceDataset was given order='head_tail', but on this mesh"),
    "sequence that does not divide": ("ValueError", "must be a positive multiple of 4 (order='contiguous'"),
    "sequence that does not divide by 2P": ("ValueError", "multiple of 8 (order='head_tail' on 4 ranks), got 12"),
    "positions that do not divide": ("ValueError", "must be a positive multiple of 4"),
    "a length that is no int": ("TypeError", "sequence length must be an int, got 8.0"),
    "dim out of range": ("IndexError", "dim must be in [-4, 4), got 4"),
    "unsharding something that needs a gradient": ("ValueError", "call it under torch.no_grad()"),
    "too short a stream": ("ValueError", "needs 9 tokens, the stream has 8"),
    "ring style on a team": ("ValueError", "RingParallel needs a mesh with cp_team of size 1, got 2"),
    "unknown layout": ("ValueError", "layout must be one of ('BLNH', 'BNLH'), got 'BHLD'"),
    "wallfacer style on one axis": ("ValueError", "mesh must have axes ('cp_ring', 'cp_team'), got ('cp',)"),
    "style on a module with parameters": ("ValueError", "MultiheadAttention has in_proj_weight, in_proj_bias"),
    "style on a module that is no attention": ("ValueError", "a module called as attention(q, k, v), got ReLU(input"),
    "style on a styled module": ("ValueError", "the module Inner already has a context-parallel style"),
    "module that is causal by default": (
        "ValueError",
        "called with is_causal=True, the style was given is_causal=False",
    ),
    "module with a window by default": ("ValueError", "sliding_window=128, which this style does not implement"),
    "module with another scale by default": ("ValueError", "called with scale=0.5, the style was given scale=1.0"),
    "module that holds is_causal": ("ValueError", "the module Holding has is_causal=True, the style was given"),
    "module that holds a window": ("ValueError", "the module Holding has sliding_window=64, which this style does not"),
    "module that holds dropout": ("ValueError", "no parameters, buffers or submodules; Holding has drop"),
    "module that holds a mask": ("ValueError", "no parameters, buffers or submodules; Inner has hidden"),
    "unknown schedule of a style": ("ValueError", "schedule must be one of ('2d', 'published'), got '3d'"),
    "unknown rotation of a style": ("ValueError", "rotate must be one of ('auto', 'kv', 'q'), got 'k'"),
    "forward-mode differentiation": ("NotImplementedError", "no forward-mode derivative, but q has a tangent"),
    "a ring without its team": ("ValueError", "slice both: mesh['cp_ring', 'cp_team']"),
    "mesh partly in descending order": ("ValueError", "build the mesh with ascending ranks"),
    "dim that is no int": ("TypeError", "dim must be an int, got 0.5"),
    "sharding a DTensor": ("TypeError", "expected a plain tensor, got a DTensor"),
    "called with a mask": ("ValueError", "attn_mask=a tensor of shape (4, 4), which this style does not implement"),
    "called with a mask by position": ("ValueError", "attn_mask=a tensor of shape (4, 4)"),
    "called with dropout": ("ValueError", "dropout_p=0.1, which this style does not implement"),
    "called with a window": ("ValueError", "sliding_window=8, which this style does not implement"),
    "called with a flash window": ("ValueError", "window_size=(8, 0), which this style does not implement"),
    "called with sinks": ("ValueError", "sinks=a tensor of shape (2,), which this style does not implement"),
    "called with a soft cap": ("ValueError", "softcap=30.0, which this style does not implement"),
    "called with something unknown": ("ValueError", "temperature=None, which this style does not implement"),
    "called as causal": ("ValueError", "called with is_causal=True, the style was given is_causal=False"),
    "called with another scale": ("ValueError", "called with scale=0.5, the style was given scale=1.0"),
    "called with a learned scale": (
        "TypeError",
        "scale must be a float or None, got tensor(0.5000, requires_grad=True)",
    ),
    "called with an infinite scale": ("ValueError", "scale must be finite and above 0, got inf"),
    "called with grouped heads switched off": ("ValueError", "enable_gqa=False, but q has shape (1, 4, 4, 8)"),
    "called with too many arguments": ("ValueError", "got 5 positional arguments"),
    "shards of different length": (
        "ValueError",
        "the shape of q must be the same on every rank of the mesh, got rank 0",
    ),
    "an odd shard on one rank": (
        "ValueError",
        "must be a positive multiple of 8 (order='head_tail' on 4 ranks), got 12",
    ),
    "an empty shard on one rank": ("ValueError", "without empty dims, got (1, 2, 0, 8)"),
    "an integer on one rank": ("(ValueError|TypeError)", "must be floating point, got torch.int64"),
    "shards to unshard of different length": ("ValueError", "the shape of x must be the same on every rank"),
    "another length on one rank, each seen before": ("ValueError", "the shape of q must be the same on every rank"),
    "another scale on one rank": ("ValueError", "scale must be the same on every rank of the mesh, got rank 0: 0.1"),
    "another kernel on one rank": (
        "ValueError",
        "kernel must be the same on every rank of the mesh, got rank 0: flash",
    ),
    "another version on one rank": ("ValueError", "code must be the same on every rank of the mesh, got rank 0: new"),
    "another dtype on one rank": ("ValueError", "the dtype of q must be the same on every rank of the mesh"),
    "a mask on one rank": ("ValueError", "attn_mask=a tensor of shape (4, 4), which this style does not implement"),
    "a learned scale on one rank": ("(ValueError|TypeError)", "scale must be a float or None, got tensor(0.5000)"),
    "another order on one rank": ("ValueError", "order='contiguous', but on this mesh tokens were sharded in order="),
    "another seed on one rank": ("ValueError", "seed must be the same on every rank of the mesh, got rank 0: 0"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refused_on_every_rank_before_any_tensor_is_sent(ranks: Ranks, name: str) -> None:
    kind, text = MESSAGES[name]
    for raised, message, communication in ranks(4).run(outcome, name):
        assert re.fullmatch(kind, raised), f"{raised}: {message}"
        assert text in message
        # Ranks may have compared what they were asked for, which is not yet sending it.
        sent = [op for op in communication if op.startswith("_c10d_functional")]
        assert not sent or name == "another length on one rank, each seen before"


def test_ranks_are_fit_for_use_after_refusals(ranks: Ranks) -> None:
    from tests.cases import Case, oracle, run_uncounted, whole

    case = Case(2, 2, is_causal=True)
    got = whole(case, ranks(4).run(run_uncounted, case))
    assert (got.out - oracle(case).out).abs().max() < 1e-10
