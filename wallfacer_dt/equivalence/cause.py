"""The first difference between a module and a style, and what may have caused it, in words."""

from contextlib import suppress
from itertools import permutations
from typing import NamedTuple

import torch
from torch import Tensor

from wallfacer_dt.comparison import IncomparableError, comparable
from wallfacer_dt.equivalence.inputs import Results, Sizes, difference, head_of, tolerance
from wallfacer_dt.equivalence.trial import EquivalenceError, Reference, Trial, copy_of, run

# Fainter probabilities may be lost in a narrow dtype.
_FAINTEST = 1e-6
_EVEN = 1e-5  # logarithms that are as close are equal

_TENSORS = {"out": "the output"} | {f"d{x}": f"the gradient of {x}" for x in "qkv"}


class Row(NamedTuple):
    """With which probabilities (Nkv, kv_length) a query of a head sees the keys, in the module and under the style."""

    query: int
    head: int
    module: Tensor
    style: Tensor

    @property
    def kv_head(self) -> int:
        """Of the style, that of the query's head."""
        return int(self.style.sum(1).argmax())

    @property
    def pair(self) -> tuple[Tensor, Tensor]:
        """Module's and style's probabilities, in float64, of the keys of the query's head."""
        return self.module[self.kv_head].double(), self.style[self.kv_head].double()


def probabilities(queries: tuple[int, ...], ours: Tensor | None, theirs: Tensor | None, sizes: Sizes) -> list[Row]:
    """Rows by query, from what both have seen of the probe; none if there are no gradients."""
    if ours is None or theirs is None:
        return []
    rows = [
        Row(query, head_of(channel, sizes), ours[0, ..., channel], theirs[0, ..., channel])
        for channel, query in enumerate(queries)
        if head_of(channel, sizes) < sizes.heads
    ]
    return sorted(rows, key=lambda row: row.query)


def compare(trial: Trial, reference: Reference, styled: Results) -> None:
    """Refuse (EquivalenceError) results of the module and the style that differ."""
    rtol = tolerance(reference.sizes.computed, trial.mesh.device_type)
    try:
        found = _first_difference(reference, styled, rtol)
    except IncomparableError as why:
        raise EquivalenceError(f"{trial.names}: {why}") from None
    if found:
        cause = _other_call(trial, reference, styled, rtol)
        raise EquivalenceError(f"{trial.names}: {cause or found}")


def _first_difference(reference: Reference, styled: Results, rtol: float) -> str:
    expected = reference.results
    if expected.seen is not None and styled.seen is not None:
        comparable("what queries see", expected.seen, styled.seen)
    rows = probabilities(reference.inputs.queries, expected.seen, styled.seen, reference.sizes)
    found = {}
    for name, what in _TENSORS.items():  # all of them first: of what is not finite nothing else can be said
        ours, theirs = getattr(expected, name), getattr(styled, name)
        if ours is not None and theirs is not None:
            found[name] = difference(what, ours, theirs, rtol)
    if expected.dq is not None and styled.dq is None:
        return "the output has a gradient in the module, but none under the style"
    if seen := _other_heads(rows) or _other_keys(rows):
        return seen
    if found["out"]:
        return f"output at {found['out']}; {_hint(rows, rtol)}"
    for name, where in found.items():
        if where:
            return f"outputs agree, but not {_TENSORS[name]} at {where}; does the module detach something?"
    return ""


def _other_heads(rows: list[Row]) -> str:
    for row in rows:
        theirs = int(row.module.sum(1).argmax())
        if theirs != row.kv_head and row.module.any():
            return (
                f"query head {row.head} attends to key and value head {theirs} in the module, to {row.kv_head} under "
                "the style, where neighbouring query heads share one: is it repeat() instead of repeat_interleave()?"
            )
    return ""


def _other_keys(rows: list[Row]) -> str:
    """The first query that sees other keys, and what may explain it."""
    for row in rows:
        ours, theirs = row.pair
        differs = ((ours != 0) != (theirs != 0)) & (torch.maximum(ours.abs(), theirs.abs()) > _FAINTEST)
        if differs.any():
            key = int(differs.int().argmax())
            there, missing = ("in the module", "under the style") if ours[key] else ("under the style", "in the module")
            bands = [_band([(row.query, row.pair[side]) for row in rows]) for side in (0, 1)]
            hint = f": the module has {bands[0]}, the style {bands[1]}" if all(bands) else ""
            return f"query {row.query} sees key {key} {there} but not {missing}{hint}"
    return ""


def _band(rows: list[tuple[int, Tensor]]) -> str:
    """In words, if the keys that queries see are a band about the diagonal."""
    lefts, rights = set(), set()
    for query, row in rows:
        keys = row.nonzero()[:, 0].tolist()
        if not keys or len(keys) != keys[-1] - keys[0] + 1:
            return ""
        if keys[0] > 0:
            lefts.add(query - keys[0])
        if keys[-1] < len(row) - 1:
            rights.add(keys[-1] - query)
    if len(lefts) > 1 or len(rights) > 1:
        return ""
    left, right = next(iter(lefts), None), next(iter(rights), None)
    if left is None:
        return {None: "no mask", 0: "a causal mask (is_causal=True)"}.get(right, f"window_size=(None, {right})")
    window = f"window_size=({left}, {right})"
    return f"a sliding window of {left + 1}, {window}" if right == 0 else window


_UNLIKE = (
    "the same keys are seen, but with probabilities that do not follow q k^T: is there a bias, or are q and k changed, "
    "as by rotary positions?"
)


def _hint(rows: list[Row], rtol: float) -> str:
    """What may make the module's probabilities p of the style's s: log(p / s) of a row is fitted by a line in log s."""
    fits = [fit for row in rows if (fit := _fit(*row.pair))]
    if not fits:
        return "the same keys are seen, as far as can be told"
    slopes, levels, rests, moved = torch.tensor([fit for fit in fits if fit[-1] > rtol] or fits).unbind(1)
    if moved.max() <= rtol:
        return "probabilities agree, so look at what is done to v or to the output"
    if (rests > 0.3 * moved).float().mean() > 0.5:
        return _UNLIKE
    return _hint_of_slopes(slopes, rtol) or _hint_of_levels(levels, rtol)


def _hint_of_slopes(slopes: Tensor, rtol: float) -> str:
    """What changes scores, if they are changed."""
    low, high = float(slopes.min()), float(slopes.max())
    steepest = max(-low, high)
    if steepest <= rtol / 4:
        return ""
    if high - low < 0.2 * steepest:
        factor = 1 + float(slopes.median())
        if factor < 0.01:  # no scale, but scores of something else
            return _UNLIKE
        return f"the same keys are seen, but scores are {factor:.3g} times the style's: another scale?"
    return "the same keys are seen, but low and high scores count otherwise: is there a soft cap, or a norm of q or k?"


def _hint_of_levels(levels: Tensor, rtol: float) -> str:
    """What changes all probabilities of a query alike."""
    least, most = float(levels.min()), float(levels.max())
    if max(1 - least, most - 1) <= rtol:
        return "the same keys are seen, with slightly other probabilities: is there another scale, or a soft cap?"
    if most - least < 3 * rtol * most:
        return f"probabilities are {most:.3g} times the style's: are v or the output multiplied by it?"
    who = "module" if least < 1 - rtol else "style"
    return (
        f"the same keys are seen, but in the {who} the probabilities of a query add up to less than 1: attention sinks?"
    )


def _fit(ours: Tensor, theirs: Tensor) -> tuple[float, float, float, float] | None:
    """Slope of the line; ratio of the rows' sums; spread about the line; largest change of a logarithm.

    None where too few keys are seen by both to tell.
    """
    both = (ours > _FAINTEST) & (theirs > _FAINTEST)
    if both.sum() < 8:
        return None
    y, x = (ours[both] / theirs[both]).log(), theirs[both].log()
    centred = x - x.mean()
    slope = y.new_zeros(())  # where all are equal but for rounding there is none
    if centred.abs().max() > _EVEN:
        slope = (centred * y).sum() / centred.square().sum()
    rest = (y - y.mean() - slope * centred).square().mean().sqrt()  # no comparison: how straight a line is
    return float(slope), float(ours.sum() / theirs.sum()), float(rest), float(y.abs().max())


def _other_call(trial: Trial, reference: Reference, styled: Results, rtol: float) -> str:
    """Whether the module, called otherwise, gives what the style gives; in words."""
    inputs, layout = reference.inputs, trial.style.layout
    forward = copy_of(trial.module).forward
    other = "BNLH" if layout == "BLNH" else "BLNH"
    # A module without grouped heads may take the other layout's tokens for heads, which it was tried with.
    queries_of_each = inputs.q.shape[1] // inputs.k.shape[1]
    expanded = inputs._replace(**{x: getattr(inputs, x).repeat_interleave(queries_of_each, 1) for x in "kv"})
    words = f"the module's layout is {other!r}, the style was given layout={layout!r}"
    calls = [(words, other, inputs), (words, other, expanded)]
    for order in [p for p in permutations("qkv") if p != ("q", "k", "v")]:
        reordered = inputs._replace(**dict(zip("qkv", (getattr(inputs, x) for x in order), strict=True)))
        words = f"the module takes q, k, v in another order: given ({', '.join(order)}) it agrees"
        calls.append((words, layout, reordered))
    for words, called_in, given in calls:
        with suppress(Exception):  # most modules cannot be called so
            out = run(forward, given, called_in, reference.kwargs, backward=False).out
            if not difference("the output", out, styled.out, 3 * rtol):
                return words
    return ""
