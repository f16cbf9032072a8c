"""Peak memory of a call of attention on one rank."""

from dataclasses import replace
from functools import lru_cache

from wallfacer_dt.algorithms import Mask
from wallfacer_dt.layout import shard_sizes
from wallfacer_dt.planning.candidates import Candidate
from wallfacer_dt.planning.dry_run import Peaks, attention_peaks
from wallfacer_dt.planning.model import ModelShape, SequenceShape

_ENOUGH = 4  # blocks, after which a ring holds no more


def attention_memory(
    candidate: Candidate,
    model: ModelShape,
    sequence: SequenceShape,
    *,
    by_tokens: bool = False,
    index: int | None = None,
) -> Peaks:
    """What a call of attention holds: q, k, v, the output and lse, and in each way the most, these among it.

    Args:
        candidate: how ranks share the sequence.
        model: whose heads.
        sequence: what is attended.
        by_tokens: q, k, v and the output's gradient are (B, L, N, H) in memory, as projections make them, instead of
            (B, N, L, H).
        index: of the rank, in the sequence; None: the last of a ring and team with as many heads as any; where ranks
            differ the most of it, the first and the middle one (others may hold up to a fifth more); of a long ring
            that of a shorter one with shards as long, which holds as much.

    Returns:
        The bytes.
    """
    if index is not None:
        return _of_rank(candidate, model, sequence, by_tokens, index)
    # Nothing here depends on the others, and a plan asks for all of them.
    alike = replace(candidate, placement="team_in_node", feed_forward="plain", checkpoint="none")
    short = _shortened(alike, sequence)
    inner = short.ring * short.team
    cut = sequence if short == alike else _cut(sequence, alike, short)
    is_alike = sequence.mask == Mask() and cut.length % short.size == 0
    indices = {inner - 1} if is_alike else {0, inner // 2, inner - 1}
    found = [_of_rank(short, model, cut, by_tokens, one) for one in indices]
    return Peaks(*map(max, zip(*found, strict=True)))


@lru_cache(maxsize=1024)
def _of_rank(candidate: Candidate, model: ModelShape, sequence: SequenceShape, by_tokens: bool, index: int) -> Peaks:
    return attention_peaks(candidate, model, sequence, index, by_tokens=by_tokens)


def _shortened(candidate: Candidate, sequence: SequenceShape) -> Candidate:
    """With a ring of a few blocks, unless a window decides which of them are attended."""
    longest = _ENOUGH * candidate.hop
    is_long = candidate.ring > longest and not sequence.mask.spares_hops
    return replace(candidate, ring=longest) if is_long else candidate


def _cut(sequence: SequenceShape, candidate: Candidate, short: Candidate) -> SequenceShape:
    """With shards that are all as long as the longest."""
    return replace(sequence, length=max(shard_sizes(sequence.length, candidate.axes)) * short.size)
