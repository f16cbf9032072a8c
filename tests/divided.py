"""Small clusters, models and every way to divide them, for tests of the planner."""

from dataclasses import replace

import torch
from hypothesis import strategies as st

from wallfacer_dt import Cluster, Kernels, Link, ModelShape, SequenceShape
from wallfacer_dt.planning.candidates import Candidate, attentions
from wallfacer_dt.planning.dividing import divisions
from wallfacer_dt.planning.division import Division
from wallfacer_dt.planning.layer import Layer
from wallfacer_dt.planning.predict import AttentionCost, attention_costs
from wallfacer_dt.planning.step import OneWay, Spent, simulated_step

KERNELS = Kernels(1e11, 1e11, 1e11, 1e-5, 1e10, launch=0.0, takes_segments=False)
HOSTS = st.sampled_from([0.0, 1e-5, 1e-4])  # seconds of an operation
MODEL = ModelShape(hidden=64, heads=4, kv_heads=2, ffn=192, layers=4, vocab=100)
SEQUENCE = SequenceShape(256, is_causal=True, dtype=torch.bfloat16)


def cluster(ranks: int = 8, per_node: int = 4, **changes: object) -> Cluster:
    given = {"intra": Link(1e9, 1e-5), "inter": Link(4e8, 1e-4), "nics": per_node, "kernels": KERNELS}
    return Cluster(ranks, per_node, **(given | changes))


@st.composite
def divided(draw: st.DrawFn, **fixed: object) -> Layer:
    """A layer of any division of a small cluster, with any of its attentions."""
    per_node = draw(st.sampled_from([1, 2, 4]))
    kernels = replace(KERNELS, launch=draw(HOSTS))
    where = cluster(per_node * draw(st.sampled_from([1, 2, 4])), per_node, kernels=kernels)
    model = replace(
        MODEL, ffn=draw(st.sampled_from([192, 256])), gated=draw(st.booleans()), vocab=draw(st.sampled_from([0, 100]))
    )
    if draw(st.integers(0, 3)) == 0:
        model = replace(model, experts=4, experts_per_token=draw(st.integers(1, 4)))
        if dense := draw(st.integers(0, 3)):
            model = replace(model, dense_layers=dense, dense_ffn=draw(st.sampled_from([64, 1000])))
    sequence = replace(
        SEQUENCE, dtype=draw(st.sampled_from([torch.bfloat16, torch.float32])), is_causal=draw(st.booleans())
    )
    number = draw(st.sampled_from([1, 2, 4, 8]))
    every = [
        one for one in divisions(model, sequence, where, number)
        if all(getattr(one, name) == value for name, value in fixed.items())
    ]  # fmt: skip
    some = every or [one for one in divisions(model, sequence, where, 8) if one.pipeline == 1]
    if draw(st.integers(0, 3)) == 0:  # of which there are few
        some = [one for one in some if one.context.projections == "metp"] or some
    division = draw(st.sampled_from(some))
    heads = division.heads_of(model)
    attention = draw(st.sampled_from(attentions_of(division, heads, sequence, where)))
    context = replace(attention, **division.context.layers)
    return Layer(replace(division, context=context), model, replace(sequence, batch=division.microbatch), where)


def attentions_of(division: Division, heads: ModelShape, sequence: SequenceShape, where: Cluster) -> list[Candidate]:
    """Those that a division's layers can have: METP's attention goes without Ulysses."""
    some = attentions(heads, sequence, division.context_cluster(where))
    return [one for one in some if division.context.projections == "plain" or one.ulysses == 1]


def cost_of(layer: Layer) -> AttentionCost:
    """Of the layer's attention, where all layers have the same."""
    (cost,) = costs_of(layer)
    return cost


def costs_of(layer: Layer) -> tuple[AttentionCost, ...]:
    """Of the attention of each kind of layers."""
    division = layer.division
    return attention_costs(
        division.context, division.heads_of(layer.model), layer.sequence, division.context_cluster(layer.cluster),
        siblings=division.groups(layer.cluster)["context"].siblings,
    )  # fmt: skip


def layer_of(division: Division, **changes: object) -> Layer:
    return replace(
        Layer(division, MODEL, replace(SEQUENCE, batch=division.microbatch), cluster(division.size)), **changes
    )


def step_of(layer: Layer, ways: tuple[OneWay, OneWay]) -> Spent:
    """Of a pipeline on the slowest stage."""
    return max(simulated_step(layer, ways).values(), key=lambda step: step.seconds)
