"""What FSDP2 sends and copies in a step, in the planner and in fact."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from wallfacer_dt import Cluster, Kernels, Link, ModelShape, SequenceShape
from wallfacer_dt.planning.candidates import Candidate
from wallfacer_dt.planning.division import Division
from wallfacer_dt.planning.fsdp import Sent, Weights, sent_around, sent_beside
from wallfacer_dt.planning.layer import Layer
from wallfacer_dt.planning.model import Kinds
from wallfacer_dt.planning.step import _ends, beside_attention
from wallfacer_dt.testing.fake import fake_world

MODEL = ModelShape(hidden=16, heads=2, ffn=32, layers=4, vocab=96)
DTYPES = torch.bfloat16, torch.float32


class Block(nn.Module):
    """A layer's weights."""

    def __init__(self, units: int = 32) -> None:
        super().__init__()
        self.attention = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(4))
        self.gate, self.up, self.down = (nn.Linear(*sizes, False) for sizes in ((16, units), (16, units), (units, 16)))

    def forward(self, x: Tensor) -> Tensor:
        for projection in self.attention:
            x = x + projection(x)
        return x + self.down(self.gate(x) * self.up(x))


class Sharded(nn.Module):
    """Groups of weights as torchtitan has them, but for norms, which the planner leaves out."""

    def __init__(
        self, replicas: int, ranks: int, dtype: torch.dtype, make: Callable[[], Iterable[nn.Module]], *,
        resharded: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        mesh = init_device_mesh("cpu", (replicas, ranks), mesh_dim_names=("replicas", "shards"))
        self.embedding, self.head = nn.Embedding(96, 16), nn.Linear(16, 96, bias=False)
        self.layers = nn.ModuleList(make())
        options: dict[str, Any] = {"mesh": mesh if replicas > 1 else mesh["shards"]}
        options["mp_policy"] = MixedPrecisionPolicy(dtype, torch.float32)
        for group in (self.embedding, *self.layers):
            fully_shard(group, **options, reshard_after_forward=resharded)
        fully_shard(self.head, **options, reshard_after_forward=False)
        fully_shard(self, **options)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


KINDS = {"_allgather_base_": "gathered", "_reduce_scatter_base_": "reduced", "allreduce_": "replicated"}


_COPIES = ("split_with_sizes_copy", "chunk_cat", "cat", "chunk_cat_mixed_dtype")  # the last torch 2.15's


class Watched(TorchDispatchMode):
    """Elements of what is sent, by kind, in order; and bytes that are copied whole, and in sums of gradients."""

    def __init__(self, *own: int) -> None:
        super().__init__()
        self.sent: dict[str, list[int]] = {kind: [] for kind in KINDS.values()}
        self.copied, self.own = 0, own  # sizes of what no other rank has, of which shards are all there is

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = func._schema.name.partition("::")[2]
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        result = func(*args, **(kwargs or {}))
        if name in KINDS:
            self.sent[KINDS[name]].append(max(x.numel() for x in given))
        written = [result] if name in ("_to_copy", "cat") and "out" not in (kwargs or {}) else []
        is_sum = given and given[0].ndim == 2 and name in ("add_", "_to_copy")  # of whole gradients
        is_own = name in ("copy_", "_to_copy") and given[0].ndim == 1 and given[0].numel() in self.own
        if name in _COPIES or is_sum or is_own:
            again = given[0].nbytes if name == "add_" else 0  # read and written
            self.copied += sum(x.nbytes for x in (*given, *written)) + again
        return result


def blocks() -> Iterator[nn.Module]:
    """Layers that are alike."""
    return (Block() for _ in range(MODEL.layers))


@contextmanager
def watched(
    replicas: int, dtype: torch.dtype, microbatches: int | None = None,
    make: Callable[[], Iterable[nn.Module]] = blocks,
) -> Iterator[Watched]:  # fmt: skip
    """One rank of eight in a step; of so many microbatches as a pipeline has them."""
    with fake_world(8, 1):
        model = Sharded(replicas, 8 // replicas, dtype, make, resharded=microbatches is None)
        tokens = torch.zeros(microbatches or 1, 8, dtype=torch.long)
        if microbatches is None:
            with Watched() as seen:
                model(tokens).sum().backward()
        else:
            alone = dist.new_group([1])
            stage = PipelineStage(model, 0, 1, torch.device("cpu"), group=alone)
            schedule = Schedule1F1B(stage, microbatches, lambda logits, _: logits.sum(), scale_grads=False)
            step = partial(schedule.step, tokens, target=tokens, losses=[], return_outputs=False)
            step()  # in its first a pipeline runs a microbatch more, for its shapes
            model.zero_grad()
            with Watched() as seen:
                step()
        yield seen


def layer_of(division: Division, dtype: torch.dtype) -> Layer:
    kernels = Kernels(1e11, 1e11, 1e11, 0.0, 1.0, launch=0.0)  # a byte a second
    return Layer(division, MODEL, SequenceShape(64, dtype=dtype), Cluster(8, 8, Link(1.0), Link(1.0), kernels=kernels))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("replicas", [1, 2])
def test_what_fsdp_sends_and_copies(replicas: int, dtype: torch.dtype) -> None:
    layer = layer_of(Division(Candidate(2), shards=4 // replicas, replicas=replicas), dtype)
    own, vocabulary = layer.weights[0], layer.vocabulary
    with watched(replicas, dtype) as seen:
        pass
    layers = [own] * MODEL.layers
    assert seen.sent["gathered"] == [vocabulary, *layers, vocabulary, *layers, vocabulary]
    assert seen.sent["reduced"] == [vocabulary, *layers, vocabulary]
    sizes = [elements * replicas // 8 for elements in (vocabulary, own)]
    assert seen.sent["replicated"] == [sizes[0], *sizes[1:] * 4, sizes[0]] * (replicas > 1)
    # In the planner: around layers and beside them, but for what the head hides, a layer's weights in the backward.
    told = sent_in_a_step(MODEL.kinds, {"layer": own, "vocabulary": vocabulary})
    assert told[0] + Counter([own]) == Counter(seen.sent["gathered"])
    assert told[1] == told[2] == Counter(seen.sent["reduced"])
    assert beside_attention(layer)["copies"] == seen.copied


def unlike() -> list[nn.Module]:
    """Two layers without experts before two with eight."""
    return [Block(64), Block(64), Dealt(8), Dealt(8)]


UNLIKE = replace(MODEL, experts=8, experts_per_token=2, dense_layers=2, dense_ffn=64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("replicas", [1, 2])
def test_what_fsdp_sends_and_copies_of_first_layers_without_experts(replicas: int, dtype: torch.dtype) -> None:
    layer = replace(layer_of(Division(Candidate(2), shards=4 // replicas, replicas=replicas), dtype), model=UNLIKE)
    own, dense, vocabulary = layer.weights[0], layer.of("dense").weights[0], layer.vocabulary
    assert (own, dense) == (4 * 16 * 16 + 8 * (3 * 16 * 32 + 16), 4 * 16 * 16 + 3 * 16 * 64)
    with watched(replicas, dtype, make=unlike) as seen:
        pass
    row = [dense, dense, own, own]
    assert seen.sent["gathered"] == [vocabulary, *row, vocabulary, *row[::-1], vocabulary]
    assert seen.sent["reduced"] == [vocabulary, *row[::-1], vocabulary]
    told = sent_in_a_step(UNLIKE.kinds, {"layer": own, "dense": dense, "vocabulary": vocabulary})
    assert told[0] + Counter([own]) == Counter(seen.sent["gathered"])
    assert told[1] == told[2] == Counter(seen.sent["reduced"])
    assert beside_attention(layer)["copies"] == seen.copied
    # What a transfer brings is of the layer whose weights it has, whichever computes.
    wires = dict(layer.transfers(Sent("dense", "dense", "dense")))
    assert wires == dict(layer.of("dense").transfers(Sent("dense", "dense", "dense")))
    assert wires["weights"].nbytes == (8 // replicas - 1) * dense * replicas // 8 * dtype.itemsize


def sent_in_a_step(kinds: Kinds, sizes: dict[Weights, int]) -> list[Counter[int]]:
    """Elements that are gathered, reduced and replicated, and how often."""
    told = [Counter[int]() for _ in range(3)]
    around = Counter(one for some in sent_around(kinds, has_vocabulary=True) for one in some)
    for some in (around, *sent_beside(kinds, has_vocabulary=True, has_replicas=True)):
        for sent, times in some.items():
            for weights, counted in zip(sent[:3], told, strict=True):
                counted[sizes.get(weights, 0)] += times * bool(weights)
    return told


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("replicas", "expert"), [(1, 2), (2, 2), (1, 8), (2, 4)])
def test_what_fsdp_sends_and_copies_of_experts_that_are_dealt_to_ranks(
    replicas: int, expert: int, dtype: torch.dtype
) -> None:
    """They are sharded over ranks that have the same, perhaps over one alone, which casts and copies all the same."""
    model = replace(MODEL, experts=8, experts_per_token=2, vocab=0)
    layer = replace(
        layer_of(Division(Candidate(2), shards=4 // replicas, replicas=replicas, expert=expert), dtype), model=model
    )
    own, dealt, metp = layer.weights
    assert (own, dealt, metp) == (4 * 16 * 16 + 8 * 16, 8 // expert * 3 * 16 * 32, 0)
    assert layer.division.expert_ranks == 8 // replicas // expert
    check_two_groups(layer, (own, dealt), "experts' ", expert, lambda _: Dealt(8 // expert))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shards", "replicas"), [(4, 1), (2, 2), (1, 4)])
def test_what_fsdp_sends_and_copies_of_metps_weights(shards: int, replicas: int, dtype: torch.dtype) -> None:
    """Each context rank has its own, which it shares with ranks that have other sequences."""
    division = Division(Candidate(2, feed_forward="metp"), shards=shards, replicas=replicas)
    layer = replace(layer_of(division, dtype), model=replace(MODEL, vocab=0))
    own, experts, metp = layer.weights
    assert (own, experts, metp) == (4 * 16 * 16, 0, 3 * 16 * 32 // 2)
    check_two_groups(layer, (own, metp), "METP's ", 2, Ringed)


def check_two_groups(
    layer: Layer, sizes: tuple[int, int], whose: str, among: int, make: Callable[[DeviceMesh], nn.Module]
) -> None:
    """Of so many elements some are sharded over all ranks, others, ``apart``, dealt out among so many and then sharded.

    Perhaps over one alone, which casts and copies all the same.
    """
    dtype, replicas, (own, apart) = layer.sequence.dtype, layer.division.replicas, sizes
    layers, sharing = layer.model.layers, 8 // replicas // among
    with fake_world(8, 1):
        mesh = init_device_mesh("cpu", (replicas, sharing, among), mesh_dim_names=("replicas", "shards", "among"))
        every = mesh["shards", "among"]._flatten("every")
        whole = init_device_mesh("cpu", (replicas, 8 // replicas), mesh_dim_names=("replicas", "every"))
        stack = nn.ModuleList(make(mesh["among"]) for _ in range(layers))
        options: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(dtype, torch.float32)}
        options["reshard_after_forward"] = True
        for one in stack:
            fully_shard(one.apart, mesh=mesh["replicas", "shards"] if replicas > 1 else mesh["shards"], **options)
            fully_shard(one, mesh=whole if replicas > 1 else every, **options)
        with Watched(*(apart, apart // 3) * (sharing == 1)) as seen:
            x = torch.zeros(1, 8, 16, dtype=dtype)
            for one in stack:
                x = one(x)
            x.sum().backward()
    sent_over = Counter({own: layers}) + Counter({apart: layers * (sharing > 1)})
    assert Counter(seen.sent["gathered"]) == sent_over + sent_over
    assert Counter(seen.sent["reduced"]) == sent_over
    assert beside_attention(layer)["copies"] == seen.copied
    wires = dict(layer.transfers(Sent("layer", "layer", "layer")))
    parts = own * replicas // 8, apart // sharing
    assert Counter(seen.sent["replicated"]) == Counter(dict.fromkeys(parts, layers * (replicas > 1)))
    named = {"": (parts[0], 8 // replicas), whose: (parts[1], sharing)}
    for name, (part, ranks) in named.items():
        assert wires[f"{name}weights"].nbytes == (ranks - 1) * part * dtype.itemsize
        assert wires[f"{name}gradients"].nbytes == (ranks - 1) * part * 4
        assert wires[f"{name}replicas"].nbytes == 2 * (replicas - 1) * part * 4 // replicas


class Units(nn.Module):
    """METP's weights of a feed-forward, shared out among the ranks of a mesh."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        for name, shape, dim in (("gate", (32, 16), 0), ("up", (32, 16), 0), ("down", (16, 32), 1)):
            weight = distribute_tensor(torch.zeros(shape), mesh, [Shard(dim)])
            self.register_parameter(name, nn.Parameter(weight))

    def forward(self, x: Tensor) -> Tensor:
        gate, up, down = (getattr(self, name).to_local() for name in ("gate", "up", "down"))
        return F.linear(F.linear(x, gate) * F.linear(x, up), down)


class Ringed(nn.Module):
    """A layer's weights, of which METP has some."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.attention = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(4))
        self.apart = Units(mesh)

    def forward(self, x: Tensor) -> Tensor:
        for projection in self.attention:
            x = x + projection(x)
        return x + self.apart(x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("expert", [1, 2])
def test_what_fsdp_copies_of_experts_that_are_fewer_than_ranks(expert: int, dtype: torch.dtype) -> None:
    """As torchtitan has it: sharded by their second dim."""
    model = replace(MODEL, layers=1, experts=4, experts_per_token=2, vocab=0)
    layer = replace(layer_of(Division(Candidate(2), shards=4, expert=expert), dtype), model=model)
    with fake_world(8, 1):
        mesh = init_device_mesh("cpu", (8 // expert, expert), mesh_dim_names=("shards", "expert"))["shards"]
        experts = Experts(4 // expert)
        fully_shard(
            experts, mesh=mesh, mp_policy=MixedPrecisionPolicy(dtype, torch.float32), reshard_after_forward=True,
            shard_placement_fn=lambda _: Shard(1),
        )  # fmt: skip
        with Watched() as seen:
            experts(torch.zeros(1, 8, 16, dtype=dtype)).sum().backward()
    own, each = sum(p.numel() for p in Experts(4 // expert).parameters()), 4 * dtype.itemsize + dtype.itemsize + 4
    told = beside_attention(layer)["copies"] - each * (sum(layer.weights) - own)
    assert told == seen.copied
    with pytest.raises(NotImplementedError, match="uneven"), fake_world(12, 1):
        fully_shard(
            Experts(4), mesh=init_device_mesh("cpu", (12,)), shard_placement_fn=lambda _: Shard(1),
        )  # fmt: skip


class Experts(nn.Module):
    """All that a rank has, for every token."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Parameter(torch.zeros(number, 16, 32)) for _ in range(2))
        self.down = nn.Parameter(torch.zeros(number, 32, 16))

    def forward(self, x: Tensor) -> Tensor:
        return ((x @ self.gate) * (x @ self.up) @ self.down).sum(0, keepdim=True)


class Dealt(nn.Module):
    """A layer's weights, of a rank that has so many experts."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.attention = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(4))
        self.router = nn.Linear(16, 8, bias=False)
        self.apart = Experts(experts)

    def forward(self, x: Tensor) -> Tensor:
        for projection in self.attention:
            x = x + projection(x)
        return x + self.apart(x) * self.router(x).sum(-1, keepdim=True)


def alike(layers: int) -> Kinds:
    return (("layer", layers),)


def test_what_is_beside_a_layer_is_of_the_group_before_it_or_after_it() -> None:
    """Of three layers: what comes, what is reduced, and a group later what replicas sum."""
    one, end = "layer", "vocabulary"
    both = {"has_vocabulary": True, "has_replicas": True}
    forward, backward = sent_beside(alike(3), **both)
    assert forward == Counter([Sent(one), Sent(one), Sent(end)])
    assert backward == Counter([Sent(one, end), Sent(one, one, end), Sent(end, one, one)])
    assert sent_beside(alike(1), **both) == (Counter([Sent(end)]), Counter([Sent(end, end)]))
    after = Sent("", end, one), Sent("", "", end)
    assert sent_around(alike(1), has_vocabulary=True) == ((Sent(end), Sent(one)), (Sent("", one, end), *after))
    assert sent_around(alike(2), has_vocabulary=True) == ((Sent(end), Sent(one)), (Sent("", one, one), *after))
    assert sent_around(alike(1), has_vocabulary=False)[1][0] == Sent("", one, one)
    every = sent_beside(alike(3), has_vocabulary=False, has_replicas=True)
    assert every == (Counter({Sent(one): 3}), Counter({Sent(one, one, one): 3}))
    alone = sent_beside(alike(3), has_vocabulary=True, has_replicas=False)[1]
    assert alone == Counter([Sent(one, end), Sent(one, one), Sent(end, one)])
    # Of many those between are alike, and not written out.
    many = 10**15
    forward, backward = sent_beside(alike(many), **both)
    assert forward == {Sent(one): many - 1, Sent(end): 1}
    ends = {Sent(one, end): 1, Sent(one, one, end): 1, Sent(end, one, one): 1}
    assert backward == ends | {Sent(one, one, one): many - 3}
    few = sent_beside(alike(4), has_vocabulary=True, has_replicas=False)[1]
    assert few == {Sent(one, end): 1, Sent(one, one): 2, Sent(end, one): 1}


def test_first_layers_without_experts_have_weights_of_their_own_beside_others() -> None:
    """Of two before two others: what comes in the forward; and in the backward what is reduced, too, and summed."""
    row: Kinds = (("dense", 2), ("layer", 2))
    one, first, end = "layer", "dense", "vocabulary"
    forward, backward = sent_beside(row, has_vocabulary=True, has_replicas=True)
    assert [*forward.elements()] == [
        Sent(first, beside=first), Sent(one, beside=first), Sent(one), Sent(end),
    ]  # fmt: skip
    assert [*backward.elements()] == [
        Sent(one, end), Sent(first, one, end), Sent(first, one, one, first), Sent(end, first, one, first),
    ]  # fmt: skip
    after = Sent("", first, first), Sent("", end, first), Sent("", "", end)
    assert sent_around(row, has_vocabulary=True) == ((Sent(end), Sent(first)), after)
    assert sent_around((("dense", 1), ("layer", 3)), has_vocabulary=True)[1][0] == Sent("", first, one)
    alone = sent_beside(row, has_vocabulary=False, has_replicas=False)
    assert [*alone[0].elements()][-1] == Sent(one)
    assert [*alone[1].elements()][::3] == [Sent(one, one), Sent(first, first, "", first)]
    # Of many the two beside others are apart.
    many = sent_beside((("dense", 7), ("layer", 54)), has_vocabulary=True, has_replicas=True)
    assert many[0] == {Sent(first, beside=first): 6, Sent(one, beside=first): 1, Sent(one): 53, Sent(end): 1}
    assert many[1][Sent(first, first, first, first)] == 4
    assert many[1][Sent(one, one, one)] == 51
    assert many[1].total() == 61


def test_gradients_of_many_layers_are_counted_and_not_written_out() -> None:
    layer = layer_of(Division(Candidate(4), pipeline=2), torch.float32)
    few, more, many = (
        _ends(replace(layer, model=replace(MODEL, layers=2 * layers))).gradients.seconds for layers in (1, 2, 10**12)
    )
    assert many == pytest.approx(few + (10**12 - 1) * (more - few))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("microbatches", [1, 2, 3])
def test_what_a_stage_copies(microbatches: int, dtype: torch.dtype) -> None:
    """One of two stages, with one end of the vocabulary: the planner's are alike."""
    division = Division(Candidate(8), pipeline=2, microbatches=microbatches)
    model = Layer(division, MODEL, SequenceShape(64, dtype=dtype), layer_of(division, dtype).cluster)
    with watched(1, dtype, microbatches) as seen:
        pass
    told = beside_attention(model)["copies"]
    assert 2 * told == seen.copied
