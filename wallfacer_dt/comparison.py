"""How far numbers are from what they should be: the one way in which tests, recipes and checks compare them.

``max`` of Python drops a NaN that is not first, a NaN is not above any tolerance, and tensors of no elements, of
shapes that broadcast, of a narrower dtype, or of large whole numbers differ by less than they should. Here all of these
are refused.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

Values = Tensor | np.ndarray | Sequence[float]
Relative = Literal["nothing", "largest", "each"]
_TOLD_APART = 2**53  # the whole numbers below it


class IncomparableError(AssertionError):
    """Numbers of which none can be said to be near another: none at all, of other shapes or dtypes, or not finite."""


def worst_error(
    pairs: Iterable[tuple[Values, Values]] | Mapping[str, tuple[Values, Values]], *, relative_to: Relative = "nothing"
) -> float:
    """The largest difference between what was found and what was expected.

    >>> worst_error([([1.0, 2.0], [1.0, 2.5]), ([0.0], [0.25])])
    0.5
    >>> worst_error({"dq": (torch.tensor([1.0, torch.nan]), torch.tensor([1.0, 2.0]))})
    Traceback (most recent call last):
    wallfacer_dt.comparison.IncomparableError: dq: 1 of 2 numbers found are not finite, the first is nan at (1,)

    Args:
        pairs: (found, expected), as tensors or arrays of one shape and dtype each, or as curves of one length; perhaps
            by name.
        relative_to: ``"largest"``: over the largest number expected in the pair; ``"each"``: over the number expected.
            What differs from an expected 0 is infinitely wrong then.

    Returns:
        The difference, computed in float64.

    Raises:
        IncomparableError: there are no pairs, or one has no numbers, other shapes or dtypes, numbers that are not
            finite, or whole ones from 2**53 on.
        TypeError: a DTensor, of which a rank sees a part only; or an unknown ``relative_to``.
    """
    if relative_to not in ("nothing", "largest", "each"):
        raise TypeError(f"relative_to must be 'nothing', 'largest' or 'each', got {relative_to!r}")
    named = dict(pairs) if isinstance(pairs, Mapping) else {f"pair {i}": pair for i, pair in enumerate(pairs)}
    errors = [_error(name, found, expected, relative_to) for name, (found, expected) in named.items()]
    if not errors:
        raise IncomparableError("there is nothing to compare")
    return max(errors)  # all are numbers


def comparable(
    name: str, found: Values, expected: Values, who: tuple[str, str] = ("found", "expected")
) -> tuple[Tensor, Tensor]:
    """Both in float64 on the CPU, for another measure than :func:`worst_error`'s, which refuses as this does.

    >>> comparable("out", [1.0], [1.0, 2.0], ("in the module", "under the style"))
    Traceback (most recent call last):
    wallfacer_dt.comparison.IncomparableError: out has shape (1,) in the module, (2,) under the style
    """
    mine, its = _tensor(name, found), _tensor(name, expected)
    if mine.shape != its.shape:
        raise IncomparableError(f"{name} has shape {tuple(mine.shape)} {who[0]}, {tuple(its.shape)} {who[1]}")
    if mine.dtype != its.dtype:
        raise IncomparableError(f"{name} is {mine.dtype} {who[0]}, {its.dtype} {who[1]}; convert the narrower one")
    if mine.numel() == 0:
        raise IncomparableError(f"{name}: there are no numbers in shape {tuple(mine.shape)}")
    is_whole = not (mine.is_floating_point() or mine.is_complex())
    wide = torch.complex128 if mine.is_complex() else torch.float64
    mine, its = mine.to("cpu", wide), its.to("cpu", wide)
    for whose, values in zip(who, (mine, its), strict=True):
        bad = values.isfinite().logical_not().nonzero()
        if len(bad):
            first = tuple(bad[0].tolist())
            what = f"{len(bad)} of {values.numel()} numbers {whose} are not finite, the first is {values[first].item()}"
            raise IncomparableError(f"{name}: {what} at {first}")
        if is_whole and values.abs().max() >= _TOLD_APART:
            raise IncomparableError(_too_large(name))
    return mine, its


def _error(name: str, found: Values, expected: Values, relative_to: Relative) -> float:
    mine, its = comparable(name, found, expected)
    difference = (mine - its).abs()  # no comparison: this is it
    if relative_to == "nothing":
        return float(difference.max())
    size = its.abs() if relative_to == "each" else its.abs().max()
    relative = torch.where(difference == 0, 0, difference / size)  # a difference from 0 is infinite
    return float(relative.max())


def _tensor(name: str, values: Values) -> Tensor:
    if isinstance(values, DTensor):
        raise TypeError(f"{name}: got a DTensor; compare to_local() with this rank's part, or full_tensor()")
    if isinstance(values, Tensor):
        return values.detach()
    if isinstance(values, np.ndarray | np.generic):
        return torch.from_numpy(np.array(values))  # a copy: it may not be writable
    if any(isinstance(value, int) and abs(value) >= _TOLD_APART for value in values):
        raise IncomparableError(_too_large(name))
    return torch.tensor([float(value) for value in values], dtype=torch.float64, device="cpu")


def _too_large(name: str) -> str:
    return f"{name}: there are whole numbers from 2**53 on, which float64 does not tell apart"


def bytes_of(x: Tensor) -> Tensor:
    """A tensor's bytes, element by element, as uint8 (elements x their size): a view of it, if it is contiguous."""
    x = x.detach().contiguous()
    # A dim of one element is contiguous whatever its stride is, and a view as bytes wants 1.
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)
