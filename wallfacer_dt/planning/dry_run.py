"""Running what attention and METP do on one rank that does not exist, to see what is alive there.

The operators' own bodies run, on tensors of the meta device, which have a size and no contents, and in process groups
that have a size and no members: nothing is sent. torch's CPU kernels stand for its flash attention on CUDA, whose
workspace in a backward is added.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wallfacer_dt.calls import said
from wallfacer_dt.collectives.groups import absent_group
from wallfacer_dt.compiler import SOURCES
from wallfacer_dt.inputs import AttentionInputs
from wallfacer_dt.layout import shard_sizes
from wallfacer_dt.mesh import ContextGroups
from wallfacer_dt.metp.attention import BlockOptions, metp_attention_backward_body, metp_attention_body
from wallfacer_dt.metp.feed_forward import FeedForwardOptions, feed_forward_backward_body
from wallfacer_dt.ops import attention_backward_body, attention_body
from wallfacer_dt.options import AttentionOptions, Options, Setting
from wallfacer_dt.planning.alive import Alive
from wallfacer_dt.planning.candidates import Candidate
from wallfacer_dt.planning.model import ModelShape, SequenceShape

_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class Peaks(NamedTuple):
    """Bytes that are alive: after the forward, and the most in either way; the inputs, and what is given, among them.

    Mostly that is in the backward; it is in the forward above all where that gathers queries, of many heads, and the
    backward does not.
    """

    kept: int
    most: int


def attention_peaks(
    candidate: Candidate, model: ModelShape, sequence: SequenceShape, index: int, *, by_tokens: bool
) -> Peaks:
    """Run a call of attention, forward and backward.

    Args:
        candidate: how ranks share the sequence.
        model: whose heads.
        sequence: what is attended.
        index: sequence index of the rank.
        by_tokens: q, k, v and the output's gradient lie as (B, L, N, H) in memory, as projections make them.

    Returns:
        What was alive.
    """
    rows = shard_sizes(sequence.length, candidate.axes, candidate.order)[index]

    def tensor(heads: int, dim: int) -> Tensor:
        shape = (sequence.batch, rows, heads, dim) if by_tokens else (sequence.batch, heads, rows, dim)
        x = torch.empty(shape, dtype=sequence.dtype, device="meta")
        return x.transpose(1, 2) if by_tokens else x

    q, k = tensor(model.heads, model.dim), tensor(model.keys, model.dim)
    v = tensor(model.keys, model.dim_of_values)
    options = _options(candidate, sequence, index)
    documents = sequence.cu_seqlens
    inputs, on_host = AttentionInputs(q, k, v, cu_seqlens=documents), 0 if documents is None else documents.nbytes
    with _following(q, k, v, documents) as alive:
        out, lse, number = attention_body(*inputs, *options.told())
        kept = alive.now - on_host
        grads = attention_backward_body(torch.empty_like(out), *inputs, out, lse, number, *options.told())
        del grads
        return Peaks(kept, alive.peak - on_host)


def feed_forward_peak(candidate: Candidate, model: ModelShape, sequence: SequenceShape) -> int:
    """The most that METP's backward holds beyond x, the output's gradient and this rank's own weights.

    Args:
        candidate: how many ranks share the weights.
        model: whose feed-forward.
        sequence: of which a rank has its tokens.

    Returns:
        The bytes; the gradients of x and of the own weights are among them.
    """
    units = shard_sizes(model.ffn, candidate.axes)
    tokens = sequence.batch * shard_sizes(sequence.length, candidate.axes)[0]
    size = len(units)
    options = FeedForwardOptions(absent_group(size - 1, size), size - 1, model.ffn, units, "silu", "")

    def tensor(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=sequence.dtype, device="meta")

    x, grad_out, down = tensor(tokens, model.hidden), tensor(tokens, model.hidden), tensor(model.hidden, units[-1])
    up, gate = (tensor(units[-1], model.hidden) for _ in range(2))
    weights = (up, gate, down) if model.gated else (up, down)
    with _following(x, grad_out, *weights) as alive:
        given = alive.now
        grads = feed_forward_backward_body(
            grad_out, x, up, gate if model.gated else None, down, None, None, said(0, 0), *options
        )
        del grads
        return alive.peak - given


def projected_peak(
    candidate: Candidate, model: ModelShape, sequence: SequenceShape, index: int, axes: tuple[int, ...], holder: int
) -> int:
    """The most that METP's attention holds beyond x, y, its gradient and this rank's own weights, in either way.

    Args:
        candidate: how ranks share the sequence.
        model: whose heads.
        sequence: what is attended.
        index: sequence index of the rank.
        axes: of the mesh that weights are sharded over, which may be a larger one.
        holder: index of the rank there.

    Returns:
        The bytes; attention's output and its lse, and the gradients of x and of the own weights, are among them.
    """
    rows, size = shard_sizes(sequence.length, candidate.axes, candidate.order)[index], math.prod(axes)
    block = BlockOptions(
        model.heads, model.keys, model.dim, "", axes, tuple(range(size)), holder, absent_group(holder, size), ""
    )

    def tensor(*shape: int, dtype: torch.dtype = sequence.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    own_q, own_kv = (shard_sizes(heads * model.dim, axes)[holder] for heads in (model.heads, model.keys))
    x, grad_y = (tensor(sequence.batch, rows, model.hidden) for _ in range(2))
    q, k, v = (tensor(n, model.hidden) for n in (own_q, own_kv, own_kv))
    out = tensor(model.hidden, own_q)
    absent, documents = (None,) * 6, sequence.cu_seqlens  # biases, cos and sin, document_ids
    inputs = x, q, k, v, out, *absent, documents
    told = block.told(), *_options(candidate, sequence, index).told()[:-1]
    with _following(x, grad_y, q, k, v, out, documents) as alive:
        given = alive.now
        y, *results = metp_attention_body(*inputs, *told)
        forward = alive.peak - y.nbytes
        del y
        alive.reset()
        grads = metp_attention_backward_body(grad_y, *inputs, *results, *told)
        del grads
        return max(forward, alive.peak) - given


@contextmanager
def _following(*given: Tensor | None) -> Iterator[Alive]:
    there = [x for x in given if x is not None]
    with torch.no_grad(), Alive(*there, are_resized=False, workspace=_workspace) as alive:
        yield alive


def _workspace(func: Any, args: tuple) -> int:
    """Of a backward of torch's flash attention on CUDA, in half precision, in whose place the CPU's runs here.

    A float32 sum of dq with its rows' delta and, for grouped heads, dk and dv of every query head (``mha_bwd`` of
    flash_api.cpp). What is said with it is 3% to 10% above the most of a call on an H200; what was said without it was
    exceeded by 10% to 26%. Of packed documents one at a time is seen, where a call on CUDA has many, and 128 rows more
    for each.
    """
    if func is not _BACKWARD or args[1].itemsize > 2:
        return 0
    (batch, heads, rows, dim), (_, kv_heads, columns, _) = args[1].shape, args[2].shape
    expanded = 2 * columns * dim * args[1].itemsize if kv_heads < heads else 0
    multiple = 32 if dim <= 128 else 64
    return batch * heads * (rows * (-(-dim // multiple) * multiple + 1) * 4 + expanded)


def _options(candidate: Candidate, sequence: SequenceShape, index: int) -> Options:
    place, inner = candidate.place(index), candidate.ring * candidate.team
    options = AttentionOptions(
        is_causal=sequence.is_causal, window_size=sequence.window_size, length=sequence.length,
        schedule=candidate.schedule, rotate=candidate.rotate, rotate_forward=candidate.rotate_forward,
    )  # fmt: skip
    names = (
        absent_group(place.ulysses_rank, place.ulysses),
        absent_group(place.ring_rank, place.ring),
        absent_group(place.team_rank, place.team),
    )
    groups = ContextGroups(place, names)
    if candidate.schedule == "published" and candidate.team > 1:
        groups = groups._replace(context=absent_group(place.inner_index, inner), context_ranks=tuple(range(inner)))
    setting = Setting(options=options, order=candidate.order, groups=groups)
    return Options(1.0, 0.0, setting, SOURCES)
