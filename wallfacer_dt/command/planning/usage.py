"""The chosen plan as Python to paste: its mesh and its styles."""

import json
import textwrap
from collections.abc import Mapping
from typing import Any

from wallfacer_dt.layout import BY_DOCUMENT
from wallfacer_dt.planning import Plan

_ATTENTION = "layers.*.attention.inner_attention"
_PROJECTIONS = "layers.*.attention"
_FEED_FORWARD = "layers.*.feed_forward"
_WIDTH = 100
_INDENT = "    "
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
    has_metp, has_projections = it.feed_forward == "metp", it.projections == "metp"
    names = ["METPAttentionParallel"] * has_projections + ["METPParallel"] * has_metp
    names += ["TokenOrder", "WallFacerParallel", "context_mesh", "sequence_positions", "shard_sequence"]
    lines = [
        textwrap.fill(f"from wallfacer_dt import ({', '.join(names)})", _WIDTH, subsequent_indent=_INDENT),
        # Devices, too, may be anyone's word.
        f"mesh = context_mesh({json.dumps(plan.cluster.device_type)}, ring={it.ring}, team={it.team}, "
        f'ulysses={it.ulysses}, placement="{it.placement}")',
        f'order = TokenOrder("{it.order}", mesh)',
    ]
    where, inner = (_PROJECTIONS, "projected") if has_projections else (_ATTENTION, "attention")
    if plan.has_two_masks:
        for name, options in (("windowed", {}), ("unwindowed", {"window_size": None})):
            lines.append(_attention_line(name, plan.attention_options | options))
            lines += [f"{name} = {_projected(plan, name)}"] * has_projections
        lines += [
            f"windows = ...  # the {plan.model.windowed_layers} of {plan.model.layers} layers that have one, by number",
        ]
        # Nobody knows here which layers these are: as it stands the code raises.
        name = where.replace("*", "{i}")
        each = f'f"{name}": windowed if i in windows else unwindowed for i in range({plan.model.layers})'
        lines.append(f"styles = {{\n    {each}\n}}")
    else:
        lines.append(_attention_line("attention", plan.attention_options))
        lines += [f"projected = {_projected(plan, 'attention')}"] * has_projections
        lines.append(f'styles = {{"{where}": {inner}}}')
    if has_projections:
        lines[-1] += "  # called with cos and sin, and without a mask"
    if has_metp:
        weights = 'up="w3", down="w2", gate="w1"' if plan.model.gated else 'up="w1", down="w2"'
        lines.append(f'styles["{_FEED_FORWARD}"] = METPParallel({weights}, activation="{activation}")')
    lines.append("parallelize_module(model, mesh, styles)  # torch.distributed.tensor.parallel")
    if plan.sequence.documents:
        lines.append(
            "cu_seqlens = torch.tensor(...)  # where documents begin, and the last one ends: every call takes it"
        )
    dealt = ", cu_seqlens=cu_seqlens" * (it.order == BY_DOCUMENT)
    lines += [
        f"tokens = shard_sequence(tokens, order, dim=1{dealt})  # and labels, once they are shifted",
        "# for RoPE, which else counts from 0 on every rank",
        f"positions = sequence_positions({plan.sequence.length}, order{dealt})",
    ]
    if it.checkpoint in _CHECKPOINTS:
        lines.append(f"# {_CHECKPOINTS[it.checkpoint]}")
    return "\n".join(lines)


def _projected(plan: Plan, attention: str) -> str:
    return (
        "METPAttentionParallel(\n"
        f'    query="wq", key="wk", value="wv", output="wo", head_dim={plan.model.dim}, rotary="interleaved",\n'
        f"    attention={attention}\n)"
    )


def _attention_line(name: str, options: Mapping[str, Any]) -> str:
    options = {name: value for name, value in options.items() if value is not None}
    if options["kernel"] == "auto":
        del options["kernel"]
    # A kernel's name may be anyone's, from the file of a profile.
    said = [
        f"{name}={json.dumps(value, ensure_ascii=False) if isinstance(value, str) else value}"
        for name, value in options.items()
    ]
    arguments = ["order=order", *said]
    line = f"{name} = WallFacerParallel({', '.join(arguments)})"
    if len(line) <= _WIDTH:
        return line
    # A line ends between arguments, not within the pair of a window.
    whole = ", ".join(argument.replace(" ", "\0") for argument in arguments)
    filled = textwrap.fill(whole, _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT).replace("\0", " ")
    return f"{name} = WallFacerParallel(\n{filled}\n)"
