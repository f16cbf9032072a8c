"""Peak memory of a call of attention on one rank."""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from wallfacer_dt.algorithms.masks import Mask
from wallfacer_dt.layout import shard_sizes
from wallfacer_dt.planning.attention import head_patterns
from wallfacer_dt.planning.candidates import Candidate
from wallfacer_dt.planning.dry_run import Peaks, attention_peaks, projected_peak
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
    """What a call of attention holds: q, k, v, the output and lse, and the most in either way, these among it.

    Args:
        candidate: how ranks share the sequence.
        model: whose heads.
        sequence: what is attended.
        by_tokens: q, k, v and the output's gradient are (B, L, N, H) in memory, as projections make them, instead of
            (B, N, L, H).
        index: of the rank, in the sequence; None: the most of some, where ranks differ (others may hold up to a tenth
            more); of a long ring that of a shorter one with shards as long, which holds as much.

    Returns:
        The bytes.
    """
    if index is not None:
        return _of_rank(candidate, model, sequence, index, by_tokens=by_tokens)
    short, cut = _short(candidate, sequence)
    found = [_of_rank(short, model, cut, one, by_tokens=by_tokens) for one in _asked(short, model, cut)]
    return Peaks(*map(max, zip(*found, strict=True)))


def projected_memory(candidate: Candidate, model: ModelShape, sequence: SequenceShape) -> int:
    """The most that METP's attention holds beyond x, y's gradient and the rank's own weights.

    Args:
        candidate: how ranks share the sequence and the weights.
        model: whose heads.
        sequence: what is attended.

    Returns:
        The bytes, of some ranks as for :func:`attention_memory`; each with weights of a group in the middle, when
        others' weights come and gradients leave.
    """
    short, cut = _short(candidate, sequence)
    holder = candidate.size // 2
    return max(
        _projected_of_rank(short, model, cut, index, candidate.axes, holder) for index in _asked(short, model, cut)
    )


def _short(candidate: Candidate, sequence: SequenceShape) -> tuple[Candidate, SequenceShape]:
    """A candidate and a sequence of which a rank holds as much."""
    # Nothing here depends on the others, and a plan asks for all of them.
    layers = {"feed_forward": "plain", "projections": "plain", "checkpoint": "none"}
    alike = replace(candidate, placement="team_in_node", **layers)
    short = _shortened(alike, sequence)
    return short, sequence if short == alike else _cut(sequence, alike, short)


def _asked(candidate: Candidate, model: ModelShape, sequence: SequenceShape) -> Iterator[int]:
    """Ranks of which one holds about as much as any."""
    inner, ulysses = candidate.ring * candidate.team, candidate.ulysses
    tokens_are_alike = sequence.mask == Mask() and sequence.length % candidate.size == 0
    heads_are_alike = model.heads % ulysses == model.keys % ulysses == 0
    for place in {0} if heads_are_alike else _ends(ulysses) | set(head_patterns(candidate, model).values()):
        for index in {inner - 1} if tokens_are_alike else {1 % inner, inner - 1 - 1 % inner} | _ends(inner):
            yield place * inner + index


def _ends(size: int) -> set[int]:
    return {0, size // 2, size - 1}


_of_rank = lru_cache(maxsize=1024)(attention_peaks)
_projected_of_rank = lru_cache(maxsize=1024)(projected_peak)


def _shortened(candidate: Candidate, sequence: SequenceShape) -> Candidate:
    """With a ring of a few blocks, unless a window decides which of them are attended."""
    longest = _ENOUGH * candidate.hop
    is_long = candidate.ring > longest and not sequence.mask.spares_hops
    return replace(candidate, ring=longest) if is_long else candidate


def _cut(sequence: SequenceShape, candidate: Candidate, short: Candidate) -> SequenceShape:
    """With shards that are all as long as the longest."""
    return replace(sequence, length=max(shard_sizes(sequence.length, candidate.axes)) * short.size)
