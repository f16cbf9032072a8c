"""Bad input is refused with what was expected, what came and the remedy: on all ranks, before anything is sent."""

import re
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.cases import mesh_of
from tests.refusals import REFUSALS, outcome
from wallfacer_dt import TokenOrder, context_parallel_attention
from wallfacer_dt.testing import RankPool, worst_error

pytestmark = pytest.mark.ranks
Ranks = Callable[[int], RankPool]

MESSAGES = {
    "ring of the wrong size": ("ValueError", "must be the number of ranks, got 1 * 3 * 1 = 3 on 4 ranks"),
    "team that does not divide": ("ValueError", "must be the number of ranks, got 1 * 2 * 3 = 6 on 4 ranks"),
    "ring of no rank": ("ValueError", "ring must be at least 1, got 0"),
    "ring that is no int": ("TypeError", "ring must be an int, got 2.0"),
    "unknown placement": (
        "ValueError",
        "placement must be one of ('team_in_node', 'ring_in_node', 'ulysses_in_node'), got 'anywhere'",
    ),
    "no mesh": ("TypeError", "mesh must be a DeviceMesh, got str"),
    "mesh of other axes": ("ValueError", "or some of them in this order, got ('tp',); make one with"),
    "mesh without names": (
        "ValueError",
        "mesh must have axes ('cp_ulysses', 'cp_ring', 'cp_team'), or some of them in this order, got None; make one",
    ),
    "mesh of more axes": ("ValueError", "slice it first: mesh['cp_ring', 'cp_team']"),
    "mesh with swapped axes": ("ValueError", "or some of them in this order, got ('cp_team', 'cp_ring')"),
    "mesh in descending order": ("ValueError", "build the mesh with ascending ranks"),
    "published with a team too large": ("ValueError", "team * team to divide the ranks, got team 4 on 4 ranks"),
    "published rotating kv": ("ValueError", "rotates queries in its backward: pass rotate='q' or 'auto'"),
    "published rotating q forward": (
        "ValueError",
        "rotates keys and values in its forward: pass rotate_forward='kv' or 'auto'",
    ),
    "unknown schedule": ("ValueError", "schedule must be one of ('2d', 'rings', 'published'), got '3d'"),
    "unknown rotation": ("ValueError", "rotate must be one of ('auto', 'kv', 'q'), got 'k'"),
    "unknown rotation forward": ("ValueError", "rotate_forward must be one of ('auto', 'kv', 'q'), got 'k'"),
    "unknown order": (
        "ValueError",
        "order must be one of ('contiguous', 'head_tail', 'document_head_tail'), got 'zigzag'",
    ),
    "a name for an order": (
        "TypeError",
        "order must be a TokenOrder, got 'head_tail'; make one, order = TokenOrder(\"head_tail\", mesh), and",
    ),
    "a name for an order in a style": ("TypeError", "order must be a TokenOrder, got 'head_tail'; make one"),
    "a name for an order to the loader": ("TypeError", "order must be a TokenOrder, got 'head_tail'; make one"),
    "a mesh for an order": ("TypeError", "order must be a TokenOrder, got DeviceMesh"),
    "a mesh for an order of a stream": ("TypeError", "order must be a TokenOrder, got DeviceMesh"),
    "a mask without an order": (
        "ValueError",
        "attention under a mask on 4 ranks must be told in which order tokens were dealt out, which shards do not show",
    ),
    "documents without an order": ("ValueError", 'make one, order = TokenOrder("head_tail", mesh)'),
    "a style's mask without an order": ("ValueError", "must be told in which order tokens were dealt out"),
    "a call's mask without an order": ("ValueError", "must be told in which order tokens were dealt out"),
    "an order of another turn": (
        "ValueError",
        "deals tokens out to ranks 0, 2, 1, 3 in turn, but on attention's mesh it deals to 0, 1, 2, 3; use one mesh",
    ),
    "an order of another turn without a mask": ("ValueError", "but on attention's mesh it deals to 0, 1, 2, 3"),
    "an order of another turn in a style": ("ValueError", "but on attention's mesh it deals to 0, 1, 2, 3"),
    "an order of another turn, tried by document": ("ValueError", "but on attention's mesh it deals to 0, 1, 2, 3"),
    "an order of other ranks": ("ValueError", "but on attention's mesh it deals to 0, 1, 2, 3"),
    "unknown kernel": (
        "ValueError",
        "kernel must be one of ('auto', 'flash', 'efficient', 'cudnn', 'flex', 'reference', ",
    ),
    "is_causal that is no bool": ("TypeError", "is_causal must be a bool, got 1"),
    "scale that is no number": ("TypeError", "scale must be a float or None, got 'big'"),
    "lengths of q and k under a mask": ("ValueError", "under a mask q, k and v must agree in length"),
    "another length than the order's": ("ValueError", "of 13 tokens this rank holds "),
    "a length without tokens": ("ValueError", "length must be at least 1, got 0"),
    "a length of keys under a mask": ("ValueError", "kv_length must be left out"),
    "a length of keys alone": ("ValueError", "kv_length is given without length"),
    "a window that is no pair": ("TypeError", "window_size must be a pair (left, right), got 8"),
    "a window of floats": ("TypeError", "window_size must be a pair of ints or None, got (8.0, 0)"),
    "a window below zero": ("ValueError", "window_size must be at least 0, or -1 for no bound, got (-2, 0)"),
    "a causal window that looks ahead": ("ValueError", "is_causal=True sees no later keys, got window_size=(4, 4)"),
    "a prefix without causality": ("ValueError", "prefix_length goes with is_causal=True and without window_size"),
    "a prefix with a window": ("ValueError", "prefix_length goes with is_causal=True and without window_size"),
    "a mask_mod beside another mask": ("ValueError", "mask_mod must say everything by itself, got is_causal"),
    "a mask_mod that is none": ("TypeError", "mask_mod must be a function or a BlockMask, got Tensor"),
    "a mask_mod that answers with floats": (
        "UnrecordedError",
        "mask_mod must return a boolean tensor, as comparisons do, got a tensor of torch.float32",
    ),
    "a mask_mod that answers with numbers": ("UnrecordedError", "as comparisons do, got a tensor of torch.int64"),
    "a mask_mod that answers once for all": ("UnrecordedError", "as comparisons do, got a bool"),
    "a mask_mod that branches": (
        "UnrecordedError",
        "mask_mod takes a value out of a tensor of positions (`TensorBase.__bool__`)",
    ),
    "a mask_mod that indexes a list": (
        "UnrecordedError",
        "mask_mod takes a value out of a tensor of positions (`TensorBase.__index__`)",
    ),
    "a mask_mod that indexes an array": (
        "UnrecordedError",
        "mask_mod takes a value out of a tensor of positions (`Tensor.__array__`)",
    ),
    "a mask_mod that slices": ("UnrecordedError", "mask_mod slices by a tensor"),
    "a mask_mod that draws": (
        "UnrecordedError",
        "mask_mod draws random numbers (`aten.rand.default`), which ranks would",
    ),
    "a mask_mod that writes": ("UnrecordedError", "mask_mod changes in place what it is given or captures"),
    "a mask_mod that answers for many pairs": (
        "UnrecordedError",
        "mask_mod must return one answer for one pair of positions, got a tensor of shape (16,)",
    ),
    "a mask_mod of slots alone": ("TypeError", "mask_mod is a WithSlots of slots only; wrap it in a function"),
    "a style with a mask_mod that branches": ("UnrecordedError", "mask_mod takes a value out of a tensor of positions"),
    "replicated tokens under a mask": ("ValueError", "replicated tokens have no place in the sequence"),
    "replicated tokens alone": ("ValueError", "q must have tokens of this rank after 4 replicated ones"),
    "replicated tokens in DTensors": ("ValueError", "replicated tokens and a shard are no DTensor"),
    "a soft cap in a kernel that has none": (
        "ValueError",
        "has no soft cap (softcap is 30.0): pass kernel='reference'",
    ),
    "a soft cap of zero": ("ValueError", "softcap must be finite and above 0, got 0.0"),
    "flex on the CPU": ("ValueError", "kernel='flex'"),
    "documents of a shard": (
        "ValueError",
        "must be those of the whole sequence of 16 tokens on every rank, got (1, 4)",
    ),
    "documents of another batch": ("ValueError", "document_ids must have shape (B, N) or (N,) with B = 1, got (2, 16)"),
    "documents that are no integers": ("TypeError", "document_ids must be int64 or int32, got torch.float32"),
    "documents on a device": ("ValueError", "document_ids must be on the CPU, where the schedule is made, got meta"),
    "documents as a list": ("TypeError", "cu_seqlens must be a tensor, got list"),
    "documents twice": ("ValueError", "pass document_ids or cu_seqlens"),
    "cumulative lengths of another sequence": ("ValueError", "must ascend from 0 to the sequence's length 16, got"),
    "cumulative lengths that descend": ("ValueError", "must ascend from 0 to the sequence's length 16, got"),
    "documents with a prefix": ("ValueError", "documents go with causal and window masks, not with a prefix"),
    "documents with a mask_mod": ("ValueError", "documents go with causal and window masks, not with a prefix"),
    "dealt out by document without documents": ("ValueError", "needs document_ids or cu_seqlens at every call"),
    "sharded by document without documents": ("ValueError", "needs document_ids or cu_seqlens, got 0 of them"),
    "a stream dealt out by document": ("ValueError", "needs documents, which a stream does not have"),
    "sinks for other heads": ("ValueError", "one logit per query head (2,), got (3,)"),
    "sinks that are integers": ("ValueError", "sinks must be a floating point tensor"),
    "sinks as a number": ("TypeError", "sinks must be a tensor, got float"),
    "shared keys of several heads": ("ValueError", "k_shared must have shape (B, 1, L, Hs), one head for all"),
    "shared keys too wide": ("ValueError", "q and k must agree in batch and head dim (B, N, L, H), to which k_shared"),
    "shared keys of another dtype": (
        "TypeError",
        "q, k, v and k_shared must have one dtype, got torch.float32, torch.float32, torch.float32, torch.float64",
    ),
    "shared keys of another length": ("ValueError", "k_shared must have shape (B, 1, L, Hs), one head for all"),
    "fewer heads than ulysses": ("ValueError", "cp_ulysses of 4 splits query heads, of which there are only 2"),
    "mesh with ulysses inside": ("ValueError", "or some of them in this order, got ('cp_ring', 'cp_ulysses')"),
    "a ring without its ulysses": ("ValueError", "slice them all: mesh['cp_ulysses', 'cp_ring', 'cp_team']"),
    "ulysses of the wrong size": ("ValueError", "must be the number of ranks, got 3 * 2 * 1 = 6 on 4 ranks"),
    "ring style on ulysses": ("ValueError", "RingParallel needs a mesh with cp_ulysses of size 1, got 2"),
    "ulysses style on a ring": ("ValueError", "UlyssesParallel needs a mesh with cp_ring of size 1, got 2"),
    "lengths of k and v": ("ValueError", "k and v must agree in all but the head dim"),
    "batches": ("ValueError", "q and k must agree in batch and head dim"),
    "head dims": ("ValueError", "q and k must agree in batch and head dim"),
    "heads that do not divide": ("ValueError", "query heads must be a multiple of key and value heads"),
    "fewer query heads": ("ValueError", "query heads must be a multiple of key and value heads"),
    "dtypes": ("TypeError", "q, k and v must have one dtype, got torch.bfloat16"),
    "integers": ("TypeError", "q, k and v must be floating point, got torch.int64"),
    "devices": ("ValueError", "q, k and v must be on one device, got meta"),
    "device of the mesh": ("ValueError", "q, k and v must be on the mesh's device type 'cpu', got meta"),
    "three dims": ("ValueError", "q must have shape (B, N, L, H) without empty dims, got (2, 4, 8)"),
    "an empty shard": ("ValueError", "q must have tokens of this rank, got (1, 2, 0, 8)"),
    "no tensor": ("TypeError", "q must be a tensor, got list"),
    "a DTensor among tensors": (
        "TypeError",
        "q, k and v must all be DTensors or all plain tensors, but q and k differ",
    ),
    "a DTensor replicated in the team": ("ValueError", "q must have its sequence sharded on axis 'cp_team'"),
    "an empty sequence": ("ValueError", "sequence length must be at least 1, got 0"),
    "a length that is no int": ("TypeError", "sequence length must be an int, got 8.0"),
    "documents in a list": ("TypeError", "document_ids must be a tensor, got list"),
    "dim out of range": ("IndexError", "dim must be in [-4, 4), got 4"),
    "unsharding something that needs a gradient": ("ValueError", "call it under torch.no_grad()"),
    "too short a stream": ("ValueError", "needs 9 tokens, the stream has 8"),
    "ring style on a team": ("ValueError", "RingParallel needs a mesh with cp_team of size 1, got 2"),
    "unknown layout": ("ValueError", "layout must be one of ('BLNH', 'BNLH'), got 'BHLD'"),
    "wallfacer style on one axis": ("ValueError", "or some of them in this order, got ('cp',)"),
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
    "module that holds dropout": (
        "ValueError",
        "does not implement dropout of attention; Holding has drop: set its p to 0",
    ),
    "module that is given a bias later": (
        "ValueError",
        "Holding was given bias, a tensor of shape (4, 4) that needs a gradient, after",
    ),
    "module that is given another bias later": (
        "ValueError",
        "Holding was given bias, a tensor of shape (4, 4) that needs a gradient, after",
    ),
    "module that holds a mask": (
        "ValueError",
        "no parameters, buffers or submodules; Inner has hidden: keep that in the module around it",
    ),
    "unknown schedule of a style": ("ValueError", "schedule must be one of ('2d', 'rings', 'published'), got '3d'"),
    "unknown rotation of a style": ("ValueError", "rotate must be one of ('auto', 'kv', 'q'), got 'k'"),
    "forward-mode differentiation": ("NotImplementedError", "no forward-mode derivative, but q has a tangent"),
    "a ring without its team": ("ValueError", "slice them all: mesh['cp_ring', 'cp_team']"),
    "mesh partly in descending order": ("ValueError", "build the mesh with ascending ranks"),
    "dim that is no int": ("TypeError", "dim must be an int, got 0.5"),
    "sharding a DTensor": ("TypeError", "expected a plain tensor, got a DTensor"),
    "called with a mask": ("ValueError", "attn_mask=a tensor of shape (4, 4), which this style does not implement"),
    "called with a mask by position": ("ValueError", "attn_mask=a tensor of shape (4, 4)"),
    "called with dropout": ("ValueError", "dropout_p=0.1, which this style does not implement"),
    "called with a window": ("ValueError", "sliding_window=8, which this style does not implement"),
    "called with a flash window": ("ValueError", "window_size=(8, 0), which this style does not implement"),
    "called with sinks that are no tensor": ("ValueError", "sinks=0.5, which this style does not implement"),
    "called with sinks twice": ("ValueError", "sinks twice, under two names"),
    "called with a soft cap": ("ValueError", "softcap=30.0, which this style does not implement"),
    "called with something unknown": ("ValueError", "temperature=None, which this style does not implement"),
    "called as causal": ("ValueError", "called with is_causal=True, the style was given is_causal=False"),
    "called with another scale": ("ValueError", "called with scale=0.5, the style was given scale=1.0"),
    "called with two scales": ("ValueError", "called with softmax_scale=0.25 and scale=0.5: give one"),
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
    "an odd shard on one rank": ("ValueError", "the shape of q must be the same on every rank"),
    "an empty shard on one rank": ("ValueError", "q must have tokens of this rank, got (1, 2, 0, 8)"),
    "other documents on one rank": ("ValueError", "the documents must be the same on every rank of the mesh"),
    "bad documents on one rank": ("ValueError", "must ascend from 0 to the sequence's length 16, got"),
    "no documents on one rank": (
        "ValueError",
        "what says where documents are must be the same on every rank of the mesh, got rank 0: nothing",
    ),
    "another window on one rank": (
        "ValueError",
        "window_size must be the same on every rank of the mesh, got rank 0: (4, 0)",
    ),
    "another mask_mod on one rank": ("ValueError", "mask_mod must be the same on every rank of the mesh"),
    "shared keys on one rank": ("ValueError", "the shape of k must be the same on every rank of the mesh"),
    "another width of values on one rank": ("ValueError", "the head dim of v must be the same on every rank"),
    "another number of replicated tokens on one rank": ("ValueError", "replicated must be the same on every rank"),
    "sinks that do not fit on one rank": ("ValueError", "one logit per query head (2,), got (3,)"),
    "an integer on one rank": ("(ValueError|TypeError)", "must be floating point, got torch.int64"),
    "shards to unshard of different length": ("ValueError", "are none of shard_sequence's, which for 13 positions"),
    "another length on one rank, each seen before": ("ValueError", "the shape of q must be the same on every rank"),
    "another scale on one rank": ("ValueError", "scale must be the same on every rank of the mesh, got rank 0: 0.1"),
    "another kernel on one rank": (
        "ValueError",
        "kernel must be the same on every rank of the mesh, got rank 0: flash",
    ),
    "another version on one rank": ("ValueError", "code must be the same on every rank of the mesh, got rank 0: new"),
    "another dtype on one rank": ("ValueError", "the dtype of q must be the same on every rank of the mesh"),
    "a gradient on one rank": (
        "ValueError",
        "whether q, k, v, k_shared or sinks need a gradient must be the same on every rank of the mesh, got rank 0: "
        "False, rank 1: True, rank 2: False",
    ),
    "a gradient of sinks on one rank": ("ValueError", "whether q, k, v, k_shared or sinks need a gradient must be the"),
    "no gradients on one rank": ("ValueError", "got rank 0: True, rank 1: False, rank 2: True"),
    "called with grouped heads switched off by position": ("ValueError", "enable_gqa=False, but q has shape"),
    "called with one option twice": ("TypeError", "attention got multiple values for argument 'attn_mask'"),
    "no values on one rank": ("(ValueError|TypeError)", "attention is called without v: pass q, k and v"),
    "a mask on one rank": ("ValueError", "attn_mask=a tensor of shape (4, 4), which this style does not implement"),
    "a learned scale on one rank": ("(ValueError|TypeError)", "scale must be a float or None, got tensor(0.5000)"),
    "another order on one rank": (
        "ValueError",
        "order must be the same on every rank of the mesh, got rank 0: contiguous, rank 1: head_tail",
    ),
    "another order on one rank in a style": ("ValueError", "order must be the same on every rank of the mesh, got"),
    "another turn on one rank": ("ValueError", "deals tokens out to ranks 0, 2, 1, 3 in turn, but on attention's mesh"),
    "another turn on one rank in a style": (
        "ValueError",
        "rank 0: TokenOrder('head_tail', ranks 0, 1, 2, 3 in turn), rank 1: TokenOrder('head_tail', ranks 0, 2, 1, 3",
    ),
    "no order on one rank": ("ValueError", "must be told in which order tokens were dealt out"),
    "shards to unshard in another order on one rank": ("ValueError", "order must be the same on every rank"),
    "another seed on one rank": ("ValueError", "seed must be the same on every rank of the mesh, got rank 0: 0"),
}


# Some call twice, rightly the first time; the other's lengths are what has to be compared.
MAY_SEND = {
    "another length on one rank, each seen before",
    "module that is given a bias later",
    "module that is given another bias later",
    "shards to unshard of different length",
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refused_on_every_rank_before_any_tensor_is_sent(ranks: Ranks, name: str) -> None:
    kind, text = MESSAGES[name]
    for raised, message, sent in ranks(4).run(outcome, name):
        assert re.fullmatch(kind, raised), f"{raised}: {message}"
        assert text in message
        assert bool(sent) == (name in MAY_SEND), sent


def frozen_elsewhere() -> list[tuple[Tensor, Tensor]]:
    """Another tensor needs a gradient on every rank: each has its own, as if all needed all."""
    mesh, rank = mesh_of(2, 1), dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    given = [torch.randn(1, 2, 4, 8, generator=generator, dtype=torch.float64) for _ in range(3)]
    expected = [x.clone().requires_grad_() for x in given]
    found = [x.clone().requires_grad_(number == rank) for number, x in enumerate(given)]
    for tensors in (expected, found):
        context_parallel_attention(
            *tensors, mesh, is_causal=True, order=TokenOrder("contiguous", mesh)
        ).cos().sum().backward()
    return [(found[rank].grad, expected[rank].grad)]


def test_ranks_may_need_gradients_of_other_tensors(ranks: Ranks) -> None:
    for pairs in ranks(2).run(frozen_elsewhere):
        assert worst_error(pairs) == 0


def test_ranks_are_fit_for_use_after_refusals(ranks: Ranks) -> None:
    from tests.cases import Case, oracle, run_uncounted, whole

    case = Case(2, 2, is_causal=True)
    got = whole(case, ranks(4).run(run_uncounted, case))
    assert worst_error([(got.out, oracle(case).out)]) < 1e-10
