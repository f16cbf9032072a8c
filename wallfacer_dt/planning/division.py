"""How ranks are divided among data, pipeline, tensor, context and expert parallelism, as data.

Ranks lie as in torchtitan's mesh, ``["pp", "dp_replicate", "dp_shard", "cp", "tp"]`` (``ParallelDims.build_mesh``):
those of a tensor group are neighbours, those of a pipeline far apart. Experts are dealt to ranks that share weights,
neighbours, ``["pp", "dp_replicate", "efsdp", "ep"]``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from wallfacer_dt.layout import check_length
from wallfacer_dt.planning.candidates import Candidate
from wallfacer_dt.planning.cluster import Cluster
from wallfacer_dt.planning.groups import Group
from wallfacer_dt.planning.model import Kinds, ModelShape, kinds_of


@dataclass(frozen=True, slots=True)
class Division:
    """One way to divide ranks.

    Attributes:
        context: how ranks share a sequence, and what layers are.
        tensor: ranks that split heads and hidden units, and between these the tokens (Megatron-LM with sequence
            parallelism; Korthikanti et al. 2022, section 4.2.2).
        shards: groups of context ranks, each with sequences of its own, that share weights with them: FSDP is over
            ``shards x context`` (ZeRO's stage 3; Rajbhandari et al. 2020, section 5); of weights that are METP's, which
            context ranks have each their own of, over ``shards``.
        replicas: of these, which have the same weights: above 1 it is HSDP (Zhao et al. 2023, section 3.2.2), or with
            nothing else to share weights, DDP.
        pipeline: ranks that have stages of their own, by 1F1B (Narayanan et al. 2021, section 2.2.1).
        microbatch: sequences that a context group takes at a time.
        microbatches: how many of these it takes in a step.
        expert: ranks among which experts are dealt out, each of whom takes their tokens of all (GShard; Lepikhin et al.
            2020, section 3); FSDP shards its experts over those of the weights' ranks that have the same.
        loss_chunks: parts of a context rank's tokens that go through output projection and loss one after the other,
            forward and backward.
        interleave: stages of a pipeline's rank: above 1 it is interleaved 1F1B (section 2.2.2).
        last_less: layers that a pipeline's last stage has less, for the output projection, see :meth:`stage_layers`.
    """

    context: Candidate
    tensor: int = 1
    shards: int = 1
    replicas: int = 1
    pipeline: int = 1
    microbatch: int = 1
    microbatches: int = 1
    expert: int = 1
    loss_chunks: int = 1
    interleave: int = 1
    last_less: int = 0

    def __post_init__(self) -> None:
        """Refuse (TypeError, ValueError) what is none, or has not been put together with METP or with experts."""
        for name in (
            "tensor", "shards", "replicas", "pipeline", "microbatch", "microbatches", "expert", "loss_chunks",
            "interleave",
        ):  # fmt: skip
            check_length(getattr(self, name), name)
        check_length(self.last_less, "last_less", 0)
        if self.weight_ranks % self.expert:
            given = f"{self.expert} and {self.weight_ranks}"
            raise ValueError(f"expert must divide the ranks that share weights, shards x context, got {given}")
        if self.expert > 1 and (self.tensor > 1 or self.context.feed_forward == "metp"):
            raise ValueError(
                f"expert must be 1 beside tensor parallelism or METP's feed-forward, got {self.expert}: experts are "
                "planned whole"
            )
        for name in ("feed_forward", "projections"):
            if getattr(self.context, name) == "metp" and self.tensor > 1:
                raise ValueError(f"{name} must be 'plain' beside tensor parallelism, got 'metp': it is planned without")

    @property
    def data(self) -> int:
        """Context groups with sequences of their own."""
        return self.shards * self.replicas

    @property
    def size(self) -> int:
        """All ranks."""
        return self.tensor * self.context.size * self.data * self.pipeline

    @property
    def sequences(self) -> int:
        """Of a step, over all ranks."""
        return self.data * self.microbatch * self.microbatches

    def stage_layers(self, model: ModelShape) -> tuple[int, ...]:
        """Layers of every stage, as torchtitan deals them out where the embedding counts as one, the output projection
        as ``last_less``: the first stages have one more than others, but for the very first. Some may come out as 0.
        """
        if self.pipeline == 1:
            return (model.layers,)
        stages = self.pipeline * self.interleave
        own, more = divmod(model.layers + 1 + self.last_less, stages)
        first, *others, last = [own + (stage < more) for stage in range(stages)]
        return first - 1, *others, last - self.last_less

    def stage_kinds(self, model: ModelShape) -> tuple[Kinds, ...]:
        """The same by the kinds of layers that a stage has."""
        layers = self.stage_layers(model)
        dense = _dense(layers, model)
        return tuple(map(kinds_of, dense, layers))

    def rank_layers(self, model: ModelShape) -> tuple[int, ...]:
        """Layers of every rank of a pipeline: of its stages, which are as far from each other as there are ranks."""
        layers = self.stage_layers(model)
        return tuple(sum(layers[rank :: self.pipeline]) for rank in range(self.pipeline))

    def rank_kinds(self, model: ModelShape) -> tuple[Kinds, ...]:
        """The same by kinds, in their order."""
        dense = _dense(self.stage_layers(model), model)
        each = (sum(dense[rank :: self.pipeline]) for rank in range(self.pipeline))
        return tuple(map(kinds_of, each, self.rank_layers(model)))

    def fullest_ranks(self, model: ModelShape) -> list[int]:
        """Ranks of a pipeline one of which, or the last, takes longest: of those that have equally many of a model's
        first layers without experts the first with most layers.
        """
        layers, fullest = self.rank_layers(model), dict[int, int]()
        for rank, kinds in enumerate(self.rank_kinds(model)):
            dense = dict(kinds).get("dense", 0)
            fullest[dense] = max(fullest.get(dense, rank), rank, key=layers.__getitem__)
        return [rank for rank in fullest.values() if layers[rank]]

    def in_flight(self, rank: int, layers: tuple[int, ...]) -> int:
        """Of how many layers and microbatches together a pipeline's rank has activations at most, by torch's schedules.

        Args:
            rank: which.
            layers: of each of its stages, or 1 to count stages and microbatches.

        Returns:
            Their number.
        """
        p, v, m = self.pipeline, self.interleave, self.microbatches
        if v == 1:
            return layers[0] * min(p - rank, m)
        each = m // max(1, m // p)  # microbatches that go through a stage before those of the next one
        first = min((v - 1) * each + 2 * (p - 1 - rank), v * m)  # forwards before any backward
        alive = sum(layers[n // each % v] for n in range(first))
        most = alive
        for n in range(min(v * m - first, v * each)):  # one forward more, then a backward; later ones are alike
            alive += layers[(first + n) // each % v]
            most = max(most, alive)
            alive -= layers[v - 1 - n // each % v]
        return most

    @property
    def bubble(self) -> float:
        """Idle time of a pipeline of like stages as a part of its work, of p ranks with v stages and m microbatches:
        (p - 1) / (v m) (Narayanan et al. 2021, section 2.2.2).
        """
        return (self.pipeline - 1) / (self.interleave * self.microbatches)

    @property
    def weight_ranks(self) -> int:
        """Over which FSDP shards."""
        return self.shards * self.context.size

    @property
    def expert_ranks(self) -> int:
        """Over which it shards an expert."""
        return self.weight_ranks // self.expert

    @property
    def adds_gradients(self) -> bool:
        """Whether gradients of microbatches are added up whole: in a pipeline, and of weights one rank alone has."""
        has_metp = "metp" in self.context.layers.values()
        return self.pipeline > 1 or self.weight_ranks == 1 or (has_metp and self.data == 1)

    def dealt_weights(self, model: ModelShape) -> int:
        """Elements of a layer's experts that a rank has where they are dealt out, otherwise 0."""
        return model.expert_weights // self.expert * (self.expert > 1)

    def metp_weights(self, model: ModelShape) -> int:
        """Elements of a layer's weights that a context rank has of METP."""
        context, mine = self.context, 0
        if context.feed_forward == "metp":
            units = -(-model.ffn // context.size)
            mine += units * (model.ffn_weights // max(1, model.ffn))
        if context.projections == "metp":
            rows = sum(-(-heads * model.dim // context.size) for heads in (model.heads, model.keys))
            mine += 2 * rows * model.hidden
        return mine

    def shards_by_second_dim(self, model: ModelShape) -> bool:
        """Whether an expert is sharded, and not by the number of experts: where ranks are more (torchtitan)."""
        return 0 < model.experts < self.weight_ranks and self.expert_ranks > 1

    def groups(self, cluster: Cluster) -> dict[str, Group]:
        """By axis: ``tensor``, ``context``, ``expert``, ``weights``, ``expert_weights`` and ``metp_weights`` (FSDP),
        ``replicas`` and ``pipeline``.
        """
        per_node = min(cluster.ranks, cluster.ranks_per_node)
        sharing = self.tensor * self.weight_ranks
        return {
            "tensor": Group(self.tensor, 1, per_node),
            "context": Group(self.context.size, self.tensor, per_node),
            "weights": Group(self.weight_ranks, self.tensor, per_node),
            "expert": Group(self.expert, self.tensor, per_node),
            "expert_weights": Group(self.expert_ranks, self.tensor * self.expert, per_node),
            "metp_weights": Group(self.shards, self.tensor * self.context.size, per_node),
            "replicas": Group(self.replicas, sharing, per_node),
            "pipeline": Group(self.pipeline, sharing * self.replicas, per_node),
        }

    def context_cluster(self, cluster: Cluster) -> Cluster:
        """The ranks of one context group, on links that are the cluster's."""
        group = self.groups(cluster)["context"]
        return replace(cluster, ranks=group.size, ranks_per_node=group.members)

    def heads_of(self, model: ModelShape) -> ModelShape:
        """The model with the query and key heads of a tensor rank; raises ValueError where they, or experts, do not
        divide.
        """
        if self.expert > 1 and (not model.experts or model.experts % self.expert):
            raise ValueError(f"expert must divide experts, got {self.expert} and {model.experts}")
        if self.tensor > 1 and model.kv_rank:
            raise ValueError(f"tensor must be 1 where kv_rank is not 0, got {self.tensor}: latents are not divided")
        for name in ("heads", "kv_heads"):
            if getattr(model, name) % self.tensor:
                raise ValueError(f"tensor must divide {name}, got {self.tensor} and {getattr(model, name)}")
        return replace(model, heads=model.heads // self.tensor, kv_heads=model.keys // self.tensor)

    def __str__(self) -> str:
        sizes = {
            "pipeline": self.pipeline, "replicas": self.replicas, "shards": self.shards,
            "context": self.context.size, "tensor": self.tensor,
        }  # fmt: skip
        named = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one rank"
        named += f", {self.interleave} stages each" * (self.interleave > 1)
        experts = f", experts dealt to {self.expert}" if self.expert > 1 else ""
        many = f", {self.microbatches} microbatches of {self.microbatch}" if self.microbatches > 1 else ""
        return f"{named}{experts}{many}: {self.context}"


def _dense(layers: Sequence[int], model: ModelShape) -> list[int]:
    """How many of a stage's layers are of a model's first, that have no experts."""
    before = accumulate(layers, initial=0)
    return [min(max(0, model.dense_layers - first), own) for first, own in zip(before, layers, strict=False)]
