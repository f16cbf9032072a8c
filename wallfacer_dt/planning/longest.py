"""The longest sequence that fits into memory, by any plan."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from wallfacer_dt.planning.candidates import Candidate, attentions, with_layers
from wallfacer_dt.planning.cluster import Cluster
from wallfacer_dt.planning.division import Division
from wallfacer_dt.planning.model import ModelShape, SequenceShape
from wallfacer_dt.planning.only import Only
from wallfacer_dt.planning.stack import least_memory, stack_memory

MOST = 2**28
"""Tokens, beyond which nobody looks."""


def length_unit(ranks: int) -> int:
    """Of which lengths are multiples, so that shards are even in every token order."""
    return 2 * ranks


def longest_length(
    model: ModelShape, sequence: SequenceShape, cluster: Cluster, only: Mapping[str, int | str] | None = None
) -> int:
    """Bisect for the longest sequence of which some plan fits, among multiples of :func:`length_unit`.

    Args:
        model: sizes.
        sequence: mask, batch and dtype, of one document; its length does not matter.
        cluster: its ranks, and the memory of one.
        only: values that plans must have, as of :func:`wallfacer_dt.plan`.

    Returns:
        Tokens, at most :data:`MOST`; 0 if not even one unit fits.

    Raises:
        ValueError: the memory of a rank is not known, or there are documents.
    """
    if sequence.documents:
        raise ValueError("documents must be none, of which the longest sequence would have more and more")
    if cluster.memory is None:
        raise ValueError("memory of a rank must be known")
    limit, unit = cluster.memory, length_unit(cluster.ranks)
    most, longest = MOST // unit, 0  # in units
    for candidate in _unlike(model, sequence, cluster, Only.of(only)):

        def peak(units: int, candidate: Candidate = candidate) -> int:
            return stack_memory(candidate, model, replace(sequence, length=units * unit)).peak

        def least(units: int, candidate: Candidate = candidate) -> int:
            division = Division(candidate, microbatch=sequence.batch)
            return least_memory(division, model, replace(sequence, length=units * unit))

        # Most are asked once, and by formula: what does not hold a unit more than another does is no better.
        if longest < most and least(longest + 1) <= limit and peak(longest + 1) <= limit:
            longest = _last(peak, limit, longest + 1, most)
    return longest * unit


def _last(peak: Callable[[int], int], limit: int, low: int, most: int) -> int:
    """The last from ``low``, of which the peak is within the limit, to ``most`` of which it is.

    By doubling, then by bisection, and first where a straight line crosses the limit, as peaks grow nearly straight.
    """
    # Not from the most: a narrow window has too many tiles there.
    high = min(2 * low, most)
    while peak(high) <= limit:
        if high == most:
            return most
        low, high = high, min(2 * high, most)
    while high - low > 1:
        share = (limit - peak(low)) / (peak(high) - peak(low))
        guess = low + int(share * (high - low))
        for units in (guess, guess + 1, (low + high) // 2):
            if low < units < high:
                low, high = (units, high) if peak(units) <= limit else (low, units)
    return low


def _unlike(model: ModelShape, sequence: SequenceShape, cluster: Cluster, asked: Only) -> Iterator[Candidate]:
    """What may differ in memory, likely small ones first: placements do not. In the forward keys and values move, as
    they do in the smallest wherever all were compared, unless it is asked otherwise.
    """
    same: dict[str, Any] = {"placement": "team_in_node", "rotate_forward": "kv"} | dict(asked.attention)
    alike = {replace(one, **same): None for one in attentions(model, sequence, cluster, asked)}
    for attention in alike:
        yield from sorted(with_layers(attention, model, asked), key=_is_large)


def _is_large(candidate: Candidate) -> tuple[bool, bool, bool]:
    return candidate.checkpoint != "full", candidate.feed_forward != "metp", candidate.projections != "metp"
