"""A plan and a profile as JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from wallfacer_dt.command.planning.figures import Figures
from wallfacer_dt.command.planning.flags import flags_of
from wallfacer_dt.command.planning.usage import code_of
from wallfacer_dt.planning import Plan, Profile, Ranked
from wallfacer_dt.planning.dividing import DivisionPlan

_VERSION = 1


def plan_as_json(plan: Plan, figures: Figures) -> str:
    """A plan as one JSON document.

    Its keys are the attributes of :class:`wallfacer_dt.Plan` and of what it is made of, tuples are lists, times are
    seconds, sizes bytes, rates bytes or operations per second, and ``version`` says which schema it is; within one
    nothing is renamed or taken away::

        version     1
        model       hidden, heads, kv_heads, head_dim, ffn, gated, layers, vocab, experts, experts_per_token,
                    windowed_layers (those that window_size is for; null: all), shared_ffn, value_dim, kv_rank, q_rank,
                    rotary_dim, dense_layers (the first so many have no experts), dense_ffn
        sequence    length, batch, is_causal, window_size ([back, ahead], null: all), dtype, documents (tokens of
                    those packed into it, in turn and round again; empty: one)
        cluster     ranks, ranks_per_node, nics, memory (or null), striped_gathers, device_type
          intra, inter  bandwidth, latency
          kernels       forward, backward, linear, overhead, merge, copy, half_rows, attention (its name), launch,
                        takes_segments
        considered  how many attentions there were to choose from
        only        what all plans had to have, as text
        ranked[]    why, measured (or null), handicap (seconds by which a team is ranked behind its prediction); what
                    was measured first, fastest first, as many as --top
          candidate     ring, team, ulysses, placement, schedule, rotate, rotate_forward, order, feed_forward,
                        projections, checkpoint
          prediction    seconds, compute, exposed, overlapped, rank_bytes, node_bytes, hops, memory, host,
                        pipeline_rank (of divided ranks, the slowest of a pipeline)
        dropped[]   likewise: what was found not to fit, smallest first
        code        of the first, as text
        figures     of the first: tokens_per_second, mfu (or null), flops of the model in a step, peak of a rank (or
                    null), source of the cluster's (and a faster kernel), activation, left_out (what no number counts,
                    as text)
          time          attention, products, elementwise, copies, optimizer, transfers, host (as predicted)
          memory        weights, gradients, optimizer, gathered, kept, working
          origins       forward, backward, linear, merge, launch: who says the kernels' rates, as text

    Args:
        plan: the plan.
        figures: of its first.

    Returns:
        The text.
    """
    entries = _plan_entries(plan, code_of(plan, figures.activation)) | {"figures": figures.as_json(plan)}
    return json.dumps(entries, indent=1)


def divided_as_json(plan: DivisionPlan, figures: Figures) -> str:
    """Divided ranks as one JSON document, as ``--sequences`` prints it.

    ``version``, ``model``, ``sequence``, ``cluster`` and ``figures`` are as in :func:`plan_as_json`, and ::

        sequences   of a step, over all ranks
        considered  how many divisions there were to choose from
        only        what they all had to have, as text
        ranked[]    why; what fits, fastest first
          division    tensor, shards, replicas, pipeline, interleave (stages of a rank), last_less (layers that the last
                      stage has less), microbatch (sequences that a context group takes at a time), microbatches (how
                      many of these in a step), loss_chunks, expert, context (a candidate)
          prediction  as in a plan
        by_context[]  likewise: the fastest for every number of context ranks of which something fits
        contexts[]    all numbers of context ranks
        enough_context  of which no more make a step shorter by more than 1%
        flags       of torchtitan, for the first; as text

    Args:
        plan: the plan.
        figures: of its first.

    Returns:
        The text.
    """
    entries = _entries(plan) | {
        "sequences": plan.sequences,
        "by_context": [asdict(one) for one in plan.by_context],
        "contexts": list(plan.contexts),
        "enough_context": plan.enough_context(),
        "flags": flags_of(plan),
        "figures": figures.as_json(plan),
    }
    return json.dumps(entries, indent=1)


def profile_as_json(plan: Plan, profile: Profile, path: Path) -> str:
    """What was measured as one JSON document.

    All keys of :func:`plan_as_json` but ``figures``, by the cluster that was measured (of ``ranked[]`` more than
    ``--top``, since plans that differ in their placement alone are not all run), and ::

        measured[]  candidate (as above), predicted, measured: seconds of a step, in the order in which plans ran
        file        where it was written

    Args:
        plan: what was chosen.
        profile: what was measured.
        path: of the file.

    Returns:
        The text.
    """
    runs = [
        {"candidate": asdict(one.candidate), "predicted": one.prediction.seconds, "measured": one.measured}
        for one in runs_of(plan, profile)
    ]
    return json.dumps(_plan_entries(plan, code_of(plan)) | {"measured": runs, "file": str(path)}, indent=1)


def runs_of(plan: Plan, profile: Profile) -> Sequence[Ranked]:
    """The plans that were run, in the order in which they were."""
    by_candidate = {one.candidate: one for one in plan.ranked}
    return [by_candidate[run.candidate] for run in profile.measured if run.candidate in by_candidate]


def _plan_entries(plan: Plan, code: str) -> dict[str, Any]:
    return _entries(plan) | {"dropped": [asdict(one) for one in plan.dropped], "code": code}


def _entries(plan: Plan | DivisionPlan) -> dict[str, Any]:
    return {
        "version": _VERSION,
        "model": asdict(plan.model),
        "sequence": asdict(plan.sequence) | {"dtype": plan.sequence.dtype_name},
        "cluster": plan.cluster.as_json(),
        "considered": plan.considered,
        "only": plan.only,
        "ranked": [asdict(one) for one in plan.ranked],
    }
