"""The chosen plan as Python to paste: its mesh and its styles."""

import json
import textwrap

from wallfacer_dt.planning import Plan

_ATTENTION = "layers.*.attention.inner_attention"
_PROJECTIONS = "layers.*.attention"
_FEED_FORWARD = "layers.*.feed_forward"
_WIDTH = 100
_CHECKPOINTS = {
    "attention": "wrap layers: checkpoint(layer, x, use_reentrant=False, context_fn=save_attention())",
    "full": "wrap layers: checkpoint(layer, x, use_reentrant=False)",
}


def code_of(plan: Plan, activation: str = "silu") -> str:
    """Code that uses the chosen plan, with the names of torchtitan's Llama 3, and of Llama's own for METP's attention.

    Args:
        plan: the plan.
        activation: of the feed-forward.

    Returns:
        Lines of Python.
    """
    it = plan.chosen
    has_metp = it.feed_forward == "metp"
    has_projections = it.projections == "metp"
    names = ["METPAttentionParallel"] * has_projections + ["METPParallel"] * has_metp
    names += ["TokenOrder", "WallFacerParallel", "context_mesh", "shard_sequence"]
    lines = [
        f"from wallfacer_dt import {', '.join(names)}",
        f'mesh = context_mesh("{plan.cluster.device_type}", ring={it.ring}, team={it.team}, ulysses={it.ulysses}, '
        f'placement="{it.placement}")',
        f'order = TokenOrder("{it.order}", mesh)',
        _attention_line(plan),
    ]
    if has_projections:
        lines += [
            f"projected = METPAttentionParallel(\n"
            f'    query="wq", key="wk", value="wv", output="wo", head_dim={plan.model.dim}, rotary="interleaved",\n'
            "    attention=attention\n)",
            f'styles = {{"{_PROJECTIONS}": projected}}  # called with cos and sin, and without a mask',
        ]
    else:
        lines.append(f'styles = {{"{_ATTENTION}": attention}}')
    if has_metp:
        weights = 'up="w3", down="w2", gate="w1"' if plan.model.gated else 'up="w1", down="w2"'
        lines.append(f'styles["{_FEED_FORWARD}"] = METPParallel({weights}, activation="{activation}")')
    lines.append("parallelize_module(model, mesh, styles)  # torch.distributed.tensor.parallel")
    lines.append("tokens = shard_sequence(tokens, order, dim=1)")
    if it.checkpoint in _CHECKPOINTS:
        lines.append(f"# {_CHECKPOINTS[it.checkpoint]}")
    return "\n".join(lines)


def _attention_line(plan: Plan) -> str:
    options = {name: value for name, value in plan.attention_options.items() if value is not None}
    if options["kernel"] == "auto":
        del options["kernel"]
    # A kernel's name may be anyone's, from the file of a profile.
    said = [
        f"{name}={json.dumps(value, ensure_ascii=False) if isinstance(value, str) else value}"
        for name, value in options.items()
    ]
    arguments = ["order=order", *said]
    line = f"attention = WallFacerParallel({', '.join(arguments)})"
    if len(line) <= _WIDTH:
        return line
    indent = "    "
    # A line ends between arguments, not within the pair of a window.
    whole = ", ".join(argument.replace(" ", "\0") for argument in arguments)
    filled = textwrap.fill(whole, _WIDTH, initial_indent=indent, subsequent_indent=indent).replace("\0", " ")
    return f"attention = WallFacerParallel(\n{filled}\n)"
