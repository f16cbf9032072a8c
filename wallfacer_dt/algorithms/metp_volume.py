"""What one rank receives in one call of METP: closed formulas, independent of the loops (METP, sections 3.2 and 4.2).

p ranks, D the model dim, F hidden units of which a rank holds F/p, w elements of a unit's weights: 2 D without a gate
and 3 D with one, a bias more for each projection to the hidden.

    feed-forward, forward     (p-1) w F/p                 each other rank's units once
    feed-forward, backward    2 (p-1) w F/p               again, and their gradients on their way home: wide, but for
                                                          the last hop

With F = 4 h and w = 2 h this is table 1's 24 (p-1)/p h^2. Where F does not divide, the longest shard counts.

    attention, forward        W - W/p + inner             W: elements of all four projections
    attention, backward       W - W/p + R + inner         R: (p-1) (ceil(n/p) for all n, and again those of one's own)

n are the elements of an owner's part of a group of heads, of which there are W/p in all for every rank: R is
(1 + 1/p) (p-1)/p W where everything divides. ``inner`` is this package's attention, once for every group of heads.
Table 2 has 12 log2(p) h^2 for W = 4 h^2: the paper counts log2(p) times what is broadcast or reduced, as a tree of
sends would; what a rank receives of a broadcast is what is sent, once. It also lets nothing be received of what a rank
holds, and reduces in two steps of 1/p each.
"""

from collections.abc import Collection, Sequence
from functools import partial

import torch

from wallfacer_dt.algorithms.head_groups import OUT, head_groups
from wallfacer_dt.algorithms.heads import check_heads
from wallfacer_dt.algorithms.volume import AttentionVolume, Volume, attention_volume
from wallfacer_dt.kernels.merge import accumulation_dtype
from wallfacer_dt.layout import check_length, shard_sizes


def feed_forward_volume(
    axes: Sequence[int],
    *,
    model_dim: int,
    hidden: int,
    dtype: torch.dtype,
    gated: bool = False,
    biases: int = 0,
    out_dim: int | None = None,
) -> tuple[Volume, Volume]:
    """What one rank receives in one call of METP's feed-forward, whatever its tokens; without the last bias.

    Args:
        axes: sizes of the mesh's axes that the weights are sharded over.
        model_dim: D.
        hidden: F.
        dtype: of x and the weights.
        gated: with a gate.
        biases: of the projections to the hidden, how many have one.
        out_dim: of the output, where it is another than D.

    Returns:
        Forward and backward.

    Raises:
        TypeError: a size is no int.
        ValueError: sizes that are none.
    """
    out_dim = model_dim if out_dim is None else out_dim
    named = [("model_dim", model_dim), ("hidden", hidden), ("out_dim", out_dim), *(("an axis", axis) for axis in axes)]
    for name, size in named:
        check_length(size, name)
    check_length(biases, "biases", least=0)
    sizes = shard_sizes(hidden, tuple(axes))
    unit = model_dim * (2 if gated else 1) + biases + out_dim
    hops, hop = len(sizes) - 1, max(sizes) * unit
    sent, home = hops * hop * dtype.itemsize, min(hops, 1) * hop * dtype.itemsize
    carried = max(hops - 1, 0) * hop * accumulation_dtype(dtype).itemsize
    return Volume(hops * hop, 0, sent), Volume(2 * hops * hop, 0, sent + carried + home)


def metp_attention_volume(
    ring: int,
    team: int,
    *,
    batch: int,
    length: int,
    model_dim: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    bias: bool = False,
    fused: bool = False,
    out_dim: int | None = None,
    schedule: str = "2d",
    rotate: str = "auto",
    rotate_forward: str = "auto",
    hops: Collection[int] | None = None,
    index: int = 0,
) -> AttentionVolume:
    """What one rank receives in one call of METP's attention; without the last bias.

    Args:
        ring: R.
        team: C; p = R C.
        batch: B.
        length: of the whole sequence.
        model_dim: D.
        heads: query heads.
        kv_heads: key and value heads.
        head_dim: H.
        dtype: of x and the weights.
        bias: of the projections to q, k and v.
        fused: one weight holds q, k and v.
        out_dim: of the output, where it is another than D.
        schedule: of the inner attention, as for :func:`attention_volume`.
        rotate: likewise.
        rotate_forward: likewise.
        hops: likewise.
        index: sequence index of the rank.

    Returns:
        Forward and backward, with the rotations of the inner attention.

    Raises:
        TypeError: a size is no int.
        ValueError: heads that do not divide, or what :func:`attention_volume` refuses.
    """
    out_dim = model_dim if out_dim is None else out_dim
    for name, size in (("ring", ring), ("team", team), ("head_dim", head_dim)):
        check_length(size, name)
    for name, size in (("model_dim", model_dim), ("out_dim", out_dim)):
        check_length(size, name, least=0)
    check_heads(heads, kv_heads)
    p = ring * team
    groups = head_groups(heads, kv_heads, head_dim, (ring, team), fused=fused)
    attention = partial(
        attention_volume, ring, team, batch=batch, length=length, head_dim=head_dim, dtype=dtype, schedule=schedule
    )
    n, m = groups[0].heads.counts
    chosen = attention(heads=n, kv_heads=m, rotate=rotate, rotate_forward=rotate_forward)
    rotations = {"rotate": chosen.rotate, "rotate_forward": chosen.rotate_forward}
    inward, outward = model_dim + bias, out_dim
    forward = backward = Volume(0, 0, 0)
    for group in groups:
        for owner, pieces in group.by_owner.items():
            n = sum(piece.length * (outward if piece.part == OUT else inward) for piece in pieces)
            sent = n if owner != index else 0
            reduced = (p - 1) * -(-n // p) * (2 if owner == index else 1)
            forward += Volume(sent, 0, sent * dtype.itemsize)
            backward += Volume(sent + reduced, 0, (sent + reduced) * dtype.itemsize)
        n, m = group.heads.counts
        inner = attention(heads=n, kv_heads=m, **rotations, hops=hops, index=index)
        forward, backward = forward + inner.forward, backward + inner.backward
    return AttentionVolume(forward, backward, **rotations)
