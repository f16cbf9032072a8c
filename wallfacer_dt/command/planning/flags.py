"""A division as flags of torchtitan 0.3.0, as ``recipes.torchtitan`` takes them, and what these cannot say."""

import math
import shlex
from collections.abc import Iterator
from dataclasses import replace

import torch

from wallfacer_dt.layout import BY_DOCUMENT
from wallfacer_dt.planning.candidates import node_of
from wallfacer_dt.planning.dividing import DivisionPlan

_BALANCERS = {"head_tail": "headtail", BY_DOCUMENT: "document_headtail", "contiguous": "None"}
_CHECKPOINTS = {"none": "none", "attention": "full", "full": "full"}


def flags_of(plan: DivisionPlan) -> str:
    """Flags for the chosen division, and a comment for everything that they cannot say.

    Args:
        plan: the plan.

    Returns:
        Lines of a shell.
    """
    it, context = plan.chosen, plan.chosen.context
    parallelism = {
        "data_parallel_replicate_degree": it.replicas,
        "data_parallel_shard_degree": it.shards,
        "tensor_parallel_degree": it.tensor,
        "pipeline_parallel_degree": it.pipeline,
        "context_parallel_degree": context.size,
        "context_parallel_ulysses": context.ulysses,
        "context_parallel_ring": context.ring,
        "context_parallel_team": context.team,
        "context_parallel_schedule": context.schedule,
        "context_parallel_rotate": context.rotate,
        "context_parallel_rotate_forward": context.rotate_forward,
        "context_parallel_load_balancer": _BALANCERS[context.order],
    }
    if plan.cluster.kernels.attention != "auto":
        parallelism["context_parallel_kernel"] = shlex.quote(plan.cluster.kernels.attention)
    if it.expert > 1:
        parallelism |= {"expert_parallel_degree": it.expert}
    if it.pipeline > 1:
        parallelism |= {"pipeline_parallel_schedule": "1F1B", "pipeline_parallel_microbatch_size": it.microbatch}
        if it.interleave > 1:
            parallelism["pipeline_parallel_schedule"] = "Interleaved1F1B"
        if it.interleave > 2 and (layers := _layers_per_stage(plan)) is not None:
            parallelism["pipeline_parallel_layers_per_stage"] = layers
        less = {"first": 1, "last": it.last_less}  # see Division.stage_layers
        parallelism |= {f"pipeline_parallel_{end}_stage_less_layers": layers for end, layers in less.items()}
    # Of a pipeline all microbatches are one batch; otherwise gradients of one after the other are added up.
    local = it.microbatch * (it.microbatches if it.pipeline > 1 else 1)
    training = {"local_batch_size": local, "global_batch_size": plan.sequences, "seq_len": plan.sequence.length}
    if plan.sequence.dtype == torch.float32:  # otherwise torchtitan computes in bfloat16
        training |= {"mixed_precision_param": "float32"}
    lines = [f"--parallelism.{name} {value}" for name, value in parallelism.items()]
    lines += [f"--training.{name} {value}" for name, value in training.items()]
    lines.append(f"activation-checkpoint:{_CHECKPOINTS[context.checkpoint]}")
    return "\n".join([*(f"{line} \\" for line in lines[:-1]), lines[-1], *(f"# {note}" for note in _notes(plan))])


def _layers_per_stage(plan: DivisionPlan) -> int | None:
    """By which torchtitan has as many stages as are planned, if there is such a number."""
    stages, layers = plan.chosen.pipeline * plan.chosen.interleave, plan.model.layers + 1 + plan.chosen.last_less
    each = -(-layers // stages)
    return each if -(-layers // each) == stages else None


def _notes(plan: DivisionPlan) -> Iterator[str]:
    it, context = plan.chosen, plan.chosen.context
    if it.interleave > 2 and _layers_per_stage(plan) is None:
        yield f"torchtitan has no flag for {it.interleave} stages a rank of so many layers: say which are whose"
    if context.feed_forward == "metp":
        yield "METP's feed-forward is not the recipe's: apply wallfacer_dt.METPParallel"
    if context.projections == "metp":
        yield "METP's attention is not the recipe's: apply wallfacer_dt.METPAttentionParallel"
    if context.checkpoint == "full":
        yield "the recipe saves attention in every mode, which takes more memory than this plan"
    if not plan.sequence.is_causal:
        yield "the recipe's language models are causal, and it has no option for a full mask"
    if plan.sequence.documents:
        yield "documents are the loader's to tell: of a text's paragraphs --dataloader.documents"
    if plan.sequence.dtype == torch.float16:
        yield "torchtitan trains in bfloat16 or float32, not in float16"
    if plan.sequence.window_size is not None:
        yield "the recipe has the windows of its models, and no option for another"
    # torchtitan's Trainer has context ranks take two parts each whatever the balancer; the recipe's check does not.
    divisor = math.lcm(it.tensor * (2 * context.size if context.size > 1 else 1), it.loss_chunks * context.size)
    if plan.sequence.length % divisor:
        yield f"torchtitan needs sequences that {divisor} divides"
    placement = "team_in_node" if context.order == "contiguous" else "ulysses_in_node"
    members = it.groups(plan.cluster)["context"].members
    if (node_of(context, members) != node_of(replace(context, placement=placement), members)).any():
        yield f"the recipe places ranks {placement.replace('_', ' ')}, this plan {context.placement.replace('_', ' ')}"
